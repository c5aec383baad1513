"""`measure`: seconds and bytes of every stage, estimates marked as such, JSON both ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe.inspect.blocks import compile_blocks, stage_blocks
from jaxpipe.lowering.target import Target
from jaxpipe.measuring import measure_stages, traced
from jaxpipe.spmd.emit import EmittedStep
from jaxpipe.table.effects import Place
from tests.flat import flat_pipeline

WIDTH, ROWS, M = 64, 16, 4


def layer(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


LAYERS = {
    "E": lambda w, microbatch: microbatch["x"] @ w,
    "t": layer,
    "L": lambda w, x, microbatch: jnp.mean((x @ w) ** 2),
}


MODEL = jp.Model(LAYERS, layers="EttttttL")


def shapes(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


PARAMS = {
    "first": shapes(WIDTH, WIDTH),
    "stages": {
        "t": {"up": shapes(6, WIDTH, 4 * WIDTH), "down": shapes(6, 4 * WIDTH, WIDTH)},
    },
    "last": shapes(WIDTH, 10),
}
BATCH = {"x": shapes(ROWS * M, WIDTH)}


@pytest.fixture(scope="module")
def pipe():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    return jp.Pipeline(
        jp.Model(LAYERS, layers="EttttttL"),
        schedule,
        jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2]),
        layout="Etttt|ttL",
    )


def test_blocks_need_no_trace_of_the_whole_step(pipe, monkeypatch):
    monkeypatch.setattr(EmittedStep, "run", lambda *_: pytest.fail("the step is traced"))
    assert traced(pipe, pipe.place(PARAMS), BATCH, None, ()).code.kinds


def test_measured_costs_are_seconds_of_each_stage(pipe):
    """Times differ with the machine; sizes do not."""
    costs = measure_stages(pipe, pipe.place(PARAMS), BATCH, repeats=3)
    assert costs.unit.startswith("seconds, measured on")
    times = costs.for_stages(2)
    assert all(
        t > 0 for t in (*times.forward, *times.input_grad, *times.weight_grad, *times.backward)
    )
    # The residuals of a layer are its hidden values alone; the stage's own input comes with them,
    # and those of its inner layers.
    hidden = ROWS * 4 * WIDTH * 4
    assert times.activation[0] >= 4 * hidden + ROWS * WIDTH * 4
    assert times.checkpoint == (ROWS * WIDTH * 4,) * 2
    again = jp.Costs.from_json(costs.to_json())
    assert again == costs
    assert again.unit == costs.unit
    assert jp.simulate(pipe.schedule, costs).makespan > 0


def test_estimates_count_flops_and_say_so(pipe):
    peak = jp.measuring.Peak(flops=1e9, bandwidth=1e30, link=1e6, latency=1.0)
    costs = measure_stages(pipe, pipe.place(PARAMS), BATCH, peak=peak)
    assert costs.unit.startswith("seconds, estimated for 1e+09 flops")
    times = costs.for_stages(2)
    matmul = 2 * ROWS * WIDTH * 4 * WIDTH / 1e9
    # tanh and sums come on top of two matmuls a layer: (4 + 2) / (4 * 64) of them and less.
    assert times.forward[0] == pytest.approx(
        4 * 2 * matmul + 2 * ROWS * WIDTH * WIDTH / 1e9, rel=0.05
    )
    assert times.weight_grad[0] == pytest.approx(4 * 2 * matmul, rel=0.05)
    assert costs.transfer == 1 + ROWS * WIDTH * 4 / 1e6


@pytest.mark.slow
def test_layers_are_measured_apart_and_planned():
    microbatch = {"x": shapes(ROWS, WIDTH)}
    costs = jp.measure(
        MODEL, PARAMS, microbatch, peak=jp.measuring.Peak(flops=1e12, bandwidth=1e30)
    )
    assert set(costs) == set("EtL")
    assert costs["t"].parameters == costs["t"].gradients == 2 * 4 * WIDTH * WIDTH * 4
    assert costs["t"].boundary == ROWS * WIDTH * 4
    assert costs["t"].residuals >= ROWS * 4 * WIDTH * 4
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    options = {"chunks": (1,), "schedules": ("1f1b",), "remat": (None,)}
    options |= {"devices": 2, "microbatches": M}
    plans = jp.plan("Et*6,L", costs, **options, mesh=mesh)  # layers are a scan on CPUs
    built = plans.best.pipeline(MODEL, mesh)
    # What the plan says of parameters and pools, against the compiled program's own account.
    report = jp.inspect.report(built, built.place(PARAMS), BATCH)
    held = plans.best.parts
    residuals = sum(report["pool_bytes"][pool] for pool in ("residual_input", "residual_weight"))
    assert held.pools["residual_weight"] == residuals
    assert held.batch == BATCH["x"].size * 4
    # The traced model's own account, which a plan can be given instead.
    memory = jp.measuring.traced_memory(MODEL, PARAMS, microbatch, mesh=mesh)
    traced = jp.plan("Et*6,L", costs, **options, traced=memory)
    assert traced.best.traced == report["predicted"]
    gradients = 2 * (costs["t"].gradients * 3 + costs["E"].gradients + costs["L"].gradients)
    assert max(traced.best.memory) == report["predicted"]["total"] + gradients, "Adam's two moments"


def test_policies_are_measured_and_planned():
    """Bytes are those of the traced layer under each policy, and the plan's pipeline runs it."""
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((ROWS, *a.shape[1:]), a.dtype), BATCH)
    peak = jp.measuring.Peak(flops=1e12, bandwidth=1e12)
    names = ("dots_saveable", "nothing_saveable")
    cost = jp.measure(MODEL, PARAMS, one, peak=peak, policies=names)["t"]
    hidden = ROWS * 4 * WIDTH * 4
    assert cost.residuals == hidden  # tanh, from which its gradient follows
    # The product, of which tanh is computed again; then nothing.
    assert [cost.policies[name].residuals for name in names] == [hidden, 0]
    dots, none = (cost.policies[name].again for name in names)
    assert 0 <= dots < none
    costs = jp.measure(MODEL, PARAMS, one, peak=peak, policies=names)
    options = {"schedules": ("1f1b",), "chunks": (1,), "remat": names[1:]}
    plan = jp.plan(MODEL, costs, devices=2, microbatches=M, **options).best
    assert plan.policies == (("t", "nothing_saveable"),)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    pipe = plan.pipeline(MODEL, mesh)
    (kind,) = pipe.trace(pipe.place(PARAMS), BATCH).code.kinds[:1]
    kept = (*kind.avals[Place.RESIDUAL_INPUT], *kind.avals[Place.RESIDUAL_WEIGHT])
    assert all(4 * WIDTH not in leaf.shape for leaf in kept)
    with pytest.raises(jp.PipelineError, match=r"policies must be names of jax\.checkpoint"):
        jp.measure(MODEL, PARAMS, one, peak=peak, policies=("dots",))
    stages = {"stages": PARAMS["stages"]["t"]}
    with pytest.raises(jp.PipelineError, match="policies are of the letters of layers"):
        jp.measure(jp.Model(layer), stages, {"x": one["x"]}, peak=peak, policies=names)


