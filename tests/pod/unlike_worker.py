"""One of two processes, which build unlike pipelines one after another and then the same one.
COORDINATOR PROCESS
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp
from jaxpipe import fingerprint
from jaxpipe.distributed import make_mesh

# What the second process has otherwise.
UNLIKE = (
    {"schedule": "gpipe"},
    {"microbatches": 4},
    {"layers": 3},
    {"heads": 4},
    {"rows": 16},
    {"version": "0.0.1"},
    {"evaluates": True},
    {},
)


def run(
    *,
    schedule: str = "1f1b",
    microbatches: int = 2,
    layers: int = 2,
    heads: int = 2,
    rows: int = 8,
    version: str = jp.__version__,
    evaluates: bool = False,
) -> float:
    """The loss of a step of a small model; `heads` changes no shape of a parameter."""

    def stage(params: jax.Array, x: jax.Array) -> jax.Array:
        for layer in params:
            parts = (x @ layer).reshape(len(x), heads, -1)
            x = x + jax.nn.softmax(parts).reshape(x.shape)
        return x

    fingerprint.__version__ = version
    pipe = jp.Pipeline(
        jp.Model(stage, last=lambda params, x, microbatch: jnp.mean(x**2)),
        jp.schedules.build(schedule, devices=2, microbatches=microbatches),
        make_mesh({"pipe": 2}),
    )
    params = pipe.place({"stages": np.ones((2, layers, 8, 8), np.float32), "last": {}})
    batch = {"x": np.ones((rows, 8), np.float32)}
    if evaluates:
        return float(pipe.evaluate(params, batch))
    return float(jax.jit(pipe.value_and_grad)(params, batch)[0])


def main(coordinator: str, process: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, process, shutdown_timeout_seconds=20)
    for other in UNLIKE:
        try:
            print("trained", run(**(other if process else {})), flush=True)  # type: ignore[arg-type]
        except jp.PipelineError as error:
            print(f"{other} refused: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
