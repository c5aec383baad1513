"""Small pieces of stages, one for each thing that a stage may do: primitives, keywords, kinds of
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

KEEP = 0.7


@dataclass(frozen=True)
class Op:
    """`call(params, h, keywords) -> h`, with the shapes of its parameters by name; integers ("q")
    are frozen.
    """

    call: Callable[[Any, Any, Any], Any]
    shapes: Callable[[int], dict[str, tuple[int, ...]]] = lambda _: {}
    wants: tuple[str, ...] = ()


def _matrix(w: int) -> dict[str, tuple[int, ...]]:
    return {"w": (w, w)}


def _scalar(_: int) -> dict[str, tuple[int, ...]]:
    return {"s": ()}


def _layer(h: Any, w: Any) -> Any:
    return h + jnp.tanh(h @ w)


def _dropout(_: Any, h: Any, k: Any) -> Any:
    return (
        jnp.where(jax.random.bernoulli(k.ctx.rng, KEEP, h.shape), h / KEEP, 0.0)
        if k.training
        else h
    )


def _by_position(_: Any, h: Any, k: Any) -> Any:
    """Dropout that does not depend on how a sequence is cut."""
    if not k.training:
        return h
    shape = (h.shape[0], *h.shape[2:])
    keys = k.ctx.position_keys(h.shape[1])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, KEEP, shape))(keys)
    return jnp.where(jnp.moveaxis(keep, 0, 1), h / KEEP, 0.0)


def _rows(leaf: Any, h: Any) -> Any:
    """A leaf [rows] beside h [rows, ...]."""
    return leaf.reshape(-1, *(1,) * (h.ndim - 1))


def _attend(p: Any, h: Any, _: Any) -> Any:
    flat = h.reshape(-1, h.shape[-1])
    return h + (jax.nn.softmax(flat @ p["w"] @ flat.T) @ flat).reshape(h.shape)


@jax.custom_vjp
def _straight(h: Any) -> Any:
    return jnp.round(h * 8) / 8


_straight.defvjp(lambda h: (_straight(h), jnp.cosh(h)), lambda kept, dy: (dy * kept,))


def _named(p: Any, h: Any, _: Any) -> Any:
    inside = jax.checkpoint(lambda h, w: checkpoint_name(_layer(h, w), "kept") * jnp.sin(h))
    return h + inside(h, p["w"])


def _power(p: Any, h: Any, _: Any) -> Any:
    """A loop of unknown length, which has no gradient."""
    v = lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["w"])),
        (0, jnp.ones(h.shape[-1])),
    )[1]
    return h + lax.stop_gradient(v) * p["s"]


def _looped(p: Any, h: Any, _: Any) -> Any:
    return lax.scan(lambda h, w: (_layer(h, w), None), h, p["w"])[0]


def _scaled_loop(p: Any, h: Any, k: Any) -> Any:
    """A loop whose body reads what is no row of it, and returns rows."""
    h, sums = lax.scan(lambda h, w: (_layer(h * p["s"], w), jnp.mean(h)), h, p["w"])
    return h + 0.1 * jnp.sum(sums)


def _normalised(_: Any, h: Any, k: Any) -> tuple[Any, Any]:
    own = jnp.mean(h.reshape(-1, h.shape[-1]), axis=0)
    if not k.training:
        return h - k.state["mean"], k.state
    return h - own, {
        "mean": 0.9 * k.state["mean"] + 0.1 * lax.stop_gradient(own),
        "seen": k.state["seen"] + 1,
    }


@jax.custom_vjp
def _observed(h: Any, _: Any) -> Any:
    """h; its gradient for the other argument is that argument's next value."""
    return h


_observed.defvjp(
    lambda h, most: (h, (h, most)),
    lambda kept, dy: (dy, jnp.max(jnp.abs(kept[0].reshape(-1, kept[0].shape[-1])), 0) - kept[1]),
)


def _carried(p: Any, h: Any, k: Any) -> tuple[Any, Any]:
    """A state of the slices before, which has a gradient."""
    return h + k.carry[:, None] * p["s"], jnp.tanh(k.carry + jnp.sum(h, axis=1))


def _appended(p: Any, h: Any, k: Any) -> Any:
    """Attention to the positions of all slices up to now."""
    keys = k.ctx.append("keys", h @ p["w"])
    at = k.ctx.offset + jnp.arange(h.shape[1])
    seen = at[:, None] >= jnp.arange(keys.shape[1])
    scores = jnp.where(seen, jnp.einsum("rtd,rsd->rts", h, keys), -1e30)
    return h + jnp.einsum("rts,rsd->rtd", jax.nn.softmax(scores), keys)


