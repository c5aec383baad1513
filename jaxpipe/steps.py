"""The steps of a pipeline: check their arguments, make their jobs, and run these.  Pipelines of
equal arguments share what JAX has compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .arrays import Params, PyTree, array_faults, axis_faults, by_index
from .engine.costs import Costs
from .errors import PipelineError
from .fingerprint import compare_first_step
from .lowering.plan import Plan, plan_of
from .lowering.target import Target
from .model.functions import Functions
from .model.mesh import on_mesh
from .model.param_layout import OUTER, ParamLayout, owner_faults, with_outer
from .model.partition import Partition
from .model.settings import Memory
from .model.slices import Positioned, time_faults
from .stage.job import Clock, Executor, Job, Observe
from .stage.model_code import ModelCode
from .table.effects import Offload
from .table.kinds import Kind
from .table.schedule import Schedule
from .transforms.rewrites import for_evaluation, without_kinds

_HELD: WeakValueDictionary[Any, Callable[..., Any]] = WeakValueDictionary()


def jit_same(key: Any, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` of the function, or what this returned for an earlier one of an equal key and equal
    options, if somebody holds it.
    """
    whole = (key, key_of(options))
    found = _HELD.get(whole)
    if found is None:
        found = _HELD[whole] = jax.jit(function, **options)
    return found


def key_of(settings: Mapping[str, Any]) -> Any:
    """Settings as a key: equal for equal settings, functions being equal only to themselves; unique
    where one cannot be compared.
    """
    key = tuple((name, _hashable(value)) for name, value in sorted(settings.items()))
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(
            (name, _hashable(item))
            for name, item in sorted(value.items(), key=lambda pair: str(pair[0]))
        )
    if type(value) in (list, tuple):
        return tuple(map(_hashable, value))
    if is_dataclass(value) and not isinstance(value, type):
        try:
            hash(value)
        except TypeError:  # it holds a list or a mapping
            return type(value), _hashable({f.name: getattr(value, f.name) for f in fields(value)})
    return value


@dataclass(eq=False)
class StepRunner:
    """Runs the steps of a schedule.  `given` are parameters, batch, key and state."""

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
        return replace(plan, offload=Offload(self.memory.offload))

    @property
    def sequences(self) -> int:
        """The sequences of a step; without slices these are the microbatches."""
        return self.schedule.num_microbatches // self.schedule.slices

    def step(
        self, *given: PyTree, observe: Observe | None = None, clock: Clock | None = None
    ) -> tuple[dict[str, Any], Params]:
        """Losses and gradients."""
        self.check_last("a training step")
        if self.schedule.forward_only:
            raise PipelineError(
                f"schedule {self.schedule.name!r} has forwards only; use `evaluate`, or a "
                "schedule with backwards"
            )
        return self._run(given, training=True, observe=observe, clock=clock)

    def forwards(self, *given: PyTree) -> dict[str, Any]:
        """The results of a step, without its gradients."""
        self.check_last("`loss`")
        functions = replace(self.functions, training=True)
        return self._run(given, training=False, functions=functions)[0]

    def evaluate(self, *given: PyTree) -> dict[str, Any]:
        """The results of forwards with `training=False`."""
        self.check_last("`evaluate`")
        return self._run(given, training=False)[0]

    def outputs(self, *given: PyTree) -> dict[str, Any]:
        """What the last stage returns, without `last`; with a cache, that is the state."""
        functions = replace(self.functions, training=False).returning_outputs()
        if isinstance(given[1], Positioned):
            functions = functions.with_cache(given[1].room)
        return self._run(given, training=False, functions=functions, outputs=True)[0]

    def check_last(self, what: str) -> None:
        """PipelineError without a `last`."""
        if self.functions.last is None:
            raise PipelineError(
                f"{what} needs a loss; give Model(..., last=function(last_params, x, "
                "microbatch) -> scalar)"
            )

    def _run(
        self,
        given: tuple[PyTree, ...],
        *,
        training: bool,
        functions: Functions | None = None,
        outputs: bool = False,
        observe: Observe | None = None,
        clock: Clock | None = None,
    ) -> tuple[dict[str, Any], Params]:
        """Do a job; `observe`: a tool traces it, which one process may do by itself."""
        self.check(*given, training=training)
        params, batch, *rest = with_outer(given[0]), *given[1:]
        job = Job(
            plan=self.plan if training else self._forward_plan(batch, outputs=outputs),
            functions=functions or replace(self.functions, training=training),
            partition=self.partition,
            accumulate=self.memory.accumulate,
            plans=self.partition.plans(params),
            training=training,
            outputs=outputs,
            observe=observe or self._comparing(params, batch, *rest),
            clock=clock,
        )
        shardings = self._result_shardings(job, params)
        run = partial(self.executor.run, job)
        if self.executor.compiles:
            traced = on_mesh(job.mesh, run, lambda *_: shardings)
            results, grads = traced(params, batch, *rest)
        else:
            results, grads = jax.tree.map(
                lambda to, tree: jax.device_put(tree, to), shardings, run(params, batch, *rest)
            )
        return results, {key: grads[key] for key in given[0] if key in grads}

    def _forward_plan(self, batch: PyTree, *, outputs: bool) -> Plan:
        """The plan of forwards of a batch: as many microbatches of whole sequences, up to those of
        the schedule, as its rows divide into.  What the last stage returns needs no `last`.
        """
        table = without_kinds(self.schedule, {Kind.L}) if outputs else self.schedule
        batch = batch.batch if isinstance(batch, Positioned) else batch
        rows = np.shape(jax.tree.leaves(batch)[0])[0] // self.partition.data_size
        sequences = range(1, self.sequences + 1)
        count = table.slices * max(count for count in sequences if rows % count == 0)
        return plan_of(for_evaluation(table, count), overheads=self.target.overheads)

    def _comparing(self, params: Any, batch: Any, rng: Any, state: Any) -> Observe:
        """Compares this step with those of the other processes, the first time, as soon as it is
        traced.
        """
        given = {"params": params, "batch": batch, "rng": rng, "state": state}

        def compare(job: Job, code: ModelCode, _: Any) -> None:
            if not self.compared:
                self.compared = True
                compare_first_step(
                    self, "a step" if job.training else "forwards alone", given, code
                )

        return compare

    def _result_shardings(
        self, job: Job, params: Mapping[str, PyTree]
    ) -> tuple[dict[str, NamedSharding], PyTree]:
        """The shardings of results and gradients, for every executor."""
        results = {key: NamedSharding(job.mesh, spec) for key, spec in job.result_specs.items()}
        return results, self.partition.shardings(params) if job.training else {}

    def check(
        self,
        params: Mapping[str, PyTree],
        batch: PyTree,
        rng: Any,
        state: Any,
        *,
        training: bool = True,
    ) -> None:
        """PipelineError, before anything is traced, for parameters that are not placed for this
        schedule or rows that do not divide.
        """
        table, layout = self.schedule, self.partition.layout
        cached = isinstance(batch, Positioned)
        batch = batch.batch if cached else batch
        faults = [
            *param_faults(params, layout, table.num_devices),
            *batch_faults(
                batch,
                self.sequences if training or cached else 1,
                data_shards=self.partition.data_size,
            ),
            *time_faults(batch, table.slices, self.functions.time),
            *key_faults(rng),
            *state_faults(state, layout, wanted=cached or self.functions.has_state),
        ] or self.partition.frozen_faults(self.partition.plans(params))
        PipelineError.refuse("this step cannot be lowered", faults)


