"""Finds the first value of a step that is not finite, by running the model stage by stage and
microbatch by microbatch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from .arrays import Leaves, LossScale, Number, Params, PyTree, Rng, by_index, zeros_of
from .errors import PipelineError
from .model.arguments import scale_faults
from .model.calls import OUTER_WANTS
from .model.functions import Extra, Loss, StageOutput, share_of
from .model.layers import with_outer
from .model.settings import outside_contexts
from .pipeline import Pipeline
from .spmd.xla import mapped
from .stage.code import ParamUse
from .stage.counts import total_count
from .stage.setup import mesh_key
from .stage.trace import trace_last
from .storage.plan import leaf_plans
from .table.kinds import By

# By name: of a leaf, [data shards, (NaN, infinite, all)]; of a buffer, [slices].
_Counts: TypeAlias = dict[str, Array]
_KEYS = {"first": "first", "stage": "stages", "last": "last"}  # of parameters
_ROUNDING = 4  # differences that are roundings, in units of the largest value


class Phase(enum.Enum):
    """Which half of a step a value belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Nonfinite:
    """The first call of a step with a result that is not finite; `str()` gives a sentence for
    people.

    Args:
        phase: forward (the result is an output, or the loss) or backward (a gradient).
        function: "first", "stage" or "last".
        stage: the stage's number; 0 for `first` and S - 1 for `last`.
        microbatch: the microbatch's number.
        shard: the data shard whose rows they are, 0 without data parallelism.
        values: the results that are not finite, with how many of their entries are NaN or infinite.
        inputs: likewise the call's inputs.  Where there are none, this very call makes the first
            NaN or infinity.
    """

    phase: Phase
    function: str
    stage: int
    microbatch: int
    shard: int
    values: tuple[str, ...]
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        name = f"`{self.function}` (with stage {self.stage})"
        name = f"stage {self.stage}" if self.function == "stage" else name
        shard = f", data shard {self.shard}" if self.shard else ""
        origin = "its inputs are all finite, so it is made here"
        if self.inputs:
            origin = f"so are already its inputs: {'; '.join(self.inputs)}"
        return (
            f"not finite in the {self.phase.value} of {name}, microbatch {self.microbatch}{shard}: "
            f"{'; '.join(self.values)} ({origin})"
        )


@outside_contexts
def find_nonfinite(
    pipe: Pipeline, params: Params, batch: PyTree, *, rng: Rng = None, scale: LossScale = None
) -> Nonfinite | None:
    """The first NaN or infinity in the step that `value_and_grad` would run with these arguments,
    or None.

    Use it after a loss or a gradient was not finite.  Microbatches are taken in order, each through
    all its forwards and then its backwards, as in a run without a pipeline.  Sums over microbatches
    are not examined.  Sequences that the schedule cuts into slices are run whole: the microbatch
    that is named is then the number of the sequence.  Stages that append rows (`Context.append`)
    also run the first sequence slice by slice, to find rows that no causal mask hides.

    A step costs nothing more.  The search costs a forward and a recomputing backward of each stage
    and microbatch, one after the other on the pipeline's own mesh, with one stage's parameters
    whole on every device.

    Args:
        pipe, params, batch, rng, scale: as of `value_and_grad`.

    Raises:
        PipelineError: as `value_and_grad` does, and where the results of a slice depend on rows of
            later slices.

    Example:
        loss, grads = pipe.value_and_grad(params, batch, rng=key)
        if not jnp.isfinite(loss):
            raise FloatingPointError(find_nonfinite(pipe, params, batch, rng=key))
    """
    if pipe.functions.has_state:
        raise PipelineError(
            "find_nonfinite runs each stage by itself, so no stage may take `state`; "
            "give that stage a constant one"
        )
    if any(map(pipe.functions.spreads, ("first", "last"))):
        raise PipelineError(
            "find_nonfinite runs each function by itself, so none may be spread over the "
            "devices; build a pipeline whose `last` runs on one device"
        )
    pipe.trace(params, batch, rng=rng)  # raises what a step would raise
    PipelineError.refuse("", scale_faults(scale))
    search = _NonfiniteSearch(pipe, params, batch, rng, 1.0 if scale is None else scale)
    found = (search.microbatch(microbatch) for microbatch in range(search.count))
    return next((one for one in found if one is not None), None)


class _FunctionCall(NamedTuple):
    """One of the three user functions, and the stage with which it runs."""

    function: str  # "first", "stage" or "last"
    stage: int


class _Operands(NamedTuple):
    """The arguments of a call that are traced."""

    params: PyTree  # the function's own, and the shared ones
    x: PyTree  # what enters it; of a backward, (that, the cotangent of what it returns)
    batch: PyTree
    key: Rng
    stage: Array
    microbatch: Array


