"""Seconds of blocks and of a hop to the next device: run in turn, or estimated for a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..arrays import Leaves
from ..errors import PipelineError
from ..inspect.blocks import Step, output_entries
from ..jaxprs.sizes import count_work, nbytes
from ..lowering.target import CHIPS, Chip
from ..pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak rates of a device, for estimates by roofline (Williams et al. 2009): a block takes
    the longer of compute and memory.

    Args:
        flops: floating point operations a second.
        bandwidth: bytes of memory a second.
        link: bytes a second to the next device of the pipeline; transfers take no time where it is
            None.
        latency: seconds of a transfer, independent of its size.
    """

    flops: float
    bandwidth: float
    link: float | None = None
    latency: float = 0.0

    @classmethod
    def of(cls, mesh: Mesh) -> Peak:
        """That of a mesh of TPUs of one published kind (v5e, v5p or v6e), also of described ones.

        Raises:
            PipelineError: the mesh has other devices.
        """
        chip = Chip.of(mesh)
        if chip is None:
            kinds = sorted({str(device.device_kind) for device in mesh.devices.flat})
            raise PipelineError(
                f"the peak of {', '.join(kinds)} is not known (known: "
                f"{', '.join(each.kind for each in CHIPS)}); write Peak(flops=, bandwidth=, link=)"
            )
        return cls(flops=chip.flops, bandwidth=chip.bandwidth, link=chip.link)

    def seconds(self, jaxpr: core.Jaxpr, devices: int) -> float:
        """Of a block that so many devices share."""
        work = count_work(jaxpr)
        return max(work.flops / self.flops, work.bytes / self.bandwidth) / devices

    def hop(self, size: int) -> float:
        """Of a transfer of so many bytes."""
        return 0.0 if self.link is None else self.latency + size / self.link


def call_of(compiled: Any, jaxpr: core.Jaxpr) -> Callable[[], Any]:
    """Run a compiled block on arguments of its shapes."""
    (shardings,), _ = compiled.input_shardings
    values = [
        jax.device_put(_value(var.aval), sharding)
        for var, sharding in zip(jaxpr.invars, shardings, strict=True)
    ]
    return lambda: jax.block_until_ready(compiled(values))


def _value(aval: Any) -> Any:
    """Ordinary numbers (zeros and denormals can be faster or slower than those of a model); zeros
    for other types.
    """
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=str(aval.dtype._impl.name)), aval.shape)
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.zeros(aval.shape, aval.dtype)
    numbers = np.random.default_rng(0).standard_normal(aval.shape, np.float32) * 0.1
    return jnp.asarray(numbers, aval.dtype)


def timed(runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, run in turn, so that other work of the machine delays all alike; the
    first round warms up.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, call in runs.items():
            begin = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def hop_seconds(pipe: Pipeline, step: Step, repeats: int) -> float:
    """Of a stage's output to the next device of the pipe axis, less the time of the same call that
    sends nothing.
    """
    count = pipe.schedule.num_devices
    if count == 1:
        return 0.0
    number = max(
        range(len(step.code.kinds)),
        key=lambda kind: sum(map(nbytes, step.code.kinds[kind].y_avals)),
    )
    kind, entries = step.code.kinds[number], step.entries[number]
    specs = [PartitionSpec(pipe.axis, *entry.spec) for entry in output_entries(kind, entries)]
    mesh = Mesh(
        pipe.mesh.devices,
        pipe.mesh.axis_names,
        axis_types=(AxisType.Auto,) * len(pipe.mesh.axis_names),
    )
    # Two devices exchange, as neighbours do; the others take no part.
    pairs = ((0, 1), (1, 0))
    calls = {
        name: exchange(mesh, pipe.axis, those, kind.y_avals, specs)
        for name, those in (("hop", pairs), ("nothing", ()))
    }
    found = timed(calls, repeats)
    return max(0.0, found["hop"] - found["nothing"])


def exchange(
    mesh: Mesh,
    axis: str,
    pairs: Sequence[tuple[int, int]],
    avals: Sequence[Any],
    specs: Sequence[PartitionSpec] | None = None,
) -> Callable[[], Any]:
    """A call that sends arrays of these shapes between pairs of devices of an axis.

    Without pairs it sends nothing.

    Args:
        mesh: the devices.
        axis: of the mesh.
        pairs: (source, target).
        avals: shapes and dtypes of what each device sends.
        specs: where the arrays [size of the axis, ...] are; cut over the axis where it is None.
    """
    specs = [PartitionSpec(axis)] * len(avals) if specs is None else list(specs)

    def body(values: Leaves) -> Leaves:
        return [lax.ppermute(value, axis, pairs) if pairs else value + 0 for value in values]

    mapped = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    )
    zeros = [jnp.zeros((mesh.shape[axis], *aval.shape), aval.dtype) for aval in avals]
    values = [
        jax.device_put(value, NamedSharding(mesh, spec))
        for value, spec in zip(zeros, specs, strict=True)
    ]
    return lambda: jax.block_until_ready(mapped(values))
