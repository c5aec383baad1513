"""Where a leaf of one kind of stage lies in a buffer that several kinds share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

from jax import lax


class Place(NamedTuple):
    """Where a leaf lies: a leaf of the shared buffer, as it is or, where kinds differ, raveled from `start` on."""

    at: int
    shape: tuple[int, ...]
    flat: bool
    start: int = 0

    @property
    def size(self) -> int:
        """Elements of the leaf."""
        return math.prod(self.shape)

    def take(self, leaf: Any) -> Any:
        """The leaf out of the shared buffer's."""
        return lax.slice(leaf, (self.start,), (self.start + self.size,)).reshape(self.shape) if self.flat else leaf

    def put(self, leaf: Any, value: Any) -> Any:
        """The shared buffer's leaf with this value in its place."""
        value = value.astype(leaf.dtype)
        return lax.dynamic_update_slice(leaf, value.reshape(-1), (self.start,)) if self.flat else value


Places: TypeAlias = "tuple[Place, ...]"
