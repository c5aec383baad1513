"""One process of `benchmarks.emulated`: a pipeline of stages that only hold their device, timed.

Started with a JSON `Group` as its argument; process 0 prints a line `MARK + JSON` a case.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import jaxpipe as jp
from benchmarks.hold import counts, hold
from jaxpipe.planner.layer_cost import Remat, stage_costs
from jaxpipe.table.kinds import Kind, parts

MARK = "result "
# floats in a row: little to move, but more than the 512 bytes under which XLA:CPU runs a whole loop
# body in sequence
ROW = 1024


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    schedule: str
    devices: int
    chunks: int
    microbatches: int
    layout: str = ""  # the layers of each stage; a stage is one thing where it is empty
    units: tuple[tuple[str, float, float, float], ...] = ()  # letter, F, I and W of each layer
    spread: bool = False  # all devices do their shares of L
    again: bool = False  # layers keep nothing, by a policy of `jax.checkpoint`
    offload: bool = False  # residuals are in the host's memory
    whole: float = 1.0  # a B over its I and W, by which `auto` chooses among them

    def build(self) -> jp.Schedule:
        """Its table."""
        shape = {"microbatches": self.microbatches, "chunks": self.chunks}
        if self.schedule == "auto":
            costs = self.stage_costs(1.0)
            times = zip(costs.input_grad, costs.weight_grad, strict=True)  # type: ignore[arg-type]
            each = tuple(self.whole * (i + w) for i, w in times)
            shape["costs"] = dataclasses.replace(costs, backward=each)
        table = jp.schedules.build(self.schedule, devices=self.devices, **shape)
        return jp.spread_last(table, costs=self.stage_costs(1.0)) if self.spread else table

    def stage_costs(self, unit: float) -> jp.Costs:
        """The holds of its stages, in seconds."""
        layers = {
            c: jp.LayerCost(
                forward=unit * f,
                input_grad=unit * (i + f * (self.again and c not in "EL")),
                weight_grad=unit * w,
            )
            for c, f, i, w in self.units
        }
        if self.spread:
            layers["L"] = layers["L"].share(self.devices)
        layout = jp.parse_layout(self.layout, devices=self.devices, letters="".join(layers))
        return stage_costs(layout, layers, remat=Remat.NONE, transfer=0.0)


@dataclass(frozen=True)
class Group:
    """Processes that run cases together; `unit` is how long F, I and W hold their device, in
    seconds.
    """

    process: int
    processes: int
    port: int
    unit: float
    repeats: int
    cases: tuple[Case, ...]

    @classmethod
    def from_json(cls, text: str) -> Group:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "cases": tuple(_case(case) for case in fields["cases"])})

    def to_json(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))


def _case(fields: dict[str, Any]) -> Case:
    return Case(
        **{
            **fields,
            "units": tuple(
                (str(c), float(f), float(i), float(w)) for c, f, i, w in fields.get("units", ())
            ),
        }
    )


def stage_of(unit: float, *, split: bool) -> Callable[[Any, Any], Any]:
    """A stage whose F holds its device for `unit`, and whose B for twice that: as one call, or as
    two where the table splits it.

    Every gradient depends on a call, so nothing that cuts the backward in two, or drops dead code,
    can lose one.
    """

    @jax.custom_vjp
    def stage(params: Any, x: Any) -> Any:
        return hold(x, unit)

    def forward(params: Any, x: Any) -> tuple[Any, None]:
        return hold(x, unit), None

    def backward(_: None, dy: Any) -> tuple[Any, Any]:
        if not split:
            both = hold(dy, 2 * unit)
            return {"w": jnp.sum(both)[None]}, both
        # Operands differ, lest XLA take the two calls for one.
        return {"w": jnp.sum(hold(dy + 1, unit))[None]}, hold(dy, unit)

    stage.defvjp(forward, backward)
    return lambda params, x: stage(params, x)


def layer_of(
    forward: float, input_grad: float, weight_grad: float, *, split: bool, keeps: bool = False
) -> Callable[[Any, Any], Any]:
    """The same with times of its own; one that `keeps` its result has use for it in its backward,
    by less than rounding.
    """

    @jax.custom_vjp
    def layer(params: Any, x: Any) -> Any:
        return hold(x, forward)

    def run(params: Any, x: Any) -> tuple[Any, Any]:
        y = hold(x, forward)
        return y, y if keeps else None

    def backward(kept: Any, dy: Any) -> tuple[Any, Any]:
        dy = dy + 1e-30 * kept if keeps else dy
        if not split:
            both = hold(dy, input_grad + weight_grad)
            return {"w": jnp.sum(both)[None]}, both
        return {"w": jnp.sum(hold(dy + 1, weight_grad))[None]}, hold(dy, input_grad)

    layer.defvjp(run, backward)
    return lambda params, x: layer(params, x)


def layered(
    case: Case, schedule: jp.Schedule, mesh: Mesh, unit: float, *, split: bool
) -> tuple[jp.Pipeline, Any]:
    """A pipeline of layers that hold their device, and its parameters; the backward of `first` and
    of `last` is in one piece.
    """
    keeps = case.again or case.offload
    parts = {"L": 1 / case.devices} if case.spread else {}
    own = {
        letter: layer_of(
            *(unit * parts.get(letter, 1) * t for t in times),
            split=split and letter not in "EL",
            keeps=keeps and letter not in "EL",
        )
        for letter, *times in case.units
    }
    layers: dict[str, Any] = dict(own)
    if case.again:
        policy = jax.checkpoint_policies.nothing_saveable
        layers = {c: jax.checkpoint(call, policy=policy) for c, call in layers.items()}
    layers["E"] = lambda params, microbatch: own["E"](params, microbatch["x"])
    layers["L"] = lambda params, x, microbatch: jnp.mean(own["L"](params, x))
    if case.spread:
        # Squared, so that gradients differ by microbatch: XLA would move what is held for them out
        # of the loop.
        layers["L"] = jp.spread(
            lambda params, x, microbatch, *, ctx: jnp.mean(own["L"](params, x) ** 2), dims=None
        )
    letters = jp.parse_layout(case.layout, devices=case.devices, letters="".join(own)).layers
    stages = {
        letter: {"w": np.ones((letters.count(letter), 1), np.float32)}
        for letter in own
        if letter not in "EL"
    }
    one = {"w": np.ones(1, np.float32)}
    costs = case.stage_costs(unit or 0.01)
    pipe = jp.Pipeline(
        jp.Model(layers, layers=case.layout),
        schedule,
        mesh,
        layout=case.layout,
        costs=costs,
        memory=jp.Memory(offload="residuals" if case.offload else None),
    )
    return pipe, pipe.place({"first": one, "stages": stages, "last": one})


def step_of(case: Case, unit: float) -> Callable[[], Any]:
    """A function that runs one step and waits for it."""
    schedule = case.build()
    split = any(
        a.kind in (Kind.I, Kind.W) for row in schedule.rows for cell in row for a in parts(cell)
    )
    mesh = Mesh(np.array(jax.devices()[: case.devices]), ("pipe",))
    batch = {"x": np.ones((case.microbatches, ROW), np.float32)}
    if case.layout:
        pipe, params = layered(case, schedule, mesh, unit, split=split)
        return lambda: jax.block_until_ready(pipe.value_and_grad(params, batch))
    model = jp.Model(
        stage_of(unit, split=split),
        # Its gradient needs that of the first stage's input: XLA would drop the call that makes it
        # where nothing does.
        first=lambda params, microbatch: params["w"] * microbatch["x"],
        last=lambda params, x, microbatch: jnp.mean(x),
    )
    pipe = jp.Pipeline(model, schedule, mesh)
    one, stages = np.ones(1, np.float32), np.ones((schedule.num_stages, 1), np.float32)
    params = pipe.place({"first": {"w": one}, "stages": {"w": stages}, "last": {}})
    return lambda: jax.block_until_ready(pipe.value_and_grad(params, batch))


def measure(case: Case, group: Group) -> dict[str, Any]:
    """Step times with holds of a unit and of nothing, taken in turn."""
    steps = {unit: step_of(case, unit) for unit in (group.unit, 0.0)}
    for unit, step in steps.items():
        before = _held()
        step()
        _check_held(case, unit, _held() - before)
    times: dict[float, list[float]] = {unit: [] for unit in steps}
    for _ in range(group.repeats):
        for unit, step in steps.items():
            if group.processes > 1:
                multihost_utils.sync_global_devices("start")
            begin = time.perf_counter()
            step()
            times[unit].append(time.perf_counter() - begin)
    return {
        "case": dataclasses.asdict(case),
        "step": statistics.median(times[group.unit]),
        "steps": times[group.unit],
        "empty": statistics.median(times[0.0]),
    }


def _held() -> float:
    return sum(seconds for _, seconds in counts(jax.local_device_count()))


def _check_held(case: Case, unit: float, held: float) -> None:
    """Every action of this process's devices held its device for its time; a lost call would look
    like speed.
    """
    schedule = case.build()
    mine = [
        d
        for d, device in enumerate(jax.devices()[: case.devices])
        if device.process_index == jax.process_index()
    ]
    actions = [a for d in mine for cell in schedule.rows[d] for a in parts(cell)]
    if case.layout:
        # Both halves of every layer of this process's stages, once a microbatch.
        layout = jp.parse_layout(
            case.layout, devices=case.devices, letters="".join(c for c, *_ in case.units)
        )
        every = {c: sum(times) for c, *times in case.units}
        every |= {c: every[c] + f for c, f, *_ in case.units if case.again and c not in "EL"}
        shares = len(mine) * every["L"] / case.devices if case.spread else 0.0
        each = layout.stage_costs(every | ({"L": 0.0} if case.spread else {}))
        stages = sum(each[s] for d in mine for s in schedule.placement.stages_of[d])
        wanted = unit * case.microbatches * (stages + shares)
    else:
        wanted = unit * sum(2 if a.kind is Kind.B else 1 for a in actions)
    if abs(held - wanted) > 1e-6 + 1e-6 * wanted:
        raise SystemExit(
            f"{case}: devices were held for {held:.6f} s in a step, but the table says "
            f"{wanted:.6f} s"
        )


def _end_with_parent() -> None:
    """Standard input ends when the process that started this one does."""
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    group = Group.from_json(sys.argv[1])
    largest = max(case.devices for case in group.cases)
    jax.config.update("jax_num_cpu_devices", largest // group.processes)
    if group.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{group.port}", group.processes, group.process)
    for case in group.cases:
        result = measure(case, group)
        if group.process == 0:
            print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
