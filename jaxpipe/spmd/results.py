"""The end of a step: one sum over devices of values that only some of them have.  Stages on two
devices (DualPipe) are copied from their owner before, and their gradients return to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Leaves, Params, PyTree, summable
from ..model.leaf_plan import leaf_plans, reduce_gradients, trained, with_frozen
from ..model.param_layout import OUTER, Chunks
from ..stage.job import Job
from ..stage.model_code import ModelCode
from ..table.effects import Place
from .block import State, chunks_of


def with_replicas(job: Job, owned: Sequence[PyTree]) -> list[PyTree]:
    """This device's stages in chunk order: its own stages, and copies of another device's."""
    replicas = job.layout.replicas()
    if not replicas:
        return list(owned)
    chunks: dict[int, PyTree] = dict(enumerate(owned))
    device = lax.axis_index(job.axis)
    for chunk, held, pairs in _replica_moves(replicas):
        copy = jax.tree.map(lambda leaf, p=pairs: lax.ppermute(leaf, job.axis, p), owned[held])
        if chunk in chunks:
            here = jnp.isin(device, jnp.array([t for _, t in pairs]))
            copy = jax.tree.map(partial(jnp.where, here), copy, chunks[chunk])
        chunks[chunk] = copy
    return [chunks[v] for v in sorted(chunks)]


def _replica_moves(
    replicas: Sequence[tuple[int, int, int, int]],
) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """(holder's chunk, owner's chunk, pairs): permutes without cycles that bring every copy to its
    holder.
    """
    moves: dict[tuple[int, int, bool, int], list[tuple[int, int]]] = {}
    for owner, owner_chunk, holder, chunk in replicas:
        # A permute takes each source and each target once.
        for number in range(len(replicas)):
            key = chunk, owner_chunk, owner < holder, number
            pairs = moves.setdefault(key, [])
            if all(owner != s and holder != t for s, t in pairs):
                pairs.append((owner, holder))
                break
    return [(chunk, owner_chunk, pairs) for (chunk, owner_chunk, *_), pairs in moves.items()]


def return_replicas(job: Job, leaves: Sequence[Leaves]) -> list[Leaves]:
    """Send the gradients of copied stages to their owners and add them there."""
    replicas = job.layout.replicas()
    owned = [leaves[v] for v in range(job.layout.num_owned)]
    if not replicas:
        return owned
    # A device may hold copies in a chunk that others own: count each gradient where its stage is
    # owned.
    device = lax.axis_index(job.axis)
    for v in range(job.layout.num_owned):
        mine = jnp.array([s >= 0 for s in job.layout.stage_at(v)])[device]
        owned[v] = jax.tree.map(lambda g, m=mine: jnp.where(m, g, jnp.zeros_like(g)), owned[v])
    for chunk, held, pairs in _replica_moves(replicas):
        back = [(t, s) for s, t in pairs]
        sent = jax.tree.map(lambda g, p=back: lax.ppermute(g, job.axis, p), leaves[chunk])
        owned[held] = jax.tree.map(jnp.add, owned[held], sent)
    return owned


def finish(
    job: Job,
    code: ModelCode,
    state: State,
    params: Params,
    kept: Sequence[PyTree],
) -> tuple[PyTree, dict[str, PyTree]]:
    """Sum losses and the gradients of first, last and shared over devices, and all gradients over
    data shards.
    """
    aux = None if code.last is None else jax.tree.unflatten(code.last.aux_tree, state["aux"])
    results, scale = totals(job, state["losses"], aux, (job.axis,), job.data_axes)
    held = [
        jax.tree.unflatten(jax.tree.structure(tree), leaves)
        for leaves, tree in zip(chunks_of(state, Place.STAGE_STATE), kept, strict=False)
    ]
    merged = jax.tree.map(lambda leaf: merged_state(job, leaf, job.data_axes)[None], held)
    results["state"] = Chunks(merged, job.layout) if held else ()
    if not job.training:
        return results, {}
    owned = return_replicas(job, chunks_of(state, Place.STAGE_GRADIENTS))

    def finished(values: Leaves, plans: PyTree, like: PyTree, axes: tuple[str, ...]) -> PyTree:
        """The sums of gradients, None for frozen parameters."""
        held, values = leaf_plans(plans), [v for v in values if v is not None]
        values = reduce_gradients(values, trained(held, held), axes, by_parts=job.target.on_tpus)
        scaled = values if scale is None else [g * scale.astype(g.dtype) for g in values]
        return jax.tree.unflatten(jax.tree.structure(like), with_frozen(scaled, held))

    stages = [
        jax.tree.map(lambda leaf: leaf[None], finished(values, plans, tree, job.data_axes))
        for tree, plans, values in zip(params["stages"], job.plans["stages"], owned, strict=True)
    ]
    everyone = (job.axis, *job.data_axes)
    return results, {
        "stages": params["stages"].like(stages),
        **{
            key: finished(state[f"{key}_gradients"], job.plans[key], params[key], everyone)
            for key in OUTER
        },
    }


def totals(
    job: Job, losses: Any, aux: PyTree, pipe: tuple[str, ...], data: tuple[str, ...]
) -> tuple[dict[str, Any], Any]:
    """The step's loss, per-microbatch losses and metrics on every device, and the remaining factor
    of gradients; or the last stage's outputs for all rows of this data shard.

    Only the last stage's device wrote any of the losses [M] and of `aux`; the others along the axes
    `pipe` hold zeros, and False.
    """
    if job.functions.last is None:
        return {}, None
    if job.outputs:

        def whole(leaf: Any) -> Any:
            number = leaf.astype(jnp.int8) if leaf.dtype == bool else leaf
            return lax.psum(number, pipe).astype(leaf.dtype)

        outputs = job.functions.join(jax.tree.map(whole, aux["metrics"]))
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)
        return {"outputs": rows}, None
    everyone = (*pipe, *data)
    losses = lax.psum(losses, everyone)
    aux = jax.tree.map(lambda leaf: lax.psum(summable(leaf), everyone), aux)
    loss, losses, factor = job.functions.total(losses, aux["count"], job.data_size)
    parts = job.num_microbatches * job.data_size
    metrics = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0) / parts, aux["metrics"])
    return {"loss": loss, "losses": losses, "metrics": metrics}, factor


def merged_state(job: Job, leaf: Any, data: tuple[str, ...]) -> Any:
    """A leaf of the stages' state after the step, averaged over data shards; the greatest of what
    is not floating.
    """
    if not data:
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return lax.pmax(leaf, data)
    return (lax.psum(summable(leaf), data) / job.data_size).astype(leaf.dtype)
