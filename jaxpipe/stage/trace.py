"""Trace a stage function once, with its `jax.vjp`, into one jaxpr of forward and backward; and
`last` with its gradients, and a `first` that is spread over the pipe axis.

A forward that appends rows to buffers is traced as if the buffers had the rows already.  Then
equations that write the rows are put before every reader of the buffers.  A buffer is an input of
all pieces of a stage, and never a residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ..arrays import Leaf, Leaves, PyTree, shapes_of
from ..errors import PipelineError
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
from ..jaxprs.products import with_wide_products
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
    *rows, number = code.forward.outvars[total : total + count]
    writes, filled = list[core.JaxprEqn](), dict[core.Var, Atom]()
    for buffer, row in zip(code.forward.invars[buffers], rows, strict=True):
        eqns, filled[buffer] = traced(_written, buffer, row, number)
        writes += eqns
    after = renamed(code.forward, filled)
    outs = [*after.outvars[:total], *after.outvars[total + count :]]
    forward = after.replace(outvars=outs, eqns=_in_order([*writes, *after.eqns]))
    evaluate = drop_dead(forward.replace(outvars=outs[:total]))
    return replace(code, forward=forward, evaluate=evaluate)


def _written(buffer: jax.Array, rows: jax.Array, number: jax.Array) -> jax.Array:
    """The buffer with the rows of slice `number`."""
    axis = next(i for i, (a, b) in enumerate(zip(buffer.shape, rows.shape, strict=True)) if a != b)
    zero, start = jnp.int32(0), number * jnp.int32(rows.shape[axis])
    starts = [start if i == axis else zero for i in range(buffer.ndim)]
    return lax.dynamic_update_slice_p.bind(buffer, rows, *starts)


def _in_order(eqns: Sequence[core.JaxprEqn]) -> list[core.JaxprEqn]:
    """Sort the equations so that each follows its inputs; the order is kept where inputs allow."""
    left, ordered = list(eqns), list[core.JaxprEqn]()
    missing = {v for eqn in eqns for v in eqn.outvars}
    while left:
        ready = (i for i, e in enumerate(left) if missing.isdisjoint(variables(e.invars)))
        first = next(ready, None)
        if first is None:
            raise PipelineError(
                "a stage appends rows that depend on their own buffer; append rows that do not "
                "depend on the result of the same ctx.append"
            )
        ordered.append(left.pop(first))
        missing.difference_update(ordered[-1].outvars)
    return ordered


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

    layers = [0] * len(uses)
    if form.layers:
        apart = [use.in_layers for use in uses]
        run, (params, *_), layers = in_layers(run, (params, (x, passed), extra), apart, form.layers)
        pairs = zip(uses, layers, strict=True)
        uses = [use for use, count in pairs for _ in range(count or 1)]
    wanted = [*(use.trained for use in uses), *map(inexact, jax.tree.leaves((x, passed)))]

    def split(params: PyTree, held: PyTree, extra: Extra) -> tuple[PyTree, PyTree, PyTree]:
        if not training:
            return (*run(params, held, extra), ())
        of_wanted, leaves = by_leaves(lambda p, h: run(p, h, extra), (params, held), wanted)
        y, vjp, state = jax.vjp(of_wanted, leaves, has_aux=True)
        return y, state, vjp

    forward, shapes = jax.make_jaxpr(split, return_shape=True)(params, (x, passed), extra)
    returned, (state, rows), vjp = shapes
    (y, _), loss = returned
    vjp_leaves, vjp_tree = jax.tree.flatten(vjp)
    leaves, tree = jax.tree.flatten(returned)

    def transposed(residuals: Leaves, dy: Leaves) -> PyTree:
        if not training:
            return ()
        cotangents = iter(dy)
        full = [next(cotangents) if inexact(leaf) else no_gradient(leaf) for leaf in leaves]
        return jax.tree.unflatten(vjp_tree, residuals)(jax.tree.unflatten(tree, full))

    dy = list(filter(inexact, leaves)) if training else []
    backward = jax.make_jaxpr(transposed)(vjp_leaves, dy)
    flat = flatten(forward), flatten(backward)
    code = StageCode(
        consts=(*flat[0].consts, *flat[1].consts),
        uses=tuple(uses),
        layers=tuple(layers),
        num_extra=len(jax.tree.leaves(extra)),
        y_tree=jax.tree.structure(y),
        avals=by_place(
            given
            | {Place.SENT_X: y, Place.LOSSES: loss, Place.STAGE_STATE: state}
            | {Place.STAGE_GRADIENTS: _with_gradient(params, uses) if training else ()}
        ),
    )
    appended = len(jax.tree.leaves(rows))
    joint = _join(flat[0].jaxpr, flat[1].jaxpr, code.num_outputs + appended)
    code = pieces(joint, len(flat[0].jaxpr.eqns), code, appended=appended, form=form)
    return replace(writing_rows(code, appended), offloads=stores_on_host(forward.jaxpr))


def no_gradient(leaf: Leaf) -> np.ndarray:
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


def _with_gradient(params: PyTree, uses: Sequence[ParamUse]) -> Leaves:
    """The parameters that are trained."""
    return list(compress(jax.tree.leaves(params), (use.trained for use in uses)))


def _without_axes(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The equations without their mesh axis effect.  It orders nothing, and it would keep unused
    collectives.
    """

    def plain(effects: core.Effects) -> core.Effects:
        return frozenset(effect for effect in effects if type(effect).__name__ != "NamedAxisEffect")

    eqns = [eqn.replace(effects=plain(eqn.effects)) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns, effects=plain(jaxpr.effects))


