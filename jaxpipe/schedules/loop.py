"""Schedules of whole backwards on a loop: GPipe, 1F1B, these of several chunks, and 1F1B of
overlapped pairs; and DualPipe and DualPipeV, in which microbatches enter at both ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from ..table.kinds import Action, Cell, Kind, Overlap
from ..table.placement import Placement
from ..table.schedule import Schedule
from ..transforms.rewrites import sliced
from ._orders import (
    actions,
    alternate,
    drop_phantoms,
    groups_of,
    in_groups,
    in_turns,
    schedule_of,
)

# None: a microbatch beyond M, where a table is built for a round number
Slot: TypeAlias = Action | None
_KINDS = Kind.F, Kind.B, Kind.I, Kind.W


def no_pipelining(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """Forward and backward of one microbatch after the other, as plain gradient accumulation does.

    Any P, V, M; stages are placed in a loop.  Only one device works at a time: bubble 1 - 1/P at
    equal costs.  A device holds V activations at its peak.
    """
    placement = Placement.loop(devices=devices, chunks=chunks)
    rows = []
    for stages in placement.stages_of:
        columns = [actions(s, Kind.F, range(microbatches)) for s in stages] + [
            actions(s, Kind.B, range(microbatches)) for s in reversed(stages)
        ]
        rows.append(alternate(*columns))
    return schedule_of(rows, placement, microbatches)


def gpipe(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019, figure 2c).

    Any P and M, one chunk.  Makespan (M + P - 1)(F + B), so the bubble is (P - 1) / (M + P - 1);
    every device holds M activations at its peak.
    """
    return looped_bfs(devices=devices, microbatches=microbatches, chunks=chunks)


