"""What the named schedules are made of: rows of actions, ways to combine them, and waves, the
reference orders of list scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise, repeat, zip_longest
from typing import NamedTuple, TypeAlias, TypeVar

from ..engine.costs import StageCosts
from ..errors import ScheduleError
from ..table.kinds import Action, Cell, Kind, Overlap
from ..table.placement import Placement
from ..table.schedule import Schedule

C = TypeVar("C", bound=Action | Overlap)
Order: TypeAlias = list[list[Action]]
# microbatches -> the reference order of F and I of each device
OrderMaker: TypeAlias = Callable[[int], Order]
F, I = Kind.F, Kind.I  # noqa: E741


def schedule_of(
    rows: Iterable[Iterable[Cell]], placement: Placement, microbatches: int
) -> Schedule:
    """A schedule, which `build` names."""
    return Schedule.from_rows(rows, placement=placement, num_microbatches=microbatches)


def actions(stage: int, kind: Kind, microbatches: Iterable[int]) -> list[Action]:
    """One action of a stage for each microbatch, in order."""
    # Half a million of them are made for a large job, and calling Action would take twice as long.
    return list(map(tuple.__new__, repeat(Action), zip(repeat(stage), repeat(kind), microbatches)))


def in_groups(
    stages: Sequence[int], kind: Kind, groups: Sequence[int], *, reverse: bool = False
) -> list[Action]:
    """Group after group of microbatches, each group through all stages: Megatron's schedule table.
    With `reverse` the microbatches of a group are in reverse order.

    >>> [str(a) for a in in_groups([0, 2], Kind.F, [2, 1])]
    ['0F0', '0F1', '2F0', '2F1', '0F2', '2F2']
    """
    ends = list(accumulate(groups))
    spans = [
        range(end - size, end)[:: -1 if reverse else 1]
        for size, end in zip(groups, ends, strict=True)
    ]
    return [action for span in spans for stage in stages for action in actions(stage, kind, span)]


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


def alternate(*columns: Sequence[C | None]) -> list[C]:
    """The first of every column, the second of every column, ...: the steady state of
    a schedule.  A column may be shorter, or have None, where a turn lacks its action.
    """
    return [cell for turn in zip_longest(*columns) for cell in turn if cell is not None]


def in_turns(ahead: int, forward: Sequence[C], *backward: Sequence[C | None]) -> list[C]:
    """A warmup of `ahead` forwards, then one forward and one action of each further column in
    turn.
    """
    return [*forward[:ahead], *alternate(forward[ahead:], *backward)]


def drop_phantoms(rows: Iterable[Iterable[Cell]], microbatches: int) -> list[list[Cell]]:
    """The rows without microbatches >= M; of an overlapped pair, the half that is left.

    Microbatches never depend on each other, so a valid table stays valid, and needs no more memory
    or time, when some are removed.  Generators that need a round number of microbatches build a
    table of that many, then drop the extra ones.
    """
    return [
        [cell for cell in (_kept(c, microbatches) for c in row) if cell is not None] for row in rows
    ]


def _kept(cell: Cell, microbatches: int) -> Cell:
    if not isinstance(cell, Overlap):
        return cell if cell is not None and cell.microbatch < microbatches else None
    left = [half for half in cell if half.microbatch < microbatches]
    return cell if len(left) == 2 else left[0] if left else None


class Wave(NamedTuple):
    """The pace of a wave, in units of the time of an action.

    Args:
        out: time of a hop to another device, in chunks 0, 2, ... (of backwards: the last chunk,
            ...).
        back: the same for the other chunks, which in a V lead back to device 0.
        pause: time between the last stage's F and its I.
        period: time from one microbatch to the next.
    """

    out: float
    back: float
    pause: float
    period: float


def wave_order(placement: Placement, wave: Wave, microbatches: int) -> Order:
    """Each device's F and I in the order in which the wave reaches them."""
    last = placement.num_stages - 1
    times = []
    for (kind, stage), (_, following) in pairwise(path_of(placement)):
        chunk = (stage if kind is F else last - stage) // placement.num_devices
        if stage == following:
            times.append(1 + wave.pause)
        elif placement.devices_of[following] == placement.devices_of[stage]:
            times.append(1.0)
        else:
            times.append(wave.back if chunk % 2 else wave.out)
    return repeated(placement, [0.0, *accumulate(times)], wave.period, microbatches)


def repeated(
    placement: Placement, starts: Sequence[float], period: float, microbatches: int
) -> Order:
    """Each device's F and I in the order in which microbatches reach them, one every period; of
    the first one, `starts` has the time at each place of its path.
    """
    path = path_of(placement)
    timed: list[list[tuple[float, int, int]]] = [[] for _ in range(placement.num_devices)]
    for place, ((_, stage), start) in enumerate(zip(path, starts, strict=True)):
        timed[placement.devices_of[stage][0]] += [
            (start + m * period, place, m) for m in range(microbatches)
        ]
    # Equal times are settled by the place on the path, so that no action comes before one that it
    # needs.
    return [
        [Action(path[place][1], path[place][0], m) for _, place, m in sorted(row)] for row in timed
    ]


def path_of(placement: Placement) -> list[tuple[Kind, int]]:
    """A microbatch's path through all stages and back."""
    stages = range(placement.num_stages)
    return [(F, s) for s in stages] + [(I, s) for s in reversed(stages)]


# Of the period with which lives fill the cap, the shortest and the longest that are tried, and how
# many there are.
_DENSEST, _SPARSEST, _DENSITIES = 0.7, 1.4, 20


def even_waves(placement: Placement, costs: StageCosts, cap: int) -> Iterator[OrderMaker]:
    """Waves of many densities in which all forwards take the same time, and all backwards; at last
    one microbatch after the other, which keeps any cap.

    A backward takes as long as a forward, or the geometric mean of that and its own time.  With
    like times, microbatches meet in a like order on every device and wait less, and a tight cap is
    kept with a shorter period.
    """
    ratio = sum(costs.input_grad) / (sum(costs.forward) or 1)
    path = path_of(placement)
    for pace in sorted({1.0, ratio**0.5}):
        *starts, end = accumulate((1.0 if kind is F else pace for kind, _ in path), initial=0.0)
        lives = [[*starts, end][-1 - s] - starts[s] for s in range(placement.num_stages)]
        dense = max(sum(lives[s] for s in stages) for stages in placement.stages_of) / cap
        for step in range(_DENSITIES):
            factor = _DENSEST + (_SPARSEST - _DENSEST) * step / (_DENSITIES - 1)
            yield partial(repeated, placement, starts, dense * factor)
    yield partial(repeated, placement, starts, end)
