"""Whether the partitioner permutes in blocks that some devices run while others do not.

Every permute of XLA:CPU waits for all devices of the program, also those that it moves nothing to.
Under a predicate some of them wait in the permute of one block and some in that of another, until
XLA ends the process.  So where any block permutes, all devices run every block at once, and keep
what it gives where its predicate holds (see `block`).
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh, PartitionSpec

from ..arrays import PyTree
from ..stage.job import Job
from ..stage.model_code import ModelCode
from .entries import StageEntries, param_specs
from .work_space import Block, compiled_blocks, outer_blocks, step_blocks


def partitioner_permutes(job: Job, mesh: Mesh, code: ModelCode, owned: Sequence[PyTree], entries: Sequence[StageEntries] | None) -> bool:
    """Whether the partitioner puts a permute into a block: read off each, compiled alone."""
    runs = step_blocks(job, code, entries) if job.training else _forwards(job, code, owned)
    # What is spread is run by all devices at once in any case.
    spread = {"first", "first gradient"} if job.functions.spreads_first else set()
    spread |= {"last"} if job.functions.spreads_last else set()
    alone = [run for run in runs if run[0].name not in spread]
    return any(" collective-permute" in compiled_blocks(job, mesh, run, asked=True).as_text() for run in alone)


def _forwards(job: Job, code: ModelCode, owned: Sequence[PyTree]) -> list[tuple[Block, ...]]:
    """The blocks of forwards alone."""
    blocks = outer_blocks(job, code, split=True)
    for number, kind in enumerate(code.kinds):
        own = [*(PartitionSpec() for _ in kind.consts), *param_specs(job, code.kind_of.index(number), owned)]
        free = len(kind.evaluate.invars) - len(own)
        blocks.append(Block("F", kind.evaluate, (*own, *(None for _ in range(free)))))
    return [(block,) for block in blocks]
