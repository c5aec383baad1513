"""A mixture of experts over data x pipe x tensor parallelism, checked against the same model on one
device.

Experts are spread over the "tensor" axis (`specs`); each stage adds a load-balancing loss of its
own (`stage_loss`).

python examples/moe_dp_pp_tp.py        eight GPUs, or eight virtual devices of the CPU
"""

from __future__ import annotations

from functools import partial

import jax
from jax.sharding import AxisType, PartitionSpec

import jaxpipe as jp
from gpt.devices import find
from parts.experts import dense_stage, first, initial, last, plain_loss, sequences
from parts.training import compare_and_train

PIPE, DATA, TENSOR, MICROBATCHES, ROWS, STEPS = 2, 2, 2, 4, 16, 40

# Without the stage axis; what is not named is whole.  The partitioner sees that experts are split:
# each tensor device computes its own, and one sum brings them together.
SPECS = {"stages": {"up": PartitionSpec("tensor"), "down": PartitionSpec("tensor")}}


def main() -> None:
    devices = find(PIPE * DATA * TENSOR)
    jax.config.update("jax_enable_x64", True)  # for the comparison
    schedule = jp.schedules.build("1f1b", devices=PIPE, microbatches=MICROBATCHES)
    # Pipe first and tensor last: neighbours along the last axis are closest together.  Automatic
    # axes are what the partitioner handles.
    mesh = jax.make_mesh(
        (PIPE, DATA, TENSOR),
        ("pipe", "data", "tensor"),
        devices=devices,
        axis_types=(AxisType.Auto,) * 3,
    )
    pipe = jp.Pipeline(
        jp.Model(dense_stage, first=first, last=last, stage_loss=True),
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
