"""`plan`: the best split of all, plans that fit, reasons for the others, and errors that say what
to change.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.lowering.plan import plan_of
from jaxpipe.lowering.target import RunsOn
from jaxpipe.planner import candidate, search
from jaxpipe.planner.layer_cost import Ends, Kept, Remat, balanced
from jaxpipe.planner.memory import least_slots

T = jp.LayerCost(
    forward=0.010, input_grad=0.011, weight_grad=0.009, parameters=4e8, residuals=1e8, boundary=1e7
)
HEAD = jp.LayerCost(forward=0.006, input_grad=0.006, weight_grad=0.006, parameters=2e8)
EMBED = jp.LayerCost(forward=0.001, input_grad=0, weight_grad=0.002, parameters=2e8, boundary=1e7)
COSTS = {"E": EMBED, "t": T, "L": HEAD}
SHAPE = {
    "devices": 2,
    "microbatches": 4,
    "chunks": (1, 2),
    "schedules": ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1"),
}
MODEL = "Et*6,L"


@pytest.fixture(scope="module")
def plans():
    return jp.plan(MODEL, COSTS, **SHAPE, memory=20e9)


def test_plans_are_sorted_and_hold_what_they_promise(plans):
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    for p in plans:
        jp.check(p.schedule)
        assert jp.parse_layout(p.layout, devices=2).layers == "E" + "t" * 6 + "L"
        assert p.lower_bound <= p.seconds + 1e-12
        assert len(p.memory) == 2
        assert max(p.memory) == p.parts.total <= 20e9
        # The lowered program keeps the order of every row, and may make devices wait for each other
        # a little more.
        assert p.timeline.makespan * (1 - 1e-9) <= p.seconds < 1.2 * p.timeline.makespan


@pytest.mark.slow
def test_the_best_of_one_is_the_best_of_many():
    """The table with the shortest simulated step is not always that of the shortest program."""
    t = jp.LayerCost(forward=6e-3, input_grad=7e-3, weight_grad=6e-3, parameters=4e8)
    costs = {
        "t": t,
        "E": jp.LayerCost(forward=0, input_grad=0, weight_grad=0),
        "L": jp.LayerCost(forward=6e-3, input_grad=6e-3, weight_grad=6e-3),
    }
    given = {
        "devices": 4,
        "microbatches": 12,
        "transfer": 2e-3,
        "chunks": (1, 2),
        "schedules": ("1f1b", "zb_h1", "zbv"),
        "remat": (None,),
    }
    many = jp.plan("Et*14,L", costs, **given)
    best = min(many, key=lambda p: p.seconds)
    assert best.timeline.makespan > min(p.timeline.makespan for p in many), "this case says nothing"
    assert jp.plan("Et*14,L", costs, **given, most=1).best.label == best.label


def test_all_the_work_is_in_the_times(plans):
    """Embedding, head and loss counted, whichever stage they are in."""
    for p in plans:
        times = p.costs.for_stages(p.schedule.num_stages)
        work = sum(times.forward) + sum(times.backward)
        layer = T.forward + T.backward_seconds
        again = 6 * T.forward if p.remat else 0
        assert work == pytest.approx(
            6 * layer
            + again
            + HEAD.forward
            + HEAD.backward_seconds
            + EMBED.forward
            + EMBED.backward_seconds
        )


def test_memory_is_that_of_the_program():
    """By hand, for gpipe on two devices: parameters, gradients and Adam's state, M residuals of the
    largest stage, pools of inputs.
    """
    gpipe, full = jp.plan(MODEL, COSTS, **{**SHAPE, "schedules": ("gpipe",)})
    assert (gpipe.remat, full.remat) == (None, "full")
    assert gpipe.layout in ("Et*3|t*3,L", "Et*4|ttL")
    inner = max(stage.count("t") for stage in jp.parse_layout(gpipe.layout, devices=2).stages)
    held = 4e8 * inner + 2e8 + 2e8
    parts = gpipe.parts
    assert (parts.parameters, parts.gradients, parts.optimizer) == (held, held, 2 * held)
    # Each layer keeps what it takes besides; the first one's input is the stage's own.
    assert parts.pools["residual_weight"] == 4 * (inner * (1e8 + 1e7) - 1e7)
    assert full.parts.pools["residual_weight"] == 0
    assert full.seconds > gpipe.seconds


@pytest.mark.parametrize(("mesh", "inputs"), [(RunsOn.GPUS, 3), (RunsOn.CPU_PROCESSES, 4)])
def test_layers_that_keep_nothing_keep_their_inputs(mesh, inputs):
    """But for the stage's own, which is another pool's where layers are no scan."""
    given = {"devices": 2, "microbatches": 4, "schedules": ("gpipe",), "chunks": (1,)}
    cost = replace(T, residuals=0)
    for letters in ("t" * 8, "tm" * 4):
        plan = jp.plan(letters, {"t": cost, "m": cost}, **given, remat=(None,), mesh=mesh).best
        kept = inputs if letters[0] == letters[1] or mesh is RunsOn.GPUS else 0
        assert plan.parts.pools["residual_weight"] == 4 * kept * 1e7


def test_cpu_devices_sum_gradients_of_the_ends_beside_them():
    given = {
        "devices": 2,
        "microbatches": 4,
        "chunks": (1,),
        "schedules": ("1f1b",),
        "remat": (None,),
    }
    there, here = (
        jp.plan("Et*6,L", COSTS, **given, mesh=kind).best.parts
        for kind in (RunsOn.GPUS, RunsOn.ONE_CPU_PROCESS)
    )
    assert (there.summed, here.summed) == (0, 0), "pools leave room enough"
    heavy = COSTS | {"E": replace(EMBED, parameters=2e9)}
    there, here = (
        jp.plan("Et*6,L", heavy, **given, mesh=kind).best.parts
        for kind in (RunsOn.GPUS, RunsOn.ONE_CPU_PROCESS)
    )
    assert there.summed == 0
    held = here.parameters + here.gradients + here.optimizer
    assert here.total == held + here.batch + 2e9 + 2e8


def test_the_split_is_the_best_of_all_splits():
    """Against every way to cut."""
    letters = "EttmtmL"
    costs = {
        **COSTS,
        "m": jp.LayerCost(forward=0.004, input_grad=0.003, weight_grad=0.002, parameters=3e9),
    }
    seconds = [costs[c].forward + costs[c].backward_seconds for c in letters]

    def worst(cuts):
        pieces = [range(a, b) for a, b in itertools.pairwise((0, *cuts, len(letters)))]
        return max(sum(seconds[i] for i in piece) for piece in pieces)

    least = min(worst(cuts) for cuts in itertools.combinations(range(1, len(letters)), 2))
    layout = balanced(letters, costs, devices=3, chunks=1, remat=Remat.NONE)
    cuts = itertools.accumulate(len(stage) for stage in layout.stages[:-1])
    assert worst(tuple(cuts)) == pytest.approx(least)


def test_what_does_not_fit_is_named_with_what_it_lacks(plans):
    limit = max(max(p.memory) for p in plans) - 1
    fewer = jp.plan(MODEL, COSTS, **SHAPE, memory=limit)
    assert any("does not fit by" in r.why for r in fewer.rejected)
    assert all(max(p.memory) <= limit for p in fewer)
    with pytest.raises(
        jp.PlanError,
        match=r"nothing fits into 4\.7 GiB a device: the nearest is .* which needs .* more",
    ):
        jp.plan(MODEL, COSTS, **SHAPE, memory=5e9)


@pytest.mark.parametrize(
    ("more", "memory", "part", "help_", "choice"),
    [
        (
            {"residuals": 3e9},
            4.5e10,
            "residuals",
            "remat='full', or offload='residuals'",
            {"schedules": ("gpipe",), "remat": ("full",)},
        ),
        (
            {"stash": 1e10},
            4e10,
            "stash",
            "whole backwards (1f1b, interleaved_1f1b)",
            {"schedules": ("1f1b",)},
        ),
        (
            {"parameters": 4e9},
            2.2e10,
            "parameters, gradients and optimizer state",
            "more devices, or shares of each",
            {"devices": 8},
        ),
    ],
)
def test_the_choice_that_would_help_most_is_named(more, memory, part, help_, choice):
    """And with it the model fits."""
    costs = {"t": replace(T, **more)}
    shape = {"devices": 2, "microbatches": 4, "schedules": ("zb_h1",), "chunks": (1,)}
    shape |= {"memory": memory, "remat": (None,), "offload": (None,)}
    shape |= {"schedules": ("gpipe",)} if part == "residuals" else {}
    with pytest.raises(jp.PlanError, match=r"nothing fits into .* help most: ") as error:
        jp.plan("t*8", costs, **shape)
    assert f"what would help most: {help_}; or" in str(error.value)
    assert part in str(error.value)
    assert max(jp.plan("t*8", costs, **shape | choice).best.memory) <= memory


def test_what_cannot_fit_is_not_lowered(monkeypatch):
    """Parameters alone are too much before any table is built, and activations before any table is
    lowered.
    """

    def refused(*arguments, **options):
        raise AssertionError("it took long")

    monkeypatch.setattr(candidate, "plan_of", refused)
    with pytest.raises(
        jp.PlanError,
        match=r"nothing fits into 6\.1 GiB a device: the nearest is 1f1b, V 1, remat full, .* "
        r"needs at least .* more",
    ):
        jp.plan(MODEL, COSTS, **SHAPE, memory=6.6e9)
    monkeypatch.setattr(search, "build", refused)
    with pytest.raises(
        jp.PlanError,
        match=r"an even split of the layers, which needs 6\.0 GiB for parameters, .* 1\.3 GiB more",
    ):
        jp.plan(MODEL, COSTS, **SHAPE, memory=5e9)


@pytest.mark.parametrize("name", jp.schedules.names())
def test_no_program_has_fewer_slots_than_is_said_before_it_is_made(name):
    for devices, microbatches in ((2, 1), (4, 6)):
        schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
        made, least = (
            vars(slots)
            for slots in (plan_of(schedule).program().slots, least_slots(jp.simulate(schedule)))
        )
        assert all(made[pool] >= least[pool] for pool in least)


WORK = 6 * (T.forward + T.backward_seconds) / 2


def test_ends_are_spread_where_that_is_shorter():
    """By hand: a device does half of the layers, and half of the head, which no stage waits for."""
    heavy = replace(HEAD, forward=0.08, input_grad=0.08, weight_grad=0.08, ends=Ends.EITHER)
    early = replace(EMBED, ends=Ends.EITHER)
    given = {**SHAPE, "schedules": ("zb_h1", "1f1b"), "chunks": (1,), "microbatches": 8}
    found = jp.plan(MODEL, {**COSTS, "L": heavy, "E": early}, **given, remat=(None,))
    spread = {p.label: p for p in found}
    best = spread["zb_h1, V 1, spread L"]
    assert best.seconds < min(p.seconds for p in found if not p.spread)
    assert best.layout == "Et*3|t*3,L"
    assert best.schedule.encoded.spreads_last
    assert 8 * (WORK + 0.24 / 2) <= best.timeline.makespan < 1.2 * 8 * (WORK + 0.24 / 2)
    assert best.costs.last == 0.24 / 2
    # Half of the head's parameters, gradients and Adam's state.
    held = best.parts.parameters + best.parts.gradients + best.parts.optimizer
    assert held == 4 * (3 * 4e8 + 2e8 + 1e8)
    # Where memory is short, the embedding too.
    both = jp.plan(
        MODEL,
        {**COSTS, "L": heavy, "E": early},
        **{**given, "memory": max(best.memory) - 1},
        remat=(None,),
    )
    assert {p.spread for p in both} == {"EL"}
    assert max(both.best.memory) < max(best.memory)


def test_each_kind_of_layer_has_a_policy_of_its_own():
    """A policy costs the time that it says and keeps the bytes that it says."""
    policies = {"dots_saveable": Kept(4e7, 0.002), "nothing_saveable": Kept(0.0, 0.010)}
    costs = {**COSTS, "t": replace(T, policies=policies), "m": replace(T, residuals=3e8)}
    given = {**SHAPE, "schedules": ("gpipe",), "chunks": (1,)}
    plans = jp.plan("E" + "tm" * 3 + "L", costs, **given)
    found = {p.policies: p for p in plans if p.remat is None}
    assert set(found) == {(), (("t", "dots_saveable"),), (("t", "nothing_saveable"),)}
    plain, dots = found[()], found[("t", "dots_saveable"),]
    times = [p.costs.for_stages(2) for p in (plain, dots)]
    assert sum(times[1].backward) == pytest.approx(sum(times[0].backward) + 3 * 0.002)
    assert times[1].forward[0] == pytest.approx(times[0].forward[0])
    saved = plain.parts.pools["residual_weight"] - dots.parts.pools["residual_weight"]
    # A slot has room for the largest layers of any stage: two of "m", one of "t".
    assert saved == 4 * 6e7
    with pytest.raises(jp.PlanError, match="remat holds 'dots'"):
        jp.plan("E" + "tm" * 3 + "L", costs, **given, remat=("dots",))


def test_residuals_wait_in_the_hosts_memory_where_nothing_else_fits():
    given = {**SHAPE, "schedules": ("gpipe",), "chunks": (1,), "microbatches": 16}
    plain = jp.plan(MODEL, COSTS, **given, remat=(None,)).best
    limit = max(plain.memory) - 3e9
    with pytest.raises(jp.PlanError, match="nothing fits"):
        jp.plan(MODEL, COSTS, **given, remat=(None,), memory=limit, offload=(None,))
    best = jp.plan(MODEL, COSTS, **given, remat=(None,), memory=limit).best
    assert best.offload == "residuals"
    assert max(best.memory) <= limit
    slow = jp.plan(MODEL, COSTS, **given, remat=(None,), memory=limit, host_bandwidth=1e9).best
    # Each microbatch's residuals of three layers, with two layers' inputs, travel at that rate.
    assert slow.seconds == pytest.approx(16 * (3 * 1e8 + 2 * 1e7) / 1e9)


def test_a_search_ends_after_its_time_with_what_there_is():
    plans = jp.plan(MODEL, COSTS, **SHAPE, within=1e-9)
    assert len(plans) == 1
    assert any("the time was over" in r.why for r in plans.rejected)


def test_what_cannot_be_among_the_best_is_not_built():
    """A reason for each choice: its bound, and the plans that take less."""
    plans = jp.plan(MODEL, COSTS, **SHAPE, most=1)
    assert len(plans) == 1
    full = [r for r in plans.rejected if "remat full" in r.what]
    assert all("or more, and 1 plans take less" in r.why for r in full)
    assert all(r.seconds > plans.best.seconds for r in full)
    assert len(full) == 4


def test_numbers_of_microbatches_have_costs_of_their_own():
    """Twice as many microbatches of half the size, which take more than half the time each."""

    def costs(share):
        return {
            c: jp.LayerCost(
                forward=share * v.forward,
                input_grad=share * v.input_grad,
                weight_grad=share * v.weight_grad,
            )
            for c, v in COSTS.items()
        }

    given = {"devices": 2, "schedules": ("1f1b",), "chunks": (1,), "remat": (None,)}
    found = jp.plan(MODEL, {4: costs(1), 8: costs(0.55)}, microbatches=(4, 8), **given)
    alone = [
        jp.plan(MODEL, costs(share), microbatches=count, **given).best
        for count, share in ((4, 1), (8, 0.55))
    ]
    assert {p.schedule.num_microbatches: p.seconds for p in found} == {
        p.schedule.num_microbatches: p.seconds for p in alone
    }
    assert {p.label for p in found} == {"1f1b, V 1, M 4", "1f1b, V 1, M 8"}
    with pytest.raises(
        jp.PlanError, match="costs are missing for 8 microbatches: a microbatch of another size"
    ):
        jp.plan(MODEL, {4: costs(1)}, microbatches=(4, 8), **given)
    with pytest.raises(jp.PlanError, match="costs are given by number of microbatches"):
        jp.plan(MODEL, {4: costs(1)}, microbatches=4, **given)
    with pytest.raises(jp.PlanError, match="microbatches must be a whole number"):
        jp.plan(MODEL, COSTS, microbatches=(), **given)


@pytest.mark.slow
def test_some_microbatches_are_recomputed_where_that_is_enough():
    """1F1B holds most on the first device, so that alone computes again, and once a few
    microbatches: faster than where all do.
    """
    given = {"devices": 4, "microbatches": 8, "schedules": ("1f1b",), "chunks": (1,)}
    plain = jp.plan("Et*8,L", COSTS, **given, remat=(None,)).best
    limit = max(plain.memory) - 1
    some = jp.plan("Et*8,L", COSTS, **given, remat=("stages",), memory=limit)
    full = jp.plan("Et*8,L", COSTS, **given, remat=("full",), memory=limit).best
    assert all(max(plan.memory) <= limit for plan in some)
    assert plain.seconds < some.best.seconds < full.seconds
    recomputed = [
        [action for _, _, action in plan.schedule.actions() if action.kind is jp.Kind.R]
        for plan in some
    ]
    # Two of eight: with room for 3 of the 4 in flight, one microbatch of each four finds none.
    # More R may be faster, as a program.
    fewest, plan = min(zip(recomputed, some, strict=True), key=lambda each: len(each[0]))
    assert {action.stage for action in fewest} == {0}
    assert len(fewest) == 2
    assert "recompute 6%" in plan.label
    assert plan.remat is None, "the table says it"


@pytest.mark.slow
def test_auto_uses_the_memory_that_there_is():
    found = jp.plan(
        MODEL,
        COSTS,
        devices=2,
        microbatches=6,
        chunks=(1,),
        schedules=("auto",),
        remat=(None,),
        memory=9.5e9,
    )
    assert max(found.best.memory) <= 9.5e9
    more = jp.plan(
        MODEL,
        COSTS,
        devices=2,
        microbatches=6,
        chunks=(1,),
        schedules=("auto",),
        remat=(None,),
        memory=20e9,
    )
    assert more.best.seconds <= found.best.seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"costs": {"t": T}}, "costs are missing for layer 'E'"),
        ({"devices": 99}, "8 layers are too few for 99 devices"),
        ({"memory": 80}, "for gigabytes write 80e9"),
        (
            {"costs": {**COSTS, "t": jp.LayerCost(forward=9000, input_grad=1, weight_grad=1)}},
            "times are in seconds",
        ),
        ({"transfer": 90}, "over a thousand times a layer's"),
        ({"remat": ("some",)}, "remat holds 'some'"),
        ({"layers": "Et|tL"}, "already holds '|'"),
        ({"schedules": ("zbv",), "chunks": (1,)}, "no schedule can be built"),
        ({"mesh": "cpu"}, "mesh must be a jax.sharding.Mesh"),
        ({"most": 0}, "most must be a whole number of at least 1, at most 10,000,000,000, not 0"),
        (
            {"transfer": {1: 2}},
            "transfer is given by number of microbatches, but microbatches is one number",
        ),
        (
            {"transfer": {8: 2e-3}, "microbatches": (4, 8), "costs": {4: COSTS, 8: COSTS}},
            "transfer is missing for 4 microbatches; give the seconds of a hop for each number",
        ),
        (
            {"transfer": {4: "fast"}, "microbatches": (4,), "costs": {4: COSTS}},
            "transfer must be seconds",
        ),
        ({"layers": 8, "costs": None, "chunks": 1, "axis": 0}, "costs must be a mapping"),
        ({"costs": {**COSTS, 3.5: T}}, "costs has a key 3.5"),
        ({"costs": {**COSTS, "t": jp.Costs()}}, "must be a jaxpipe.LayerCost"),
        ({"microbatches": ([],)}, "microbatches must be a whole number of at least 1"),
        ({"microbatches": np.array([4.5])}, "microbatches must be a whole number of at least 1"),
        (
            {"microbatches": b"48", "costs": {52: COSTS, 56: COSTS}},
            "microbatches must be a whole number of at least 1",
        ),
        ({"chunks": np.array(1)}, "chunks must be one or a few whole numbers"),
        ({"chunks": (1, 0)}, "chunks must be one or a few whole numbers"),
        ({"slices": ()}, "slices must be one or a few whole numbers"),
        ({"memory": 0, "search": float("nan")}, "search must be seconds, 0 or more, not nan"),
        ({"memory": Fraction(80)}, "for gigabytes write 80e9"),
        ({"schedules": np.array(["zbv", "v_min"]), "chunks": (1,)}, "no schedule can be built"),
        (
            {"schedules": ("dualpipe",), "chunks": (2,)},
            "2 stages, each on several devices; choose it by chunks=(1,)",
        ),
        (
            {"traced": lambda plan: {"stages": 1}},
            "traced must return bytes by what they are for, and their 'total'",
        ),
        ({"schedules": 1}, "schedules must be a text or a sequence of texts or None"),
        ({"search": "long", "seed": -1}, "seed must be a whole number of at least 0"),
        ({"progress": 1, "traced": "it"}, "traced must be a function or None"),
    ],
)
def test_faults_are_named(change, message):
    given = {"layers": MODEL, "costs": COSTS, **SHAPE, **change}
    with pytest.raises(jp.PlanError) as caught:
        jp.plan(given.pop("layers"), given.pop("costs"), **given)
    assert message in str(caught.value)


def test_a_stage_on_two_devices_is_planned_once_and_not_searched_for():
    """A layout of DualPipe has a stage a device, and `auto` has no placement of its kind."""
    plans = jp.plan(
        MODEL, COSTS, devices=2, microbatches=4, schedules=("dualpipe",), remat=(None,), search=0.1
    )
    assert [plan.label for plan in plans] == ["dualpipe, V 1"]
    assert plans[0].layout.count("|") == 1
    parts = plans[0].parts
    held = T.held_bytes * 6 + EMBED.held_bytes + HEAD.held_bytes  # every device holds all layers
    assert parts.parameters + parts.gradients + parts.optimizer == held
    assert "chunks=(1,)" in plans.rejected[0].why


def test_a_layer_cost_is_a_number_of_at_least_0():
    with pytest.raises(jp.CostError, match="forward must be a finite number >= 0"):
        jp.LayerCost(forward=-1, input_grad=0, weight_grad=0)
