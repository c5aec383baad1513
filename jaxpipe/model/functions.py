"""The user's `first`, `stages` and `last` as a pipeline runs them, the inputs of each microbatch,
and the rows that pass between slices of a sequence.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import (
    PyTree,
    array_faults,
    by_index,
    described,
    path_text,
    shapes_of,
    summable,
    zeros_of,
)
from ..errors import PipelineError
from .calls import Context, Cuts, Function, unpadded


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("batch", "position"),
    meta_fields=("room",),
)
@dataclass(frozen=True)
class Positioned:
    """A batch whose sequences go on at a position of their cache.

    Attributes:
        batch: the user's, whole or by microbatch.
        position: that of each sequence's first row of time, [sequences].
        room: positions that the buffers of the cache have.
    """

    batch: PyTree
    position: Any
    room: int


def has_time(path: tuple[Any, ...], time: tuple[str, ...]) -> bool:
    """Whether a leaf of the batch is named in `time`: by its path, or by the first part of it."""
    name = path_text(path)
    return name in time or name.split("/")[0] in time


def split_batch(batch: PyTree, count: int, slices: int = 1, time: tuple[str, ...] = ()) -> PyTree:
    """Leaves [rows, ...] -> [count, rows / sequences, ...], rows in order: entry m is slice m %
    slices of sequence m // slices.  Leaves without a time axis are the same for all slices of a
    sequence.
    """
    sequences = count // slices

    def split(path: tuple[Any, ...], leaf: Any) -> Any:
        rows = leaf.reshape(sequences, leaf.shape[0] // sequences, *leaf.shape[1:])
        if slices == 1:
            return rows
        if not has_time(path, time):
            return jnp.repeat(rows, slices, axis=0)
        length = leaf.shape[1] // slices
        cut = rows.reshape(*rows.shape[:2], slices, length, *leaf.shape[2:])
        return jnp.moveaxis(cut, 2, 1).reshape(count, rows.shape[1], length, *leaf.shape[2:])

    return jax.tree_util.tree_map_with_path(split, batch)


def positions(batch: PyTree, time: tuple[str, ...], axis: int = 1) -> int:
    """The positions of time of a batch; `axis` 2: of a slice, where the batch is cut."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return int(next(np.shape(leaf)[axis] for path, leaf in leaves if has_time(path, time)))


def batch_faults(batch: PyTree, count: int, *, data_shards: int = 1) -> list[str]:
    """Faults of a batch whose rows are cut into `count` microbatches on each data shard."""
    shapes = {name: np.shape(leaf) for name, leaf in by_index(batch, "batch").items()}
    if not shapes:
        return ["the batch has no leaves; give a tree of arrays with a leading axis of rows"]
    if faults := array_faults(batch, "batch"):
        return faults
    faults, scalars = [], [name for name, shape in shapes.items() if not shape]
    if scalars:
        faults = [
            f"{len(scalars)} leaves of the batch are plain numbers, {scalars[0]} the first of "
            "them: lists are trees to JAX; make arrays of them, jax.numpy.asarray([...]), with a "
            "leading axis of rows (close over values that all rows share, or put them under "
            '"shared")'
        ]
    shards = f" x {data_shards} data shards" if data_shards > 1 else ""
    into = f"{count} microbatches{shards}"
    return faults + _cut_faults(shapes, 0, count * data_shards, "rows", into)


def time_faults(
    batch: PyTree, slices: int, time: tuple[str, ...], *, always: bool = False
) -> list[str]:
    """Faults of a batch whose leaves in `time` are cut along axis 1; `always`: one slice too."""
    if slices == 1 and not always:
        return []
    if not time:
        several = f"the schedule has {slices} slices a sequence"
        return [
            f"{several if slices > 1 else 'a cache has a time'}; name the leaves of the batch that "
            'have a time axis (axis 1): jaxpipe.Model(..., time=("tokens", "targets"))'
        ]
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    absent = [name for name in time if not any(has_time(path, (name,)) for path, _ in leaves)]
    timed = [(jax.tree_util.keystr(p), leaf) for p, leaf in leaves if has_time(p, time)]
    shapes = {f"batch{name}": np.shape(leaf) for name, leaf in timed}
    faults = [f"the batch has no {name!r}, which time= of the model names" for name in absent]
    faults += [
        f"{name} has shape {list(shape)}; a leaf in time= needs axis 1, of time"
        for name, shape in shapes.items()
        if len(shape) < 2
    ]
    return faults + _cut_faults(shapes, 1, slices, "positions of time", f"{slices} equal slices")


