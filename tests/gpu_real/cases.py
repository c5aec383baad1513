"""What is run: a job is a number of processes and its cases."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxpipe as jp
from tests.flat import is_defined

from .model import LAYERS, NAMES, ROWS, model


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule, and what else is chosen."""

    schedule: str = "1f1b"
    microbatches: int = 8
    chunks: int | None = None
    slices: int = 1
    spread: bool = False
    offload: str | None = None
    axes: dict[str, int] = field(default_factory=dict)  # beside "pipe"
    count: int = 20  # runs

    def __str__(self) -> str:
        told = [self.schedule, *(f"{name} {size}" for name, size in self.axes.items())]
        told += [f"{self.slices} slices"] * (self.slices > 1) + ["spread ends"] * self.spread
        return ", ".join(told + ["offload"] * bool(self.offload))

    @property
    def rows(self) -> int:
        """Of a batch."""
        return ROWS * self.axes.get("data", 1) * self.microbatches // self.slices

    def layers(self, stages: int) -> int:
        """Of all stages: one each where a stage is given slices."""
        return stages if self.slices > 1 else max(LAYERS, stages)

    def pipeline(self) -> jp.Pipeline:
        """On all devices of the job."""
        shape = {"pipe": len(jax.devices()) // int(np.prod([*self.axes.values()])), **self.axes}
        schedule = jp.schedules.build(
            self.schedule,
            devices=shape["pipe"],
            microbatches=self.microbatches,
            chunks=self.chunks,
            slices=self.slices,
        )
        if self.spread:
            schedule = jp.spread_last(jp.spread_first(schedule))
        columns = dict.fromkeys(NAMES, PartitionSpec(None, None, "tensor"))
        rows = dict.fromkeys(("o", "down"), PartitionSpec(None, "tensor"))
        sharding = jp.Sharding(
            data="data" if "data" in self.axes else (),
            specs={"stages": columns | rows} if "tensor" in self.axes else None,
        )
        return jp.Pipeline(
            model(spread=self.spread, sliced=self.slices > 1),
            schedule,
            Mesh(np.array(jax.devices()).reshape(*shape.values()), tuple(shape)),
            sharding=sharding,
            memory=jp.Memory(offload=self.offload),
        )


def named(devices: int) -> tuple[Case, ...]:
    """Every schedule of the catalogue."""
    found = [name for name in jp.schedules.names() if is_defined(name, devices)]
    return tuple(Case(schedule=name) for name in found)


FIVE = ("1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev")
# Job -> processes, which are devices, and cases.
JOBS: dict[str, tuple[int, tuple[Case, ...]]] = {
    "1f1b": (2, (Case(count=4),)),
    "schedules": (2, named(2)),
    "four devices": (4, tuple(Case(schedule=name) for name in FIVE)),
    "spread ends": (2, tuple(Case(schedule=name, spread=True) for name in ("1f1b", "zb_h1"))),
    "slices": (2, tuple(Case(schedule=name, slices=2) for name in ("1f1b", "zbv"))),
    "offload": (
        2,
        tuple(Case(schedule=s, offload="residuals") for s in ("gpipe", "interleaved_1f1b")),
    ),
    "axes": (4, (Case(axes={"data": 2}), Case(axes={"tensor": 2}, schedule="zb_h1"))),
    "one device": (
        1,
        (Case(count=200), Case(schedule="interleaved_1f1b", chunks=4, count=200)),
    ),
}
