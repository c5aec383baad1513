"""`last` spread over the pipe axis: the losses and gradients of plain JAX, whatever the schedule,
in every executor.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe import Loss, PipelineError
from jaxpipe.checkpoint import PortableState
from jaxpipe.eager import EagerExecutor
from jaxpipe.lowering.plan import plan_of
from jaxpipe.program.segments import Presence
from jaxpipe.program.verify import ProgramRule, faults
from tests.flat import flat_pipeline, is_defined
from tests.parity.engines import mesh_of
from tests.shares import changed, put
from tests.tiers import by_actions, exhaustive, slow
from tests.tolerance import relative, same

WIDTH, TOKENS, ROWS = 4, 3, 2
# Sums of some dozens of terms of order one in float64, in another order: some 1e-15.
LIMIT = 1e-12
HEADS = {
    "plain": jp.VocabHead(),
    "all": jp.VocabHead(label_smoothing=0.1, z_loss=0.02),
    "other mark": jp.VocabHead(ignore=0),
}


def stage(params, x):
    return jnp.tanh(x @ params)


def head_of(head: jp.VocabHead, logits, microbatch):
    """The sum of the losses of tokens and their count, from whole logits: the formulas of the
    docstring.
    """
    targets = microbatch["targets"]
    counted = targets != head.ignore
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    nll = (
        log_sum - jnp.take_along_axis(logits, jnp.where(counted, targets, 0)[..., None], -1)[..., 0]
    )
    even = log_sum - logits.mean(-1)
    loss = (1 - head.label_smoothing) * nll + head.label_smoothing * even + head.z_loss * log_sum**2
    weights = counted * microbatch.get("weights", 1.0)
    return jnp.sum(jnp.where(counted, loss * weights, 0)), jnp.sum(weights)


def canonical(stages: int, vocabulary: int, *, tied: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    table = {"w": rng.standard_normal((vocabulary, WIDTH))}
    found = {
        "first": {},
        "stages": rng.standard_normal((stages, WIDTH, WIDTH)) / 2,
        "last": {} if tied else table,
    }
    return found | ({"shared": table} if tied else {})


def rows(count: int, vocabulary: int, ignore: int = -100) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    targets = rng.integers(0, vocabulary, (count, TOKENS))
    targets[rng.random(targets.shape) < 0.3] = ignore
    targets[:, 0] = 1 + np.arange(count) % (vocabulary - 1)  # some token counts in every row
    weights = rng.random((count, TOKENS)) + 0.5
    return {
        "x": rng.standard_normal((count, TOKENS, WIDTH)),
        "targets": targets,
        "weights": weights,
    }


@lru_cache(maxsize=32)
def truth(
    head: jp.VocabHead,
    stages: int,
    vocabulary: int,
    microbatches: int,
    count: int,
    *,
    tied: bool,
    sums: bool,
) -> Any:
    """No pipeline: the loss and its gradients."""

    def loss(params):
        total, tokens, means = 0.0, 0.0, 0.0
        for m in range(microbatches):
            size = count // microbatches
            microbatch = {
                k: v[m * size : (m + 1) * size]
                for k, v in rows(count, vocabulary, head.ignore).items()
            }
            x = microbatch["x"]
            for s in range(stages):
                x = stage(params["stages"][s], x)
            table = params["shared" if tied else "last"]["w"]
            one, many = head_of(head, x @ table.T, microbatch)
            total, tokens, means = total + one, tokens + many, means + one / many
        return total / tokens if sums else means / microbatches

    return jax.jit(jax.value_and_grad(loss))(canonical(stages, vocabulary, tied=tied))


def agrees(name: str, devices: int, *, microbatches: int = 4, **how: Any) -> Any:
    """The same for a schedule of the catalogue."""
    if name == "dualpipe":
        microbatches = max(microbatches, 2 * devices)
    table = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    return table_agrees(table, **how)


def table_agrees(
    table: jp.Schedule,
    *,
    vocabulary: int = 11,
    head: str = "all",
    tied: bool = False,
    data: int = 1,
    **options: Any,
) -> Any:
    """A step and an evaluation against plain JAX; the pipeline and its placed parameters."""
    devices, microbatches = table.num_devices, table.num_microbatches
    count, stages = ROWS * microbatches * data, table.num_stages
    options.setdefault("mesh", mesh_of(devices, data=data) if data > 1 else mesh_of(devices))
    pipe = flat_pipeline(stage, schedule=table, last=HEADS[head], **options)
    params = pipe.place(canonical(stages, vocabulary, tied=tied))
    batch = rows(count, vocabulary, HEADS[head].ignore)
    loss, grads = pipe.value_and_grad(params, batch)
    sums = options.get("loss") is Loss.SUM_OVER_COUNT
    wanted_loss, wanted = truth(
        HEADS[head], stages, vocabulary, microbatches, count, tied=tied, sums=sums
    )
    found = pipe.canonical(grads)
    assert abs(float(loss) - float(wanted_loss)) <= LIMIT
    assert relative({key: found[key] for key in wanted}, wanted) <= LIMIT
    assert abs(float(pipe.evaluate(params, batch)) - float(wanted_loss)) <= LIMIT
    return pipe, params, grads


QUICK = [("1f1b", 2, "all"), ("zbv", 2, "other mark")]
ALL = [(name, devices, "all") for name in jp.schedules.names() for devices in (1, 2, 4, 8)]
# Every schedule once, the numbers of devices in turn.
LARGER = [
    ("gpipe", 2, "plain"),
    *((name, (2, 4, 8, 4)[i % 4], "all") for i, name in enumerate(jp.schedules.names())),
]


@pytest.mark.parametrize(
    ("name", "devices", "head"),
    [
        *QUICK,
        *(by_actions(*c) for c in LARGER if c not in QUICK and is_defined(*c[:2])),
        *(exhaustive(*c) for c in ALL if c not in (*QUICK, *LARGER) and is_defined(*c[:2])),
    ],
)
def test_a_step_agrees_with_plain_jax(name, devices, head):
    _, params, grads = agrees(name, devices, head=head)
    if devices > 1:
        shares = [
            leaf.sharding.shard_shape(leaf.shape)
            for leaf in jax.tree.leaves((params["last"], grads["last"]))
        ]
        assert shares == [(-(-11 // devices), WIDTH)] * 2, (
            "1/P of the vocabulary on each device, gradients too"
        )


@pytest.mark.parametrize(
    ("name", "devices"), [("1f1b", 2), slow("zbv", 2), slow("dualpipe", 4), slow("zb_h1", 8)]
)
def test_tied_embeddings_are_cut_and_their_gradients_are_of_both_uses(name, devices):
    _, params, _ = agrees(name, devices, tied=True)
    assert jax.tree.leaves(params["shared"])[0].sharding.spec[0] == "pipe"


@pytest.mark.parametrize("tied", [False, slow(True)], ids=["untied", "tied"])
def test_arrays_whose_second_dim_is_the_vocabulary(tied):
    """[d, V], as flax stores a kernel; 11 words on two devices are padded."""

    def step(dim):
        def array(seed):
            table = jax.random.normal(jax.random.key(seed), (11, WIDTH))
            return {"kernel": table.T if dim else table}

        ends = {"first": jp.VocabEmbedding(dim=dim), "last": jp.VocabHead(dim=dim)}
        pipe = jp.Pipeline(jp.Model(stage, **ends), SCHEDULE, mesh_of(2))
        own = {"shared": array(1)} if tied else {"first": array(1), "last": array(2)}
        stages = jax.random.normal(jax.random.key(3), (2, WIDTH, WIDTH))
        whole = {"first": {}, "last": {}, "stages": stages, **own}
        tokens = jax.random.randint(jax.random.key(4), (4, TOKENS), 0, 11)
        batch = {"tokens": tokens, "targets": tokens[:, ::-1]}
        placed = pipe.place(whole)
        loss, grads = pipe.value_and_grad(placed, batch)
        np.testing.assert_allclose(loss, pipe.model.loss(whole, batch), rtol=LIMIT)
        found = pipe.canonical(grads)
        turned = {
            key: jax.tree.map(jnp.transpose, found[key]) if dim else found[key] for key in own
        }
        return loss, {**turned, "stages": found["stages"]}

    jax.tree.map(partial(np.testing.assert_allclose, rtol=LIMIT, atol=LIMIT), step(1), step(0))


def test_the_mean_over_all_tokens_with_data_shards_and_fsdp():
    pipe, params, grads = agrees(
        "1f1b", 2, vocabulary=12, data=2, data_axes=("data",), fsdp="data", loss=Loss.SUM_OVER_COUNT
    )
    (leaf,) = jax.tree.leaves(params["last"])
    assert tuple(leaf.sharding.spec) == ("pipe", "data")
    assert jax.tree.map(jnp.shape, pipe.canonical(grads)["last"]) == {"w": (12, WIDTH)}


@pytest.mark.slow
def test_a_tensor_axis_splits_what_is_not_cut():
    mesh = jax.make_mesh(
        (2, 2),
        ("pipe", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )
    _, params, _ = agrees(
        "zb_h1", 2, mesh=mesh, specs={"last": {"w": PartitionSpec(None, "tensor")}}
    )
    assert tuple(jax.tree.leaves(params["last"])[0].sharding.spec) == ("pipe", "tensor")


def test_the_eager_executor_runs_the_same_program():
    agrees("1f1b", 2, executor=EagerExecutor(), tied=True)
    agrees("gpipe", 2, executor=EagerExecutor())


def test_what_is_placed_comes_back_and_shapes_are_placed_too():
    schedule = jp.schedules.build("1f1b", devices=4, microbatches=4)
    pipe = jp.Pipeline(jp.Model(stage, last=jp.VocabHead()), schedule, mesh_of(4))
    whole = canonical(4, 10)
    placed = pipe.place(whole)
    assert jax.tree.leaves(placed["last"])[0].shape == (12, WIDTH)
    back = pipe.canonical(placed)
    assert same({**back, "shared": {}}, whole)
    shapes = pipe.place(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), whole))
    assert jax.tree.map(lambda s, a: (s.shape, s.sharding) == (a.shape, a.sharding), shapes, placed)
    assert pipe.outputs(placed, rows(8, 10)).shape == (8, TOKENS, WIDTH)


def test_a_checkpoint_holds_no_padding_and_fits_another_number_of_devices():
    def pipe_on(devices):
        schedule = jp.schedules.build(
            "interleaved_1f1b", devices=devices, microbatches=4, chunks=4 // devices
        )
        return jp.Pipeline(jp.Model(stage, last=jp.VocabHead()), schedule, mesh_of(devices))

    whole = canonical(4, 10)
    states = {}
    for devices in (4, 2):
        params = pipe_on(devices).place(whole)
        states[devices] = {"params": params, "moments": jax.tree.map(lambda a: 2 * a, params)}
    stored = PortableState(pipe_on(4).partition).of(states[4])
    assert (
        stored["params"]["last"]["w"].shape == stored["moments"]["last"]["w"].shape == (10, WIDTH)
    )
    # As from a file: the devices are others.
    back = PortableState(pipe_on(2).partition).placed(jax.tree.map(np.asarray, stored), states[2])
    assert jax.tree.structure(back) == jax.tree.structure(states[2])
    assert same(back, states[2])
    again = PortableState(pipe_on(4).partition).placed(
        jax.tree.map(np.asarray, PortableState(pipe_on(2).partition).of(states[2])), states[4]
    )
    assert same(again, states[4])
    pipe, params = pipe_on(4), states[4]["params"]
    spread = pipe.canonical(params, spread=True)
    assert np.array_equal(spread["last"]["w"], whole["last"]["w"])


def by_columns(params, x, microbatch, *, ctx):
    """A matrix cut along its columns, a scale that every device holds whole, a sum over devices and
    one of a gathered array.
    """
    part = x * params["scale"] @ params["w"]
    whole = jax.lax.all_gather(part, ctx.axis, axis=part.ndim - 1, tiled=True)
    return jax.lax.psum(jnp.sum(part**2), ctx.axis) + jnp.sum(jnp.sin(whole[..., : ctx.sizes["w"]]))


def test_a_function_of_ones_own_and_any_collective():
    def plain(params, x, microbatch):
        y = x * params["scale"] @ params["w"]
        return jnp.sum(y**2) + jnp.sum(jnp.sin(y))

    schedule, rng = jp.schedules.build("zb_h1", devices=2, microbatches=3), np.random.default_rng(0)
    own = {"w": rng.standard_normal((WIDTH, 5)), "scale": rng.standard_normal(WIDTH)}
    whole = {**canonical(2, 1), "last": own}
    steps = []
    for function in (jp.spread(by_columns, dims={"w": 1, "scale": None}), plain):
        pipe = jp.Pipeline(jp.Model(stage, last=function), schedule, mesh_of(2))
        loss, grads = pipe.value_and_grad(pipe.place(whole), rows(6, 2))
        steps.append((float(loss), pipe.canonical(grads)))
    assert abs(steps[0][0] - steps[1][0]) <= LIMIT * abs(steps[1][0])
    assert relative(steps[0][1], steps[1][1]) <= LIMIT


SCHEDULE = jp.schedules.build("1f1b", devices=2, microbatches=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"schedule": jp.spread_last(SCHEDULE), "last": lambda p, x, mb: 0.0},
            "`last` is not spread",
        ),
        (
            {"schedule": jp.Schedule.from_csv("0F0,0B0\n\n")},
            r"fewer stages \(1\) than devices \(2\)",
        ),
        ({"schedule": jp.spread_first(SCHEDULE)}, "`first` is not spread"),
        (
            {
                "first": jp.spread(lambda p, mb, shared: 0, shared=1),
                "last": jp.spread(lambda p, x, mb, shared: 0),
            },
            r"shared=1\) and `last` shared=0",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused(options, message):
    with pytest.raises(PipelineError, match=message):
        flat_pipeline(
            stage, **{"schedule": SCHEDULE, "mesh": mesh_of(2), "last": jp.VocabHead(), **options}
        )


def test_every_parameter_that_cannot_be_cut_is_listed():
    pipe = jp.Pipeline(
        jp.Model(stage, last=jp.spread(lambda p, x, mb: 0.0, dims={"a": 2, "b": "x"})),
        SCHEDULE,
        mesh_of(2),
    )
    whole = {
        "stages": np.zeros((2, 3, 3)),
        "last": {"a": np.zeros((3, 3)), "b": np.zeros(3), "c": np.zeros(())},
    }
    with pytest.raises(PipelineError) as caught:
        pipe.place(whole)
    assert all(
        text in str(caught.value)
        for text in (
            "last['a'] of shape (3, 3) has no dim 2",
            "last['b'] of shape (3,) has no dim 'x'",
            "last['c'] of shape ()",
        )
    )


def test_a_head_says_what_it_lacks():
    with pytest.raises(
        PipelineError, match=r"(?s)label_smoothing must be from 0 to 1.*z_loss must be 0 or more"
    ):
        jp.VocabHead(label_smoothing=2, z_loss=-1)
    for made in (jp.VocabHead, jp.VocabEmbedding):
        with pytest.raises(PipelineError, match=r"dim must be 0 for \[V, d\], or 1"):
            made(dim=2)
    pipe = jp.Pipeline(jp.Model(stage, last=jp.VocabHead()), SCHEDULE, mesh_of(2))
    for own, text in (
        ({"w": np.zeros((4, 3)), "b": np.zeros(4)}, "got 2 of shapes"),
        ({}, "got 0 of shapes"),
    ):
        with pytest.raises(PipelineError, match=text):
            pipe.value_and_grad(
                pipe.place({"stages": np.zeros((2, WIDTH, WIDTH)), "last": own}), rows(4, 3)
            )


@pytest.mark.parametrize("loss", [Loss.MEAN, slow(Loss.SUM_OVER_COUNT)])
def test_the_accuracy_beside_the_loss(loss):
    pipe = jp.Pipeline(
        jp.Model(stage, last=jp.VocabHead(), loss=loss, has_metrics=True), SCHEDULE, mesh_of(2)
    )
    whole, batch = canonical(2, 3), rows(8, 3)
    _, metrics = pipe.evaluate(pipe.place(whole), batch)
    x = batch["x"]
    for s in range(2):
        x = np.tanh(x @ whole["stages"][s])
    hits = np.argmax(x @ whole["last"]["w"].T, -1) == batch["targets"]
    counted = batch["weights"] * (batch["targets"] != -100)
    # of two microbatches
    shares = [np.sum((hits * counted)[m : m + 4]) / np.sum(counted[m : m + 4]) for m in (0, 4)]
    assert abs(float(metrics["accuracy"]) - np.mean(shares)) <= LIMIT
    assert 0 < np.mean(shares) < 1


def test_a_target_that_is_no_word_gives_no_number():
    """As plain JAX: an error of the data must not look like a loss."""
    pipe = jp.Pipeline(jp.Model(stage, last=jp.VocabHead()), SCHEDULE, mesh_of(2))
    params, batch = pipe.place(canonical(2, 4)), rows(4, 4)
    assert np.isfinite(pipe.evaluate(params, batch))
    batch["targets"][1, 0] = 4
    assert np.isnan(pipe.evaluate(params, batch))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (lambda t: {"kind": put(t, 1, -1)}, ProgramRule.COLLECTIVE),
        (lambda t: {"microbatch": put(t, 0, 1)}, ProgramRule.COLLECTIVE),
        (lambda t: {"kind": put(0, slice(None), int(jp.Kind.L))}, ProgramRule.COLLECTIVE),
        (lambda t: {"is_source": put(t, 0, 1)}, ProgramRule.ACTION),
        (lambda t: {"kind": put(t, slice(None), -1)}, ProgramRule.ACTION),
        (lambda t: {"last": put(t, 1, 1)}, ProgramRule.SLOT),
        (lambda t: {"cotangent": put(t, 1, 1)}, ProgramRule.SLOT),
    ],
)
def test_a_wrong_share_is_found(fields, rule):
    """Rules of programs, each broken alone."""
    program = plan_of(
        jp.spread_last(jp.schedules.build("gpipe", devices=2, microbatches=1))
    ).program()
    assert faults(program) == ()
    tick = int(np.argmax(program.ticks.collectives[0].kind[:, 0] >= 0))
    assert rule in {fault.rule for fault in faults(changed(program, **fields(tick)))}


def test_code_for_shares_is_where_they_are():
    program = plan_of(
        jp.spread_last(jp.schedules.build("gpipe", devices=2, microbatches=1))
    ).program()
    bare = [
        replace(s, templates=tuple(_without_shares(template) for template in s.templates))
        for s in program.segments
    ]
    assert ProgramRule.CODE in {
        fault.rule for fault in faults(replace(program, segments=tuple(bare)))
    }


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "gpipe"])
def test_between_meetings_ticks_share_their_code_and_meetings_have_no_predicate(name):
    schedule = jp.schedules.build(name, devices=4, microbatches=32)
    plan = plan_of(jp.spread_last(schedule))
    steady = max(plan.segments, key=lambda segment: segment.repeats * segment.period)
    assert steady.repeats >= 28, "a trip a microbatch"
    assert steady.num_collective_predicates == 0
    assert len(steady.emitted) == 2, "L, and one code for the ticks between"
    assert steady.sharing(1).tolist() == [
        t for t in range(steady.start, steady.stop) if (t - steady.start) % steady.period
    ]


@pytest.mark.parametrize(
    ("name", "devices", "most"),
    [("1f1b", 4, 0), slow("zb_h1", 4, 0), slow("1f1b", 8, 13), slow("zb_h1", 8, 6)],
)
def test_meetings_in_ramps_have_no_predicate_where_few_pieces_of_code_do(name, devices, most):
    """L, E and G of a step: of its 3 M meetings `most` ticks and kinds are left that share code,
    whatever M is.
    """
    for microbatches in (4 * devices, 8 * devices):
        schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
        costs = jp.Costs(last=0.2, first=0, first_grad=0)
        plan = plan_of(jp.spread_first(jp.spread_last(schedule, costs=costs), costs=costs))
        assert sum(segment.num_collective_predicates for segment in plan.segments) <= most
        assert faults(plan.program()) == ()
        once = [segment for segment in plan.segments if segment.repeats == 1]
        assert sum(len(segment.emitted) for segment in once) <= 24


def test_ticks_that_share_code_have_one_template_and_await_nothing():
    program = plan_of(
        jp.spread_last(jp.schedules.build("1f1b", devices=4, microbatches=8))
    ).program()
    at, steady = next((i, s) for i, s in enumerate(program.segments) if s.loops)
    templates = list(steady.templates)
    use, *others = templates[-1].blocks
    templates[-1] = replace(templates[-1], blocks=(replace(use, local=Presence.SOMETIMES), *others))
    broken = replace(steady, templates=tuple(templates))
    segments = (*program.segments[:at], broken, *program.segments[at + 1 :])
    assert any(
        "shares code" in fault.message for fault in faults(replace(program, segments=segments))
    )


def test_loops_have_the_ticks_of_a_trip():
    program = plan_of(
        jp.spread_last(jp.schedules.build("1f1b", devices=4, microbatches=8))
    ).program()
    at, steady = next((i, s) for i, s in enumerate(program.segments) if s.loops)
    broken = replace(
        steady,
        loops=(*steady.loops[:-1], steady.loops[-1]._replace(times=steady.loops[-1].times - 1)),
    )
    segments = (*program.segments[:at], broken, *program.segments[at + 1 :])
    assert any(
        "has loops of" in fault.message for fault in faults(replace(program, segments=segments))
    )


@pytest.mark.parametrize(
    "name",
    [
        "1f1b",
        *(by_actions(n) for n in jp.schedules.names() if n not in ("1f1b", "no_pipelining")),
    ],
)
def test_no_more_predicates_ask_for_meetings_the_more_microbatches_there_are(name):
    """L, E and G in a program for GPUs: all that are left are in ramps; and there is no
    more code.
    """
    costs = jp.Costs(last=0.2, first=0, first_grad=0)
    asked, sizes = [], []
    for microbatches in (64, 128):
        schedule = jp.schedules.build(name, devices=4, microbatches=microbatches)
        plan = plan_of(jp.spread_first(jp.spread_last(schedule, costs=costs), costs=costs))
        asked.append(sum(segment.num_collective_predicates for segment in plan.segments))
        sizes.append(sum(segment.size for segment in plan.segments))
    assert asked[0] == asked[1]
    assert sizes[1] <= sizes[0]


def _without_shares(template):
    return replace(
        template, blocks=tuple(use for use in template.blocks if not use.block.is_collective)
    )


def test_shares_are_placed_by_the_pipeline_s_costs():
    """Where these say how long a share takes; a table without L is told from one that is placed by
    equal times.
    """
    table, mesh = jp.schedules.build("1f1b", devices=2, microbatches=6), mesh_of(2)
    times = jp.Costs(
        forward=0.002, input_grad=0.003, weight_grad=0.001, last=0.01, unit="seconds, estimated"
    )

    def placed(costs: jp.Costs | None) -> jp.Schedule:
        return jp.Pipeline(
            jp.Model(lambda w, x: x @ w, last=jp.VocabHead()), table, mesh, costs=costs
        ).schedule

    assert (
        placed(times).rows == jp.spread_last(table, costs=times).rows != jp.spread_last(table).rows
    )
    assert placed(replace(times, last=None)).rows == placed(None).rows == jp.spread_last(table).rows


@pytest.mark.parametrize("dim", [0, 1])
def test_of_equal_logits_the_first_counts(dim):
    """A head of zeros knows nothing: it is right where argmax is, not everywhere."""
    head = jp.VocabHead(dim=dim)
    pipe = jp.Pipeline(jp.Model(stage, last=head, has_metrics=True), SCHEDULE, mesh_of(2))
    whole, batch = canonical(2, 3), rows(8, 3)
    table = np.zeros_like(whole["last"]["w"])
    # words 0 and 2 are alike, and so are the others: across parts, and within them
    table[[0, 2]] = np.asarray(whole["last"]["w"])[0]
    batch |= {"targets": np.arange(batch["targets"].size).reshape(batch["targets"].shape) % 3}
    del batch["weights"]
    whole |= {"last": {"w": table.T if dim else table}}
    _, metrics = pipe.evaluate(pipe.place(whole), batch)
    x = batch["x"]
    for s in range(2):
        x = np.tanh(x @ whole["stages"][s])
    wanted = np.mean(np.argmax(x @ table.T, -1) == batch["targets"])
    assert abs(float(metrics["accuracy"]) - wanted) <= LIMIT
    assert 0 < wanted < 1
