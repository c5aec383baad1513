"""Whether the partitioner permutes in blocks that some devices run while others do not.

Every permute of XLA:CPU waits for all devices of the program, also those that it moves nothing to.
Under a predicate some of them wait in the permute of one block and some in that of another, until
XLA ends the process.  So beside axes that are left to the partitioner all devices run every block
at once, and keep what it gives where its predicate holds (see `block`).  A step that is timed has
predicates, and is refused where a block permutes.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from ..stage.job import Job
from ..stage.model_code import ModelCode
from .entries import StageEntries
from .work_space import compiled_blocks, step_blocks


def partitioner_permutes(
    job: Job, mesh: Mesh, code: ModelCode, entries: Sequence[StageEntries]
) -> bool:
    """Whether the partitioner puts a permute into a block of a training step: read off each,
    compiled alone.
    """
    # What is spread is run by all devices at once in any case.
    spread = {"first", "first gradient"} if job.functions.spreads_first else set()
    spread |= {"last"} if job.functions.spreads_last else set()
    alone = [run for run in step_blocks(job, code, entries) if run[0].name not in spread]
    return any(
        " collective-permute" in compiled_blocks(job, mesh, run, asked=True).as_text()
        for run in alone
    )
