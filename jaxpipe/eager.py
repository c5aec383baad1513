"""The eager executor: a program run by `program.ir.interpret` in one process, with plain `jax.vjp`
the stages.

No shard_map, no compilation, no cut of the backward: an oracle for the SPMD executor, and a step
that a debugger can walk through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .arrays import (
    Leaf,
    Params,
    PyTree,
    StepResults,
    accumulator_dtype,
    in_rows,
    stacked,
    with_words,
    zeros_of,
)
from .errors import PipelineError
from .lowering.plan import Plan
from .model.arguments import StepArguments
from .model.batch import map_rows
from .model.calls import OUTER_WANTS
from .model.functions import Extra, StageOutput
from .model.keys import shard_key
from .model.layers import OUTER
from .model.settings import has
from .program.ir import Program, Step, interpret
from .program.verify import verify
from .spmd.step import merged_state, totals
from .stage.code import ParamUse, StageCode, inexact
from .stage.counts import check_count, total_count
from .stage.model_code import check_state_gradient
from .stage.setup import Setup
from .stage.trace import trace_last
from .storage.plan import LeafPlan, leaf_plans
from .table.effects import Liveness, Place
from .table.kinds import By, Kind

# Whose parameters: the number of a stage, "first", "last" or "shared".
PartKey: TypeAlias = "int | str"


class EagerExecutor:
    """Runs a step's program tick by tick, device by device, in eager JAX (an `Executor`); data
    shards come one after the other.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe as jp
        >>> from jaxpipe.eager import EagerExecutor
        >>> s = jp.schedules.build("1f1b", devices=1, microbatches=2)
        >>> model = jp.Model(lambda p, x: jnp.tanh(x @ p), last=lambda p, x, mb: jnp.mean(x**2))
        >>> mesh = jax.make_mesh((1,), ("pipe",))
        >>> pipe = jp.Pipeline(model, s, mesh, executor=EagerExecutor())
        >>> loss, grads = pipe.value_and_grad(
        ...     pipe.place({"stages": jnp.ones((1, 3, 3)), "last": {}}), {"x": jnp.zeros((4, 3))}
        ... )
        >>> float(loss)
        0.0
    """

    compiles = False

    def prepare(self, setup: Setup, _given: StepArguments) -> _EagerStep:
        """The step; its functions are not traced before it runs."""
        sliced = setup.functions.slices > 1 and not setup.functions.room  # of a cache
        liveness = Liveness.of_slices() if sliced else Liveness()
        return _EagerStep(setup, verify(Plan(setup.ticks, setup.segments).program(liveness)))


@dataclass(frozen=True)
class _EagerStep:
    """A step as its program."""

    setup: Setup
    program: Program

    def run(self, given: StepArguments) -> StepResults:
        """The results and gradients; PipelineError under `jax.jit`, since an eager program needs
        numbers.
        """
        setup = self.setup
        if has(given, jax.core.Tracer):
            raise PipelineError(
                "the eager executor runs one operation after the other and cannot be traced: "
                "call the step outside of jax.jit and `pipe.jit`; `lower` and "
                "`jaxpipe.inspect` need a pipeline without executor="
            )
        held = jax.tree.map(partial(with_words, np.asarray), given._replace(rng=None))
        count, shards = setup.data_size, list[_Shard]()
        for number in range(count):
            own = partial(_part, number=number, count=count)
            rows = map_rows(own, held.batch, setup.functions.whole)
            key = shard_key(given.rng, number, count)
            shards.append(_Shard(setup, held._replace(batch=rows, rng=key), shards))
        for shard in shards:
            interpret(self.program, shard)
        return _finished(shards)


class _Shard:
    """The model on one data shard (a `program.ir.Model`): residuals are `jax.vjp` functions,
    a stash is the gradient itself.
    """

    def __init__(self, setup: Setup, given: StepArguments, every: list[_Shard]) -> None:
        params, batch, rng, state, scale = given
        self.scale, self.every = scale, every  # the factor of the loss; all data shards
        self.counted: StageCode | None = None  # traced with its first input
        self.seed: Array  # the cotangent of one microbatch's loss, from then on
        self.batch, self.rng = setup.functions.split(batch, setup.num_microbatches), rng
        self.setup = setup
        self.functions, layout = setup.functions, setup.layout
        self.stages = range(layout.placement.num_stages)
        # parameters and their gradients, by number of stage, "first", "last" and "shared"
        self.params: dict[PartKey, PyTree] = {key: params[key] for key in OUTER}
        self.params |= {s: layout.of_stage(s, params["stages"]) for s in self.stages}
        self.plans: dict[PartKey, list[LeafPlan]] = {
            key: leaf_plans(setup.plans[key]) for key in OUTER
        }
        self.plans |= {s: layout.held(s, setup.plans["stages"]).leaves for s in self.stages}

        def empty(leaf: Array | np.ndarray, plan: LeafPlan) -> Array | None:
            dtype = accumulator_dtype(leaf.dtype, setup.accumulate)
            return None if plan.frozen else plan.rule.empty(leaf.shape, dtype)

        # accumulators by leaf; None for frozen parameters
        self.totals = {
            key: list(map(empty, jax.tree.leaves(tree), self.plans[key]))
            for key, tree in self.params.items()
        }
        self.placed = params
        self.state = [layout.of_stage(s, state) if state else () for s in self.stages]
        # the state before a forward: stage, microbatch
        self.before: dict[tuple[int, int], PyTree] = {}
        self.losses: list[Array | float] = [0.0] * setup.num_microbatches
        self.aux: list[Any] = [None] * setup.num_microbatches

    def _of(self, key: PartKey) -> tuple[PyTree, PyTree]:
        """The parameters of a function, and the shared ones."""
        return self.params[key], self.params["shared"]

    def _trained(self, key: PartKey) -> list[bool]:
        """Whether each of these parameters, and of the shared ones, has a gradient."""
        return [not plan.frozen for plan in (*self.plans[key], *self.plans["shared"])]

    def _add(
        self, key: PartKey, grads: tuple[PyTree, PyTree], *, microbatch: int, share: float = 1.0
    ) -> None:
        """Add a microbatch's gradients of a function's own parameters and of the shared ones."""
        is_last = microbatch == self.setup.num_microbatches - 1

        def added(total: Array | None, plan: LeafPlan, grad: Array) -> Array | None:
            return None if total is None else plan.rule.add(total, grad * share, is_last)

        for name, own in zip((key, "shared"), grads, strict=True):
            leaves = jax.tree.leaves(own)
            self.totals[name] = list(map(added, self.totals[name], self.plans[name], leaves))

    def _extra(
        self, of: By, stage: int, microbatch: int, wants: frozenset[str] = OUTER_WANTS
    ) -> Extra:
        numbers = jnp.int32(stage), jnp.int32(microbatch)
        return self.functions.extra(self.batch, self.rng, *numbers, wants, of=of)

    def run(self, step: Step) -> Mapping[Place, object]:
        """Runs a function of the model in an action, and returns the values that it makes."""
        runs = {By.FIRST: self.first, By.STAGE: self.stage, By.LAST: self.last}
        return runs[step.by](step)

    def first(self, step: Step) -> Mapping[Place, object]:
        """`first`, whose residuals are its vjp, or its gradient."""
        microbatch, own = step.microbatch, self._of("first")
        extra = self._extra(By.FIRST, 0, microbatch)
        run = partial(self.functions.run_whole, "first", x=(), extra=extra)
        if Place.FIRST_GRADIENTS not in step.makes:
            x, vjp = jax.vjp(run, own) if Place.FIRST in step.makes else (run(own), None)
            return {Place.SENT_X: x, Place.FIRST: vjp}
        vjp, dy = step.held[Place.FIRST], step.held.get(Place.SENT_DX)
        if step.kind is Kind.G:  # it has the gradient of the input, and runs `first` again
            (_, vjp), dy = jax.vjp(run, own), vjp
        self._add("first", *vjp(dy), microbatch=microbatch)
        return {}

    def stage(self, step: Step) -> Mapping[Place, object]:
        """F, R, B, I or W of a stage.

        B and I are alike: the gradient of the parameters, which comes with that of the input, is
        the stash of I.
        """
        held, number, microbatch = step.held, step.stage, step.microbatch
        if step.kind is Kind.R:
            return {Place.RESIDUAL_INPUT: None, Place.RESIDUAL_WEIGHT: self._stage(step)[-1]}
        if step.kind is Kind.F:
            self.before[number, microbatch] = self.state[number]
            y, returned, vjp = self._stage(step)
            if not isinstance(returned.loss, tuple):
                self.losses[microbatch] += returned.loss
            if "state" in self.functions.wants(number):
                self.state[number] = returned.state
            carry, rows = returned.carried or (None, None)
            passed = {Place.SENT_X: y, Place.CARRY: carry, Place.BUFFER: rows}
            return passed | {Place.RESIDUAL_INPUT: None, Place.RESIDUAL_WEIGHT: vjp}
        if step.kind is Kind.W:
            self._add(number, held[Place.STASH], microbatch=microbatch)
            return {}
        later = held.get(Place.CARRY_GRADIENT), held.get(Place.BUFFER_GRADIENT)
        grads, dx, before = held[Place.RESIDUAL_WEIGHT](held[Place.COTANGENT], later)
        if Place.STAGE_GRADIENTS in step.makes:
            self._add(number, grads, microbatch=microbatch)
        carry, rows = before or (None, None)
        found = {Place.SENT_DX: dx, Place.STASH: grads}
        return found | {Place.CARRY_GRADIENT: carry, Place.BUFFER_GRADIENT: rows}

    def last(self, step: Step) -> Mapping[Place, object]:
        """`last` with its gradient.  Where L leaves the gradient of the parameters for later, it is
        the stash on every device, and each one adds its part of it.
        """
        microbatch, parts = step.microbatch, self.setup.partition.cuts.parts
        if step.kind is Kind.H:
            self._add("last", step.held[Place.SHARE], microbatch=microbatch, share=1 / parts)
            return {}
        y = step.held[Place.LAST if step.kind is Kind.L else Place.SENT_X]
        own, extra = self._of("last"), self._extra(By.LAST, len(self.stages) - 1, microbatch)
        run = partial(self.functions.run_whole, "last", extra=extra)
        if not self.setup.training:
            loss, self.aux[microbatch] = run(own, y)
            self.losses[microbatch] += loss
            return {}
        loss, vjp, self.aux[microbatch] = jax.vjp(run, own, y, has_aux=True)
        self.losses[microbatch] += loss
        if self.counted is None:
            self._begin(y, extra)
        grads, dy = vjp(self.seed.astype(loss.dtype))
        if Place.LAST_GRADIENTS in step.makes:
            self._add("last", grads, microbatch=microbatch)
        return {Place.SENT_DX: dy, Place.STASH: [grads] * parts}

    def _begin(self, y: PyTree, extra: Extra) -> None:
        """Find the cotangent of one microbatch's loss, and what is known of counts."""
        assert self.functions.last is not None
        run, own = partial(self.functions.run_whole, "last"), self._of("last")
        uses = list(map(ParamUse, self._trained("last")))
        self.counted = trace_last(run, own, y, extra, uses)
        check_count(self.functions.last.name, self.counted)
        stage = jnp.int32(len(self.stages) - 1)
        counts: list[Any] = [
            total_count(self.counted, s.functions, s.batch, s.rng, stage) for s in self.every
        ]
        self.seed = self.setup.seed(None if counts[0] is None else sum(counts), self.scale)

    def _stage(self, step: Step) -> tuple[PyTree, StageOutput, object]:
        """What a stage returns, with the state that its forward had, and its vjp.

        The vjp takes the gradients of x and of what passes to the next slice; None for zeros.
        """
        stage, params, x = step.stage, self._of(step.stage), step.held[Place.X]
        function = self.functions.stages[stage]
        run = partial(self.functions.run_stage, stage)
        extra = self._extra(By.STAGE, stage, step.microbatch, self.functions.wants(stage))
        if "state" in self.functions.wants(stage):
            extra["state"] = self.before[stage, step.microbatch]
            if self.setup.training and step.microbatch == 0:
                inputs, trained = (params, x, extra), self._trained(stage)
                check_state_gradient(function.name, run, inputs, trained)
        shapes = self.functions.carried(stage, params, x, extra)
        held = (step.held.get(place) for place in (Place.CARRY, Place.BUFFER))
        carried = _filled(held, shapes, zeros_of)

        def call(
            params: PyTree, x: PyTree, carried: PyTree
        ) -> tuple[tuple[PyTree, ...], StageOutput]:
            y, returned = run(params, x, {**extra, "carried": carried})
            carried = returned.carried if shapes else ()
            return (y, returned.loss, carried), returned._replace(carried=carried)

        if not self.setup.training:
            (y, *_), returned = call(params, x, carried)
            return y, returned, None
        (y, loss, _), vjp, returned = jax.vjp(call, params, x, carried, has_aux=True)

        def backward(dy: PyTree, later: tuple[PyTree, ...]) -> object:
            seed = () if isinstance(loss, tuple) else self.seed.astype(loss.dtype)
            zeros = partial(jax.tree.map, _no_gradient)
            return vjp((dy, seed, _filled(later, shapes, zeros)))

        return y, returned, backward

    def results(self) -> tuple[Array, PyTree, list[PyTree], Params]:
        """The losses, what else `last` returned, the state, and the gradients laid out as
        parameters are placed.
        """
        trees = {
            key: jax.tree.unflatten(jax.tree.structure(tree), self.totals[key])
            for key, tree in self.params.items()
        }
        grads, stages = {key: trees[key] for key in OUTER}, [trees[s] for s in self.stages]
        grads["stages"] = self.setup.layout.place_trees(stages, self.placed["stages"])
        aux = None if self.functions.last is None else stacked(self.aux)
        return jnp.asarray(self.losses), aux, self.state, grads