@dataclass(frozen=True)
class _AtOnce:
    """A function traced with its gradient: `jaxpr(consts, params, x, extra, late) -> results,
    dparams, dx`, and the shapes of the results.
    """

    code: StageCode
    jaxpr: core.Jaxpr
    results: PyTree

    @property
    def num_results(self) -> int:
        """The number of results before gradients."""
        return len(jax.tree.leaves(self.results))

    def hoisted(self) -> StageCode:
        """`backward(params, x, extra, once, late) -> results, dparams, dx`, and `evaluate` for the
        results alone.
        """
        code, late = self.code, len(self.jaxpr.invars) - self.code.num_inputs
        jaxpr = with_wide_products(
            self.jaxpr, code.totals(range(self.num_results, len(self.jaxpr.outvars)))
        )
        once, body = hoist(jaxpr, code.known, at=code.num_inputs)
        evaluate = drop_dead(body.replace(outvars=body.outvars[: self.num_results]))
        evaluate = evaluate.replace(invars=evaluate.invars[: len(evaluate.invars) - late])
        return replace(code, hoist=once, evaluate=evaluate, backward=body)

    def without_last_cotangent(self) -> tuple[_AtOnce, bool]:
        """The same with zeros in its place, and whether a gradient depends on it."""
        jaxpr = self.jaxpr
        *given, dropped = jaxpr.invars
        grads = drop_dead(jaxpr.replace(outvars=jaxpr.outvars[self.num_results :]))
        zero = core.Literal(np.zeros((), shaped(dropped).dtype), dropped.aval)
        changed = renamed(jaxpr.replace(invars=given), {dropped: zero})
        return replace(self, jaxpr=changed), reads(grads)[-1]

    def of_extra(self, number: int) -> ClosedJaxpr | None:
        """`extra` -> the result of this number; None where parameters or x determine it too.

        Effects such as prints are left out.
        """
        code, jaxpr, out = self.code, self.jaxpr, [self.jaxpr.outvars[number]]
        eqns = producers(variables(out), jaxpr.eqns)
        own = drop_dead(with_equations(jaxpr, eqns, jaxpr.invars, out))
        consts, end = len(code.consts), code.num_inputs
        start = end - code.num_extra
        if any(reads(own)[consts:start]):
            return None
        ins = own.invars
        alone = own.replace(constvars=ins[:consts], invars=ins[start:end])
        return closed_jaxpr(alone, code.consts)


