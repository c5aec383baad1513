"""The steps of a pipeline: check their arguments, make their jobs, and run these, compiled and with
their derivatives.  Pipelines of equal arguments share what JAX has compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from functools import cached_property, partial
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .arrays import Params, PyTree, described
from .derivatives import differentiable_loss, without_gradient
from .engine.costs import Costs
from .errors import PipelineError
from .fingerprint import compare_first_step
from .jaxprs.loops import with_counted_loops
from .lowering.plan import Plan, plan_of
from .lowering.target import Target
from .model.arguments import key_faults, param_faults, scale_faults, state_faults
from .model.batch import Positioned, batch_faults, num_rows, positions, time_faults
from .model.functions import Functions
from .model.model import Plain
from .model.param_layout import Chunks, with_outer
from .model.partition import Partition
from .model.settings import Memory, is_explicit, on_mesh
from .stage.model_code import Clock, Executor, Job, ModelCode, Observe
from .table.kinds import SPREAD_LAST
from .table.schedule import Schedule, named
from .transforms.rewrites import forward_only, without_kinds


class Call(Enum):
    """What a pipeline runs, by the method that runs it."""

    STEP = "value_and_grad"
    LOSS = "loss"  # forwards of a training step
    EVALUATE = "evaluate"  # forwards with `training=False`
    # the same, of what the last stage returns, without `last`; with a cache, that is the state
    OUTPUTS = "outputs"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("stages",),
    meta_fields=("sequences", "length"),
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
        self,
        call: Call,
        *arguments: PyTree,
        observe: Observe | None = None,
        clock: Clock | None = None,
    ) -> tuple[dict[str, Any], Params]:
        """The results of a call, and the gradients of a step.  `observe`: a tool traces it, which
        one process may do by itself.
        """
        functions = replace(self.functions, training=call in (Call.STEP, Call.LOSS))
        if call is Call.OUTPUTS:
            functions = functions.returning_outputs()
            if isinstance(arguments[1], Positioned):
                functions = functions.with_cache(arguments[1].room)
        else:
            self.check_last(call.value)
        training = call is Call.STEP
        if training and self.schedule.forward_only:
            raise PipelineError(
                f"{named(self.schedule)} has forwards only; use `evaluate`, or a "
                "schedule with backwards"
            )
        plans = self.check(*arguments, whole=training)
        params, batch, *rest = with_outer(arguments[0]), *arguments[1:]
        functions = functions.over(self.partition.axis, self.partition.cuts, params)
        job = Job(
            plan=self.plan if training else self._forward_plan(call, batch),
            functions=functions,
            partition=self.partition,
            accumulate=self.memory.accumulate,
            plans=plans,
            training=training,
            target=self.target,
            outputs=call is Call.OUTPUTS,
            observe=self._observing(observe, params, batch, *rest),
            clock=clock,
        )
        shardings = (
            {key: NamedSharding(job.mesh, spec) for key, spec in job.result_specs.items()},
            self.partition.shardings(plans) if training else {},
        )
        run: Callable[..., Any] = partial(self.executor.run, job)
        if self.executor.compiles:
            run = on_mesh(job.mesh, run, shardings)
        results, grads = run(params, batch, *rest)
        if not self.executor.compiles:
            put = on_mesh(job.mesh, lambda *found: jax.device_put(found, shardings), shardings)
            results, grads = put(results, grads)
        return results, {key: grads[key] for key in arguments[0] if key in grads}

    def check_last(self, what: str) -> None:
        """PipelineError without a `last`."""
        if self.functions.last is None:
            raise PipelineError(
                f"`{what}` needs a loss; give Model(..., last=function(last_params, x, "
                "microbatch) -> scalar)"
            )

    def check(
        self,
        params: Any,
        batch: PyTree,
        rng: Any,
        state: Any,
        scale: Any = None,
        *,
        whole: bool = True,
    ) -> dict[str, PyTree]:
        """The plans of parameters; PipelineError, before anything is traced, for those that are not
        placed for this schedule or rows that do not divide; `whole`: into all microbatches of the
        schedule.
        """
        table, layout = self.schedule, self.partition.layout
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
            *key_faults(rng),
            *scale_faults(scale),
            *state_faults(state, layout, "caches" if cached else own, self.partition.data_size),
        ]
        PipelineError.refuse(_REFUSED, faults)
        plans = self.partition.plans(with_outer(params))
        PipelineError.refuse(_REFUSED, self.partition.frozen_faults(plans))
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
        self.check(params, batch, None, ())
        own, stages = self.partition, range(self.schedule.num_stages)
        functions = replace(self.functions, training=False).with_cache(length)

        def carried(params: Params, batch: PyTree) -> PyTree:
            rows = functions.split(batch, self.schedule.num_microbatches)
            ready = functions.over(own.axis, own.cuts, params).for_batch(rows)
            params["stages"] = [own.layout.of_stage(s, params["stages"]) for s in stages]
            plain = Plain(ready, params, rows, None, stacked=False)
            _, zeros = plain.begin([()] * len(stages))
            return jax.tree.map(lambda a: jnp.broadcast_to(a, (self.sequences, *a.shape)), zeros)

        return jax.eval_shape(on_mesh(own.mesh, carried), with_outer(params), batch)

    def positioned(self, cache: Any, batch: PyTree, position: Any) -> Positioned:
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
        return plan_of(forward_only(table, count), overheads=self.target.overheads)

    def _observing(self, observe: Observe | None, *arguments: Any) -> Observe:
        """Checks the model as soon as it is traced, and calls `observe`.  Without it the step is
        compared with those of the other processes, the first time.
        """
        mixed = self.executor.compiles and any(map(is_explicit, jax.tree.leaves(arguments)))

        def check(job: Job, code: ModelCode, entries: Any) -> None:
            if mixed and job.mesh.size > 1 and code.partitions:
                raise PipelineError(_TWO_MESHES)
            if observe is not None:
                observe(job, code, entries)
            elif not self.compared:
                self.compared = True
                call = "a step" if job.training else "forwards alone"
                compare_first_step(self, call, arguments, code)

        return check


def hide_beyond(outputs: PyTree, batch: Positioned, time: tuple[str, ...]) -> PyTree:
    """NaN in place of floating outputs where rows are beyond the buffers of the cache.

    A position that is traced is known when the program runs, which is too late for an error.
    """
    if not isinstance(batch.position, jax.core.Tracer):
        return outputs
    end = batch.position + positions(batch.batch, time)
    fits = jnp.all(end <= batch.room) & jnp.all(batch.position >= 0)

    def hidden(leaf: Any) -> Any:
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.where(fits, leaf, jnp.nan) if inexact else leaf

    return jax.tree.map(hidden, outputs)


_REFUSED = "this step cannot be lowered"
_TWO_MESHES = (
    "the model calls a function with custom_partitioning (attention of cuDNN is one), which JAX "
    "lowers only where all arrays of a program are on one mesh, and some arguments inside of this "
    "jax.jit are on a mesh of explicit axes: bring them to the pipeline's own first, as in "
    "jax.device_put(batch, NamedSharding(pipe.mesh, spec)), and place parameters outside of "
    "jax.set_mesh"
)


def key_of(settings: Any) -> Any:
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


class Compiled:
    """The steps of a `StepRunner` as they are called: compiled, with their derivatives."""

    def __init__(self, steps: StepRunner, options: Mapping[str, Any]) -> None:
        def of(call: Call) -> Callable[..., Any]:
            def run(*arguments: PyTree) -> Any:
                return steps.run(call, *arguments)

            run.__name__ = call.value  # in profiles
            return _compiled(run, options) if steps.executor.compiles else run

        runs = {call: of(call) for call in Call}
        # What stages hand from microbatch to microbatch is known after a step alone.
        value = runs[Call.STEP if steps.functions.has_state else Call.LOSS]
        self.calls = {call: without_gradient(run, call.value) for call, run in runs.items()}
        self.calls[Call.LOSS] = differentiable_loss(value, runs[Call.STEP])


# Those that somebody holds, by key: see `key_of`.
HELD: WeakValueDictionary[Any, Compiled] = WeakValueDictionary()


def _compiled(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function compiled; with the options where it is called from outside of any other
    `jax.jit`.
    """
    inner = jax.jit(function)
    if not options:
        return inner
    outermost = jax.jit(with_counted_loops(function), compiler_options=dict(options))

    def call(*arguments: Any) -> Any:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))
        return (inner if traced else outermost)(*arguments)

    return call