def _cut_faults(
    shapes: Mapping[str, tuple[int, ...]], axis: int, parts: int, what: str, into: str
) -> list[str]:
    """Leaves that are not cut into equal parts along an axis, or have other lengths there."""
    lengths = {name: shape[axis] for name, shape in shapes.items() if len(shape) > axis}
    faults = [
        f"{name} has {n} {what}, which do not divide into {into}; use "
        f"{max(1, round(n / parts)) * parts} {what}"
        for name, n in lengths.items()
        if not n or n % parts
    ]
    if len(set(lengths.values())) > 1:
        every = ", ".join(f"{name} has {n} {what}" for name, n in lengths.items())
        faults.append(f"leaves of the batch have different lengths: {every}")
    return faults


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_place(buffer: Any, rows: Any, offset: Any, size: int, axis: int) -> tuple[Any, Any]:
    """Return a buffer that has the rows already: once to read, once to leave for later slices.

    The gradient of the rows is their part of the buffer's gradient.  Every slice that read the rows
    has added to it.
    """
    return buffer, buffer


def _forwards(
    buffer: Any, rows: Any, offset: Any, size: int, axis: int
) -> tuple[tuple[Any, Any], Any]:
    return (buffer, buffer), offset


def _backwards(size: int, axis: int, offset: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    total = cotangents[1] + cotangents[0]
    return total, lax.dynamic_slice_in_dim(total, offset, size, axis), None


_in_place.defvjp(_forwards, _backwards)


@dataclass
class Ledger:
    """The rows that a stage appends while it is traced; with a cache the buffers are those of one
    of its sequences.
    """

    functions: Functions
    number: Any  # of the slice; with a cache the position of its first row
    # buffers by name; None while their shapes are inferred
    before: Mapping[str, Any] | None
    prefix: str = ""  # of names
    rows: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)

    def again(self) -> Ledger:
        """An empty ledger, for a function that is traced by itself."""
        return replace(self, rows={}, buffers={})

    def of_layer(self, place: int) -> Ledger:
        """The same ledger for one layer of the stage: layers share no names."""
        return replace(self, prefix=f"{place}/")

    def append(self, name: str, rows: Any, axis: int) -> Any:
        """Return the whole buffer; PipelineError for a used name or other shapes."""
        rows, name = jnp.asarray(rows), self.prefix + name
        if name in self.rows:
            raise PipelineError(
                f"ctx.append({name!r}, ...) is called twice in a stage; "
                "give each buffer its own name"
            )
        if not -rows.ndim <= axis < rows.ndim:
            raise PipelineError(
                f"ctx.append({name!r}, rows, axis={axis}) has no such axis: the rows have shape "
                f"{list(rows.shape)}"
            )
        axis %= rows.ndim
        functions = self.functions
        room = functions.room or functions.slices * rows.shape[axis]
        shape = (*rows.shape[:axis], room, *rows.shape[axis + 1 :])
        buffer: Any = jnp.zeros(shape, rows.dtype) if self.before is None else self.before.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (shape, rows.dtype):
            raise PipelineError(
                f"ctx.append({name!r}, ...) of rows {described(rows)} finds a buffer of "
                f"{described(buffer)}; each slice of a sequence appends rows of the same name, "
                f"shape and dtype, and the buffer has room for {room} of them"
            )
        self.rows[name] = rows
        offset, later = self.number * (1 if functions.room else rows.shape[axis]), buffer
        if not functions.in_place:
            buffer = later = lax.dynamic_update_slice_in_dim(buffer, rows, offset, axis)
        elif jnp.issubdtype(rows.dtype, jnp.inexact):
            buffer, later = _in_place(buffer, rows, offset, rows.shape[axis], axis)
        self.buffers[name] = later
        return buffer


# The arguments of a function besides parameters and x, by name.
Extra: TypeAlias = "dict[str, PyTree]"


class StageOutput(NamedTuple):
    """The results of a stage besides x; () for those that it does not have."""

    loss: Any = ()  # a scalar that is added to the loss of the microbatch
    state: PyTree = ()  # what the next microbatch finds as `state`; has no gradient
    carried: PyTree = ()  # (carry, buffers by name) that the next slice finds
    rows: PyTree = ()  # what it appended: (rows by name, number of the slice), or ()


class Loss(enum.Enum):
    """How the losses of microbatches make the loss of the step."""

    MEAN = "mean"  # last returns a scalar; the loss is their mean
    # last returns (sum, count); the loss is all sums over all counts, and 0 with zero gradients
    # where nothing is counted
    SUM_OVER_COUNT = "sum_over_count"


