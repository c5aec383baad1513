"""Small transforms: a full backward B split into I and W, and merged again; transfers, R,
collective actions, backwards or microbatches left out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..errors import ScheduleError, typed
from ..table.kinds import (
    BESIDE,
    COLLECTIVES,
    RECOMPUTE,
    SHARES,
    TRANSFERS,
    Action,
    Cell,
    Kind,
    Overlap,
    Pass,
    kinds_where,
    parts,
)
from ..table.schedule import Schedule

_FORWARDS = kinds_where(lambda spec: spec.is_compute and spec.direction is Pass.FORWARD)


@typed()
def remove_transfers(schedule: Schedule) -> Schedule:
    """The compute-only table: without SEND and RECV, everything else as it is."""
    return without_kinds(schedule, TRANSFERS)


@typed()
def remove_gathers(schedule: Schedule) -> Schedule:
    """The table without U, D and X, everything else as it is: all parameters are whole during the
    step.

    >>> import jaxpipe as jp
    >>> print(remove_gathers(jp.Schedule.from_csv("0UNSHARD,0F0,0RESHARD")).to_csv(), end="")
    0F0
    """
    return without_kinds(schedule, BESIDE)


@typed()
def remove_recompute(schedule: Schedule) -> Schedule:
    """The table without R, everything else as it is: every F keeps its activations.

    >>> import jaxpipe as jp
    >>> print(remove_recompute(jp.Schedule.from_csv("0F0,0F1,0R0,0B0,0R1,0B1")).to_csv(), end="")
    0F0,0F1,0B0,0B1
    """
    if schedule.encoded.recomputes:
        refuse(schedule, BESIDE, how="take R out without them, since R may begin a run")
    return without_kinds(schedule, RECOMPUTE)


@typed()
def remove_spread(schedule: Schedule) -> Schedule:
    """The table without shares (L, E, G), everything else as it is: `last` and `first` run with
    the F of their stages.

    >>> import jaxpipe as jp
    >>> print(remove_spread(jp.Schedule.from_csv("0F0,0L0,0B0")).to_csv(), end="")
    0F0,0B0
    """
    return without_kinds(schedule, SHARES)


def without_kinds(schedule: Schedule, kinds: Collection[Kind]) -> Schedule:
    """The table without these kinds, and without the late parts of the shares among them."""
    gone = {*kinds, *kinds_where(lambda spec: spec.part_of in kinds)}
    if schedule.encoded.kinds.isdisjoint(gone):
        return schedule
    return schedule.with_rows(
        [
            [c for c in row if not isinstance(c, Action) or c.kind not in gone]
            for row in schedule.rows
        ]
    )


# What a transform may refuse, as its errors name it, and what takes it out.
_TAKEN_OUT = {
    TRANSFERS: ("SEND and RECV", "remove_transfers"),
    BESIDE: ("U, D or X", "remove_gathers"),
    COLLECTIVES: ("L or E", "remove_spread"),
}


def refuse(schedule: Schedule, *groups: tuple[Kind, ...], how: str) -> None:
    """ScheduleError for a table with kinds of these groups; `how` says what to do without them."""
    for group in groups:
        what, remover = _TAKEN_OUT[group]
        if not schedule.encoded.kinds.isdisjoint(group):
            raise ScheduleError(
                f"the table has {what}; {how} (jaxpipe.transforms.{remover} takes them out)"
            )


def forward_only(schedule: Schedule, microbatches: int | None = None) -> Schedule:
    """The forwards of a schedule alone, with L and E where it has any, in its order: the table of
    an evaluation.  Of its first microbatches where it has more than `microbatches`: they do not
    wait for each other.

    >>> from jaxpipe import schedules
    >>> print(forward_only(schedules.build("gpipe", devices=2, microbatches=3), 1))
             | 0   1
    device 0 | 0F0
    device 1 |     1F0
    """
    most = schedule.num_microbatches
    count = most if microbatches is None else min(microbatches, most)
    if schedule.forward_only and count == most:
        return schedule
    rows = [
        [a for cell in row for a in parts(cell) if a.kind in _FORWARDS and a.microbatch < count]
        for row in schedule.rows
    ]
    return replace(schedule.with_rows(rows), num_microbatches=count)


@typed()
def split_backward(schedule: Schedule) -> Schedule:
    """Replace each B by its I and, right after it, its W; the inverse of `merge_backward`.

    A B in an overlapped pair becomes an I in the pair and a W after the pair.  In a table with
    transfers the SEND stays where it is, after the W: split first, then add transfers, and the SEND
    comes before the W.

    >>> import jaxpipe as jp
    >>> print(split_backward(jp.Schedule.from_csv("0F0,0F1,0B0,0B1")).to_csv(), end="")
    0F0,0F1,0I0,0W0,0I1,0W1
    """
    return flipped(schedule, {a[::2] for *_, a in schedule.actions() if a.kind is Kind.B})


def flipped(schedule: Schedule, passes: Collection[tuple[int, int]]) -> Schedule:
    """The table with the backwards of these stages and microbatches the other way: a B is an I and,
    right after it, a W; an I is a B, and its W goes.
    """
    return schedule.with_rows(
        [[each for cell in row for each in _flipped(cell, passes)] for row in schedule.rows]
    )


def _flipped(cell: Cell, passes: Collection[tuple[int, int]]) -> tuple[Cell, ...]:
    """The cells that a cell becomes."""
    backward = cell.backward if isinstance(cell, Overlap) else cell
    if backward is None or backward[::2] not in passes:
        return (cell,)
    other = {Kind.B: Kind.I, Kind.I: Kind.B}.get(backward.kind)
    if other is None:
        return () if backward.kind is Kind.W else (cell,)
    changed = backward._replace(kind=other)
    rest = (backward._replace(kind=Kind.W),) if other is Kind.I else ()
    return (Overlap(cell.forward, changed) if isinstance(cell, Overlap) else changed, *rest)


@typed()
def merge_backward(schedule: Schedule, *, delayed: bool = False) -> Schedule:
    """Merge each I with its W where the W is the device's next action; the inverse of
    `split_backward`.  Idle cells go.

    With `delayed`, each W that comes later in its row merges with its I too, where the I is.  A
    delayed W keeps the activations of its I and what I leaves for it.  With rematerialisation that
    is all that a forward would keep without it.

    The I of an overlapped pair merges with a W right after the pair.  Merging pays only where a
    fused backward is faster than its halves, since what the next device needs is then ready at the
    end of B and not already at the end of I (torch 2.13 has `_merge_bw`).

    >>> import jaxpipe as jp
    >>> print(merge_backward(jp.Schedule.from_csv("0F0,0I0,0W0")).to_csv(), end="")
    0F0,0B0
    >>> late = jp.Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1")
    >>> print(merge_backward(late, delayed=True).to_csv(), end="")
    0F0,0F1,0B0,0B1
    """
    if delayed:
        how = "merge without them, since W may be the only one of its run"
        refuse(schedule, BESIDE, how=how)
    passes: set[tuple[int, int]] = set()
    busy = schedule.with_rows([[c for c in row if c is not None] for row in schedule.rows])
    for row in busy.rows:
        waiting: set[tuple[int, int]] = set()  # each I with which a W may merge
        for cell in row:
            passes |= {a[::2] for a in parts(cell) if a.kind is Kind.W and a[::2] in waiting}
            begun = {a[::2] for a in parts(cell) if a.kind is Kind.I}
            waiting = waiting | begun if delayed else begun
    return flipped(busy, passes)
