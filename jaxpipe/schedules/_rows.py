"""Building blocks of the schedule generators: lists of actions, and ways to combine them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from typing import Any, TypeVar

from ..errors import ScheduleError
from ..table.kinds import Action, Cell, Kind, Overlap
from ..table.placement import Placement
from ..table.schedule import Schedule

C = TypeVar("C", bound=Action | Overlap | None)


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


def alternate(*columns: Sequence[C]) -> list[C]:
    """The first of every column, the second of every column, ...: the steady state of
    a schedule.
    """
    out: list[Any] = [None] * sum(map(len, columns))
    for place, column in enumerate(columns):
        out[place :: len(columns)] = column
    return out


def in_turns(forward: Sequence[C], backward: Sequence[C], ahead: int) -> list[C]:
    """A warmup of `ahead` forwards, then one forward and one backward in turn, then the remaining
    backwards.
    """
    ahead = min(ahead, len(forward))
    turns = len(backward) - ahead
    return [*forward[:ahead], *alternate(forward[ahead:], backward[:turns]), *backward[turns:]]


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
