"""The inputs of a program's ticks: parameters of every kind of stage, and the pools that unlike
kinds share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from ..arrays import Leaves, PyTree
from ..jaxprs.slots import Piece, Total, TotalPiece
from ..model.packed import Places
from ..stage.code import StageCode
from ..table.effects import Place
from .entries import StageEntries
from .shared_buffers import SharedBuffer

# The buffers of pools and transfers.
Buffers: TypeAlias = "Mapping[Place, SharedBuffer]"


def shared_buffers(
    kinds: Sequence[StageCode], entries: Sequence[StageEntries] | None = None
) -> Buffers:
    """The buffers of several kinds of stages, with the entries of each."""
    return {
        place: SharedBuffer.of(
            [kind.stored[place] for kind in kinds],
            None if entries is None else [each.stored[place] for each in entries],
        )
        for place in kinds[0].stored
    }


@dataclass(frozen=True)
class StageOperand:
    """The places of one kind of stage's parameters and state in its chunk."""

    leaves: Leaves  # of the chunk, as its accumulators are
    places: Places
    shared: Leaves
    once: Leaves  # what was hoisted
    state_places: Places
    gradient_places: Places  # of the leaves that have a gradient, among the accumulators
    splits: tuple[PartitionSpec | None, ...]  # of the chunk's accumulators, see `Total`

    def params(self) -> Leaves:
        """The stage's parameters, then the shared ones.  A parameter inside a longer array is a
        `Piece` of it.

        Call it inside a block.  Outside, every device would hold copies of the parameters of every
        kind.
        """
        own = [
            Piece(self.leaves[p.at], p.start, p.entry) if p.flat else self.leaves[p.at]
            for p in self.places
        ]
        return [*own, *self.shared]

    def totals(self, chunk: Leaves) -> list[Total | TotalPiece]:
        """The accumulators of the stage's own gradients, among those of its chunk."""
        return [
            TotalPiece(chunk[p.at], p.start, p.entry)
            if p.flat
            else Total(chunk[p.at], self.splits[p.at])
            for p in self.gradient_places
        ]

    def with_totals(self, chunk: Leaves, new: Leaves) -> Leaves:
        """The chunk's accumulators with the new totals of the stage's own parameters."""
        found = list(chunk)
        for place, total in zip(self.gradient_places, new, strict=True):
            found[place.at] = total
        return found

    def read_state(self, state: Leaves) -> Leaves:
        """The stage's state, from its chunk's."""
        return [p.take(state[p.at]) for p in self.state_places]

    def write_state(self, state: Leaves, new: Leaves) -> Leaves:
        """The chunk's state with that of the stage replaced."""
        found = list(state)
        for place, value in zip(self.state_places, new, strict=True):
            found[place.at] = place.put(found[place.at], value)
        return found


@dataclass(frozen=True)
class Operands:
    """The read-only inputs of the ticks (leaves, on this device)."""

    stages: Mapping[tuple[int, int], StageOperand]  # by chunk and kind of stage
    first: Leaves
    first_once: Leaves
    last: Leaves
    last_once: Leaves
    batch: PyTree  # leaves [M, ...]
    rng: Any  # the step's key, or None
    seed: Any  # cotangent of one microbatch's loss
