"""Types of arrays and of trees of them, declared once for every room with JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, Int32

# A tree of arrays, tracers or `jax.ShapeDtypeStruct`s: JAX itself has no type for it.
PyTree: TypeAlias = Any
# Trees by part of the model: "first", "stages", "last", "shared"; and those of parameters.
ByPart: TypeAlias = "dict[str, Any]"
Params: TypeAlias = ByPart
# The leaves of a tree, in `jax.tree.leaves` order.
Leaves: TypeAlias = "list[Any]"
# Where a leaf is in its tree, as `jax.tree_util` gives it.
LeafPath: TypeAlias = "tuple[Any, ...]"
# A leaf, which may be traced, or its shape and dtype alone.
Leaf: TypeAlias = "Array | np.ndarray | jax.ShapeDtypeStruct | jax.core.ShapedArray"
# The shapes and dtypes of the values of a place.
Avals: TypeAlias = "Sequence[Any]"
# The key of a step, None where it draws no random numbers; and the factor of its loss.
Rng: TypeAlias = "Array | None"
LossScale: TypeAlias = "Array | float | None"
# The number of a stage or of a microbatch, which may be traced.
Number: TypeAlias = "Array | int"
# {"loss", "losses", "metrics", "state"} or {"outputs", "state"} of a step, and its gradients.
StepResults: TypeAlias = "tuple[dict[str, Any], dict[str, Any]]"
# Numbers that a tick reads from its records, and predicates.
Scalar: TypeAlias = Int32[Array, ""]
Flag: TypeAlias = Bool[Array, ""]


def path_text(path: LeafPath) -> str:
    """A leaf's path as text, "dense/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(tree: PyTree, is_leaf: Callable[[object], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree by path, "dense/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {path_text(path): leaf for path, leaf in leaves}


def followed[K: tuple[object, ...]](
    path: str, shape: tuple[int, ...] | None, known: Mapping[str, K]
) -> K | None:
    """The known parameter, (shape, ...) by path, that a leaf of an optimizer's state follows: of
    this shape, with a path that is the end of this one.  None where there is none.
    """
    names = [
        name
        for name, (own, *_) in known.items()
        if own == shape and f"/{path}".endswith(f"/{name}")
    ]
    return known[max(names, key=len)] if names else None


def shape_of(leaf: Leaf | complex) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf."""
    dtype = getattr(leaf, "dtype", None) or jnp.result_type(leaf)
    is_weak = getattr(leaf, "weak_type", isinstance(leaf, int | float | complex))
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, weak_type=is_weak)


def shapes_of(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a tree's arrays, without shardings."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def without_numpy[T](tree: T) -> T:
    """The tree with arrays of JAX in the place of numpy's, which take no traced index."""
    own: T = jax.tree.map(lambda a: jnp.asarray(a) if isinstance(a, np.ndarray) else a, tree)
    return own


def zeros_of(shapes: PyTree) -> PyTree:
    """Zeros of these shapes and dtypes."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def is_key(leaf: object) -> bool:
    """Whether a leaf is an array of typed keys, or the shape of one."""
    return bool(jnp.issubdtype(getattr(leaf, "dtype", bool), jax.dtypes.prng_key))


def as_dtype(value: ArrayLike, dtype: DTypeLike) -> Array:
    """The value as an array of a dtype.  Keys stay as they are: JAX cannot convert them."""
    array = jnp.asarray(value)
    return array if is_key(array) else array.astype(dtype)


def words_of(leaf: object) -> Any:
    """The leaf, or the words of its keys; of a shape, the shape of these."""
    if not is_key(leaf):
        return leaf
    words = jax.random.key_data
    return words(leaf) if isinstance(leaf, Array) else jax.eval_shape(words, leaf)


def with_words[A](function: Callable[[Array], A], leaf: Array) -> A | Array:
    """What a function makes of an array, or of the words of keys, as keys again."""
    if not is_key(leaf):
        return function(leaf)
    words = jnp.asarray(function(words_of(leaf)))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))


def whole(leaf: Array, axes: str | tuple[str, ...]) -> Array:
    """A leaf on all devices, where one of them has it and the others have zeros, False, or keys of
    zeros.
    """

    def summed(leaf: Array) -> Array:
        number = leaf.astype(jnp.int8) if leaf.dtype == bool else leaf
        total: Array = jax.lax.psum(number, axes)
        return total.astype(leaf.dtype)

    return with_words(summed, leaf)


def in_rows[T](tree: T) -> T:
    """Leaves [parts, rows, ...] -> [parts * rows, ...]; a leaf [parts] stays as it is."""
    rows: T = jax.tree.map(lambda a: a.reshape(math.prod(a.shape[:2]), *a.shape[2:]), tree)
    return rows


def stacked[T](trees: Sequence[T]) -> T:
    """One tree of leaves [number of trees, ...]."""
    stack: T = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    return stack


def by_index(tree: PyTree, name: str) -> dict[str, Any]:
    """The leaves of a tree as a program would write them, "batch['x']"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def axis_faults(tree: PyTree, name: str, length: int, axis: str) -> list[str]:
    """Leaves whose leading axis has another length; `axis` says what it must be."""
    return [
        f"{where} has shape {np.shape(leaf)}; its leading axis must be {axis}"
        for where, leaf in by_index(tree, name).items()
        if np.shape(leaf)[:1] != (length,)
    ]


