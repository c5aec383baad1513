"""A head on one device and spread over all, on emulated devices: wall time of a step against that
of the model without a head.

    python -m benchmarks.emulated_head -o benchmarks/results/emulated_head.txt
    python -m benchmarks.emulated_head --schedules 1f1b --heads NOWHERE WHOLE DEFERRED --head 8 \
        -o benchmarks/results/emulated_deferred_head.txt

F, I and W of a stage hold a device for one unit; the head and its gradient hold it for `--head`
units a microbatch, or each of P devices for 1/P of that.  All devices are in one process (see
`benchmarks.emulated`).
"""

from __future__ import annotations

import argparse
import enum
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxpipe as jp
from benchmarks.emulated_worker import ROW, layer_of, stage_of
from benchmarks.hold import counts
from benchmarks.machine import describe
from benchmarks.output import Command, Result, Row, told
from jaxpipe.lowering.plan import plan_of
from jaxpipe.table.kinds import Kind


class Head(enum.Enum):
    """Where it runs."""

    NOWHERE = "none"
    LAST = "last device"
    SPREAD = "spread"
    WHOLE = "spread, B whole"
    DEFERRED = "spread, B whole, H"

    @property
    def on_all(self) -> bool:
        """Whether it is spread."""
        return self not in (Head.NOWHERE, Head.LAST)


def table_of(args: argparse.Namespace, name: str, head: Head) -> tuple[jp.Schedule, jp.Costs]:
    """The table and the costs of its actions, in units; without L the head runs with the last
    stage's F.
    """
    plain = jp.schedules.build(name, devices=args.devices, microbatches=args.microbatches)
    forward = [1.0] * plain.num_stages
    forward[-1] += args.head if head is Head.LAST else 0.0
    costs = jp.Costs(
        forward=forward, input_grad=1.0, weight_grad=1.0, last=args.head / args.devices
    )
    if not head.on_all:
        return plain, costs
    table = jp.spread_last(plain, costs=costs, split=None if head is Head.SPREAD else False)
    return (jp.defer_last(table, costs=costs) if head is Head.DEFERRED else table), costs


def step_of(args: argparse.Namespace, table: jp.Schedule, head: Head) -> Callable[[], Any]:
    """A function that runs one step and waits for it."""
    split = bool(table.encoded.of_kinds((Kind.I, Kind.W)).any())
    share = args.head / (args.devices if head.on_all else 1) * args.unit
    held = layer_of(share / 3, share / 3, share / 3, split=head is Head.DEFERRED)

    def last(params: Any, x: Any, microbatch: Any) -> Any:
        # Squared, so that gradients differ by microbatch: XLA would move what is held for them out
        # of the loop.
        return jnp.mean((x if head is Head.NOWHERE else held(params, x)) ** 2)

    def first(params: Any, microbatch: Any) -> Any:
        # so that somebody needs the gradient of the first stage's input
        return microbatch["x"] * params["w"]

    def spread(params: Any, x: Any, microbatch: Any, *, ctx: jp.Context) -> Any:
        return last(params, x, microbatch)

    mesh = Mesh(np.array(jax.devices()[: args.devices]), ("pipe",))
    function = jp.spread(spread, dims=None) if head.on_all else last
    pipe = jp.Pipeline(
        jp.Model(stage_of(args.unit, split=split), first=first, last=function), table, mesh
    )
    one = {"w": np.ones(1, np.float32)}
    own = {} if head is Head.NOWHERE else one
    params = pipe.place(
        {"first": one, "stages": {"w": np.ones((table.num_stages, 1), np.float32)}, "last": own}
    )
    batch = {"x": np.ones((args.microbatches, ROW), np.float32)}
    return lambda: jax.block_until_ready(pipe.value_and_grad(params, batch))


def measure(args: argparse.Namespace, name: str, head: Head) -> tuple[float, float, float]:
    """Median seconds of a step, the makespan of its table, and that of its program over the
    table's.
    """
    table, costs = table_of(args, name, head)
    step = step_of(args, table, head)
    before = _held(args)
    step()
    wanted = (
        args.unit
        * args.microbatches
        * (3 * args.devices + (args.head if head is not Head.NOWHERE else 0))
    )
    held = _held(args) - before
    if abs(held - wanted) > 1e-4 * wanted:
        raise SystemExit(
            f"{name}, head {head.value}: devices were held for {held:.4f} s in a step, not for "
            f"{wanted:.4f} s"
        )
    times = []
    for _ in range(args.repeats):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    ideal = float(jp.simulate(table, costs).makespan)
    return (
        statistics.median(times),
        args.unit * ideal,
        plan_of(table).makespan / float(jp.simulate(table).makespan),
    )


def _held(args: argparse.Namespace) -> float:
    return sum(seconds for _, seconds in counts(args.devices))


COLUMNS = "schedule  head  wall s  ideal s  wall/ideal  wall/(none + 1/P)  program/table"
NOTES = (
    "ideal: the makespan of the table.  none + 1/P: that of the table without a head, and 1/P of "
    "the head's time for each microbatch,",
    "which every device does; below 1 where split backwards shorten the spread step.  "
    "program/table: simulated, with L as long as F.",
    "B whole: backwards in one piece; H: the weight gradient of a share as an action of its own, "
    "where a device waits.",
    "In one process of CPU devices every transfer holds up all of them, which costs tables in "
    "which neighbours do F and B in turn.",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.option("--schedules", ["1f1b", "zb_h1", "gpipe"], "NAME")
    parser.option("--devices", 4, "P")
    parser.option("--microbatches", 16, "M")
    parser.option("--head", 2.0, "UNITS", "of the head and its gradient, a microbatch (2)")
    parser.option("--unit", 0.02, "SECONDS", "of F, I and W (0.02)")
    parser.option("--repeats", 3, "N")
    parser.option("--heads", ["NOWHERE", "LAST", "SPREAD"], "WHERE", choices=[h.name for h in Head])
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", args.devices)
    rows = told(_rows(args))
    sizes = (
        f"P = {args.devices}, M = {args.microbatches}; F, I, W = {args.unit * 1e3:g} ms, "
        f"head {args.head:g} of that a microbatch"
    )
    title = f"Emulated devices, a head on one of them and on all ({sizes})"
    Result(title, describe(), COLUMNS, rows, NOTES).write(args.output)


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    for name in args.schedules:
        bare = 0.0
        for head in (Head[name] for name in args.heads):
            wall, ideal, program = measure(args, name, head)
            bare = ideal if head is Head.NOWHERE else bare
            of_head = 0 if head is Head.NOWHERE else args.microbatches * args.head * args.unit
            least = bare + of_head / args.devices
            numbers = (wall, ideal, wall / ideal, wall / least, program)
            yield (name, head.value, *(f"{number:.3f}" for number in numbers))


if __name__ == "__main__":
    main()
