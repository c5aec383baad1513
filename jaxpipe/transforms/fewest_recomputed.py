"""Which forwards are computed again where a device has room for some activations only:
the fewest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from ..table.action import Action, Cell, parts
from ..table.kinds import Kind
from ..table.schedule import Schedule

_USES, _RELEASES = (Kind.B, Kind.I), (Kind.B, Kind.W)
_Pass: TypeAlias = tuple[int, int]  # (stage, microbatch)


def fewest_recomputed(
    schedule: Schedule,
    stages: Collection[int],
    max_activations: int,
    *,
    again: Collection[Action] = (),
) -> frozenset[Action]:
    """The R, of these stages, without which a device would hold more activations than that; those
    in `again` are there anyway.

    From its B or I on, until it is released, every activation is held; before that it is where its
    forward keeps it.  Where there are too many, the one whose backward comes last of all makes
    room, as a page does that is read again last (Belady 1966): no choice takes fewer R.  Where W
    come so late that what is held from I on is too much by itself, more than `max_activations`
    stay.

    >>> import jaxpipe as jp
    >>> schedule = jp.schedules.build("1f1b", devices=4, microbatches=8)
    >>> sorted(str(action) for action in fewest_recomputed(schedule, range(4), 3))
    ['0R3', '0R6']
    """
    given = {action[::2] for action in again}
    found = (
        number
        for row in schedule.rows
        for number in _of_row(row, set(stages), max_activations, given)
    )
    return frozenset(Action(stage, Kind.R, microbatch) for stage, microbatch in found)


def _of_row(
    row: Sequence[Cell], stages: Collection[int], most: int, given: Collection[_Pass]
) -> Iterator[_Pass]:
    used, released = _last(row, _USES), _last(row, _RELEASES)
    held: set[_Pass] = set()
    for now, cell in enumerate(row):
        acts = [action for action in parts(cell) if action.kind in (Kind.F, *_USES, Kind.W)]
        # The backward of a recomputed one finds it not held.
        held.update(a[::2] for a in acts if a.kind is not Kind.F or a[::2] not in given)
        while len(held) > most:
            waiting = [each for each in held if used[each] > now and each[0] in stages]
            if not waiting:
                break
            latest = max(waiting, key=lambda each: used[each])
            held.remove(latest)
            yield latest
        held -= {a[::2] for a in acts if released[a[::2]] == now}


def _last(row: Sequence[Cell], kinds: Collection[Kind]) -> dict[_Pass, int]:
    """The last cell of a row that has one of these kinds of a stage and microbatch."""
    return {
        action[::2]: at
        for at, cell in enumerate(row)
        for action in parts(cell)
        if action.kind in kinds
    }
