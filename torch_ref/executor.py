"""The entry point: a table's text, a model, weights and a batch in; losses and gradients out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .batch import split
from .engine import Engine
from .errors import TableError, TorchRefError
from .models.base import StagedModel
from .result import Array, Result
from .table import read_table
from .weights import Weights


def run(
    table_csv: str,
    model: StagedModel,
    batch: Mapping[str, Any],
    *,
    weights: Mapping[str, Array],
    dtype: torch.dtype | None = None,
    rows: Sequence[int] | None = None,
    loss_scale: float = 1.0,
    step: int = 0,
    slices: int = 1,
    time: Sequence[str] = (),
) -> Result:
    """Run a table on a model, weights and a batch; losses, gradients, outputs and the peak of kept
    activations.

    Args:
        table_csv: the table's text: a line a device, a cell an action, an empty cell where idle.
        model: its number of stages must be the table's.
        batch: arrays with a leading axis of rows, cut into the table's M microbatches.
        weights: by name, the shapes of `model.shapes()`.
        dtype: what to cast weights and floating entries of the batch to; as they are, where None.
        rows: how many rows each microbatch (with slices, each sequence) has; equal numbers where
            None.
        loss_scale: the backward starts from the loss times this, and the gradients are divided by
            it at the end.
        step: handed to the model in its `Context`.
        slices: K; microbatch m is slice m % K of sequence m // K.  A table does not say it.
        time: with slices, the arrays of the batch that are cut along axis 1.

    Raises:
        TableError: the table cannot be read, or cannot be run to its end.
        WeightsError: names or shapes do not fit.
        BatchError: the batch cannot be cut.
        TorchRefError: the model does not take slices.

    >>> import numpy as np
    >>> from torch_ref.models import MLP
    >>> model = MLP(num_stages=2)
    >>> batch = {"x": np.ones((4, 8)), "y": np.ones((4, 4))}
    >>> result = run("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n", model, batch, weights=model.init())
    >>> result.peak_activations, result.grads["stages/dense/kernel"].shape
    ((2, 1), (2, 8, 8))
    """
    table = read_table(table_csv)
    if slices < 1 or table.num_microbatches % slices:
        raise TableError(
            f"{table.num_microbatches} microbatches are no whole sequences of {slices} slices"
        )
    if slices > 1 and not model.takes_slices:
        raise TorchRefError(
            f"{type(model).__name__} passes nothing from slice to slice; run it with slices=1"
        )
    if table.num_stages != model.num_stages:
        raise TableError(
            f"the table has {table.num_stages} stages, the model {model.num_stages}; they must "
            "be equal"
        )
    model.check(weights)
    microbatches = split(
        batch, table.num_microbatches, rows=rows, dtype=dtype, slices=slices, time=time
    )
    held = Weights.of(weights, model.num_stages, dtype)
    engine = Engine(table, model, held, microbatches, loss_scale, step, slices)
    with torch.set_grad_enabled(not table.forward_only):
        return engine.run()
