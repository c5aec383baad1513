"""Placed trees of stages, with their placement in the structure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.tree_util import SequenceKey

from ..arrays import PyTree


@dataclass(frozen=True)
class StageOwners:
    """Which stages each device owns, in chunk order, and the layers of each stage where there are
    any.
    """

    owned: tuple[tuple[int, ...], ...]
    layers: tuple[str, ...] = ()

    def stage_at(self, chunk: int) -> tuple[int, ...]:
        """Per device, the stage that its owned chunk `chunk` is, or -1."""
        return tuple(row[chunk] if chunk < len(row) else -1 for row in self.owned)

    def __str__(self) -> str:
        rows = [f"{d}: {', '.join(map(str, row))}" for d, row in enumerate(self.owned[:4])]
        layers = f", with layers {'|'.join(self.layers)[:60]}" if self.layers else ""
        return (
            "stages by device "
            f"{{{'; '.join(rows)}{'; ...' if len(self.owned) > 4 else ''}}}{layers}"
        )


class Chunks(tuple[PyTree, ...]):
    """A tree for each chunk of the devices, leaves [P, ...]: a tuple whose structure holds the
    placement that it is for.

    `jax.tree.map`, optimizers, `jax.jit` and scans keep it, and refuse a tree of another placement
    as a second argument.
    """

    owners: StageOwners

    def __new__(cls, chunks: Iterable[PyTree], owners: StageOwners) -> Chunks:
        """Trees by chunk, and the placement that they are for."""
        found = super().__new__(cls, chunks)
        found.owners = owners
        return found

    def __reduce__(self) -> tuple[type[Chunks], tuple[tuple[PyTree, ...], StageOwners]]:
        return Chunks, (tuple(self), self.owners)

    def like(self, chunks: Iterable[PyTree]) -> Chunks:
        """Other trees in the same places."""
        return Chunks(chunks, self.owners)

    def numbered(self) -> list[tuple[PyTree, tuple[int, ...]]]:
        """Each chunk, and by device the number of the stage that it is, or -1."""
        return [(chunk, self.owners.stage_at(v)) for v, chunk in enumerate(self)]

    def map(self, function: Callable[[PyTree], PyTree]) -> Chunks:
        """Change the tree of every chunk."""
        return self.like(map(function, self))


# The stages' own state, or nothing.
State: TypeAlias = "Chunks | tuple[()]"

jax.tree_util.register_pytree_with_keys(
    Chunks,
    lambda chunks: ([(SequenceKey(v), chunk) for v, chunk in enumerate(chunks)], chunks.owners),
    lambda owners, chunks: Chunks(chunks, owners),
    lambda chunks: (tuple(chunks), chunks.owners),
)


def owner_faults(stages: Any, owners: StageOwners, what: str, again: str) -> list[str]:
    """Faults of stages that must be placed there; `again` is the method that places them."""
    if not isinstance(stages, Chunks):
        kind = type(stages).__name__
        return [
            f"{what} are not placed (their stages are a {kind}); give what `{again}` returned, "
            "or what was made of it by jax.tree.map"
        ]
    if stages.owners != owners:
        back = "canonical" if again == "place" else "canonical_state"
        return [
            f"{what} are placed for {stages.owners}, but this schedule has {owners}; bring them "
            f"over: new.{again}(old.{back}(...)), with the pipeline that placed them as `old`"
        ]
    return []
