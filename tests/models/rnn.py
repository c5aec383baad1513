"""The recurrent net: a cell scanned over time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from torch_ref.models import RNN

from .base import Twin
from .mlp import dense, squared_error


def rnn(stages: int, **flags: Any) -> Twin:
    """The recurrent net."""
    model = RNN(stages, **{"width": 4, "features_in": 3, **flags})

    def first(params, microbatch):
        return dense(params["dense"], microbatch["x"])

    def stage(params, x):
        def step(state, now):
            gate = jax.nn.sigmoid(cell(params["gate"], now, state))
            candidate = jnp.tanh(cell(params["candidate"], now, gate * state))
            state = (1 - gate) * state + gate * candidate
            return state, state

        _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))
        return x + jnp.swapaxes(states, 0, 1)

    def last(params, x, microbatch):
        return squared_error(dense(params["dense"], x), microbatch["y"], sum_count=model.sum_count)

    def rows(rng, count):
        return {
            "x": rng.standard_normal((count, 5, model.features_in)),
            "y": rng.standard_normal((count, 5, model.features_out)),
        }

    return Twin("rnn", model, first, stage, last, rows)


def cell(params, now, state):
    return now @ params["kernel"] + state @ params["recurrent"] + params["bias"]
