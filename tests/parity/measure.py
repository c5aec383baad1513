"""One case of the grid: the errors of each engine against the un-pipelined oracle in float64."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from tests.models import to_tree

from .cases import ROWS, Case
from .engines import (
    Outcome,
    case_data,
    jaxpipe_step,
    outputs_error,
    pipeline,
    torch_step,
    truth,
    worst_error,
)
from .tolerance import FLOAT64, bound


@dataclass(frozen=True)
class Measured:
    """Largest relative errors: of loss and gradients in jaxpipe and in torch_ref, and of jaxpipe's
    losses by microbatch and outputs by row (`losses`).

    `bits` is a digest of jaxpipe's loss and gradients.
    """

    step: float
    losses: float
    torch: float
    limit: float
    bits: str

    @property
    def passed(self) -> bool:
        """Whether all are within the limit."""
        return max(self.step, self.losses, self.torch) <= self.limit


def measure(case: Case) -> Measured:
    """Run the case on both engines in the case's precision; the oracle always in float64."""
    schedule, model, count = case.build(), case.twin, case.microbatches
    dtype = jnp.dtype(case.dtype)
    right = truth(model, count, ROWS)
    weights, batch = case_data(model, count, ROWS, dtype=dtype)
    pipe = pipeline(schedule, model)
    found = jaxpipe_step(pipe, weights, batch)
    params = pipe.place(to_tree(weights))
    losses = np.asarray(pipe.losses(params, dict(batch)), np.float64)
    outputs = pipe.outputs(params, dict(batch))
    in_torch = torch_step(
        schedule, model, *case_data(model, count, ROWS), dtype=getattr(torch, case.dtype)
    )
    limit = (
        FLOAT64
        if dtype == np.float64
        else bound(model.reference, rows=ROWS, microbatches=count, dtype=dtype)
    )
    return Measured(
        step=worst_error(found, right),
        losses=max(losses_error(losses, right), outputs_error(outputs, right)),
        torch=max(worst_error(in_torch, right), losses_error(in_torch.losses, right)),
        limit=limit,
        bits=_digest(
            str(found.loss), *(np.ascontiguousarray(g).tobytes() for g in found.grads.values())
        ),
    )


def losses_error(losses: Any, right: Outcome) -> float:
    """The largest error of a microbatch's loss, relative to the largest loss."""
    if losses.shape != right.losses.shape or not np.all(np.isfinite(losses)):
        return float("inf")
    return float(np.max(np.abs(losses - right.losses)) / np.max(np.abs(right.losses)))


def _digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
    return total.hexdigest()[:16]
