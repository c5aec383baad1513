"""Where a leaf of one kind of stage lies in a buffer that several kinds share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

from jax import lax


class Place(NamedTuple):
    """Where a leaf lies: a leaf of the shared buffer, as it is or, where kinds differ in shape, raveled at its beginning."""

    at: int
    shape: tuple[int, ...]
    flat: bool

    @property
    def size(self) -> int:
        """Elements of the leaf."""
        return math.prod(self.shape)

    def take(self, leaf: Any) -> Any:
        """The leaf out of the shared buffer's."""
        return leaf[: self.size].reshape(self.shape) if self.flat else leaf

    def put(self, leaf: Any, value: Any) -> Any:
        """The shared buffer's leaf with this value in its place."""
        return lax.dynamic_update_slice(leaf, value.reshape(-1).astype(leaf.dtype), (0,)) if self.flat else value.astype(leaf.dtype)

    def add(self, leaf: Any, value: Any) -> Any:
        """The shared buffer's leaf with this value added in its place."""
        value = value.astype(leaf.dtype)
        return leaf.at[: self.size].add(value.reshape(-1)) if self.flat else leaf + value


Places: TypeAlias = "tuple[Place, ...]"