def wider(*dtypes: DTypeLike) -> np.dtype:
    """The dtype that holds all of these, also where JAX promotes nothing by itself (8-bit floats,
    `jax_numpy_dtype_promotion="strict"`).
    """
    bits = [
        np.dtype(dtype).itemsize if jnp.issubdtype(dtype, jnp.floating) else 8 for dtype in dtypes
    ]
    large = [dtype for dtype, size in zip(dtypes, bits, strict=True) if size > 1] or [dtypes[0]]
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*large)


def accumulator_dtype(dtype: np.dtype, wanted: DTypeLike | None) -> np.dtype:
    """At least `wanted` (float32 by default); a wider parameter keeps its own dtype."""
    return dtype if wanted is None else wider(dtype, wanted)


def summable(leaf: object) -> Array:
    """The leaf in a dtype in which those of all microbatches and data shards can be added.

    Half a precision ends at 65504 (float16) or counts to 256 (bfloat16), and int32 wraps around.
    In float32 a sum of n terms is off by at most n * 2**-24 of itself, for terms of one sign.
    """
    leaf = jnp.asarray(leaf)
    inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return leaf.astype(wider(leaf.dtype, jnp.float32) if inexact else jnp.result_type(float))


# Kinds of numpy's dtypes that JAX has no arrays of.
_NO_NUMBERS = {"O": "objects", "U": "strings", "S": "bytes", "M": "dates", "m": "times"}
_ARRAYS = (Array, jax.ShapeDtypeStruct, bool, int, float, complex)


def array_faults(tree: object, name: str) -> list[str]:
    """Leaves that JAX cannot take, by type: tensors of another library, strings, objects."""
    odd: dict[str, list[str]] = {}
    for where, leaf in by_index(tree, name).items():
        kind, of_numpy = type(leaf), isinstance(leaf, np.ndarray | np.generic)
        if of_numpy and leaf.dtype.kind in _NO_NUMBERS:
            what = f"a numpy array of {_NO_NUMBERS[leaf.dtype.kind]}"
        elif of_numpy or isinstance(leaf, _ARRAYS) or hasattr(leaf, "__jax_array__"):
            continue
        else:
            what = f"a {kind.__module__.split('.')[0]}.{kind.__qualname__}"
        odd.setdefault(what, []).append(where)
    return [
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} is "
        f"{kind}; give jax or numpy arrays"
        f"{': tensor.detach().cpu().numpy()' if 'torch' in kind else ''}"
        for kind, names in odd.items()
    ]


def described(tree: object, most: int = 8) -> str:
    """Leaves by path, dtype and shape, the first of them: "w float32[3, 3], b float32[3]"."""
    leaves = by_path(tree)
    texts = [
        f"{name} {getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}".strip()
        for name, leaf in list(leaves.items())[:most]
    ]
    more = f" and {len(leaves) - most} more" if len(leaves) > most else ""
    return ", ".join(texts) + more if leaves else "nothing"
