"""Trace `last` with its gradients, and a `first` that is spread over the pipe axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from ..arrays import Leaves, PyTree
from ..jaxprs import drop_dead, flatten
from .code import LastCode, ParamUse, StageCode, inexact
from .split import Hoisted
from .trace import chosen, filled


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