def test_shared_parameters_are_planned_with_the_last_layer():
    """Every device has a tied table, its gradient and Adam's moments; what is frozen
    has neither.
    """
    tied = {
        "E": lambda w, microbatch, *, shared: shared["table"][microbatch["tokens"]],
        "t": lambda w, x: jnp.tanh(x @ w["w"]),
        "L": lambda w, x, microbatch, *, shared: jnp.mean((x @ shared["table"].T) ** 2),
    }
    model = jp.Model(tied, layers="EttL")
    table, width = 4 * 512 * 16, 4 * 16 * 16
    params = {
        "first": {},
        "stages": {"t": {"w": shapes(2, 16, 16)}},
        "last": {},
        "shared": {"table": shapes(512, 16)},
    }
    rows = {"tokens": jax.ShapeDtypeStruct((2,), jnp.int32)}
    peak = jp.measuring.Peak(flops=1e12, bandwidth=1e30)
    costs = jp.measure(model, params, rows, peak=peak)
    assert (costs["E"].parameters, costs["L"].parameters, costs["L"].gradients) == (0, table, table)
    given = {
        "devices": 2,
        "microbatches": 2,
        "chunks": (1,),
        "schedules": ("1f1b",),
        "remat": (None,),
    }
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    parts = jp.plan("EttL", costs, **given).best.parts
    assert parts.parameters + parts.gradients + parts.optimizer == 4 * (table + 2 * width)
    traced = jp.plan(
        "EttL", costs, **given, traced=jp.measuring.traced_memory(model, params, rows, mesh=mesh)
    ).best
    assert max(traced.memory) == traced.traced["total"] + 2 * (table + 2 * width), "'Ett|L'"
    model = jp.Model(tied, layers="EttL", frozen=lambda path, leaf: path.startswith("stages"))
    frozen = jp.measure(model, params, rows, peak=peak)
    assert (frozen["t"].parameters, frozen["t"].gradients, frozen["L"].gradients) == (
        width,
        0,
        table,
    )


