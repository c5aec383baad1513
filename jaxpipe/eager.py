"""The eager executor: a program run by `program.interpret` in one process, with plain `jax.vjp` for
the stages.

No shard_map, no compilation, no cut of the backward: an oracle for the SPMD executor, and a step
that a debugger can walk through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import Params, PyTree, stacked, summable, wider, zeros_of
from .errors import PipelineError
from .model.calls import OUTER_WANTS
from .model.functions import Loss, StageOutput, make_extra
from .model.leaf_plan import LeafPlan, leaf_plans
from .program.interpret import Step, interpret
from .program.verify import verify
from .stage.job import Job
from .stage.model_code import check_state_gradient
from .table.effects import Liveness, Place
from .table.kinds import Kind


class EagerExecutor:
    """Runs a job's program tick by tick, device by device, in eager JAX (an `Executor`); data
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

    def run(
        self, job: Job, params: Params, batch: PyTree, rng: Any, state: tuple[PyTree, ...]
    ) -> tuple[dict[str, Any], dict[str, PyTree]]:
        """Do the job; PipelineError under `jax.jit`, since an eager program needs numbers."""
        if any(
            isinstance(leaf, jax.core.Tracer)
            for leaf in jax.tree.leaves((params, batch, rng, state))
        ):
            raise PipelineError(
                "the eager executor runs one operation after the other and cannot be traced: "
                "call the step outside of jax.jit and "
                "`pipe.jit`; `lower` and `jaxpipe.inspect` need a pipeline without executor="
            )
        params, batch, state = jax.tree.map(np.asarray, (params, batch, state))
        functions = job.functions.over(job.axis, job.cuts, params, parts=1)
        job = replace(job, functions=functions)
        sliced = job.functions.slices > 1 and not job.functions.room  # of a cache
        program = verify(job.plan.program(Liveness.of_slices() if sliced else Liveness()))
        shards = [
            _Shard(job, params, _rows_of(batch, shard, job.data_size), rng, state, shard)
            for shard in range(job.data_size)
        ]
        for shard in shards:
            interpret(program, shard)
        results = _results(job, shards)
        scale = results.pop("weight", None)
        if not job.training:
            return results, {}
        grads = jax.tree.map(
            lambda *parts: sum(parts[1:], parts[0]) * (1.0 if scale is None else scale),
            *(shard.gradients() for shard in shards),
        )
        return results, grads


