"""The steps of a pipeline: check their arguments, make their jobs, and run these, compiled and with
their derivatives.  Pipelines of equal arguments share what JAX has compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .arrays import ByPart, Params, PyTree, StepResults, described
from .derivatives import RunStep, differentiable_loss
from .engine.costs import Costs
from .errors import PipelineError
from .fingerprint import compare_first_step
from .jaxprs.loops import with_counted_loops
from .lowering.plan import Plan, plan_of
from .lowering.rooms import rooms_of
from .lowering.target import Target
from .model.arguments import StepArguments, scale_faults
from .model.batch import Positioned, batch_faults, num_rows, positions, time_faults
from .model.functions import Functions
from .model.layers import with_outer
from .model.model import Plain
from .model.settings import Memory, as_automatic, has, in_context, on_mesh, own_context
from .stage.setup import Clock, Setup
from .storage.chunks import Chunks, param_faults, room_faults, state_faults
from .storage.partition import Partition
from .table.kinds import SPREAD_LAST
from .table.schedule import Schedule, named
from .transforms.add_gathers import add_gathers
from .transforms.rewrites import forward_only, remove_gathers, without_kinds


class PreparedStep(Protocol):
    """A step that can be run."""

    @property
    def setup(self) -> Setup:
        """What is known of it besides arrays."""

    def run(self, given: StepArguments) -> StepResults:
        """The results, and gradients laid out like the parameters, {} without any."""


@runtime_checkable
class Executor(Protocol):
    """A back end."""

    @property
    def compiles(self) -> bool:
        """Whether its steps are traced and compiled; otherwise they are called directly."""

    def prepare(self, setup: Setup, given: StepArguments) -> PreparedStep:
        """The step for arguments of these shapes."""


class Call(Enum):
    """What a pipeline runs, by the method that runs it."""

    STEP = "value_and_grad"
    LOSS = "loss"  # forwards of a training step
    EVALUATE = "evaluate"  # forwards with `training=False`
    # the same, of what the last stage returns, without `last`; with a cache, that is the state
    OUTPUTS = "outputs"


@partial(
    jax.tree_util.register_dataclass, data_fields=("stages",), meta_fields=("sequences", "length")
)
@dataclass(frozen=True)
class Cache:
    """What the stages keep of some sequences, on the devices of the stages.

    Attributes:
        stages: for each chunk (carry, appended rows by name), leaves [P, sequences, ...].
        sequences: how many there are; sequence m is microbatch m of a schedule without slices.
        length: positions of a sequence that there is room for.
    """

    stages: Chunks
    sequences: int
    length: int


@dataclass(eq=False)
class StepRunner:
    """Runs the steps of a schedule.  Their arguments are parameters, batch, key, state and the
    factor of the loss.
    """

    schedule: Schedule
    functions: Functions
    partition: Partition
    memory: Memory
    costs: Costs | None
    target: Target
    executor: Executor
    compared: bool = False  # with the other processes, where there are some

    @cached_property
    def plan(self) -> Plan:
        """The plan of a training step."""
        mesh = self.partition.mesh
        plan = plan_of(
            self.schedule,
            costs=self.costs,
            overheads=self.target.overheads,
            as_one=any(mesh.shape[name] > 1 for name in self.partition.sharding.local),
        )
        return replace(plan, offload=self.memory.offload)

    @property
    def sequences(self) -> int:
        """The sequences of a step; without slices these are the microbatches."""
        return self.schedule.num_microbatches // self.schedule.slices

    @property
    def settings(self) -> list[str]:
        """The settings of the pipeline as text: axes, layers, and the ends of the model."""
        own, ends = self.partition, (self.functions.first, self.functions.last)
        parts = [f"axis={own.axis!r}"]
        parts += [f"data_axes={own.data_axes}"] if own.data_axes else []
        if own.layout.layers is not None:
            parts.append(f"layout={'|'.join(own.layout.layers.stages)!r}")
        names = [function.name for function in ends if function is not None]
        return [*parts, f"with {' and '.join(names) or 'neither first nor last'}"]

    def run(
        self, call: Call, given: StepArguments, *, step: PreparedStep | None = None
    ) -> StepResults:
        """The results of a call, and the gradients of a step; `step` is the call prepared for
        arguments of these shapes.
        """
        mesh = self.partition.mesh
        if step is None:
            step = self.prepare(call, given)
            if self.executor.compiles and not self.compared:
                self.compared = True
                compare_first_step(self, given, step)
        whole = _with_outer(given)
        if self.executor.compiles:
            with own_context(mesh):
                found = step.run(jax.tree.map(as_automatic, whole))
        else:
            found = step.run(whole)
            with own_context(mesh):
                found = jax.device_put(found, step.setup.shardings)
        results, grads = in_context(mesh, found, step.setup.shardings)
        return results, {key: grads[key] for key in given.params if key in grads}

    def prepare(
        self, call: Call, given: StepArguments, *, clock: Clock | None = None
    ) -> PreparedStep:
        """The step of a call on arguments of these shapes, of which the back end has made all that
        needs no numbers.
        """
        setup = self._setup(call, given, clock)
        with own_context(self.partition.mesh):
            return self.executor.prepare(setup, _with_outer(given))

    def _setup(self, call: Call, given: StepArguments, clock: Clock | None) -> Setup:
        """What is known of a call without numbers; PipelineError where it cannot be done."""
        functions = replace(self.functions, training=call in (Call.STEP, Call.LOSS))
        batch, training = given.batch, call is Call.STEP
        if call is Call.OUTPUTS:
            functions = functions.returning_outputs()
            if isinstance(batch, Positioned):
                functions = replace(functions, room=batch.room)
        else:
            self.check_last(call.value)
        if training and self.schedule.forward_only:
            raise PipelineError(
                f"{named(self.schedule)} has forwards only; use `evaluate`, or a "
                "schedule with backwards"
            )
        plans, own = self.check(given, whole=training), self.partition
        functions = replace(functions, axis=own.axis, sizes=own.sizes(plans))
        plan = self.plan if training else self._forward_plan(call, batch)
        if plan.ticks.rooms is not None:
            faults = room_faults(given.params["stages"], "parameters", "place")
            faults += room_faults(given.state, "state", "place_state")
            PipelineError.refuse(_REFUSED, faults)
        split = partial(functions.split, count=plan.ticks.schedule.num_microbatches)
        return Setup(
            ticks=plan.ticks,
            segments=plan.segments,
            offload=plan.offload,
            functions=functions.for_batch(jax.eval_shape(split, batch)),
            partition=own,
            accumulate=self.memory.accumulate,
            plans=plans,
            training=training,
            target=self.target,
            outputs=call is Call.OUTPUTS,
            clock=clock,
        )

    def check_last(self, what: str) -> None:
        """PipelineError without a `last`."""
        if self.functions.last is None:
            raise PipelineError(
                f"`{what}` needs a loss; give Model(..., last=function(last_params, x, "
                "microbatch) -> scalar)"
            )

    def check(self, given: StepArguments, *, whole: bool = True) -> ByPart:
        """The plans of parameters; PipelineError, before anything is traced, for those that are not
        placed for this schedule or rows that do not divide; `whole`: into all microbatches of the
        schedule.  The key was checked before: see `Pipeline`.
        """
        table, layout = self.schedule, self.partition.layout
        params, batch, _, state, scale = given
        cached = isinstance(batch, Positioned)
        batch = batch.batch if cached else batch
        count = self.sequences if whole or cached else 1
        own = "state" if self.functions.has_state else ""
        faults = [
            *param_faults(params, layout, table.num_devices),
            *batch_faults(
                batch, count, data_shards=self.partition.data_size, whole=self.functions.whole
            ),
            *time_faults(batch, table.slices, self.functions.time),
            *scale_faults(scale),
            *state_faults(state, layout, "caches" if cached else own, self.partition.data_size),
        ]
        PipelineError.refuse(_REFUSED, faults)
        plans = self.partition.plans(with_outer(params))
        PipelineError.refuse(_REFUSED, self.partition.path_faults(plans))
        return plans

    def cache_shapes(self, params: Params, batch: PyTree, length: int) -> PyTree:
        """The shapes of what each stage keeps in a cache with room for `length` positions, leaves
        [sequences, ...].

        Raises:
            PipelineError: parameters, batch or length do not fit; every fault is listed.
        """
        faults = self._cache_faults(batch)
        if not isinstance(length, int) or length < 1:
            faults.append(f"length must be a whole number of at least 1, not {length!r}")
        PipelineError.refuse("there is no cache for this batch", faults)
        plans = self.check(StepArguments(params, batch))
        own, stages = self.partition, range(self.schedule.num_stages)
        functions = replace(self.functions, axis=own.axis, sizes=own.sizes(plans))
        functions = replace(functions, training=False, room=length)

        def carried(params: Params, batch: PyTree) -> PyTree:
            rows = functions.split(batch, self.schedule.num_microbatches)
            ready = functions.for_batch(rows)
            params["stages"] = [own.layout.of_stage(s, params["stages"]) for s in stages]
            plain = Plain(ready, params, rows, None, stacked=False)
            _, zeros = plain.begin([()] * len(stages))
            return jax.tree.map(lambda a: jnp.broadcast_to(a, (self.sequences, *a.shape)), zeros)

        return jax.eval_shape(on_mesh(own.mesh, carried), with_outer(params), batch)

    def positioned(self, cache: Any, batch: PyTree, position: ArrayLike) -> Positioned:
        """The batch of a call that goes on at a position of its cache.

        Raises:
            PipelineError: cache, batch and position do not fit; every fault is listed.
        """
        faults, sequences = self._cache_faults(batch), self.sequences
        whole = jnp.issubdtype(jnp.result_type(position), jnp.integer)
        if not whole or np.shape(position) not in ((), (sequences,)):
            what = described(position)
            faults.append(f"position is {what}; give a whole number, or {sequences} of them")
        if not isinstance(cache, Cache):
            kind = type(cache).__name__
            faults += [f"cache= takes what `empty_cache` or `outputs` returned, not {kind}"]
        elif not faults:
            if cache.sequences != sequences:
                has = f"the cache has {cache.sequences} sequences"
                faults += [f"{has}, but the schedule has {sequences}"]
            if not isinstance(position, jax.core.Tracer):
                more = positions(batch, self.functions.time)
                least = int(np.min(position))
                end = int(np.max(position)) + more
                if least < 0 or end > cache.length:
                    faults.append(
                        f"{more} rows at position {least if least < 0 else end - more} are beyond "
                        f"the buffers of the cache, which have room for {cache.length}; make it "
                        f"with length={end}"
                    )
        PipelineError.refuse("this call with a cache cannot be lowered", faults)
        at = jnp.broadcast_to(jnp.asarray(position, jnp.int32), (sequences,))
        return Positioned(batch, at, cache.length)

    def _cache_faults(self, batch: PyTree) -> list[str]:
        """Why a batch cannot go with a cache."""
        functions = self.functions
        faults = time_faults(batch, functions.slices, functions.time, always=True)
        if axes := self.partition.data_axes:
            faults.append(
                f"a cache does not combine with the data axes {', '.join(axes)}; give each data "
                "shard a pipeline of its own"
            )
        if functions.has_state:
            faults.append("a cache does not combine with stages that take `state`")
        return faults

    def _forward_plan(self, call: Call, batch: PyTree) -> Plan:
        """The plan of forwards of a batch: as many microbatches of whole sequences, up to those of
        the schedule, as its rows divide into.  What the last stage returns needs no `last`.
        """
        table = without_kinds(self.schedule, SPREAD_LAST) if call is Call.OUTPUTS else self.schedule
        rows = num_rows(batch, self.functions.whole) // self.partition.data_size
        sequences = range(1, self.sequences + 1)
        count = table.slices * max(count for count in sequences if rows % count == 0)
        table, rooms = forward_only(remove_gathers(table), count), rooms_of(self.schedule)
        if rooms is not None:
            table = add_gathers(table, max_active=rooms.count)
        return plan_of(table, overheads=self.target.overheads)


def hide_beyond(outputs: PyTree, batch: Positioned, time: tuple[str, ...]) -> PyTree:
    """NaN in place of floating outputs where rows are beyond the buffers of the cache.

    A position that is traced is known when the program runs, which is too late for an error.
    """
    if not isinstance(batch.position, jax.core.Tracer):
        return outputs
    end = batch.position + positions(batch.batch, time)
    fits = jnp.all(end <= batch.room) & jnp.all(batch.position >= 0)

    def hidden(leaf: jax.Array) -> jax.Array:
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.where(fits, leaf, jnp.nan) if inexact else leaf

    return jax.tree.map(hidden, outputs)


_REFUSED = "this step cannot be lowered"


def key_of(settings: object) -> object:
    """Settings as a key: equal for equal settings, functions being equal only to themselves; unique
    where one cannot be compared.
    """
    try:
        hash(settings)
    except TypeError:
        if isinstance(settings, Mapping):
            pairs = sorted(settings.items(), key=lambda pair: str(pair[0]))
            return tuple((name, key_of(item)) for name, item in pairs)
        if isinstance(settings, list | tuple):
            return tuple(map(key_of, settings))
        if is_dataclass(settings):
            return type(settings), key_of(vars(settings))
        return object()
    return settings


def _with_outer(given: StepArguments) -> StepArguments:
    """The arguments of a step, with an empty tree for parameters that the model does not have."""
    return given._replace(params=with_outer(given.params))


class Compiled:
    """The calls of a `StepRunner`: compiled, with their derivatives."""

    def __init__(self, steps: StepRunner, options: Mapping[str, str | bool]) -> None:
        def of(call: Call) -> RunStep:
            run = partial(steps.run, call)
            run.__name__ = call.value  # type: ignore[attr-defined]  # in profiles
            return _compiled(run, options) if steps.executor.compiles else run

        self.step, self.evaluate, self.outputs = map(of, (Call.STEP, Call.EVALUATE, Call.OUTPUTS))
        # What stages hand from microbatch to microbatch is known after a step alone.
        value = self.step if steps.functions.has_state else of(Call.LOSS)

        def replaced(params: Params) -> ByPart:
            plans = steps.partition.plans(params)
            return dict(jax.tree.map(lambda plan: plan.replaced is not None, plans))

        self.loss = differentiable_loss(value, self.step, replaced)


# Those that somebody holds, by key: see `key_of`.
HELD: WeakValueDictionary[object, Compiled] = WeakValueDictionary()


def _compiled(function: RunStep, options: Mapping[str, str | bool]) -> RunStep:
    """The function compiled; with the options where it is called from outside of any other
    `jax.jit`.
    """
    inner: RunStep = jax.jit(function)
    if not options:
        return inner
    outermost: RunStep = jax.jit(with_counted_loops(function), compiler_options=dict(options))

    def call(given: StepArguments) -> StepResults:
        return (inner if has(given, jax.core.Tracer) else outermost)(given)

    return call
