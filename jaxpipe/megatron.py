"""Megatron-Core's helper tables for interleaved 1F1B, for users of Megatron.

A *virtual microbatch* is one (microbatch, chunk) pair; with M microbatches and V chunks a device
runs M * V of them forward, and as many backward.  The functions mirror
`megatron/core/pipeline_parallel/schedules.py` and raise ScheduleError on bad numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from .errors import MAX_PAIRS, Count, Fits, ScheduleError, quoted, typed
from .table.kinds import Action, Kind


class VirtualMicrobatch(NamedTuple):
    """One entry of the schedule table: a microbatch and the chunk that it goes through."""

    microbatch: int
    chunk: int


class WarmupCounts(NamedTuple):
    """How many virtual microbatches a device runs in all, in warmup (before its first backward),
    and in the steady state.
    """

    total: int
    warmup: int
    remaining: int

    @property
    def all_in_warmup(self) -> bool:
        """True where no steady state is left: every forward comes before the first backward."""
        return self.remaining == 0


@typed()
def schedule_table(
    microbatches: Count, chunks: Count, *, group_size: Count
) -> tuple[VirtualMicrobatch, ...]:
    """The (microbatch, chunk) pairs in forward order: a group of microbatches goes through chunk 0,
    1, ..., then the next group.

    The last group is smaller where `group_size` does not divide M.
    Source: Megatron-Core `get_schedule_table` (group_size is its
    microbatch_group_size_per_vp_stage).

    >>> [tuple(pair) for pair in schedule_table(3, 2, group_size=2)]
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """
    if microbatches * chunks > MAX_PAIRS:
        raise ScheduleError(
            f"microbatches={microbatches} and chunks={chunks} make more than {MAX_PAIRS:,} "
            "virtual microbatches"
        )
    return tuple(
        VirtualMicrobatch(microbatch, chunk)
        for start in range(0, microbatches, group_size)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + group_size, microbatches))
    )


@typed()
def warmup_counts(
    microbatches: Count,
    *,
    devices: Count,
    device: int,
    chunks: Count = 1,
    group_size: Count | None = None,
    forward_only: bool = False,
    overlap: bool = False,
) -> WarmupCounts:
    """How many forwards a device runs before its first backward.

    With one chunk P - 1 - d; with several 2 * (P - 1 - d) + (V - 1) * group_size, one more with
    `overlap` (the steady state of overlapped pairs), none on a single device, never more than M *
    V, and all of them with `forward_only`.  `group_size` is P unless given.  Source: Megatron-Core
    `get_pp_rank_microbatches` (overlap is its overlap_moe_expert_parallel_comm).

    >>> tuple(warmup_counts(8, devices=4, device=0, chunks=2))
    (16, 10, 6)
    """
    group_size = devices if group_size is None else group_size
    _require_from_0("device", device, devices - 1)
    total = microbatches * chunks
    if forward_only:
        warmup = total
    elif devices == 1:
        warmup = 0
    elif chunks == 1:
        warmup = devices - 1 - device
    else:
        warmup = 2 * (devices - 1 - device) + (chunks - 1) * group_size + overlap
    warmup = min(warmup, total)
    return WarmupCounts(total, warmup, total - warmup)


@typed()
def execution_order(
    table: Annotated[
        Sequence[tuple[int, int]],
        Fits("pairs of a microbatch and its chunk, as schedule_table returns them"),
    ],
    *,
    chunks: Count,
    warmup: int,
) -> tuple[int, ...]:
    """The order in which a device runs its chunks: +c is a forward of chunk c - 1, -c a backward of
    chunk c - 1.

    `warmup` forwards, then one forward and one backward in turn, then the remaining backwards.
    Backwards go through the chunks from the last to the first.  Source: Megatron-Core
    `convert_schedule_table_to_order`.

    >>> execution_order(schedule_table(2, 2, group_size=2), chunks=2, warmup=3)
    (1, 1, 2, 2, -2, -2, -1, -1)
    """
    wrong = sorted({chunk for _, chunk in table if not 0 <= chunk < chunks})
    if wrong:
        raise ScheduleError(
            f"the table names chunks {quoted(wrong)}, but chunks={chunks} allows only 0 ... "
            f"{chunks - 1}"
        )
    _require_from_0("warmup", warmup, len(table))
    forward = [chunk + 1 for _, chunk in table]
    backward = [chunk - chunks for _, chunk in table]
    steady = [step for pair in zip(forward[warmup:], backward, strict=False) for step in pair]
    cooldown = backward[len(table) - warmup :]
    return (*forward[:warmup], *steady, *cooldown)


@typed()
def order_to_actions(order: Sequence[int], *, devices: Count, device: int) -> tuple[Action, ...]:
    """A device's row of a table from its execution order: chunk c is stage c * P + d, microbatches
    are counted per chunk.

    >>> [str(action) for action in order_to_actions((1, 2, -2, -1), devices=4, device=3)]
    ['3F0', '7F0', '7B0', '3B0']
    """
    _require_from_0("device", device, devices - 1)
    if 0 in order:
        raise ScheduleError(
            "0 is not a step of an order: write 1 for a forward of chunk 0, -1 for its backward"
        )
    seen: Counter[int] = Counter()
    row = []
    for step in order:
        kind = Kind.F if step > 0 else Kind.B
        row.append(Action((abs(step) - 1) * devices + device, kind, seen[step]))
        seen[step] += 1
    return tuple(row)


def _require_from_0(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise ScheduleError(f"{name} must be 0 ... {most}; got {quoted(value)}")
