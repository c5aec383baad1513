"""A table that is fitted to costs is never longer under them than the table that is built without,
and keeps the same cap.
"""

from __future__ import annotations

import itertools

import pytest

import jaxpipe as jp
from jaxpipe.schedules.registry import describe

# Times of F, I, W and of a transfer.
TIMES = ((2, 1, 1, 0), (2, 1, 1, 0.25), (2, 1, 1, 1), (1, 1, 2, 0.25), (3, 3, 1, 0.25))
MORE_TIMES = tuple(
    (*times, transfer)
    for times in (
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
        (10, 13, 9),
        (4, 7, 3),
        (1, 1.2, 0.8),
        (5, 9, 4),
        (3, 3, 1),
    )
    for transfer in (0, 0.25)
)
# name, devices, microbatches, chunks, cap
QUICK = (
    ("zb_1p", 3, 4, 1, None),
    ("zb_1p", 3, 4, 1, 4),
    ("zb_1p", 3, 6, 1, 2),
    ("auto", 4, 5, 1, 2),
    ("zbv", 2, 2, 2, None),
    ("interleaved_zb", 2, 4, 2, None),
    ("v_half", 3, 4, 2, None),
    ("v_min", 3, 4, 2, None),
)


def every_setting():
    for devices in (2, 3, 4):
        for microbatches in (devices, devices + 1, 3 * devices + 1):
            for cap in (None, devices, devices + devices // 2, 2 * devices):
                yield "zb_1p", devices, microbatches, 1, cap
            for chunks in (1, 2):
                for cap in {
                    max(chunks, chunks * devices // 2),
                    chunks * devices,
                    2 * chunks * devices,
                    chunks,
                }:
                    yield "auto", devices, microbatches, chunks, cap
            for name in ("zbv", "v_half", "v_min", "interleaved_zb"):
                yield name, devices, microbatches, 2, None


def costs_of(forward, input_grad, weight_grad, transfer) -> jp.Costs:
    return jp.Costs(
        forward=forward, input_grad=input_grad, weight_grad=weight_grad, transfer=transfer
    )


def never_longer(setting, times) -> None:
    name, devices, microbatches, chunks, cap = setting
    options = {} if cap is None else {"max_activations": cap}
    plain = jp.schedules.build(
        name, devices=devices, microbatches=microbatches, chunks=chunks, **options
    )
    for each in times:
        costs = costs_of(*each)
        fitted = jp.schedules.build(
            name, devices=devices, microbatches=microbatches, chunks=chunks, costs=costs, **options
        )
        assert (
            jp.simulate(jp.check(fitted, max_activations=cap), costs).makespan
            <= jp.simulate(plain, costs).makespan
        ), (setting, each)


@pytest.mark.parametrize("setting", QUICK, ids=lambda s: "-".join(map(str, s)))
def test_fitting_to_costs_never_makes_a_table_longer(setting):
    never_longer(setting, TIMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zb_1p", "auto", "zbv", "v_half", "v_min", "interleaved_zb"])
def test_fitting_to_costs_never_makes_a_table_longer_anywhere(name):
    settings = [setting for setting in every_setting() if setting[0] == name]
    assert len(settings) >= 9
    # local search takes a part of a second for each table: all costs, but not all for every setting
    if name == "auto":
        for number, setting in enumerate(settings[::3]):
            never_longer(setting, MORE_TIMES[number % 9 :: 9])
        return
    for setting in settings:
        never_longer(setting, MORE_TIMES)


@pytest.mark.slow
def test_list_scheduling_alone_would_lose():
    """The settings above are those where the heuristic, left to itself, finds less than the order
    that knows no costs.
    """
    worse = []
    for (name, devices, microbatches, chunks, cap), times in itertools.product(QUICK, TIMES):
        options = {} if cap is None else {"max_activations": cap}
        shape = {"devices": devices, "microbatches": microbatches, "chunks": chunks}
        alone, plain = (
            describe(name).generator(**shape, **options, **given)
            for given in ({"costs": costs_of(*times)}, {})
        )
        if (
            jp.simulate(alone, costs_of(*times)).makespan
            > jp.simulate(plain, costs_of(*times)).makespan
        ):
            worse.append(name)
    assert {"zbv", "interleaved_zb"} <= set(worse)
    assert "auto" not in worse  # it begins with the better of both itself


def test_forwards_alone_are_never_longer_either():
    for name, devices, microbatches, chunks, _ in QUICK:
        shape = {
            "devices": devices,
            "microbatches": microbatches,
            "chunks": chunks,
            "forward_only": True,
        }
        costs = costs_of(2, 1, 1, 1)
        plain, fitted = (
            jp.schedules.build(name, **shape, **given) for given in ({}, {"costs": costs})
        )
        assert fitted.forward_only
        assert jp.simulate(fitted, costs).makespan <= jp.simulate(plain, costs).makespan


@pytest.mark.parametrize("times", [(1, 0, 1), (0, 0, 1), (0, 0, 0)])
def test_actions_that_take_no_time_wake_who_waits_for_them(times):
    """What is ready at the moment when a device has just looked: it looks again."""
    costs = jp.Costs(forward=times[0], input_grad=times[1], weight_grad=times[2])
    table = jp.schedules.build("zb_1p", devices=2, microbatches=4, costs=costs)
    assert jp.simulate(table, costs).makespan >= 4 * sum(times)
