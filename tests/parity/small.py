"""The smallest model whose parts are easy to change: one matrix a stage, a head, squared errors;
and its oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp
from tests.flat import flat_pipeline
from tests.models import to_flat
from tests.oracle import oracle_loss

from .engines import Outcome, mesh_of

WIDTH, WIDTH_OUT, ROWS = 3, 2, 2


def stage(params, x):
    return jnp.tanh(x @ params["w"])


def last(params, x, microbatch):
    return jnp.mean(jnp.square(x @ params["w"] - microbatch["y"]))


def weights(stages: int, seed: int = 0) -> dict[str, Any]:
    """Canonical parameters."""
    rng = np.random.default_rng(seed)
    return {
        "first": {},
        "stages": {"w": rng.standard_normal((stages, WIDTH, WIDTH)) / WIDTH**0.5},
        "last": {"w": rng.standard_normal((WIDTH, WIDTH_OUT))},
    }


def batch(rows: int, seed: int = 1) -> dict[str, Any]:
    """Rows of "x" and "y"."""
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((rows, WIDTH)), "y": rng.standard_normal((rows, WIDTH_OUT))}


def build(name: str, *, microbatches: int = 4, data: int = 1, **how: Any) -> jp.Pipeline:
    """The model on two devices, and on so many data shards."""
    schedule = jp.schedules.build(name, devices=2, microbatches=microbatches)
    options = {
        "stage": stage,
        "last": last,
        "mesh": mesh_of(2, data=data),
        "data_axes": ("data",),
        **how,
    }
    return flat_pipeline(options.pop("stage"), schedule=schedule, **options)


def step(pipe: jp.Pipeline, canonical: dict[str, Any], rows: dict[str, Any], **how: Any) -> Outcome:
    """A training step of the pipeline."""
    loss, grads = pipe.value_and_grad(pipe.place(canonical), rows, **how)
    found = to_flat(pipe.canonical(grads))
    return Outcome(float(loss), {name: found[name] for name in to_flat(canonical)})


def gradients_of(loss: Callable[[Any], Any], canonical: dict[str, Any]) -> Outcome:
    """The same of a loss that is a plain function of the canonical parameters."""
    value, grads = jax.jit(jax.value_and_grad(loss))(canonical)
    return Outcome(float(value), to_flat(grads))


def oracle(
    canonical: dict[str, Any], rows: dict[str, Any], microbatches: int, **functions: Any
) -> Outcome:
    """The oracle's step."""
    parts = {
        "first": lambda params, microbatch: microbatch["x"],
        "stage": stage,
        "last": last,
        **functions,
    }

    def loss(params):
        return oracle_loss(params, rows, **parts, microbatches=microbatches)

    return gradients_of(loss, canonical)
