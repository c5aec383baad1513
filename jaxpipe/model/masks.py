"""Finds appended rows that a stage reads before they are appended: no causal mask hides them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import PyTree
from .functions import Functions

_ROUNDING = 4  # differences that are roundings, in units of the largest value


def values_of_later_rows(
    functions: Functions,
    stage: int,
    params: PyTree,
    x: PyTree,
    extra: Callable[[Any], dict[str, PyTree]],
) -> dict[str, Any]:
    """Name of each buffer -> [K], for each slice the number of values that a stage returns and
    that depend on later rows of the buffer.

    Each slice runs with two finite fills of the later rows of each buffer.  NaN as a fill would
    reach the output of a masked product too, since 0 times NaN is NaN.

    Args:
        functions: for slices.
        stage: its number.
        params: of the stage, and the shared ones.
        x: the input of the stage for a whole sequence, [rows, T, ...].
        extra: the further arguments of a slice, by its number.
    """
    slices, length = functions.slices, functions.length

    def part(k: Any) -> PyTree:
        def cut(leaf: Any) -> Any:
            whole = leaf.ndim > 1 and leaf.shape[1] == slices * length
            return lax.dynamic_slice_in_dim(leaf, k * length, length, 1) if whole else leaf

        return jax.tree.map(cut, x)

    first = jnp.int32(0)
    shapes = functions.carried(stage, params, part(first), extra(first))
    if not shapes or not shapes[1]:
        return {}

    def one(carried: PyTree, k: Any) -> tuple[PyTree, dict[str, Any]]:
        own, more, (carry, buffers) = part(k), extra(k), carried

        def run(buffers: Mapping[str, Any]) -> tuple[Any, PyTree]:
            given = {**more, "carried": (carry, dict(buffers))}
            return functions.run_stage(stage, params, own, given)

        _, after = run(buffers)
        pairs = {
            name: [_filled(buffers[name], rows, fill, k) for fill in _fills(rows)]
            for name, rows in after.rows[0].items()
        }
        one_fill = {name: pair[0] for name, pair in pairs.items()}
        results = {"": run(one_fill)}
        results |= {name: run({**one_fill, name: pair[1]}) for name, pair in pairs.items()}
        read = {name: (y, out.loss, out.carried[0]) for name, (y, out) in results.items()}
        return after.carried, {name: _differing(read[""], read[name]) for name in pairs}

    before = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return dict(lax.scan(one, before, jnp.arange(slices, dtype=jnp.int32))[1])


def _axis(buffer: Any, rows: Any) -> int:
    pairs = zip(buffer.shape, rows.shape, strict=True)
    return next(i for i, (whole, own) in enumerate(pairs) if whole != own)


def _fills(rows: Any) -> tuple[Any, Any]:
    """Two finite fills for later rows: the rows themselves, and other numbers.  Whole numbers such
    as those of documents are zero in the second fill.
    """
    return rows, 2 * rows + 1 if jnp.issubdtype(rows.dtype, jnp.inexact) else jnp.zeros_like(rows)


def _filled(buffer: Any, rows: Any, fill: Any, k: Any) -> Any:
    """The buffer, whose rows after slice k are copies of the fill."""
    axis = _axis(buffer, rows)
    length = rows.shape[axis]
    copies = jnp.concatenate([fill] * (buffer.shape[axis] // length), axis)
    at = lax.broadcasted_iota(jnp.int32, buffer.shape, axis)
    return jnp.where(at >= (k + 1) * length, copies.astype(buffer.dtype), buffer)


def _differing(one: PyTree, other: PyTree) -> Any:
    """How many values of two trees differ by more than a rounding; a NaN does not count."""

    def count(a: Any, b: Any) -> Any:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return jnp.sum(a != b)
        eps = float(jnp.finfo(a.dtype).eps)  # type: ignore[no-untyped-call]
        return jnp.sum(jnp.abs(a - b) > _ROUNDING * eps * jnp.max(jnp.abs(a), initial=0))

    counts = jax.tree.leaves(jax.tree.map(count, one, other))
    return sum(counts, jnp.int32(0))
