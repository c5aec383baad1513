"""The MLP in plain functions, and the same with flax.nnx and flax.linen modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen, nnx

from torch_ref.models import MLP

from .base import Twin


def mlp(stages: int, **flags: Any) -> Twin:
    """Plain functions of plain trees."""
    model = MLP(stages, **{"width": 5, "features_in": 3, "features_out": 2, **flags})

    def first(params, microbatch):
        return jnp.tanh(dense(params["dense"], microbatch["x"]))

    def stage(params, x):
        return jnp.tanh(dense(params["dense"], x))

    def last(params, x, microbatch):
        return squared_error(dense(params["dense"], x), microbatch["y"], sum_count=model.sum_count)

    def rows(rng, count):
        return {
            "x": rng.standard_normal((count, model.features_in)),
            "y": rng.standard_normal((count, model.features_out)),
        }

    return Twin("mlp", model, first if model.with_first else None, stage, last, rows)


def mlp_nnx(stages: int, **flags: Any) -> Twin:
    """Each dense layer is an `nnx.Linear`: split once into graph and state, merged again inside the
    function.
    """
    model = mlp(stages, **flags).reference
    layers = {
        "first": _linear(model.features_in, model.width),
        "stage": _linear(model.width, model.width),
        "last": _linear(model.width, model.features_out),
    }
    return _with_layers(
        "mlp_nnx", lambda part, params, x: merged(layers[part], params)(x), stages, **flags
    )


def mlp_linen(stages: int, **flags: Any) -> Twin:
    """Each dense layer is a `linen.Dense`."""
    model = mlp(stages, **flags).reference
    layers = {
        "first": linen.Dense(model.width),
        "stage": linen.Dense(model.width),
        "last": linen.Dense(model.features_out),
    }
    return _with_layers(
        "mlp_linen",
        lambda part, params, x: layers[part].apply({"params": params}, x),
        stages,
        **flags,
    )


def _with_layers(name: str, call: Callable[..., Any], stages: int, **flags: Any) -> Twin:
    """The MLP of `call(part, params, x)`, the dense layer of first, stage or last."""
    plain = mlp(stages, **flags)
    model = plain.reference

    def first(params, microbatch):
        return jnp.tanh(call("first", params["dense"], microbatch["x"]))

    def stage(params, x):
        return jnp.tanh(call("stage", params["dense"], x))

    def last(params, x, microbatch):
        return squared_error(
            call("last", params["dense"], x), microbatch["y"], sum_count=model.sum_count
        )

    return Twin(name, model, first if model.with_first else None, stage, last, plain.rows)


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


def squared_error(predicted, target, *, sum_count):
    error = jnp.square(predicted - target)
    return (jnp.sum(error), jnp.asarray(error.size, error.dtype)) if sum_count else jnp.mean(error)


def _linear(size_in: int, size_out: int) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: nnx.Linear(size_in, size_out, rngs=nnx.Rngs(0))))


def merged(module: tuple[Any, Any], params):
    """An nnx module of (graph, shapes), with these arrays as its parameters."""
    graph, state = module
    filled = nnx.State(dict(state))
    nnx.replace_by_pure_dict(filled, params)
    return nnx.merge(graph, filled)