# A result, and counts, of a call.
_Body: TypeAlias = Callable[[_FunctionCall, _Operands], tuple[PyTree, Any]]


class _NonfiniteSearch:
    """The calls of a step, and their compiled code."""

    def __init__(
        self, pipe: Pipeline, params: Params, batch: PyTree, rng: Rng, scale: Array | float
    ) -> None:
        self.pipe, self.params, self.rng, self.scale = pipe, with_outer(params), rng, scale
        self.plans = pipe.partition.plans(self.params)
        self.rows = PartitionSpec(pipe.data_axes or None)
        self.specs = pipe.functions.specs(batch, pipe.data_axes)
        to = jax.tree.map(partial(NamedSharding, pipe.mesh), self.specs)
        self.batch = jax.device_put(batch, to)
        self.slices = pipe.schedule.slices
        self.count = pipe.schedule.num_microbatches // self.slices
        self.functions = replace(pipe.functions, slices=1)
        stages = [_FunctionCall("stage", s) for s in range(pipe.schedule.num_stages)]
        # in forward order
        self.calls = [_FunctionCall("first", 0), *stages, _FunctionCall("last", stages[-1].stage)]
        self._compiled = jax.jit(self._on_devices, static_argnums=(0, 1))

    def microbatch(self, microbatch: int) -> Nonfinite | None:
        """Forwards in order, keeping what enters each stage, then backwards in reverse."""
        entered: list[PyTree] = []
        x: PyTree = ()
        for call in self.calls:
            entered.append(x)
            if microbatch == 0 and self.slices > 1 and call.function == "stage":
                self._check_mask(call, x)
            x, counts = self._run(self._forward, call, microbatch, x)
            if found := self._nonfinite(Phase.FORWARD, call, microbatch, counts):
                return found
        # The cotangent of a microbatch's loss, as in the step (`last` divides it by the count).
        seed = self.scale
        if self.functions.loss is Loss.MEAN:
            seed = seed / (self.count * self.pipe.partition.data_size)
        dy = [jnp.full(leaf.shape, seed, leaf.dtype) for leaf in jax.tree.leaves(x)]
        for call, x in zip(reversed(self.calls), reversed(entered), strict=True):
            dy, counts = self._run(self._backward, call, microbatch, (x, dy))
            if found := self._nonfinite(Phase.BACKWARD, call, microbatch, counts):
                return found
        return None

    def _run(self, body: _Body, call: _FunctionCall, microbatch: int, x: PyTree) -> Any:
        """What a body returns on all devices of the mesh: an array or a gradient, and counts."""
        own, code = self.params[_KEYS[call.function]], call
        if call.function == "stage":
            own = self.pipe.layout.of_stage(call.stage, own)
            # Unlike stages are compiled one by one, alike ones once.
            code = call if self.pipe.layout.unlike else call._replace(stage=0)
        params, numbers = (own, self.params["shared"]), (call.stage, microbatch)
        operands = _Operands(params, x, self.batch, self.rng, *map(jnp.int32, numbers))
        return self._compiled(body, code, operands)

    def _on_devices(self, body: _Body, call: _FunctionCall, operands: _Operands) -> Any:
        """A body, mapped over the pipe axis and the data axes."""
        pipe, everywhere, rows = self.pipe, PartitionSpec(), self.rows

        def run(*traced: PyTree) -> tuple[PyTree, Any]:
            given = _Operands(*traced)
            x = jax.tree.map(lambda leaf: leaf[0], given.x)
            key = mesh_key(given.key, pipe.data_axes, pipe.partition.data_size)
            result, counts = body(call, given._replace(x=x, key=key))
            return jax.tree.map(lambda leaf: leaf[None], result), counts

        plans = self.plans[_KEYS[call.function]]
        own = leaf_plans(plans)
        if call.function == "stage":
            own = pipe.layout.held(call.stage, plans).leaves
        # How these are split over the axes along which functions are given local parts.
        split = [plan.local(pipe.data_axes) for plan in (*own, *leaf_plans(self.plans["shared"]))]
        specs = jax.tree.unflatten(jax.tree.structure(operands.params), split)
        return mapped(
            run,
            pipe.mesh,
            {pipe.axis, *pipe.data_axes},
            in_specs=(specs, rows, self.specs, everywhere, everywhere, everywhere),
            out_specs=(rows, everywhere),
        )(*operands)

    # The bodies; the key of their operands is that of the data shard.

    def _forward(
        self, call: _FunctionCall, given: _Operands
    ) -> tuple[PyTree, tuple[_Counts, _Counts]]:
        extra = self._extra(call, given)
        y = self._output(call, given.params, given.x, extra)
        return y, (self._count({"output": y}), self._inputs(given, extra))

    def _backward(
        self, call: _FunctionCall, given: _Operands
    ) -> tuple[PyTree, tuple[_Counts, _Counts]]:
        (x, dy), extra = given.x, self._extra(call, given)
        given = given._replace(x=x)

        def outputs(params: PyTree, x: PyTree) -> Leaves:
            y = self._output(call, params, x, extra)
            return list(filter(_floating, jax.tree.leaves(y)))

        if call.function == "last" and self.functions.loss is Loss.SUM_OVER_COUNT:
            dy = self._over_count(given, extra, dy)
        # Whole numbers have a gradient of their own dtype, float0, which is not counted.
        (own, shared), dx = jax.vjp(outputs, given.params, x)[1](dy)
        results = {"the input": dx, "parameters": own, "shared": shared}
        counts = self._count({f"gradient of {name}": tree for name, tree in results.items()})
        inputs = self._inputs(given, extra) | self._count({"gradient of the output": dy})
        return list(filter(_floating, jax.tree.leaves(dx))), (counts, inputs)

    def _over_count(self, given: _Operands, extra: Extra, dy: Leaves) -> Leaves:
        """The cotangent of a microbatch's loss, over the count where the step begins with it."""
        params, x, batch, key, stage, _ = given
        uses = [ParamUse(trained=False)] * len(jax.tree.leaves(params))
        code = trace_last(self.functions.run_last, params, x, extra, uses)
        rows = self.functions.split(batch, self.count)
        count = total_count(code, self.functions, rows, key, stage, self.pipe.data_axes)
        return dy if count is None else [d * share_of(count).astype(d.dtype) for d in dy]

    def _later_rows(self, call: _FunctionCall, given: _Operands) -> tuple[tuple[()], _Counts]:
        """Name of each buffer -> [K], for each slice the number of values that a stage returns and
        that depend on later rows of the buffer.

        Each slice runs with two finite fills of the later rows of each buffer.  NaN as a fill would
        reach the output of a masked product too, since 0 times NaN is NaN.
        """
        slices, (params, x, batch, key, stage, first) = self.slices, given
        rows = self.pipe.functions.split(batch, self.count * slices)
        functions = self.pipe.functions.for_batch(rows)
        length = functions.length

        def inputs(k: Number) -> tuple[PyTree, Extra]:
            def cut(leaf: Array) -> Array:
                if leaf.ndim < 2 or leaf.shape[1] != slices * length:
                    return leaf
                return lax.dynamic_slice_in_dim(leaf, k * length, length, 1)

            extra = functions.extra(rows, key, stage, k, self._wants(call), of=By.STAGE)
            return jax.tree.map(cut, x), extra

        def one(carried: PyTree, k: Number) -> tuple[PyTree, dict[str, Array]]:
            (carry, buffers), (own, extra) = carried, inputs(k)

            def run(buffers: Mapping[str, Array]) -> tuple[PyTree, StageOutput]:
                before = {**extra, "carried": (carry, dict(buffers))}
                y, returned = functions.run_stage(call.stage, params, own, before)
                return (y, returned.loss, returned.carried[0]), returned

            _, after = run(buffers)
            fills = {name: _filled(buffers[name], new, k) for name, new in after.rows[0].items()}
            filled = {name: pair[0] for name, pair in fills.items()}
            results, _ = run(filled)
            return after.carried, {
                name: _differing(results, run({**filled, name: other})[0])
                for name, (_, other) in fills.items()
            }

        shapes = functions.carried(call.stage, params, *inputs(first))
        if not shapes or not shapes[1]:
            return (), {}
        _, counts = lax.scan(one, zeros_of(shapes), jnp.arange(slices, dtype=jnp.int32))
        axes = self.pipe.data_axes
        return (), jax.tree.map(lambda n: lax.psum(n, axes) if axes else n, counts)

    def _check_mask(self, call: _FunctionCall, x: PyTree) -> None:
        """PipelineError where a slice of the first sequence reads rows of later slices."""
        if "ctx" not in self._wants(call):
            return  # it appends no rows
        _, counts = self._run(self._later_rows, call, 0, x)
        faults = [
            f"  slice {k} reads later rows of {name!r}: {read} values of its results depend on them"
            for name, of_slices in counts.items()
            for k, read in enumerate(np.asarray(of_slices))
            if read
        ]
        if faults:
            raise PipelineError(
                f"stage {call.stage} reads appended rows of later slices, which no causal mask "
                "hides:\n"
                + "\n".join(faults)
                + "\nmask what comes after each position: seen = (ctx.offset + "
                "jnp.arange(x.shape[1]))[:, None] >= jnp.arange(buffer.shape[1])"
            )

    def _nonfinite(
        self, phase: Phase, call: _FunctionCall, microbatch: int, counts: tuple[_Counts, _Counts]
    ) -> Nonfinite | None:
        """What is not finite on the first data shard that has a non-finite value."""
        results, inputs = jax.tree.map(np.asarray, counts)
        shards = range(self.pipe.partition.data_size)
        for shard in shards:
            if not (values := _described(results, shard)):
                continue
            broken = _described(inputs, shard)
            if not broken and self.pipe.sharding.local:
                # Functions may exchange values with the other data shards.
                others = ((s, _described(inputs, s)) for s in shards if s != shard)
                broken = tuple(f"{text} on data shard {s}" for s, found in others for text in found)
            where = call.function, call.stage, microbatch, shard
            return Nonfinite(phase, *where, values, broken)
        return None

    def _wants(self, call: _FunctionCall) -> frozenset[str]:
        """The arguments of the function that differ by microbatch or stage."""
        return self.functions.wants(call.stage) if call.function == "stage" else OUTER_WANTS

    def _extra(self, call: _FunctionCall, given: _Operands) -> Extra:
        """The further arguments of the function in the step."""
        rows = self.functions.split(given.batch, self.count)
        wants, of = self._wants(call), By[call.function.upper()]
        numbers = given.stage, given.microbatch
        return self.functions.extra(rows, given.key, *numbers, wants, of=of)

    def _output(self, call: _FunctionCall, params: PyTree, x: PyTree, extra: Extra) -> PyTree:
        """What the function returns for the next one; the loss of `last`."""
        if call.function == "first":
            return self.functions.run_first(params, x, extra)
        if call.function == "last":
            return self.functions.run_last(params, x, extra)[0]
        return self.functions.run_stage(call.stage, params, x, extra)[0]

    def _inputs(self, given: _Operands, extra: Extra) -> _Counts:
        own, shared = given.params
        trees = {"parameters": own, "shared": shared, "input": given.x}
        return self._count(trees | {"microbatch": extra.get("microbatch", ())})

    def _count(self, trees: Mapping[str, PyTree]) -> _Counts:
        """Name of each floating leaf -> [data shards, (NaN, infinite, all)], the same on every
        device.
        """
        counts, axes = {}, self.pipe.data_axes
        for name, tree in trees.items():
            for where, leaf in by_index(tree, name).items():
                if _floating(leaf):
                    broken = jnp.isnan(leaf).sum(), jnp.isinf(leaf).sum()
                    count = jnp.stack([*broken, jnp.asarray(jnp.size(leaf))])[None]
                    counts[where] = lax.all_gather(count, axes, tiled=True) if axes else count
        return counts


