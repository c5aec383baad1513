"""FP8 matmuls of flax in a pipeline, with scales and amax histories, bit by bit as in `Model.loss`.

All numbers are small multiples of powers of two, scales are powers of two, and no sum has more than
24 bits, so that every operation is exact but for the roundings to FP8, which are of equal numbers
on both sides.  Any order of sums gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from jaxpipe.eager import EagerExecutor
from jaxpipe.flax import End, from_flax_model, from_linen, from_nnx
from jaxpipe.jaxprs.equations import every_equation
from jaxpipe.lowering.target import GPU_FORM
from jaxpipe.stage.code import StageCode
from jaxpipe.stage.trace import trace_stage
from jaxpipe.table.effects import Place
from tests.forms import gpu_form
from tests.parity.engines import mesh_of
from tests.tiers import by_actions
from tests.tolerance import same

WIDTH, BLOCKS, M, ROWS, HISTORY = 8, 4, 4, 2, 3
OWN = "_overwrite_with_gradient"


class Fp8(nn.Fp8DirectDotGeneralOp):
    """With a short history."""

    amax_history_length: int = HISTORY


class Block(nn.Module):
    """A residual block with an FP8 matmul."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.relu(nn.Dense(WIDTH, use_bias=False, dot_general_cls=Fp8)(x)) / 8


def loss_of(_: Any, x: Any, microbatch: Any) -> Any:
    """The sum of products with signs, over a power of two: its gradients are exact."""
    return jnp.sum(x * microbatch["y"]) / x.size


def variables_of(seed: int) -> Any:
    """Kernels of six bits, which FP8 rounds to four, and histories that make scales 1/2, 2 and
    2^-12.
    """
    own = Block().init(jax.random.key(0), jnp.zeros((1, WIDTH), jnp.float32))
    kernel = np.random.default_rng(seed).integers(-32, 32, (WIDTH, WIDTH)) / 32
    greatest = {"input": 448 / 2, "kernel": 448 * 2, "output_grad": 57344 / 2**12}

    def known(path: Any, leaf: Any) -> Any:
        name = path[-1].key
        if name == "kernel":
            return jnp.asarray(kernel, jnp.float32)
        if name.endswith("history"):
            return jnp.full_like(leaf, greatest[name.removesuffix("_amax_history")])
        return leaf

    found: Any = jax.tree_util.tree_map_with_path(known, own)
    return found


def batch(count: int = M * ROWS) -> Any:
    rng = np.random.default_rng(9)
    signs = rng.choice([-1, 1], (count, WIDTH)).astype(np.float32)
    return {"x": rng.integers(-16, 16, (count, WIDTH)).astype(np.float32) / 4, "y": signs}


def model_of(stages: int, **how: Any) -> Any:
    variables = [variables_of(seed) for seed in range(BLOCKS)]
    return from_linen(Block(), variables, num_stages=stages, last=End(None, loss_of), **how)


def pipe_of(made: Any, name: str = "1f1b", **how: Any) -> jp.Pipeline:
    mesh = how.pop("mesh", mesh_of(2))
    stages, devices = jax.tree.leaves(made.params["stages"])[0].shape[0], mesh.shape["pipe"]
    schedule = jp.schedules.build(name, devices=devices, microbatches=M, chunks=stages // devices)
    return jp.Pipeline(made.model, schedule, mesh, **how)


def wanted(made: Any, rows: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda p: made.model.loss(p, rows, microbatches=M)))(
        made.params
    )


def agree(pipe: jp.Pipeline, made: Any, rows: Any) -> Any:
    loss, grads = pipe.value_and_grad(pipe.place(made.params), rows)
    found = pipe.canonical(grads)
    plain, plain_grads = wanted(made, rows)
    assert loss == plain
    assert same(found["stages"], plain_grads["stages"])
    return found


SAMPLE = ("1f1b", "zbv")
NAMES = (*SAMPLE, *(by_actions(name) for name in jp.schedules.names() if name not in SAMPLE))


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_gives_the_bits_of_plain_jax(name: str) -> None:
    mesh = mesh_of(1 if name == "no_pipelining" else 2)
    # the two chunks of dualpipe hold the same stages
    chunks = 1 if name == "dualpipe" else jp.schedules.describe(name).chunks.natural
    made, rows = model_of(mesh.size * chunks), batch()
    found = agree(pipe_of(made, name, mesh=mesh), made, rows)
    ops = found["stages"][OWN]["Dense_0"]["Fp8_0"]
    # of an input of at most 4 in the first block, whose history has moved on by one
    newest = np.abs(rows["x"]).max()
    assert ops["input_amax_history"].reshape(BLOCKS, HISTORY)[0].tolist() == [newest, 224, 224]
    assert ops["input_scale"].ravel().tolist() == [0.5] * BLOCKS
    assert ops["output_grad_scale"].ravel().tolist() == [2.0**-12] * BLOCKS


