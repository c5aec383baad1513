"""Bytes of what one device has of a stage, where others share it along axes that are left to the
partitioner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from ..jaxprs import Entry
from ..jaxprs.sizes import nbytes
from ..spmd.body import accumulator_dtype
from ..spmd.entries import StageEntries, share_of
from ..stage.code import StageCode


@dataclass(frozen=True)
class StageBytes:
    """Of one microbatch in one kind of stage."""

    taken: int  # its input
    kept: int  # what its forward keeps for the backward, its input not counted
    boundary: int  # its output
    stash: int  # what I leaves for W

    @classmethod
    def of(cls, code: StageCode, entries: StageEntries) -> StageBytes:
        """As the pools keep them."""
        residuals = (*entries.residual_input, *entries.residual_weight)
        return cls(
            taken=_local(code.x_avals, entries.x),
            kept=_local(code.residual_avals, residuals),
            boundary=_local(code.y_avals, tuple(output_entries(code, entries))),
            stash=_local(code.stash, entries.stash),
        )


def output_entries(code: StageCode, entries: StageEntries) -> Iterator[Entry]:
    """How each leaf of a stage's output is split: as its cotangent, where it has one."""
    cotangents = iter(entries.cotangent)
    for aval, wanted in zip(code.y_avals, code.y_wanted, strict=True):
        yield next(cotangents) if wanted else Entry(tuple(aval.shape))


def _local(avals: Sequence[Any], entries: Sequence[Entry]) -> int:
    return sum(
        nbytes(aval) // entry.local_share for aval, entry in zip(avals, entries, strict=True)
    )


def parameter_bytes(mesh: Mesh, leaves: Sequence[Any], specs: Sequence[PartitionSpec]) -> int:
    """Of shapes that are split so."""
    return sum(
        nbytes(leaf) // share_of(mesh, leaf.shape, spec)
        for leaf, spec in zip(leaves, specs, strict=True)
    )


def gradient_bytes(
    mesh: Mesh, leaves: Iterable[Any], specs: Iterable[PartitionSpec], accumulate: Any
) -> int:
    """Of their accumulators."""
    pairs = zip(leaves, specs, strict=True)
    each = (
        (leaf.size // share_of(mesh, leaf.shape, spec), accumulator_dtype(leaf.dtype, accumulate))
        for leaf, spec in pairs
    )
    return sum(count * dtype.itemsize for count, dtype in each)
