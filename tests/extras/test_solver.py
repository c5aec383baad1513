"""`search=`: OR-tools shortens what list scheduling finds, under the cap, the same for the same seed."""

from __future__ import annotations

import sys

import pytest

import jaxpipe as jp

COSTS = jp.Costs(forward=10, input_grad=13, weight_grad=9, transfer=1)
SETTING = {"devices": 3, "microbatches": 5, "max_activations": 2, "costs": COSTS}


def test_a_search_shortens_a_table_and_keeps_the_cap():
    pytest.importorskip("ortools")
    plain = jp.schedules.build("auto", **SETTING)
    found = jp.schedules.build("auto", **SETTING, search=2)
    again = jp.schedules.build("auto", **SETTING, search=2, seed=0)
    assert found.rows == again.rows
    jp.check(found, max_activations=2)
    assert jp.simulate(found, COSTS).makespan < jp.simulate(plain, COSTS).makespan
    shape = {"devices": 3, "microbatches": 5, "max_activations": 2}
    assert jp.simulate(found, COSTS).makespan >= jp.lower_bound(COSTS, **shape)


def test_windows_alone_never_lengthen(monkeypatch):
    """A table too large to be ordered as a whole, with times that are no fractions of small numbers."""
    pytest.importorskip("ortools")
    import jaxpipe.solver as solver

    monkeypatch.setattr(solver, "_MOST_WHOLE", 10)
    costs = jp.Costs(forward=1.2345678, input_grad=0.9876543, weight_grad=0.333333333, transfer=0.1)
    start = jp.schedules.build("1f1b", devices=2, microbatches=6)
    start = jp.split_backward(start)
    found = solver.improve(start, costs, cap=2, seconds=1).schedule
    jp.check(found, max_activations=2)
    assert jp.simulate(found, costs).makespan < jp.simulate(start, costs).makespan


def test_without_or_tools_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "jaxpipe.solver", raising=False)
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxpipe\[solver\]'"):
        jp.schedules.build("auto", **SETTING, search=1)


def test_a_search_of_no_number_is_refused():
    with pytest.raises(jp.ScheduleError, match="search must be a number of seconds"):
        jp.schedules.build("auto", **SETTING, search="long")