def _rows_of(batch: PyTree, shard: int, count: int) -> PyTree:
    """A data shard's rows."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(
            leaf[shard * len(leaf) // count : (shard + 1) * len(leaf) // count]
        ),
        batch,
    )


class _Shard:
    """The model on one data shard (a `program.interpret.Model`): residuals are `jax.vjp` functions,
    a stash is the gradient itself.
    """

    def __init__(
        self,
        job: Job,
        params: Params,
        batch: PyTree,
        rng: Any,
        state: tuple[PyTree, ...],
        shard: int,
    ) -> None:
        self.batch = job.functions.split(batch, job.num_microbatches)
        self.job, self.functions = job, job.functions.for_batch(self.batch)
        self.rng = rng if rng is None or job.data_size == 1 else jax.random.fold_in(rng, shard)
        self.outer = {key: params[key] for key in ("first", "last", "shared")}
        stages = range(job.layout.placement.num_stages)
        self.stages = [job.layout.of_stage(s, params["stages"]) for s in stages]
        self.state = (
            [job.layout.of_stage(s, state) for s in stages] if state else [()] * len(stages)
        )
        plans = job.plans
        self.frozen = {key: _frozen(params[key], leaf_plans(plans[key])) for key in self.outer}
        self.frozen["stages"] = [
            _frozen(own, job.layout.leaves_of(s, plans["stages"]))
            for s, own in enumerate(self.stages)
        ]
        self.like = params["stages"]
        self.total = jax.tree.map(self._zeros, {**self.outer, "stages": self.stages}, self.frozen)
        # state that a forward found: stage, microbatch
        self.given: dict[tuple[int, int], PyTree] = {}
        self.losses: list[Any] = [0.0] * job.num_microbatches
        self.aux: list[Any] = [None] * job.num_microbatches

    def _zeros(self, leaf: Any, frozen: bool) -> Any:
        if frozen:
            return None
        return jnp.zeros(
            leaf.shape,
            leaf.dtype if self.job.accumulate is None else wider(leaf.dtype, self.job.accumulate),
        )

    def _extra(self, stage: int, microbatch: int, wants: frozenset[str]) -> dict[str, PyTree]:
        numbers = jnp.int32(stage), jnp.int32(microbatch)
        return make_extra(self.batch, self.rng, *numbers, wants, self.functions.slices)

    def _add(self, key: str, grads: PyTree, stage: int | None = None) -> None:
        old = self.total[key] if stage is None else self.total[key][stage]
        new = jax.tree.map(
            lambda total, grad: None if total is None else total + grad.astype(total.dtype),
            old,
            grads,
            is_leaf=_is_none,
        )
        if stage is None:
            self.total[key] = new
        else:
            self.total[key][stage] = new

    def _add_both(self, key: str, grads: tuple[PyTree, PyTree]) -> None:
        """Gradients of `first` or `last`, and of the shared parameters."""
        self._add(key, grads[0])
        self._add("shared", grads[1])

    def _seed(self, dtype: Any) -> Any:
        """The cotangent of a microbatch's loss."""
        if self.functions.loss is Loss.SUM_OVER_COUNT:
            return jnp.ones((), dtype)
        return jnp.asarray(1.0 / (self.job.num_microbatches * self.job.data_size), dtype)

    def run(self, step: Step) -> Mapping[str, Any]:
        """Do an action."""
        return _ACTIONS[step.kind](self, step)

    def forward(self, step: Step) -> Mapping[str, Any]:
        """F: [first,] stage[, last]; its residuals are its vjp."""
        made: dict[str, Any] = dict(step.held)
        if step.prepares:
            made["x"], made["first"] = self._first(step.microbatch)
        self.given[step.stage, step.microbatch] = self.state[step.stage]
        y, returned, vjp = self._stage(step, made["x"])
        if not isinstance(returned.loss, tuple):
            self.losses[step.microbatch] += returned.loss
        if "state" in self.functions.stages[step.stage].wants_arrays:
            self.state[step.stage] = returned.state
        out = self._last(step.microbatch, y) if Place.AUX in step.makes else y
        made["carry_out"], made["buffer"] = returned.carried or (None, None)
        return made | {"sent": y, "out": out, "residual_input": None, "residual_weight": vjp}

    def recompute(self, step: Step) -> Mapping[str, Any]:
        """R: the vjp alone."""
        vjp = self._stage(step, step.held["x"])[-1]
        return {"residual_input": None, "residual_weight": vjp}

    def backward(self, step: Step) -> Mapping[str, Any]:
        """B; or I, where the gradient of the parameters, which comes with it, is the stash."""
        later = tuple(step.held.get(f"{name}_gradient") for name in ("carry", "buffer"))
        own, shared, dx, before = step.held["residual_weight"](step.held["cotangent"], later)
        if Place.STAGE_GRADIENTS in step.makes:
            self._add("stages", own, step.stage)
            self._add("shared", shared)
        if Place.FIRST_GRADIENTS in step.makes:
            self._add_both("first", step.held["first"](dx))
        carry, rows = before or (None, None)
        made = {"sent": dx, "out": dx, "stash": (own, shared)}
        return made | {"carry_gradient_out": carry, "buffer_gradient": rows}

    def weight_grad(self, step: Step) -> Mapping[str, Any]:
        """W."""
        self._add("stages", step.held["stash"][0], step.stage)
        self._add("shared", step.held["stash"][1])
        return {}

    def first_share(self, step: Step) -> Mapping[str, Any]:
        """E."""
        return {"out": self._first(step.microbatch)[0]}

    def first_share_gradient(self, step: Step) -> Mapping[str, Any]:
        """G."""
        self._add_both("first", self._first(step.microbatch)[1](step.held["y"]))
        return {}

    def last_share(self, step: Step) -> Mapping[str, Any]:
        """L; where H follows, the gradients of every device's share of the parameters are left."""
        if Place.SHARE not in step.makes:
            return {"out": self._last(step.microbatch, step.held["y"])}
        extra = self._extra(len(self.stages) - 1, step.microbatch, OUTER_WANTS)
        shares = self.job.cuts.both_shares("last", self.outer["last"], self.outer["shared"])
        loss, vjp, self.aux[step.microbatch] = jax.vjp(
            lambda shares, y: self.functions.run_shares("last", shares, y, extra),
            shares,
            step.held["y"],
            has_aux=True,
        )
        self.losses[step.microbatch] += loss
        grads, dy = vjp(self._seed(loss.dtype))
        devices = range(self.job.cuts.parts)
        stash = [jax.tree.map(lambda leaf, d=d: leaf[d], grads) for d in devices]
        return {"out": dy, "stash": stash}

    def last_weight_grad(self, step: Step) -> Mapping[str, Any]:
        """H: what the device's share is of the whole parameters' gradient."""
        whole = self.outer["last"], self.outer["shared"]
        shares, back = jax.vjp(partial(self.job.cuts.both_shares, "last"), *whole)
        mine = step.held["stash"]
        self._add_both(
            "last",
            back(jax.tree.map(lambda s, g: jnp.zeros_like(s).at[step.stage].set(g), shares, mine)),
        )
        return {}

    def _first(self, microbatch: int) -> tuple[Any, Any]:
        """`first`, and its vjp."""
        extra = self._extra(0, microbatch, OUTER_WANTS)

        def call(own: PyTree, shared: PyTree) -> PyTree:
            return self.functions.run_whole("first", (own, shared), (), extra, self.job.cuts)

        return jax.vjp(call, self.outer["first"], self.outer["shared"])

    def _stage(self, step: Step, x: Any) -> tuple[Any, StageOutput, Any]:
        """What a stage returns, given the state that its forward found, and its vjp.

        The vjp takes the gradients of x and of what passes to the next slice; None for zeros.
        """
        stage, microbatch = step.stage, step.microbatch
        function, run = self.functions.stages[stage], partial(self.functions.run_stage, stage)
        extra = self._extra(stage, microbatch, function.wants_arrays)
        own, shared = self.stages[stage], self.outer["shared"]
        if "state" in function.wants_arrays:
            extra["state"] = self.given[stage, microbatch]
            if self.job.training and microbatch == 0:
                trained = [
                    not frozen
                    for frozen in jax.tree.leaves(
                        (self.frozen["stages"][stage], self.frozen["shared"])
                    )
                ]
                check_state_gradient(function.name, run, ((own, shared), x, extra), trained)

        shapes = self.functions.carried(stage, (own, shared), x, extra)
        held = tuple(step.held.get(name) for name in ("carry", "buffer")) if shapes else ()
        carried = tuple(map(_or_zeros, held, shapes))

        def call(own: PyTree, shared: PyTree, x: PyTree, carried: PyTree) -> tuple[Any, Any]:
            y, returned = run((own, shared), x, {**extra, "carried": carried})
            carried = returned.carried if shapes else ()
            return (y, returned.loss, carried), returned._replace(carried=carried)

        (y, loss, _), vjp, returned = jax.vjp(call, own, shared, x, carried, has_aux=True)

        def backward(dy: PyTree, later: tuple[PyTree, ...]) -> Any:
            seed = () if isinstance(loss, tuple) else self._seed(loss.dtype)
            return vjp((dy, seed, tuple(map(_or_no_gradient, later, shapes)) if shapes else ()))

        return y, returned, backward

    def _last(self, microbatch: int, y: Any) -> Any:
        """The loss and the cotangent of y."""
        extra = self._extra(len(self.stages) - 1, microbatch, OUTER_WANTS)

        def call(own: PyTree, shared: PyTree, y: PyTree) -> Any:
            return self.functions.run_whole("last", (own, shared), y, extra, self.job.cuts)

        loss, vjp, self.aux[microbatch] = jax.vjp(
            call, self.outer["last"], self.outer["shared"], y, has_aux=True
        )
        self.losses[microbatch] += loss
        if not self.job.training:
            return None
        own, shared, dy = vjp(self._seed(loss.dtype))
        self._add_both("last", (own, shared))
        return dy

    def gradients(self) -> dict[str, PyTree]:
        """Laid out as parameters are placed."""
        return {
            **self.total,
            "stages": self.job.layout.place_trees(self.total["stages"], self.like),
        }


