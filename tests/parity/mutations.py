"""Small random mistakes in valid tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jaxpipe as jp
from jaxpipe.table.kinds import parts

Rows: TypeAlias = list[list[jp.table.Cell]]
Change: TypeAlias = Callable[[random.Random, Rows], None]

B, F, I, W = jp.Kind.B, jp.Kind.F, jp.Kind.I, jp.Kind.W


def mutated(rng: random.Random, schedule: jp.Schedule, more: Sequence[Change] = ()) -> jp.Schedule:
    """The table with one to three mistakes, or lucky changes, `more` among them; it may come out
    valid.
    """
    rows: Rows = [list(row) for row in schedule.rows]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice((*_changes(), *more))(rng, rows)
    return jp.Schedule.from_rows(
        rows,
        placement=schedule.placement,
        num_microbatches=schedule.num_microbatches,
        name="mutated",
    )


def _changes() -> tuple[Change, ...]:
    misplaced = (_swap_neighbours, _swap, _move, _move_to_other_device, _drop, _repeat)
    renamed = (_other_kind, _other_stage, _other_microbatch)
    return (*misplaced, *renamed, _split, _merge, _pair, _unpair, _idle)


def _pick(rng: random.Random, rows: Rows) -> tuple[list[jp.table.Cell], int] | None:
    """A row and the position of a cell in it."""
    cells = [(row, k) for row in rows for k in range(len(row))]
    return rng.choice(cells) if cells else None


def _pick_action(
    rng: random.Random, rows: Rows, kinds: tuple[jp.Kind, ...] = (F, B, I, W)
) -> tuple[list[jp.table.Cell], int] | None:
    cells = [
        (row, k)
        for row in rows
        for k, cell in enumerate(row)
        if isinstance(cell, jp.Action) and cell.kind in kinds
    ]
    return rng.choice(cells) if cells else None


def _swap_neighbours(rng: random.Random, rows: Rows) -> None:
    found = _pick(rng, rows)
    if found and len(found[0]) > 1:
        row, k = found[0], min(found[1], len(found[0]) - 2)
        row[k], row[k + 1] = row[k + 1], row[k]


def _swap(rng: random.Random, rows: Rows) -> None:
    found = _pick(rng, rows)
    if found:
        row, k = found
        other = rng.randrange(len(row))
        row[k], row[other] = row[other], row[k]


def _move(rng: random.Random, rows: Rows) -> None:
    found = _pick(rng, rows)
    if found:
        row, k = found
        cell = row.pop(k)
        row.insert(rng.randint(0, len(row)), cell)


def _move_to_other_device(rng: random.Random, rows: Rows) -> None:
    found = _pick(rng, rows)
    if found:
        row, k = found
        cell, target = row.pop(k), rng.choice(rows)
        target.insert(rng.randint(0, len(target)), cell)


def _drop(rng: random.Random, rows: Rows) -> None:
    found = _pick(rng, rows)
    if found:
        del found[0][found[1]]


def _repeat(rng: random.Random, rows: Rows) -> None:
    found = _pick(rng, rows)
    if found:
        row, k = found
        row.insert(rng.randint(0, len(row)), row[k])


def _change_action(
    rng: random.Random, rows: Rows, change: Callable[[jp.Action], jp.Action]
) -> None:
    found = _pick_action(rng, rows)
    if found:
        row, k = found
        action = row[k]
        assert isinstance(action, jp.Action)
        row[k] = change(action)


def _other_kind(rng: random.Random, rows: Rows) -> None:
    _change_action(rng, rows, lambda a: a._replace(kind=rng.choice((F, B, I, W))))


def _other_stage(rng: random.Random, rows: Rows) -> None:
    _change_action(rng, rows, lambda a: a._replace(stage=max(0, a.stage + rng.choice((-1, 1)))))


def _other_microbatch(rng: random.Random, rows: Rows) -> None:
    _change_action(
        rng, rows, lambda a: a._replace(microbatch=max(0, a.microbatch + rng.choice((-1, 1))))
    )


def _split(rng: random.Random, rows: Rows) -> None:
    """B becomes I and, some way later, W: valid."""
    found = _pick_action(rng, rows, (B,))
    if found:
        row, k = found
        action = row[k]
        assert isinstance(action, jp.Action)
        row[k] = action._replace(kind=I)
        row.insert(rng.randint(k + 1, len(row)), action._replace(kind=W))


def _merge(rng: random.Random, rows: Rows) -> None:
    """I becomes B, and its W goes: valid."""
    found = _pick_action(rng, rows, (I,))
    if found:
        row, k = found
        action = row[k]
        assert isinstance(action, jp.Action)
        row[k] = action._replace(kind=B)
        if action._replace(kind=W) in row:
            row.remove(action._replace(kind=W))


def _pair(rng: random.Random, rows: Rows) -> None:
    """An F and a backward that stand side by side become an overlapped pair."""
    places = [
        (row, k)
        for row in rows
        for k in range(len(row) - 1)
        if {len(parts(row[k])), len(parts(row[k + 1]))} == {1}
        and (parts(row[k])[0].kind is F) != (parts(row[k + 1])[0].kind is F)
    ]
    if places:
        row, k = rng.choice(places)
        forward, backward = sorted((parts(row[k])[0], parts(row[k + 1])[0]), key=lambda a: a.kind)
        row[k : k + 2] = [jp.Overlap(forward, backward)]


def _unpair(rng: random.Random, rows: Rows) -> None:
    places = [
        (row, k) for row in rows for k, cell in enumerate(row) if isinstance(cell, jp.Overlap)
    ]
    if places:
        row, k = rng.choice(places)
        row[k : k + 1] = rng.sample(parts(row[k]), 2)


def _idle(rng: random.Random, rows: Rows) -> None:
    row = rng.choice(rows)
    row.insert(rng.randint(0, len(row)), None)
