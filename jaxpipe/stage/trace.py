"""Trace a stage function once, with its `jax.vjp`, into one jaxpr of forward and backward; and
`last` with its gradients, and a `first` that is spread over the pipe axis.

A forward that appends rows to buffers is traced as if the buffers had the rows already.  Then
equations that write the rows are put before every reader of the buffers.  A buffer is an input of
all pieces of a stage, and never a residual.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ..arrays import Leaves, PyTree
from ..errors import PipelineError
from ..jaxprs.cut import drop_dead
from ..jaxprs.equations import copied, renamed, variables, with_equations
from ..jaxprs.flatten import flatten, stores_on_host
from ..model.functions import StageOutput
from ..table.effects import Place
from .code import INPUTS, LastCode, ParamUse, StageCode, hoist, inexact, pieces


def writing_rows(code: StageCode, count: int) -> StageCode:
    """Return the code with forwards that write the rows.

    In `code`, the last `count` outputs before the residuals are the rows for each buffer, then the
    number of the slice.
    """
    if not count:
        return code
    total, buffers = code.num_outputs, code.spans(INPUTS, len(code.known))[Place.BUFFER]
    *rows, number = code.forward.outvars[total : total + count]
    newvar, writes = core.gensym(), list[core.JaxprEqn]()
    filled: dict[core.Var, core.Var] = {}
    for buffer, row in zip([code.forward.invars[i] for i in buffers], rows, strict=True):
        traced = _write(buffer.aval, row.aval, number.aval)
        env: dict[Any, Any] = dict(zip(traced.invars, (buffer, row, number), strict=True))
        writes += copied(traced.eqns, env, newvar)
        filled[buffer] = env[traced.outvars[0]]
    after = renamed(code.forward, filled)
    outs = [*after.outvars[:total], *after.outvars[total + count :]]
    forward = after.replace(outvars=outs, eqns=_in_order([*writes, *after.eqns]))
    evaluate, _ = drop_dead(forward.replace(outvars=outs[:total]))
    return replace(code, forward=forward, evaluate=evaluate)


def _write(buffer: Any, rows: Any, number: Any) -> core.Jaxpr:
    """Write the rows of slice `number` into the buffer, all given by their avals."""
    axis = next(i for i, (a, b) in enumerate(zip(buffer.shape, rows.shape, strict=True)) if a != b)

    def update(buffer: Any, rows: Any, number: Any) -> Any:
        zero, start = jnp.int32(0), number * jnp.int32(rows.shape[axis])
        starts = [start if i == axis else zero for i in range(buffer.ndim)]
        return lax.dynamic_update_slice_p.bind(buffer, rows, *starts)

    return jax.make_jaxpr(update)(buffer, rows, number).jaxpr


def _in_order(eqns: Sequence[core.JaxprEqn]) -> list[core.JaxprEqn]:
    """Sort the equations so that each follows its inputs; the order is kept where inputs allow."""
    producer = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    graph = TopologicalSorter(
        {i: {producer[v] for v in variables(e.invars) if v in producer} for i, e in enumerate(eqns)}
    )
    try:
        graph.prepare()
    except CycleError as error:
        raise PipelineError(
            "a stage appends rows that depend on their own buffer; append rows that do not depend "
            "on the result of the same ctx.append"
        ) from error
    ordered, ready = [], list[int]()
    while graph.is_active():
        for i in graph.get_ready():
            heapq.heappush(ready, i)
        ordered.append(eqns[i := heapq.heappop(ready)])
        graph.done(i)
    return ordered


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
    avals, carry, buffers = map(_avals, (x, *(passed or ((), ()))))
    wanted = [*(use.trained for use in uses), *map(inexact, (*avals, *carry, *buffers))]

    def split(params: PyTree, held: PyTree, extra: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        def call(params: PyTree, held: PyTree) -> tuple[PyTree, PyTree]:
            x, before = held
            out = function(params, x, {**extra, "carried": before} if passed else extra)
            y, more = (
                out
                if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], StageOutput)
                else (out, StageOutput())
            )
            after, rows = (more.carried, more.rows) if passed else ((), ())
            return ((y, after), more.loss), (more.state, rows)

        of_wanted, leaves = by_leaves(call, (params, held), wanted)
        y, vjp, state = jax.vjp(of_wanted, leaves, has_aux=True)
        return y, state, vjp

    forward, shapes = jax.make_jaxpr(split, return_shape=True)(params, (x, passed), extra)
    returned, (state, rows), vjp = shapes
    (y, _), loss = returned
    vjp_leaves, vjp_tree = jax.tree.flatten(vjp)
    leaves, tree = jax.tree.flatten(returned)

    def transposed(residuals: Leaves, dy: Leaves) -> PyTree:
        cotangents = iter(dy)
        full = [next(cotangents) if inexact(leaf) else no_gradient(leaf) for leaf in leaves]
        return jax.tree.unflatten(vjp_tree, residuals)(jax.tree.unflatten(tree, full))

    backward = jax.make_jaxpr(transposed)(vjp_leaves, list(filter(inexact, leaves)))
    flat = flatten(forward), flatten(backward)
    code = StageCode(
        consts=(*flat[0].consts, *flat[1].consts),
        uses=tuple(uses),
        x_avals=avals,
        num_extra=len(jax.tree.leaves(extra)),
        y_tree=jax.tree.structure(y),
        y_avals=tuple(jax.tree.leaves(y)),
        loss=None if isinstance(loss, tuple) else loss,
        state=tuple(jax.tree.leaves(state)),
        carry=carry,
        buffers=buffers,
    )
    appended = len(jax.tree.leaves(rows))
    joint = _join(flat[0].jaxpr, flat[1].jaxpr, code.num_outputs + appended)
    code = pieces(joint, len(flat[0].jaxpr.eqns), code, appended=appended)
    return replace(writing_rows(code, appended), offloads=stores_on_host(forward.jaxpr))


def _avals(tree: PyTree) -> tuple[Any, ...]:
    leaves = jax.tree.leaves(tree)
    return tuple(jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype) for leaf in leaves)


def by_leaves(
    function: Callable[..., Any], arguments: tuple[PyTree, ...], wanted: Sequence[bool]
) -> tuple[Callable[[Leaves], Any], Leaves]:
    """The function of the wanted leaves of its arguments alone, and these leaves."""
    leaves, tree = jax.tree.flatten(arguments)

    def call(values: Leaves) -> Any:
        new = iter(values)
        whole = [next(new) if w else leaf for leaf, w in zip(leaves, wanted, strict=True)]
        return function(*jax.tree.unflatten(tree, whole))

    return call, [leaf for leaf, w in zip(leaves, wanted, strict=True) if w]


def no_gradient(leaf: Any) -> Any:
    """A cotangent of zeros, of the dtype that JAX wants for the leaf."""
    return np.zeros(leaf.shape, leaf.dtype if inexact(leaf) else jax.dtypes.float0)


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


def _trace(
    function: Callable[..., tuple[PyTree, PyTree]],
    uses: Sequence[ParamUse],
    *arguments: PyTree,
    before: int = 0,
) -> tuple[tuple[Any, ...], core.Jaxpr, core.Jaxpr, core.Jaxpr, PyTree]:
    """Trace `(parameters, ..., late) -> results, gradients`, where gradients alone depend on
    `late`: the constants, what is computed once, the rest, the results alone of the rest, without
    `late`, and the shapes of the results.

    Values that are computed once come after `before` leaves of the arguments.
    """
    traced, (results, _) = jax.make_jaxpr(function, return_shape=True)(*arguments)
    flat = flatten(traced)
    jaxpr = _without_axes(
        flat.jaxpr.replace(constvars=[], invars=[*flat.jaxpr.constvars, *flat.jaxpr.invars])
    )
    known = [True] * len(flat.consts) + [use.once for use in uses]
    once, body = hoist(jaxpr, known, at=len(known) + before)
    count = len(jax.tree.leaves(results))
    evaluate, _ = drop_dead(body.replace(outvars=body.outvars[:count]))
    end = len(evaluate.invars) - len(jax.tree.leaves(arguments[-1]))
    evaluate = evaluate.replace(invars=evaluate.invars[:end])
    return tuple(flat.consts), once, body, evaluate, results


def _without_axes(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The equations without their mesh axis effect.  It orders nothing, and it would keep unused
    collectives.
    """

    def plain(effects: Any) -> Any:
        return frozenset(effect for effect in effects if type(effect).__name__ != "NamedAxisEffect")

    eqns = [eqn.replace(effects=plain(eqn.effects)) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns, effects=plain(jaxpr.effects))