@pytest.mark.parametrize(
    "how",
    [
        {"executor": EagerExecutor()},
        {"executor": gpu_form()},
        {"mesh": mesh_of(2, data=2), "sharding": jp.Sharding(data="data")},
        {"mesh": mesh_of(2, data=2), "sharding": jp.Sharding(data="data", fsdp="data")},
    ],
    ids=["eager", "gpu_form", "data", "fsdp"],
)
def test_engines_and_axes_give_them_too(how: Any) -> None:
    """With data shards, microbatches are other rows: sums and maxima are the same."""
    made = model_of(2)
    agree(pipe_of(made, "zb_h1", **how), made, batch(2 * M * ROWS))


def test_fp8_rounds_here() -> None:
    """Else the tests above would compare what no rounding has touched."""
    made, rows = model_of(2), batch()
    x = rows["x"]
    for seed in range(BLOCKS):
        x = x + np.maximum(x @ variables_of(seed)["params"]["Dense_0"]["kernel"], 0) / 8
    exact = np.sum(x * rows["y"]) / x.size
    found = wanted(made, rows)[0]
    assert found != exact
    assert abs(found - exact) < 0.5 * abs(exact)


def test_frozen_kernels_keep_their_scales_moving() -> None:
    made, rows = model_of(2, frozen=["stages/Dense_0"]), batch()
    pipe = pipe_of(made)
    _, grads = pipe.value_and_grad(pipe.place(made.params), rows)
    found, plain = pipe.canonical(grads)["stages"], wanted(made, rows)[1]["stages"]
    assert found["Dense_0"]["kernel"] is None
    assert same(found[OWN], plain[OWN])


OPTIMIZER = optax.MultiSteps(optax.sgd(0.5, momentum=0.5), 2)


def stepped(pipe: jp.Pipeline, run: Any, rows: Any) -> Any:
    @pipe.jit
    def step(params: Any, state: Any) -> Any:
        _, grads = pipe.value_and_grad(params, rows)
        own = pipe.trained(params)
        updates, state = OPTIMIZER.update(pipe.trained(grads, like=params), state, own)
        return pipe.with_trained(params, optax.apply_updates(own, updates), grads=grads), state

    params, state = step(run["params"], run["opt_state"])
    return {"params": params, "opt_state": state}


def begun(pipe: jp.Pipeline, made: Any) -> Any:
    params = pipe.place(made.params)
    return {"params": params, "opt_state": pipe.init(OPTIMIZER, params)}


def test_a_run_goes_on_under_another_layout(tmp_path: Any) -> None:
    """A checkpoint between two steps, whose gradients are accumulated, is read by a pipeline with
    other chunks.  What moves into the histories is below what was there: scales stay, and so does
    the proof that all is exact.
    """
    (made, other), rows = map(model_of, (2, 4)), batch()
    pipe = pipe_of(made)
    run = begun(pipe, made)
    state = jax.tree_util.tree_leaves_with_path(run["opt_state"])
    assert not any("Fp8" in jax.tree_util.keystr(path) for path, _ in state)
    with Checkpoints(tmp_path, pipe, layer_axis=True) as kept:
        kept.save(1, stepped(pipe, run, rows))
    chunked = pipe_of(other, "interleaved_1f1b")
    with Checkpoints(tmp_path, chunked, layer_axis=True) as kept:
        _, restored = kept.restore(begun(chunked, other))
    found = chunked.canonical(stepped(chunked, restored, rows)["params"])["stages"]

    stages = made.params["stages"]
    after = {"stages": {**stages, OWN: wanted(made, rows)[1]["stages"][OWN]}}
    grads = jax.grad(lambda params: made.model.loss(params, rows, microbatches=M))
    two = [grads(params)["stages"] for params in (made.params, after)]
    kernel = stages["Dense_0"]["kernel"]
    mean = (two[0]["Dense_0"]["kernel"] + two[1]["Dense_0"]["kernel"]) / 2
    assert same(found["Dense_0"]["kernel"].ravel(), (kernel - mean / 2).ravel())
    assert same(
        jax.tree.map(jnp.ravel, found[OWN]),
        jax.tree.map(jnp.ravel, two[1][OWN]),
    )


