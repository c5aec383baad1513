"""LoRA and QLoRA on a pipeline: frozen weights, in float32 or in 8 bits, and trained updates of low
rank; equal to plain JAX.

Frozen parameters have no gradient, no accumulator and no optimizer state, and W, the weight
gradient, computes the updates' alone. Run: python examples/lora.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe as jp
from gpt.devices import find

DEVICES, LAYERS, MICROBATCHES, ROWS, WIDTH, RANK, STEPS = 4, 6, 8, 64, 64, 4, 20


def first(params: Any, microbatch: Any) -> Any:
    return microbatch["x"] @ params["embed"]


def layer(params: Any, x: Any) -> Any:
    """A layer whose weight is `base`, with a scale for each column where it has 8 bits, plus a
    @ b.
    """
    weight = (
        params["base"]
        if "scale" not in params
        else params["base"].astype(x.dtype) * params["scale"]
    )
    return x + jnp.tanh(x @ weight + (x @ params["a"]) @ params["b"])


def stage(params: Any, x: Any) -> Any:
    """Layers one by one: of weights of 8 bits, those of one layer are in float32 at a time."""
    return jax.lax.scan(lambda x, own: (layer(own, x), None), x, params)[0]


def last(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean((x @ params["head"] - microbatch["y"]) ** 2)


def quantised(base: Any) -> dict[str, Any]:
    """Eight bits, and a scale for each column: absmax quantisation (Dettmers et al. 2022, section
    2).
    """
    scale = np.abs(base).max(axis=-2, keepdims=True) / 127
    return {
        "base": np.round(base / scale).astype(np.int8),
        "scale": scale[..., 0, :].astype(np.float32),
    }


def plain_loss(trained: Any, fixed: Any, rows: Any) -> Any:
    """The same model without a pipeline."""
    model = jp.Model(stage, first=first, last=last)
    return model.loss({**fixed, "stages": {**fixed["stages"], **trained["stages"]}}, rows)


def bytes_of(tree: Any) -> int:
    """What a device holds of a tree."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def train(name: str, weights: Any, frozen: Any, rows: Any, mesh: Any) -> Any:
    """Train; prints losses and bytes, and returns (losses, bytes of parameters, of optimizer state
    and of the whole step).
    """
    schedule = jp.schedules.build("zb_h1", devices=DEVICES, microbatches=MICROBATCHES)
    pipe = jp.Pipeline(jp.Model(stage, first=first, last=last, frozen=frozen), schedule, mesh)
    optimizer = optax.adam(1e-2)
    params = pipe.place(weights)
    opt_state = pipe.init(optimizer, params)

    def step(params: Any, opt_state: Any) -> Any:
        loss, grads = pipe.value_and_grad(params, rows)  # None in the place of frozen parameters
        trained = pipe.trained(params)
        updates, opt_state = optimizer.update(grads, opt_state, trained)
        return pipe.with_trained(params, optax.apply_updates(trained, updates)), opt_state, loss

    step = pipe.jit(step, donate_argnums=(0, 1)).lower(params, opt_state).compile()
    memory = step.memory_analysis()  # of one device, as XLA counts it
    held = (
        bytes_of(params),
        bytes_of(opt_state),
        memory.argument_size_in_bytes + memory.temp_size_in_bytes,
    )
    losses = []
    for _ in range(STEPS):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    print(
        f"{name:6} loss {losses[0]:.4f} -> {losses[-1]:.4f}; a device holds {held[0]:6} bytes of "
        f"parameters, {held[1]:6} of optimizer "
        f"state, {held[2]:7} in the whole step"
    )
    return losses, held


def main() -> None:
    mesh = jax.make_mesh((DEVICES,), ("pipe",), devices=find(DEVICES))
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return (rng.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    outer = {"first": {"embed": draw(8, WIDTH)}, "last": {"head": draw(WIDTH, 2)}}
    base = draw(DEVICES, LAYERS, WIDTH, WIDTH)
    lora = {
        "a": draw(DEVICES, LAYERS, WIDTH, RANK),
        "b": np.zeros((DEVICES, LAYERS, RANK, WIDTH), np.float32),
    }
    rows = {"x": draw(ROWS, 8), "y": draw(ROWS, 2)}
    # regular expressions of paths; a function of path and shape will do too
    frozen = ("first", "last", "base|scale")

    whole = train("all", {**outer, "stages": {"base": base, **lora}}, None, rows, mesh)
    thin = train("LoRA", {**outer, "stages": {"base": base, **lora}}, frozen, rows, mesh)
    small = train("QLoRA", {**outer, "stages": {**quantised(base), **lora}}, frozen, rows, mesh)
    for (losses, _), own in ((thin, {"base": base}), (small, quantised(base))):
        fixed, trained = {**outer, "stages": own}, {"stages": lora}
        optimizer = optax.adam(1e-2)
        state = optimizer.init(trained)
        update = jax.jit(jax.value_and_grad(plain_loss))
        for found in losses:
            loss, grads = update(trained, fixed, rows)
            assert abs(float(loss) - found) < 1e-4 * found, (float(loss), found)
            updates, state = optimizer.update(grads, state)
            trained = optax.apply_updates(trained, updates)
    assert thin[1][1] < whole[1][1] / 5
    assert small[1][0] < thin[1][0] / 2
    assert small[1][2] < thin[1][2] - (thin[1][0] - small[1][0]) / 2, (
        "the step does not keep weights in float32"
    )
    assert thin[1][2] < whole[1][2]
    print("the losses of plain JAX in every step")


if __name__ == "__main__":
    main()
