"""The SPMD executor: one `shard_map` program over the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from ..arrays import Params, PyTree
from ..stage.job import Job
from ..stage.model_code import ModelCode
from .body import body, look
from .entries import StageEntries, mapped, on_cpus, split_entries


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
        everywhere, rows, kept = (
            PartitionSpec(),
            PartitionSpec(job.data_axes or None),
            PartitionSpec(job.axis),
        )
        placed = job.partition.manual_specs(params)
        spread = {"state": kept, "outputs": rows}
        entries, permutes = self._split(job, params, batch, rng, state)
        run = mapped(
            lambda p, b, r, s: body(job, p, b, r, s, entries=entries, everywhere=permutes),
            job.mesh,
            {job.axis, *job.data_axes},
            in_specs=(placed, rows, everywhere, kept),
            out_specs=(
                {key: spread.get(key, everywhere) for key in job.results},
                placed if job.training else everywhere,
            ),
        )
        found: tuple[dict[str, Any], dict[str, PyTree]] = run(params, batch, rng, state)
        return found

    def _split(
        self, job: Job, params: Params, batch: PyTree, rng: Any, state: tuple[PyTree, ...]
    ) -> tuple[tuple[StageEntries, ...] | None, bool]:
        """The entries of pools where the partitioner splits values, and whether it may permute in
        blocks on CPU devices.

        Every permute of XLA:CPU waits for all devices of the program, also for those outside its
        pairs.  Under predicates, some devices would wait in the permute of one block and some in
        that of another, until XLA ends the process.  With axes that are left to the partitioner,
        all devices therefore run every block at once, and keep the result where its predicate holds
        (see `block`).

        The model is traced once more for the entries.  A block compiled alone does not show every
        permute, because the partitioner decides from the whole program.  Permutes are therefore
        assumed, except where blocks are timed.  Timing needs predicates, and
        `jaxpipe.inspect.profile` refuses blocks that permute.
        """
        waits = on_cpus(job.mesh) and job.mesh.shape[job.axis] > 1
        if not job.partition.auto_axes:
            return None, False
        if not job.training:
            return None, waits
        start = look(job, params, batch, rng, state)
        entries = split_entries(job, start.code, start.owned)
        return entries, waits and job.clock is None
