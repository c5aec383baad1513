"""What a device keeps for parameters, gradients and Adam where layers are of several kinds: shared
buffers, or an array for each parameter.

python -m benchmarks.room_for_kinds        prints the table of docs/unlike_stages.md
"""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe.storage.table import BufferKey

COLUMNS, ROWS = PartitionSpec(None, "tensor"), PartitionSpec("tensor")
ATTENTION, FEED = (
    {"q": COLUMNS, "k": COLUMNS, "v": COLUMNS, "out": ROWS},
    {"up": COLUMNS, "down": ROWS},
)
TENSOR = {
    "stages": {
        "e": {"attention": ATTENTION, "feed": FEED},
        "d": {"attention": ATTENTION, "cross": ATTENTION, "feed": FEED},
    }
}
# Of each row: example, schedule, devices of the pipe axis, microbatches, devices of the tensor
# axis, options.
EXAMPLES: tuple[tuple[str, str, int, int, int, dict[str, Any]], ...] = (
    ("encoder_decoder", "1f1b", 4, 8, 1, {}),
    ("encoder_decoder", "1f1b", 4, 8, 2, {"specs": TENSOR}),
    ("multi_token_prediction", "1f1b", 2, 4, 1, {"stage_loss": True}),
    ("vision_language", "zb_h1", 4, 8, 1, {}),
)


def held(
    name: str,
    schedule: str,
    devices: int,
    microbatches: int,
    tensor: int,
    options: Any,
    *,
    shares: bool,
) -> dict[str, int]:
    """Bytes of one device: of stages, and of the whole training step by XLA's count."""
    example = importlib.import_module(name)
    table = jp.schedules.build(schedule, devices=devices, microbatches=microbatches)
    mesh = jax.make_mesh(
        (devices, tensor), ("pipe", "tensor"), devices=jax.devices()[: devices * tensor]
    )
    model = jp.Model(example.LAYERS, layers=example.LAYOUT)
    pipe = jp.Pipeline(model, table, mesh, layout=example.LAYOUT, **options)
    if not shares:
        pipe.partition.__dict__["kept"] = lambda _parameter, _dtype: BufferKey()
    params = pipe.place(example.initial(jax.random.key(0), example.LAYOUT.replace("|", "")[1:-1]))
    optimizer = optax.adam(1e-3)
    state = pipe.init(optimizer, params)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = pipe.value_and_grad(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    memory = (
        pipe.jit(step, donate_argnums=(0, 1))
        .lower(params, state, example.rows(0))
        .compile()
        .memory_analysis()
    )
    own = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(params["stages"])
    )
    return {
        "stages": own,
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }


def main() -> None:
    """Print the table."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    jax.config.update("jax_num_cpu_devices", 8)
    print(
        "| example | parameters of stages | with gradients and Adam | the step's arguments | its "
        "temporary memory |"
    )
    print("|---|---|---|---|---|")
    for example in EXAMPLES:
        before, after = held(*example, shares=False), held(*example, shares=True)
        cells = [
            f"{before['stages']:,} -> {after['stages']:,}",
            f"{4 * before['stages']:,} -> {4 * after['stages']:,}",
        ]
        cells += [f"{before[key]:,} -> {after[key]:,}" for key in ("arguments", "temporary")]
        name, *_, tensor, _ = example
        print(
            f"| `{name}.py`{f', tensor axis of {tensor}' if tensor > 1 else ''} | "
            f"{' | '.join(cells)} |"
        )


if __name__ == "__main__":
    main()
