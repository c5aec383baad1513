"""Sharding metadata of flax variables becomes the pipeline's specs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe.flax import End, from_flax_model, from_linen, from_nnx
from tests.axes.model import worst_error
from tests.flax.models import F64, VOCAB, cross_entropy, rows
from tests.refused import refused
from tests.tolerance import FLOAT64

WIDTH = 4
BATCH = {"x": jnp.arange(16.0, dtype=F64).reshape(4, WIDTH) / 8}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "mlp"))
        return x + nn.Dense(WIDTH, kernel_init=init, param_dtype=F64)(x)


def nnx_blocks() -> list[Any]:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "mlp"))
    with nnx.use_eager_sharding(False):  # there is no mesh yet
        return [
            nnx.Linear(WIDTH, WIDTH, kernel_init=init, param_dtype=F64, rngs=nnx.Rngs(i))
            for i in range(4)
        ]


def linen_model(**how: Any) -> Any:
    variables = [Block().init(jax.random.key(i), jnp.ones((1, WIDTH))) for i in range(4)]
    return from_linen(
        Block(),
        variables,
        num_stages=2,
        last=End(None, lambda _, x, microbatch: jnp.mean(x**2)),
        **how,
    )


def nnx_model(**how: Any) -> Any:
    return from_nnx(
        nnx_blocks(), num_stages=2, last=End(None, lambda _, x, microbatch: jnp.mean(x**2)), **how
    )


@pytest.mark.parametrize("model", [linen_model, nnx_model])
def test_metadata_becomes_specs(model: Any) -> None:
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    mesh = jax.make_mesh((2, 2), ("pipe", "tensor"), devices=jax.devices()[:4])
    made = model(rules={"mlp": "tensor"})
    pipe = jp.Pipeline(made.model, schedule, mesh, sharding=jp.Sharding(specs=made.specs))
    kernels = {
        jax.tree_util.keystr(path): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(pipe.place(made.params)["stages"])
    }
    assert {spec for name, spec in kernels.items() if "kernel" in name} == {
        PartitionSpec("pipe", None, None, "tensor")
    }
    assert {spec for name, spec in kernels.items() if "bias" in name} == {PartitionSpec("pipe")}
    replicated = jp.Sharding(replicated="tensor")
    whole = jp.Pipeline(made.model, schedule, mesh, sharding=replicated)
    # A matmul whose columns two devices share: the same sums.
    (split, own), (plain, other_own) = (
        each.jit(each.value_and_grad)(each.place(made.params), BATCH) for each in (pipe, whole)
    )
    assert float(split) == pytest.approx(float(plain), rel=FLOAT64)
    assert worst_error(pipe.canonical(own), whole.canonical(other_own)) < FLOAT64
    other = model()
    sharding = jp.Sharding(specs=other.specs, replicated="tensor")
    unknown = jp.Pipeline(other.model, schedule, mesh, sharding=sharding)
    with refused("names an axis 'mlp' that the mesh does not have"):
        unknown.place(made.params)


def test_a_name_in_a_tuple_may_stand_for_several_axes() -> None:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, ("heads", "mlp")))
    with nnx.use_eager_sharding(False):
        blocks = [nnx.Linear(4, 4, kernel_init=init, rngs=nnx.Rngs(i)) for i in range(2)]
    rules = {"heads": ("tensor", "expert"), "mlp": None}
    specs = from_nnx(blocks, num_stages=2, rules=rules).specs
    assert specs is not None
    assert specs["stages"]["kernel"] == PartitionSpec(None, None, ("tensor", "expert"))


class General(nn.Module):
    """`DenseGeneral` calls its initializers again in every call."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "pipe", "data"))
        dense = nn.remat(nn.DenseGeneral)((2, 2), kernel_init=init, param_dtype=F64)
        return x + dense(x).reshape(x.shape)


def pipeline(model: Any, **sharding: Any) -> jp.Pipeline:
    """On pipe 2 x data 2."""
    mesh = jax.make_mesh((2, 2), ("pipe", "data"), devices=jax.devices()[:4])
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    sharded = jp.Sharding(data="data", **sharding)
    return jp.Pipeline(model.model, schedule, mesh, sharding=sharded)


def linen_loss(block: Any) -> Any:
    """What flax alone computes of the blocks' variables."""

    def loss(blocks: Any) -> Any:
        x = BATCH["x"]
        for own in blocks:
            x = block.apply(own, x)
        return jnp.mean(x**2)

    return loss


def check(model: Any, pipe: jp.Pipeline, variables: Any, loss: Any) -> None:
    """Loss and gradients of a pipeline of linen blocks are those of flax alone."""
    found, grads = pipe.jit(pipe.value_and_grad)(pipe.place(model.params), BATCH)
    expected, plain = jax.jit(jax.value_and_grad(loss))(nn.meta.unbox(variables))
    assert float(found) == pytest.approx(float(expected), rel=FLOAT64)
    assert worst_error(model.to_linen(pipe.canonical(grads)), plain) < FLOAT64


def test_metadata_is_ignored_inside_of_stages() -> None:
    variables = [General().init(jax.random.key(i), jnp.ones((1, WIDTH))) for i in range(2)]
    end = End(None, lambda _, x, microbatch: jnp.mean(x**2))
    model = from_linen(General(), variables, num_stages=2, rngs=(), last=end)
    check(model, pipeline(model), variables, linen_loss(General()))