def trace_last(
    function: Callable[..., tuple[Any, PyTree]],
    params: PyTree,
    y: PyTree,
    extra: PyTree,
    uses: Sequence[ParamUse],
) -> LastCode:
    """Trace `function(params, y, extra) -> (scalar, aux)` and its gradients, and hoist values of
    parameters alone out of both.
    """
    wanted = [*(use.trained for use in uses), *map(inexact, jax.tree.leaves(y))]

    def train(params: PyTree, y: PyTree, extra: PyTree, seed: Any) -> PyTree:
        call, leaves = by_leaves(lambda p, y: function(p, y, extra), (params, y), wanted)
        loss, vjp, aux = jax.vjp(call, leaves, has_aux=True)
        return (loss, aux), vjp(seed.astype(loss.dtype))

    # the widest dtype, so that the seed of a float64 loss is not rounded
    seed = jax.ShapeDtypeStruct((), jnp.result_type(float))
    consts, once, body, evaluate, results = _trace(train, uses, params, y, extra, seed)
    loss, aux = results
    aux_leaves, aux_tree = jax.tree.flatten(aux)
    return LastCode(
        consts=consts,
        hoist=once,
        train=body,
        evaluate=evaluate,
        aux_tree=aux_tree,
        aux_avals=tuple(aux_leaves),
        loss_dtype=loss.dtype,
        num_trained=sum(use.trained for use in uses),
    )


