"""The target of a program: the kind of devices, whether blocks communicate over other axes of the
mesh, published numbers of TPUs, and prices in seconds: of what a program does besides the stages'
work, three numbers that can be measured on the user's machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from ..engine.costs import Costs

# Assumed seconds of every action: one layer of a model of some billion parameters.
_FEW = 5e-3
ASSUMED = Costs(_FEW, _FEW, _FEW, last=_FEW, first=_FEW, first_grad=_FEW, unit="seconds, assumed")
# Where blocks communicate, a third of a forward: a pair hides that of both its halves.
COMMUNICATING = replace(ASSUMED, overlap=3 * _FEW - 2 * _FEW / 3)
GUESSES = "guessed; `jaxpipe doctor` measures them"
TIMES = ("predicate", "hop", "sent")  # of `Overheads`


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Times in seconds.

    The defaults are guesses.  `MEASURED` has what was measured, by kind of device, and `jaxpipe
    doctor` measures them on the user's machine.

    Args:
        predicate: the time of a block's predicate, true or false.  As a node of a
            CUDA graph it takes about as long as some kernel launches; on the host (`ON_HOST`) it
            takes a copy of the flag and a wait.
        hop: the time of a transfer that a device waits for: 32 MiB over one direction of NVLink on
            an H100.
        sent: the compute time that a block loses to a transfer that runs during it: memory
            bandwidth, and processors that copy.
        source: where the times come from.
    """

    predicate: float = 3e-6
    hop: float = 100e-6
    sent: float = 15e-6
    source: str = field(default=GUESSES, compare=False)

    def __str__(self) -> str:
        times = ", ".join(f"{name} {getattr(self, name) * 1e6:.3g} us" for name in TIMES)
        return f"{times} ({self.source})"

    @property
    def collective(self) -> float:
        """Time of a predicate around a collective action.  It is in no CUDA graph, and no block
        runs during it.
        """
        return self.predicate + self.hop


GUESSED = Overheads()
# Blocks that hold collectives (tensor parallelism) are in no CUDA graph, so the host decides.
ON_HOST = Overheads(predicate=15e-6)
NO_OVERHEADS = Overheads(predicate=0.0, hop=0.0, sent=0.0)


class Worth(NamedTuple):
    """Seconds by which a step may be longer for another gain.  They grow with the step: of the same
    seconds for any, code would grow with the number of microbatches.
    """

    block: float  # for a compiled block of stage code less
    permute: float  # for a compiled permute less
    nothing: float  # for none: programs are as good

    @classmethod
    def of(cls, step: float) -> Worth:
        """For a step of so many seconds."""
        return cls(block=1e-3 * step, permute=5e-5 * step, nothing=5e-3 * step)


# The price of a predicate that the host decides.  The other prices have the names of `Overheads`.
ON_THE_HOST = "predicate_on_host"
NAMES = (*TIMES, ON_THE_HOST)
# A predicate took 14 to 16 us as a node of a graph, and 31 to 35 us on the host.  Hops need two
# devices, and were not measured.
H100: Mapping[str, float] = {"predicate": 15e-6, ON_THE_HOST: 33e-6}
# Kind of device -> seconds by name, and the source of the measurement.
PricesByKind: TypeAlias = Mapping[str, Mapping[str, float | str]]
MEASURED: PricesByKind = {
    "NVIDIA H100 80GB HBM3": {
        **H100,
        "measured": "one GPU, driver 580, JAX 0.11.2, November 2026",
    }
}


def measured_prices(
    found: PricesByKind, kind: str | None, *, guess: Overheads, on_host: bool = False
) -> Overheads | None:
    """The prices of a kind of device: each of those found, or else of `MEASURED`; None where none
    were measured.

    Args:
        found: on the user's machine.
        kind: as `device.device_kind` says it; None is the one kind of NVIDIA GPU that was found.
        guess: for prices that were not measured.
        on_host: the host decides predicates.
    """
    gpus = [name for name in found if "NVIDIA" in name]
    if kind is None and len(gpus) == 1:
        (kind,) = gpus
    names = {time: ON_THE_HOST if on_host and time == TIMES[0] else time for time in TIMES}
    seconds, told = dict[str, float](), list[str]()
    for each in (found.get(str(kind), {}), MEASURED.get(str(kind), {})):
        own = {time: float(each[name]) for time, name in names.items() if name in each}
        if own.keys() - seconds:
            where = f", {each['measured']}" if "measured" in each else ""
            told.append(f"measured on {kind}{where}")
        seconds = own | seconds
    if not seconds:
        return None
    missing = [name for name in TIMES if name not in seconds]
    told += [f"guessed: {', '.join(missing)}"] if missing else []
    return replace(guess, **seconds, source="; ".join(told))


# Assumed bytes of a transfer: 4096 tokens of width 4096 in bfloat16.
TRANSFER = 2**25


@dataclass(frozen=True)
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
# The clocks are of 4 matrix units of 128 x 128, 8 of these, and 4 of 256 x 256.
CHIPS = (
    # name, kind, flops, bandwidth, memory, link, clock
    Chip("v5e", "TPU v5 lite", 1.97e14, 8.1e11, 16e9, 4.5e10, 1.5e9),
    Chip("v5p", "TPU v5", 4.59e14, 2.8e12, 96e9, 9e10, 1.75e9),
    Chip("v6e", "TPU v6 lite", 9.2e14, 1.6e12, 32e9, 9e10, 1.75e9),
)


