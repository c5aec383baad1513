"""Places of a kind of stage's leaves in arrays that several kinds share."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from jax import lax

from ..jaxprs import Entry, Part, Piece


class Place(NamedTuple):
    """The place of a leaf: a shared array, as it is or, where kinds differ, raveled from `start`
    on.
    """

    at: int
    shape: tuple[int, ...]
    flat: bool
    start: int = 0
    # that the partitioner makes of the leaf: `start` counts in each of them
    parts: tuple[Part, ...] = ()
    pinned: bool = False

    @property
    def entry(self) -> Entry:
        """How the leaf is raveled."""
        return Entry(self.shape, self.parts, self.pinned)

    def take(self, leaf: Any) -> Any:
        """The leaf out of the shared buffer's."""
        return Piece(leaf, self.start, self.entry).load() if self.flat else leaf

    def put(self, leaf: Any, value: Any) -> Any:
        """The shared buffer's leaf with this value in its place."""
        value = value.astype(leaf.dtype)
        if not self.flat:
            return value
        return lax.dynamic_update_slice_in_dim(
            leaf, self.entry.ravel(self.entry.pack(value)), self.start, axis=-1
        )


Places: TypeAlias = "tuple[Place, ...]"
