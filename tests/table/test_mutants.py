"""Random mistakes in valid tables, of every kind of action: `check` accepts what a plain simulation
accepts, and always answers.

`TABLES=20000 SEED=1 pytest -n 0 -m exhaustive tests/table/test_mutants.py` tries as many as one
likes.
"""

from __future__ import annotations

import os
import random
from functools import cache

import pytest
from naive import accepts
from strategies import random_schedule

import jaxpipe as jp
from jaxpipe import Action, Kind, Overlap, Schedule, Transfers
from jaxpipe.table.kinds import parts
from tests.parity.mutations import Rows, mutated
from tests.steps import steps

# Lines of `check` for a cell, and for any table (its grid, its messages).
PER_CELL, FIXED = 1000, 20_000


@cache
def _valid(name: str, devices: int, microbatches: int, change: str) -> Schedule:
    """A table of the catalogue, with something done to it."""
    table = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    return {
        "plain": lambda: table,
        "split": lambda: jp.split_backward(table),
        "recomputed": lambda: jp.add_recompute(table),
        "first spread": lambda: jp.spread_first(table),
        "last spread": lambda: jp.spread_last(table),
        "both spread": lambda: jp.spread_first(jp.spread_last(table)),
        "deferred": lambda: jp.defer_last(jp.spread_last(table)),
        "recomputed, spread": lambda: jp.spread_last(jp.add_recompute(table)),
        "sent": lambda: jp.add_transfers(table),
        "gathered": lambda: jp.add_gathers(table),
        "gathered often": lambda: jp.add_gathers(
            jp.add_recompute(table), max_active=2, ahead=1, reduce=jp.transforms.Reduce.EACH_RUN
        ),
        "gathered, sent": lambda: jp.add_transfers(jp.add_gathers(table, max_active=2)),
        "gathered, spread": lambda: jp.add_gathers(jp.spread_last(table)),
        "recomputed, sent": lambda: jp.add_transfers(jp.add_recompute(table)),
        "forwards, spread": lambda: jp.spread_first(
            jp.schedules.build(name, devices=devices, microbatches=microbatches, forward_only=True)
        ),
    }[change]()


SPREAD = (
    "first spread",
    "last spread",
    "both spread",
    "deferred",
    "recomputed, spread",
    "forwards, spread",
)
GATHERED = ("gathered", "gathered often", "gathered, sent", "gathered, spread")
CHANGES = ("plain", "split", "recomputed", "sent", "recomputed, sent", *SPREAD, *GATHERED)


TRANSFORMS = (
    jp.merge_backward,
    jp.transforms.remove_gathers,
    jp.transforms.remove_recompute,
    jp.transforms.remove_spread,
    jp.transforms.remove_transfers,
    jp.split_backward,
)
TRANSFORMS = (
    *TRANSFORMS,
    jp.add_gathers,
    jp.add_recompute,
    jp.add_transfers,
    jp.defer_last,
    jp.spread_first,
    jp.spread_last,
)


def draw_valid(rng: random.Random) -> Schedule:
    """A small valid table."""
    if rng.random() < 0.3:
        table = random_schedule(rng, recompute=rng.random() < 0.5)
        return jp.add_transfers(table) if rng.random() < 0.3 else table
    name = rng.choice([name for name in jp.schedules.names() if name != "auto"])
    return _valid(
        name,
        rng.choice((2, 2, 3, 4)) if name != "dualpipe" else rng.choice((2, 4)),
        rng.randint(1, 4),
        rng.choice(CHANGES),
    )


def _any_action(rng: random.Random, rows: Rows) -> Action:
    """An action whose numbers are of the table's size, or one too large."""
    found = [action for row in rows for cell in row for action in parts(cell)]
    stages = 2 + max((action.stage for action in found), default=0)
    microbatches = 2 + max((action.microbatch for action in found), default=0)
    device = rng.randrange(len(rows))
    kind = rng.choice(list(Kind))
    stage = (
        device
        if kind in (Kind.E, Kind.G, Kind.L, Kind.H) and rng.random() < 0.7
        else rng.randrange(stages)
    )
    return Action(stage, kind, rng.randrange(microbatches))


def _put_any(rng: random.Random, rows: Rows) -> None:
    row = rng.choice(rows)
    row.insert(rng.randint(0, len(row)), _any_action(rng, rows))


def _put_share_everywhere(rng: random.Random, rows: Rows) -> None:
    """One more collective action, at any place of each row."""
    _, kind, microbatch = _any_action(rng, rows)
    for device, row in enumerate(rows):
        row.insert(rng.randint(0, len(row)), Action(device, kind, microbatch))


