"""`search=`: OR-tools shortens what list scheduling finds, under the cap, the same for the same
seed.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest

import jaxpipe as jp
from tests.strategies import every_table

LONG = (4,) * 7 + (6,)
COSTS = jp.Costs(forward=LONG, input_grad=LONG, weight_grad=LONG, transfer=3)
PLACEMENT = jp.Placement.loop(devices=4, chunks=2)
SETTING = {
    "devices": 4,
    "chunks": 2,
    "microbatches": 6,
    "placement": PLACEMENT,
    "max_activations": 8,
    "costs": COSTS,
}


def test_a_search_shortens_a_table_and_keeps_the_cap():
    pytest.importorskip("ortools")
    vee = jp.Placement.vee(devices=4, chunks=2)
    setting = SETTING | {"microbatches": 8, "max_activations": 6, "placement": vee}
    plain = jp.schedules.build("auto", **setting)
    found = jp.schedules.build("auto", **setting, search=2)
    again = jp.schedules.build("auto", **setting, search=2, seed=0)
    assert found.rows == again.rows
    jp.check(found, max_activations=6)
    assert jp.simulate(found, COSTS).makespan < jp.simulate(plain, COSTS).makespan


def test_what_is_proven_is_said_with_where_it_comes_from():
    pytest.importorskip("ortools")
    found = jp.schedules.build("auto", **SETTING, search=20).certificate
    assert found.is_optimal
    assert (found.proof, found.max_activations) == (jp.table.Proof.SOLVER, 8)
    relaxed = jp.lower_bound(COSTS, placement=PLACEMENT, microbatches=6, max_activations=8)
    assert found.bound > relaxed  # so it is the solver's
    cheaper = replace(COSTS, backward=tuple(1.5 * time for time in LONG))
    split = jp.schedules.build("auto", **SETTING | {"costs": cheaper}, search=20).certificate
    # Whole backwards are shorter than what the solver proves of tables of F, I and W.
    assert split.value < found.value
    assert split.proof is jp.table.Proof.RELAXATION


@pytest.mark.exhaustive
def test_four_chunks_under_a_tight_cap_are_near_what_the_solver_finds():
    """The table is 36 % above the relaxed bound here, and no table is less than 21 % above it."""
    pytest.importorskip("ortools")
    costs = jp.Costs(forward=1, input_grad=1.2, weight_grad=0.9, transfer=0.02)
    shape = {"devices": 3, "chunks": 4, "microbatches": 6, "max_activations": 5, "costs": costs}
    plain = jp.schedules.build("auto", **shape).certificate
    found = jp.schedules.build("auto", **shape, search=30).certificate
    assert found.proof is jp.table.Proof.SOLVER
    assert found.bound > 1.21 * plain.bound
    assert plain.value <= 1.05 * found.value


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_below_what_is_proven(seed):
    """A valid table of any origin, with one to three stages a device, against the proof under its
    own memory.
    """
    pytest.importorskip("ortools")
    from jaxpipe.solver import improve

    rng = random.Random(seed)
    costs = jp.Costs(
        rng.randint(1, 5),
        rng.randint(1, 5),
        rng.randint(0, 5),
        rng.choice((0, 2)),
        release=rng.choice(tuple(jp.table.Release)),
    )
    chunks = 1 + seed % 3
    table = jp.schedules.build("interleaved_zb", devices=2, chunks=chunks, microbatches=3)
    cap = max(jp.simulate(table, costs).peak_activations)
    start = jp.schedules.build(
        "auto",
        devices=2,
        chunks=chunks,
        microbatches=3,
        placement=table.placement,
        max_activations=chunks,
    )
    found = improve(start, costs, cap=cap, seconds=5)
    jp.check(found.schedule, max_activations=cap, release=costs.release)
    assert 0 < found.proven <= jp.simulate(table, costs).makespan + 1e-9
    assert found.proven == pytest.approx(jp.simulate(found.schedule, costs).makespan)


def test_windows_alone_never_lengthen(monkeypatch):
    """A table too large to be ordered as a whole, with times that are no fractions of small
    numbers.
    """
    pytest.importorskip("ortools")
    from jaxpipe import solver

    monkeypatch.setattr(solver, "_MOST_WHOLE", 10)
    costs = jp.Costs(forward=1.2345678, input_grad=0.9876543, weight_grad=0.333333333, transfer=0.1)
    start = jp.schedules.build("1f1b", devices=2, microbatches=6)
    start = jp.split_backward(start)
    found = solver.improve(start, costs, cap=2, seconds=1).schedule
    jp.check(found, max_activations=2)
    assert jp.simulate(found, costs).makespan < jp.simulate(start, costs).makespan


def test_without_or_tools_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("jaxpipe.solver")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxpipe\[solver\]'"):
        jp.schedules.build("auto", **SETTING, search=1)


def test_a_search_of_no_number_is_refused():
    with pytest.raises(jp.ScheduleError, match="search must be a number of seconds"):
        jp.schedules.build("auto", **SETTING, search="long")


def test_the_least_period_repeats_under_the_cap():
    """Two stages a device, so that lives are longer than a turn; the bound is reached, and the
    simulator finds the same period.
    """
    pytest.importorskip("ortools")
    costs = jp.Costs(forward=2, input_grad=3, weight_grad=1)
    shape = {
        "devices": 4,
        "chunks": 2,
        "max_activations": 6,
        "placement": jp.Placement.vee(devices=4),
    }
    found = jp.schedules.build(
        "auto", **shape, microbatches=16, costs=costs, objective=jp.table.Objective.PERIOD, search=5
    )
    jp.check(found, max_activations=6)
    assert str(found.certificate).startswith("period 12, the optimum for 6 activations a device")
    assert jp.simulate(found, costs).period == found.certificate.value == 12


def test_a_turn_of_several_microbatches_may_be_shorter():
    pytest.importorskip("ortools")
    shape = {"devices": 4, "max_activations": 3}
    found = jp.schedules.build(
        "auto", **shape, microbatches=24, objective=jp.table.Objective.PERIOD, search=5
    )
    jp.check(found, max_activations=3)
    # A turn of one takes 4, which 1F1B has, and one of two 7; the bound is 3.
    assert jp.simulate(found).period == pytest.approx(10 / 3)
    assert found.certificate.value == pytest.approx(10 / 3)
    assert found.certificate.bound == 3
    assert (
        jp.simulate(jp.schedules.build("auto", **shape, microbatches=24)).makespan
        <= jp.simulate(found).makespan
    )


def test_a_period_without_a_search_is_refused():
    with pytest.raises(jp.ScheduleError, match="found by a search alone; give seconds for it"):
        jp.schedules.build("auto", devices=2, microbatches=4, objective=jp.table.Objective.PERIOD)
    with pytest.raises(jp.ScheduleError, match=r"objective must be one of Objective\.MAKESPAN"):
        jp.schedules.build("auto", devices=2, microbatches=4, objective="period")


def _random_costs(rng: random.Random) -> jp.Costs:
    """Whole backwards and pairs that may be far cheaper than their parts."""
    halves = {
        "forward": rng.randint(1, 5),
        "input_grad": rng.randint(1, 5),
        "weight_grad": rng.randint(0, 5),
    }
    return jp.Costs(
        **halves,
        transfer=rng.choice((0, 2)),
        backward=rng.choice((None, 1, 4)),
        overlap=rng.choice((None, None, 2)),
    )


@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_of_the_catalogue_is_below_a_certificate(seed):
    """Whatever its kinds of backwards: the bound is one of every schedule, so none of them is
    shorter.
    """
    pytest.importorskip("ortools")
    rng = random.Random(seed)
    costs, chunks = _random_costs(rng), rng.choice((1, 2))
    cap = rng.choice((None, 2 * chunks))
    shape = {"devices": 2, "microbatches": rng.randint(2, 4), "chunks": chunks}
    found = jp.schedules.build(
        "auto", **shape, costs=costs, max_activations=cap, search=2
    ).certificate
    for name in jp.schedules.names():
        if jp.schedules.describe(name).chunks.nearest(chunks) != chunks or name == "dualpipe":
            continue
        timeline = jp.simulate(jp.schedules.build(name, **shape), costs)
        if found.max_activations is None or max(timeline.peak_activations) <= found.max_activations:
            assert found.bound <= timeline.makespan + 1e-9, name
    period = jp.schedules.build(
        "auto", **shape, costs=costs, objective=jp.table.Objective.PERIOD, search=1
    ).certificate
    for name in ("1f1b", "zb_h1") if chunks == 1 else ("interleaved_1f1b",):
        steady = jp.simulate(jp.schedules.build(name, **shape | {"microbatches": 24}), costs).period
        assert steady is None or period.bound <= steady + 1e-9


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_no_table_at_all_is_below_a_certificate(devices, microbatches):
    """Every order of every device, each backward whole or split; the best of those of F, I and W is
    what the solver proves.
    """
    pytest.importorskip("ortools")
    rng = random.Random(10 * devices + microbatches)
    tables = list(every_table(devices, microbatches))
    for _ in range(2):
        costs = _random_costs(rng)
        timelines = [jp.simulate(table, costs) for table in tables]
        for cap in (None, 1):
            found = jp.schedules.build(
                "auto",
                devices=devices,
                microbatches=microbatches,
                costs=costs,
                max_activations=cap,
                search=2,
            )
            least = min(
                t.makespan for t in timelines if cap is None or max(t.peak_activations) <= cap
            )
            assert found.certificate.bound <= min(least, found.certificate.value)
            # `auto` may also have pairs, which these tables have not.
            if costs.overlap is None:
                assert least <= found.certificate.value


def test_a_whole_backward_that_is_cheaper_refutes_no_proof():
    """The solver's tables have F, I and W alone: what it proves of them is no bound where B takes
    less than I and W.
    """
    pytest.importorskip("ortools")
    costs = jp.Costs(forward=1, input_grad=5, weight_grad=5, backward=1)
    found = jp.schedules.build("auto", devices=2, microbatches=2, costs=costs, search=2).certificate
    best = jp.simulate(jp.schedules.build("1f1b", devices=2, microbatches=2), costs).makespan
    assert found.bound <= best
    assert found.value <= best
    assert found.proof is jp.table.Proof.RELAXATION
