"""A mixture of experts over data x pipe x expert parallelism, tokens sent by an all-to-all of our
own, against plain JAX on one device.

The mesh's third axis holds the experts. Everything around them is left to the partitioner, as for
tensor parallelism (`moe_dp_pp_tp.py`); inside a stage one `shard_map` over that axis sends each
token to the device of its expert and back.

python examples/moe_dp_pp_ep.py        eight GPUs, or eight virtual devices of the CPU
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxpipe as jp
from gpt.devices import find
from parts.experts import (
    CONTEXT,
    EXPERTS,
    WIDTH,
    first,
    initial,
    last,
    mixed,
    plain_loss,
    sequences,
)
from parts.training import compare_and_train

PIPE, DATA, EXPERT, MICROBATCHES, ROWS, STEPS = 2, 2, 2, 4, 32, 40
# Tokens that a device may send to one expert in a microbatch; further ones pass by. Here there is
# room for all.
CAPACITY = ROWS * CONTEXT // (MICROBATCHES * DATA * EXPERT)


def stage(params: Any, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    h, gate, balance = mixed(params, h)
    # Rows are split over the expert axis, as experts are: an axis that the pipeline leaves to the
    # partitioner may be taken by hand.
    split = PartitionSpec("expert")
    routed = jax.shard_map(
        sent_to_experts,
        in_specs=(split, split, split, split),
        out_specs=split,
        axis_names={"expert"},
        check_vma=False,
    )
    return h + routed(params["up"], params["down"], h, gate), balance


def sent_to_experts(up: jax.Array, down: jax.Array, h: jax.Array, gate: jax.Array) -> jax.Array:
    """On one device of the expert axis: its experts [E / devices, ...], its rows."""
    tokens, weights = h.reshape(-1, WIDTH), gate.reshape(-1, EXPERTS)
    chosen = jax.nn.one_hot(jnp.argmax(weights, axis=-1), EXPERTS)
    # of a token in the queue of its expert
    place = jnp.sum((jnp.cumsum(chosen, axis=0) - 1) * chosen, axis=-1)
    # [tokens, E, capacity]; none where the queue is full
    seat = chosen[:, :, None] * jax.nn.one_hot(place, CAPACITY)[:, None]
    there = lax.all_to_all(
        jnp.einsum("nec,nd->ecd", seat, tokens), "expert", split_axis=0, concat_axis=1, tiled=True
    )
    done = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", there, up)), down)
    # [E, capacity, d]
    back = lax.all_to_all(done, "expert", split_axis=1, concat_axis=0, tiled=True)
    return jnp.einsum("nec,ecd,ne->nd", seat, back, weights).reshape(h.shape)


# without the stage axis
SPECS = {"stages": {"up": PartitionSpec("expert"), "down": PartitionSpec("expert")}}


def main() -> None:
    devices = find(PIPE * DATA * EXPERT)
    jax.config.update("jax_enable_x64", True)  # for the comparison
    schedule = jp.schedules.build("1f1b", devices=PIPE, microbatches=MICROBATCHES)
    mesh = jax.make_mesh(
        (PIPE, DATA, EXPERT),
        ("pipe", "data", "expert"),
        devices=devices,
        axis_types=(AxisType.Auto,) * 3,
    )
    pipe = jp.Pipeline(
        jp.Model(stage, first=first, last=last, stage_loss=True),
        schedule,
        mesh,
        sharding=jp.Sharding(data=("data",), specs=SPECS),
    )
    canonical = initial(jax.random.key(0), schedule.num_stages)
    up = pipe.place(canonical)["stages"][0]["up"]
    print("experts' up kernels:", up.sharding.spec, "of", up.shape)
    losses = compare_and_train(
        pipe, plain_loss, canonical, partial(sequences, rows=ROWS), steps=STEPS
    )
    assert losses[-1] < 0.6 * losses[0], "nothing was learned"


if __name__ == "__main__":
    main()
