"""What goes wrong around a step is named before anything is compiled; an error inside a function
says which one and with what.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxpipe as jp
from tests.lowering.test_errors import (
    WIDTH,
    M,
    P,
    batch_of,
    last,
    params_of,
    pipe_of,
    raises,
    schedule,
    stage,
)
from tests.parity.engines import mesh_of
from tests.tiers import needs_half


def trace(pipe: jp.Pipeline, batch: Any = None, **how: Any) -> Any:
    """Nothing is compiled."""
    return pipe.lower(pipe.place(params_of()), batch_of() if batch is None else batch, **how)


COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "pipe"),
    "ppermute": lambda x: lax.ppermute(x, "pipe", [(0, 1), (1, 0)]),
    "all_gather": lambda x: jnp.sum(lax.all_gather(x, "pipe"), 0),
    "pmax": lambda x: lax.fori_loop(0, 2, lambda _, y: lax.pmax(lax.stop_gradient(y), "pipe"), x),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_over_the_pipe_axis_is_refused(name: str) -> None:
    """It would wait for ever."""
    with raises(f"`stage` calls {name}", "over the pipe axis 'pipe'", "run different stages"):
        trace(pipe_of(lambda p, x: COLLECTIVES[name](stage(p, x))))


def test_a_collective_in_last_or_over_a_replicated_axis() -> None:
    with raises("`last` calls psum"):
        trace(pipe_of(last=lambda p, x, mb: lax.psum(last(p, x, mb), "pipe")))
    size = pipe_of(lambda p, x: stage(p, x) / lax.axis_size("pipe"))  # the same on all devices
    trace(size)


def at_my_place(x: Any) -> Any:
    return x * (1 + lax.axis_index("pipe"))


@pytest.mark.parametrize(
    ("where", "functions"),
    [
        ("first", {"first": lambda p, mb: at_my_place(mb["x"])}),
        ("stage", {"stage": lambda p, x: at_my_place(stage(p, x))}),
        ("stage", {"stage": lambda p, x: lax.map(at_my_place, stage(p, x))}),
        ("last", {"last": lambda p, x, mb: at_my_place(last(p, x, mb))}),
        (
            "last",
            {
                "last": lambda p, x, mb: (last(p, x, mb), {"at": lax.axis_index("pipe")}),
                "has_metrics": True,
            },
        ),
    ],
)
def test_the_place_along_the_pipe_axis_is_refused(where: str, functions: dict[str, Any]) -> None:
    """Another table would put the stage elsewhere."""
    pipe, params = pipe_of(**functions), {**params_of(), "first": {}}
    text = (f"`{where}` asks for its place along the pipe axis 'pipe'", "ctx.stage is the number")
    with raises(*text):
        pipe.lower(pipe.place(params), batch_of())
    with raises(*text):
        pipe.evaluate(pipe.place(params), batch_of())


def complex_stage(params: Any, x: Any) -> Any:
    return x + jnp.real(jnp.fft.ifft(jnp.fft.fft(x) @ params["w"]))


@pytest.mark.parametrize("stages", [complex_stage, [complex_stage, complex_stage]])
def test_a_policy_that_saves_complex_numbers_is_named(stages: Any) -> None:
    remat = jax.checkpoint_policies.everything_saveable
    model, memory = jp.Model(stages, last=last), jp.Memory(remat=remat)
    pipe = jp.Pipeline(model, schedule(), mesh_of(P), memory=memory)
    own = params_of()["stages"]["w"]
    trees = {"w": own} if callable(stages) else [{"w": leaf} for leaf in own]
    with raises("`stage", "complex numbers", "everything_saveable", 'Write remat="full"'):
        pipe.lower(pipe.place({"stages": trees, "last": {}}), batch_of())


def test_arrays_that_were_donated_are_named() -> None:
    pipe = pipe_of()
    for name in ("params", "batch"):
        given = {"params": pipe.place(params_of()), "batch": jax.tree.map(jnp.asarray, batch_of())}
        for leaf in jax.tree.leaves(given[name]):
            leaf.delete()
        for call in (pipe.value_and_grad, pipe.loss, pipe.evaluate, pipe.outputs):
            with raises(f"arrays of {name} are deleted", "donate"):
                call(given["params"], given["batch"])
    key = jax.random.key(0)
    key.delete()
    with raises("1 arrays of rng are deleted"):
        pipe.value_and_grad(pipe.place(params_of()), batch_of(), rng=key)


def test_a_table_without_a_name_is_called_the_schedule() -> None:
    rows = jp.schedules.build("1f1b", devices=P, microbatches=M, forward_only=True).rows
    pipe = pipe_of(schedule=jp.Schedule.from_rows(rows))
    with raises("the schedule has forwards only"):
        trace(pipe)
    with raises("the schedule is for 2 devices"):
        pipe_of(schedule=jp.Schedule.from_rows(rows), mesh=mesh_of(4))


@pytest.mark.parametrize("keeps", ["state", "carry"])
def test_letters_may_not_keep_state_or_carry(keeps: str) -> None:
    layers: dict[str, Any] = {
        "state": lambda p, x, *, state: (x, state),
        "carry": lambda p, x, *, carry: (x, carry),
    }
    model = jp.Model({"t": layers[keeps], "L": last}, layers="ttL")
    with raises("`layers['t']`", f"only whole stages may take {keeps}"):
        jp.Pipeline(model, schedule(), mesh_of(P))
    with raises("carry= is for stages that take `carry`"):
        jp.Model({"t": stage, "L": last}, layers="ttL", carry=lambda p, x: x)


def test_a_plain_loss_names_what_a_stage_changes() -> None:
    narrow = jp.Model(lambda p, x: stage(p, x).astype(jnp.float32), last=last)
    with raises("`stage` takes x as float64[2, 4] but returns float32[2, 4]"):
        narrow.loss(params_of(), batch_of(), microbatches=M)
    other = jp.Model(lambda p, x: {"x": x}, last=last)
    with raises("`stage` takes x as PyTreeDef(*) but returns PyTreeDef({'x': *})"):
        other.loss(params_of(), batch_of(), microbatches=M)


def test_rows_that_do_not_divide_into_data_shards_name_these_alone() -> None:
    sharding = jp.Sharding(data=("data",))
    pipe = jp.Pipeline(
        jp.Model(stage, last=last), schedule(), mesh_of(P, data=2), sharding=sharding
    )
    with raises("batch['x'] has 5 rows, which do not divide into 2 data shards; use 4 rows"):
        pipe.evaluate(pipe.place(params_of()), batch_of(5))


def test_a_sharding_constraint_on_an_axis_that_is_manual() -> None:
    with raises("`stage` constrains the sharding", "names others only", "PartitionSpec"):
        trace(
            pipe_of(lambda p, x: lax.with_sharding_constraint(stage(p, x), PartitionSpec("pipe")))
        )


def of_a_mesh(x: Any) -> Any:
    auto = jax.sharding.Mesh(np.array(jax.devices()[:P]), ("pipe",))
    return lax.with_sharding_constraint(x, jax.sharding.NamedSharding(auto, PartitionSpec("pipe")))


def mapped(x: Any) -> Any:
    spec = PartitionSpec("pipe")
    return jax.shard_map(lambda x: 2 * x, mesh=mesh_of(P), in_specs=spec, out_specs=spec)(x)


def mapped_over_a_manual_axis(x: Any) -> Any:
    spec = PartitionSpec("pipe")
    return jax.shard_map(lambda x: 2 * x, in_specs=spec, out_specs=spec)(x)


def retyped(x: Any) -> Any:
    return jax.sharding.auto_axes(lambda x: 2 * x, out_sharding=PartitionSpec("pipe"))(x)


@pytest.mark.parametrize(
    ("change", "remove"),
    [
        (of_a_mesh, "Remove the pipe axis and the data axes"),
        (lambda x: jnp.sum(of_a_mesh(x)) * x, "Remove the pipe axis and the data axes"),
        (mapped, "`stage` calls jax.shard_map with a mesh of its own.*Remove mesh="),
        (mapped_over_a_manual_axis, "over a manual axis.*Remove mesh=.*it names 'pipe'"),
        (
            lambda x: lax.with_sharding_constraint(x, PartitionSpec("pipe")),
            "Remove the pipe axis and the data axes.*remove the call",
        ),
        (retyped, "Remove jax.sharding.auto_axes and explicit_axes"),
        (lambda x: jax.reshard(x, PartitionSpec("pipe")), "Remove jax.reshard and out_sharding="),
        (
            lambda x: jnp.einsum("...d->...d", x, out_sharding=PartitionSpec("pipe")),
            "Remove jax.reshard and out_sharding=",
        ),
    ],
)
def test_a_sharding_of_the_user_s_mesh_says_what_to_remove(change: Any, remove: str) -> None:
    with pytest.raises(jp.PipelineError, match=remove):
        trace(pipe_of(lambda p, x: change(stage(p, x))))


def over_data(call: Any, out: Any, **how: Any) -> Any:
    """A shard_map without a mesh over an axis that is manual inside of a pipeline."""
    return jax.shard_map(call, in_specs=PartitionSpec("data"), out_specs=out, **how)


ROWS = PartitionSpec("data")


@pytest.mark.parametrize(
    "change",
    [
        lambda x: over_data(jnp.tanh, ROWS)(x),
        lambda x: over_data(jnp.tanh, ROWS, axis_names={"data"})(x),
        lambda x: over_data(jnp.tanh, ROWS, check_vma=False)(x),
        lambda x: over_data(lambda x: lax.psum(x, "data"), PartitionSpec())(x),
        # what varies does not leave the function
        lambda x: x * over_data(lambda x: lax.pmean(x.mean(), "data"), PartitionSpec())(x),
        lambda x: x + 0 * jnp.sum(over_data(jnp.tanh, ROWS)(x)),
        lambda x: lax.scan(lambda c, _: (over_data(jnp.tanh, ROWS)(c), None), x, length=2)[0],
        jax.checkpoint(lambda x: x + 0 * jnp.sum(over_data(jnp.tanh, ROWS)(x))),
    ],
)
@pytest.mark.parametrize("where", ["first", "stage", "last"])
def test_a_shard_map_over_the_data_axis_says_what_to_remove(change: Any, where: str) -> None:
    calls: dict[str, Any] = {
        "first": lambda p, mb: mb["x"],
        "stage": stage,
        "last": lambda p, x, mb: jnp.mean(x),
    }
    own = calls[where]
    if where == "last":
        calls[where] = lambda p, x, mb: own(p, change(x), mb)
    else:
        calls[where] = lambda p, x: change(own(p, x))
    mesh = jax.make_mesh((P, 2), ("pipe", "data"), devices=jax.devices()[: 2 * P])
    model = jp.Model(calls["stage"], first=calls["first"], last=calls["last"])
    schedule = jp.schedules.build("1f1b", devices=P, microbatches=2)
    pipe = jp.Pipeline(model, schedule, mesh, sharding=jp.Sharding(data="data"))
    params = {"first": {}, "stages": {"w": jnp.ones((P, WIDTH, WIDTH))}, "last": {}}
    with pytest.raises(jp.PipelineError, match=f"`{where}` calls jax.shard_map.*Remove mesh="):
        jax.eval_shape(pipe.value_and_grad, pipe.place(params), {"x": jnp.ones((8, WIDTH))})


def test_a_constraint_by_the_data_axis_says_what_to_remove() -> None:
    pinned = jp.Model(
        lambda p, x: lax.with_sharding_constraint(stage(p, x), PartitionSpec("data")),
        last=lambda p, x, mb: jnp.mean(x),
    )
    mesh = jax.make_mesh((P, 2), ("pipe", "data"), devices=jax.devices()[: 2 * P])
    schedule = jp.schedules.build("1f1b", devices=P, microbatches=2)
    pipe = jp.Pipeline(pinned, schedule, mesh, sharding=jp.Sharding(data="data"))
    params = pipe.place({"stages": {"w": jnp.ones((P, WIDTH, WIDTH))}, "last": {}})
    with pytest.raises(jp.PipelineError, match="Remove the pipe axis and the data axes from it"):
        jax.eval_shape(pipe.value_and_grad, params, {"x": jnp.ones((8, WIDTH))})


def test_an_error_of_a_function_says_which_it_was_and_what_it_was_given() -> None:
    def broken(params: Any, x: Any) -> Any:
        return stage(params, x).reshape(7, 7)

    with pytest.raises(TypeError, match="reshape") as caught:
        trace(pipe_of(broken))
    (note,) = [note for note in caught.value.__notes__ if "jaxpipe" in note]
    assert "raised by `stage`" in note
    assert "broken, test_messages.py:" in note
    assert f"(w float64[{WIDTH}, {WIDTH}]; float64[2, {WIDTH}])" in note
    with pytest.raises(KeyError) as caught:
        trace(pipe_of(last=lambda p, x, mb: mb["z"]))
    assert any("raised by `last`" in note for note in caught.value.__notes__)


def test_functions_of_another_signature() -> None:
    # by position or by keyword: it is told by its name
    trace(pipe_of(lambda p, x, ctx: stage(p, x) + 0 * ctx.stage))
    with raises(
        "`stage` is called as stage(params, x)", "its parameters are (p, x, mask)", "'mask'"
    ):
        pipe_of(lambda p, x, mask: stage(p, x))
    with raises("`last` is called as last(params, x, microbatch)"):
        pipe_of(last=lambda p, x: 0.0)


def test_what_is_no_array() -> None:
    tensor = type("Tensor", (), {"__module__": "torch", "shape": (2, 3), "dtype": "torch.float32"})
    with raises("params['stages']['w'] is a torch.Tensor", "tensor.detach().cpu().numpy()"):
        pipe_of().place({"stages": {"w": tensor()}, "last": {}})
    with raises("batch['x'] is a torch.Tensor"):
        trace(pipe_of(), {**batch_of(), "x": tensor()})
    with raises("batch['x'] is a numpy array of objects"):
        trace(pipe_of(), {**batch_of(), "x": np.array([None] * 6)})
    with pytest.raises(jp.PipelineError) as caught:
        trace(pipe_of(), {**batch_of(), "x": [[1.0, 2.0]] * 600})
    assert caught.value.faults == (
        "1200 leaves of the batch are plain numbers, batch['x'][0][0] the first of them: name "
        "values that all rows share in jaxpipe.Model(..., whole=('x/0/0',)), and every function "
        "is given them as they are; lists are trees to JAX: make arrays of them, "
        "jax.numpy.asarray([...]), with a leading axis of rows",
    )


def test_what_is_no_key() -> None:
    with raises("rng=3 is no key; write rng=jax.random.key(3)"):
        trace(pipe_of(), rng=3)
    with raises("rng holds (2,) keys"):
        trace(pipe_of(), rng=jax.random.split(jax.random.key(0)))
    trace(pipe_of(), rng=jax.random.PRNGKey(0))


def test_without_a_loss() -> None:
    pipe = jp.Pipeline(jp.Model(stage), pipe_of().schedule, mesh_of(P))
    params = pipe.place({"stages": params_of()["stages"]})
    for name in ("evaluate", "losses", "loss", "value_and_grad"):
        with raises("needs a loss; give Model(..., last="):
            getattr(pipe, name)(params, batch_of())


def test_counts_that_are_no_numbers() -> None:
    how = {"loss": jp.Loss.SUM_OVER_COUNT}
    with raises("a scalar count; the count is float64[3]"):
        trace(pipe_of(last=lambda p, x, mb: (jnp.sum(x), jnp.ones(3)), **how))


@needs_half
def test_a_batch_in_which_nothing_is_counted_has_loss_0_and_gradients_0() -> None:
    """And sums and counts of half a precision are added in a whole one: 3 microbatches of 40000 are
    beyond float16.
    """

    def counted(params: Any, x: Any, microbatch: Any) -> Any:
        mask = microbatch["mask"]
        return jnp.sum(mask * jnp.square(x)).astype(jnp.float16), 40000 * mask[0, 0].astype(
            jnp.float16
        )

    pipe = pipe_of(last=counted, loss=jp.Loss.SUM_OVER_COUNT)
    params = pipe.place(params_of())
    rows = {"x": batch_of()["x"], "mask": np.zeros((2 * M, 1))}
    loss, grads = pipe.value_and_grad(params, rows)
    assert float(loss) == 0.0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))
    loss, grads = pipe.value_and_grad(params, {**rows, "mask": np.ones((2 * M, 1))})
    wanted = np.float32(np.float16(2 * WIDTH * np.tanh(WIDTH * np.tanh(WIDTH)) ** 2)) / 40000
    assert float(loss) == pytest.approx(wanted, rel=1e-3)  # float16 sums


@needs_half
def test_constant_losses_small_floats_and_jaxs_strict_modes() -> None:
    """A stage loss that is a number, parameters of 8 bits, no promotion by JAX, and its internal
    checks.
    """
    small = jax.tree.map(lambda a: jnp.asarray(a / 8, jnp.float8_e4m3fn), params_of())

    def dense(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["w"].astype(x.dtype)), 0.0

    with jax.numpy_dtype_promotion("strict"), jax.enable_checks(True):
        pipe = pipe_of(dense, stage_loss=True)
        loss, grads = pipe.value_and_grad(pipe.place(small), batch_of())
    x = np.ones(WIDTH)
    for _ in range(P):
        x = np.tanh(x @ np.full((WIDTH, WIDTH), 1 / 8))
    # the loss is in float64, what 8 bits hold is exact
    assert float(loss) == pytest.approx(np.mean((x - 1) ** 2), rel=1e-6)
    assert jax.tree.leaves(grads)[0].dtype == jnp.float32


def test_choices_that_are_none() -> None:
    with raises(
        "accumulate must be a floating dtype, or None for the parameters' own; got 'float31'"
    ):
        pipe_of(accumulate_dtype="float31")
    with raises("accumulate must be a floating dtype", "got 'int32'"):
        pipe_of(accumulate_dtype="int32")
    with raises(
        "frozen: '[' is no regular expression (unterminated character set at position 0)",
        "re.escape",
    ):
        pipe_of(frozen=["w", "["])
    with raises("params['stages'] is a numpy array of strings; give jax or numpy arrays"):
        pipe_of().place({"stages": np.array(["a", "b"]), "last": {}})


def test_a_scan_over_no_layers_gives_x() -> None:
    pipe = pipe_of(lambda p, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0])
    params = pipe.place({"stages": {"w": np.ones((P, 0, WIDTH, WIDTH))}, "last": {}})
    loss, grads = pipe.value_and_grad(params, {**batch_of(), "y": np.full((2 * M, WIDTH), 3.0)})
    assert float(loss) == 4.0
    assert jax.tree.leaves(grads)[0].shape == (P, 0, WIDTH, WIDTH)


def test_ends_of_flax_models() -> None:
    nnx: ModuleType = pytest.importorskip("flax.nnx")
    from jaxpipe.flax import from_nnx

    blocks = [nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2)]
    with raises(
        "first= is a Linear; write first=End(module, lambda module, microbatch: ...)",
        "last= is a function; write last=End(None,",
    ):
        from_nnx(blocks, num_stages=2, first=blocks[0], last=lambda m, x, mb: 0.0)
