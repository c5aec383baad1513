"""The target of a program: the kind of devices, whether blocks communicate over other axes of the
mesh, and published numbers of TPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from .prices import GUESSED, ON_HOST, TPU_PREDICATE, Overheads, measured_prices

# Assumed bytes of a transfer: 4096 tokens of width 4096 in bfloat16.
TRANSFER = 2**25


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of device.

    Args:
        name: as people call it.
        kind: `device_kind` of JAX.
        flops: floating point operations a second, of bfloat16 matmuls.
        bandwidth: bytes of memory a second.
        memory: bytes of memory.
        link: bytes a second to a neighbour on the torus, in one direction.
        clock: cycles a second, from `flops` and the multipliers of its matrix units.
    """

    name: str
    kind: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    clock: float

    @property
    def hop(self) -> float:
        """Seconds of a transfer of `TRANSFER` bytes to a neighbour."""
        return TRANSFER / self.link

    @classmethod
    def of(cls, mesh: Any) -> Chip | None:
        """The kind of the devices of a `jax.sharding.Mesh`; None if it is not known, or if there
        are several.
        """
        kinds = {getattr(device, "device_kind", "") for device in mesh.devices.flat}
        return next((chip for chip in CHIPS if {chip.kind} == kinds), None)


# Austin et al., How to Scale Your Model (2025), the table of TPUs.
CHIPS = (
    Chip(
        name="v5e",
        kind="TPU v5 lite",
        flops=1.97e14,
        bandwidth=8.1e11,
        memory=16e9,
        link=4.5e10,
        clock=1.5e9,  # 4 units of 128 x 128
    ),
    Chip(
        name="v5p",
        kind="TPU v5",
        flops=4.59e14,
        bandwidth=2.8e12,
        memory=96e9,
        link=9e10,
        clock=1.75e9,  # 8 units of 128 x 128
    ),
    Chip(
        name="v6e",
        kind="TPU v6 lite",
        flops=9.2e14,
        bandwidth=1.6e12,
        memory=32e9,
        link=9e10,
        clock=1.75e9,  # 4 units of 256 x 256
    ),
)


class Awaits(Enum):
    """Where devices wait for a transfer, and those that wait."""

    LATE = "where it is needed, its two ends"
    AT_ONCE = "where it is issued, its two ends"
    ALL_AT_ONCE = "where it is issued, all devices"


class RunsOn(Enum):
    """Kinds of devices."""

    GPUS = "NVIDIA GPUs"
    TPUS = "TPUs"
    CPU_PROCESSES = "CPU devices of one process each"
    ONE_CPU_PROCESS = "virtual CPU devices of one process"

    @property
    def tile(self) -> tuple[int, ...]:
        """The tiles of memory over the last dims of an array; () where memory keeps rows."""
        return (8, 128) if self is RunsOn.TPUS else ()

    @property
    def awaits(self) -> Awaits:
        """XLA:CPU blocks in a permute, and no block of the device runs meanwhile
        (`spmd.executor`); virtual devices of one process all wait.
        """
        if self is RunsOn.ONE_CPU_PROCESS:
            return Awaits.ALL_AT_ONCE
        return Awaits.AT_ONCE if self is RunsOn.CPU_PROCESSES else Awaits.LATE

    @classmethod
    def of(cls, mesh: Any) -> RunsOn:
        """The kind of the devices of a `jax.sharding.Mesh`."""
        devices = list(mesh.devices.flat)
        platforms = {device.platform for device in devices}
        if platforms <= {"gpu", "cuda"}:
            return cls.GPUS
        if platforms == {"tpu"}:
            return cls.TPUS
        return (
            cls.CPU_PROCESSES
            if len({device.process_index for device in devices}) == len(devices)
            else cls.ONE_CPU_PROCESS
        )


@dataclass(frozen=True)
class Target:
    """The target of a program; the default is NVIDIA GPUs along a pipe axis alone."""

    runs_on: RunsOn = RunsOn.GPUS
    # blocks hold collectives over other axes (tensor parallelism, experts), which no CUDA graph
    # takes
    communicates: bool = False
    chip: Chip | None = None  # where its numbers are known
    # measured; guesses where it is None
    prices: Overheads | None = None

    @classmethod
    def of(cls, mesh: Any, own: Sequence[str]) -> Target:
        """The target of a `jax.sharding.Mesh`; blocks do not communicate over the axes `own`.

        The prices are those measured on such devices.
        """
        communicates = any(size > 1 for name, size in mesh.shape.items() if name not in own)
        target = cls(RunsOn.of(mesh), communicates, Chip.of(mesh))
        return target.measured(str(mesh.devices.flat[0].device_kind))

    def measured(self, kind: str | None) -> Target:
        """The target with the measured prices of a kind of device, if there are any."""
        on_host = self.on_gpus and self.communicates
        return replace(self, prices=measured_prices(kind, self.overheads, on_host=on_host))

    @property
    def overheads(self) -> Overheads:
        """The times of a program besides the stages' work."""
        if self.prices is not None:
            return self.prices
        if self.on_tpus:
            hop = GUESSED.hop if self.chip is None else self.chip.hop
            return Overheads(predicate=TPU_PREDICATE, hop=hop)
        return ON_HOST if self.communicates else GUESSED

    @property
    def platform(self) -> str:
        """JAX's name of the platform."""
        return "cpu" if self.on_cpus else "gpu" if self.on_gpus else "tpu"

    @property
    def tile(self) -> tuple[int, ...]:
        """The tiles of the devices' memory."""
        return self.runs_on.tile

    @property
    def overlaps(self) -> bool:
        """Whether transfers overlap compute and predicates cost time, as on GPUs and TPUs."""
        return self.runs_on.awaits is Awaits.LATE

    @property
    def on_cpus(self) -> bool:
        """Whether the devices are CPUs."""
        return self.runs_on in (RunsOn.CPU_PROCESSES, RunsOn.ONE_CPU_PROCESS)

    @property
    def on_tpus(self) -> bool:
        """Whether the devices are TPUs."""
        return self.runs_on is RunsOn.TPUS

    @property
    def on_gpus(self) -> bool:
        """Whether the devices are NVIDIA GPUs."""
        return self.runs_on is RunsOn.GPUS