OPS: dict[str, Op] = {
    "dense": Op(
        lambda p, h, k: h + jnp.tanh(h @ p["w"] + p["bias"]), lambda w: {"w": (w, w), "bias": (w,)}
    ),
    "scale": Op(lambda p, h, k: h * p["s"] + p["bias"], lambda w: {"s": (), "bias": (w,)}),
    "twice": Op(lambda p, h, k: jnp.tanh(h @ p["w"]) @ p["w"].T, _matrix),
    "unused": Op(
        lambda p, h, k: jnp.sin(h) * p["s"], lambda w: {"s": (), "w": (w, w), "bias": (0,)}
    ),
    "looped": Op(_looped, lambda w: {"w": (3, w, w)}),
    "scaled_loop": Op(_scaled_loop, lambda w: {"w": (2, w, w), "s": ()}),
    "cond": Op(lambda p, h, k: lax.cond(jnp.sum(h) > 0, lambda h: h @ p["w"], jnp.sin, h), _matrix),
    "switch": Op(
        lambda p, h, k: lax.switch(
            k.ctx.microbatch % 3, [jnp.sin, lambda h: h * p["s"], lambda h: h], h
        ),
        _scalar,
        wants=("ctx",),
    ),
    "quantised": Op(
        lambda p, h, k: h + jnp.tanh(h @ (p["q"].astype(float) * p["s"] / 64)),
        lambda w: {"q": (w, w), "s": ()},
    ),
    "shared": Op(lambda p, h, k: _layer(h, k.shared["w"]), wants=("shared",)),
    "shared_scale": Op(
        lambda p, h, k: _layer(h, p["w"]) * k.shared["s"], _matrix, wants=("shared",)
    ),
    "dropout": Op(_dropout, wants=("ctx", "training")),
    "number": Op(
        lambda p, h, k: h * (1 + 0.1 * k.ctx.stage) + 0.01 * k.ctx.microbatch, wants=("ctx",)
    ),
    "microbatch": Op(
        lambda p, h, k: h + p["s"] * _rows(k.microbatch["z"], h), _scalar, wants=("microbatch",)
    ),
    "training": Op(lambda p, h, k: h * 1.5 if k.training else h, wants=("training",)),
    "norm": Op(
        lambda p, h, k: h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 0.1) * p["bias"],
        lambda w: {"bias": (w,)},
    ),
    "relu": Op(lambda p, h, k: h + jax.nn.relu(h @ p["w"]), _matrix),
    "straight": Op(lambda p, h, k: h + 0.5 * _straight(h)),
    "named": Op(_named, _matrix),
    "jitted": Op(lambda p, h, k: jax.jit(_layer)(h, p["w"]), _matrix),
    "detached": Op(lambda p, h, k: h + lax.stop_gradient(jnp.cos(h)) * p["s"], _scalar),
    "power": Op(_power, lambda w: {"w": (w, w), "s": ()}),
    "identity": Op(lambda p, h, k: h),
    "constant": Op(lambda p, h, k: jnp.full_like(h, 0.3) * p["bias"], lambda w: {"bias": (w,)}),
    "moved": Op(lambda p, h, k: h + jnp.roll(h[..., ::-1], 1, axis=-1) * p["s"], _scalar),
    "sorted": Op(lambda p, h, k: jnp.sort(h @ p["w"], axis=-1), _matrix),
    "summed": Op(lambda p, h, k: 0.5 * jnp.cumsum(h, axis=-1)),
    "picked": Op(lambda p, h, k: h + p["w"][jnp.argmax(h, axis=-1)], _matrix),
    "mapped": Op(lambda p, h, k: lax.map(lambda row: _layer(row, p["w"]), h), _matrix),
    "complex": Op(lambda p, h, k: jnp.real(jnp.exp(1j * h) * p["bias"]), lambda w: {"bias": (w,)}),
    "fourier": Op(
        lambda p, h, k: 0.5 * jnp.real(jnp.fft.ifft(jnp.fft.fft(h) * p["bias"])),
        lambda w: {"bias": (w,)},
    ),
    "attend": Op(_attend, _matrix),
    "normalised": Op(_normalised, wants=("state", "training")),
}
# what `first` and `last` may do
OUTER = tuple(name for name, op in OPS.items() if not {"state", "microbatch"} & set(op.wants))
# what passes between slices of a sequence; of models with a time
PASSING: dict[str, Op] = {
    "carried": Op(_carried, lambda w: {"s": (), "bias": (w,)}, wants=("carry",)),
    "appended": Op(_appended, _matrix, wants=("ctx",)),
}
# what draws random numbers for each position of time
POSITIONED: dict[str, Op] = {"by_position": Op(_by_position, wants=("ctx", "training"))}
# what a step replaces
REPLACED: dict[str, Op] = {
    "tracked": Op(
        lambda p, h, k: _observed(h, p["most"]) * (1 + 0.1 * jnp.tanh(p["most"])),
        lambda w: {"most": (w,)},
    )
}
