"""The end of a step: one sum over devices of values that only some of them have.  Stages on two
devices (DualPipe) are copied from their owner before, and their gradients return to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Leaves, Params, PyTree, summable
from ..model.leaf_plan import leaf_plans, reduce_gradients, trained, with_frozen
from ..model.param_layout import Chunks
from ..stage.job import Job
from ..stage.model_code import ModelCode
from ..table.effects import Place
from .block import State, add, chunks_of


def with_replicas(job: Job, owned: Sequence[PyTree]) -> list[PyTree]:
    """This device's stages in chunk order: its own stages, and copies of another device's."""
    replicas = job.layout.replicas()
    if not replicas:
        return list(owned)
    chunks: dict[int, PyTree] = dict(enumerate(owned))
    device = lax.axis_index(job.axis)
    for chunk, held, pairs in _replica_moves(replicas):
        copy = jax.tree.map(lambda leaf, p=pairs: lax.ppermute(leaf, job.axis, p), owned[held])
        if chunk not in chunks:
            chunks[chunk] = copy
            continue
        here = jnp.isin(device, jnp.array([t for _, t in pairs]))
        chunks[chunk] = jax.tree.map(
            lambda new, old, h=here: jnp.where(h, new, old), copy, chunks[chunk]
        )
    return [chunks[v] for v in sorted(chunks)]


def _replica_moves(
    replicas: Sequence[tuple[int, int, int, int]],
) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """(holder's chunk, owner's chunk, pairs): permutes without cycles that bring every copy to its
    holder.
    """
    moves: list[tuple[int, int, bool, list[tuple[int, int]]]] = []
    for owner, owner_chunk, holder, chunk in replicas:
        for move in moves:
            free = all(owner != s and holder != t for s, t in move[3])
            if move[:3] == (chunk, owner_chunk, owner < holder) and free:
                move[3].append((owner, holder))
                break
        else:
            moves.append((chunk, owner_chunk, owner < holder, [(owner, holder)]))
    return [(chunk, owner_chunk, pairs) for chunk, owner_chunk, _, pairs in moves]


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
        owned[v] = [jnp.where(mine, g, jnp.zeros_like(g)) for g in owned[v]]
    for chunk, held, pairs in _replica_moves(replicas):
        back = [(t, s) for s, t in pairs]
        owned[held] = add(owned[held], [lax.ppermute(g, job.axis, back) for g in leaves[chunk]])
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
        summed = reduce_gradients(values, trained(found, found), axes, by_parts=job.target.on_tpus)
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
    return Chunks(found, job.layout) if found else ()


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
    loss, losses, factor = job.functions.total(losses, aux["count"], job.data_size)
    total = job.num_microbatches * job.data_size
    metrics = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0) / total, aux["metrics"])
    return {"loss": loss, "losses": losses, "metrics": metrics}, factor
