"""E and G of a table with L moved to where an L is: what all devices do at once comes in equal
sets, at the rhythm of L.

Meetings that come one by one are code of their own in the program, or under predicates.  An E may
be done sooner, and a G later: each keeps one hidden state for longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..table.action import Action, Cell, Kind, parts
from ..table.kinds import TOGETHER
from ..table.schedule import Schedule

# So many of what the first stage needs, or has made, may wait, and one more for two devices each:
# bursts of interleaved tables need it.
_MOST_WAITING = {Kind.E: 1, Kind.G: 2}
_ORDER = (Kind.L, Kind.E, Kind.G)


@dataclass
class _Group:
    """Meetings without any work between them, and the work of each device before them."""

    work: list[list[Cell]]
    microbatches: dict[Kind, list[int]] = field(
        default_factory=lambda: {kind: [] for kind in _ORDER}
    )

    def made(self, kinds: Sequence[Kind]) -> int:
        """How many of the first stage's actions of these kinds are in the work."""
        return sum(
            a.stage == 0 and a.kind in kinds
            for row in self.work
            for cell in row
            if cell is not None
            for a in parts(cell)
        )


def align_shares(schedule: Schedule) -> Schedule:
    """The table with E and G that have meetings of their own moved to an L, those of the L between
    making room, while few wait.

    Within a meeting L come first, then E, then G.  No row changes the order of anything else.
    """
    groups, rest = _groups(schedule)
    _move(groups, Kind.E, _waiting_inputs(groups))
    _move(groups[::-1], Kind.G, _waiting_gradients(groups)[::-1])
    rows: list[list[Cell]] = [[] for _ in schedule.rows]
    for group in groups:
        for device, row in enumerate(rows):
            row += group.work[device]
            row += [Action(device, kind, m) for kind in _ORDER for m in group.microbatches[kind]]
    return schedule.with_rows([row + last for row, last in zip(rows, rest, strict=True)])


def _groups(schedule: Schedule) -> tuple[list[_Group], list[list[Cell]]]:
    """The groups in order, and the work after the last."""
    work: list[list[list[Cell]]] = []
    for row in schedule.rows:
        work.append([[]])
        for cell in row:
            if isinstance(cell, Action) and cell.kind in TOGETHER:
                work[-1].append([])
            else:
                work[-1][-1].append(cell)
    meetings = [
        cell for cell in schedule.rows[0] if isinstance(cell, Action) and cell.kind in TOGETHER
    ]
    *before, rest = ([list(cells) for cells in each] for each in zip(*work, strict=True))
    groups: list[_Group] = []
    for cells, meeting in zip(before, meetings, strict=True):
        if not groups or any(cells):
            groups.append(_Group(cells))
        groups[-1].microbatches[meeting.kind].append(meeting.microbatch)
    return groups, rest


def _waiting_inputs(groups: Sequence[_Group]) -> list[int]:
    """After each group, how many E are done for an F to come."""
    found, waiting = [], 0
    for group in groups:
        waiting += len(group.microbatches[Kind.E]) - group.made((Kind.F,))
        found.append(waiting)
    return found


def _waiting_gradients(groups: Sequence[_Group]) -> list[int]:
    """Before each group, how many gradients of the first stage's input wait for their G."""
    found, waiting = [], 0
    for group in groups:
        waiting += group.made((Kind.B, Kind.I))
        found.append(waiting)
        waiting -= len(group.microbatches[Kind.G])
    return found


def _move(groups: Sequence[_Group], kind: Kind, waiting: list[int]) -> None:
    """Move those of a kind that are in groups without L to the groups before; `waiting` grows by
    one in all groups on the way.
    """
    for i, group in enumerate(groups):
        while group.microbatches[kind] and not group.microbatches[Kind.L]:
            way = _way(groups[:i], kind) or _nearest(groups[:i])
            if not way or max(waiting[way[0] : i]) >= _MOST_WAITING[kind] + len(group.work) // 2:
                break
            for j in range(way[0], i):
                waiting[j] += 1
            for to, source in zip(way, [*way[1:], i], strict=True):
                _take(
                    groups[to].microbatches[kind],
                    groups[source].microbatches[kind],
                    at_end=kind is Kind.E,
                )


def _way(groups: Sequence[_Group], kind: Kind) -> list[int]:
    """The groups with L back to the last that has fewer of a kind than L; empty where there is
    none, or one without L on the way.
    """
    found = []
    for j in reversed(range(len(groups))):
        many, mine = len(groups[j].microbatches[Kind.L]), len(groups[j].microbatches[kind])
        if not many and mine:
            return []
        if many:
            found.append(j)
            if mine < many:
                return found[::-1]
    return []


def _nearest(groups: Sequence[_Group]) -> list[int]:
    """The last group with L, which then has more of a kind."""
    return next(([j] for j in reversed(range(len(groups))) if groups[j].microbatches[Kind.L]), [])


def _take(to: list[int], source: list[int], *, at_end: bool) -> None:
    """Move the one of the source that is nearest."""
    if at_end:
        to.append(source.pop(0))
    else:
        to.insert(0, source.pop())