_ACTIONS = {
    Kind.F: _Shard.forward,
    Kind.R: _Shard.recompute,
    Kind.B: _Shard.backward,
    Kind.I: _Shard.backward,
    Kind.W: _Shard.weight_grad,
    Kind.E: _Shard.first_share,
    Kind.G: _Shard.first_share_gradient,
    Kind.L: _Shard.last_share,
    Kind.H: _Shard.last_weight_grad,
}


def _frozen(tree: PyTree, plans: list[LeafPlan]) -> PyTree:
    """Whether each parameter of a tree is frozen."""
    return jax.tree.unflatten(jax.tree.structure(tree), [plan.frozen for plan in plans])


def _or_zeros(tree: PyTree, shapes: PyTree) -> PyTree:
    return zeros_of(shapes) if tree is None else tree


def _or_no_gradient(tree: PyTree, shapes: PyTree) -> PyTree:
    """Gradients, or zeros of the dtype that JAX wants for them."""
    if tree is not None:
        return tree

    def zeros(a: Any) -> Any:
        inexact = jnp.issubdtype(a.dtype, jnp.inexact)
        return np.zeros(a.shape, a.dtype if inexact else jax.dtypes.float0)

    return jax.tree.map(zeros, shapes)


def _is_none(node: Any) -> bool:
    return node is None


