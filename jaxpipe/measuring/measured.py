"""Every block of a step by name, with its seconds, measured or estimated, and the bytes of its own arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..arrays import PyTree
from ..errors import PipelineError, quoted
from ..jaxprs.sizes import nbytes
from ..pipeline import Pipeline
from ..stage.job import Job
from ..stage.model_code import ModelCode
from .blocks import compile_block, jaxprs_of, one_coordinate, traced
from .peak import Peak
from .timing import call_of, hop_seconds, timed


@dataclass(frozen=True)
class Measured:
    """Seconds of each block by name ("F 0" of kind 0, "first", "first gradient", "last", "hop"), and bytes of its own arrays."""

    job: Job
    code: ModelCode
    seconds: Mapping[str, float]
    temp: Mapping[str, int]
    unit: str


def measure_blocks(
    pipe: Pipeline, params: dict[str, PyTree], batch: PyTree, rng: Any, state: Any, repeats: int, peak: Peak | None
) -> Measured:
    """Trace the step, compile every block of it alone, and time or estimate each."""
    if repeats < 1:
        raise PipelineError(f"repeats must be at least 1, not {quoted(repeats)}")
    (job, code), mesh = traced(pipe, params, batch, rng, state), one_coordinate(pipe)
    blocks = {name: (compile_block(job, mesh, jaxpr), jaxpr) for name, jaxpr in jaxprs_of(code).items()}
    temp = {name: int(getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)) for name, (compiled, _) in blocks.items()}
    if peak is not None:
        seconds = {name: peak.seconds(jaxpr, mesh.size) for name, (_, jaxpr) in blocks.items()}
        boundary = max((sum(map(nbytes, kind.y_avals)) for kind in code.kinds), default=0)
        unit = f"seconds, estimated for {peak.flops:.3g} flops and {peak.bandwidth:.3g} bytes a second"
        return Measured(job, code, {**seconds, "hop": peak.hop(boundary) if pipe.schedule.num_devices > 1 else 0.0}, temp, unit)
    runs = {name: call_of(compiled, jaxpr) for name, (compiled, jaxpr) in blocks.items()}
    seconds = timed(runs, repeats)
    seconds["hop"] = hop_seconds(pipe, code, repeats)
    device = pipe.mesh.devices.flat[0]
    return Measured(job, code, seconds, temp, f"seconds, measured on {device.device_kind}")