def _drop_kind(rng: random.Random, rows: Rows) -> None:
    """All of one kind, or of one kind and microbatch."""
    found = [action for row in rows for cell in row for action in parts(cell)]
    if not found:
        return
    _, kind, microbatch = rng.choice(found)
    whole = rng.random() < 0.5
    for row in rows:
        row[:] = [
            c
            for c in row
            if not (
                isinstance(c, Action) and c.kind is kind and (whole or c.microbatch == microbatch)
            )
        ]


def _change_field(rng: random.Random, rows: Rows) -> None:
    """Another kind, stage or microbatch in any cell."""
    places = [(row, k) for row in rows for k, cell in enumerate(row) if isinstance(cell, Action)]
    if places:
        row, k = rng.choice(places)
        field = rng.choice(("stage", "kind", "microbatch"))
        row[k] = row[k]._replace(**{field: getattr(_any_action(rng, rows), field)})


def _pair_any(rng: random.Random, rows: Rows) -> None:
    """Two neighbours of any kinds become a pair."""
    places = [
        (r, k)
        for r in rows
        for k in range(len(r) - 1)
        if isinstance(r[k], Action) and isinstance(r[k + 1], Action)
    ]
    if places:
        row, k = rng.choice(places)
        row[k : k + 2] = [Overlap(*rng.sample((row[k], row[k + 1]), 2))]


def _swap_rows(rng: random.Random, rows: Rows) -> None:
    a, b = rng.randrange(len(rows)), rng.randrange(len(rows))
    rows[a], rows[b] = rows[b], rows[a]


def _move_share(rng: random.Random, rows: Rows) -> None:
    """A share to another place of its row."""
    moved = (Kind.E, Kind.G, Kind.L, Kind.H, Kind.R, Kind.U, Kind.D, Kind.X)
    places = [
        (row, k)
        for row in rows
        for k, cell in enumerate(row)
        if isinstance(cell, Action) and cell.kind in moved
    ]
    if places:
        row, k = rng.choice(places)
        cell = row.pop(k)
        row.insert(max(0, k + rng.choice((-2, -1, 1, 2))), cell)


MORE = (
    _put_any,
    _put_share_everywhere,
    _drop_kind,
    _change_field,
    _change_field,
    _pair_any,
    _swap_rows,
    _move_share,
    _move_share,
)


def draw(rng: random.Random) -> Schedule:
    """A table with mistakes; now and then the placement and the number of microbatches are read off
    its rows.
    """
    table = mutated(rng, draw_valid(rng), MORE)
    return table if rng.random() < 0.8 else Schedule.from_rows(table.rows)


def answer(table: Schedule, transfers: Transfers) -> bool:
    """Whether `check` accepts a table, within its budget of steps."""
    fresh = Schedule(table.rows, table.placement, table.num_microbatches)
    accepted = []

    def call() -> None:
        try:
            accepted.append(jp.check(fresh, transfers=transfers) is fresh)
        except jp.ScheduleError as error:
            accepted.append(not error.violations)  # an error names what is wrong

    steps(call, most=FIXED + PER_CELL * (table.num_devices + sum(map(len, table.rows))))
    return accepted[0]


def try_tables(seed: int, count: int) -> tuple[int, int]:
    """Of `count` tables, how many were accepted and how many refused; an error names the one that
    is wrong, by its number.
    """
    accepted = refused = 0
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        table = draw(rng)
        for transfers in Transfers if table.has_transfers else (Transfers.RENDEZVOUS,):
            valid = answer(table, transfers)
            where = (
                f"table {number} of seed {seed}, {transfers}:\n"
                f"{table.placement}, {table.num_microbatches} microbatches\n{table.to_csv()}"
            )
            assert valid == accepts(table, transfers), where
            accepted, refused = accepted + valid, refused + (not valid)
            if valid:
                _is_simulated(table, transfers, where)
    return accepted, refused


def _is_simulated(table: Schedule, transfers: Transfers, where: str) -> None:
    """A table that is accepted has times, in the order of each row, and can be written and read."""
    timeline = jp.simulate(table, jp.Costs(forward=2, transfer=0.5), transfers=transfers)
    assert timeline.critical_path, where
    assert min(timeline.peak_memory) >= 0, where
    if transfers is not Transfers.ASYNC:  # which is no way to run in steps
        assert len(jp.engine.simulate_steps(table, transfers=transfers)), where
    assert Schedule.from_json(table.to_json()) == table, where
    for change in TRANSFORMS:
        try:
            changed = change(table)
        except jp.ScheduleError:  # it takes no such table
            continue
        assert accepts(changed, transfers), f"{change.__name__} of {where}"


def test_some_mutants():
    accepted, refused = try_tables(1, 100)
    assert accepted > 10
    assert refused > 40


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_many_mutants():
    accepted, refused = try_tables(
        int(os.environ.get("SEED", "1")), int(os.environ.get("TABLES", "20000"))
    )
    print(f"{accepted:,} accepted, {refused:,} refused")
