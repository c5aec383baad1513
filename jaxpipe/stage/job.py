"""The job that `Pipeline` gives to an executor (a step or an evaluation), and the protocol of
executors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from jax.sharding import Mesh, PartitionSpec

from ..arrays import Params, PyTree
from ..lowering.plan import Plan
from ..lowering.target import Target
from ..model.calls import Cuts
from ..model.functions import Functions, Loss
from ..model.param_layout import ParamLayout
from ..model.partition import Partition

# Called with the job, its trace (a `ModelCode`), and the entries of each kind of stage
# (`StageEntries`).
Observe: TypeAlias = Callable[["Job", Any, Any], None]

# Called on the host with two arguments, and returns int32 0.  The first is an array of (place along
# the axes that are left to the partitioner, 0 at the begin and 1 at the end, data shard, device,
# kind, stage, microbatch) of a block; the call waits for the second argument.
Clock: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Job:
    """Everything about a step that is known before its arrays."""

    plan: Plan
    functions: Functions
    partition: Partition
    accumulate: Any  # dtype of gradient accumulators, or None for the parameters' own
    plans: dict[str, PyTree]  # how each parameter is spread over the mesh
    training: bool
    target: Target  # the kind of the mesh's devices
    # return the outputs of the last stage, which `functions.last` returns as its metrics
    outputs: bool = False
    observe: Observe | None = None  # called as soon as the model is traced
    clock: Clock | None = None  # called by every block

    @property
    def mesh(self) -> Mesh:
        """The mesh, with automatic axes."""
        return self.partition.mesh

    @property
    def axis(self) -> str:
        """The pipe axis."""
        return self.partition.axis

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which rows are spread."""
        return self.partition.data_axes

    @property
    def axes(self) -> set[str]:
        """The axes that are manual inside the step."""
        return {self.axis, *self.data_axes}

    @property
    def data_size(self) -> int:
        """The number of data shards."""
        return self.partition.data_size

    @property
    def layout(self) -> ParamLayout:
        """The stages of each device."""
        return self.partition.layout

    @property
    def cuts(self) -> Cuts:
        """Parameters that are cut over the pipe axis."""
        return self.partition.cuts

    @property
    def seed(self) -> float:
        """The cotangent of one microbatch's loss."""
        summed = self.functions.loss is Loss.SUM_OVER_COUNT
        return 1.0 if summed else 1.0 / (self.num_microbatches * self.data_size)

    @property
    def result_specs(self) -> dict[str, PartitionSpec]:
        """The results besides gradients, and the split of each."""
        names = ["loss", "losses", "metrics"] if self.functions.last is not None else []
        spread = {"outputs": PartitionSpec(self.data_axes or None)} if self.outputs else {}
        spread = spread or dict.fromkeys(names, PartitionSpec())
        return spread | {"state": PartitionSpec(self.axis)}

    def for_run(self, params: Params, batch: PyTree, parts: int | None = None) -> Job:
        """The job whose functions know the batch, cut into microbatches; and for spread functions
        the axis and the whole sizes of cut parameters.
        """
        functions = self.functions.over(self.axis, self.cuts, params, parts=parts)
        return replace(self, functions=functions.for_batch(batch))

    @property
    def num_microbatches(self) -> int:
        """M, the number of microbatches."""
        return self.plan.ticks.schedule.num_microbatches


class Executor(Protocol):
    """A back end: runs the program of a job.
    `run` takes placed parameters, a batch of leaves [rows, ...], the step's key or None, and the
    stages' placed state or (); it returns ({"loss", "losses", "metrics", "state"} or {"outputs",
    "state"}, gradients laid out like the parameters, {} without any).
    """

    @property
    def compiles(self) -> bool:
        """Whether `run` is traced and compiled; otherwise it is called directly."""

    def run(
        self, job: Job, params: Params, batch: PyTree, rng: Any, state: tuple[PyTree, ...]
    ) -> tuple[dict[str, Any], dict[str, PyTree]]:
        """Do the job; it may be traced."""
