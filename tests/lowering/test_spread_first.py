"""`first` spread over the pipe axis: the losses and gradients of plain JAX, whatever the schedule,
in every executor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe import PipelineError
from jaxpipe.checkpoint import PortableState
from jaxpipe.eager import EagerExecutor
from jaxpipe.lowering.plan import plan_of
from jaxpipe.program.verify import ProgramRule, faults
from tests.flat import flat_pipeline, is_defined
from tests.parity.engines import mesh_of
from tests.shares import changed, put
from tests.tiers import exhaustive, slow
from tests.tolerance import relative, same

WIDTH, TOKENS, ROWS = 4, 3, 2
# Sums of some dozens of terms of order one in float64, in another order: some 1e-15.
LIMIT = 1e-12


def stage(params, x):
    return jnp.tanh(x @ params)


def nll(logits, targets):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


def plain_head(params, x, microbatch, shared=None):
    (table,) = jax.tree.leaves(shared if shared else params)
    return nll(x @ table.T, microbatch["targets"])


def canonical(stages: int, vocabulary: int, *, tied: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    one, other = (
        {"w": rng.standard_normal((vocabulary, WIDTH))},
        {"w": rng.standard_normal((vocabulary, WIDTH))},
    )
    layers = rng.standard_normal((stages, WIDTH, WIDTH)) / 2
    return (
        {"first": {}, "stages": layers, "last": {}, "shared": one}
        if tied
        else {"first": one, "stages": layers, "last": other}
    )


def rows(count: int, vocabulary: int) -> dict[str, Any]:
    words = np.random.default_rng(1).integers(0, vocabulary, (count, TOKENS + 1))
    return {"tokens": words[:, :-1], "targets": words[:, 1:]}


@lru_cache(maxsize=32)
def truth(stages: int, vocabulary: int, count: int, *, tied: bool) -> Any:
    """No pipeline: the loss and its gradients; microbatches have equal numbers of tokens."""

    def loss(params):
        batch, shared = rows(count, vocabulary), params.get("shared", {})
        (table,) = jax.tree.leaves(shared if tied else params["first"])
        x = table[batch["tokens"]]
        for s in range(stages):
            x = stage(params["stages"][s], x)
        return plain_head(params["last"], x, batch, shared)

    return jax.jit(jax.value_and_grad(loss))(canonical(stages, vocabulary, tied=tied))


def agrees(
    name: str,
    devices: int,
    *,
    tied: bool,
    microbatches: int = 4,
    vocabulary: int = 11,
    last: Any = None,
    **options: Any,
):
    """A step and an evaluation against plain JAX; the placed parameters and the gradients."""
    if name == "dualpipe":
        microbatches = max(microbatches, 2 * devices)
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    stages, count = schedule.num_stages, ROWS * microbatches
    options = {
        "mesh": mesh_of(devices),
        "first": jp.VocabEmbedding(),
        "last": last or jp.VocabHead(),
        **options,
    }
    pipe = flat_pipeline(stage, schedule=schedule, **options)
    params, batch = pipe.place(canonical(stages, vocabulary, tied=tied)), rows(count, vocabulary)
    loss, grads = pipe.value_and_grad(params, batch)
    wanted_loss, wanted = truth(stages, vocabulary, count, tied=tied)
    found = pipe.canonical(grads)
    assert abs(float(loss) - float(wanted_loss)) <= LIMIT
    assert relative({key: found[key] for key in wanted}, wanted) <= LIMIT
    assert abs(float(pipe.evaluate(params, batch)) - float(wanted_loss)) <= LIMIT
    return pipe, params, grads


QUICK = [("1f1b", 2, False), ("zbv", 2, True)]
LARGER = [("dualpipe", 4, True), ("interleaved_1f1b", 2, False), ("zb_h1", 8, True)]
ALL = [
    (name, devices, tied)
    for name in jp.schedules.names()
    for devices in (1, 2, 4, 8)
    for tied in (False, True)
]


@pytest.mark.parametrize(
    ("name", "devices", "tied"),
    [
        *QUICK,
        *(slow(*c) for c in LARGER),
        *(exhaustive(*c) for c in ALL if c not in (*QUICK, *LARGER) and is_defined(*c[:2])),
    ],
)
def test_a_step_agrees_with_plain_jax(name, devices, tied):
    _, params, grads = agrees(name, devices, tied=tied)
    if devices > 1:
        key = "shared" if tied else "first"
        shares = [
            leaf.sharding.shard_shape(leaf.shape)
            for leaf in jax.tree.leaves((params[key], grads[key]))
        ]
        assert shares == [(-(-11 // devices), WIDTH)] * 2, (
            "1/P of the vocabulary on each device, gradients too"
        )


def test_a_device_may_hold_nothing_but_padding():
    """Of 5 rows on 4 devices, as 4 x 2, the third has one and the last none."""
    _, params, grads = agrees("gpipe", 4, tied=False, vocabulary=5)
    for tree in (params, grads):
        for key in ("first", "last"):
            (leaf,) = jax.tree.leaves(tree[key])
            assert [np.any(np.asarray(shard.data)) for shard in leaf.addressable_shards] == [
                True,
                True,
                True,
                False,
            ]


def test_bursts_of_meetings_are_loops_within_a_trip():
    """In an interleaved table all devices meet for P microbatches in turn, then for long not: no
    predicate asks in the steady state.
    """
    pipe, _, _ = agrees("interleaved_1f1b", 2, tied=False, microbatches=12)
    plan = plan_of(pipe.schedule)
    steady = max(plan.segments, key=lambda segment: segment.repeats * segment.period)
    assert any(loop.times == 2 and loop.body for loop in steady.loops)
    assert steady.num_collective_predicates == 0


def test_first_alone_is_spread_too():
    pipe, _, _ = agrees("gpipe", 2, tied=False, last=plain_head)
    assert {a.kind for _, _, a in pipe.schedule.actions()} == {
        jp.Kind.F,
        jp.Kind.B,
        jp.Kind.E,
        jp.Kind.G,
    }
    assert pipe.outputs(pipe.place(canonical(2, 11, tied=False)), rows(8, 11)).shape == (
        8,
        TOKENS,
        WIDTH,
    )


def test_the_eager_executor_runs_the_same_program():
    agrees("1f1b", 2, executor=EagerExecutor(), tied=True, microbatches=2)


@pytest.mark.slow
def test_data_shards_fsdp_and_recomputation():
    mesh = mesh_of(2, data=2)
    agrees(
        "1f1b",
        2,
        tied=True,
        vocabulary=12,
        mesh=mesh,
        data_axes=("data",),
        fsdp="data",
        remat="full",
    )


def test_a_function_of_ones_own_needs_what_its_forward_makes_again():
    """A norm after the lookup, of which the gradient needs the sum; a scale and a position table
    that every device holds whole.
    """

    def first(params, microbatch, *, ctx):
        x = (
            jp.VocabEmbedding()(params["w"], microbatch, ctx=ctx._replace(sizes=ctx.sizes["w"]))
            + params["at"]
        )
        return x / jnp.sqrt(1 + jnp.sum(x**2, -1, keepdims=True)) * params["scale"]

    def plain(params, microbatch):
        x = params["w"][microbatch["tokens"]] + params["at"]
        return x / jnp.sqrt(1 + jnp.sum(x**2, -1, keepdims=True)) * params["scale"]

    schedule, rng = jp.schedules.build("zb_h1", devices=2, microbatches=3), np.random.default_rng(0)
    own = {
        "w": rng.standard_normal((5, WIDTH)),
        "scale": rng.standard_normal(WIDTH),
        "at": rng.standard_normal((TOKENS, WIDTH)),
    }
    whole = {**canonical(2, 5, tied=False), "first": own}
    steps = []
    for function in (jp.spread(first, dims={"w": 0, "scale": None, "at": None}), plain):
        pipe = jp.Pipeline(jp.Model(stage, first=function, last=plain_head), schedule, mesh_of(2))
        loss, grads = pipe.value_and_grad(pipe.place(whole), rows(6, 5))
        steps.append((float(loss), pipe.canonical(grads)))
    assert abs(steps[0][0] - steps[1][0]) <= LIMIT * abs(steps[1][0])
    assert relative(steps[0][1], steps[1][1]) <= LIMIT


@pytest.mark.slow
def test_a_checkpoint_of_a_tied_table_fits_another_number_of_devices():
    def pipe_on(devices):
        schedule = jp.schedules.build(
            "interleaved_1f1b", devices=devices, microbatches=4, chunks=4 // devices
        )
        return jp.Pipeline(
            jp.Model(stage, first=jp.VocabEmbedding(), last=jp.VocabHead()),
            schedule,
            mesh_of(devices),
        )

    whole = canonical(4, 10, tied=True)
    states = {devices: {"params": pipe_on(devices).place(whole)} for devices in (4, 2)}
    stored = PortableState(pipe_on(4).partition).of(states[4])
    assert stored["params"]["shared"]["w"].shape == (10, WIDTH)
    back = PortableState(pipe_on(2).partition).placed(jax.tree.map(np.asarray, stored), states[2])
    assert same(back, states[2])


def test_a_table_that_a_stage_reads_too_is_not_cut_and_the_embedding_says_so():
    def reads(params, x, *, shared):
        return x + shared["w"][0]

    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    pipe = jp.Pipeline(
        jp.Model(reads, first=jp.VocabEmbedding(), last=plain_head), schedule, mesh_of(2)
    )
    with pytest.raises(
        PipelineError,
        match='a table under "shared" is cut where every function that takes `shared` is spread',
    ):
        pipe.value_and_grad(pipe.place(canonical(2, 4, tied=True)), rows(4, 4))


def test_a_token_that_is_no_word_gives_no_number():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    pipe = jp.Pipeline(
        jp.Model(stage, first=jp.VocabEmbedding(), last=jp.VocabHead()), schedule, mesh_of(2)
    )
    params, batch = pipe.place(canonical(2, 3, tied=True)), rows(4, 3)
    assert np.isfinite(pipe.evaluate(params, batch))
    for wrong in (3, -1):
        batch["tokens"][1, 0] = wrong
        assert np.isnan(pipe.evaluate(params, batch))


@pytest.mark.parametrize(
    "name", ["1f1b", *(slow(name) for name in jp.schedules.names() if name != "1f1b")]
)
def test_what_waits_for_meetings_takes_few_slots(name):
    """Against the same table without meetings, so that a split of its backwards does not count."""
    plain = jp.schedules.build(name, devices=4, microbatches=16)
    costs = jp.Costs(last=0.2, first=0, first_grad=0)
    spread = jp.spread_first(jp.spread_last(plain, costs=costs), costs=costs)
    mine, bare = (
        plan_of(table).program().slots for table in (spread, jp.transforms.remove_spread(spread))
    )
    assert mine.last == 1
    assert mine.first <= 2 + (name in ("interleaved_1f1b", "zb_h2"))
    assert mine.x - bare.x <= 1
    assert mine.cotangent - bare.cotangent <= 1
    assert mine.residual_input - bare.residual_input <= (name == "1f1b_overlap")
    assert (mine.residual_weight, mine.stash) == (bare.residual_weight, bare.stash)


@pytest.mark.parametrize(
    ("kind", "fields", "rule"),
    [
        ("E", lambda t: {"is_source": put(t, 1, 1)}, ProgramRule.ACTION),
        ("E", lambda t: {"kind": put(t, slice(None), int(jp.Kind.G))}, ProgramRule.ACTION),
        ("E", lambda t: {"kind": put(t, slice(None), -1)}, ProgramRule.ACTION),
        ("E", lambda t: {"x": put(t, 0, 1)}, ProgramRule.VALUE),
        ("G", lambda t: {"first": put(t, 0, 1)}, ProgramRule.SLOT),
        ("G", lambda t: {"microbatch": put(t, slice(None), 1)}, ProgramRule.ACTION),
    ],
)
def test_a_wrong_share_is_found(kind, fields, rule):
    """Rules of programs, each broken alone."""
    program = plan_of(
        jp.spread_first(jp.schedules.build("gpipe", devices=2, microbatches=2))
    ).program()
    assert faults(program) == ()
    (share,) = program.ticks.collectives
    tick = int(np.argmax(share.kind[:, 0] == jp.Kind[kind]))
    assert rule in {fault.rule for fault in faults(changed(program, **fields(tick)))}
