"""Plans choose how many stages of a device are whole at a time, where replicas split them."""

from __future__ import annotations

import json
import re
import shlex

import pytest

import jaxpipe as jp
from jaxpipe.cli.main import main
from jaxpipe.lowering.plan import plan_of
from jaxpipe.lowering.rooms import with_rooms
from jaxpipe.lowering.target import RunsOn
from jaxpipe.planner.layer_cost import LayerCost
from jaxpipe.planner.transformer import Transformer
from jaxpipe.transforms import Reduce
from tests.table.test_plan_meshes import mesh_of

SHARDS, CHUNKS, BANDWIDTH = 4, 4, 3e9
# Of a device's part; whole, a layer's parameters and gradient are 4e9 and 8e9 bytes.  A device
# receives three parts of four: a gather takes a second, a reduction two.
LAYER = LayerCost(
    forward=1.0,
    input_grad=1.0,
    weight_grad=1.0,
    parameters=1e9,
    gradients=2e9,
    residuals=1e8,
    boundary=1e7,
)
GIVEN = {
    "devices": 2,
    "microbatches": 8,
    "schedules": ("interleaved_1f1b",),
    "chunks": (CHUNKS,),
    "remat": (None,),
    "offload": (None,),
    "fsdp": {"data": SHARDS},
    "fsdp_bandwidth": BANDWIDTH,
    "mesh": RunsOn.CPU_PROCESSES,  # predicates take no time there
}


def plans(layers: str = "t" * 8, cost: LayerCost = LAYER, **more):
    return {p.max_active: p for p in jp.plan(layers, {"t": cost}, **{**GIVEN, **more})}


def test_whole_stages_are_those_that_are_whole_at_once():
    """By hand: 12e9 bytes of parameters and gradient a layer, and parts of all of them."""
    found = plans()
    assert found.keys() == {None, 1, 2, 3}
    for most, plan in found.items():
        assert plan.parts.gathered == (most or CHUNKS) * SHARDS * 3e9
        assert (plan.parts.parameters, plan.parts.gradients) == (4e9, 8e9)
        assert plan.fsdp == "data"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_fewer_stages_are_whole_where_memory_demands_it(most):
    limit = max(plans()[most].memory)
    fits = plans(memory=limit)
    assert fits.keys() == set(range(1, most + 1))
    assert next(iter(fits)) == most, "the fewer, the slower"
    left = jp.plan("t" * 8, {"t": LAYER}, **GIVEN, memory=limit).rejected
    (once,) = (r for r in left if "max_active" not in r.what)
    assert "does not fit by" in once.why
    with pytest.raises(jp.PlanError, match=r"nothing fits .* max_active 1"):
        plans(memory=max(plans()[1].memory) - 1)


@pytest.mark.parametrize("bandwidth", [BANDWIDTH, BANDWIDTH / 4, BANDWIDTH * 100])
def test_seconds_are_those_of_the_table_with_gathers(bandwidth):
    """Each, and the best, against every table, whose gathers and reductions take what is computed
    by hand; once a step they are beside no action.
    """
    table = jp.schedules.build("interleaved_1f1b", devices=2, microbatches=8, chunks=CHUNKS)
    gather, reduce = 3e9 / bandwidth, 6e9 / bandwidth
    costs = jp.Costs(gather=gather, reduce=reduce)
    plain = jp.simulate(table, costs).makespan
    # what the lowered programs take besides, as transfers are awaited in them
    programs = {
        most: plan_of(with_rooms(table, most), costs=costs).makespan_of(costs) - plain
        for most in (None, 1, 2, 3)
    }
    wanted = {None: plain + CHUNKS * (gather + reduce)}
    for most in (1, 2, 3):
        gathered = jp.add_gathers(table, max_active=most, reduce=Reduce.EACH_RUN)
        wanted[most] = jp.simulate(gathered, costs).makespan
    found = plans(fsdp_bandwidth=bandwidth)
    seconds = {most: plan.seconds for most, plan in found.items()}
    assert seconds == pytest.approx({n: wanted[n] + programs[n] for n in wanted})
    best = min(seconds, key=seconds.__getitem__)
    assert next(iter(found)) == best
    assert (best is None) == (bandwidth < BANDWIDTH), "slow links gather once"
    for most, plan in found.items():
        assert plan.lower_bound <= plan.seconds
        late = wanted[most] - plain
        assert f"take {late * 1e3:.3g} ms beside no action" in plan.why
        assert plan.timeline.makespan == pytest.approx(plain if most is None else wanted[most])


def test_a_room_has_the_size_of_the_largest_stage():
    """And every chunk is stored like the largest."""
    found = plans("t" * 9)
    for most, plan in found.items():
        stages = jp.parse_layout(plan.layout, devices=2).stages
        assert sorted(map(len, stages)) == [1] * 7 + [2]
        assert plan.parts.gathered == SHARDS * 3e9 * (2 * most if most else 5)
        assert plan.parts.parameters == (CHUNKS * 2e9 if most else 5e9)


def test_embedding_and_head_are_gathered_once():
    """By hand: three parts of the parameters and the gradients of both, beside no action."""

    def found(size: float) -> dict[int | None, jp.planner.PipelinePlan]:
        end = LayerCost(forward=1.0, input_grad=0.0, weight_grad=1.0, parameters=size)
        costs = {"t": LAYER, "E": end, "L": end}
        return {p.max_active: p for p in jp.plan("E" + "t" * 8 + "L", costs, **GIVEN)}

    light, heavy = found(0), found(5e8)
    assert light.keys() == heavy.keys() == {None, 1, 2, 3}
    for most, plan in heavy.items():
        ends = 2 * SHARDS * 2 * 5e8
        assert plan.parts.gathered == (most or CHUNKS) * SHARDS * 3e9 + ends
        assert plan.seconds - light[most].seconds == pytest.approx(2 * 3 * 2 * 5e8 / BANDWIDTH)