def with_aux(loss: Any, aux: Sequence[PyTree]) -> Any:
    """A loss as `jax.grad` takes it: alone, or with other results for `has_aux=True`."""
    return (loss, aux[0] if len(aux) == 1 else tuple(aux)) if aux else loss


@dataclass(frozen=True)
class Functions:
    """The functions that a pipeline runs."""

    stages: tuple[Function, ...]  # per stage; equal entries are one function
    first: Function | None
    last: Function | None
    loss: Loss
    has_metrics: bool
    stage_loss: bool
    training: bool = True
    slices: int = 1  # of a sequence
    time: tuple[str, ...] = ()  # leaves of the batch with a time axis
    length: int = 0  # of a slice, once the batch is known
    # (stage's parameters, x) -> the first carry
    carry: Callable[..., Any] | None = None
    # buffers have the rows of a slice already when it appends them: the executor writes them
    in_place: bool = False
    room: int = 0  # positions of the buffers of a cache; 0 where a call has none

    def with_cache(self, room: int) -> Functions:
        """The same functions, whose carries and rows pass from call to call."""
        stages = tuple(replace(function, cached=True) for function in self.stages)
        return replace(self, stages=stages, room=room)

    def over(self, axis: str, cuts: Cuts, params: Mapping[str, PyTree]) -> Functions:
        """The same functions, whose spread ones know the axis and the sizes of whole parameters."""
        sizes = {key: cuts.sizes(key, params[key]) for key in cuts.dims}
        ends = {}
        for key in filter(self.spreads, ("first", "last")):
            context = {"axis": axis, "sizes": sizes[key], "shared_sizes": sizes.get("shared")}
            ends[key] = replace(getattr(self, key), context=context)
        return replace(self, **ends)

    def split(self, batch: PyTree, count: int) -> PyTree:
        """The rows of each microbatch."""
        if isinstance(batch, Positioned):
            return replace(batch, batch=self.split(batch.batch, count))
        return split_batch(batch, count, self.slices, self.time)

    def extra(
        self, batch: PyTree, rng: Any, stage: Any, microbatch: Any, wants: frozenset[str]
    ) -> Extra:
        """The microbatch's rows of the batch and the context, those of them that are wanted."""
        extra: Extra = {}
        keys: dict[str, Any] = {}
        position, fold = None, jax.random.fold_in
        if isinstance(batch, Positioned):
            batch, position = batch.batch, batch.position[microbatch // self.slices]
        if "microbatch" in wants:
            extra["microbatch"] = jax.tree.map(
                lambda leaf: lax.dynamic_index_in_dim(leaf, microbatch, 0, keepdims=False), batch
            )
        if "ctx" in wants:
            if rng is not None:
                keys["rng"] = fold(fold(rng, stage), microbatch)
                keys["microbatch_rng"] = fold(rng, microbatch)
            if rng is not None and self.slices > 1:
                keys["sequence_rng"] = fold(rng, microbatch // self.slices)
            extra["ctx"] = Context(stage, microbatch, offset=position, **keys)
        return extra

    def for_batch(self, batch: PyTree) -> Functions:
        """The same functions, for a batch that is cut."""
        rows = batch.batch if isinstance(batch, Positioned) else batch
        if not self.passes:
            return self
        return replace(self, length=positions(rows, self.time, 2))

    @property
    def passes(self) -> bool:
        """Whether anything passes from slice to slice, or from call to call."""
        return self.slices > 1 or self.room > 0

    def join(self, outputs: PyTree) -> PyTree:
        """What the last stage returned for each microbatch, by whole sequences: leaves [M, rows,
        ...] of slices -> [M / slices, rows, ...].

        A leaf whose third axis has the length of a slice becomes whole sequences.  Of another leaf
        the last slice is kept.
        """

        def join(leaf: Any) -> Any:
            cut = leaf.reshape(-1, self.slices, *leaf.shape[1:])
            if leaf.ndim < 3 or leaf.shape[2] != self.length:
                return cut[:, -1]
            whole = jnp.moveaxis(cut, 1, 2)
            return whole.reshape(*whole.shape[:2], self.slices * self.length, *leaf.shape[3:])

        return outputs if self.slices == 1 else jax.tree.map(join, outputs)

    def _keywords(self, function: Function, extra: Extra, ledger: Any = None) -> Extra:
        """The keywords that a function may take; its context has the position of its slice."""
        keywords = {"microbatch": None, "state": None, "training": self.training, **extra}
        ctx = extra.get("ctx")
        if ctx is not None:
            ctx = ctx._replace(offset=self._offset(ctx), ledger=ledger, **function.context)
        return {**keywords, "ctx": ctx}

    def _offset(self, ctx: Context) -> Any:
        before = 0 if ctx.offset is None else ctx.offset
        if self.slices == 1:
            return before
        return before + ctx.microbatch % self.slices * self.length

    def carried(self, stage: int, params: PyTree, x: PyTree, extra: Extra) -> PyTree:
        """Shapes of what passes from slice to slice of a sequence in a stage: (carry, buffers by
        name), each () where there is none.
        """
        if self.slices == 1 or self.room:
            return ()
        found = jax.eval_shape(
            lambda p, h, e: self.run_stage(stage, p, h, e)[1].carried, params, x, extra
        )
        return found if jax.tree.leaves(found) else ()

    def total(self, losses: Any, counts: Any, shards: int = 1) -> tuple[Any, Any, Any]:
        """The loss of the step, that of each microbatch, and the factor that the gradients still
        need (None for none), from sums over data shards.
        """
        if self.loss is Loss.SUM_OVER_COUNT:
            count = jnp.sum(counts).astype(losses.dtype)
            # The loss and the gradients are 0 where nothing is counted.
            factor = jnp.where(count == 0, 0, 1 / jnp.where(count == 0, 1, count))
            return jnp.sum(losses) * factor, losses, factor
        losses = losses if shards == 1 else losses / shards
        return jnp.mean(losses), losses, None

    def returning_outputs(self) -> Functions:
        """The same stages, and a `last` that gives what the last of them returns as its metrics."""

        def last(_params: PyTree, x: PyTree, _microbatch: PyTree) -> tuple[Any, PyTree]:
            return jnp.zeros((), jnp.float32), x

        function = Function(last, "last", frozenset())
        return replace(self, last=function, loss=Loss.MEAN, has_metrics=True)

    def spreads(self, key: str) -> bool:
        """Whether `first` or `last` runs on all devices at once."""
        function: Function | None = getattr(self, key)
        return function is not None and function.spread is not None

    @property
    def has_state(self) -> bool:
        """Whether any stage keeps state from microbatch to microbatch."""
        return any("state" in function.wants_arrays for function in self.stages)

    def run_whole(self, key: str, params: PyTree, x: PyTree, extra: Extra) -> Any:
        """`first` or `last` with whole parameters (its own, shared), on one device.

        A spread one finds a mapped axis of length 1 in the place of the mesh's.
        """
        run = partial(getattr(self, f"run_{key}"), unpadded(params), x, extra)
        if not self.spreads(key):
            return run()
        axis = getattr(self, key).context["axis"]
        return jax.tree.map(lambda leaf: leaf[0], jax.vmap(run, axis_name=axis, axis_size=1)())

    def run_first(self, params: PyTree, _x: PyTree, extra: Extra) -> PyTree:
        """(first parameters, shared), (), extra -> x."""
        own, shared = params
        if self.first is None:
            rows = extra["microbatch"]
            if not isinstance(rows, Mapping) or "x" not in rows:
                raise PipelineError(
                    'without `first`, a microbatch\'s "x" is the input of the first stage, but '
                    'the batch has none; give a dict with "x", or Model(..., '
                    "first=function(first_params, microbatch) -> x)"
                )
            return rows["x"]
        keywords = self._keywords(self.first, extra | {"shared": shared})
        return self.first.run(own, extra["microbatch"], keywords=keywords)

    def run_stage(
        self, stage: int, params: PyTree, x: PyTree, extra: Extra
    ) -> tuple[PyTree, StageOutput]:
        """Stage number, (stage parameters, shared), x, extra -> y and what it returns besides.

        "carried" in `extra` is (carry, buffers) of the slice before.  With a cache "state" is
        (carries, buffers) of all its sequences.
        """
        (own, shared), function = params, self.stages[stage]
        ctx: Any = extra.get("ctx")
        before = cache = extra.get("state" if self.room else "carried", ())
        if self.room and cache:
            at = ctx.microbatch // self.slices
            before = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, 0, False), cache)
        ledger: Any = None
        if self.passes and ctx is not None:
            number = self._offset(ctx) if self.room else ctx.microbatch % self.slices
            ledger = Ledger(self, number, before[1] if before else None)
        keywords = self._keywords(function, extra | {"shared": shared}, ledger)
        if "carry" in function.wants:
            keywords["carry"] = self._carry(function, own, x, keywords, before)
        out = function.run(own, x, keywords=keywords)
        passes = [name for name in ("state", "carry") if name in function.wants]
        why = {"loss": "stage_loss=True"} if self.stage_loss else {}
        why |= {name: f"it takes `{name}`" for name in passes}
        returned = function.results({"x": "", **why}, out)
        loss: Any = returned.get("loss", ())
        if self.stage_loss:
            loss = jnp.zeros((), jnp.float32) if loss is None else function.loss_of(loss)
        for name in passes:
            returned[name] = _same_form(function, name, keywords[name], returned[name])
        state, carry = returned.get("state", ()), returned.get("carry", ())
        buffers: PyTree = {}
        rows: PyTree = ()
        if ledger is not None and ledger.rows:
            buffers, rows = ledger.buffers, (ledger.rows, ledger.number)
        if not self.room or not cache:
            return returned["x"], StageOutput(loss, state, (carry, buffers), rows)

        def put(whole: Any, own: Any) -> Any:
            """The sequence's carry, or its rows at their position, in the cache."""
            zero, sizes = jnp.int32(0), zip(whole.shape[1:], own.shape, strict=True)
            starts = [ledger.number if size > length else zero for size, length in sizes]
            return lax.dynamic_update_slice(whole, own[None], [at, *starts])

        return returned["x"], StageOutput(loss, jax.tree.map(put, cache, (carry, ledger.rows)))

    def _carry(
        self, function: Function, own: PyTree, x: PyTree, keywords: Extra, before: PyTree
    ) -> PyTree:
        """The carry of a slice: that of the slice before, or the first one of a sequence.

        The first one is what the model says, or zeros of the shapes that the stage returns for a
        carry that is the number 0.
        """
        ctx = keywords["ctx"]
        if self.carry is not None:
            first = jax.tree.map(jnp.asarray, self.carry(own, x))
        else:
            ledger = None if ctx.ledger is None else ctx.ledger.again()
            zero = jnp.zeros((), jax.tree.leaves(x)[0].dtype)
            asked = {**keywords, "ctx": ctx._replace(ledger=ledger), "carry": zero}
            try:
                first = zeros_of(jax.eval_shape(lambda: function.run(own, x, keywords=asked)[-1]))
            except Exception as error:
                raise PipelineError(
                    f"`{function.name}` takes `carry`, but the shapes of the first one cannot be "
                    "inferred from the number 0; give jaxpipe.Model(..., "
                    "carry=function(stage_params, x) -> the first carry)"
                ) from error
        if not before:
            return first
        return jax.tree.map(lambda a, b: jnp.where(ctx.offset == 0, a, b), first, before[0])

    def run_last(self, params: PyTree, y: PyTree, extra: Extra) -> tuple[Any, PyTree]:
        """(last parameters, shared), y, extra -> scalar to differentiate, {"count", "metrics"}."""
        own, shared = params
        if self.last is None:
            raise PipelineError(
                "this pipeline has no `last` function; give Model(..., last=function that "
                "returns the loss)"
            )
        keywords = self._keywords(self.last, extra | {"shared": shared})
        out = self.last.run(own, y, extra["microbatch"], keywords=keywords)
        metrics: PyTree = ()
        count: PyTree = ()
        if self.has_metrics:
            both = {"loss": "", "metrics": "has_metrics=True"}
            out, metrics = self.last.results(both, out).values()
        if self.loss is Loss.SUM_OVER_COUNT:
            both = {"sum": "", "count": "loss=Loss.SUM_OVER_COUNT"}
            out, count = self.last.results(both, out).values()
            count = jnp.asarray(count)
            if count.shape != () or jnp.issubdtype(count.dtype, jnp.complexfloating):
                raise PipelineError(
                    "`last` must return (sum, count) with a scalar count; the count is "
                    f"{count.dtype}{list(count.shape)}: take its sum"
                )
            count = summable(count)
        advice = (
            "; take its mean, for instance, or write Model(..., has_metrics=True) for (loss, "
            "metrics), loss=Loss.SUM_OVER_COUNT for (sum, count)"
        )
        return self.last.loss_of(out, advice), {"count": count, "metrics": metrics}


def _same_form(function: Function, name: str, before: PyTree, after: PyTree) -> PyTree:
    """State or carry as a stage returns it; PipelineError where it is not like the one before."""
    before, after = (jax.tree.map(jnp.asarray, tree) for tree in (before, after))
    if shapes_of(before) != shapes_of(after):
        raise PipelineError(
            f"`{function.name}` takes {name} as {described(before)} but returns "
            f"{described(after)}; return the same tree"
        )
    return after
