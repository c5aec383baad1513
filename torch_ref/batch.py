"""Cuts a batch into microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import BatchError


@dataclass(frozen=True)
class Microbatches:
    """A batch's microbatches, in order, and how many rows each has."""

    parts: tuple[dict[str, Tensor], ...]
    rows: tuple[int, ...]

    def share(self, m: int) -> float:
        """The share of the batch's rows that microbatch m has; 1 / M where all are equal."""
        return self.rows[m] / sum(self.rows)


def split(
    batch: Mapping[str, Any],
    microbatches: int,
    *,
    rows: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    slices: int = 1,
    time: Sequence[str] = (),
) -> Microbatches:
    """Cut every array along its leading axis into M parts, equal or of the given numbers of rows;
    BatchError if it cannot be.

    With slices the parts are sequences, and the arrays named in `time` are cut along axis 1 too.
    """
    microbatches //= slices
    arrays = {name: torch.as_tensor(value) for name, value in batch.items()}
    total = _total(arrays)
    if rows is None:
        if total % microbatches:
            raise BatchError(
                f"{total} rows cannot be cut into {microbatches} equal microbatches; pad the "
                "batch to "
                f"{-(-total // microbatches) * microbatches} rows, or give the rows of each"
            )
        rows = (total // microbatches,) * microbatches
    if len(rows) != microbatches or sum(rows) != total or min(rows) < 1:
        raise BatchError(
            f"rows {tuple(rows)} do not cut {total} rows into {microbatches} microbatches of at "
            "least one row"
        )
    arrays = {
        name: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for name, value in arrays.items()
    }
    starts = [sum(rows[:m]) for m in range(microbatches)]
    parts = tuple(
        {name: value[start : start + count] for name, value in arrays.items()}
        for start, count in zip(starts, rows, strict=True)
    )
    if slices == 1:
        return Microbatches(parts, tuple(rows))
    _check_time(arrays, slices, time)
    cut = tuple(_slice_of(part, k, slices, time) for part in parts for k in range(slices))
    return Microbatches(cut, tuple(count for count in rows for _ in range(slices)))


def _slice_of(
    part: Mapping[str, Tensor], k: int, slices: int, time: Sequence[str]
) -> dict[str, Tensor]:
    """Slice k of the rows of a sequence; arrays without an axis of time are in every slice."""
    return {
        name: value.tensor_split(slices, dim=1)[k] if name in time else value
        for name, value in part.items()
    }


def _check_time(arrays: Mapping[str, Tensor], slices: int, time: Sequence[str]) -> None:
    faults = [f"the batch has no {name!r}" for name in time if name not in arrays]
    if not time:
        faults.append('name the arrays that are cut along axis 1: time=("tokens", "targets")')
    for name in time:
        shape = tuple(arrays[name].shape) if name in arrays else (0, 0)
        if len(shape) < 2 or shape[1] % slices:
            faults.append(f"{name} of shape {shape} has no axis 1 that {slices} divides")
    if faults:
        raise BatchError(
            f"the batch cannot be cut into {slices} slices a sequence:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )


def _total(arrays: Mapping[str, Tensor]) -> int:
    if not arrays:
        raise BatchError("the batch is empty; give it arrays with a leading axis of rows")
    scalars = [name for name, value in arrays.items() if value.ndim == 0]
    if scalars:
        raise BatchError(
            f"{', '.join(scalars)} of the batch has no axis; every entry needs a leading axis of "
            "rows"
        )
    lengths = {name: len(value) for name, value in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise BatchError(
            f"the batch's entries have different numbers of rows: {lengths}; give all the same"
        )
    return next(iter(lengths.values()))