def one_f_one_b(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """One forward, one backward in the steady state (PipeDream-flush, Narayanan et al. 2021, figure
    4 top).

    Any P and M, one chunk.  Makespan (M + P - 1)(F + B), so the bubble is (P - 1) / (M + P - 1);
    device d holds min(P - d, M) activations at its peak.
    """
    return interleaved_1f1b(devices=devices, microbatches=microbatches, chunks=chunks, lean=True)


def interleaved_1f1b(
    *,
    devices: int,
    microbatches: int,
    chunks: int,
    slices: int = 1,
    group_size: int | None = None,
    lean: bool = False,
) -> Schedule:
    """1F1B over V chunks per device (Narayanan et al. 2021, section 2.2 and figure 4 bottom;
    Megatron-Core).

    Any P, V and M.  Microbatches go through the chunks in groups: of `group_size` and a remainder,
    as in Megatron-Core (microbatch_group_size_per_vp_stage), or else in groups of at least P that
    are as equal as M allows.

    Makespan (V M + P - 1)(F + B) in costs of a chunk for M >= P, so the bubble is (P - 1) / (V M +
    P - 1), except where a given `group_size` leaves a remainder shorter than P.  With G the longest
    group, device d holds min(V M, (V - 1) G + 2 (P - 1 - d) + 1) activations at its peak.

    Megatron's warmup of two forwards per hop leaves time for transfers.  Where transfers take no
    time, one per hop is enough: `lean=True` keeps the makespan and holds min(V M, (V - 1) G + P -
    d).

    With K slices a sequence, P or more, a group is a sequence, and its backwards begin with its
    last slice (SlimPipe, Li et al. 2025).  The makespan is the same, and device d holds min(V M, V
    K + 2 (P - 1 - d)) activations of slices: little more than one sequence.
    """
    whole = slices >= max(devices, 2) and group_size is None
    if slices > 1 and not whole:
        more = microbatches + slices - 1
        shape = {"devices": devices, "microbatches": more, "chunks": chunks}
        return sliced(interleaved_1f1b(**shape, group_size=group_size, lean=lean), slices)
    groups = groups_of(group_size, devices=devices, microbatches=microbatches)
    if whole:
        groups = (slices,) * (microbatches // slices)
    ahead = (chunks - 1) * max(groups) + (slices - 1)
    hop = 1 if lean else 2
    placement = Placement.loop(devices=devices, chunks=chunks)
    rows = [
        in_turns(ahead + hop * (devices - 1 - device), *passes)
        for device, passes in enumerate(_passes(placement, groups, reverse=whole))
    ]
    table = schedule_of(drop_phantoms(rows, microbatches), placement, microbatches)
    return replace(table, slices=slices)


def looped_bfs(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """All microbatches through a chunk before the next chunk (Breadth-First Pipeline Parallelism,
    Lamy-Poirier 2023).

    Any P, V and M.  Makespan (V M + P - 1)(F + B) in costs of a chunk for M >= P, so the bubble is
    (P - 1) / (V M + P - 1); every device holds V M activations at its peak.  The advantage is that
    a chunk's parameters are needed, and its gradients completed, in one contiguous run each, which
    suits sharded data parallelism.
    """
    placement = Placement.loop(devices=devices, chunks=chunks)
    rows = [forward + backward for forward, backward in _passes(placement, (microbatches,))]
    return schedule_of(rows, placement, microbatches)


def one_f_one_b_overlap(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B whose steady state is overlapped pairs (those of DualPipe, DeepSeek-V3, section 3.2.1,
    in one direction).

    Any P and M, one chunk.  A pair's forward result leaves only when its backward is done too, so
    two forwards per hop, and one more microbatch, are needed to keep all devices busy: device d
    warms up with 2 (P - 1 - d) + 1 and holds min(M, 2 (P - d)) activations at its peak.  With X the
    cost of a pair (not less than either half's), the makespan is P (F + B) + (M - 1) X for M >= P.
    """
    return interleaved_1f1b_overlap(devices=devices, microbatches=microbatches, chunks=chunks)


def interleaved_1f1b_overlap(
    *, devices: int, microbatches: int, chunks: int, group_size: int | None = None
) -> Schedule:
    """Interleaved 1F1B whose steady state is overlapped pairs (Megatron-Core's overlap of
    expert-parallel communication).

    Any P, V and M; groups of microbatches as in interleaved_1f1b.  The warmup is one microbatch
    longer, so that a pair never holds the forward and the backward of the same microbatch: with G
    the longest group, device d holds min(V M, (V - 1) G + 2 (P - d)) activations at its peak.  With
    X the cost of a pair (not less than either half's), the makespan is (P + (V - 1) G)(F + B) + (V
    M - (V - 1) G - 1) X in costs of a chunk for M >= P.
    """
    groups = groups_of(group_size, devices=devices, microbatches=microbatches)
    placement = Placement.loop(devices=devices, chunks=chunks)
    rows: list[list[Cell]] = []
    for device, (forward, backward) in enumerate(_passes(placement, groups)):
        ahead = min(len(forward), (chunks - 1) * max(groups) + 2 * (devices - 1 - device) + 1)
        steady = map(Overlap, forward[ahead:], backward[: len(backward) - ahead])
        rows.append([*forward[:ahead], *steady, *backward[len(backward) - ahead :]])
    return schedule_of(drop_phantoms(rows, microbatches), placement, microbatches)


def _passes(
    placement: Placement, groups: Sequence[int], *, reverse: bool = False
) -> Iterator[tuple[list[Action], list[Action]]]:
    """Each device's forwards and backwards, by groups of microbatches."""
    for stages in placement.stages_of:
        yield (
            in_groups(stages, Kind.F, groups),
            in_groups(stages[::-1], Kind.B, groups, reverse=reverse),
        )


def dualpipe(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """Two pipelines in opposite directions, forwards overlapping backwards (DualPipe, DeepSeek-V3
    2024, section 3.2.1, figure 5).

    Even P and any M; stage s is on devices s and P - 1 - s.  The first ceil(M / 2) microbatches
    enter at device 0, the others at device P - 1.  With X the cost of an overlapped pair, and B = I
    + W, each device is idle for (P / 2 - 1)(X + B - 3 W) of a step with an even M >= 2 P, where F,
    I and W cost the same.  Every device holds at most P + 1 activations, and two stages'
    parameters.
    """
    near = (microbatches + 1) // 2
    rows = []
    for device in range(devices):
        # The lane that enters at this device's own end comes first.
        lanes = [(device, range(near)), (devices - 1 - device, range(near, microbatches))]
        own, other = lanes if device < devices // 2 else lanes[::-1]
        rank = min(device, devices - 1 - device)
        rows.append(_row(own, other, rank, devices // 2, max(near, devices)))
    placement = Placement.bidirectional(devices=devices)
    return schedule_of(rows, placement, microbatches)


def dualpipev(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """DualPipe folded at its middle into a V ("cut in half", Sea AI Lab 2025; torch's
    ScheduleDualPipeV).

    Any P and M, two chunks, each stage on one device.  With X the cost of an overlapped pair, and B
    = I + W, each device is idle for (P - 1)(X + B - 3 W) in costs of a chunk of a step with M >= 2
    P, where F, I and W cost the same.  Every device holds at most 2 P + 1 activations (of half a
    device's layers each).
    """
    every = range(microbatches)
    padded = max(microbatches, 2 * devices)
    rows = [
        _row((d, every), (2 * devices - 1 - d, every), d, devices, padded) for d in range(devices)
    ]
    return schedule_of(rows, Placement.vee(devices=devices), microbatches)


class _Lane(NamedTuple):
    """The actions of one stage, one slot per microbatch of its pipeline."""

    f: list[Slot]
    b: list[Slot]
    i: list[Slot]
    w: list[Slot]

    @classmethod
    def of(cls, stage: int, microbatches: range, total: int, *, late: bool) -> _Lane:
        phantoms: list[Slot] = [None] * (total - len(microbatches))
        before, after = (phantoms, []) if late else ([], phantoms)
        return cls(
            *(
                [*before, *actions(stage, kind, microbatches), *after]
                for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            )
        )


def _row(
    own: tuple[int, range], other: tuple[int, range], rank: int, half: int, total: int
) -> list[Cell]:
    """One device's row: `rank` counts devices from the end where `own` enters, `half` is how many
    there are up to the turn.

    Both lanes have `total` >= 2 `half` slots.  The steps are numbered as in the published code.
    """
    # A small number of microbatches takes the last places, whose backwards are split; a larger one
    # the first places.
    late = max(len(own[1]), len(other[1])) <= half
    near, far = _Lane.of(*own, total, late=late), _Lane.of(*other, total, late=late)
    inner = half - rank - 1
    row: list[Cell] = []
    # Warmup.  Steps 1 and 2: forwards, first of the own lane, then of both.
    row += near.f[: 2 * inner]
    row += _interleaved(near.f[2 * inner : 2 * inner + rank + 1], far.f[: rank + 1])
    # Step 3: the other lane's first backwards, split, with a forward each.
    row += _interleaved(far.i[:inner], far.w[:inner], far.f[rank + 1 : half])
    # Steady.  Step 4: pairs of one lane's forward and the other's backward.
    turns = total - 2 * half + rank + 1
    down = _pairs(
        near.f[2 * inner + rank + 1 :], far.b[inner : inner + turns], skip_first=inner == 0
    )
    up = _pairs(far.f[half:], near.b[: turns + inner], skip_first=False)
    for pair, back in zip(down, up, strict=False):
        row += [*pair, *back]
    # Cooldown.  Step 5: the own lane has no forwards left.
    for b, pair in zip(far.b[inner + turns : 2 * inner + turns], up[turns:], strict=True):
        row += [b, *pair]
    # Steps 6 to 8: backwards of both lanes, split from the middle on; each W fills a wait at the
    # end.
    whole = rank + 1
    ends = _interleaved(far.b[2 * inner + turns :], near.b[turns + inner :][:whole])
    split = _interleaved(far.i[2 * inner + turns :], near.i[turns + inner :][:whole])
    weights = (
        _interleaved(far.w[2 * inner + turns :], near.w[turns + inner :][:whole])[whole:]
        + near.w[total - inner :]
    )
    row += [*ends[:whole], *split[whole:]]
    row += _interleaved(weights[:inner], near.i[total - inner :])
    row += weights[inner:]
    return [cell for cell in row if cell is not None]


def _interleaved(*columns: list[Slot]) -> list[Slot]:
    """The first slot of every column, the second of every column, ..."""
    return [slot for turn in zip(*columns, strict=True) for slot in turn]


def _pairs(forward: list[Slot], backward: list[Slot], *, skip_first: bool) -> list[list[Cell]]:
    """Overlapped pairs; where a half is a phantom, the other half alone; the first may stay two
    actions.
    """
    out: list[list[Cell]] = []
    for f, b in zip(forward, backward, strict=True):
        separate = skip_first and not out
        out.append([f, b] if separate or f is None or b is None else [Overlap(f, b)])
    return out