def test_the_ends_and_shared_modules_have_them_too() -> None:
    """`last` has an FP8 head; a whole model is split with its collection."""

    class Whole(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for i in range(BLOCKS):
                x = Block(name=f"blocks_{i}")(x)
            return nn.Dense(WIDTH, use_bias=False, dot_general_cls=Fp8, name="head")(x)

    rows = batch()
    variables = Whole().init(jax.random.key(0), rows["x"])
    made = from_flax_model(
        Whole(),
        variables=variables,
        loss=lambda model, microbatch: loss_of(None, model(microbatch["x"]), microbatch),
        batch=jax.tree.map(lambda leaf: leaf[:ROWS], rows),
        num_stages=2,
    )
    assert same(made.to_linen(made.params), variables)
    pipe = pipe_of(made)
    params = pipe.place(made.params)
    _, grads = pipe.value_and_grad(params, rows)
    new = pipe.with_trained(params, pipe.trained(params), grads=grads)
    own = made.to_linen(pipe.canonical(new))[OWN]
    assert own["head"]["Fp8_0"]["input_amax_history"][0] > 0
    assert same(own["head"]["Fp8_0"]["input_scale"], np.ones(1, np.float32))
    newest = own["blocks_0"]["Dense_0"]["Fp8_0"]["input_amax_history"][0]
    assert newest == np.abs(rows["x"]).max()


def test_modules_of_nnx_have_them_by_the_class_of_their_variables() -> None:
    rows = batch()

    blocks = [nnx.bridge.ToNNX(Block(), rngs=nnx.Rngs(i)) for i in range(BLOCKS)]
    for block in blocks:
        block.lazy_init(rows["x"][:1])
    made = from_nnx(blocks, num_stages=2, last=End(None, loss_of))
    paths = [
        "/".join(str(getattr(key, "key", key)) for key in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(made.params)
    ]
    assert all(made.model.replaced.of(path) for path in paths if "Fp8" in path)
    assert not any(made.model.replaced.of(path) for path in paths if "Fp8" not in path)
    pipe = pipe_of(made)
    params = pipe.place(made.params)
    _, grads = pipe.value_and_grad(params, rows, rng=jax.random.key(0))
    new = pipe.with_trained(params, pipe.trained(params), grads=grads)
    found = pipe.canonical(new)["stages"]["Dense_0"]["Fp8_0"]["input_amax_history"]
    assert found.reshape(BLOCKS, HISTORY)[0].tolist() == [np.abs(rows["x"]).max(), 0, 0]


class Gated(nn.Module):
    """A gated feed-forward block in bfloat16, as Llama's."""

    fp8: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        own = Fp8 if self.fp8 else None

        def dense(width: int, u: Any) -> Any:
            made = nn.Dense(width, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=own)
            return made(u)

        return x + dense(x.shape[1], nn.silu(dense(2 * WIDTH, x)) * dense(2 * WIDTH, x))


def code_of(*, fp8: bool) -> StageCode:
    block, x = Gated(fp8=fp8), jnp.zeros((ROWS, WIDTH), jnp.bfloat16)
    variables = block.init(jax.random.key(0), x)
    return trace_stage(lambda own, x, _: block.apply(own, x), variables, x, {}, form=GPU_FORM)


def sizes(avals: Any) -> dict[str, int]:
    """Bytes by dtype."""
    found: dict[str, int] = {}
    for aval in avals:
        found[str(aval.dtype)] = found.get(str(aval.dtype), 0) + aval.size * aval.dtype.itemsize
    return found


def test_what_waits_for_weight_gradients_has_one_byte_an_element() -> None:
    """By a row, D = 8 and H = 16.  W multiplies x, x and h, which it makes again of x and of what
    the forward kept, with three cotangents: of [D] in the last matmul, of [H] in the others.
    Beside each is its greatest value.
    """
    fp8, plain = code_of(fp8=True).avals, code_of(fp8=False).avals
    stash = sizes(fp8[Place.STASH])
    assert stash == {"float8_e5m2": ROWS * (WIDTH + 2 * 2 * WIDTH), "bfloat16": 2 * 3}
    # gate and up, as with bfloat16, whose product's derivative is computed in it
    kept = {"bfloat16": ROWS * 2 * 2 * WIDTH * 2}
    assert sizes(plain[Place.RESIDUAL_WEIGHT]) == kept
    histories = {"float32": 3 * HISTORY * 4}  # of inputs
    assert sizes(fp8[Place.RESIDUAL_WEIGHT]) == kept | histories
    assert fp8[Place.RESIDUAL_INPUT] == plain[Place.RESIDUAL_INPUT] == ()
    # without FP8 the cotangent of their product, and that of the result in its own slot
    assert sizes(plain[Place.STASH]) == {"bfloat16": ROWS * 2 * WIDTH * 2}


def code_of_layers() -> StageCode:
    """Of a scan over three layers that stays one."""
    block, x = Gated(fp8=True), jnp.zeros((ROWS, WIDTH), jnp.bfloat16)
    variables = block.init(jax.random.key(0), x)
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), variables)

    def layers(own: Any, x: Any, _: Any) -> Any:
        return jax.lax.scan(lambda x, layer: (block.apply(layer, x), None), x, own)[0]

    return trace_stage(layers, stack, x, {}, form=replace(GPU_FORM, layers=0))


@pytest.mark.parametrize("made", [lambda: code_of(fp8=True), code_of_layers], ids=["one", "scan"])
def test_weights_are_cast_and_transposed_once_a_step(made: Callable[[], StageCode]) -> None:
    code = made()
    kernels = {(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)}

    def cast(jaxpr: Any) -> int:
        return sum(
            eqn.outvars[0].aval.shape in kernels and eqn.params["new_dtype"] == jnp.float8_e4m3fn
            for eqn in every_equation(jaxpr)
            if eqn.primitive.name == "convert_element_type"
        )

    def turned(jaxpr: Any) -> int:
        return sum(
            eqn.primitive.name == "transpose" and eqn.outvars[0].aval.dtype == jnp.float8_e4m3fn
            for eqn in every_equation(jaxpr)
        )

    assert cast(code.hoist) == turned(code.hoist) == 3
    for each in (code.forward, code.input_grad, code.weight_grad, code.backward):
        assert cast(each) == turned(each) == 0