def test_experts_are_not_gathered():
    """Three quarters of a layer's bytes are its own: whole is what is left.  A room has copies of
    all.
    """
    mixture = jp.LayerCost(
        forward=1.0,
        input_grad=1.0,
        weight_grad=1.0,
        parameters=4e9,
        local=3e9,
        gradients=8e9,
    )
    found = plans(cost=mixture)
    for most, plan in found.items():
        each = SHARDS * 3e9 + (9e9 if most else 0)
        assert plan.parts.gathered == (most or CHUNKS) * each
        assert plan.costs.gather == (1.0,) * 8
        assert plan.costs.reduce == (2.0,) * 8
    model = Transformer(
        width=1024, vocab=32000, ffn=512, experts=64, chosen=2, capacity=1.25, expert_devices=8
    )
    layer = model.costs()["t"]
    experts = 3 * 1024 * 512 * 64 / 8
    assert layer.local == 2 * experts
    assert layer.split(8).local == layer.local
    split = layer.split(8)
    assert split.parameters == pytest.approx(layer.local + (layer.parameters - layer.local) / 8)
    assert split.gradient_bytes == pytest.approx(2 * split.parameters)
    assert split.optimizer_bytes == pytest.approx(6 * split.parameters)


def test_runs_of_all_microbatches_need_few_gathers():
    """Where there is no room for two whole stages, one in turn is nearly as fast."""
    given = {**GIVEN, "schedules": None, "most": 20}
    every = {(p.schedule.name, p.max_active): p for p in jp.plan("t" * 8, {"t": LAYER}, **given)}
    looped = every["looped_bfs", 1]
    best = jp.plan("t" * 8, {"t": LAYER}, **given, memory=max(looped.memory)).best
    assert (best.schedule.name, best.max_active) == ("looped_bfs", 1)
    assert best.seconds < every["interleaved_1f1b", None].seconds * 1.03
    assert every["interleaved_1f1b", 1].seconds > 1.5 * best.seconds
    without = {**given, "fsdp": None}
    assert "looped_bfs" not in {p.schedule.name for p in jp.plan("t" * 8, {"t": LAYER}, **without)}


def test_pairs_of_both_stages_gather_once():
    given = {**GIVEN, "schedules": ("dualpipev", "zbv", "1f1b"), "chunks": (1, 2)}
    found = jp.plan("t" * 8, {"t": LAYER}, **given)
    assert {(p.schedule.name, p.max_active) for p in found} == {
        ("1f1b", None),
        ("zbv", None),
        ("zbv", 1),
        ("dualpipev", None),
    }
    (pairs,) = (r for r in found.rejected if "dualpipev" in r.what)
    assert "max_active 1" in pairs.what
    assert "the table has pairs of two stages" in pairs.why


def test_without_the_axis_nothing_is_gathered():
    (plan,) = jp.plan("t" * 8, {"t": LAYER}, **{**GIVEN, "fsdp": None})
    assert (plan.fsdp, plan.max_active, plan.parts.gathered) == (None, None, 0)
    assert plan.costs.gather is None
    assert "gathers" not in plan.why


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fsdp": {"data": 2, "rows": 2}}, "fsdp must be one axis and its devices"),
        ({"fsdp": {"pipe": 2}}, "fsdp names 'pipe', the axis of the pipeline"),
        (
            {"mesh": mesh_of(pipe=2, data=8), "data_axes": "data"},
            "fsdp is 4, but mesh axis 'data' has 8",
        ),
        ({"fsdp": None, "max_active": (1,)}, "max_active is (1,), but nothing is split"),
    ],
)
def test_faults_of_the_axis_are_named(arguments, says):
    with pytest.raises(jp.PlanError, match=re.escape(says)):
        plans(**arguments)


def test_the_command_plans_for_replicas_that_split(capsys):
    decoder = shlex.split("--layers 16 --width 4096 --vocab 32000 --context 4096 -P 2 -M 8")
    few = shlex.split("--schedules interleaved_1f1b -V 2 --remat none --no-offload")
    assert main(["plan", *decoder, *few, "--fsdp", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    assert {p["fsdp"] for p in found} == {"data"}
    spread = {p["max_active"]: p for p in found if p["spread"] == "L"}
    # Parameters of 2 bytes and gradients of 4: an embedding, half of the head, and stages of four
    # layers.
    table, layer = 32000 * 4096, 12 * 4096**2
    for most in (None, 1):
        whole = 6 * (1.5 * table + 4 * (most or 2) * layer)
        assert spread[most]["memory_parts"]["gathered"] == pytest.approx(whole)
    assert spread[1]["label"] == "interleaved_1f1b, V 2, spread L, max_active 1"
    fast = ["--fsdp-bandwidth", "1e15"]
    assert main(["plan", *decoder, *few, "--fsdp", "8", "--json", *fast]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["seconds"] < found[0]["seconds"]
    assert main(["plan", *decoder, *few, "--fsdp", "8"]) == 0
    assert "gathers and reductions (" in capsys.readouterr().out
    for wrong in ("0", "-1"):
        assert main(["plan", *decoder, *few, "--fsdp", wrong]) == 2
        assert "fsdp must be one axis and its devices" in capsys.readouterr().err
