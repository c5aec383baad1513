"""What a program runs on, as far as the search for it must know: the kind of devices, and what
blocks do along other axes of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .overheads import GUESSED, ON_HOST, Overheads
from .prices import measured_prices


class RunsOn(Enum):
    """Kinds of devices."""

    GPUS = "NVIDIA GPUs"
    CPU_PROCESSES = "CPU devices of one process each"
    ONE_CPU_PROCESS = "virtual CPU devices of one process"

    @classmethod
    def of(cls, mesh: Any) -> RunsOn:
        """Those of a `jax.sharding.Mesh`."""
        devices = list(mesh.devices.flat)
        if {device.platform for device in devices} <= {"gpu", "cuda"}:
            return cls.GPUS
        return (
            cls.CPU_PROCESSES
            if len({device.process_index for device in devices}) == len(devices)
            else cls.ONE_CPU_PROCESS
        )


@dataclass(frozen=True)
class Target:
    """What a program runs on; without a mesh, NVIDIA GPUs along a pipe axis alone."""

    runs_on: RunsOn = RunsOn.GPUS
    # blocks hold collectives over other axes (tensor parallelism), which no CUDA graph takes
    communicates: bool = False
    # that were given or measured; guesses where it is None
    prices: Overheads | None = None

    @classmethod
    def of(cls, mesh: Any, own: Sequence[str], overheads: Overheads | None = None) -> Target:
        """Of a `jax.sharding.Mesh`; `own`: the axes over which no block communicates.

        The prices are `overheads`, or those that were measured on such devices.
        """
        communicates = any(size > 1 for name, size in mesh.shape.items() if name not in own)
        kind = str(mesh.devices.flat[0].device_kind)
        prices = overheads or measured_prices(kind, on_host=communicates)
        return cls(RunsOn.of(mesh), communicates, prices)

    @property
    def overheads(self) -> Overheads:
        """What a program takes there besides the stages' work."""
        return self.prices or (ON_HOST if self.communicates else GUESSED)

    @property
    def on_gpus(self) -> bool:
        """Whether the devices are NVIDIA GPUs."""
        return self.runs_on is RunsOn.GPUS
