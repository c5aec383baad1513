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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ..arrays import Leaves, PyTree
from ..errors import PipelineError
from ..jaxprs.cut import drop_dead
from ..jaxprs.equations import Atom, renamed, variables, with_equations
from ..jaxprs.flatten import flatten, stores_on_host
from ..model.functions import StageOutput
from .code import LastCode, ParamUse, Signature, StageCode, inexact
from .split import Hoisted, pieces


def writing_rows(code: StageCode, count: int) -> StageCode:
    """Return the code with forwards that write the rows.

    In `code`, the last `count` outputs before the residuals are the rows for each buffer, then the
    number of the slice.
    """
    if not count:
        return code
    forward, evaluate = (_writes(each, code, count) for each in (code.forward, code.evaluate))
    return replace(code, forward=forward, evaluate=evaluate)


def _writes(jaxpr: core.Jaxpr, code: StageCode, count: int) -> core.Jaxpr:
    total, buffers = code.num_outputs, len(code.buffers)
    begin = len(code.consts) + code.num_params + len(code.x_avals) + len(code.carry)
    held = jaxpr.invars[begin : begin + buffers]
    *rows, number = jaxpr.outvars[total : total + count]
    newvar = core.gensym()
    filled: dict[core.Var, core.Var] = {buffer: newvar(buffer.aval) for buffer in held}

    writes = [
        eqn
        for buffer, row in zip(held, rows, strict=True)
        for eqn in _write(buffer, filled[buffer], row, number)
    ]
    after = renamed(jaxpr, filled)
    outs = [*after.outvars[:total], *after.outvars[total + count :]]
    return after.replace(outvars=outs, eqns=_in_order([*writes, *after.eqns]))


