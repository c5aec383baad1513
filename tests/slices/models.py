"""Models that run slice by slice: a recurrent net, a state-space block, and attention."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp

ROWS, TIME, WIDTH, HEADS, KV_HEADS = 2, 8, 8, 4, 2
SIZE = WIDTH // HEADS


def recurrent(params, x, *, carry):
    """A tanh cell, scanned over time, whose carry is a pair."""

    def step(state, now):
        h, total = state
        h = jnp.tanh(now @ params["w"] + h @ params["u"] + 0.1 * total)
        return (h, 0.9 * total + h), h

    carry, states = jax.lax.scan(step, carry, jnp.swapaxes(x, 0, 1))
    return x + jnp.swapaxes(states, 0, 1), carry


def first_state(params, x):
    """A learned first state, which depends on x too."""
    h = jnp.broadcast_to(jnp.tanh(params["begin"]), x[:, 0].shape)
    return h, jnp.zeros_like(h)


def state_space(params, x, *, carry):
    """A diagonal state-space block after a short causal convolution: the carry holds the state and
    the tail of the convolution.
    """
    tail, state = carry["tail"], carry["state"]
    wide = jnp.concatenate([tail, x], axis=1)
    length = x.shape[1]
    mixed = sum(wide[:, i : i + length] * params["taps"][i] for i in range(3))
    decay = jax.nn.sigmoid(mixed @ params["decay"])

    def step(state, now):
        a, b = now
        state = a * state + (1 - a) * b
        return state, state

    moved = jnp.swapaxes(decay, 0, 1), jnp.swapaxes(mixed @ params["in"], 0, 1)
    state, states = jax.lax.scan(step, state, moved)
    y = jnp.swapaxes(states, 0, 1) @ params["out"]
    return x + y, {"tail": wide[:, length:], "state": state}


def nothing_before(_params, x):
    """Zeros for `state_space`."""
    return {"tail": jnp.zeros((x.shape[0], 2, WIDTH)), "state": jnp.zeros((x.shape[0], WIDTH))}


def rotated(h, at):
    """Rotary positions of h [rows, time, heads, size]."""
    angle = at[..., None, None] * 10.0 ** -jnp.arange(h.shape[-1] // 2)
    one, two = jnp.split(h, 2, axis=-1)
    return jnp.concatenate(
        [one * jnp.cos(angle) - two * jnp.sin(angle), one * jnp.sin(angle) + two * jnp.cos(angle)],
        axis=-1,
    )


def attention(params, x, *, ctx):
    """Grouped queries, rotary positions, packed documents: x holds the number of each document."""
    h, document = x["h"], x["document"]
    at = ctx.offset + jnp.arange(h.shape[1])

    def split(name, heads):
        return (h @ params[name]).reshape(*h.shape[:2], heads, SIZE)

    query = rotated(split("q", HEADS), at).reshape(*h.shape[:2], KV_HEADS, -1, SIZE)
    keys = ctx.append("keys", rotated(split("k", KV_HEADS), at))
    values = ctx.append("values", split("v", KV_HEADS))
    documents = ctx.append("documents", document)
    seen = (at[:, None] >= jnp.arange(keys.shape[1])) & (
        document[:, :, None] == documents[:, None, :]
    )
    scores = jnp.einsum("rtgqs,rugs->rgqtu", query, keys) / SIZE**0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30))
    mixed = jnp.einsum("rgqtu,rugs->rtgqs", weights, values).reshape(h.shape)
    h = h + mixed @ params["o"]
    return {**x, "h": h + jnp.tanh(h @ params["up"]) @ params["down"]}


def embed(params, microbatch):
    return {"h": microbatch["x"] @ params, "document": microbatch["document"]}


def loss(params, x, microbatch):
    h = x["h"] if isinstance(x, dict) else x
    return jnp.mean((h @ params - microbatch["y"]) ** 2)


TIMED = ("x", "y", "document")
MODELS = {
    "recurrent": (
        jp.Model(recurrent, last=loss, time=TIMED[:2], carry=first_state),
        {"w": (WIDTH, WIDTH), "u": (WIDTH, WIDTH), "begin": (WIDTH,)},
    ),
    "state_space": (
        jp.Model(state_space, last=loss, time=TIMED[:2], carry=nothing_before),
        {"taps": (3, WIDTH), **dict.fromkeys(("decay", "in", "out"), (WIDTH, WIDTH))},
    ),
    "attention": (
        jp.Model(attention, first=embed, last=loss, time=TIMED),
        {
            **dict.fromkeys(("q", "o", "up", "down"), (WIDTH, WIDTH)),
            **dict.fromkeys(("k", "v"), (WIDTH, KV_HEADS * SIZE)),
        },
    ),
}


def data(name, stages, sequences, *, rows=ROWS):
    """Canonical parameters and a batch."""
    rng = np.random.default_rng(0)
    model, shapes = MODELS[name]
    params = {
        "stages": {
            key: rng.standard_normal((stages, *shape)) / WIDTH**0.5 for key, shape in shapes.items()
        },
        "last": rng.standard_normal((WIDTH, 3)),
    }
    count = sequences * rows
    batch = {key: rng.standard_normal((count, TIME, n)) for key, n in (("x", WIDTH), ("y", 3))}
    if name == "attention":
        params["first"] = rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5
        batch["document"] = np.sort(rng.integers(0, 3, (count, TIME)), axis=1)
    return model, params, batch
