"""The job that `Pipeline` gives to an executor (a step or an evaluation), and the protocol of
executors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from ..arrays import PyTree
from ..lowering.plan import Plan
from ..model.functions import Functions
from ..model.param_layout import ParamLayout
from ..model.spread import Cuts

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
    layout: ParamLayout
    axis: str
    data_axes: tuple[str, ...]
    data_size: int
    accumulate: Any  # dtype of gradient accumulators, or None for the parameters' own
    plans: dict[str, PyTree]  # how each parameter is spread over the mesh
    training: bool
    # return the outputs of the last stage, which `functions.last` returns as its metrics
    outputs: bool = False
    # which parameters are cut over the pipe axis
    cuts: Cuts = field(default_factory=lambda: Cuts(1))
    observe: Observe | None = None  # called as soon as the model is traced
    clock: Clock | None = None  # called by every block

    @property
    def results(self) -> tuple[str, ...]:
        """The results besides gradients, by name."""
        if self.outputs:
            return ("outputs", "state")
        return ("state",) if self.functions.last is None else ("loss", "losses", "metrics", "state")

    def with_axis(self, sizes: dict[str, PyTree]) -> Job:
        """The job whose spread functions know the axis and the whole sizes of cut parameters."""
        return (
            replace(self, functions=replace(self.functions, axis=self.axis, sizes=sizes))
            if sizes
            else self
        )

    @property
    def num_microbatches(self) -> int:
        """M."""
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
        self,
        job: Job,
        params: dict[str, PyTree],
        batch: PyTree,
        rng: Any,
        state: tuple[PyTree, ...],
    ) -> tuple[dict[str, Any], dict[str, PyTree]]:
        """Do the job; it may be traced."""
