"""Finds the first value of a step that is not finite, by running the model stage by stage and
microbatch by microbatch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .arrays import Params, PyTree, by_index, zeros_of
from .errors import PipelineError
from .model.calls import OUTER_WANTS
from .model.functions import Functions, Loss, make_extra, split_batch
from .model.leaf_plan import leaf_plans
from .model.packed import Packed
from .pipeline import Pipeline
from .spmd.body import shard_key
from .spmd.entries import mapped


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
    """One of the three user functions, and the stage with which it runs."""

    name: str
    stage: int
    run: Callable[..., Any]  # (parameters, shared), x, extra -> output
    wants: frozenset[str]

    @property
    def is_stage(self) -> bool:
        """Whether it is a stage."""
        return self.name not in ("first", "last")


# A body of compiled code: (parameters, shared), what enters the call, the batch, the key of the
# data shard, and the numbers of stage and microbatch -> what the call returns, and counts.
_Body: TypeAlias = "Callable[..., tuple[PyTree, PyTree]]"


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
        functions, last = replace(pipe.functions, slices=1), pipe.schedule.num_stages - 1
        self.count = pipe.schedule.num_microbatches // pipe.schedule.slices
        # Every call in forward order.  Unlike stages are compiled one by one, alike ones once.
        self.calls = [_Call("first", 0, functions.run_first, OUTER_WANTS)]
        for s, function in enumerate(functions.stages):
            name = f"stage {s}" if pipe.layout.unlike else "stage"
            run = partial(functions.run_stage, s)
            self.calls.append(
                _Call(name, s, lambda *given, run=run: run(*given)[0], function.wants_arrays)
            )
        self.calls.append(
            _Call("last", last, lambda *given: functions.run_last(*given)[0], OUTER_WANTS)
        )
        self._compiled: dict[tuple[Phase | None, str], Callable[..., Any]] = {}
        self._pick = jax.jit(
            lambda tree, d: jax.tree.map(
                lambda leaf: lax.dynamic_index_in_dim(leaf, d, 0, False), tree
            )
        )

    def microbatch(self, microbatch: int) -> Nonfinite | None:
        """Forwards in order, keeping what enters each stage, then backwards in reverse."""
        entered: list[PyTree] = []
        x: PyTree = ()
        for call in self.calls:
            entered.append(x)
            if microbatch == 0 and self.slices > 1 and call.is_stage and "ctx" in call.wants:
                self._check_mask(call, x)
            x, found = self._run(Phase.FORWARD, call, microbatch, x)
            if found is not None:
                return found
        dy = [jnp.broadcast_to(self._seed(leaf.dtype), leaf.shape) for leaf in jax.tree.leaves(x)]
        for call, x in zip(reversed(self.calls), reversed(entered), strict=True):
            dy, found = self._run(Phase.BACKWARD, call, microbatch, (x, dy))
            if found is not None:
                return found
        return None

    def _seed(self, dtype: Any) -> Any:
        """The cotangent of a microbatch's loss, as in the step."""
        pipe = self.pipe
        mean = pipe.functions.loss is Loss.MEAN
        return jnp.asarray(1.0 / (self.count * pipe.partition.data_size) if mean else 1.0, dtype)

    def _params(self, call: _Call) -> PyTree:
        """(parameters of the call, shared ones)."""
        own = self.params.get(call.name, {})
        if call.is_stage:
            chunk, device = self.pipe.layout.where(call.stage)
            placed = self.params["stages"][chunk]
            own = (
                placed.stage(device)
                if isinstance(placed, Packed)
                else self._pick(placed, jnp.int32(device))
            )
        return jax.tree.map(self._on_mesh, (own, self.params.get("shared", {})))

    def _specs(self, call: _Call) -> tuple[PyTree, PyTree]:
        """How these are split over the data axes along which functions are given local parts."""
        pipe, plans = self.pipe, self.pipe.partition.plans(self.params)
        held = leaf_plans(plans.get(call.name))
        if call.is_stage:
            held = pipe.layout.leaves_of(call.stage, plans["stages"])
        both = zip(self._params(call), (held, leaf_plans(plans.get("shared"))), strict=True)
        return tuple(
            jax.tree.unflatten(jax.tree.structure(tree), [p.local(pipe.data_axes) for p in found])
            for tree, found in both
        )

    def _on_mesh(self, leaf: Any) -> Any:
        """The same array, spread as it is, on the mesh of automatic axes."""
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(self.mesh, spec))

    def _run(
        self, phase: Phase, call: _Call, microbatch: int, x: PyTree
    ) -> tuple[PyTree, Nonfinite | None]:
        """(output, or gradient of x; what is not finite on the first data shard that has a
        non-finite value).
        """
        body = self._forward if phase is Phase.FORWARD else self._backward
        result, counts = self._called(phase, body, call, microbatch, x)
        counts = jax.tree.map(np.asarray, counts)
        for shard in range(self.pipe.partition.data_size):
            values, inputs = (_described(counts[which], shard) for which in ("results", "inputs"))
            if values:
                inputs = inputs or self._of_others(counts["inputs"], shard)
                function = "stage" if call.is_stage else call.name
                where = function, call.stage, microbatch, shard
                return result, Nonfinite(phase, *where, values, inputs)
        return result, None

    def _called(
        self,
        phase: Phase | None,
        body: Callable[[_Call], _Body],
        call: _Call,
        microbatch: int,
        x: PyTree,
    ) -> Any:
        """Run a body on all devices of the mesh; it is compiled once for all calls of a name."""
        if (phase, call.name) not in self._compiled:
            self._compiled[phase, call.name] = self._mapped(body(call), self._specs(call))
        where = jnp.int32(call.stage), jnp.int32(microbatch)
        run = self._compiled[phase, call.name]
        return run(self._params(call), x, self.batch, self.rng, *where)

    def _mapped(self, body: _Body, params: PyTree) -> Callable[..., Any]:
        pipe, everywhere, rows = self.pipe, PartitionSpec(), self.rows

        def run(params: PyTree, x: PyTree, batch: PyTree, rng: Any, *where: Any) -> Any:
            x = jax.tree.map(lambda leaf: leaf[0], x)
            key = shard_key(rng, pipe.data_axes, pipe.partition.data_size)
            result, counts = body(params, x, batch, key, *where)
            return jax.tree.map(lambda leaf: leaf[None], result), counts

        return jax.jit(
            mapped(
                run,
                self.mesh,
                {pipe.axis, *pipe.data_axes},
                in_specs=(params, rows, rows, everywhere, everywhere, everywhere),
                out_specs=(rows, everywhere),
            )
        )

    def _check_mask(self, call: _Call, x: PyTree) -> None:
        """PipelineError where a slice of the first sequence reads rows of later slices."""
        counts = self._called(None, self._later_rows, call, 0, x)[1]
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

    def _later_rows(self, call: _Call) -> _Body:
        count, slices, axes = self.count * self.slices, self.slices, self.pipe.data_axes

        def later_rows(
            params: PyTree, x: PyTree, batch: PyTree, key: Any, stage: Any, _: Any
        ) -> tuple[PyTree, PyTree]:
            cut = self.pipe.functions.split(batch, count)
            functions = self.pipe.functions.for_batch(cut)
            counts = _values_of_later_rows(
                functions,
                call.stage,
                params,
                x,
                lambda k: make_extra(cut, key, stage, k, call.wants, slices),
            )
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
        self, call: _Call, batch: PyTree, key: Any, stage: Any, microbatch: Any
    ) -> dict[str, PyTree]:
        """The further arguments of the function in the step."""
        return make_extra(split_batch(batch, self.count), key, stage, microbatch, call.wants)

    def _forward(self, call: _Call) -> _Body:
        def forward(params: PyTree, x: PyTree, *step: Any) -> tuple[PyTree, PyTree]:
            extra = self._extra(call, *step)
            y = call.run(params, x, extra)
            return y, {
                "results": self._count("output", y),
                "inputs": self._inputs(params, x, extra),
            }

        return forward

    def _backward(self, call: _Call) -> _Body:
        def backward(params: PyTree, xdy: PyTree, *step: Any) -> tuple[PyTree, PyTree]:
            (x, dy), extra = xdy, self._extra(call, *step)

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
            moving = list(filter(_floating, jax.tree.leaves(dx)))
            return moving, {"results": results, "inputs": inputs}

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

    before = zeros_of(shapes)
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
