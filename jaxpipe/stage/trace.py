"""Trace a function once, with its `jax.vjp`, into one jaxpr of forward and backward: a stage or
`first`, which is cut into its pieces, and `last` with its gradients.

A forward that appends rows to buffers is traced as if the buffers had the rows already.  Then the
equations that write the rows are put before the first reader of the buffer.  A buffer is an input
of all pieces of a stage, and never a residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ..arrays import Leaves, PyTree, shapes_of
from ..jaxprs.cut import drop_dead
from ..jaxprs.equations import (
    Atom,
    ClosedJaxpr,
    by_leaves,
    closed_jaxpr,
    producers,
    reads,
    renamed,
    shaped,
    traced_once,
    variables,
    with_equations,
    with_inputs,
)
from ..jaxprs.flat import flatten, stores_on_host
from ..jaxprs.layers import in_layers
from ..jaxprs.loops import traced
from ..lowering.target import Form
from ..model.functions import Extra, StageOutput
from ..table.effects import Place
from .code import INPUTS, ParamUse, StageCode, by_place, hoist, inexact, pieces


def writing_rows(code: StageCode, count: int) -> StageCode:
    """Return the code with forwards that write the rows.

    In `code`, the last `count` outputs before the residuals are the rows for each buffer, then the
    number of the slice.
    """
    if not count:
        return code
    total, buffers = code.num_outputs, code.spans(INPUTS, len(code.known))[Place.BUFFER]
    forward = code.forward
    *rows, number = forward.outvars[total : total + count]
    for buffer, row in zip(forward.invars[buffers], rows, strict=True):
        write, filled = traced(_written, buffer, row, number)
        readers = (i for i, eqn in enumerate(forward.eqns) if buffer in variables(eqn.invars))
        at = next(readers, len(forward.eqns))
        late = {v for eqn in forward.eqns[at:] for v in eqn.outvars}
        assert late.isdisjoint(variables([row, number])), "rows are made after their buffer is read"
        after = renamed(forward, {buffer: filled})
        forward = after.replace(eqns=[*after.eqns[:at], *write, *after.eqns[at:]])
    outs = [*forward.outvars[:total], *forward.outvars[total + count :]]
    forward = forward.replace(outvars=outs)
    evaluate = drop_dead(forward.replace(outvars=outs[:total]))
    return replace(code, forward=forward, evaluate=evaluate)


def _written(buffer: jax.Array, rows: jax.Array, number: jax.Array) -> jax.Array:
    """The buffer with the rows of slice `number`."""
    axis = next(i for i, (a, b) in enumerate(zip(buffer.shape, rows.shape, strict=True)) if a != b)
    zero, start = jnp.int32(0), number * jnp.int32(rows.shape[axis])
    starts = [start if i == axis else zero for i in range(buffer.ndim)]
    return lax.dynamic_update_slice_p.bind(buffer, rows, *starts)


def trace_stage(
    function: Callable[..., object],
    params: PyTree,
    x: PyTree,
    extra: Extra,
    uses: Sequence[ParamUse] | None = None,
    passed: PyTree = (),
    *,
    training: bool = True,
    form: Form | None = None,
) -> StageCode:
    """Cut `function(params, x, extra) -> y`, or `(y, StageOutput)`, into its pieces; arguments are
    arrays, tracers or ShapeDtypeStructs.

    `passed` are the carry and the buffers of the previous slice.  They follow x in all pieces, and
    are in `extra` as "carried".  The buffers that a forward returns have its rows.

    Parameters must be floating unless they are frozen (`uses`, by leaf).  Leaves of x that are not
    floating (segment ids, masks) get no gradient.  Without `training` there is a forward alone, of
    a function that JAX need not be able to differentiate.
    """
    form = form or Form()
    uses = [ParamUse()] * len(jax.tree.leaves(params)) if uses is None else uses
    given = dict(zip(INPUTS, shapes_of((x, *(passed or ((), ())))), strict=True))

    def run(params: PyTree, held: PyTree, extra: Extra) -> tuple[PyTree, PyTree]:
        x, before = held
        out = function(params, x, {**extra, "carried": before} if passed else extra)
        y, more = (
            out
            if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], StageOutput)
            else (out, StageOutput())
        )
        after, rows = (more.carried, more.rows) if passed else ((), ())
        return ((y, after), more.loss), (more.state, rows)

    arguments = params, (x, passed), extra
    joint = _traced(run, *arguments, uses, training=training, layers=form.layers)
    ((y, _), loss), (state, rows) = joint.results
    returned = {Place.SENT_X: y, Place.LOSSES: loss, Place.STAGE_STATE: state}
    code = replace(
        joint.code,
        y_tree=jax.tree.structure(y),
        avals=by_place({**joint.code.avals, **given, **returned}),
    )
    appended = len(jax.tree.leaves(rows))
    code = pieces(joint.jaxpr, joint.forward, code, appended=appended, form=form)
    return writing_rows(code, appended)


def _without_axes(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The equations without their mesh axis effect.  It orders nothing, and it would keep unused
    collectives.
    """

    def plain(effects: core.Effects) -> core.Effects:
        return frozenset(effect for effect in effects if type(effect).__name__ != "NamedAxisEffect")

    eqns = [eqn.replace(effects=plain(eqn.effects)) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns, effects=plain(jaxpr.effects))


class _Joint(NamedTuple):
    """A function traced with its gradient: `jaxpr(consts, params, x, extra, dy) -> results,
    dparams, dx`.

    Attributes:
        code: what is known of the function, without any piece.
        forward: the number of equations before those of the gradient.
        results: the shapes of the results.
    """

    code: StageCode
    jaxpr: core.Jaxpr
    forward: int
    results: PyTree


