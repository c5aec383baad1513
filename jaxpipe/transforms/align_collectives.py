"""Moves each E and G of a table to an L, so that collective actions come in equal sets.

A collective action that comes alone needs code of its own in the program, or a predicate.  An E is
moved to an earlier place and a G to a later one.  Each keeps one hidden state for longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..table.kinds import COLLECTIVES, Action, Cell, Kind, parts
from ..table.schedule import Schedule

# The most inputs (E) and gradients (G) of the first stage that may wait, plus one for every two
# devices: bursts of interleaved tables need them.
_MOST_WAITING = {Kind.E: 1, Kind.G: 2}
_ORDER = (Kind.L, Kind.E, Kind.G)


@dataclass
class _Group:
    """Collective actions without any work between them, and the work of each device before them."""

    work: list[list[Cell]]
    microbatches: dict[Kind, list[int]] = field(
        default_factory=lambda: {kind: [] for kind in _ORDER}
    )

    def count(self, kinds: Sequence[Kind]) -> int:
        """How many of the first stage's actions of these kinds are in the work."""
        return sum(
            a.stage == 0 and a.kind in kinds
            for row in self.work
            for cell in row
            if cell is not None
            for a in parts(cell)
        )


def align_collectives(schedule: Schedule) -> Schedule:
    """The table in which each E and G that is alone is moved to an L, while few values wait.

    In a set, L comes first, then E, then G.  All other actions keep their order in their row.
    """
    groups, rest = _groups(schedule)
    orders = {k: [m for group in groups for m in group.microbatches[k]] for k in (Kind.E, Kind.G)}
    _move(groups, Kind.E, _waiting_inputs(groups))
    _move(groups[::-1], Kind.G, _waiting_gradients(groups)[::-1])
    for kind, order in orders.items():
        following = iter(order)
        for group in groups:
            group.microbatches[kind] = [next(following) for _ in group.microbatches[kind]]
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
            if isinstance(cell, Action) and cell.kind in COLLECTIVES:
                work[-1].append([])
            else:
                work[-1][-1].append(cell)
    collectives = [
        cell for cell in schedule.rows[0] if isinstance(cell, Action) and cell.kind in COLLECTIVES
    ]
    *before, rest = ([list(cells) for cells in each] for each in zip(*work, strict=True))
    groups: list[_Group] = []
    for cells, collective in zip(before, collectives, strict=True):
        if not groups or any(cells):
            groups.append(_Group(cells))
        groups[-1].microbatches[collective.kind].append(collective.microbatch)
    return groups, rest


def _waiting_inputs(groups: Sequence[_Group]) -> list[int]:
    """After each group, how many E are done for an F to come."""
    found, waiting = [], 0
    for group in groups:
        waiting += len(group.microbatches[Kind.E]) - group.count((Kind.F,))
        found.append(waiting)
    return found


def _waiting_gradients(groups: Sequence[_Group]) -> list[int]:
    """Before each group, how many gradients of the first stage's input wait for their G."""
    found, waiting = [], 0
    for group in groups:
        waiting += group.count((Kind.B, Kind.I))
        found.append(waiting)
        waiting -= len(group.microbatches[Kind.G])
    return found


def _move(groups: Sequence[_Group], kind: Kind, waiting: list[int]) -> None:
    """Move those of a kind that are in groups without L to the groups before, whatever their
    microbatch; `waiting` grows by one in all groups on the way.
    """
    for i, group in enumerate(groups):
        while group.microbatches[kind] and not group.microbatches[Kind.L]:
            to = _group_for(groups[:i], kind)
            if to is None or max(waiting[to:i]) >= _MOST_WAITING[kind] + len(group.work) // 2:
                break
            for j in range(to, i):
                waiting[j] += 1
            groups[to].microbatches[kind].append(group.microbatches[kind].pop())


def _group_for(groups: Sequence[_Group], kind: Kind) -> int | None:
    """The last group that has fewer of a kind than L; the last one with L where there is none, or
    one without L on the way.
    """
    nearest = None
    for j in reversed(range(len(groups))):
        many, mine = len(groups[j].microbatches[Kind.L]), len(groups[j].microbatches[kind])
        if mine < many:
            return j
        if nearest is None and many:
            nearest = j
        if mine and not many:
            break
    return nearest
