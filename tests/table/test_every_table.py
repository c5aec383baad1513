"""Bounds against every table of small instances, and `auto` against every named table."""

from __future__ import annotations

import itertools
import random
from functools import lru_cache

import pytest

import jaxpipe as jp
from jaxpipe.schedules.registry import describe
from jaxpipe.table.kinds import Release

WAYS = ("FB", "FIW")
AGAIN = (*WAYS, "FRB", "FRIW")


def rows_of(stages, microbatches, ways):
    """Every order in which a device can do the actions of its stages, each backward either way."""
    passes = [(s, m) for s in stages for m in range(microbatches)]
    for chosen in itertools.product(ways, repeat=len(passes)):
        chains = [
            [f"{s}{kind}{m}" for kind in way] for (s, m), way in zip(passes, chosen, strict=True)
        ]
        yield from merged(chains)


def merged(chains):
    """Every order of several chains together."""
    if not any(chains):
        yield []
        return
    for i, chain in enumerate(chains):
        if chain:
            rest = [*chains[:i], chain[1:], *chains[i + 1 :]]
            yield from ([chain[0], *order] for order in merged(rest))


@lru_cache(maxsize=4)
def tables(devices, chunks, microbatches, ways, most):
    """All tables that `check` accepts; of many, so many at random."""
    placement = jp.Placement.loop(devices=devices, chunks=chunks)
    rows = [list(rows_of(own, microbatches, ways)) for own in placement.stages_of]
    dice, found = random.Random(0), []
    count = 1
    for own in rows:
        count *= len(own)
    drawn = (
        itertools.product(*rows)
        if count <= most
        else ([dice.choice(own) for own in rows] for _ in range(most))
    )
    for each in drawn:
        try:
            found.append(jp.check(jp.Schedule.from_csv("\n".join(map(",".join, each)))))
        except jp.ScheduleError:
            continue
    return found


def drawn_costs(dice, stages, kind):
    """B below, equal to or above I + W; zeros; stages that differ; transfers; whole or broken."""

    def times():
        number = lambda: dice.choice((0, 1, 2, 3, dice.random()))  # noqa: E731
        return [number() for _ in range(stages)] if dice.random() < 0.7 else [number()] * stages

    first, rest = times(), times()
    both = [a + b for a, b in zip(first, rest, strict=True)]
    whole = {
        "below": [b * dice.random() for b in both],
        "equal": None,
        "above": [b + dice.random() for b in both],
    }[kind]
    return jp.Costs(
        forward=times(),
        input_grad=first,
        weight_grad=rest,
        backward=whole,
        transfer=dice.choice((0, 0, 1, 0.3)),
        release=dice.choice(list(Release)),
    )


@pytest.mark.parametrize("kind", ["below", "equal", "above"])
@pytest.mark.parametrize(("devices", "chunks", "microbatches"), [(2, 1, 2), (1, 2, 1)])
def test_no_table_goes_below_the_bound(devices, chunks, microbatches, kind):
    every = tables(devices, chunks, microbatches, WAYS, 2200)
    dice = random.Random(f"{devices} {chunks} {kind}")
    assert len(every) > 2
    for _ in range(1):
        costs = drawn_costs(dice, devices * chunks, kind)
        found = [jp.simulate(table, costs) for table in every]
        for cap in (None, *range(chunks, chunks * microbatches + 1)):
            least = min(t.makespan for t in found if cap is None or max(t.peak_activations) <= cap)
            shape = {"devices": devices, "microbatches": microbatches, "chunks": chunks}
            place = jp.Placement.loop(devices=devices, chunks=chunks)
            bound = jp.lower_bound(
                costs, placement=place, microbatches=microbatches, max_activations=cap
            )
            assert bound <= least * (1 + 1e-12)
            made = jp.schedules.build(
                "auto", **shape, placement=place, costs=costs, max_activations=cap
            )
            assert least * (1 - 1e-12) <= jp.simulate(made, costs).makespan
            if made.certificate.is_optimal:
                assert jp.simulate(made, costs).makespan == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 2)])
def test_tables_with_r_do_not_go_below_a_bound_whose_costs_have_r(devices, microbatches):
    every = tables(devices, 1, microbatches, AGAIN, 400)
    dice = random.Random(devices)
    for kind in ("below", "equal"):
        costs = drawn_costs(dice, devices, kind)
        costs = jp.Costs(**{**vars(costs), "recompute": dice.choice((0, 0.1, 1, 2))})
        found = [jp.simulate(table, costs) for table in every]
        for cap in range(1, microbatches + 1):
            least = min(t.makespan for t in found if max(t.peak_activations) <= cap)
            bound = jp.lower_bound(
                costs, devices=devices, microbatches=microbatches, max_activations=cap
            )
            assert bound <= least * (1 + 1e-12)


def test_a_bound_with_r_holds_for_any_memory():
    unit = {"forward": 1, "input_grad": 1, "weight_grad": 1}
    shape = {"devices": 4, "microbatches": 16}
    alone = jp.lower_bound(jp.Costs(**unit), **shape, max_activations=1)
    with_r = jp.lower_bound(jp.Costs(**unit, recompute=0.25), **shape, max_activations=1)
    assert with_r == jp.lower_bound(jp.Costs(**unit), **shape) < alone


NAMED = [n for n in jp.schedules.names() if n not in ("auto", "dualpipe", "no_pipelining")]


@pytest.mark.parametrize("seed", range(5))
def test_auto_is_no_longer_than_any_named_table_that_its_cap_allows(seed):
    dice = random.Random(seed)
    devices, microbatches = dice.choice((2, 3, 4)), dice.choice((4, 6, 8))
    chunks = dice.choice((1, 2))
    kind = dice.choice(("below", "below", "equal", "above"))
    costs = drawn_costs(dice, devices * chunks, kind)
    shape = {"devices": devices, "microbatches": microbatches, "chunks": chunks}
    tables = []
    for name in NAMED:
        if describe(name).chunks.nearest(chunks) == chunks:
            tables.append(jp.schedules.build(name, **shape))
    for cap in {max(jp.simulate(table, costs).peak_activations) for table in tables}:
        made = jp.simulate(
            jp.schedules.build("auto", **shape, costs=costs, max_activations=cap), costs
        )
        assert max(made.peak_activations) <= cap
        for table in tables:
            other = jp.simulate(table, costs)
            if max(other.peak_activations) <= cap:
                assert made.makespan <= other.makespan * (1 + 1e-9), (table.name, cap)
        assert made.schedule.certificate.bound <= made.makespan * (1 + 1e-12)
        jp.check(made.schedule)
