"""A schedule of your own: write rows, check them, price them, run them, keep them as CSV.

The schedule here works in pairs: a device takes two microbatches forward, then two backward, so
that the weights of a stage are read for two microbatches in a row.  It holds more activations than
1F1B and fewer than GPipe.

python examples/custom_schedule.py        four GPUs, or four virtual devices of the CPU
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jaxpipe as jp
from gpt.devices import find
from jaxpipe import Action, Kind

DEVICES, MICROBATCHES, WIDTH, ROWS = 4, 16, 8, 32


def pairs(devices: int, microbatches: int, group: int = 2) -> jp.Schedule:
    """1F1B with groups of microbatches in the place of single ones."""
    groups = [range(i, min(i + group, microbatches)) for i in range(0, microbatches, group)]
    rows = []
    for stage in range(devices):  # one stage a device
        forward = [[Action(stage, Kind.F, m) for m in members] for members in groups]
        backward = [[Action(stage, Kind.B, m) for m in members] for members in groups]
        ahead = min(devices - stage, len(groups))
        warmup, steady = forward[:ahead], zip(backward, forward[ahead:], strict=False)
        cooldown = backward[len(forward) - ahead :]
        row = [a for part in warmup for a in part]
        row += [a for back, fore in steady for part in (back, fore) for a in part]
        row += [a for part in cooldown for a in part]
        rows.append(row)
    return jp.Schedule.from_rows(rows, name="pairs")


def stage(params: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ params["w"])


def last(params: Any, x: jax.Array, microbatch: Any) -> jax.Array:
    return jnp.mean((x @ params["head"] - microbatch["y"]) ** 2)


def plain_loss(params: Any, batch: Any) -> jax.Array:
    """The same model without a pipeline."""
    x = batch["x"]
    for s in range(DEVICES):
        x = stage({"w": params["stages"]["w"][s]}, x)
    return last(params["last"], x, batch)


def main() -> None:
    # Check: every broken rule is found at once, before anything is compiled.
    schedule = jp.check(pairs(DEVICES, MICROBATCHES))
    print(schedule)

    # A mistake is named with its cell: here two actions of device 1 stand in an order that can
    # never run.
    rows = [list(row) for row in schedule.rows]
    rows[1][0], rows[1][-1] = rows[1][-1], rows[1][0]
    try:
        jp.check(jp.Schedule.from_rows(rows))
    except jp.ScheduleError as error:
        print(
            f"\na broken table: {len(error.violations)} violations, "
            f"the first: {error.violations[0]}\n"
        )
    else:
        raise AssertionError("a backward before its forward was not found")

    # Price: a backward costs two forwards.
    print("schedule   makespan   bubble   peak activations by device")
    priced = {}
    for table in (
        schedule,
        *(
            jp.schedules.build(name, devices=DEVICES, microbatches=MICROBATCHES)
            for name in ("gpipe", "1f1b")
        ),
    ):
        timeline = priced[table.name] = jp.simulate(
            table, jp.Costs(forward=1, input_grad=1, weight_grad=1, transfer=0)
        )
        print(
            f"{table.name:8}   {timeline.makespan:8}   {timeline.bubble:6.1%}   "
            f"{timeline.peak_activations}"
        )
    peaks = {name: max(timeline.peak_activations) for name, timeline in priced.items()}
    assert peaks["1f1b"] < peaks["pairs"] < peaks["gpipe"]

    # Keep: torch.distributed.pipelining reads the same file.
    assert jp.Schedule.from_csv(schedule.to_csv()).rows == schedule.rows

    # Run: no code but the table is new, and the gradients are those of the model without a
    # pipeline.
    mesh = jax.make_mesh((DEVICES,), ("pipe",), devices=find(DEVICES))
    pipe = jp.Pipeline(jp.Model(stage, last=last), schedule, mesh)
    keys = jax.random.split(jax.random.key(0), 4)
    canonical = {
        "stages": {"w": jax.random.normal(keys[0], (DEVICES, WIDTH, WIDTH)) / WIDTH**0.5},
        "last": {"head": jax.random.normal(keys[1], (WIDTH, 1))},
    }
    batch = {
        "x": jax.random.normal(keys[2], (ROWS, WIDTH)),
        "y": jax.random.normal(keys[3], (ROWS, 1)),
    }
    loss, grads = pipe.value_and_grad(pipe.place(canonical), batch)
    plain, plain_grads = jax.value_and_grad(plain_loss)(canonical, batch)
    found = pipe.canonical(grads)
    errors = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), {k: found[k] for k in plain_grads}, plain_grads
    )
    worst = max(jax.tree.leaves(errors))
    print(
        f"\nloss {float(loss):.6f}, without a pipeline {float(plain):.6f}; "
        f"gradients are at most {worst:.1e} apart"
    )
    assert abs(loss - plain) < 1e-5
    assert worst < 1e-5  # float32, summed in another order


if __name__ == "__main__":
    main()