def test_devices_that_share_a_layer_have_a_part_of_it():
    """Megatron's two matmuls (Shoeybi et al. 2019, section 3): each of two devices has half of the
    hidden values, and x whole.
    """
    mesh = jax.make_mesh((1, 2), ("pipe", "tensor"), devices=jax.devices()[:2])
    columns, rows = PartitionSpec(None, "tensor"), PartitionSpec("tensor")
    specs = {"stages": {"t": {"up": columns, "down": rows}}, "last": columns}
    microbatch, peak = {"x": shapes(ROWS, WIDTH)}, jp.measuring.Peak(flops=1e12, bandwidth=1e30)
    alone = jp.measure(MODEL, PARAMS, microbatch, peak=peak)
    shared = jp.measure(
        MODEL, PARAMS, microbatch, peak=peak, mesh=mesh, sharding=jp.Sharding(specs=specs)
    )
    for letter, names in (
        ("t", ("parameters", "gradients", "residuals", "stash", "forward")),
        ("L", ("parameters", "gradients", "forward")),
    ):
        for name in names:
            assert getattr(shared[letter], name) == getattr(alone[letter], name) / 2, (letter, name)
    for letter, names in (
        ("t", ("boundary",)),
        ("E", ("parameters", "boundary")),
        ("L", ("batch",)),
    ):
        for name in names:
            assert getattr(shared[letter], name) == getattr(alone[letter], name), (letter, name)

    def forward_flops(mesh, **options):
        """Of one device, by XLA's count of the block that is timed."""
        schedule = jp.schedules.build("no_pipelining", devices=1, microbatches=M)
        pipe = flat_pipeline(
            layers=LAYERS, layout="Et*6,L", schedule=schedule, mesh=mesh, **options
        )
        step = traced(pipe, pipe.place(PARAMS), BATCH, None, ())
        return compile_blocks(step, stage_blocks(step, 0)["F"]).cost_analysis()["flops"]

    matmuls = 2 * 2 * ROWS * WIDTH * 4 * WIDTH  # a layer's; XLA counts the body of a scan once
    whole = forward_flops(jax.make_mesh((1,), ("pipe",), devices=jax.devices()[:1]))
    part = forward_flops(mesh, specs=specs)
    assert whole >= matmuls
    # What is not a matmul (tanh and sums of one layer, and its counter), and the sum of what both
    # devices have of the output.
    assert part <= matmuls / 2 + (whole - matmuls) + ROWS * WIDTH


def test_a_plan_for_devices_that_share_layers_is_of_the_program_that_runs():
    """Its program, the simulated makespan of that, and the bytes of its pools, on two pipe x two
    tensor devices.
    """
    names, columns, rows = (
        ("pipe", "tensor"),
        PartitionSpec(None, "tensor"),
        PartitionSpec("tensor"),
    )
    specs = {"stages": {"t": {"up": columns, "down": rows}}, "last": columns}
    one, mesh = (
        jax.make_mesh((count, 2), names, devices=jax.devices()[: 2 * count]) for count in (1, 2)
    )
    given = {
        "peak": jp.measuring.Peak(flops=1e12, bandwidth=1e30),
        "mesh": one,
        "sharding": jp.Sharding(specs=specs),
    }
    costs = jp.measure(MODEL, PARAMS, {"x": shapes(ROWS, WIDTH)}, **given)
    (plan,) = jp.plan(
        "Et*6,L",
        costs,
        devices=2,
        microbatches=M,
        chunks=(1,),
        schedules=("zb_h1",),
        remat=(None,),
        mesh=mesh,
    )
    pipe = plan.pipeline(MODEL, mesh, sharding=jp.Sharding(specs=specs))
    assert plan.seconds == pipe._steps.plan.seconds(Target.of(pipe.mesh, ("pipe",)), pipe.costs)
    slots, held = pipe._steps.plan.program().slots, plan.parts
    predicted = jp.inspect.memory(pipe, pipe.place(PARAMS), BATCH)
    # A stage whose backward does not read its input gives that back sooner than the plan can know.
    others = predicted["pools"] - held.pools["residual_weight"] - held.pools["stash"]
    assert 0 <= others <= costs["t"].boundary * (slots.x + slots.cotangent)


