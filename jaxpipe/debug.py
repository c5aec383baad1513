"""Finds the first value of a step that is not finite, by running the model stage by stage and
microbatch by microbatch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .arrays import Params, PyTree, by_index
from .errors import PipelineError
from .model.functions import Functions, Loss, make_extra, split_batch
from .model.leaf_plan import leaf_plans
from .model.packed import Packed
from .pipeline import Pipeline
from .spmd.body import shard_key
from .spmd.entries import mapped

OUTER_WANTS = frozenset({"microbatch", "ctx"})


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
        name = (
            f"stage {self.stage}"
            if self.function == "stage"
            else f"`{self.function}` (with stage {self.stage})"
        )
        where = f"{name}, microbatch {self.microbatch}" + (
            f", data shard {self.shard}" if self.shard else ""
        )
        origin = (
            "so are already its inputs: " + "; ".join(self.inputs)
            if self.inputs
            else "its inputs are all finite, so it is made here"
        )
        return (
            f"not finite in the {self.phase.value} of {where}: {'; '.join(self.values)} ({origin})"
        )


def find_nonfinite(
    pipe: Pipeline, params: Params, batch: PyTree, *, rng: Any = None
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
    if pipe.functions.spreads_last or pipe.functions.spreads_first:
        raise PipelineError(
            "find_nonfinite runs each function by itself, so none may be spread over the "
            "devices; build a pipeline whose `last` runs on one device"
        )
    pipe.trace(params, batch, rng=rng)  # raises what a step would raise
    search = _Search(pipe, params, batch, rng)
    for microbatch in range(search.count):
        found = search.microbatch(microbatch)
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class _Call:
    """One of the three user functions, with how to find its parameters and its inputs."""

    name: str
    run: Callable[..., Any]  # (parameters, shared), x, extra -> output
    wants: frozenset[str]


def _x_of_stage(
    functions: Functions, stage: int, params: PyTree, x: PyTree, extra: PyTree
) -> PyTree:
    """The output of a stage."""
    return functions.run_stage(stage, params, x, extra)[0]


class _Search:
    """The compiled pieces, each made once for all stages and microbatches."""

    def __init__(self, pipe: Pipeline, params: Params, batch: PyTree, rng: Any) -> None:
        self.pipe, self.params, self.rng = pipe, params, rng
        self.mesh = pipe.mesh
        self.rows = PartitionSpec(pipe.data_axes or None)
        self.batch = jax.tree.map(
            lambda leaf: jax.device_put(leaf, NamedSharding(self.mesh, self.rows)), batch
        )
        self.slices = pipe.schedule.slices
        functions = replace(pipe.functions, slices=1)
        last = pipe.schedule.num_stages - 1
        self.count = pipe.schedule.num_microbatches // pipe.schedule.slices
        # Every call in forward order, with its stage.  Unlike stages are compiled one by one, alike
        # ones once.
        self.calls = [
            (_Call("first", functions.run_first, OUTER_WANTS), 0),
            *(
                (
                    _Call(
                        f"stage {s}" if pipe.layout.unlike else "stage",
                        partial(_x_of_stage, functions, s),
                        function.wants_arrays,
                    ),
                    s,
                )
                for s, function in enumerate(functions.stages)
            ),
            (
                _Call("last", lambda p, x, extra: functions.run_last(p, x, extra)[0], OUTER_WANTS),
                last,
            ),
        ]
        self._compiled: dict[tuple[Phase, str], Callable[..., Any]] = {}
        self._masks: dict[str, Callable[..., Any]] = {}
        self._pick = jax.jit(
            lambda tree, d: jax.tree.map(
                lambda leaf: lax.dynamic_index_in_dim(leaf, d, 0, False), tree
            )
        )

    def microbatch(self, microbatch: int) -> Nonfinite | None:
        """Forwards in order, keeping what enters each stage, then backwards in reverse."""
        entered: list[PyTree] = []
        x: PyTree = ()
        for call, stage in self.calls:
            entered.append(x)
            if microbatch == 0 and self.slices > 1:
                self._check_mask(call, stage, x)
            x, found = self._run(Phase.FORWARD, call, stage, microbatch, x)
            if found is not None:
                return found
        dy = [jnp.broadcast_to(self._seed(leaf.dtype), leaf.shape) for leaf in jax.tree.leaves(x)]
        for (call, stage), x in zip(reversed(self.calls), reversed(entered), strict=True):
            dy, found = self._run(Phase.BACKWARD, call, stage, microbatch, (x, dy))
            if found is not None:
                return found
        return None

    def _seed(self, dtype: Any) -> Any:
        """The cotangent of a microbatch's loss, as in the step."""
        pipe = self.pipe
        mean = pipe.functions.loss is Loss.MEAN
        return jnp.asarray(1.0 / (self.count * pipe.partition.data_size) if mean else 1.0, dtype)

    def _params(self, call: _Call, stage: int) -> PyTree:
        """(parameters of the call, shared ones)."""
        if call.name in ("first", "last"):
            own = self.params.get(call.name, {})
        else:
            chunk, device = self.pipe.layout.where(stage)
            placed = self.params["stages"][chunk]
            own = (
                placed.stage(device)
                if isinstance(placed, Packed)
                else self._pick(placed, jnp.int32(device))
            )
        return jax.tree.map(self._on_mesh, (own, self.params.get("shared", {})))

    def _specs(self, call: _Call, stage: int) -> tuple[PyTree, PyTree]:
        """How these are split over the data axes along which functions are given local parts."""
        pipe, plans = self.pipe, self.pipe.partition.plans(self.params)
        own, shared = jax.tree.map(lambda leaf: PartitionSpec(), self._params(call, stage))
        held = leaf_plans(plans.get(call.name))
        if call.name not in ("first", "last"):
            held = pipe.layout.leaves_of(stage, plans["stages"])
        both = zip((own, shared), (held, leaf_plans(plans.get("shared"))), strict=True)
        return tuple(
            jax.tree.unflatten(jax.tree.structure(tree), [p.local(pipe.data_axes) for p in found])
            for tree, found in both
        )

    def _on_mesh(self, leaf: Any) -> Any:
        """The same array, spread as it is, on the mesh of automatic axes."""
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(self.mesh, spec))

    def _run(
        self, phase: Phase, call: _Call, stage: int, microbatch: int, x: PyTree
    ) -> tuple[PyTree, Nonfinite | None]:
        """(output, or gradient of x; what is not finite on the first data shard that has a
        fault).
        """
        key = (phase, call.name)
        if key not in self._compiled:
            body = self._forward(call) if phase is Phase.FORWARD else self._backward(call)
            self._compiled[key] = self._mapped(body, call, stage)
        result, counts = self._called(self._compiled[key], call, stage, microbatch, x)
        counts = jax.tree.map(np.asarray, counts)
        for shard in range(self.pipe.partition.data_size):
            values, inputs = (_described(counts[which], shard) for which in ("results", "inputs"))
            if values:
                inputs = inputs or self._of_others(counts["inputs"], shard)
                return result, Nonfinite(phase, call.name, stage, microbatch, shard, values, inputs)
        return result, None

    def _mapped(self, body: Callable[..., Any], call: _Call, stage: int) -> Callable[..., Any]:
        """A body on all devices of the mesh, compiled."""
        everywhere, rows, params = PartitionSpec(), self.rows, self._specs(call, stage)
        return jax.jit(
            mapped(
                body,
                self.mesh,
                {self.pipe.axis, *self.pipe.data_axes},
                in_specs=(params, rows, rows, everywhere, everywhere, everywhere),
                out_specs=(rows, everywhere),
            )
        )

    def _called(
        self, run: Callable[..., Any], call: _Call, stage: int, microbatch: int, x: PyTree
    ) -> Any:
        where = jnp.int32(stage), jnp.int32(microbatch)
        return run(self._params(call, stage), x, self.batch, self.rng, *where)

    def _check_mask(self, call: _Call, stage: int, x: PyTree) -> None:
        """PipelineError where a slice of the first sequence reads rows of later slices."""
        if call.name in ("first", "last") or "ctx" not in call.wants:
            return
        if call.name not in self._masks:
            self._masks[call.name] = self._mapped(self._later_rows(call, stage), call, stage)
        counts = self._called(self._masks[call.name], call, stage, 0, x)[1]
        faults = [
            f"  slice {k} reads later rows of {name!r}: {read} values of its results depend on them"
            for name, of_slices in counts.items()
            for k, read in enumerate(np.asarray(of_slices))
            if read
        ]
        if faults:
            raise PipelineError(
                f"stage {stage} reads appended rows of later slices, which no causal mask hides:\n"
                + "\n".join(faults)
                + "\nmask what comes after each position: seen = (ctx.offset + "
                "jnp.arange(x.shape[1]))[:, None] >= jnp.arange(buffer.shape[1])"
            )

    def _later_rows(self, call: _Call, at: int) -> Callable[..., Any]:
        count, slices = self.count * self.slices, self.slices

        def later_rows(
            params: PyTree, x: PyTree, batch: PyTree, rng: Any, stage: Any, _: Any
        ) -> tuple[PyTree, PyTree]:
            x = jax.tree.map(lambda leaf: leaf[0], x)
            cut = self.pipe.functions.split(batch, count)
            functions = self.pipe.functions.for_batch(cut)
            key = shard_key(rng, self.pipe.data_axes, self.pipe.partition.data_size)
            counts = _values_of_later_rows(
                functions,
                at,
                params,
                x,
                lambda k: make_extra(cut, key, stage, k, call.wants, slices),
            )
            axes = self.pipe.data_axes
            return (), jax.tree.map(lambda n: lax.psum(n, axes) if axes else n, counts)

        return later_rows

    def _of_others(self, counts: dict[str, Any], shard: int) -> tuple[str, ...]:
        """Inputs of other data shards that are not finite, where functions may exchange them."""
        others = [s for s in range(self.pipe.partition.data_size) if s != shard]
        return tuple(
            f"{text} on data shard {other}"
            for other in (others if self.pipe.sharding.local else ())
            for text in _described(counts, other)
        )

    def _extra(
        self, call: _Call, batch: PyTree, rng: Any, stage: Any, microbatch: Any
    ) -> dict[str, PyTree]:
        """The further arguments of the function in the step."""
        rng = shard_key(rng, self.pipe.data_axes, self.pipe.partition.data_size)
        return make_extra(
            split_batch(batch, self.count),
            rng,
            stage,
            microbatch,
            call.wants,
        )

    def _forward(self, call: _Call) -> Callable[..., Any]:
        def forward(
            params: PyTree, x: PyTree, batch: PyTree, rng: Any, stage: Any, microbatch: Any
        ) -> tuple[PyTree, PyTree]:
            x = jax.tree.map(lambda leaf: leaf[0], x)
            extra = self._extra(call, batch, rng, stage, microbatch)
            y = call.run(params, x, extra)
            counts = {"results": self._count("output", y), "inputs": self._inputs(params, x, extra)}
            return jax.tree.map(lambda leaf: leaf[None], y), counts

        return forward

    def _backward(self, call: _Call) -> Callable[..., Any]:
        def backward(
            params: PyTree, xdy: PyTree, batch: PyTree, rng: Any, stage: Any, microbatch: Any
        ) -> tuple[PyTree, PyTree]:
            x, dy = jax.tree.map(lambda leaf: leaf[0], xdy)
            extra = self._extra(call, batch, rng, stage, microbatch)

            def outputs(params: PyTree, x: PyTree) -> list[Any]:
                return list(filter(_floating, jax.tree.leaves(call.run(params, x, extra))))

            # Whole numbers have a gradient of their own dtype, float0, which is not counted.
            (own, shared), dx = jax.vjp(outputs, params, x)[1](dy)
            results = {
                **self._count("gradient of the input", dx),
                **self._count("gradient of parameters", own),
                **self._count("gradient of shared", shared),
            }
            inputs = {**self._inputs(params, x, extra), **self._count("gradient of the output", dy)}
            moving = filter(_floating, jax.tree.leaves(dx))
            return [leaf[None] for leaf in moving], {"results": results, "inputs": inputs}

        return backward

    def _inputs(self, params: PyTree, x: PyTree, extra: dict[str, PyTree]) -> dict[str, Any]:
        own, shared = params
        named = (
            ("parameters", own),
            ("shared", shared),
            ("input", x),
            ("microbatch", extra.get("microbatch", ())),
        )
        return {
            key: count for name, tree in named for key, count in self._count(name, tree).items()
        }

    def _count(self, name: str, tree: PyTree) -> dict[str, Any]:
        """Name of each floating leaf -> [data shards, (NaN, infinite, all)], the same on every
        device.
        """
        counts = {}
        for where, leaf in by_index(tree, name).items():
            if _floating(leaf):
                found = jnp.stack(
                    [jnp.isnan(leaf).sum(), jnp.isinf(leaf).sum(), jnp.asarray(jnp.size(leaf))]
                )[None]
                for axis in reversed(self.pipe.data_axes):
                    found = lax.all_gather(found, axis, tiled=True)
                counts[where] = found
        return counts


