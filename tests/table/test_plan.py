"""`plan`: the best split of all, plans that fit, reasons for the others, and errors that say what
to change.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import time
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.cli import terminal
from jaxpipe.cli.main import main
from jaxpipe.inspect.step_report import step_time
from jaxpipe.lowering.overheads import GUESSED, ON_HOST
from jaxpipe.lowering.plan import Candidate, choose_candidate, plan_of
from jaxpipe.lowering.target import RunsOn
from jaxpipe.planner import candidate
from jaxpipe.planner.layer_cost import Ends, Kept, Remat
from jaxpipe.planner.layers import balanced
from jaxpipe.planner.memory import least_slots
from jaxpipe.planner.running import awaited_at_once
from jaxpipe.planner.transformer import Transformer
from jaxpipe.program.segments import Segment
from jaxpipe.program.templates import Payload, Permute, TickTemplate
from jaxpipe.transforms.spread import spread_last

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
    # A run of layers is a scan, which keeps what each of them takes besides.
    assert parts.pools["residual_weight"] == 4 * inner * (1e8 + 1e7)
    assert full.parts.pools["residual_weight"] == 0
    assert full.seconds > gpipe.seconds


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
    """Against every way to cut, with a limit on what a stage may hold."""
    letters = "EttmtmL"
    costs = {
        **COSTS,
        "m": jp.LayerCost(forward=0.004, input_grad=0.003, weight_grad=0.002, parameters=3e9),
    }
    seconds = [costs[c].forward + costs[c].backward_seconds for c in letters]
    for most in (float("inf"), 16e9, 14e9):

        def worst(cuts, most=most):
            pieces = [range(a, b) for a, b in itertools.pairwise((0, *cuts, len(letters)))]
            held = max(
                sum(costs[letters[i]].held_bytes for i in piece if letters[i] not in "EL")
                for piece in pieces
            )
            return (
                max(sum(seconds[i] for i in piece) for piece in pieces)
                if held <= most
                else float("inf")
            )

        least = min(worst(cuts) for cuts in itertools.combinations(range(1, len(letters)), 2))
        layout = balanced(letters, costs, devices=3, chunks=1, remat=Remat.NONE, most_bytes=most)
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
            2e10,
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

    monkeypatch.setattr(candidate, "program_of", refused)
    with pytest.raises(
        jp.PlanError,
        match=r"nothing fits into 6\.1 GiB a device: the nearest is 1f1b, V 1, remat full, .* "
        r"needs at least .* more",
    ):
        jp.plan(MODEL, COSTS, **SHAPE, memory=6.6e9)
    monkeypatch.setattr(candidate, "build", refused)
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
    # Each microbatch's residuals of three layers, with what the scan takes, travel at that rate.
    assert slow.seconds == pytest.approx(16 * 3 * (1e8 + 1e7) / 1e9)


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


def test_progress_is_told_of_choices_and_of_programs(monkeypatch, capsys):
    told = []
    jp.plan(MODEL, COSTS, **SHAPE, progress=lambda done, of: told.append((done, of)))
    assert told[: told[0][1]] == [(i + 1, told[0][1]) for i in range(told[0][1])]
    assert told[told[0][1]][0] == 1
    monkeypatch.setattr(terminal, "_PATIENCE", 0)
    sizes = [
        "--layers",
        "6",
        "--width",
        "1024",
        "--vocab",
        "32000",
        "-P",
        "2",
        "-M",
        "4",
        "--schedules",
        "1f1b",
        "zb_h1",
        "-V",
        "1",
    ]
    assert main(["plan", *sizes]) == 0
    assert capsys.readouterr().err == "planning: 1 of 16 done\n"


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
    with pytest.raises(jp.PlanError, match="microbatches is empty"):
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


def test_programs_are_those_of_the_mesh():
    """By hand: 2 devices, 1F1B in lock-step where everybody waits for every transfer, else as the
    table has it.
    """
    layer = jp.LayerCost(forward=1, input_grad=1, weight_grad=1)
    given = {
        "devices": 2,
        "microbatches": 4,
        "schedules": ("1f1b",),
        "chunks": (1,),
        "remat": (None,),
    }
    found = {where: jp.plan("tt", {"t": layer}, **given, mesh=where).best for where in RunsOn}
    # (M + P - 1) (F + B) with unit F, and B = 2.
    table = found[RunsOn.CPU_PROCESSES].timeline.makespan
    assert table == 15
    # Predicates take some microseconds each.
    assert table < found[RunsOn.GPUS].seconds < table + 1e-3
    assert found[RunsOn.CPU_PROCESSES].seconds == table
    virtual = SimpleNamespace(
        devices=np.array([SimpleNamespace(platform="cpu", process_index=0)] * 2)
    )
    assert RunsOn.of(virtual) is RunsOn.ONE_CPU_PROCESS


def test_a_program_is_chosen_for_the_transfers_of_its_costs():
    """Where each takes a tenth of a forward, ramps are cut so that fewer of them are made."""
    costs = jp.Costs(forward=0.02, input_grad=0.022, weight_grad=0.018, transfer=0, last=0.007)
    table = spread_last(jp.schedules.build("zbv", devices=4, microbatches=8))
    slow = replace(costs, transfer=0.002)
    blind, found = (choose_candidate(table, costs=each) for each in (costs, slow))
    assert blind.makespan < found.makespan
    timed = Candidate.of(blind.ticks, blind.segments, slow, GUESSED)
    assert found.makespan < 0.95 * timed.makespan


LLAMA3_8B = shlex.split(
    "--layers 32 --width 4096 --ffn 14336 --gated --kv-share 0.25 --vocab 128256 --context 8192 "
    "--devices 8 -M 32 --memory 80GB"
)


@pytest.mark.slow
def test_all_choices_of_an_8b_model_take_seconds(capsys):
    """A step without any bubble takes 4.22 s, 1F1B without spread ends 6.9 s."""
    begin = time.process_time()
    assert main(["plan", *LLAMA3_8B, "--json"]) == 0
    spent = time.process_time() - begin
    out, err = capsys.readouterr()
    best, *_ = json.loads(out)["plans"]
    assert best["lower_bound"] < best["seconds"] <= 4.59
    assert max(best["memory"]) <= 80e9
    assert spent <= 15
    assert err.count("\n") <= 1, "one line where there is no terminal"


def test_neighbours_of_one_host_have_its_links(capsys):
    model = Transformer(width=1024, vocab=32000, tensor=2)
    assert model.on(4).transfer < model.transfer
    assert model.on(4).bandwidth == model.tensor_bandwidth
    assert model.on(8) == model
    sizes = ["--layers", "6", "--width", "4096", "--vocab", "32000", "-M", "16", "--json"]
    sizes += ["--schedules", "1f1b", "-V", "1", "--remat", "none"]

    def seconds(*flags):
        assert main(["plan", *sizes, *flags]) == 0
        return json.loads(capsys.readouterr().out)["plans"][0]["seconds"]

    within = seconds("-P", "4")
    assert within == seconds("-P", "4", "--bandwidth", "3e11")
    assert within < seconds("-P", "4", "--bandwidth", "5e10")


def mesh_of(**sizes):
    """What `plan` reads of a mesh of GPUs."""
    gpu = SimpleNamespace(platform="gpu", process_index=0, device_kind="a GPU")
    return SimpleNamespace(devices=np.full(tuple(sizes.values()), gpu), shape=sizes)


def test_blocks_that_communicate_have_predicates_of_the_host():
    """The program, and its seconds, are those of `Pipeline` on such a mesh (`step_time`), whose
    host waits for each predicate.
    """
    layer = jp.LayerCost(forward=1e-3, input_grad=1e-3, weight_grad=1e-3)
    given = {
        "devices": 2,
        "microbatches": 4,
        "schedules": ("1f1b",),
        "chunks": (1,),
        "remat": (None,),
    }

    def found(mesh, **axes):
        return jp.plan("tt", {"t": layer}, **given, mesh=mesh, **axes).best

    alone, data = found(mesh_of(pipe=2)), found(mesh_of(pipe=2, data=4), data_axes="data")
    assert alone.seconds == data.seconds == found(None).seconds
    assert data.data_axes == ("data",)
    tensor = found(mesh_of(stages=2, tensor=2), axis="stages")
    assert tensor.axis == "stages"
    host = replace(ON_HOST, hop=0.0)
    program = plan_of(tensor.schedule, costs=tensor.costs, overheads=ON_HOST)
    assert tensor.seconds == step_time(program, host, tensor.costs).seconds
    assert tensor.seconds > alone.seconds + host.predicate


@pytest.mark.parametrize(
    ("mesh", "axes", "says"),
    [
        (
            mesh_of(stages=2),
            {},
            "the mesh has no axis 'pipe'; its axes are {'stages': 2}: write axis=",
        ),
        (mesh_of(pipe=4), {}, "devices is 2, but mesh axis 'pipe' has 4"),
        (mesh_of(pipe=2), {"data_axes": ("rows",)}, "the mesh has no data axis 'rows'"),
        (2, {}, "mesh must be a jax.sharding.Mesh"),
    ],
)
def test_a_mesh_that_the_plan_cannot_run_on_is_named(mesh, axes, says):
    layer = jp.LayerCost(forward=1e-3, input_grad=1e-3, weight_grad=1e-3)
    with pytest.raises(jp.PlanError, match=re.escape(says)):
        jp.plan("tt", {"t": layer}, devices=2, microbatches=4, mesh=mesh, **axes)


def test_whoever_comes_to_a_transfer_waits():
    """Two ticks of three devices: 0 and 1 exchange after the first; 2 is slow."""
    costs = np.array([[1.0, 2.0, 3.0], [5.0, 1.0, 1.0]])
    exchange = (Permute(Payload.ACTIVATION, ((0, 1),)),)
    ticks = tuple(TickTemplate((), those) for those in (exchange, ()))
    segments = (Segment(0, 1, ticks),)
    assert awaited_at_once(costs, segments, 0.25, by_all=False) == 2 + 0.25 + 5
    assert awaited_at_once(costs, segments, 0.25, by_all=True) == 3 + 0.25 + 5


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
        ({"most": 0}, "most must be a whole number of at least 1, not 0"),
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
        ({"chunks": np.array(1)}, "chunks must be a few whole numbers"),
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
        ({"schedules": 1}, "schedules must be names"),
        ({"search": "long", "seed": -1}, "seed must be a whole number of at least 0"),
        ({"progress": 1, "traced": "it"}, "traced must be a function of a plan"),
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
    with pytest.raises(jp.CostError, match="forward is -1"):
        jp.LayerCost(forward=-1, input_grad=0, weight_grad=0)


def test_the_command_prints_a_table_json_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "plan.svg"
    sizes = [
        "--layers",
        "6",
        "--width",
        "1024",
        "--vocab",
        "32000",
        "-P",
        "2",
        "-M",
        "4",
        "--schedules",
        "1f1b",
        "zb_h1",
        "-V",
        "1",
    ]
    assert main(["plan", *sizes, "--memory", "80GB", "-o", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan")
    assert "best:" in out
    assert "bound" in out.splitlines()[0].split()
    assert "estimates" in out
    assert "<svg" in picture.read_text()
    costs = {
        name: {"forward": c.forward, "input_grad": c.input_grad, "weight_grad": c.weight_grad}
        for name, c in COSTS.items()
    }
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"layers": MODEL, "costs": costs, "transfer": 0.001}))
    assert (
        main(
            [
                "plan",
                "--costs",
                str(file),
                "-P",
                "2",
                "-M",
                "4",
                "--schedules",
                "1f1b",
                "-V",
                "1",
                "--remat",
                "none",
                "--json",
            ]
        )
        == 0
    )
    facts = json.loads(capsys.readouterr().out)
    (best,) = facts["plans"]
    assert best["schedule"] == "1f1b"
    assert best["seconds"] > best["lower_bound"] > 0
    assert best["gap"] == pytest.approx(best["seconds"] / best["lower_bound"] - 1)
    assert best["certificate"].endswith("relaxations, for any schedule)")


def test_sizes_of_experts_and_tied_tables_are_planned(capsys):
    """A tied table is held once, and its two ends are spread together."""
    sizes = shlex.split("--layers 8 --width 1024 --ffn 256 --vocab 64000 -P 4 -M 8 -V 1")
    experts = shlex.split("--experts 16 --chosen 2 --shared 256 --capacity 1.25")
    kinds = shlex.split("--expert-devices 4 --normed --post-norms --schedules 1f1b --json")
    kinds += ["--remat", "none"]
    held = {}
    for tied in ([], ["--tied"]):
        assert main(["plan", *sizes, *experts, *kinds, *tied]) == 0
        plans = json.loads(capsys.readouterr().out)["plans"]
        held[len(tied)] = {p["spread"]: p["memory_parts"]["parameters"] for p in plans}
    assert held[0].keys() == {"", "L"}
    assert held[1].keys() == {"", "EL"}
    table = 2 * 64000 * 1024
    assert held[0][""] - held[1][""] == table
    layer = 1024 * (4 * 1024 + 3 * 256 * 16 / 4 + 3 * 256 + 16)
    assert held[1]["EL"] == pytest.approx(2 * 2 * layer + table / 4)
    faults = ["--experts", "-1", "--capacity", "-1"]
    assert main(["plan", *sizes, *faults]) == 2
    assert "experts must be a number of at least 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "6"], "give --width, --vocab"),
        (["--costs", "{file}"], "forward is missing"),
    ],
)
def test_the_command_says_what_is_missing(tmp_path, capsys, arguments, message):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"layers": "t*4", "costs": {"t": {}}}))
    given = [str(file) if a == "{file}" else a for a in arguments]
    assert main(["plan", *given, "-P", "2", "-M", "4"]) == 2
    assert message in capsys.readouterr().err
