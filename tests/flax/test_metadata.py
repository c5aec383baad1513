"""Sharding metadata of flax variables becomes the pipeline's specs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe.flax import End, from_linen, from_nnx

WIDTH = 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "mlp"))
        return x + nn.Dense(WIDTH, kernel_init=init)(x)


def nnx_blocks() -> list[Any]:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "mlp"))
    with nnx.use_eager_sharding(False):  # there is no mesh yet
        return [nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=nnx.Rngs(i)) for i in range(4)]


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
    rows = {"x": jnp.ones((4, WIDTH))}
    # A matmul whose columns two devices share: the same sums, in float32.
    split, plain = (
        pipe.evaluate(pipe.place(made.params), rows),
        whole.evaluate(whole.place(made.params), rows),
    )
    assert float(split) == pytest.approx(float(plain), rel=1e-5)
    other = model()
    sharding = jp.Sharding(specs=other.specs, replicated="tensor")
    unknown = jp.Pipeline(other.model, schedule, mesh, sharding=sharding)
    with pytest.raises(jp.PipelineError, match="names an axis 'mlp' that the mesh does not have"):
        unknown.place(made.params)


class General(nn.Module):
    """`DenseGeneral` calls its initializers again in every call."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "pipe", "data"))
        return x + nn.remat(nn.DenseGeneral)((2, 2), kernel_init=init)(x).reshape(x.shape)


def test_metadata_is_ignored_inside_of_stages() -> None:
    variables = [General().init(jax.random.key(i), jnp.ones((1, WIDTH))) for i in range(2)]
    end = End(None, lambda _, x, microbatch: jnp.mean(x**2))
    model = from_linen(General(), variables, num_stages=2, rngs=(), last=end)
    mesh = jax.make_mesh((2, 2), ("pipe", "data"), devices=jax.devices()[:4])
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    pipe = jp.Pipeline(model.model, schedule, mesh, sharding=jp.Sharding(data="data"))
    batch = {"x": jnp.ones((4, WIDTH))}
    found = pipe.evaluate(pipe.place(model.params), batch)
    assert float(found) == pytest.approx(float(model.model.loss(model.params, batch)), rel=1e-6)


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
        y = nn.DenseGeneral((2, 2), kernel_init=init)(x).reshape(x.shape)
        return x + nn.with_logical_constraint(y, ("batch", "embed"))


def logical_model() -> Any:
    variables = [Logical().init(jax.random.key(i), jnp.ones((1, WIDTH))) for i in range(4)]
    end = End(None, lambda _, x, microbatch: jnp.mean(x**2))
    return from_linen(Logical(), variables, num_stages=2, rngs=(), last=end)


@pytest.mark.parametrize("make", [logical_model, nnx_model])
def test_names_that_the_mesh_does_not_have_are_ignored_inside_of_stages(make: Any) -> None:
    """Also where the user has set a mesh."""
    model = make()
    mesh = jax.make_mesh((2, 2), ("pipe", "data"), devices=jax.devices()[:4])
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    pipe = jp.Pipeline(model.model, schedule, mesh, sharding=jp.Sharding(data="data"))
    batch = {"x": jnp.arange(16.0).reshape(4, WIDTH) / 8}
    expected = float(model.model.loss(model.params, batch))
    with jax.set_mesh(pipe.mesh):
        found = pipe.evaluate(pipe.place(model.params), batch)
    assert float(found) == pytest.approx(expected, rel=1e-6)


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
