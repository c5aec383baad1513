"""Stages on two devices (DualPipe): copy parameters from the owner, and return gradients to it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Leaves, PyTree
from ..stage.job import Job
from .pools import add


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
