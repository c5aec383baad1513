"""The engines side by side: each runs a table on a twin, the same weights and the same batch, and
returns an `Outcome`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import numpy as np
import torch
from jax.sharding import Mesh

import jaxpipe as jp
import torch_ref
from tests.flat import flat_pipeline
from tests.models import Twin, to_flat, to_tree
from tests.models.base import cast
from tests.oracle import oracle_outputs, oracle_value_and_grad

Flat: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The loss of a step and the gradients by parameter name; losses per microbatch where the
    engine gives them.
    """

    loss: float
    grads: dict[str, Any]
    losses: Any = None
    outputs: Any = None  # what the last stage returns, leaves [rows, ...]


def mesh_of(devices: int, **axes: int) -> Mesh:
    """A mesh of the first devices: `pipe`, then further axes."""
    sizes = (devices, *axes.values())
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), ("pipe", *axes))


def pipeline(schedule: jp.Schedule, twin: Twin, **options: Any) -> jp.Pipeline:
    """The twin on a mesh of the schedule's devices, with the program that GPUs run."""
    options.setdefault("mesh", mesh_of(schedule.num_devices))
    return flat_pipeline(twin.stage, schedule=schedule, first=twin.first, last=twin.last, **options)


def jaxpipe_step(pipe: jp.Pipeline, weights: Flat, batch: Flat, **how: Any) -> Outcome:
    """One training step of the SPMD program."""
    loss, grads = pipe.value_and_grad(pipe.place(to_tree(weights)), dict(batch), **how)
    canonical = to_flat(pipe.canonical(grads))
    return Outcome(float(loss), {name: canonical[name] for name in weights})


def torch_step(
    schedule: jp.Schedule, twin: Twin, weights: Flat, batch: Flat, dtype: torch.dtype | None = None
) -> Outcome:
    """The same table, as text, run by torch_ref, which casts weights and batch to `dtype`."""
    torch.set_num_threads(1)
    found = torch_ref.run(schedule.to_csv(), twin.reference, batch, weights=weights, dtype=dtype)
    return Outcome(found.loss, found.grads, found.losses)


def oracle_step(twin: Twin, weights: Flat, batch: Flat, microbatches: int) -> Outcome:
    """No pipeline at all: the oracle on each microbatch, and the mean of what it gives (in
    float64).
    """
    params, rows = to_tree(weights), len(next(iter(batch.values()))) // microbatches
    losses, outputs, total = [], [], dict.fromkeys(weights, 0.0)
    for m in range(microbatches):
        (loss, grads), out = _oracle_of(twin)(
            params, {k: v[m * rows : (m + 1) * rows] for k, v in batch.items()}
        )
        outputs.append(jax.tree.map(np.asarray, out))
        losses.append(float(loss))
        total = {
            name: total[name] + np.asarray(g, np.float64) / microbatches
            for name, g in to_flat(grads).items()
        }
    return Outcome(
        float(np.mean(losses)),
        {name: total[name] for name in weights},
        np.array(losses),
        jax.tree.map(lambda *parts: np.concatenate([np.atleast_1d(p) for p in parts]), *outputs),
    )


@lru_cache(maxsize=64)
def _oracle_of(twin: Twin) -> Any:
    """One compilation a twin, whatever the number of microbatches."""
    ends = {k: v for k, v in twin.oracle.items() if k != "last"}

    def run(params: Any, rows: Flat) -> Any:
        return oracle_value_and_grad(params, rows, **twin.oracle, microbatches=1), oracle_outputs(
            params, rows, **ends
        )

    return jax.jit(run)


@lru_cache(maxsize=256)
def truth(twin: Twin, microbatches: int, rows: int, seed: int = 0) -> Outcome:
    """The oracle in float64 on `case_data`; kept, since many tables share it."""
    weights, batch = case_data(twin, microbatches, rows, seed=seed)
    return oracle_step(twin, weights, batch, microbatches)


def case_data(
    twin: Twin, microbatches: int, rows: int, *, seed: int = 0, dtype: Any = np.float64
) -> tuple[Flat, Flat]:
    """(weights, batch) with this many rows a microbatch."""
    # Drawn once in float64 and rounded, so that every precision works on nearly the same numbers.
    return cast(twin.weights(seed), dtype), cast(twin.batch(rows * microbatches, seed), dtype)


def worst_error(found: Outcome, wanted: Outcome) -> float:
    """The largest difference of the loss or of any gradient, relative to the largest entry of its
    array.

    An array that should be zero (a layer that nothing depends on) must be zero; a value that is not
    finite is infinitely wrong.
    """
    assert found.grads.keys() == wanted.grads.keys()
    pairs = [
        (np.asarray(found.loss), np.asarray(wanted.loss)),
        *((found.grads[k], wanted.grads[k]) for k in wanted.grads),
    ]
    return max(_relative(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)


def outputs_error(found: Any, wanted: Outcome) -> float:
    """The largest difference of any output, relative to the largest entry of its array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted.outputs), strict=True)
    return max(_relative(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)


def _relative(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape, f"{found.shape} is not {wanted.shape}"
    if not np.all(np.isfinite(found)):
        return float("inf")
    difference, size = (
        np.max(np.abs(found - wanted), initial=0.0),
        np.max(np.abs(wanted), initial=0.0),
    )
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return float(difference / size)
