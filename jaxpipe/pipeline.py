"""Pipeline: the public entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from .arrays import LossScale, Params, PyTree, Rng
from .derivatives import without_gradient
from .engine.costs import Costs
from .errors import PipelineError, typed
from .jaxprs.loops import with_counted_loops
from .known_faults import refuse_faults
from .layouts.layout import Layout
from .lowering.rooms import rooms_of, with_rooms
from .lowering.target import Target
from .model.arguments import (
    StepArguments,
    check_costs,
    donated_faults,
    key_faults,
    rematerialised,
)
from .model.calls import Cuts
from .model.functions import with_aux
from .model.model import Model
from .model.settings import Memory, Sharding, automatic, has, on_own_mesh
from .prices import read_prices
from .spmd.emit import EmittedStep, SpmdExecutor
from .spmd.xla import features_of, options_for
from .stage.setup import Clock
from .steps import HELD, Cache, Call, Compiled, Executor, StepRunner, hide_beyond, key_of
from .storage.chunks import ChunkState, ParamLayout, check_canonical
from .storage.partition import Partition
from .storage.placer import Placer
from .storage.plan import LeafPlan
from .storage.rules import Optimizer, check_rules, init_as_updated
from .table.schedule import Schedule, check, named
from .transforms.rewrites import remove_gathers
from .transforms.spread import with_shares


class Pipeline:
    """A model cut into stages, run on a mesh by a schedule's table.

    Args:
        model: the functions, their loss contract and frozen parameters (`jaxpipe.Model`).
        schedule: any valid table; its devices are the mesh's pipe axis.  Where the model spreads
            `first` or `last` over all devices, `spread_first` and `spread_last` put their actions
            in where the table has none.
        mesh: a `jax.sharding.Mesh` with axes of any types.  Axes that `sharding` does not name are
            left to the partitioner.  `pipe.mesh` has the same devices with automatic axes, and the
            pipeline's results are on that mesh.
        layout: the layers of each stage of a model that is given by letters,
            "Et*3|(tt|)*29,m|L" (see `parse_layout`).  No stage computes layers that it does not
            have.  None gives all stages equally many layers.
        sharding: the axes of the mesh and what each is for (`jaxpipe.Sharding`).
        memory: rematerialisation, offload and the accumulators' dtype (`jaxpipe.Memory`).
        costs: times of the stages' actions in seconds, as `jaxpipe.measure` returns them.  The
            program and the places of spread ends in the table are chosen by them, since predicates
            and transfers weigh more the shorter the actions are.  None is a forward of 5 ms.  What
            predicates and transfers take is read from the file that `jaxpipe doctor` writes, or
            guessed.
        executor: the back end; None is the SPMD executor, one `shard_map` program.
            `jaxpipe.eager.EagerExecutor()` runs the same program in eager JAX, for debugging.

    Pipelines of equal arguments, functions being the same objects, share compiled code.  It is
    freed with the last of them.

    Raises:
        ScheduleError: the table breaks a rule.
        PipelineError: mesh, axis or functions do not fit; every fault is listed.
        PipelineError: the installed versions are known to be faulty for what it uses, with the
            thread and a workaround (`jaxpipe doctor` lists them).
        CostError: costs or the file of measured prices are wrong.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe as jp
        >>> s = jp.schedules.build("1f1b", devices=1, microbatches=2)
        >>> model = jp.Model(
        ...     lambda p, x: jnp.tanh(x @ p), last=lambda p, x, mb: jnp.mean((x - mb["y"]) ** 2)
        ... )
        >>> pipe = jp.Pipeline(model, s, jax.make_mesh((1,), ("pipe",)))
        >>> params = pipe.place({"stages": jnp.ones((1, 3, 3)), "last": {}})
        >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 3))}
        >>> loss, grads = pipe.value_and_grad(params, batch)
        >>> grads["stages"][0].shape
        (1, 3, 3)
    """

    @typed(PipelineError)
    def __init__(
        self,
        model: Model,
        schedule: Schedule,
        mesh: Mesh,
        *,
        layout: str | Layout | None = None,
        sharding: Sharding = Sharding(),  # noqa: B008  both are frozen
        memory: Memory = Memory(),  # noqa: B008
        costs: Costs | None = None,
        executor: Executor | None = None,
    ) -> None:
        key = key_of((model, schedule, mesh, layout, sharding, memory, costs, executor))
        check(schedule)
        self.mesh = automatic(mesh)
        self.model, self.sharding, self.memory = model, sharding, memory
        self.axis, self.data_axes = sharding.pipe, tuple(sharding.data)
        self._target = Target.of(self.mesh, sharding.independent, read_prices())
        refuse_faults(self._target.platform, features_of(self._target, self.mesh))
        check_costs(costs, schedule)
        self.costs = costs
        sharding.check(self.mesh, schedule=named(schedule), devices=schedule.num_devices)
        splits = sharding.fsdp is not None and mesh.shape[sharding.fsdp] > 1
        schedule = with_rooms(schedule, None) if splits else remove_gathers(schedule)
        in_turn = splits and rooms_of(with_rooms(schedule, sharding.max_active)) is not None
        functions, layers = model.staged(schedule.placement, layout, in_turn=in_turn)
        self.layout = ParamLayout.of(
            schedule.placement, functions.stages, layers, model.stages, alike=in_turn
        )
        stages = rematerialised(functions.stages, memory.remat)
        self.functions = replace(functions, stages=stages, slices=schedule.slices)
        spread = [key for key in ("first", "last") if functions.spreads(key)]
        schedule = with_shares(schedule, costs, spread)
        self.schedule = with_rooms(schedule, sharding.max_active) if splits else schedule
        cuts, rules = Cuts(schedule.num_devices, functions.cuts), (model.frozen, model.replaced)
        self.partition = Partition(self.mesh, sharding, self.layout, cuts, *rules)
        self._placer = Placer(self.partition)
        executor = SpmdExecutor() if executor is None else executor
        parts = self.schedule, self.functions, self.partition
        self._steps = StepRunner(*parts, memory, costs, self._target, executor)
        calls = Compiled(self._steps, self.compiler_options)
        self._calls = HELD.setdefault((key, self._target), calls)

    def __repr__(self) -> str:
        """The schedule, the mesh, and what the model has."""
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        table = self.schedule
        return (
            f"Pipeline(schedule={table.name or 'a table'!r}, {table.num_stages} stages, "
            f"{table.num_microbatches} microbatches, mesh=({axes}), "
            f"{', '.join(self._steps.settings)})"
        )

    # Parameters

    def place(self, params: Mapping[str, PyTree]) -> Params:
        """Canonical parameters -> placed ones; ShapeDtypeStructs give ShapeDtypeStructs with
        shardings.

        Canonical: {"first", "stages" with leaves [S, ...] in model order, "last", "shared"}.
        Placed: "stages" is a tuple with a tree a chunk, leaves [P, ...] sharded over the pipe axis;
        the others are on every device.  Its structure says for which placement of stages it is,
        also after `jax.tree.map`, `jit` and an optimizer, so that no other schedule takes it.

        Raises:
            PipelineError: parameters that do not fit, are placed already, or no arrays; every fault
                is listed.
        """
        ends = [key for key in ("first", "last") if getattr(self.functions, key) is not None]
        check_canonical(params, self.layout, ends)
        return self._placer.place(dict(params))

    def canonical(self, placed: Mapping[str, PyTree], *, spread: bool = False) -> Params:
        """Placed parameters, or gradients, back in the canonical layout.

        With `spread`, leaves stay spread over the mesh (stages over the pipe axis where they
        divide), so that no device needs room for the whole model; otherwise they are where any
        computation finds them.
        """
        return self._placer.canonical(placed, spread=spread)

    def init(self, optimizer: Optimizer, params: Params, *, as_placed: bool = False) -> PyTree:
        """`optimizer.init(params)`, with every array where a training step leaves it: moments
        on the devices of their parameters, counts on the mesh.

        `optimizer.init` by itself leaves counts on one device, and moments in the dtype of
        parameters where gradients are wider, so that the step is compiled a second time for what
        the first returns. ShapeDtypeStructs give ShapeDtypeStructs with shardings.  `as_placed`
        says that rules for one array are meant for placed ones.

        Raises:
            PipelineError: it has rules for paths, ranks, shapes or norms, and placed arrays have
                others (see `jaxpipe.per_layer`).

        Example:
            opt_state = pipe.init(optimizer, params)
        """
        placed = self.trained(self._placer.checked(params))
        if not as_placed:
            check_rules(optimizer, *self._placer.shapes(placed), self.partition.plans(placed))
        begin = init_as_updated(optimizer, self.memory.accumulate)
        return self._placer.init(begin, placed, params)

    def trained(self, tree: Params, *, like: Params | None = None) -> Params:
        """Placed parameters, or a tree like them, with None for those that are `frozen` or
        `replaced`: what an optimizer is for.

        Example:
            trained = pipe.trained(params)
            updates, opt_state = optimizer.update(
                pipe.trained(grads, like=params), opt_state, trained
            )
            params = pipe.with_trained(params, optax.apply_updates(trained, updates), grads=grads)
        """
        plans = self.partition.plans(tree if like is None else like)

        def own(plan: LeafPlan, leaf: Array) -> Array | None:
            return leaf if plan.trained else None

        return jax.tree.map(own, plans, tree)

    def with_trained(
        self, params: Params, trained: Params, *, grads: Params | None = None
    ) -> Params:
        """Placed parameters with new values for those that `trained` keeps; with the gradients of a
        step also for those that are `replaced`.
        """

        def chosen(plan: LeafPlan, old: Array, new: Array, grad: Array) -> Array:
            if plan.trained:
                return new
            return grad if plan.replaced and grads is not None else old

        values = params, trained, params if grads is None else grads
        return jax.tree.map(chosen, self.partition.plans(params), *values)

    def place_state(self, state: PyTree) -> ChunkState:
        """The stages' own state (batch statistics, say), canonical like `params["stages"]`, laid
        out as `place` does.

        A stage that takes `state` by keyword returns (x, new state).  The next microbatch finds
        what the one before left, in the order of the table; no gradient goes back through it.  Over
        data shards it is averaged at the end of a step (integers: the greatest).
        """
        return self._placer.place_state(state)

    def canonical_state(self, placed: ChunkState) -> PyTree:
        """The stages' own state back in the canonical layout."""
        return self._placer.canonical_state(placed)

    # Steps

    def value_and_grad(
        self,
        params: Params,
        batch: PyTree,
        *,
        rng: Rng = None,
        state: ChunkState = (),
        scale: LossScale = None,
    ) -> tuple[Any, Params]:
        """The loss (with has_metrics: (loss, metrics)) and its gradients, laid out like `params`;
        may be jitted, donates nothing.

        `batch` is a tree whose leaves have a leading axis of rows, cut into M equal microbatches in
        order (each data shard cuts its own rows).  `rng` is the step's key, from which the keys of
        all calls are made (see `Context`).  With `state` (see `place_state`), the new state comes
        after the loss: ((loss, state), grads), or ((loss, metrics, state), grads).

        `scale` is a number by which the loss is multiplied before the backwards, so that gradients
        in half a precision do not underflow: loss and gradients are `scale` times what they are
        without it, metrics are not scaled.  It may be traced, and a new value needs no new program.
        """
        with self._arguments(params, batch, rng, state, scale) as arguments:
            results, grads = self._calls.step(without_gradient(arguments, Call.STEP.value))
        return self._answer(results, with_state=True), grads

    def loss(
        self,
        params: Params,
        batch: PyTree,
        *,
        rng: Rng = None,
        state: ChunkState = (),
        scale: LossScale = None,
    ) -> Any:
        """The loss of a training step, a scalar that `jax.grad` and `jax.value_and_grad`
        differentiate by `params`.

        Differentiated, it runs the step of `value_and_grad` once and scales its gradients, which
        then have the parameters' own dtypes.  A factor outside, `S * pipe.loss(...)`, thus comes
        after the backward, where gradients in half a precision may have underflowed; `scale=S`
        multiplies before (see `value_and_grad`).  Else it runs forwards alone, with `training=True`
        (`evaluate` runs them with `training=False`).  With has_metrics it is (loss, metrics), with
        state (loss, new state), with both (loss, (metrics, new state)), for `has_aux=True`: these
        are constants.

        Raises:
            PipelineError: as `value_and_grad` does; and where batch, rng, state or scale depend on
                what is differentiated.

        Example:
            loss, grads = jax.value_and_grad(lambda p: pipe.loss(p, batch) + 1e-4 *
            optax.tree.norm(p, squared=True))(params)
        """
        with self._arguments(params, batch, rng, state, scale) as arguments:
            results, _ = self._calls.loss(arguments)
        loss, *aux = self._parts(results, with_state=True)
        return with_aux(loss, aux)

    def evaluate(
        self, params: Params, batch: PyTree, *, rng: Rng = None, state: ChunkState = ()
    ) -> Any:
        """The loss (with has_metrics: (loss, metrics)) by forwards alone, the same on every
        process; the state after it is dropped.

        A batch of any number of rows will do, such as the last one of a data set: it is cut into as
        many microbatches as its rows divide into, up to the schedule's.  (Each number of rows is a
        program of its own.)  With data shards it needs as many rows for each: add rows to which
        `last` gives no weight, and count with `Loss.SUM_OVER_COUNT`.
        """
        return self._answer(self._evaluated(params, batch, rng, state))

    def losses(
        self, params: Params, batch: PyTree, *, rng: Rng = None, state: ChunkState = ()
    ) -> Array:
        """The loss of each microbatch, [M], in microbatch order (sums, for `Loss.SUM_OVER_COUNT`);
        fewer where `evaluate` cuts fewer.
        """
        self._steps.check_last("losses")
        return self._evaluated(params, batch, rng, state)["losses"]

    def outputs(
        self,
        params: Params,
        batch: PyTree,
        *,
        rng: Rng = None,
        state: ChunkState = (),
        cache: Cache | None = None,
        position: ArrayLike = 0,
    ) -> PyTree:
        """What the last stage returns, before `last`: leaves [rows, ...] in the order of the
        batch's rows, by forwards alone.

        A leaf that is a scalar of each microbatch gives one entry a microbatch.  With `state` (see
        `place_state`) it is (outputs, new state).

        With a `cache` (see `empty_cache`) it is (outputs, new cache): carries and appended rows go
        on from the calls before.  `position` is that of the first row of time in its sequence, a
        whole number or one for each sequence.  Where it is traced, floating outputs are NaN for
        rows beyond the buffers.

        Raises:
            PipelineError: as `value_and_grad` does; a cache of another form, or with `state` or
                data axes; rows beyond the buffers.

        Example:
            out, cache = pipe.outputs(params, {"tokens": newest}, cache=cache, position=17)
        """
        if cache is not None:
            if state:
                raise PipelineError("a cache does not combine with state=; leave it out")
            batch, state = self._steps.positioned(cache, batch, position), cache.stages
        with self._arguments(params, batch, rng, state) as arguments:
            results, _ = self._calls.outputs(without_gradient(arguments, Call.OUTPUTS.value))
        outputs = results["outputs"]
        if cache is not None:
            outputs = hide_beyond(outputs, batch, self.model.time)
            return outputs, replace(cache, stages=results["state"])
        return (outputs, results["state"]) if self.functions.has_state else outputs

    def empty_cache(self, params: Params, batch: PyTree, *, length: int) -> Cache:
        """A cache for the sequences of the schedule: zeros for the carries and the rows that stages
        append for such a batch, with room for `length` positions.

        Parameters as ShapeDtypeStructs give ShapeDtypeStructs.  Pipelines with other slices and
        the same placement of stages take the cache too.

        Raises:
            PipelineError: batch or parameters do not fit, or a stage takes `state`.

        Example:
            cache = pipe.empty_cache(params, {"tokens": prompts}, length=4096)
        """
        trees = self._steps.cache_shapes(params, batch, length)
        described = has(params, jax.ShapeDtypeStruct)
        stages = self._placer.place_zeros(trees, shapes=described)
        return Cache(stages, self._steps.sequences, length)

    def lower(
        self, params: Params, batch: PyTree, *, rng: Rng = None, state: ChunkState = ()
    ) -> jax.stages.Lowered:
        """Like `jax.jit(value_and_grad).lower`: takes ShapeDtypeStructs (see `place`) too;
        `.compile()` works for any mesh.

        What it compiles to is called with the same arguments: `compiled(params, batch)`, or
        `compiled(params, batch, rng=key)`.
        """
        return self.trace(params, batch, rng=rng, state=state).function.lower()

    def trace(
        self,
        params: Params,
        batch: PyTree,
        *,
        rng: Rng = None,
        state: ChunkState = (),
        clock: Clock | None = None,
    ) -> EmittedStep:
        """Trace the step that `lower` lowers: what the tools of `jaxpipe.inspect` start from.

        Every block calls `clock` on the host at its begin and at its end.

        Raises:
            PipelineError: as `value_and_grad` does.
        """

        def step(
            params: Params, batch: PyTree, *, rng: Rng = None, state: ChunkState = ()
        ) -> tuple[Any, Params]:
            given = StepArguments(params, batch, rng, state)
            results, grads = self._steps.run(Call.STEP, given, step=found)
            return self._answer(results, with_state=True), grads

        with self._arguments(params, batch, rng, state) as arguments:
            found = self._steps.prepare(Call.STEP, arguments, clock=clock)
            params, batch, rng, state, _ = arguments
            keywords = ({} if rng is None else {"rng": rng}) | ({"state": state} if state else {})
            function = self.jit(step).trace(params, batch, **keywords)
        assert isinstance(found, EmittedStep), "a step without one program is refused"
        return replace(found, function=function)

    # Compiling

    @cached_property
    def compiler_options(self) -> dict[str, str | bool]:
        """XLA options that the program wants on this mesh's backend: on NVIDIA GPUs predicates
        become nodes of CUDA graphs; else none.

        `value_and_grad`, `evaluate`, `outputs` and `lower` use them.  JAX takes options at the
        outermost `jax.jit` only, so a function of yours around them needs them too: write
        `pipe.jit(train_step)`.

        A `jax.jit` of your own with these options is right only if no loop outside of the model has
        a condition that is nothing but a flag, as `lambda carry: carry[0]`: XLA's CUDA graphs run
        such a loop too often.  `pipe.jit` repairs it, and so does the pipeline in the model.
        """
        return options_for(self._target)

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """`jax.jit` with the XLA options that the program wants (`compiler_options`); those that
        you give go before them.  With such options, the loops of the function count their trips
        where XLA would else run them too often (see `compiler_options`).

        Example:
            step = pipe.jit(train_step, donate_argnums=(0, 1))
        """
        own = options.pop("compiler_options", None) or {}
        mine = {**self.compiler_options, **own}
        if not mine:
            return jax.jit(function, **options)
        return jax.jit(with_counted_loops(function), compiler_options=mine, **options)

    # Inside

    @contextmanager
    def _arguments(
        self, params: Params, batch: PyTree, rng: Rng, state: ChunkState, scale: LossScale = None
    ) -> Iterator[StepArguments]:
        """The arguments of a step, on the pipeline's own mesh.  What JAX cannot take is named by
        its place in them.
        """
        given = StepArguments(params, batch, rng, state, scale)
        arguments: StepArguments = jax.tree.map(partial(on_own_mesh, self.mesh), given)
        PipelineError.refuse("", [*key_faults(rng), *donated_faults(arguments)])
        try:
            yield arguments
        except TypeError:
            self._steps.check(arguments)
            raise

    def _evaluated(
        self, params: Params, batch: PyTree, rng: Rng, state: ChunkState
    ) -> dict[str, Any]:
        """The results of `evaluate`."""
        with self._arguments(params, batch, rng, state) as arguments:
            results, _ = self._calls.evaluate(without_gradient(arguments, Call.EVALUATE.value))
        return results

    def _parts(self, results: dict[str, Any], *, with_state: bool) -> list[Any]:
        """The loss, then the metrics and the state where the model has these."""
        found = [results["loss"]]
        found += [results["metrics"]] if self.functions.has_metrics else []
        found += [results["state"]] if with_state and self.functions.has_state else []
        return found

    def _answer(self, results: dict[str, Any], *, with_state: bool = False) -> Any:
        found = self._parts(results, with_state=with_state)
        return found[0] if len(found) == 1 else tuple(found)
