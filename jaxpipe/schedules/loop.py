"""Rows of actions that schedules are made of; and the schedules of whole backwards: GPipe, 1F1B and
these of several chunks on a loop, 1F1B of overlapped pairs, DualPipe and DualPipeV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count, zip_longest
from typing import NamedTuple

from ..errors import ScheduleError
from ..table.kinds import KINDS, Action, Cell, Kind, Overlap, Pass, parts
from ..table.placement import Placement
from ..table.schedule import Schedule


def schedule_of(
    rows: Iterable[Iterable[Cell]], placement: Placement, microbatches: int
) -> Schedule:
    """A schedule, which `build` names."""
    return Schedule.from_rows(rows, placement=placement, num_microbatches=microbatches)


def sliced(schedule: Schedule, slices: int) -> Schedule:
    """The table whose M microbatches are slices of sequences, made of one for M + slices - 1
    microbatches (Seq1F1B, Sun et al. 2024, section 3.2).

    On every stage of the given table, forwards and backwards run in the order of microbatches.
    Backward n becomes that of microbatch n - (slices - 1), and the order within each sequence is
    reversed; forwards from M on are left out, and so are the first slices - 1 backwards.  By then
    all forwards that a backward needs have run, so the table cannot deadlock where the given one
    cannot.  A device holds at most slices - 1 activations more for each of its stages.

    >>> from jaxpipe import schedules
    >>> print(sliced(schedules.build("1f1b", devices=1, microbatches=5), 2))
             | 0     1     2     3     4     5     6     7
    device 0 | 0F0.0 0F0.1 0B0.1 0F1.0 0B0.0 0F1.1 0B1.1 0B1.0
    """
    if slices == 1:
        return schedule
    count = schedule.num_microbatches - (slices - 1)
    rows = [
        [cell for cell in (_renamed(c, count, slices) for c in row) if cell is not None]
        for row in schedule.rows
    ]
    return replace(schedule.with_rows(rows), num_microbatches=count, slices=slices)


def _renamed(cell: Cell, count: int, slices: int) -> Cell:
    """The cell for slices; None where nothing of it is left."""
    left = []
    for stage, kind, number in parts(cell):
        if KINDS[kind].direction is Pass.BACKWARD:
            place = number - (slices - 1)
            number = place - place % slices + slices - 1 - place % slices
            left += [Action(stage, kind, number)] if place >= 0 else []
        else:
            left += [Action(stage, kind, number)] if number < count else []
    return Overlap(*left) if len(left) == 2 else left[0] if left else None


def in_groups(kind: str, groups: Sequence[int], chunks: int) -> list[str]:
    """Group after group of microbatches, each group through all chunks: Megatron's schedule table;
    forwards from the first chunk on, others from the last.

    >>> in_groups("F", [2, 1], 2)
    ['F0', 'F0', 'F1', 'F1', 'F0', 'F1']
    """
    names = [f"{kind}{chunk}" for chunk in range(chunks)][:: 1 if kind == "F" else -1]
    return [name for size in groups for name in names for _ in range(size)]


def even_groups(devices: int, microbatches: int) -> tuple[int, ...]:
    """Cut M into as many groups of at least P as possible, as equal as possible; one group where M
    < P.

    In a group shorter than P the devices would wait for its first microbatch to come back for the
    next chunk, and the warmup grows with the longest group, so equal groups need the fewest
    activations.

    >>> even_groups(4, 11), even_groups(4, 3)
    ((6, 5), (3,))
    """
    rounds = max(1, microbatches // devices)
    size, longer = divmod(microbatches, rounds)
    return (size + 1,) * longer + (size,) * (rounds - longer)


def groups_of(group_size: int | None, *, devices: int, microbatches: int) -> tuple[int, ...]:
    """The microbatch groups of an interleaved schedule: Megatron's for a given size, else even
    ones.

    Megatron cuts M into groups of `group_size` and a remainder.  A remainder shorter than P is
    rounded up to P; the caller drops the extra microbatches.  ScheduleError for a size below P
    (unless one group holds all of M).
    """
    if group_size is None:
        return even_groups(devices, microbatches)
    smallest = min(devices, microbatches)
    if group_size < smallest:
        raise ScheduleError(
            f"group_size={group_size} is less than {smallest}: the first microbatch of a group "
            "would not be back for its next chunk "
            "when the group ends, and devices would wait for each other; write "
            f"group_size={smallest} or more"
        )
    whole, rest = divmod(microbatches, group_size)
    if not whole:
        return (rest,)
    return (group_size,) * whole + ((max(rest, devices),) if rest else ())


def alternate(*columns: Sequence[str | None]) -> list[str]:
    """The first of every column, the second of every column, ...: the steady state of
    a schedule.  A column may be shorter, or have None, where a turn lacks its action.
    """
    return [cell for turn in zip_longest(*columns) for cell in turn if cell is not None]


def in_turns(ahead: int, forward: Sequence[str], *backward: Sequence[str | None]) -> list[str]:
    """A warmup of `ahead` forwards, then one forward and one action of each further column in
    turn.
    """
    return [*forward[:ahead], *alternate(forward[ahead:], *backward)]


class Lane(NamedTuple):
    """A stage, its microbatches, and the number of its first action: where a table is made for a
    round number of them, actions of others are left out.

    Microbatches never depend on each other, so a valid table stays valid, and needs no more memory
    or time, without some of them.
    """

    stage: int
    microbatches: range
    first: int = 0


def numbered(texts: Iterable[str], lanes: Sequence[Lane], *, slices: int = 1) -> list[Cell]:
    """A row of actions, each as its kind and lane, such as F0, and of overlapped pairs, such as
    F0+B1; they are numbered per lane and kind, where B counts as I and as W.  The backwards of so
    many slices, a sequence, are in reverse order.

    >>> lanes = Lane(0, range(2)), Lane(3, range(2))
    >>> [str(cell) for cell in numbered(["F0", "F1", "F0+B1", "I1"], lanes)]
    ['0F0', '3F0', '(0F1;3B0)OVERLAP_F_B', '3I1']
    """
    coming = {
        f"{kind}{number}": count(lane.first) for number, lane in enumerate(lanes) for kind in "FIW"
    }

    def read(half: str) -> tuple[Kind, Lane, int, list[count[int]]]:
        """Its kind and lane, how many microbatches turn round, and what it takes a number of."""
        kind, lane = half[0], half[1:]
        counts = [coming[each + lane] for each in ("WI" if kind == "B" else kind)]
        return Kind[kind], lanes[int(lane)], 1 if kind == "F" else slices, counts

    texts = list(texts)
    halves = {text: [*map(read, text.split("+"))] for text in set(texts)}
    row: list[Cell] = []
    for text in texts:
        cell = []
        for kind, (stage, microbatches, _), turn, counts in halves[text]:
            for each in counts:
                microbatch = next(each)
            microbatch += turn - 1 - 2 * (microbatch % turn)
            if microbatch in microbatches:
                cell.append(Action(stage, kind, microbatch))
        row += [Overlap(*cell)] if len(cell) == 2 else cell
    return row


def in_chunks(
    rows: Iterable[Iterable[str]], placement: Placement, microbatches: int, *, slices: int = 1
) -> Schedule:
    """A schedule from a row of actions for each device, by their kinds and chunks."""
    every = range(microbatches)
    return schedule_of(
        (
            numbered(texts, [Lane(stage, every) for stage in stages], slices=slices)
            for texts, stages in zip(rows, placement.stages_of, strict=True)
        ),
        placement,
        microbatches,
    )


def no_pipelining(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """Forward and backward of one microbatch after the other, as plain gradient accumulation does.

    Any P, V, M; stages are placed in a loop.  Only one device works at a time: bubble 1 - 1/P at
    equal costs.  A device holds V activations at its peak.
    """
    one = [*in_groups("F", (1,), chunks), *in_groups("B", (1,), chunks)]
    placement = Placement.loop(devices=devices, chunks=chunks)
    return in_chunks([one * microbatches] * devices, placement, microbatches)


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
    passes = [in_groups(kind, groups, chunks) for kind in "FB"]
    rows = (in_turns(ahead + hop * (devices - 1 - d), *passes) for d in range(devices))
    placement = Placement.loop(devices=devices, chunks=chunks)
    table = in_chunks(rows, placement, microbatches, slices=slices)
    return table if slices == 1 else replace(table, slices=slices)


def looped_bfs(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """All microbatches through a chunk before the next chunk (Breadth-First Pipeline Parallelism,
    Lamy-Poirier 2023).

    Any P, V and M.  Makespan (V M + P - 1)(F + B) in costs of a chunk for M >= P, so the bubble is
    (P - 1) / (V M + P - 1); every device holds V M activations at its peak.  The advantage is that
    a chunk's parameters are needed, and its gradients completed, in one contiguous run each, which
    suits sharded data parallelism.
    """
    row = [text for kind in "FB" for text in in_groups(kind, (microbatches,), chunks)]
    placement = Placement.loop(devices=devices, chunks=chunks)
    return in_chunks([row] * devices, placement, microbatches)


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
    forward, backward = (in_groups(kind, groups, chunks) for kind in "FB")
    rows = []
    for device in range(devices):
        ahead = min(len(forward), (chunks - 1) * max(groups) + 2 * (devices - 1 - device) + 1)
        pairs = [f"{f}+{b}" for f, b in zip(forward[ahead:], backward, strict=False)]
        rows.append([*forward[:ahead], *pairs, *backward[len(pairs) :]])
    return in_chunks(rows, Placement.loop(devices=devices, chunks=chunks), microbatches)


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
        lanes = [
            Lane(device, range(near)),
            Lane(devices - 1 - device, range(near, microbatches), near),
        ]
        # The lane that enters at this device's own end comes first.
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
        _row(Lane(d, every), Lane(2 * devices - 1 - d, every), d, devices, padded)
        for d in range(devices)
    ]
    return schedule_of(rows, Placement.vee(devices=devices), microbatches)


def _row(near: Lane, far: Lane, rank: int, half: int, total: int) -> list[Cell]:
    """One device's row of `total` >= 2 `half` microbatches each way: `rank` counts devices from the
    end where those of `near` enter, `half` is how many there are up to the turn.

    The steps are numbered as in the published code; of the lanes, 0 is `near` and 1 is `far`.
    """
    # A small number of microbatches takes the last places, whose backwards are split; a larger one
    # the first places.
    if max(len(near.microbatches), len(far.microbatches)) <= half:
        near, far = (lane._replace(first=lane.microbatches.stop - total) for lane in (near, far))
    whole, inner = rank + 1, half - rank - 1
    turns = total - 2 * half + whole
    steady = ["F0+B1", "F1+B0"] * turns
    # Steps 6 to 8: backwards of both lanes, split from the middle on; each W fills a wait at the
    # end.
    ends = "10" * whole
    weights = ["W" + lane for lane in ends[whole:] + "0" * inner]
    return numbered(
        [
            # Warmup.  Steps 1 and 2: forwards, first of the own lane, then of both.
            *["F0"] * (2 * inner),
            *["F0", "F1"] * whole,
            # Step 3: the other lane's first backwards, split, with a forward each.
            *["I1", "W1", "F1"] * inner,
            # Steady.  Step 4: pairs of one lane's forward and the other's backward.  The device at
            # the turn has just run the first forward's microbatch.
            *(steady if inner else ["F0", "B1", *steady[1:]]),
            # Cooldown.  Step 5: the own lane has no forwards left.
            *["B1", "F1+B0"] * inner,
            *["B" + lane for lane in ends[:whole]],
            *["I" + lane for lane in ends[whole:]],
            *alternate(weights[:inner], ["I0"] * inner),
            *weights[inner:],
        ],
        (near, far),
    )