def test_costs_as_json_that_make_no_sense():
    for text, message in (
        ("[", "not costs as JSON"),
        ("[1]", "one object"),
        ('{"speed": 1}', "there are no costs 'speed'"),
    ):
        with pytest.raises(jp.CostError, match=message):
            jp.Costs.from_json(text)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jp.measure(jp.schedules.build("1f1b", devices=2, microbatches=2), {}, {}),
            "model must be a jaxpipe.Model",
        ),
        (
            lambda: measure_stages(jp.schedules.build("1f1b", devices=2, microbatches=2), {}, {}),
            "pipe must be a jaxpipe.Pipeline",
        ),
        (
            lambda: measure_stages(None, {}, {}, repeats="a", peak=3),
            "peak must be a jaxpipe.measuring.Peak",
        ),
        (lambda: jp.measure(MODEL, None, BATCH), "params must be a mapping with"),
        (
            lambda: jp.measure(MODEL, {"stages": {}}, BATCH),
            r"(?s)no \"first\".*no \"last\".*letters \['t'\]",
        ),
        (
            lambda: jp.measuring.traced_memory(MODEL, 3, BATCH, mesh=None),
            "params must be a mapping with",
        ),
    ],
)
def test_arguments_of_another_kind_are_named(call, message):
    with pytest.raises(jp.PipelineError, match=message):
        call()


def test_no_rounds_are_refused(pipe):
    with pytest.raises(jp.PipelineError, match="repeats must be a whole number of at least 1"):
        measure_stages(pipe, pipe.place(PARAMS), BATCH, repeats=0)


def test_shares_of_a_spread_head_and_embedding_have_costs_of_their_own():
    """Estimated by floating point operations alone: a device's share of the logits and its two
    gradients, and no forward has them.
    """
    vocabulary, length, rows = 96, 8, 2

    def costs(devices, first, last):
        schedule = jp.schedules.build("1f1b", devices=devices, microbatches=M)
        mesh = jax.make_mesh((devices,), ("pipe",), devices=jax.devices()[:devices])
        pipe = jp.Pipeline(
            jp.Model(lambda w, x: x + jnp.tanh(x @ w), first=first, last=last), schedule, mesh
        )
        table = {"w": shapes(vocabulary, WIDTH)}
        params = pipe.place(
            {"first": table, "stages": shapes(devices, WIDTH, WIDTH), "last": table}
        )
        tokens = jax.ShapeDtypeStruct((rows * M, length), jnp.int32)
        peak = jp.measuring.Peak(flops=1.0, bandwidth=1e12)
        return measure_stages(pipe, params, {"tokens": tokens, "targets": tokens}, peak=peak)

    matmul = 2 * rows * length * WIDTH * vocabulary
    for devices in (1, 2, 4):
        found = costs(devices, jp.VocabEmbedding(), jp.VocabHead())
        # Besides the three matmuls: some ten operations a logit.
        assert (
            3 * matmul / devices
            <= found.last
            <= (3 * matmul + 40 * rows * length * vocabulary) / devices
        )
        assert found.forward == found.recompute
        assert 0 < found.first < matmul / devices
        assert 0 < found.first_grad < matmul / devices


def test_the_peak_of_known_tpus() -> None:
    def mesh(*kinds: str) -> Any:
        devices = [SimpleNamespace(device_kind=kind) for kind in kinds]
        return SimpleNamespace(devices=np.array(devices, object))

    found = jp.measuring.Peak.of(mesh("TPU v5", "TPU v5"))
    assert (found.flops, found.bandwidth, found.link) == (4.59e14, 2.8e12, 9e10)
    with pytest.raises(jp.PipelineError, match=r"peak of cpu is not known .*TPU v5 lite.*write"):
        jp.measuring.Peak.of(mesh("cpu"))
