"""One rank's program of a pipeline over P devices on one GPU: python -m tests.gpu_real.one_rank
SETTINGS

SETTINGS is JSON: "schedule", "pipe" and "rank".  XLA mocks the other ranks and NCCL
(`jax_mock_gpu_topology`), so that a rank waits for nobody.  What would arrive is zeros: numbers say
nothing, but the program must compile and end, twice with the same bits of the loss.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import numpy as np
from jax._src import mesh as jax_mesh, xla_bridge
from jax.sharding import NamedSharding, PartitionSpec

from . import MARK
from .cases import Case
from .model import batch, weights


def mock(pipe: int, rank: int) -> None:
    """Let JAX take this process for one of so many.  This comes before anything else uses it."""
    jax.config.update("jax_mock_gpu_topology", f"1x{pipe}x1")
    options = xla_bridge._options_from_jax_configs

    def own(name: str) -> Any:
        return options(name) | ({"node_id": rank} if name == "cuda" else {})

    xla_bridge._options_from_jax_configs = own
    # It would ask a device of another process for its properties.
    jax_mesh.abstract_device_from = lambda device: None


def zeros(placed: Any) -> Any:
    """Arrays of these shapes and shardings, made where they are."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, placed)
    make = jax.jit(
        lambda: jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), placed),
        out_shardings=shardings,
    )
    return make()


def main(text: str) -> None:
    settings = json.loads(text)
    mock(settings["pipe"], settings["rank"])
    jax.config.update("jax_enable_x64", True)
    case = Case(schedule=settings["schedule"])
    begin = time.monotonic()
    pipe = case.pipeline()
    stages = pipe.schedule.num_stages
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        weights(stages, case.layers(stages)),
    )
    params = zeros(pipe.place(shapes))
    everywhere = NamedSharding(pipe.mesh, PartitionSpec())
    rows = {
        name: jax.make_array_from_process_local_data(everywhere, leaf, leaf.shape)
        for name, leaf in batch(case.rows, 1).items()
    }
    step = pipe.lower(params, rows).compile()
    losses = [np.asarray(step(params, rows)[0].addressable_data(0)) for _ in range(2)]
    other = int(losses[0].tobytes() != losses[1].tobytes())
    told = {"case": f"{case}, rank {settings['rank']} of {settings['pipe']}", "loss": 0.0}
    told |= {"kind": jax.local_devices()[0].device_kind, "other bits": [other]}
    print(MARK + json.dumps(told | {"seconds": time.monotonic() - begin}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
