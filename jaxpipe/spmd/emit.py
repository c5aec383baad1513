"""The step of a program as one `shard_map`, whose body loads what the device starts from, runs the
segments and reduces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ..arrays import StepResults
from ..errors import PipelineError
from ..lowering.target import Form
from ..model.arguments import StepArguments
from ..model.settings import is_explicit
from ..stage.model_code import lower, trace
from ..stage.setup import Setup
from .gathers import empty_rooms
from .segment import SegmentCode
from .step import DeviceStep, finish
from .traced import TracedStep
from .xla import mapped, split_entries, without_empty

CANNOT_BE_TIMED = (
    "this step cannot be profiled on CPU devices: its functions permute over a mesh axis, so all "
    "devices run every block at once (ring attention permutes; the partitioner does for a roll, "
    "slice or concatenation along a dimension that is split); profile it without that axis, or "
    "on GPUs"
)

_TWO_MESHES = (
    "the model calls a function with custom_partitioning (attention of cuDNN is one), which JAX "
    "lowers only where all arrays of a program are on one mesh, and some arguments inside of this "
    "jax.jit are on a mesh of explicit axes: bring them to the pipeline's own first, as in "
    "jax.device_put(batch, NamedSharding(pipe.mesh, spec)), and place parameters outside of "
    "jax.set_mesh"
)


@dataclass(frozen=True)
class SpmdExecutor:
    """Runs a step on the devices of its mesh, all in one program (an `Executor`).

    Args:
        form: the form of the program's blocks; None is that of the kind of the devices.
    """

    form: Form | None = None
    compiles: ClassVar[bool] = True

    def prepare(self, setup: Setup, given: StepArguments) -> EmittedStep:
        """Trace the model for these arguments, or for their shapes, and make the program."""
        setup = replace(setup, target=replace(setup.target, own_form=self.form))
        shapes = setup.shapes(given)
        code = trace(setup, shapes)
        if (
            setup.mesh.size > 1
            and code.partitions
            and any(map(is_explicit, jax.tree.leaves(given)))
        ):
            raise PipelineError(_TWO_MESHES)
        entries = split_entries(setup, code, shapes.owned)
        return EmittedStep(setup, code, lower(setup, code), entries)


class EmittedStep(TracedStep):
    """A traced step as one program of all devices."""

    def run(self, given: StepArguments) -> StepResults:
        """The results and gradients of placed arguments; may be traced."""
        setup, specs = self.setup, self.setup.argument_specs(given.batch)
        out_specs = setup.result_specs, specs.params if setup.training else PartitionSpec()
        own, there, splits = without_empty(setup.mesh, self.on_device, given, specs)
        return mapped(own, setup.mesh, setup.axes, (splits,), out_specs)(there)

    def on_device(self, given: StepArguments) -> StepResults:
        """The step of each device; arguments are those of `Setup.load`.

        Every permute of XLA:CPU waits for all devices of the program, also for those outside its
        pairs.  Under predicates, some devices would wait in the permute of one block and some in
        that of another, until XLA ends the process.  Where blocks permute, all devices therefore
        run every block at once, and keep the result where its predicate holds (see `block`).

        With axes that are left to the partitioner, permutes are assumed: a block compiled alone
        does not show every one, because the partitioner decides from the whole program.  Timing
        needs predicates, and `jaxpipe.inspect.profile` refuses blocks that permute.
        """
        setup, program = self.setup, self.program
        assumed = bool(setup.partition.auto_axes) and setup.clock is None
        waits = setup.target.on_cpus and lax.axis_size(setup.axis) > 1
        everywhere = waits and (assumed or self.code.permutes)
        if everywhere and setup.clock is not None:
            raise PipelineError(CANNOT_BE_TIMED)
        inputs = setup.load(given, whole=False)
        with jax.named_scope("prepare"):
            step = DeviceStep(
                setup, inputs, self.code, program, self.buffers, everywhere=everywhere
            )
            state = step.empty_state() | empty_rooms(step)
            # One table takes one slice per trip.  Dozens of arrays would take dozens of slices.
            table = jnp.asarray(_narrow(np.stack(program.ticks.columns, axis=-1)))
            device = lax.axis_index(setup.axis)
            rows = lax.dynamic_index_in_dim(table, device, 1, keepdims=False)
        with jax.named_scope("ticks"):
            for segment in program.segments:
                state = SegmentCode(step, segment).run(rows, state)
        with jax.named_scope("finish"):
            return finish(step, state, given.params)


def _narrow(table: np.ndarray) -> np.ndarray:
    """The table in the smallest signed integers that hold it.  It is a constant of the program, and
    grows with M.
    """
    narrower = (table.astype(dtype) for dtype in (np.int8, np.int16))
    return next((small for small in narrower if (small == table).all()), table)