def _described(counts: dict[str, Any], shard: int) -> tuple[str, ...]:
    rows = [(name, *map(int, found[shard])) for name, found in counts.items()]
    return tuple(
        f"{name} has {nan} NaN and {inf} infinite of {size} values"
        for name, nan, inf, size in rows
        if nan or inf
    )


def _floating(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    # the gradient of a parameter that is not floating
    if dtype == jax.dtypes.float0:
        return False
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


_ROUNDING = 4  # differences that are roundings, in units of the largest value


def _values_of_later_rows(
    functions: Functions,
    stage: int,
    params: PyTree,
    x: PyTree,
    extra: Callable[[Any], dict[str, PyTree]],
) -> dict[str, Any]:
    """Name of each buffer -> [K], for each slice the number of values that a stage returns and
    that depend on later rows of the buffer.

    Each slice runs with two finite fills of the later rows of each buffer.  NaN as a fill would
    reach the output of a masked product too, since 0 times NaN is NaN.

    Args:
        functions: for slices.
        stage: its number.
        params: of the stage, and the shared ones.
        x: the input of the stage for a whole sequence, [rows, T, ...].
        extra: the further arguments of a slice, by its number.
    """
    slices, length = functions.slices, functions.length

    def part(k: Any) -> PyTree:
        def cut(leaf: Any) -> Any:
            whole = leaf.ndim > 1 and leaf.shape[1] == slices * length
            return lax.dynamic_slice_in_dim(leaf, k * length, length, 1) if whole else leaf

        return jax.tree.map(cut, x)

    first = jnp.int32(0)
    shapes = functions.carried(stage, params, part(first), extra(first))
    if not shapes or not shapes[1]:
        return {}

    def one(carried: PyTree, k: Any) -> tuple[PyTree, dict[str, Any]]:
        own, more, (carry, buffers) = part(k), extra(k), carried

        def run(buffers: Mapping[str, Any]) -> tuple[Any, PyTree]:
            given = {**more, "carried": (carry, dict(buffers))}
            return functions.run_stage(stage, params, own, given)

        _, after = run(buffers)
        pairs = {
            name: [_filled(buffers[name], rows, fill, k) for fill in _fills(rows)]
            for name, rows in after.rows[0].items()
        }
        one_fill = {name: pair[0] for name, pair in pairs.items()}
        results = {"": run(one_fill)}
        results |= {name: run({**one_fill, name: pair[1]}) for name, pair in pairs.items()}
        read = {name: (y, out.loss, out.carried[0]) for name, (y, out) in results.items()}
        return after.carried, {name: _differing(read[""], read[name]) for name in pairs}

    before = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return dict(lax.scan(one, before, jnp.arange(slices, dtype=jnp.int32))[1])


def _axis(buffer: Any, rows: Any) -> int:
    pairs = zip(buffer.shape, rows.shape, strict=True)
    return next(i for i, (whole, own) in enumerate(pairs) if whole != own)


def _fills(rows: Any) -> tuple[Any, Any]:
    """Two finite fills for later rows: the rows themselves, and other numbers.  Whole numbers such
    as those of documents are zero in the second fill.
    """
    return rows, 2 * rows + 1 if jnp.issubdtype(rows.dtype, jnp.inexact) else jnp.zeros_like(rows)


def _filled(buffer: Any, rows: Any, fill: Any, k: Any) -> Any:
    """The buffer, whose rows after slice k are copies of the fill."""
    axis = _axis(buffer, rows)
    length = rows.shape[axis]
    copies = jnp.concatenate([fill] * (buffer.shape[axis] // length), axis)
    at = lax.broadcasted_iota(jnp.int32, buffer.shape, axis)
    return jnp.where(at >= (k + 1) * length, copies.astype(buffer.dtype), buffer)


def _differing(one: PyTree, other: PyTree) -> Any:
    """How many values of two trees differ by more than a rounding; a NaN does not count."""

    def count(a: Any, b: Any) -> Any:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return jnp.sum(a != b)
        eps = float(jnp.finfo(a.dtype).eps)  # type: ignore[no-untyped-call]
        return jnp.sum(jnp.abs(a - b) > _ROUNDING * eps * jnp.max(jnp.abs(a), initial=0))

    counts = jax.tree.leaves(jax.tree.map(count, one, other))
    return sum(counts, jnp.int32(0))
