"""Experts on the devices of a mesh axis, and the exchange of tokens.

Each device has its own part of the experts.  A capacity limits the tokens of a row that an expert
takes (GShard, Lepikhin et al. 2020, section 2.2), and one all-to-all has equal parts.  A row is a
group, so dropped choices do not depend on the mesh.  Without a capacity nothing is dropped.
Devices send the routed tokens (`jax.lax.ragged_all_to_all`), and experts take all of them
(`jax.lax.ragged_dot`; MegaBlocks, Gale et al. 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from llama_parts import fp8

from .sizes import Routing, Scores

Tree = Any
EXCHANGED = "exchanged"  # the name of an exchange's results, for a policy of remat


class Routed(NamedTuple):
    """The routes of the tokens of N rows."""

    experts: jax.Array  # int [N, T, k]
    gates: jax.Array  # [N, T, k]
    auxiliary: jax.Array  # the auxiliary loss of each row, [N]
    load: jax.Array  # tokens of each expert, [E]


def route(routing: Routing, logits: jax.Array, bias: jax.Array | None) -> Routed:
    """Choose experts by logits [N, T, E]; of equal scores the expert with the lower number is
    chosen.

    The bias of each expert [E] counts in the choice alone, not in the gates.
    """
    r, tokens = routing, logits.shape[1]
    sigmoid = r.scores is Scores.SIGMOID
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=-1)
    wanted = lax.stop_gradient(scores if bias is None else scores + bias)
    if r.groups > 1:
        grouped = wanted.reshape(*wanted.shape[:-1], r.groups, -1)
        best = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
        kept = jnp.sum(jax.nn.one_hot(lax.top_k(best, r.chosen_groups)[1], r.groups), axis=-2) > 0
        wanted = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(wanted.shape)
    experts = lax.top_k(wanted, r.chosen)[1]
    gates = jnp.take_along_axis(scores, experts, axis=-1)
    shares = scores / jnp.sum(scores, axis=-1, keepdims=True) if sigmoid else scores
    if r.normalized:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    counts = jnp.sum(jax.nn.one_hot(experts, r.experts, dtype=scores.dtype), axis=(1, 2))  # [N, E]
    auxiliary = jnp.sum(counts * jnp.mean(shares, axis=1), axis=-1)
    auxiliary *= r.auxiliary * r.experts / (r.chosen * tokens)
    return Routed(experts, r.scale * gates, auxiliary, jnp.sum(counts, axis=0))


@dataclass(frozen=True)
class Experts:
    """SwiGLU experts, of which each device of `axis` has an equal part, and the exchange of tokens.

    Args:
        routing: how many experts there are.
        axis: a data axis, manual where this is called; None: all experts are here.
        capacity: how many times the tokens of an even load an expert may take of a row; 0: all.
        ragged: the backend has `jax.lax.ragged_all_to_all`; else all devices are sent all tokens,
            and each picks its own.
    """

    routing: Routing
    axis: str | None = None
    capacity: float = 0.0
    ragged: bool = False

    def __call__(self, kernels: Tree, u: jax.Array, to: Routed) -> tuple[jax.Array, jax.Array]:
        """Tokens [N, T, d] -> (sums over the experts of each token, dropped choices of each row
        [N]); `kernels` are gate and up [E, d, f], and down [E, f, d], the device's own experts.
        """
        found, kept = (self._by_capacity if self.capacity else self._all)(kernels, u, to)
        gates = jnp.where(kept, to.gates, 0).astype(u.dtype)
        dropped = jnp.sum(~kept, axis=(1, 2), dtype=jnp.int32)
        return jnp.einsum("ntkd,ntk->ntd", found, gates), dropped

    def places(self, tokens: int) -> int:
        """Tokens of a row that an expert has room for."""
        even = tokens * self.routing.chosen / self.routing.experts
        return min(tokens, math.ceil(self.capacity * even))

    def _by_capacity(self, kernels: Tree, u: jax.Array, to: Routed) -> tuple[jax.Array, jax.Array]:
        (rows, tokens, width), experts = u.shape, self.routing.experts
        choices, places = tokens * self.routing.chosen, self.places(tokens)
        flat = to.experts.reshape(rows, choices)
        order = jnp.argsort(flat, axis=1, stable=True)  # choices, expert by expert, in their order
        counts = jnp.sum(jax.nn.one_hot(flat, experts, dtype=jnp.int32), axis=1)
        starts = jnp.cumsum(counts, axis=1) - counts
        rank = jnp.argsort(order, axis=1) - jnp.take_along_axis(starts, flat, axis=1)
        kept = rank < places
        slot = jnp.where(
            kept, flat * places + rank, experts * places
        )  # of a choice; none: past all

        at = starts[:, :, None] + jnp.arange(places)  # where in `order` each place's choice is
        there = jnp.arange(places) < counts[:, :, None]
        source = jnp.take_along_axis(order, jnp.where(there, at, 0).reshape(rows, -1), axis=1)
        sent = _gathered(
            u,
            jnp.where(there.reshape(rows, -1), source // self.routing.chosen, tokens),
            slot.reshape(rows, tokens, -1),
        ).reshape(rows, experts, places, width)
        done = self._exchanged(kernels, sent).reshape(rows, experts * places, width)
        back = jnp.where(there.reshape(rows, -1), source, choices)
        found = _gathered(done, slot, back[:, :, None])
        return found.reshape(rows, tokens, -1, width), kept.reshape(to.experts.shape)

    def _exchanged(self, kernels: Tree, sent: jax.Array) -> jax.Array:
        """Places [N, E, C, d] through the experts, on whatever devices these are."""
        rows, experts, places, width = sent.shape
        by_expert = jnp.moveaxis(sent, 1, 0).reshape(experts, rows * places, width)
        if self.axis is not None:
            by_expert = lax.all_to_all(by_expert, self.axis, 0, 1, tiled=True)
        by_expert = checkpoint_name(by_expert, EXCHANGED)
        hidden = jax.nn.silu(_product(by_expert, kernels["gate"]))
        hidden *= _product(by_expert, kernels["up"])
        done = _product(hidden, kernels["down"])
        if self.axis is not None:
            done = lax.all_to_all(done, self.axis, 1, 0, tiled=True)
        done = checkpoint_name(done, EXCHANGED)
        return jnp.moveaxis(done.reshape(experts, rows, places, width), 0, 1)

    def _all(self, kernels: Tree, u: jax.Array, to: Routed) -> tuple[jax.Array, jax.Array]:
        """Run all choices, sorted by expert and so by device."""
        width, experts = u.shape[-1], self.routing.experts
        flat = to.experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts = jnp.sum(jax.nn.one_hot(flat, experts, dtype=jnp.int32), axis=0)
        inverse = jnp.argsort(order)
        rows = _permuted(u.reshape(-1, width), order // self.routing.chosen, inverse)
        found = _permuted(self._sent(kernels, rows, counts), inverse, order)
        found = found.reshape(*to.experts.shape, width)
        return found, jnp.ones(to.experts.shape, bool)

    def _sent(self, kernels: Tree, rows: jax.Array, counts: jax.Array) -> jax.Array:
        """Rows that are sorted by expert, `counts` of each [E], through the experts."""
        if self.axis is None:
            return _swiglu(kernels, rows, counts)
        devices = lax.axis_size(self.axis)
        every = lax.all_gather(counts.reshape(devices, -1), self.axis)  # [from, to, own experts]
        sizes = jnp.sum(every, axis=2)
        me = lax.axis_index(self.axis)
        # room for all tokens of all devices, in case all choose the same experts
        came = self._ragged(rows, sizes, devices * len(rows))
        mine = every[:, me]  # from each device, of each of the own experts
        by_source = mine.reshape(-1)
        begins = (jnp.cumsum(by_source) - by_source).reshape(mine.shape)
        upto = jnp.cumsum(mine.T.reshape(-1))  # expert by expert, and of each from all devices
        place = jnp.arange(len(came))
        part = jnp.searchsorted(upto, place, side="right")
        before = jnp.concatenate([jnp.zeros(1, upto.dtype), upto])
        part = jnp.minimum(part, len(by_source) - 1)
        source = jnp.where(
            place < upto[-1], begins.T.reshape(-1)[part] + place - before[part], place
        )
        unsorted = jnp.zeros(len(source), source.dtype).at[source].set(place)
        done = _swiglu(kernels, _permuted(came, source, unsorted), jnp.sum(mine, axis=0))
        return self._ragged(_permuted(done, unsorted, source), sizes.T, len(rows))

    def _ragged(self, rows: jax.Array, sizes: jax.Array, length: int) -> jax.Array:
        """The rows that all devices send to this one, one device after the other; `sizes[s, r]` of
        them from s to r.
        """
        assert self.axis is not None
        me = lax.axis_index(self.axis)
        begins = jnp.cumsum(sizes, axis=1) - sizes  # where s has the rows for r
        lands = jnp.cumsum(sizes, axis=0) - sizes  # where r wants those of s
        if self.ragged:
            found = lax.ragged_all_to_all(
                rows,
                jnp.zeros((length, rows.shape[1]), rows.dtype),
                begins[me],
                sizes[me],
                lands[me],
                sizes[:, me],
                axis_name=self.axis,
            )
            return checkpoint_name(found, EXCHANGED)
        every = lax.all_gather(rows, self.axis)
        place, upto = jnp.arange(length), jnp.cumsum(sizes[:, me])
        source = jnp.minimum(jnp.searchsorted(upto, place, side="right"), len(sizes) - 1)
        found = every[source, begins[source, me] + place - lands[source, me]]
        return jnp.where((place < upto[-1])[:, None], found, 0)


def _product(rows: jax.Array, own: Tree) -> jax.Array:
    """Rows [E, C, in] times the kernels of their experts [E, in, out], in FP8 where there are
    scales.
    """
    kernel = own["kernel"]
    if "fp8" in own:
        return fp8.matmul(rows, kernel, own["fp8"])
    return jnp.einsum("eci,eio->eco", rows, kernel)


def _swiglu(kernels: Tree, rows: jax.Array, counts: jax.Array) -> jax.Array:
    """Rows that are sorted by expert, through their experts; the rows after them are 0."""
    gate, up, down = (kernels[name]["kernel"] for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(lax.ragged_dot(rows, gate, counts)) * lax.ragged_dot(rows, up, counts)
    return lax.ragged_dot(hidden, down, counts)


def _permuted(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """x[order] of rows [n, d], where each row occurs equally often; `inverse` lists its places."""
    return _gathered(x[None], order[None], inverse.reshape(1, len(x), -1))[0]


@jax.custom_vjp
def _gathered(x: jax.Array, at: jax.Array, back: jax.Array) -> jax.Array:
    """Rows x[n, at[n, i]], 0 where `at` is past the end; `back[n, j]` lists all i with at[n, i] =
    j, and numbers past the end.

    Its gradient gathers too, because a scatter adds rows in no fixed order on GPUs.
    """
    found = jnp.take_along_axis(x, jnp.minimum(at, x.shape[1] - 1)[:, :, None], axis=1)
    return jnp.where((at < x.shape[1])[:, :, None], found, 0)


def _gathered_forward(x: jax.Array, at: jax.Array, back: jax.Array) -> tuple[jax.Array, Tree]:
    return _gathered(x, at, back), (at, back)


def _gathered_backward(kept: Tree, dy: jax.Array) -> tuple[jax.Array, None, None]:
    _, back = kept
    flat = back.reshape(len(back), -1)
    found = jnp.take_along_axis(dy, jnp.minimum(flat, dy.shape[1] - 1)[:, :, None], axis=1)
    found = jnp.where((flat < dy.shape[1])[:, :, None], found, 0)
    return jnp.sum(found.reshape(*back.shape, dy.shape[2]), axis=2), None, None


_gathered.defvjp(_gathered_forward, _gathered_backward)