def _results(job: Job, shards: list[_Shard]) -> dict[str, Any]:
    """As the SPMD executor returns them; "weight" besides, where gradients are still to
    be scaled.
    """
    if job.outputs:
        every = [aux["metrics"] for shard in shards for aux in shard.aux]
        joined = shards[0].functions.join(stacked(every))
        whole = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), joined)
        return {"outputs": whole, "state": _merged_state(job, shards)}
    found: dict[str, Any] = {"state": _merged_state(job, shards)}
    if job.functions.last is None:
        return found
    losses = jnp.stack(
        [
            sum(parts[1:], parts[0])
            for parts in zip(*(shard.losses for shard in shards), strict=True)
        ]
    )
    auxes = [aux for shard in shards for aux in shard.aux]
    counts = jnp.asarray([aux["count"] for aux in auxes])
    loss, losses, found["weight"] = job.functions.total(losses, counts, job.data_size)
    metrics = jax.tree.map(_mean, *(aux["metrics"] for aux in auxes))
    return {**found, "loss": loss, "losses": losses, "metrics": metrics}


def _mean(*parts: Any) -> Any:
    return sum(map(summable, parts)) / len(parts)


def _merged_state(job: Job, shards: list[_Shard]) -> tuple[PyTree, ...]:
    """What data shards disagree on is averaged (integers: the greatest)."""
    if not job.functions.has_state:
        return ()

    def merge(*parts: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(parts[0]), jnp.inexact):
            return _mean(*parts).astype(parts[0].dtype)
        return jnp.max(jnp.stack(parts), axis=0)

    return job.layout.place_trees(
        [
            jax.tree.map(merge, *trees)
            for trees in zip(*(shard.state for shard in shards), strict=True)
        ]
    )