def _write(buffer: core.Var, filled: core.Var, rows: Atom, number: Atom) -> list[core.JaxprEqn]:
    """Equations that write the rows of slice `number` into the buffer."""
    shape, new = tuple(buffer.aval.shape), tuple(rows.aval.shape)  # type: ignore[attr-defined]
    axis = next(i for i, (whole, own) in enumerate(zip(shape, new, strict=True)) if whole != own)

    def update(buffer: Any, rows: Any, number: Any) -> Any:
        zero, start = jnp.int32(0), number * jnp.int32(new[axis])
        starts = [start if i == axis else zero for i in range(len(shape))]
        return lax.dynamic_update_slice_p.bind(buffer, rows, *starts)

    traced = jax.make_jaxpr(update)(buffer.aval, rows.aval, number.aval).jaxpr
    atoms: dict[Any, Atom] = dict(zip(traced.invars, (buffer, rows, number), strict=True))
    atoms[traced.outvars[0]] = filled

    def named(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else atoms.get(atom, atom)

    return [
        eqn.replace(invars=[named(a) for a in eqn.invars], outvars=[named(v) for v in eqn.outvars])
        for eqn in traced.eqns
    ]


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
    found, ready = [], list[int]()
    while graph.is_active():
        for i in graph.get_ready():
            heapq.heappush(ready, i)
        found.append(eqns[i := heapq.heappop(ready)])
        graph.done(i)
    return found


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


class _Traced(NamedTuple):
    """A function of (parameters, *arguments), with values of parameters alone hoisted out of it."""

    consts: tuple[Any, ...]
    hoisted: Hoisted
    shapes: Any  # what it returns


def _trace(
    function: Callable[..., PyTree],
    uses: Sequence[ParamUse],
    params: Leaves,
    *arguments: PyTree,
    before: int = 0,
) -> _Traced:
    """Trace a function; what is computed once comes after so many leaves of the arguments."""
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(params, *arguments)
    flat = flatten(traced)
    jaxpr = _without_axes(
        flat.jaxpr.replace(constvars=[], invars=[*flat.jaxpr.constvars, *flat.jaxpr.invars])
    )
    known = [True] * len(flat.consts) + [use.once for use in uses]
    hoisted = Hoisted.of(jaxpr, known, at=len(known) + before)
    return _Traced(tuple(flat.consts), hoisted, shapes)


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
    y_leaves, y_tree = jax.tree.flatten(y)
    wanted = [inexact(leaf) for leaf in y_leaves]
    tree, trained = jax.tree.structure(params), [use.trained for use in uses]

    def train(params_leaves: Leaves, y_leaves: Leaves, extra: PyTree, seed: Any) -> PyTree:
        def call(p: Leaves, diff: Leaves) -> tuple[Any, PyTree]:
            return function(
                jax.tree.unflatten(tree, filled(p, params_leaves, trained)),
                jax.tree.unflatten(y_tree, filled(diff, y_leaves, wanted)),
                extra,
            )

        loss, vjp, aux = jax.vjp(
            call, chosen(params_leaves, trained), chosen(y_leaves, wanted), has_aux=True
        )
        dparams, dy = vjp(seed.astype(loss.dtype))
        return loss, aux, dparams, dy

    # the widest dtype, so that the seed of a float64 loss is not rounded
    seed = jax.ShapeDtypeStruct((), jnp.result_type(float))
    traced = _trace(train, uses, jax.tree.leaves(params), y_leaves, extra, seed)
    loss, aux, *_ = traced.shapes
    aux_leaves, aux_tree = jax.tree.flatten(aux)
    body = traced.hoisted.rest
    evaluate, _ = drop_dead(body.replace(outvars=body.outvars[: 1 + len(aux_leaves)]))
    return LastCode(
        consts=traced.consts,
        hoist=traced.hoisted.hoist,
        train=body,
        evaluate=evaluate.replace(invars=evaluate.invars[:-1]),
        aux_tree=aux_tree,
        aux_avals=tuple(aux_leaves),
        loss_dtype=loss.dtype,
        num_trained=sum(trained),
    )


def trace_spread_first(
    function: Callable[..., PyTree], params: PyTree, extra: PyTree, uses: Sequence[ParamUse]
) -> StageCode:
    """Trace `function(params, (), extra) -> x` and its gradient.  The forward leaves no residuals:
    the gradient of a lookup needs none.

    Another function is run again for its gradient.  The code has no input, residuals, I or W.
    """
    tree, trained = jax.tree.structure(params), [use.trained for use in uses]

    def call(p: Leaves, extra: PyTree) -> PyTree:
        return jax.tree.map(jnp.asarray, function(jax.tree.unflatten(tree, p), (), extra))

    def train(params_leaves: Leaves, extra: PyTree, dy: Leaves) -> PyTree:
        def differentiated(p: Leaves) -> tuple[Leaves, PyTree]:
            x = call(filled(p, params_leaves, trained), extra)
            return [leaf for leaf in jax.tree.leaves(x) if inexact(leaf)], x

        _, vjp, x = jax.vjp(differentiated, chosen(params_leaves, trained), has_aux=True)
        return x, vjp(dy)[0]

    params_leaves = jax.tree.leaves(params)
    x_leaves, x_tree = jax.tree.flatten(jax.eval_shape(call, params_leaves, extra))
    dy = [leaf for leaf in x_leaves if inexact(leaf)]
    before = len(jax.tree.leaves(extra))
    traced = _trace(train, uses, params_leaves, extra, dy, before=before)
    body = traced.hoisted.rest
    evaluate, _ = drop_dead(body.replace(outvars=body.outvars[: len(x_leaves)]))
    evaluate = evaluate.replace(invars=evaluate.invars[: len(evaluate.invars) - len(dy)])
    backward, _ = drop_dead(body.replace(outvars=body.outvars[len(x_leaves) :]))
    nothing = evaluate.replace(outvars=[], eqns=[])
    return StageCode(
        consts=traced.consts,
        uses=tuple(uses),
        num_extra=before,
        y_tree=x_tree,
        y_avals=tuple(x_leaves),
        hoist=traced.hoisted.hoist,
        forward=evaluate,
        evaluate=evaluate,
        recompute=nothing,
        backward=backward,
        input_grad=nothing,
        weight_grad=nothing,
    )
