"""Trace a stage function once, with its `jax.vjp`, into one jaxpr of forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ..arrays import Leaves, PyTree
from ..jaxprs import flatten, stores_on_host
from ..jaxprs.equations import renamed, with_equations
from ..model.functions import StageOutput
from .appended import writing_rows
from .code import ParamUse, Signature, StageCode, inexact
from .split import pieces


def trace_stage(
    function: Callable[..., PyTree],
    params: PyTree,
    x: PyTree,
    extra: PyTree,
    uses: Sequence[ParamUse] | None = None,
    passed: PyTree = (),
) -> StageCode:
    """Cut `function(params, x, extra) -> y`, or `(y, StageOutput)`, into its pieces; arguments are
    arrays, tracers or ShapeDtypeStructs.

    `passed` are the carry and the buffers of the previous slice.  They follow x in all pieces, and
    are in `extra` as "carried".  The buffers that a forward returns have its rows.

    Parameters must be floating unless they are frozen (`uses`, by leaf).  Leaves of x that are not
    floating (segment ids, masks) get no gradient.
    """
    uses = [ParamUse()] * len(jax.tree.leaves(params)) if uses is None else uses
    trained = [use.trained for use in uses]
    x_leaves, x_tree = jax.tree.flatten((x, passed))
    carry, buffers = map(len, map(jax.tree.leaves, passed or ((), ())))
    wanted = tuple(inexact(leaf) for leaf in x_leaves)
    params_tree = jax.tree.structure(params)

    def split(
        params_leaves: Leaves, x_leaves: Leaves, extra: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        def call(p: Leaves, diff: Leaves) -> tuple[PyTree, PyTree]:
            x, before = jax.tree.unflatten(x_tree, filled(diff, x_leaves, wanted))
            out = function(
                jax.tree.unflatten(params_tree, filled(p, params_leaves, trained)),
                x,
                {**extra, "carried": before} if passed else extra,
            )
            y, more = (
                out
                if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], StageOutput)
                else (out, StageOutput())
            )
            after, rows = (more.carried, more.rows) if passed else ((), ())
            return ((y, after), more.loss), (more.state, rows)

        y, vjp, state = jax.vjp(
            call, chosen(params_leaves, trained), chosen(x_leaves, wanted), has_aux=True
        )
        return y, state, vjp

    params_leaves = jax.tree.leaves(params)
    forward, shapes = jax.make_jaxpr(split, return_shape=True)(params_leaves, x_leaves, extra)
    y, (state, rows), vjp = shapes
    vjp_leaves, vjp_tree = jax.tree.flatten(vjp)
    y_leaves, both_tree = jax.tree.flatten(y)
    dy = [leaf for leaf in y_leaves if inexact(leaf)]

    def transposed(residuals: Leaves, dy: Leaves) -> PyTree:
        cotangents = iter(dy)
        full = [next(cotangents) if inexact(leaf) else _no_gradient(leaf) for leaf in y_leaves]
        return jax.tree.unflatten(vjp_tree, residuals)(jax.tree.unflatten(both_tree, full))

    backward = jax.make_jaxpr(transposed)(vjp_leaves, dy)
    has_loss = not isinstance(y[1], tuple)
    y_count = len(y_leaves) - has_loss - carry - buffers
    x_avals = tuple(jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype) for leaf in x_leaves)
    x_count = len(x_leaves) - carry - buffers
    flat = flatten(forward), flatten(backward)
    signature = Signature(
        consts=(*flat[0].consts, *flat[1].consts),
        uses=tuple(uses),
        x_avals=x_avals[:x_count],
        num_extra=len(jax.tree.leaves(extra)),
        y_tree=jax.tree.structure(y[0][0]),
        y_avals=tuple(y_leaves[:y_count]),
        loss=y_leaves[-1] if has_loss else None,
        state=tuple(jax.tree.leaves(state)),
        carry=x_avals[x_count : x_count + carry],
        buffers=x_avals[x_count + carry :],
    )
    appended = len(jax.tree.leaves(rows))
    joint = _join(flat[0].jaxpr, flat[1].jaxpr, signature.num_outputs + appended)
    code = pieces(joint, len(flat[0].jaxpr.eqns), signature, appended=appended)
    return replace(writing_rows(code, appended), offloads=stores_on_host(forward.jaxpr))


def filled(values: Leaves, leaves: Leaves, replaced: Sequence[bool]) -> Leaves:
    """The leaves with some of them replaced by values, in order."""
    new = iter(values)
    return [next(new) if r else leaf for leaf, r in zip(leaves, replaced, strict=True)]


def chosen(leaves: Leaves, which: Sequence[bool]) -> Leaves:
    """Some of the leaves."""
    return [leaf for leaf, w in zip(leaves, which, strict=True) if w]


def _no_gradient(leaf: Any) -> Any:
    """The cotangent that JAX wants for a leaf that is not floating."""
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _join(forward: core.Jaxpr, backward: core.Jaxpr, outputs: int) -> core.Jaxpr:
    """Join both into one jaxpr, in which the backward reads the forward's variables."""
    residuals = forward.outvars[outputs:]
    dy = backward.invars[len(residuals) :]
    joined = renamed(backward, dict(zip(backward.invars, residuals, strict=False)))
    return with_equations(
        forward,
        [*forward.eqns, *joined.eqns],
        [*forward.constvars, *backward.constvars, *forward.invars, *dy],
        [*forward.outvars[:outputs], *joined.outvars],
    ).replace(constvars=[])