def _described(counts: _Counts, shard: int) -> tuple[str, ...]:
    rows = [(name, *map(int, count[shard])) for name, count in counts.items()]
    return tuple(
        f"{name} has {nan} NaN and {inf} infinite of {size} values"
        for name, nan, inf, size in rows
        if nan or inf
    )


def _floating(leaf: Array | jax.ShapeDtypeStruct) -> bool:
    # A gradient of what is not floating has the dtype float0.
    return bool(jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact))


def _filled(buffer: Array, rows: Array, k: Number) -> tuple[Array, Array]:
    """The buffer with two finite fills of the rows after slice k: copies of the slice's own rows,
    and other numbers.  Whole numbers such as those of documents are zero in the second fill.
    """
    times = [whole // own for whole, own in zip(buffer.shape, rows.shape, strict=True)]
    axis = times.index(max(times))
    later = lax.broadcasted_iota(jnp.int32, buffer.shape, axis) >= (k + 1) * rows.shape[axis]
    other = 2 * rows + 1 if _floating(rows) else jnp.zeros_like(rows)
    own, others = (jnp.where(later, jnp.tile(fill, times), buffer) for fill in (rows, other))
    return own, others


def _differing(one: PyTree, other: PyTree) -> Array:
    """How many values of two trees differ by more than a rounding; a NaN does not count."""

    def count(a: Array, b: Array) -> Array:
        if not _floating(a):
            return jnp.sum(a != b)
        eps = float(jnp.finfo(a.dtype).eps)  # type: ignore[no-untyped-call]
        return jnp.sum(jnp.abs(a - b) > _ROUNDING * eps * jnp.max(jnp.abs(a), initial=0))

    return sum(jax.tree.leaves(jax.tree.map(count, one, other)), jnp.int32(0))
