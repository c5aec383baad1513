"""Random stages: small pieces in a row, in scans, branches, loops and remats."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

WIDTH, ROWS = 4, 3
MATRIX, VECTOR = (WIDTH, WIDTH), (WIDTH,)
POLICIES = jax.checkpoint_policies
NAMES = ("kept", "other")
REMATS: dict[str, Any] = {
    "None": None,
    "full": "full",
    **{
        name: getattr(POLICIES, name)
        for name in (
            "everything_saveable",
            "nothing_saveable",
            "dots_saveable",
            "dots_with_no_batch_dims_saveable",
        )
    },
    "save_only_these_names": POLICIES.save_only_these_names("kept"),
    "save_any_names_but_these": POLICIES.save_any_names_but_these("kept"),
    "save_anything_except_these_names": POLICIES.save_anything_except_these_names("kept"),
    "save_from_both_policies": POLICIES.save_from_both_policies(
        POLICIES.dots_saveable,
        POLICIES.save_only_these_names("kept"),
    ),
    "offload_dot_with_no_batch_dims": POLICIES.offload_dot_with_no_batch_dims(
        "device",
        "pinned_host",
    ),
    "save_and_offload_only_these_names": POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["other"],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


@dataclass(frozen=True)
class World:
    """What pieces read besides their parameters and h."""

    shared: Any
    ids: Any
    extra: dict[str, Any]


Run = Callable[[Any, Any, World], Any]


@dataclass(frozen=True)
class Piece:
    """`run(params, h, world) -> h`, the shapes of its parameters, and how it is written."""

    run: Run
    shapes: Any
    text: str


@jax.custom_vjp
def own_vjp(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


own_vjp.defvjp(
    lambda x, w: (jnp.tanh(x @ w), (x, w, jnp.tanh(x @ w))),
    lambda kept, dy: ((dy * (1 - kept[2] ** 2)) @ kept[1].T, kept[0].T @ (dy * (1 - kept[2] ** 2))),
)


@jax.custom_jvp
def own_jvp(x: Any) -> Any:
    return jnp.sin(x)


@own_jvp.defjvp
def _own_jvp(primals: Any, tangents: Any) -> Any:
    return jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]


def attention(p: Any, h: Any, world: World) -> Any:
    query, key = h @ p["a"], h @ p["b"]
    return h + jax.nn.softmax(jnp.where(np.tri(ROWS, dtype=bool), query @ key.T, -1e9)) @ h


def dropout(p: Any, h: Any, world: World) -> Any:
    return jnp.where(jax.random.bernoulli(world.extra["rng"], 0.7, h.shape), h @ p["a"], 0.0)


def best_of(p: Any, h: Any, world: World) -> Any:
    values, which = jax.lax.top_k(h @ p["a"], 2)
    picked = jnp.take_along_axis(h, which, axis=-1).sum(-1, keepdims=True)
    return h + picked * jnp.tanh(values).sum()


def recurrent(p: Any, h: Any, world: World) -> Any:
    def step(state: Any, now: Any) -> Any:
        state = jnp.tanh(now @ p["a"] + state * world.shared["scale"])
        return state, state

    return jax.lax.scan(step, jnp.zeros_like(h[0]), h, reverse=True)[1]


def counted(p: Any, h: Any, world: World) -> Any:
    """A loop whose trips are known when it runs; it has no gradient."""
    start = (0, jax.lax.stop_gradient(h @ p["a"]))
    count = world.extra["which"]
    end = jax.lax.while_loop(lambda s: s[0] < count, lambda s: (s[0] + 1, jnp.sin(s[1])), start)
    return h + end[1]


def low(p: Any, h: Any, world: World) -> Any:
    return h + (h.astype(jnp.float32) @ p["a"].astype(jnp.float32)).astype(h.dtype)


def lower(p: Any, h: Any, world: World) -> Any:
    return h + jnp.tanh(h.astype(jnp.bfloat16) @ p["a"].astype(jnp.bfloat16)).astype(h.dtype)


TABLE = np.linspace(-1, 1, WIDTH)
A, AB = {"a": MATRIX}, {"a": MATRIX, "b": MATRIX}
LEAVES: dict[str, tuple[Run, Any]] = {
    "matmul": (lambda p, h, w: h @ p["a"], A),
    "tanh": (lambda p, h, w: jnp.tanh(h @ p["a"]), A),
    "mlp": (lambda p, h, w: h + jnp.tanh(h @ p["a"]) @ p["b"], AB),
    "gelu": (lambda p, h, w: jax.nn.gelu(h @ p["a"] + p["v"]), {**A, "v": VECTOR}),
    "scale": (lambda p, h, w: h * w.shared["scale"], {}),
    "shared_matmul": (lambda p, h, w: h @ (w.shared["mix"] @ p["a"]), A),
    "norm": (
        lambda p, h, w: h / jnp.sqrt(jnp.mean(h * h) + 1) * w.shared["scale"] * p["v"],
        {"v": VECTOR},
    ),
    "scaled_matmul": (
        lambda p, h, w: jnp.tanh((h * w.shared["scale"]) @ (p["a"] * w.shared["scale"])),
        A,
    ),
    "constant": (lambda p, h, w: h * jnp.asarray(TABLE) + np.float64(0.5), {}),
    "where": (lambda p, h, w: jnp.where(h > 0, h, h * p["v"]), {"v": VECTOR}),
    "own_vjp": (lambda p, h, w: own_vjp(h, p["a"]), A),
    "own_jvp": (lambda p, h, w: own_jvp(h @ p["a"]) * jax.nn.silu(h), A),
    "gather": (lambda p, h, w: h + jnp.tanh(w.shared["table"])[w.ids], {}),
    "pick": (lambda p, h, w: h[jnp.argsort(w.ids)] * p["v"], {"v": VECTOR}),
    "scatter": (lambda p, h, w: jnp.zeros_like(h).at[w.ids % ROWS].add(h @ p["a"]), A),
    "sort": (lambda p, h, w: jnp.sort(h @ p["a"], axis=0), A),
    "best_of": (best_of, A),
    "attention": (attention, AB),
    "dropout": (dropout, A),
    "twice": (lambda p, h, w: jnp.tanh(h @ p["a"]) @ p["a"].T, A),
    "unused": (lambda p, h, w: jnp.cos(h), AB),
    "independent": (
        lambda p, h, w: jnp.broadcast_to(jnp.tanh(p["v"] * w.shared["scale"]), h.shape),
        {"v": VECTOR},
    ),
    "zeros": (lambda p, h, w: jnp.zeros_like(h), {}),
    "named": (
        lambda p, h, w: checkpoint_name(jnp.tanh(checkpoint_name(h @ p["a"], "kept")), "other"),
        A,
    ),
    "frozen": (lambda p, h, w: h @ jax.lax.stop_gradient(p["a"]) + p["b"][0], AB),
    "prefix": (lambda p, h, w: jnp.cumsum(jax.nn.sigmoid(h @ p["a"]), axis=0), A),
    "products": (
        lambda p, h, w: jax.lax.associative_scan(jnp.multiply, jax.nn.sigmoid(h @ p["a"]), axis=0),
        A,
    ),
    "reshaped": (lambda p, h, w: (h.reshape(-1)[::-1].reshape(WIDTH, ROWS).T) @ p["a"], A),
    "recurrent": (recurrent, A),
    "counted": (counted, A),
    "microbatch": (lambda p, h, w: h * w.extra["weight"] + w.extra["which"], {}),
    "vmap": (lambda p, h, w: jax.vmap(lambda row: jnp.tanh(row @ p["a"]))(h), A),
    "batched": (lambda p, h, w: h + jnp.einsum("rk,rkl->rl", h, jnp.sin(h)[..., None] * p["a"]), A),
    "low": (low, A),
    "lower": (lower, A),
}
# How far two orders of the same sums are apart in float32 and bfloat16.
ROUNDED = {"low": 1e-4, "lower": 0.1}


def is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


def sequence(rng: random.Random, depth: int) -> Piece:
    """Some pieces one after the other."""
    pieces = [piece(rng, depth) for _ in range(rng.randint(1, 3))]

    def run(params: Any, h: Any, world: World) -> Any:
        for p, each in zip(params, pieces, strict=True):
            h = each.run(p, h, world)
        return h

    return Piece(run, [each.shapes for each in pieces], ", ".join(each.text for each in pieces))


def piece(rng: random.Random, depth: int) -> Piece:
    """One of the leaves, or at a depth above 0 perhaps something that holds others."""
    if depth and rng.random() < 0.5:
        holders = (scanned, scanned, branched, rematerialised, jitted, looped, carried)
        return rng.choice(holders)(rng, depth - 1)
    name = rng.choice(list(LEAVES))
    return Piece(*LEAVES[name], name)


def scanned(rng: random.Random, depth: int) -> Piece:
    """A scan over layers, perhaps with a remat of each."""
    inner, (name, remat) = sequence(rng, depth), rng.choice([("None", None), *REMATS.items()])
    count, reverse, unroll = rng.randint(1, 3), rng.random() < 0.2, rng.choice((1, 1, 2))
    shapes = jax.tree.map(lambda s: (count, *s), inner.shapes, is_leaf=is_shape)

    def run(params: Any, h: Any, world: World) -> Any:
        layer = under(lambda h, p: (inner.run(p, h, world), None), remat)
        return jax.lax.scan(layer, h, params, length=count, reverse=reverse, unroll=unroll)[0]

    return Piece(run, shapes, f"scan[{count}, {name}{', reverse' * reverse}]({inner.text})")


def carried(rng: random.Random, depth: int) -> Piece:
    """A scan with the same parameters in all trips, a counter, and numbers that it stacks."""
    inner = sequence(rng, depth)

    def run(params: Any, h: Any, world: World) -> Any:
        def trip(carry: Any, row: Any) -> Any:
            count, h = carry
            h = inner.run(params, h, world) * row
            return (count + 1, h), (jnp.sum(h), 2.0, count)

        start, rows = (jnp.int32(0), h), jnp.asarray([0.5, 1.5])
        (count, h), (sums, twos, counts) = jax.lax.scan(trip, start, rows)
        return h + jnp.sum(sums * twos) / (count + counts[-1])

    return Piece(run, inner.shapes, f"carried({inner.text})")


def branched(rng: random.Random, depth: int) -> Piece:
    """One of two or three, by a flag of the microbatch or by h."""
    branches = [sequence(rng, depth) for _ in range(rng.randint(2, 3))]
    by_value = rng.random() < 0.3

    def run(params: Any, h: Any, world: World) -> Any:
        which = jnp.sum(h > 0) % len(branches) if by_value else world.extra["which"] % len(branches)
        pairs = zip(params, branches, strict=True)
        runs = [lambda h, p=p, each=each: each.run(p, h, world) for p, each in pairs]
        return jax.lax.switch(which, runs, h)

    return Piece(
        run,
        [each.shapes for each in branches],
        f"cond({' | '.join(each.text for each in branches)})",
    )


def rematerialised(rng: random.Random, depth: int) -> Piece:
    inner, (name, remat) = sequence(rng, depth), rng.choice(list(REMATS.items()))

    def run(params: Any, h: Any, world: World) -> Any:
        def call(p: Any, h: Any, shared: Any) -> Any:
            return inner.run(p, h, World(shared, world.ids, world.extra))

        return under(call, remat)(params, h, world.shared)

    return Piece(run, inner.shapes, f"remat[{name}]({inner.text})")


def jitted(rng: random.Random, depth: int) -> Piece:
    inner = sequence(rng, depth)
    return Piece(
        lambda p, h, world: jax.jit(lambda p, h: inner.run(p, h, world))(p, h),
        inner.shapes,
        f"jit({inner.text})",
    )


def looped(rng: random.Random, depth: int) -> Piece:
    inner = sequence(rng, depth)
    return Piece(
        lambda p, h, world: jax.lax.fori_loop(0, 2, lambda _, h: inner.run(p, h, world), h),
        inner.shapes,
        f"loop({inner.text})",
    )


def under(call: Any, remat: Any) -> Any:
    """As `Pipeline` reads its `remat=`."""
    if remat is None:
        return call
    return jax.checkpoint(call, policy=None if remat == "full" else remat)


def drawn(shapes: Any, seed: int) -> Any:
    numbers = np.random.default_rng(seed)

    def draw(shape: Any) -> Any:
        return jnp.asarray(numbers.standard_normal(shape) / 2)

    return jax.tree.map(draw, shapes, is_leaf=is_shape)


@dataclass(frozen=True)
class Stage:
    """A random stage as `Pipeline` takes it, its remat, and how it is written."""

    inner: Piece
    remat: Any
    text: str
    seed: int

    def __call__(self, own: Any, x: Any, *, shared: Any, microbatch: Any, ctx: Any) -> Any:
        """`x` holds `h` and ids, which are numbers without a gradient."""
        extra = {"which": microbatch["which"][0], "weight": microbatch["weight"][0], "rng": ctx.rng}
        return {**x, "h": self.inner.run(own, x["h"], World(shared, x["ids"], extra))}

    def params(self, stages: int = 1) -> Any:
        """(a list of each stage's own, shared)."""
        own = [drawn(self.inner.shapes, self.seed + i) for i in range(stages)]
        return own, drawn({"scale": VECTOR, "mix": MATRIX, "table": (5, WIDTH)}, self.seed)

    def batch(self, microbatches: int = 1) -> Any:
        """Rows of microbatches."""
        numbers = np.random.default_rng(self.seed)
        rows = ROWS * microbatches
        which = np.repeat(numbers.integers(0, 3, microbatches), ROWS)
        ids = jnp.asarray(numbers.integers(0, 5, rows))
        x = {"h": jnp.asarray(numbers.standard_normal((rows, WIDTH))), "ids": ids}
        return {"x": x, "which": jnp.asarray(which), "weight": jnp.full(rows, 1.25)}

    @property
    def limit(self) -> float:
        """Relative to the largest entry; sums that cancel cost a few digits of float64."""
        words = re.findall(r"\w+", self.text)
        return max((limit for name, limit in ROUNDED.items() if name in words), default=1e-9)


def random_stage(seed: int, *, depth: int = 2) -> Stage:
    """The stage that this seed draws, and one of the remats."""
    rng = random.Random(seed)
    inner, (name, remat) = sequence(rng, depth), rng.choice(list(REMATS.items()))
    return Stage(inner, remat, f"{name}: {inner.text}", seed)