def _part(leaf: Array | np.ndarray, number: int, count: int) -> Array:
    """The rows of one of `count` data shards."""
    size = leaf.shape[0] // count
    return jnp.asarray(leaf[number * size : (number + 1) * size])


def _no_gradient(leaf: Leaf) -> np.ndarray:
    """A cotangent of zeros, of the dtype that JAX wants for the leaf."""
    return np.zeros(leaf.shape, leaf.dtype if inexact(leaf) else jax.dtypes.float0)


def _filled[S, T](
    trees: Iterable[T | None], shapes: Iterable[S], zeros: Callable[[S], T]
) -> tuple[T, ...]:
    """A tree for each of the shapes, zeros where there is None."""
    pairs = zip(trees, shapes, strict=False)
    return tuple(zeros(shape) if tree is None else tree for tree, shape in pairs)


def _finished(shards: list[_Shard]) -> StepResults:
    """The results and gradients of a step: those of the shards, summed along a mapped axis."""
    setup, axis = shards[0].setup, "shards"
    data = (axis,) if setup.data_axes else ()
    code, factor = shards[0].counted, shards[0].scale

    def on_shard(
        losses: Array, aux: PyTree, state: list[PyTree], grads: Params
    ) -> tuple[Params, list[PyTree], Params]:
        results, scale = totals(setup, losses, aux, (), data, code=code, scale=factor)
        state = jax.tree.map(lambda leaf: merged_state(setup, leaf, data), state)

        def finished(plan: LeafPlan, param: Array, total: Array | None) -> object:
            if total is None:
                return None
            if rule := plan.replaced:
                return rule.next_value(total, setup.num_microbatches, data=data).astype(param.dtype)
            return plan.cleared(lax.psum(total, data) * (1.0 if scale is None else scale))

        return results, state, jax.tree.map(finished, setup.plans, shards[0].placed, grads)

    every = jax.vmap(on_shard, axis_name=axis)(*stacked([shard.results() for shard in shards]))
    results, state, grads = jax.tree.map(lambda leaf: leaf[0], every)
    if setup.outputs:
        results = in_rows(every[0])
    results["state"] = setup.layout.place_trees(state) if setup.functions.has_state else ()
    return results, grads if setup.training else {}