class Sharded(nn.Module):
    """A block of nanodo: each kernel is annotated with the data axis of FSDP."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def general(axes: tuple[str | None, ...], shape: Any, **how: Any) -> Any:
            init = nn.with_partitioning(nn.initializers.lecun_normal(), axes)
            return nn.DenseGeneral(shape, use_bias=False, kernel_init=init, param_dtype=F64, **how)

        h = nn.LayerNorm(use_bias=False, param_dtype=F64)(x)
        q, k, v = (general(("data", None, None), (2, WIDTH // 2))(h) for _ in range(3))
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v)
        x = x + general((None, None, "data"), WIDTH, axis=(-2, -1))(mixed)
        h = jax.nn.gelu(general(("data", None), 2 * WIDTH)(x))
        return x + general((None, "data"), WIDTH)(h)


class Nanodo(nn.Module):
    """A whole decoder so annotated, with a tied embedding."""

    def setup(self) -> None:
        init = nn.with_partitioning(nn.initializers.normal(), (None, "data"))
        self.embed = nn.Embed(VOCAB, WIDTH, embedding_init=init, param_dtype=F64)
        self.blocks = [Sharded() for _ in range(2)]

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


@pytest.mark.parametrize("fsdp", [None, "data"])
def test_annotations_of_fsdp_change_no_number(fsdp: str | None) -> None:
    """The pipeline cuts parameters along the data axis by `Sharding(fsdp=)` alone."""
    net, batch = Nanodo(), rows(4)
    variables = net.init(jax.random.key(0), batch["tokens"])

    def loss(bound: Any, microbatch: Any) -> Any:
        return cross_entropy(bound(microbatch["tokens"]), microbatch)

    model = from_flax_model(net, variables=variables, loss=loss, batch=rows(1), num_stages=2)
    pipe = pipeline(model, fsdp=fsdp)
    found, grads = pipe.jit(pipe.value_and_grad)(pipe.place(model.params), batch)
    expected, plain = jax.jit(
        jax.value_and_grad(lambda own: cross_entropy(net.apply(own, batch["tokens"]), batch))
    )(nn.meta.unbox(variables))
    assert float(found) == pytest.approx(float(expected), rel=FLOAT64)
    assert worst_error(model.to_linen(pipe.canonical(grads)), plain) < FLOAT64


def test_a_filter_of_nnx_says_what_is_frozen() -> None:
    """LoRA: the weights are frozen, in any dtype, and the updates of low rank trained."""
    blocks = [nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=nnx.Rngs(i)) for i in range(4)]
    end = End(None, lambda _, x, microbatch: jnp.mean(x**2))
    model = from_nnx(
        blocks,
        num_stages=2,
        last=end,
        frozen=lambda path, variable: not isinstance(variable, nnx.LoRAParam),
    )
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    pipe = jp.Pipeline(model.model, schedule, mesh)
    params = pipe.place(model.params)
    _, grads = jax.eval_shape(pipe.value_and_grad, params, {"x": jnp.ones((4, WIDTH))})
    names = {
        jax.tree_util.keystr(path[2:], simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(grads["stages"])
    }
    assert {name.split("/")[-1] for name in names} == {"lora_a", "lora_b"}
    assert grads["stages"][0]["kernel"] is None


class Logical(nn.Module):
    """The same with logical names, and a constraint of the activation by them."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_logical_partitioning(
            nn.initializers.lecun_normal(), ("embed", "heads", "kv")
        )
        y = nn.DenseGeneral((2, 2), kernel_init=init, param_dtype=F64)(x).reshape(x.shape)
        return x + nn.with_logical_constraint(y, ("batch", "embed"))


def logical_model() -> tuple[Any, Any, Any]:
    variables = [Logical().init(jax.random.key(i), jnp.ones((1, WIDTH))) for i in range(4)]
    end = End(None, lambda _, x, microbatch: jnp.mean(x**2))
    model = from_linen(Logical(), variables, num_stages=2, rngs=(), last=end)
    expected, plain = jax.value_and_grad(linen_loss(Logical()))(nn.meta.unbox(variables))
    return model, expected, (plain, lambda grads: model.to_linen(grads))


def written_nnx_model() -> tuple[Any, Any, Any]:
    def loss(blocks: Any) -> Any:
        x = BATCH["x"]
        for block in blocks:
            x = block(x)
        return jnp.mean(x**2)

    model, blocks = nnx_model(), nnx.List(nnx_blocks())
    expected, plain = nnx.value_and_grad(loss)(blocks)
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves),
        *(nnx.to_pure_dict(plain)[i] for i in range(len(blocks))),
    )
    return model, expected, (stacked, lambda grads: grads["stages"])


@pytest.mark.parametrize("make", [logical_model, written_nnx_model])
def test_names_that_the_mesh_does_not_have_are_ignored_inside_of_stages(make: Any) -> None:
    """Also where the user has set a mesh."""
    model, expected, (plain, form) = make()
    pipe = pipeline(model)
    with jax.set_mesh(pipe.mesh):
        found, grads = pipe.jit(pipe.value_and_grad)(pipe.place(model.params), BATCH)
    own = form(pipe.canonical(grads))
    assert float(found) == pytest.approx(float(expected), rel=FLOAT64)
    leaves = [jax.tree.map(lambda a: jnp.reshape(a, -1), tree) for tree in (own, plain)]
    assert worst_error(*leaves) < FLOAT64


def test_models_are_made_where_the_user_has_set_a_mesh() -> None:
    """flax itself refuses these names there."""
    variables = [General().init(jax.random.key(i), jnp.ones((1, WIDTH))) for i in range(2)]
    end = End(None, lambda _, x, microbatch: jnp.mean(x**2))
    mesh = jax.make_mesh((2, 2), ("pipe", "data"), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="Resource axis: embed"):
            nn.meta.unbox(variables)
        model = from_linen(General(), variables, num_stages=2, rngs=(), last=end)
    kernel = model.params["stages"]["CheckpointDenseGeneral_0"]["kernel"]
    assert kernel.shape == (2, 1, WIDTH, 2, 2)
    assert model.specs is not None