def _traced(
    function: Callable[[PyTree, PyTree, Extra], tuple[PyTree, PyTree]],
    params: PyTree,
    x: PyTree,
    extra: Extra,
    uses: Sequence[ParamUse],
    *,
    training: bool,
    layers: int = 0,
) -> _Joint:
    """Trace a function with two results, and the gradient of the floating leaves of the first,
    whose cotangents are dy; without `training` there are no gradients.  Scans over at most
    `layers` layers are taken apart.
    """
    traced = traced_once(function, params, x, extra)
    call: Callable[..., tuple[PyTree, PyTree]] = traced
    counts = [0] * len(uses)
    if layers:
        apart = [use.in_layers for use in uses]
        call, (params, *_), counts = in_layers(traced, (params, x, extra), apart, layers)
        pairs = zip(uses, counts, strict=True)
        uses = [use for use, count in pairs for _ in range(count or 1)]
    wanted = [*(use.trained for use in uses), *map(inexact, jax.tree.leaves(x))]

    def whole(params: PyTree, x: PyTree, extra: Extra, dy: Leaves) -> tuple[PyTree, Leaves]:
        def valued(params: PyTree, x: PyTree) -> tuple[Leaves, PyTree]:
            results = call(params, x, extra)
            return _floating(results[0]), results

        if not training:
            return call(params, x, extra), []
        _, vjp, results = jax.vjp(*by_leaves(valued, (params, x), wanted), has_aux=True)
        (grads,) = vjp(lax.optimization_barrier(dy))
        return results, grads

    dy = _floating(traced.shapes[0])
    closed = jax.make_jaxpr(whole)(params, x, extra, dy)
    flat = flatten(closed)
    jaxpr, forward = _without_barrier(_without_axes(with_inputs(flat)), len(dy))
    trained = compress(jax.tree.leaves(params), (use.trained for use in uses))
    code = StageCode(
        consts=tuple(flat.consts),
        uses=tuple(uses),
        layers=tuple(counts),
        num_extra=len(jax.tree.leaves(extra)),
        avals=by_place({Place.STAGE_GRADIENTS: list(trained) if training else ()}),
        offloads=stores_on_host(closed.jaxpr),
    )
    return _Joint(code, jaxpr, forward, traced.shapes)


def _floating(tree: PyTree) -> Leaves:
    """The leaves that have a gradient."""
    return list(filter(inexact, jax.tree.leaves(tree)))


def _without_barrier(jaxpr: core.Jaxpr, count: int) -> tuple[core.Jaxpr, int]:
    """The jaxpr without the barrier through which its last `count` inputs go, and the number of
    equations before it.
    """
    late, eqns = {*jaxpr.invars[len(jaxpr.invars) - count :]}, jaxpr.eqns
    readers = (i for i, e in enumerate(eqns) if not late.isdisjoint(variables(e.invars)))
    at = next(readers, len(eqns))
    barrier = [pair for e in eqns[at : at + 1] for pair in zip(e.outvars, e.invars, strict=True)]
    return renamed(jaxpr.replace(eqns=[*eqns[:at], *eqns[at + 1 :]]), dict(barrier)), at


def trace_last(
    function: Callable[..., tuple[jax.Array, PyTree]],
    params: PyTree,
    y: PyTree,
    extra: Extra,
    uses: Sequence[ParamUse],
    *,
    training: bool = True,
) -> StageCode:
    """Trace `function(params, y, extra) -> (scalar, aux)`, for `training` with the gradient of the
    scalar.  That of a count, `aux["count"]`, would need a cotangent that is known after the last
    forward.
    """

    def call(*arguments: object) -> tuple[PyTree, PyTree]:
        loss, aux = function(*arguments)
        return (loss, aux["count"]), aux["metrics"]

    joint = _traced(call, params, y, extra, uses, training=training)
    (loss, count), metrics = joint.results
    aux, jaxpr = {"count": count, "metrics": metrics}, joint.jaxpr
    code = replace(
        joint.code,
        y_tree=jax.tree.structure(aux),
        avals=by_place({**joint.code.avals, Place.X: y, Place.LOSSES: loss, Place.AUX: aux}),
    )
    results = len(jax.tree.leaves(joint.results))
    if jax.tree.leaves(count):
        grads = drop_dead(jaxpr.replace(outvars=jaxpr.outvars[results:]))
        *given, dropped = jaxpr.invars
        zero = core.Literal(np.zeros((), shaped(dropped).dtype), dropped.aval)
        jaxpr = renamed(jaxpr.replace(invars=given), {dropped: zero})
        _, number, *_ = jaxpr.outvars
        code = replace(code, count=_of_extra(jaxpr, code, number), loses_count=reads(grads)[-1])
    once, backward = hoist(jaxpr, code, results=results, start=joint.forward)
    evaluate = drop_dead(backward.replace(outvars=backward.outvars[:results]))
    evaluate = evaluate.replace(invars=evaluate.invars[: code.num_inputs + len(once.outvars)])
    return replace(code, hoist=once, evaluate=evaluate, backward=backward)


def _of_extra(jaxpr: core.Jaxpr, code: StageCode, result: Atom) -> ClosedJaxpr | None:
    """`extra` -> this result; None where parameters or x determine it too.

    Effects such as prints are left out.
    """
    eqns = producers(variables([result]), jaxpr.eqns)
    own = drop_dead(with_equations(jaxpr, eqns, jaxpr.invars, [result]))
    consts, end = len(code.consts), code.num_inputs
    start = end - code.num_extra
    if any(reads(own)[consts:start]):
        return None
    ins = own.invars
    return closed_jaxpr(own.replace(constvars=ins[:consts], invars=ins[start:end]), code.consts)
