"""Types of arrays and of trees of them, declared once for every room with JAX."""

from __future__ import annotations

from typing import Any, TypeAlias

from jaxtyping import Array, Bool, Int32

# A tree of arrays, tracers or `jax.ShapeDtypeStruct`s: JAX itself has no type for it.
PyTree: TypeAlias = Any
# The leaves of one, in `jax.tree.leaves` order.
Leaves: TypeAlias = "list[Any]"
# Numbers that a tick reads from its records, and predicates.
Scalar: TypeAlias = Int32[Array, ""]
Flag: TypeAlias = Bool[Array, ""]
