"""The SPMD executor: program + user functions -> one `shard_map` program, whose body prepares, runs
the segments and reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ..arrays import Params, PyTree
from ..errors import PipelineError
from ..stage.job import Job
from ..stage.model_code import Inputs, ModelCode
from .entries import StageEntries, mapped, split_entries, whole_entries
from .shared_buffers import shared_buffers
from .step import DeviceStep, finish, prepare, with_replicas
from .tick import TickEmitter

CANNOT_BE_TIMED = (
    "this step cannot be profiled on CPU devices: its functions permute over a mesh axis, so all "
    "devices run every block at once (ring attention permutes; the partitioner does for a roll, "
    "slice or concatenation along a dimension that is split); profile it without that axis, or "
    "on GPUs"
)


def look(
    job: Job, params: Params, batch: PyTree, rng: Any, state: PyTree
) -> tuple[Job, Inputs, ModelCode]:
    """Trace `prepare` alone: what one device starts from, as tracers."""
    found: list[tuple[Job, Inputs, ModelCode]] = []

    def trace(*arguments: Any) -> tuple[()]:
        found.append(prepare(job, *arguments))
        return ()

    run = mapped(trace, job.mesh, job.axes, _in_specs(job), PartitionSpec())
    jax.eval_shape(run, params, batch, rng, state)
    return found[0]


def _in_specs(job: Job) -> tuple[Any, ...]:
    """The splits of parameters, the batch, the key and the stages' own state."""
    rows, kept = PartitionSpec(job.data_axes or None), PartitionSpec(job.axis)
    own = jax.tree.map(lambda plan: plan.manual(job.axis), job.plans)
    return own, rows, PartitionSpec(), kept


def body(
    job: Job,
    params: Params,
    batch: PyTree,
    rng: Any,
    kept: tuple[PyTree, ...],
    *,
    entries: Sequence[StageEntries] | None,
) -> tuple[dict[str, Any], dict[str, PyTree]]:
    """Run the step on each device; return ({"loss", "losses", "metrics", "state"}, gradients laid
    out like `params`).

    The arguments are those of `prepare`.  `entries` is None where no axis is left to the
    partitioner.

    Every permute of XLA:CPU waits for all devices of the program, also for those outside its pairs.
    Under predicates, some devices would wait in the permute of one block and some in that of
    another, until XLA ends the process.  Where blocks permute, all devices therefore run every
    block at once, and keep the result where its predicate holds (see `block`).

    With axes that are left to the partitioner, permutes are assumed: a block compiled alone does
    not show every one, because the partitioner decides from the whole program.  Timing needs
    predicates, and `jaxpipe.inspect.profile` refuses blocks that permute.
    """
    job, inputs, code = prepare(job, params, batch, rng, kept)
    assumed = bool(job.partition.auto_axes) and job.clock is None
    waits = job.target.on_cpus and lax.axis_size(job.axis) > 1
    everywhere = waits and (assumed or code.permutes)
    if everywhere and job.clock is not None:
        raise PipelineError(CANNOT_BE_TIMED)
    if entries is None:
        entries = tuple(whole_entries(job, kind) for kind in code.kinds)
    buffers = shared_buffers(code.kinds, entries)
    if job.observe is not None:
        job.observe(job, code, entries)
    with jax.named_scope("prepare"):
        chunks = with_replicas(job, inputs.owned)
        step = DeviceStep(job, inputs, code, buffers, everywhere, chunks).with_once()
        emitter, state = TickEmitter(step), step.empty_state()
        # One table takes one slice per trip.  Dozens of arrays would take dozens of slices.
        table = jnp.asarray(_narrow(np.stack(code.program.ticks.columns, axis=-1)))
        rows = lax.dynamic_index_in_dim(table, lax.axis_index(job.axis), 1, keepdims=False)
    with jax.named_scope("ticks"):
        for segment in code.program.segments:
            state = emitter.run_segment(segment, rows, state)
    with jax.named_scope("finish"):
        return finish(step, state, params)


def _narrow(table: Any) -> Any:
    """The table in the smallest signed integers that hold it.  It is a constant of the program, and
    grows with M.
    """
    for dtype in (np.int8, np.int16):
        if table.size == 0 or (
            table.min() >= np.iinfo(dtype).min and table.max() <= np.iinfo(dtype).max
        ):
            return table.astype(dtype)
    return table


@dataclass(frozen=True)
class TracedStep:
    """A training step that is traced and not compiled."""

    job: Job
    code: ModelCode
    entries: tuple[StageEntries, ...]  # the entries of pools, by kind of stage
    # the `jax.stages.Traced` step of (params, batch), and `rng` and `state` where they are given
    function: Any


class SpmdExecutor:
    """Runs a job's program on the devices of its mesh, all in one program (an `Executor`)."""

    compiles = True

    def run(
        self, job: Job, params: Params, batch: PyTree, rng: Any, state: tuple[PyTree, ...]
    ) -> tuple[dict[str, Any], dict[str, PyTree]]:
        """Do the job; it may be traced."""
        specs, entries = _in_specs(job), None
        if job.partition.auto_axes and job.training:
            # The model is traced once more for the entries.
            cut, inputs, code = look(job, params, batch, rng, state)
            entries = split_entries(cut, code, inputs.owned)
        run = mapped(
            partial(body, job, entries=entries),
            job.mesh,
            job.axes,
            in_specs=specs,
            out_specs=(job.result_specs, specs[0] if job.training else PartitionSpec()),
        )
        results: tuple[dict[str, Any], dict[str, PyTree]] = run(params, batch, rng, state)
        return results
