"""Trace `last`: the loss of a microbatch together with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import Leaves, PyTree
from ..jaxprs import drop_dead, flatten
from .code import LastCode, ParamUse, inexact
from .split import hoist_known
from .spread import without_axes
from .trace import filled


def trace_last(
    function: Callable[..., tuple[Any, PyTree]],
    params: PyTree,
    y: PyTree,
    extra: PyTree,
    uses: Sequence[ParamUse] | None = None,
) -> LastCode:
    """Trace `function(params, y, extra) -> (scalar, aux)`, its gradients, and what of both depends
    on parameters alone.
    """
    y_leaves, y_tree = jax.tree.flatten(y)
    wanted = [inexact(leaf) for leaf in y_leaves]
    tree = jax.tree.structure(params)
    uses = [ParamUse()] * len(jax.tree.leaves(params)) if uses is None else uses
    trained = [use.trained for use in uses]

    def train(params_leaves: Leaves, y_leaves: Leaves, extra: PyTree, seed: Any) -> PyTree:
        def call(p: Leaves, diff: Leaves) -> tuple[Any, PyTree]:
            floats = iter(diff)
            merged = [next(floats) if w else leaf for leaf, w in zip(y_leaves, wanted, strict=True)]
            return function(
                jax.tree.unflatten(tree, filled(p, params_leaves, trained)),
                jax.tree.unflatten(y_tree, merged),
                extra,
            )

        diff = [leaf for leaf, w in zip(y_leaves, wanted, strict=True) if w]
        loss, vjp, aux = jax.vjp(
            call,
            [leaf for leaf, t in zip(params_leaves, trained, strict=True) if t],
            diff,
            has_aux=True,
        )
        dparams, dy = vjp(seed.astype(loss.dtype))
        return loss, aux, dparams, dy

    params_leaves = jax.tree.leaves(params)
    # the widest: that of a float64 loss is not rounded
    seed = jax.ShapeDtypeStruct((), jnp.result_type(float))
    traced, shapes = jax.make_jaxpr(train, return_shape=True)(params_leaves, y_leaves, extra, seed)
    aux_leaves, aux_tree = jax.tree.flatten(shapes[1])
    flat = flatten(traced)
    jaxpr = without_axes(
        flat.jaxpr.replace(constvars=[], invars=[*flat.jaxpr.constvars, *flat.jaxpr.invars])
    )
    head = len(flat.consts) + len(params_leaves)
    known = [True] * len(flat.consts) + [use.once for use in uses]
    apart = hoist_known(jaxpr, known + [False] * (len(jaxpr.invars) - head))
    count = len(jaxpr.invars)
    ins = apart.second.invars
    body = apart.second.replace(invars=[*ins[:head], *ins[count:], *ins[head:count]])
    evaluate, _ = drop_dead(body.replace(outvars=body.outvars[: 1 + len(aux_leaves)]))
    return LastCode(
        consts=tuple(flat.consts),
        hoist=apart.first.replace(invars=apart.first.invars[:head]),
        train=body,
        evaluate=evaluate.replace(invars=evaluate.invars[:-1]),
        once_avals=apart.crossing,
        aux_tree=aux_tree,
        aux_avals=tuple(aux_leaves),
        loss_dtype=shapes[0].dtype,
        num_trained=sum(trained),
    )