def _trace_at_once(
    function: Callable[..., tuple[Leaves, PyTree]],
    params: PyTree,
    x: PyTree,
    extra: Extra,
    uses: Sequence[ParamUse],
    late: Leaves,
    *,
    training: bool,
) -> _AtOnce:
    """Trace `function(params, x, extra) -> values, results` with the gradient of the values, whose
    cotangents are `late`; without `training` there are no gradients.
    """
    wanted = [*(use.trained for use in uses), *map(inexact, jax.tree.leaves(x))]

    def whole(params: PyTree, x: PyTree, extra: Extra, late: Leaves) -> tuple[PyTree, Leaves]:
        if not training:
            return function(params, x, extra)[1], []
        call, leaves = by_leaves(lambda p, x: function(p, x, extra), (params, x), wanted)
        values, vjp, results = jax.vjp(call, leaves, has_aux=True)
        (grads,) = vjp([d.astype(v.dtype) for d, v in zip(late, values, strict=True)])
        return results, grads

    closed, (results, _) = jax.make_jaxpr(whole, return_shape=True)(params, x, extra, late)
    flat = flatten(closed)
    jaxpr = _without_axes(with_inputs(flat))
    code = StageCode(
        consts=tuple(flat.consts),
        uses=tuple(uses),
        num_extra=len(jax.tree.leaves(extra)),
        avals=by_place({Place.X: x, Place.STAGE_GRADIENTS: _with_gradient(params, uses)}),
    )
    return _AtOnce(code, jaxpr, results)


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

    def call(*arguments: object) -> tuple[Leaves, PyTree]:
        loss, aux = function(*arguments)
        counts = jax.tree.leaves(aux["count"]) or [jnp.zeros(())]
        return [loss, *counts], (loss, aux)

    # the widest dtype, so that the seed of a float64 loss is not rounded
    seed = jax.ShapeDtypeStruct((), jnp.result_type(float))
    at_once = _trace_at_once(call, params, y, extra, uses, [seed, seed], training=training)
    at_once, loses_count = at_once.without_last_cotangent()
    loss, aux = at_once.results
    code = at_once.hoisted()
    return replace(
        code,
        y_tree=jax.tree.structure(aux),
        avals=by_place({**code.avals, Place.LOSSES: loss, Place.AUX: aux}),
        # the results are the loss, the count and metrics
        count=at_once.of_extra(1) if jax.tree.leaves(aux["count"]) else None,
        loses_count=loses_count,
    )


def trace_spread_first(
    function: Callable[..., PyTree],
    params: PyTree,
    x: tuple[()],
    extra: Extra,
    uses: Sequence[ParamUse],
    *,
    training: bool,
) -> StageCode:
    """Trace `function(params, x, extra) -> y`, where x is (), and its gradient.  The forward leaves
    no residuals: the gradient of a lookup needs none.

    Another function is run again for its gradient.  The code has no input, residuals, I or W.
    """

    def call(*arguments: object) -> tuple[Leaves, PyTree]:
        y = jax.tree.map(jnp.asarray, function(*arguments))
        return list(filter(inexact, jax.tree.leaves(y))), y

    call, _ = traced_once(call, params, x, extra)
    dy, y = jax.eval_shape(call, params, x, extra)
    code = _trace_at_once(call, params, x, extra, uses, dy, training=training).hoisted()
    gradients = code.backward.outvars[len(jax.tree.leaves(y)) :]
    return replace(
        code,
        y_tree=jax.tree.structure(y),
        avals=by_place({**code.avals, Place.SENT_X: y}),
        forward=code.evaluate,
        backward=drop_dead(code.backward.replace(outvars=gradients)),
    )
