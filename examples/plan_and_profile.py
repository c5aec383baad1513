"""From what layers cost to a running step: measure, plan, run, and see where the time went.

    python examples/plan_and_profile.py        four GPUs, or four virtual devices of the CPU

The model is README's, its blocks as layers.  Virtual devices share the cores of the CPU, so that
the step is slower than planned; on devices of their own the two agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp
from gpt.devices import find

DEVICES, MICROBATCHES, ROWS, TIME, WIDTH, VOCAB, LAYERS = 4, 8, 2, 8, 32, 100, 10


def embed(params: Any, microbatch: Any) -> Any:
    """Tokens to vectors."""
    return params["table"][microbatch["tokens"]]


def block(params: Any, x: Any) -> Any:
    """One layer."""
    return x + jnp.tanh(x @ params["w1"]) @ params["w2"]


def head_loss(params: Any, x: Any, microbatch: Any) -> Any:
    """Mean cross-entropy of the next token."""
    logits = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(logits, microbatch["targets"][..., None], axis=-1))


MODEL = jp.Model({"E": embed, "t": block, "L": head_loss}, layers=f"Et*{LAYERS}L")


def parameters() -> Any:
    """Canonical parameters: the leaves of letter "t" have a leading axis of layers."""

    def draw(seed: int, *shape: int) -> Any:
        return 0.1 * jax.random.normal(jax.random.key(seed), shape)

    layers = {"w1": draw(1, LAYERS, WIDTH, 4 * WIDTH), "w2": draw(2, LAYERS, 4 * WIDTH, WIDTH)}
    return {
        "first": {"table": draw(0, VOCAB, WIDTH)},
        "stages": {"t": layers},
        "last": {"head": draw(3, WIDTH, VOCAB)},
    }


def main(devices: Sequence[jax.Device]) -> tuple[jp.planner.Plans, jp.engine.Timeline]:
    """Print each step's result; returns the plans and what ran."""
    params = parameters()
    tokens = jax.random.randint(jax.random.key(4), (MICROBATCHES * ROWS, TIME + 1), 0, VOCAB)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    microbatch = {name: jax.ShapeDtypeStruct((ROWS, TIME), np.int32) for name in batch}

    one = jax.make_mesh((1,), ("pipe",), devices=devices[:1])
    costs = jp.measure(MODEL, params, microbatch, mesh=one, repeats=3)
    for letter, cost in costs.items():
        print(
            f"{letter}: F {cost.forward * 1e6:.0f} us, B {cost.backward_seconds * 1e6:.0f} us, "
            f"parameters {cost.parameters:.0f} bytes"
        )

    mesh = jax.make_mesh((DEVICES,), ("pipe",), devices=devices)
    traced = jp.measuring.traced_memory(MODEL, params, microbatch, mesh=mesh)
    options: dict[str, Any] = {
        "schedules": ("1f1b", "interleaved_1f1b"),
        "chunks": (1, 2),
        "remat": (None,),
        "most": 2,
        "traced": traced,
    }
    plans = jp.plan(MODEL, costs, devices=DEVICES, microbatches=MICROBATCHES, mesh=mesh, **options)
    print(plans)
    print(plans.best.why)

    pipe = plans.best.pipeline(MODEL, mesh)
    placed = pipe.place(params)
    loss, _ = pipe.value_and_grad(placed, batch)
    print(f"loss {loss:.4f}")
    assert abs(loss - MODEL.loss(params, batch)) < 1e-4, (
        "the model without a pipeline; float32 sums in another order"
    )

    ran = jp.inspect.profile(pipe, placed, batch, repeats=1)
    print(ran.over(plans.best.timeline))
    return plans, ran


if __name__ == "__main__":
    main(find(DEVICES))
