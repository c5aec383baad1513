"""The step with a head on the last device and on all of them, simulated with costs that were
measured on the devices at hand.

    JAX_PLATFORMS=cpu python -m benchmarks.measured_head -o benchmarks/results/measured_head.txt

Each block of a small language model is compiled alone and timed (`measure_stages`): a stage's F,
I, W and B, the whole head with its gradient, and a device's share of it.  Nothing but blocks of one
device runs at a time, so a spread head's sums over devices are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import jaxpipe as jp
from benchmarks.machine import describe
from benchmarks.output import Command, Result
from jaxpipe.measuring import measure_stages

DEVICES, LAYERS, WIDTH, HIDDEN, TOKENS, VOCABULARY = 4, 2, 256, 1024, 256, 8192
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "zbv")
COLUMNS = (
    "schedule  M  F ms  head ms  share ms  without head  goal  last device  spread  "
    "last / goal  spread / goal"
)


def _stage(params: dict[str, Any], x: Any) -> Any:
    def layer(x: Any, weights: dict[str, Any]) -> tuple[Any, None]:
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None

    return jax.lax.scan(layer, x, params)[0]


def _shapes(*dims: int) -> Any:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def _measured(schedule: jp.Schedule, repeats: int) -> jp.Costs:
    """The costs of a step whose head is spread over the devices of the schedule."""
    count = schedule.num_devices
    mesh = jax.make_mesh((count,), ("pipe",), devices=jax.devices()[:count])
    pipe = jp.Pipeline(
        jp.Model(
            _stage, first=lambda table, microbatch: table[microbatch["tokens"]], last=jp.VocabHead()
        ),
        schedule,
        mesh,
    )
    weights = {
        "up": _shapes(schedule.num_stages, LAYERS, WIDTH, HIDDEN),
        "down": _shapes(schedule.num_stages, LAYERS, HIDDEN, WIDTH),
    }
    params = {
        "first": _shapes(VOCABULARY, WIDTH),
        "stages": weights,
        "last": _shapes(VOCABULARY, WIDTH),
    }
    tokens = jax.ShapeDtypeStruct((schedule.num_microbatches, TOKENS), jnp.int32)
    return measure_stages(
        pipe, pipe.place(params), {"tokens": tokens, "targets": tokens}, repeats=repeats
    )


def _number(cost: Any) -> float:
    """A cost that is one number."""
    assert isinstance(cost, float)
    return cost


def rows(names: Sequence[str], microbatches: int, repeats: int) -> Iterator[Sequence[str]]:
    """A row a schedule."""
    for name in names:
        table = jp.schedules.build(name, devices=DEVICES, microbatches=microbatches)
        apart = _measured(table, repeats)
        head = _number(
            _measured(jp.schedules.build("gpipe", devices=1, microbatches=1), repeats).last
        )
        forward = list(apart.for_stages(table.num_stages).forward)
        on_last = replace(apart, forward=[*forward[:-1], forward[-1] + head])
        bare = float(jp.simulate(table, apart).makespan)
        goal = bare + microbatches * head / DEVICES
        steps = [
            float(jp.simulate(table, on_last).makespan),
            float(jp.simulate(jp.spread_last(table, costs=apart), apart).makespan),
        ]
        times = [f"{1e3 * t:.2f}" for t in (forward[1], head, _number(apart.last))]
        yield (
            name,
            str(microbatches),
            *times,
            *(f"{t:.4f}" for t in (bare, goal, *steps)),
            *(f"{t / goal:.3f}" for t in steps),
        )


NOTES = (
    f"{DEVICES} devices; a stage: {LAYERS} layers of width {WIDTH}, hidden {HIDDEN}; {TOKENS} "
    f"tokens a microbatch of {VOCABULARY} in all.",
    "F: of the second stage; head: of the logits, the loss and both gradients, on one device; "
    "share: of a device, where they are spread.",
    "without head, goal, last device, spread: seconds of the simulated step; goal: without a "
    "head plus 1/P of the head's time.",
)


def main() -> None:
    """Print the table."""
    parser = Command(__doc__)
    parser.option("--schedules", SCHEDULES, "NAME")
    parser.option("--microbatches", 16, "M")
    parser.option("--repeats", 15, "N")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    title = "A head on the last device and on all, simulated with measured costs"
    found = rows(args.schedules, args.microbatches, args.repeats)
    Result(title, describe(), COLUMNS, list(found), NOTES).write(args.output)


if __name__ == "__main__":
    main()