class RunsOn(Enum):
    """Kinds of devices, and where they wait for a transfer.

    On GPUs and TPUs its two ends wait where it is needed.  XLA:CPU blocks in a permute, and no
    block of the device runs meanwhile (`spmd.executor`): its two ends wait where it is
    issued, and of virtual devices of one process all.
    """

    GPUS = "NVIDIA GPUs"
    TPUS = "TPUs"
    CPU_PROCESSES = "CPU devices of one process each"
    ONE_CPU_PROCESS = "virtual CPU devices of one process"

    @property
    def tile(self) -> tuple[int, ...]:
        """The tiles of memory over the last dims of an array; () where memory keeps rows."""
        return (8, 128) if self is RunsOn.TPUS else ()

    @classmethod
    def of(cls, mesh: Any) -> RunsOn:
        """The kind of the devices of a `jax.sharding.Mesh`."""
        devices = list(mesh.devices.flat)
        platforms = {device.platform for device in devices}
        if platforms <= {"gpu", "cuda"}:
            return cls.GPUS
        if platforms == {"tpu"}:
            return cls.TPUS
        processes = {device.process_index for device in devices}
        return cls.CPU_PROCESSES if len(processes) == len(devices) else cls.ONE_CPU_PROCESS


@dataclass(frozen=True)
class Form:
    """The form that a program's blocks take: any of them is right on any devices.

    Args:
        layers: scans over so many layers at most run one layer after the other, and the parameters
            and accumulators of each layer are arrays of their own. 0: scans stay.
        products: a weight gradient is made in the dtype of its accumulator.  XLA:CPU has no fast
            product of half precisions into float32.
        functions: backwards compute transcendental functions again, in the fusion that needs them.
        slots: of so many slots of residuals at most, each is a buffer of its own, and the code of
            an action is there once for each slot that it uses. 0: slots are rows of one buffer,
            whose numbers are data, and XLA copies what a matmul reads or writes.
        slot_bytes: slots of fewer bytes are rows: copies take no longer than predicates.
        filled: pools begin with zeros.
        beside: parameters are gathered, and gradients reduced, under one predicate with a block
            that does not need them, beside its compute; there is code of the block with them too.
    """

    layers: int = 0
    products: bool = False
    functions: bool = False
    slots: int = 0
    slot_bytes: int = 0
    filled: bool = True
    beside: bool = False


# On GPUs the time to compile bounds the numbers of layers and slots.  A block in slots of their own
# evaluates some 8 more predicates, of 15 us each on an H100, and so does its backward.  As a row a
# byte is moved 2.4 times (Llama 3 8B, 1F1B), at 2.5 TB/s.
GPU_FORM = Form(
    layers=16,
    products=True,
    functions=True,
    slots=24,
    slot_bytes=2**28,
    filled=False,
    beside=True,
)
# TPUs keep scans: of a small 1F1B on described v5p (240.6 M cycles, 1.20 GiB) layers apart take 2 %
# fewer cycles, 19 % more memory and 1.5 times the time to compile; functions that are computed
# again take 4 % more cycles and 0.76 GiB.  Where layers are computed again anyway (8B, 4 a stage)
# functions again change nothing, and layers apart take at least twice the time to compile.
FORMS: Mapping[RunsOn, Form] = {RunsOn.GPUS: GPU_FORM}


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
    own_form: Form | None = None

    @property
    def form(self) -> Form:
        """The form of a program: its own, or that of the kind of devices."""
        return FORMS.get(self.runs_on, Form()) if self.own_form is None else self.own_form

    @classmethod
    def of(cls, mesh: Any, own: Sequence[str], found: PricesByKind | None = None) -> Target:
        """The target of a `jax.sharding.Mesh`; blocks do not communicate over the axes `own`.

        The prices are those found for such devices.
        """
        communicates = any(size > 1 for name, size in mesh.shape.items() if name not in own)
        target = cls(RunsOn.of(mesh), communicates, Chip.of(mesh))
        return target.measured(found or {}, str(mesh.devices.flat[0].device_kind))

    def measured(self, found: PricesByKind, kind: str | None = None) -> Target:
        """The target with the measured prices of a kind of device, if there are any."""
        on_host = self.on_gpus and self.communicates
        prices = measured_prices(found, kind, guess=self.overheads, on_host=on_host)
        return replace(self, prices=prices)

    @property
    def overheads(self) -> Overheads:
        """The times of a program besides the stages' work."""
        if self.prices is not None:
            return self.prices
        if self.on_tpus:
            # A TPU decides by itself, between two operations of its own sequence: a guess.
            hop = GUESSED.hop if self.chip is None else self.chip.hop
            return Overheads(predicate=1e-6, hop=hop)
        return ON_HOST if self.communicates else GUESSED

    @property
    def platform(self) -> str:
        """JAX's name of the platform."""
        return "cpu" if self.on_cpus else "gpu" if self.on_gpus else "tpu"

    @property
    def on_cpus(self) -> bool:
        """Whether the devices are CPUs, where no transfer overlaps compute."""
        return self.runs_on in (RunsOn.CPU_PROCESSES, RunsOn.ONE_CPU_PROCESS)

    @property
    def on_tpus(self) -> bool:
        """Whether the devices are TPUs."""
        return self.runs_on is RunsOn.TPUS

    @property
    def on_gpus(self) -> bool:
        """Whether the devices are NVIDIA GPUs."""
        return self.runs_on is RunsOn.GPUS
