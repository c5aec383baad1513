"""Every block of a step by name, with its seconds, measured or estimated, and the bytes of its own
arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..arrays import PyTree
from ..errors import PipelineError, quoted
from ..pipeline import Pipeline
from ..table.limits import is_whole
from .blocks import Traced, blocks_of, compile_block, traced
from .peak import Peak
from .sizes import StageBytes
from .timing import call_of, hop_seconds, timed


@dataclass(frozen=True)
class Measured:
    """Seconds of each block by name ("F 0" of kind 0, "first", "first gradient", "last", "hop"),
    and bytes of its own arrays.
    """

    step: Traced
    sizes: tuple[StageBytes, ...]  # of each kind of stage
    seconds: Mapping[str, float]
    temp: Mapping[str, int]
    unit: str


def measure_blocks(
    pipe: Pipeline,
    params: dict[str, PyTree],
    batch: PyTree,
    rng: Any,
    state: Any,
    repeats: int,
    peak: Peak | None,
) -> Measured:
    """Trace the step, compile every block of it alone, and time or estimate each."""
    faults = (
        []
        if isinstance(pipe, Pipeline)
        else [f"pipe must be a jaxpipe.Pipeline, not {quoted(pipe)}"]
    )
    faults += (
        []
        if is_whole(repeats) and repeats >= 1
        else [f"repeats must be at least 1, not {quoted(repeats)}"]
    )
    faults += (
        []
        if peak is None or isinstance(peak, Peak)
        else [f"peak must be a jaxpipe.Peak, or None, not {quoted(peak)}"]
    )
    if faults:
        raise PipelineError.listing("this cannot be measured", faults)
    step = traced(pipe, params, batch, rng, state)
    sizes = tuple(
        StageBytes.of(kind, entries)
        for kind, entries in zip(step.code.kinds, step.entries, strict=True)
    )
    blocks = {
        name: (compile_block(step, block), block.jaxpr) for name, block in blocks_of(step).items()
    }
    temp = {
        name: int(getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0))
        for name, (compiled, _) in blocks.items()
    }
    if peak is not None:
        seconds = {name: peak.seconds(jaxpr, step.mesh.size) for name, (_, jaxpr) in blocks.items()}
        boundary = max((size.boundary for size in sizes), default=0)
        unit = (
            f"seconds, estimated for {peak.flops:.3g} flops and {peak.bandwidth:.3g} bytes a second"
        )
        hop = peak.hop(boundary) if pipe.schedule.num_devices > 1 else 0.0
        return Measured(step, sizes, {**seconds, "hop": hop}, temp, unit)
    runs = {name: call_of(compiled, jaxpr) for name, (compiled, jaxpr) in blocks.items()}
    seconds = timed(runs, repeats)
    seconds["hop"] = hop_seconds(pipe, step, repeats)
    device = pipe.mesh.devices.flat[0]
    return Measured(step, sizes, seconds, temp, f"seconds, measured on {device.device_kind}")
