"""Trace a `first` that is spread over the pipe axis: all devices make the first stage's input
together, and its gradient too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..arrays import Leaves, PyTree
from ..jaxprs import drop_dead, flatten
from ..table.effects import Liveness
from .code import ParamUse, StageCode, inexact
from .split import hoist_known
from .spread import without_axes
from .trace import filled


def trace_spread_first(
    function: Callable[..., PyTree], params: PyTree, extra: PyTree, uses: Sequence[ParamUse]
) -> StageCode:
    """Trace `function(params, (), extra) -> x` and its gradient, which keeps nothing of the
    forward: a lookup's needs nothing of it.

    What the gradient of another function needs it runs again.  The code is that of a stage without
    input, residuals and I and W.
    """
    tree = jax.tree.structure(params)
    trained = [use.trained for use in uses]

    def train(params_leaves: Leaves, extra: PyTree, dy: Leaves) -> PyTree:
        def call(p: Leaves) -> tuple[Leaves, PyTree]:
            x = function(jax.tree.unflatten(tree, filled(p, params_leaves, trained)), (), extra)
            return [
                jnp.asarray(leaf) for leaf in jax.tree.leaves(x) if inexact(jnp.asarray(leaf))
            ], x

        _, vjp, x = jax.vjp(
            call, [leaf for leaf, t in zip(params_leaves, trained, strict=True) if t], has_aux=True
        )
        return x, vjp(dy)[0]

    params_leaves = jax.tree.leaves(params)
    whole = jax.eval_shape(
        lambda p, e: function(jax.tree.unflatten(tree, p), (), e), params_leaves, extra
    )
    dy = [leaf for leaf in jax.tree.leaves(whole) if inexact(leaf)]
    traced, shapes = jax.make_jaxpr(train, return_shape=True)(params_leaves, extra, dy)
    x_leaves, x_tree = jax.tree.flatten(shapes[0])
    flat = flatten(traced)
    jaxpr = without_axes(
        flat.jaxpr.replace(constvars=[], invars=[*flat.jaxpr.constvars, *flat.jaxpr.invars])
    )
    head = len(flat.consts) + len(params_leaves)
    count = len(jaxpr.invars)
    known = [True] * len(flat.consts) + [use.once for use in uses]
    apart = hoist_known(jaxpr, known + [False] * (count - head))
    # (consts, params, extra, dy | once) -> (consts, params, extra, once, dy)
    ins = apart.second.invars
    late = count - len(dy)
    body = apart.second.replace(invars=[*ins[:late], *ins[count:], *ins[late:count]])
    evaluate, _ = drop_dead(body.replace(outvars=body.outvars[: len(x_leaves)]))
    evaluate = evaluate.replace(invars=evaluate.invars[: len(body.invars) - len(dy)])
    backward, _ = drop_dead(body.replace(outvars=body.outvars[len(x_leaves) :]))
    nothing = evaluate.replace(outvars=[], eqns=[])
    return StageCode(
        consts=tuple(flat.consts),
        hoist=apart.first.replace(invars=apart.first.invars[:head]),
        forward=evaluate,
        evaluate=evaluate,
        recompute=nothing,
        backward=backward,
        input_grad=nothing,
        weight_grad=nothing,
        y_tree=x_tree,
        y_avals=tuple(x_leaves),
        loss=None,
        state=(),
        x_avals=(),
        once_avals=apart.crossing,
        residual_input=(),
        residual_weight=(),
        stash=(),
        x_wanted=(),
        y_wanted=tuple(inexact(leaf) for leaf in x_leaves),
        trained=tuple(trained),
        liveness=Liveness(),
    )