def param_faults(params: Any, layout: ParamLayout, devices: int) -> list[str]:
    """Faults of parameters that must be placed there."""
    wanted = {"stages", *OUTER}
    if not isinstance(params, Mapping) or "stages" not in params or not set(params) <= wanted:
        faults = [f"parameters must be what `place` returned, a dict with keys of {sorted(wanted)}"]
    else:
        faults = owner_faults(params["stages"], layout, "parameters", "place") or axis_faults(
            params["stages"], "stages", devices, f"the {devices} devices (see `place`)"
        )
    return [*faults, *array_faults(params, "params")]


def batch_faults(batch: PyTree, count: int, *, data_shards: int) -> list[str]:
    """Faults of a batch whose rows are cut into `count` microbatches on each data shard."""
    leaves = by_index(batch, "batch")
    if not leaves:
        return ["the batch has no leaves; give a tree of arrays with a leading axis of rows"]
    faults = array_faults(batch, "batch")
    scalars = [name for name, leaf in leaves.items() if not np.shape(leaf)]
    if faults:
        return faults
    if len(scalars) > 3:
        return [
            f"{len(scalars)} leaves of the batch are plain numbers, {scalars[0]} the first "
            "of them: lists are trees to JAX; make "
            "arrays of them, jax.numpy.asarray([...]), with a leading axis of rows"
        ]
    lengths = {}
    for name, leaf in leaves.items():
        shape = np.shape(leaf)
        if not shape:
            faults.append(
                f"{name} is a scalar; every leaf needs a leading axis "
                "of rows "
                '(close over values that all rows share, or put them under "shared")'
            )
            continue
        rows = lengths[name] = shape[0]
        if rows == 0 or rows % (count * data_shards):
            shards = f" x {data_shards} data shards" if data_shards > 1 else ""
            near = max(1, round(rows / (count * data_shards))) * count * data_shards
            faults.append(
                f"{name} has {rows} rows, which do not divide into "
                f"{count} microbatches{shards}; use {near} rows"
            )
    if len(set(lengths.values())) > 1:
        faults.append(
            "leaves of the batch have different lengths: "
            + ", ".join(f"{k} has {n} rows" for k, n in lengths.items())
        )
    return faults


def key_faults(rng: Any) -> list[str]:
    """Faults of the step's key."""
    if rng is None:
        return []
    dtype, shape = getattr(rng, "dtype", None), np.shape(rng)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if (typed and shape == ()) or (dtype == np.uint32 and len(shape) == 1):
        return []
    if typed:
        return [f"rng holds {shape} keys, but a step takes one; give one of them"]
    what = f"rng={rng}" if isinstance(rng, int) else f"rng is {type(rng).__name__}, and"
    return [f"{what} is no key; write rng=jax.random.key({rng if isinstance(rng, int) else 0})"]


def state_faults(state: Any, layout: ParamLayout, *, wanted: bool) -> list[str]:
    """Faults of the stages' own state; `wanted`: some stage takes it."""
    if bool(state) is not wanted:
        takes = "takes `state`, but the step got none; give state=pipe.place_state(...)"
        return [
            f"a stage {takes}" if wanted else "no stage takes `state` by keyword; leave state= out"
        ]
    return owner_faults(state, layout, "state", "place_state") if state else []
