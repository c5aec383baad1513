"""What is known of a step before its arrays, and what a device starts from: `trace`, `lower` and
the emitted step take both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..arrays import ByPart, Leaf, LossScale, PyTree, Rng, shape_of
from ..lowering.target import Form, Target
from ..lowering.ticks import Ticks
from ..model.arguments import StepArguments
from ..model.functions import Functions, Loss, share_of
from ..model.keys import shard_key
from ..model.layers import OUTER
from ..program.segments import Segment
from ..storage.chunks import ParamLayout
from ..storage.partition import Partition
from ..storage.plan import gather
from ..table.kinds import Offload
from ..table.schedule import Schedule

T = TypeVar("T")

# Called on the host with two arguments, and returns int32 0.  The first is an array of (place along
# the axes that are left to the partitioner, 0 at the begin and 1 at the end, data shard, device,
# kind, stage, microbatch) of a block; the call waits for the second argument.
Clock: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Setup:
    """What is known of a step, or of forwards alone, before its arrays."""

    ticks: Ticks
    segments: tuple[Segment, ...]
    offload: Offload
    functions: Functions
    partition: Partition
    accumulate: DTypeLike | None  # dtype of gradient accumulators, or None for the parameters' own
    plans: ByPart  # how each parameter is spread over the mesh
    training: bool
    target: Target  # the kind of the mesh's devices
    # return the outputs of the last stage, which `functions.last` returns as its metrics
    outputs: bool = False
    clock: Clock | None = None  # called by every block

    @property
    def form(self) -> Form:
        """The form of the program's blocks.  Blocks that run as one stay loops over layers, so that
        the forward of a layer is beside the backward of another; the two share pools.
        """
        form = self.target.form
        return replace(form, layers=0, slots=0) if self.ticks.pairs.any() else form

    @property
    def schedule(self) -> Schedule:
        """The table."""
        return self.ticks.schedule

    @property
    def num_microbatches(self) -> int:
        """M, the number of microbatches."""
        return self.schedule.num_microbatches

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

    def seed(self, count: jax.Array | None, scale: LossScale) -> jax.Array:
        """The cotangent of one microbatch's loss: with the factor of the loss, and with the count
        of the step where it is known before.
        """
        summed = self.functions.loss is Loss.SUM_OVER_COUNT
        mean = 1.0 if summed else 1.0 / (self.num_microbatches * self.data_size)
        seed = jnp.asarray(mean, jnp.result_type(float))
        seed = seed if count is None else share_of(count.astype(seed.dtype))
        return seed if scale is None else seed * jnp.asarray(scale, seed.dtype)

    def argument_specs(self, batch: PyTree) -> StepArguments:
        """The split of each argument, in its place."""
        own = jax.tree.map(lambda plan: plan.spec(self.axis, manual=True), self.plans)
        rows = self.functions.specs(batch, self.data_axes)
        everywhere: Any = PartitionSpec()
        return StepArguments(own, rows, everywhere, PartitionSpec(self.axis), everywhere)

    @property
    def result_specs(self) -> dict[str, PartitionSpec]:
        """The results besides gradients, and the split of each."""
        names = ["loss", "losses", "metrics"] if self.functions.last is not None else []
        spread = {"outputs": PartitionSpec(self.data_axes or None)} if self.outputs else {}
        spread = spread or dict.fromkeys(names, PartitionSpec())
        return spread | {"state": PartitionSpec(self.axis)}

    @property
    def shardings(self) -> tuple[dict[str, NamedSharding], ByPart]:
        """Where the results are, and the gradients."""
        results = {key: NamedSharding(self.mesh, spec) for key, spec in self.result_specs.items()}
        return results, self.partition.shardings(self.plans) if self.training else {}

    def shapes(self, given: StepArguments) -> Inputs:
        """The shapes that a device starts from, for arguments of a step, or their shapes."""

        def own(leaf: Leaf, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            whole = shape_of(leaf)
            split = NamedSharding(self.mesh, spec)
            return whole.update(shape=split.shard_shape(whole.shape))

        specs = jax.tree.broadcast(self.argument_specs(given.batch), given)
        local = jax.tree.map(own, given, specs)
        found = self.on_device(lambda: jax.eval_shape(self.load, local))
        # without the mesh of their devices, so that another mesh takes them too
        return jax.tree.map(shape_of, found)

    def load(self, given: StepArguments, *, whole: bool = True) -> Inputs:
        """What a device starts from: whole parameters, or its parts of those of stages, and rows by
        microbatch.

        The arguments are as `shard_map` passes them: leaves of `params["stages"]` and of the
        stages' own state are [1, ...], and leaves of the batch are the [rows, ...] of this data
        shard.
        """

        def mine(tree: T) -> T:
            return jax.tree.map(lambda leaf: leaf[0], tree)

        with jax.named_scope("prepare"):
            stages, plans = [*map(mine, given.params["stages"])], self.plans
            return Inputs(
                batch=self.functions.split(given.batch, self.num_microbatches),
                rng=mesh_key(given.rng, self.data_axes, self.data_size),
                owned=list(map(gather, stages, plans["stages"])) if whole else stages,
                kept=tuple(map(mine, given.state)),
                scale=given.scale,
                **{key: gather(given.params[key], plans[key]) for key in OUTER},
            )

    def on_device(self, function: Callable[[], T]) -> T:
        """What the function returns where it is called as by one device of the mesh, along whose
        manual axes its functions may communicate.  It may return shapes and code, and no values.
        """
        found: list[T] = []

        def call() -> tuple[()]:
            found.append(function())
            return ()

        jax.eval_shape(
            jax.shard_map(
                call,
                mesh=self.mesh,
                in_specs=(),
                out_specs=(),
                axis_names=self.axes,
                check_vma=False,
            )
        )
        return found[0]


class Inputs(NamedTuple):
    """The inputs of a device's step: whole parameters of its stages, its rows by microbatch."""

    owned: Sequence[PyTree]
    kept: Sequence[PyTree]  # the stages' own state
    shared: PyTree
    first: PyTree
    last: PyTree
    batch: PyTree  # leaves [M, ...]
    rng: Rng
    scale: LossScale  # a factor of the loss, or None


def mesh_key(rng: Rng, data_axes: tuple[str, ...], data_size: int) -> jax.Array | None:
    """The step's key on this device's data shard."""
    return shard_key(rng, lax.axis_index(data_axes) if data_axes else 0, data_size)
