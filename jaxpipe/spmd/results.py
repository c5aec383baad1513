"""The end of a step: one sum over devices of values that only some of them have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Leaves, Params, PyTree, summable
from ..model.functions import Loss, inverse_count
from ..model.leaf_plan import leaf_plans, reduce_gradients, trained, with_frozen
from ..model.placed import Chunks
from ..stage.job import Job
from ..stage.model_code import ModelCode
from ..table.effects import Place
from .pools import State, chunks_of
from .replicas import return_replicas


def finish(
    job: Job, code: ModelCode, state: State, params: Params, kept: Sequence[PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    """Sum losses and the gradients of first, last and shared over devices, and all gradients over
    data shards.
    """
    if job.outputs:
        return {"outputs": _outputs(job, code, state), "state": _new_state(job, state, kept)}, {}
    everyone = (job.axis, *job.data_axes)
    results, scale = _losses(job, code, state, everyone)
    results["state"] = _new_state(job, state, kept)
    if not job.training:
        return results, {}
    owned = return_replicas(job, chunks_of(state, Place.STAGE_GRADIENTS))

    def finished(values: Leaves, plans: PyTree, axes: tuple[str, ...]) -> Leaves:
        found = leaf_plans(plans)
        summed = reduce_gradients(values, trained(found, found), axes)
        return summed if scale is None else [g * scale.astype(g.dtype) for g in summed]

    stages = []
    for tree, plans, values in zip(params["stages"], job.plans["stages"], owned, strict=True):
        summed = with_frozen(
            [v[None] for v in finished(values, plans, job.data_axes)], leaf_plans(plans)
        )
        stages.append(jax.tree.unflatten(jax.tree.structure(tree), summed))
    grads: dict[str, PyTree] = {"stages": params["stages"].like(stages)}
    for key in ("first", "last", "shared"):
        whole = with_frozen(
            finished(state[f"{key}_gradients"], job.plans[key], everyone),
            leaf_plans(job.plans[key]),
        )
        grads[key] = jax.tree.unflatten(jax.tree.structure(params[key]), whole)
    return results, grads


def _outputs(job: Job, code: ModelCode, state: State) -> PyTree:
    """The last stage's outputs for all rows of this data shard, on all devices of the pipe axis."""
    assert code.last is not None

    def whole(leaf: Any) -> Any:
        # Only the last stage's device wrote any of these; the others hold zeros, and False.
        number = leaf.astype(jnp.int8) if leaf.dtype == bool else leaf
        return lax.psum(number, job.axis).astype(leaf.dtype)

    found = jax.tree.map(whole, jax.tree.unflatten(code.last.aux_tree, state["aux"])["metrics"])
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), job.functions.join(found))


def _new_state(job: Job, state: State, kept: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """The stages' state after the step, leaves [1, ...].  Floating leaves are averaged over data
    shards.
    """

    def merge(leaf: Any) -> Any:
        if not job.data_axes:
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return lax.pmax(leaf, job.data_axes)
        return (lax.psum(summable(leaf), job.data_axes) / job.data_size).astype(leaf.dtype)

    found = [
        jax.tree.unflatten(jax.tree.structure(tree), [merge(leaf)[None] for leaf in leaves])
        for leaves, tree in zip(chunks_of(state, Place.STAGE_STATE), kept, strict=False)
    ]
    return Chunks(found, job.layout.owners) if found else ()


def _losses(
    job: Job, code: ModelCode, state: State, everyone: tuple[str, ...]
) -> tuple[PyTree, Any]:
    """The step's loss, per-microbatch losses and metrics on every device, and the remaining factor
    of gradients.
    """
    if code.last is None:
        return {}, None
    # Only the last stage's device wrote any of these; the others hold zeros.
    losses = lax.psum(state["losses"], everyone)
    aux = jax.tree.unflatten(
        code.last.aux_tree, [lax.psum(summable(leaf), everyone) for leaf in state["aux"]]
    )
    if job.functions.loss is Loss.SUM_OVER_COUNT:
        count = jnp.sum(aux["count"])
        weight = inverse_count(count, losses.dtype)
        loss = jnp.sum(losses) * weight
    else:
        losses = losses / job.data_size
        loss, weight = jnp.mean(losses), None
    total = job.num_microbatches * job.data_size
    metrics = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0) / total, aux["metrics"])
    return {"loss": loss, "losses": losses, "metrics": metrics}, weight
