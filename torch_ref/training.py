"""Several optimizer steps, each through the table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .errors import TableError
from .executor import run
from .models.base import Arrays, StagedModel
from .optim import Optimizer, clip, global_norm, rate_of
from .result import Array, to_numpy


@dataclass(frozen=True)
class Trained:
    """What a training gave.

    Attributes:
        losses: [steps], each from before its update.
        grad_norms: [steps], global norms before clipping.
        rates: [steps], learning rates.
        weights: after the last step.
    """

    losses: Array
    grad_norms: Array
    rates: Array
    weights: Arrays


def train(
    table_csv: str,
    model: StagedModel,
    batches: Iterable[Mapping[str, Any]],
    *,
    weights: Mapping[str, Array],
    optimizer: Optimizer,
    dtype: torch.dtype | None = None,
    rows: Sequence[int] | None = None,
    loss_scale: float = 1.0,
    slices: int = 1,
    time: Sequence[str] = (),
) -> Trained:
    """Train a model on one batch a step, every step through the table; the weights that are given
    stay as they are.

    Args:
        table_csv: a table with backwards, as `run` takes it.
        model: its number of stages must be the table's.
        batches: one a step.
        weights: by name, from before the first step.
        optimizer: `AdamW` or `SGD`, with its rate, weight decay and clipping.
        dtype: what weights and floating entries of the batches are computed in; the weights
            themselves keep their own type.
        rows: how many rows each microbatch has; equal numbers where None.
        loss_scale, slices, time: as `run` takes them.

    Raises:
        TableError, WeightsError, BatchError: as `run` does.

    >>> import numpy as np
    >>> from torch_ref import optim
    >>> from torch_ref.models import MLP
    >>> model = MLP(num_stages=1)
    >>> batch = {"x": np.ones((2, 8)), "y": np.ones((2, 4))}
    >>> trained = train(
    ...     "0F0,0B0\\n",
    ...     model,
    ...     [batch] * 20,
    ...     weights=model.init(),
    ...     optimizer=optim.SGD(0.1, momentum=0.5),
    ... )
    >>> bool(trained.losses[-1] < 0.01 * trained.losses[0])
    True
    """
    params = {name: torch.tensor(value).requires_grad_() for name, value in weights.items()}
    stepper = optimizer.build(params)
    losses, norms, rates = [], [], []
    for step, batch in enumerate(batches):
        now = {name: to_numpy(value) for name, value in params.items()}
        result = run(
            table_csv,
            model,
            batch,
            weights=now,
            dtype=dtype,
            rows=rows,
            loss_scale=loss_scale,
            step=step,
            slices=slices,
            time=time,
        )
        if not result.grads:
            raise TableError(
                "the table has no backwards, so it gives no gradients to train with; add B, or I "
                "and W, for every F"
            )
        gradients = {
            name: torch.from_numpy(result.grads[name]).to(value.dtype)
            for name, value in params.items()
        }
        losses.append(result.loss)
        norms.append(float(global_norm(gradients.values())))
        rates.append(rate_of(optimizer.rate, step))
        if optimizer.clip is not None:
            gradients = clip(gradients, optimizer.clip)
        for name, value in params.items():
            value.grad = gradients[name]
        for group in stepper.param_groups:
            group["lr"] = rates[-1]
        stepper.step()
    final = {name: to_numpy(value) for name, value in params.items()}
    return Trained(np.array(losses), np.array(norms), np.array(rates), final)
