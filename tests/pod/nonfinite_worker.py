"""One of two processes, each a data shard: both look for the NaN that stands in the second one's
rows.  COORDINATOR PROCESS
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp
from jaxpipe.debug import find_nonfinite
from jaxpipe.distributed import global_batch, local_rows, make_mesh


def main(coordinator: str, process: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, process, shutdown_timeout_seconds=20)
    pipe = jp.Pipeline(
        jp.Model(
            lambda params, x: jnp.tanh(x * params),
            last=lambda params, x, microbatch: jnp.mean(jnp.log(x + 2)),
        ),
        jp.schedules.build("1f1b", devices=2, microbatches=4),
        make_mesh({"data": 2, "pipe": 2}),
        sharding=jp.Sharding(data=("data",)),
    )
    params = pipe.place({"stages": np.ones((2, 3), np.float32), "last": {}})
    rows = local_rows(pipe, 16)
    x = np.where(rows[:, None] == 12, np.nan, np.ones((len(rows), 3))).astype(np.float32)
    print(
        "rows",
        rows.tolist(),
        "answer",
        find_nonfinite(pipe, params, global_batch(pipe, {"x": x}, rows=16)),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
