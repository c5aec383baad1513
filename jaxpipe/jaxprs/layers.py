"""Scans over layers as the layers one after the other, each with arrays of its own.

XLA adds a weight gradient inside its matmul only where the accumulator is an array of its own, and
a row of a stack is copied where it is read and where it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ..arrays import Leaves
from .equations import (
    ClosedJaxpr,
    TracedFunction,
    bind,
    closed_jaxpr,
    evaluated,
    scan_counts,
    shaped,
)
from .flat import CALLS, REMAT


@partial(jax.tree_util.register_dataclass, data_fields=("rows",), meta_fields=("of",))
@dataclass(frozen=True)
class Layers:
    """A stack [layers, ...] as a tree of its rows; `of` is the number of the argument whose rows
    they are, None for other values.
    """

    rows: tuple[Any, ...]
    of: int | None = None

    @classmethod
    def like(cls, stack: jax.Array, of: int | None = None) -> Layers:
        """The shapes of a stack's rows."""
        row = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
        return cls((row,) * stack.shape[0], of)


# A value, or a stack as its rows.
_Stacked: TypeAlias = "jax.Array | Layers"


def in_layers[T](
    function: TracedFunction[T],
    arguments: Sequence[object],
    candidates: Sequence[bool],
    limit: int,
) -> tuple[Callable[..., T], Leaves, list[int]]:
    """The function with those scans unrolled that have at most `limit` trips and scan stacks among
    the first leaves of its arguments, where `candidates` allows it.

    Returns the function, its arguments, in which `Layers` are in the place of these stacks, and for
    each of the first leaves the number of its layers, 0 where it is a whole value.  Only stacks
    that nothing reads other than row by row are taken apart.
    """
    leaves, tree = jax.tree.flatten(list(arguments))
    closed, results = function.closed, jax.tree.structure(function.shapes)
    chosen = {
        i
        for i, (leaf, allowed) in enumerate(zip(leaves, candidates, strict=False))
        if allowed and leaf.ndim and 0 < leaf.shape[0] <= limit
    }

    def taken_apart() -> Leaves:
        return [Layers.like(leaf, i) if i in chosen else leaf for i, leaf in enumerate(leaves)]

    while chosen:
        scans = _Scans(limit)
        jax.eval_shape(partial(scans.evaluate, closed), *taken_apart())
        kept = chosen & scans.by_row - scans.whole
        if kept == chosen:
            break
        chosen = kept

    def call(*arguments: object) -> T:
        values = jax.tree.leaves(list(arguments), is_leaf=_is_layers)
        outs = _Scans(limit).evaluate(closed, *values)
        return jax.tree.unflatten(results, outs)

    counts = [leaves[i].shape[0] if i in chosen else 0 for i in range(len(candidates))]
    return call, jax.tree.unflatten(tree, taken_apart()), counts


def _is_layers(value: object) -> bool:
    return isinstance(value, Layers)


@dataclass
class _Scans:
    """Evaluates a jaxpr whose inputs may be `Layers`.

    Attributes:
        by_row: the arguments that a scan read row by row; None for other values.
        whole: those that something read whole.
    """

    limit: int
    by_row: set[int | None] = field(default_factory=set)
    whole: set[int | None] = field(default_factory=set)

    def evaluate(self, closed: ClosedJaxpr, *arguments: _Stacked) -> Leaves:
        """The results of the jaxpr, whole."""
        return [self._whole(value) for value in self._run(closed, *arguments)]

    def _whole(self, value: _Stacked) -> jax.Array:
        if not isinstance(value, Layers):
            return value
        self.whole.add(value.of)
        return jnp.stack(value.rows)

    def _run(self, closed: ClosedJaxpr, *arguments: _Stacked) -> Leaves:
        """The results, still in layers where they are."""

        def run(eqn: core.JaxprEqn, values: Leaves) -> Leaves:
            outs = self._in_layers(eqn, values) if any(map(_is_layers, values)) else None
            return bind(eqn, list(map(self._whole, values))) if outs is None else outs

        return evaluated(closed, run, arguments)

    def _in_layers(self, eqn: core.JaxprEqn, values: Leaves) -> Leaves | None:
        """The results of an equation that takes layers as they are; None where it does not."""
        name, params = eqn.primitive.name, eqn.params
        if name in REMAT:
            body = partial(self._run, closed_jaxpr(params["jaxpr"]))
            again = jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])
            return list(again(*values))
        if name in CALLS and not name.startswith("custom"):
            return self._run(params.get("call_jaxpr") or params["jaxpr"], *values)
        if name == "scan":
            return self._scan(eqn, values)
        first = values[0]
        if len(values) > 1 or len(eqn.outvars) != 1:
            return None
        out = shaped(eqn.outvars[0])
        if name == "convert_element_type":
            rows = [lax.convert_element_type(row, out.dtype) for row in first.rows]
            return [Layers(tuple(rows), first.of)]
        if name == "slice" and out.shape[1:] == first.rows[0].shape:
            begin, end = params["start_indices"][0], params["limit_indices"][0]
            return [Layers(first.rows[begin : end : (params["strides"] or (1,))[0]], first.of)]
        if name == "squeeze" and params["dimensions"] == (0,):
            self.by_row.add(first.of)
            return [first.rows[0]]
        return None

    def _scan(self, eqn: core.JaxprEqn, values: Leaves) -> Leaves | None:
        """The results of a scan, one trip after the other."""
        consts, carries = scan_counts(eqn)
        length, head = eqn.params["length"], consts + carries
        scanned = values[head:]
        if length > self.limit or not any(map(_is_layers, scanned)):
            return None
        self.by_row.update(value.of for value in filter(_is_layers, scanned))
        carry = list(map(self._whole, values[consts:head]))
        step = -1 if eqn.params["reverse"] else 1
        made: list[Leaves] = []
        for i in range(length)[::step]:
            rows = [
                x.rows[i] if isinstance(x, Layers) else lax.index_in_dim(x, i, 0, keepdims=False)
                for x in scanned
            ]
            outs = self._run(eqn.params["jaxpr"], *values[:consts], *carry, *rows)
            carry = list(map(self._whole, outs[:carries]))
            made.append(list(map(self._whole, outs[carries:])))
        return [*carry, *map(Layers, zip(*made[::step], strict=True))]