def trace_spread_first(
    function: Callable[..., PyTree], params: PyTree, extra: PyTree, uses: Sequence[ParamUse]
) -> StageCode:
    """Trace `function(params, (), extra) -> x` and its gradient.  The forward leaves no residuals:
    the gradient of a lookup needs none.

    Another function is run again for its gradient.  The code has no input, residuals, I or W.
    """

    def call(params: PyTree, extra: PyTree) -> PyTree:
        return jax.tree.map(jnp.asarray, function(params, (), extra))

    def train(params: PyTree, extra: PyTree, dy: Leaves) -> PyTree:
        def differentiated(params: PyTree) -> tuple[Leaves, PyTree]:
            x = call(params, extra)
            return list(filter(inexact, jax.tree.leaves(x))), x

        of_trained, leaves = by_leaves(differentiated, (params,), [use.trained for use in uses])
        _, vjp, x = jax.vjp(of_trained, leaves, has_aux=True)
        return x, vjp(dy)[0]

    x_leaves, x_tree = jax.tree.flatten(jax.eval_shape(call, params, extra))
    dy, before = list(filter(inexact, x_leaves)), len(jax.tree.leaves(extra))
    consts, once, body, evaluate, _ = _trace(train, uses, params, extra, dy, before=before)
    return StageCode(
        consts=consts,
        uses=tuple(uses),
        num_extra=before,
        y_tree=x_tree,
        y_avals=tuple(x_leaves),
        hoist=once,
        forward=evaluate,
        evaluate=evaluate,
        backward=drop_dead(body.replace(outvars=body.outvars[len(x_leaves) :]))[0],
    )
