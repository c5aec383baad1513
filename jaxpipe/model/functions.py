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
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from ..arrays import (
    ByPart,
    Number,
    PyTree,
    Rng,
    by_index,
    described,
    is_key,
    shapes_of,
    summable,
    zeros_of,
)
from ..errors import PipelineError
from ..table.kinds import By
from .batch import Positioned, map_rows, positions, split_batch
from .calls import Context, Function, UserFunction, one_array
from .keys import keys_of

_REAL = (jnp.bool_, jnp.integer, jnp.floating)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_place(
    buffer: Array, rows: Array, offset: Array, size: int, axis: int
) -> tuple[Array, Array]:
    """Return a buffer that has the rows already: once to read, once to leave for later slices.

    The gradient of the rows is their part of the buffer's gradient.  Every slice that read the rows
    has added to it.
    """
    return buffer, buffer


def _forwards(
    buffer: Array, rows: Array, offset: Array, size: int, axis: int
) -> tuple[tuple[Array, Array], Array]:
    return (buffer, buffer), offset


def _backwards(
    size: int, axis: int, offset: Array, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    total = cotangents[1] + cotangents[0]
    return total, lax.dynamic_slice_in_dim(total, offset, size, axis), None


_in_place.defvjp(_forwards, _backwards)


@dataclass
class Ledger:
    """The rows that a stage appends while it is traced; with a cache the buffers are those of one
    of its sequences.
    """

    functions: Functions
    number: Number  # of the slice; with a cache the position of its first row
    # buffers by name; None while their shapes are inferred
    before: Mapping[str, Array] | None
    prefix: str = ""  # of names
    rows: dict[str, Array] = field(default_factory=dict)
    buffers: dict[str, Array] = field(default_factory=dict)

    def again(self) -> Ledger:
        """An empty ledger, for a function that is traced by itself."""
        return replace(self, rows={}, buffers={})

    def of_layer(self, place: int) -> Ledger:
        """The same ledger for one layer of the stage: layers share no names."""
        return replace(self, prefix=f"{place}/")

    def append(self, name: str, rows: Array, axis: int) -> Array:
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
        buffer = jnp.zeros(shape, rows.dtype) if self.before is None else self.before.get(name)
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


# The parameters that a function is given: its own, and the shared ones.
ParamPair: TypeAlias = "tuple[PyTree, PyTree]"
# The arguments of a function besides parameters and x, by name.
Extra: TypeAlias = "dict[str, PyTree]"


class StageOutput(NamedTuple):
    """The results of a stage besides x; () for those that it does not have."""

    loss: Array | tuple[()] = ()  # a scalar that is added to the loss of the microbatch
    state: PyTree = ()  # what the next microbatch finds as `state`; has no gradient
    carried: tuple[object, ...] = ()  # (carry, buffers by name) that the next slice finds
    rows: PyTree = ()  # what it appended: (rows by name, number of the slice), or ()


class Loss(enum.Enum):
    """How the losses of microbatches make the loss of the step."""

    MEAN = "mean"  # last returns a scalar; the loss is their mean
    # last returns (sum, count); the loss is all sums over all counts, and 0 with zero gradients
    # where nothing is counted
    SUM_OVER_COUNT = "sum_over_count"


def share_of(count: Array) -> Array:
    """1 / count; 0 where nothing is counted, so that the loss and the gradients are 0 there."""
    return jnp.where(count == 0, 0, 1 / jnp.where(count == 0, 1, count))


def mean_over_microbatches[T](metrics: T, total: Callable[[Array], Array], parts: int) -> T:
    """The mean of metrics; `total` sums a leaf over its `parts`.  PipelineError for keys."""
    if keys := [name for name, leaf in by_index(metrics, "metrics").items() if is_key(leaf)]:
        raise PipelineError(
            f"`last` returns keys of random numbers as {', '.join(keys)}; metrics are averaged "
            "over microbatches, and keys have no mean: leave them out"
        )
    means: T = jax.tree.map(lambda leaf: total(summable(leaf)) / parts, metrics)
    return means


def with_aux(loss: Array, aux: Sequence[PyTree]) -> Any:
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
    whole: tuple[str, ...] = ()  # those without an axis of rows
    length: int = 0  # of a slice, once the batch is known
    # (stage's parameters, x) -> the first carry
    carry: UserFunction | None = None
    # buffers have the rows of a slice already when it appends them: the executor writes them
    in_place: bool = False
    room: int = 0  # positions of the buffers of a cache; 0 where a call has none

    def with_cache(self, room: int) -> Functions:
        """The same functions, whose carries and rows pass from call to call."""
        stages = tuple(replace(function, cached=True) for function in self.stages)
        return replace(self, stages=stages, room=room)

    def over(self, axis: str, sizes: ByPart) -> Functions:
        """The same functions, whose spread ones know the axis and the sizes of whole parameters."""
        ends = {}
        for key in filter(self.spreads, ("first", "last")):
            context = {"axis": axis, "sizes": sizes[key], "shared_sizes": sizes.get("shared")}
            ends[key] = replace(getattr(self, key), context=context)
        return replace(self, **ends)

    def split(self, batch: PyTree, count: int) -> PyTree:
        """The rows of each microbatch."""
        if isinstance(batch, Positioned):
            return replace(batch, batch=self.split(batch.batch, count))
        return split_batch(batch, count, self.slices, self.time, self.whole)

    def specs(self, batch: PyTree, axes: tuple[str, ...]) -> PyTree:
        """The split of a batch: of rows over data axes; leaves without rows are on every device."""
        rows, everywhere = PartitionSpec(axes or None), PartitionSpec()
        return map_rows(lambda _: rows, batch, self.whole, lambda _: everywhere)

    def extra(
        self, batch: PyTree, rng: Rng, stage: Any, microbatch: Any, wants: frozenset[str], *, of: By
    ) -> Extra:
        """The microbatch's rows of the batch and the context, those of them that are wanted; `of`
        is the function that gets them.
        """
        extra: Extra = {}
        position, sequence = None, microbatch // self.slices
        if isinstance(batch, Positioned):
            batch, position = batch.batch, batch.position[sequence]
        if "microbatch" in wants:

            def row(leaf: Array) -> Any:
                return lax.dynamic_index_in_dim(leaf, microbatch, 0, keepdims=False)

            extra["microbatch"] = map_rows(row, batch, self.whole)
        if "ctx" in wants:
            keys = keys_of(of, rng, stage=stage, microbatch=microbatch, sequence=sequence)
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

    def join[T](self, outputs: T) -> T:
        """What the last stage returned for each microbatch, by whole sequences: leaves [M, rows,
        ...] of slices -> [M / slices, rows, ...].

        A leaf whose third axis has the length of a slice becomes whole sequences.  Of another leaf
        the last slice is kept.
        """

        def join(leaf: Array) -> Array:
            cut = leaf.reshape(leaf.shape[0] // self.slices, self.slices, *leaf.shape[1:])
            if leaf.ndim < 3 or leaf.shape[2] != self.length:
                return cut[:, -1]
            whole = jnp.moveaxis(cut, 1, 2)
            length = self.slices * self.length
            return whole.reshape(*whole.shape[:2], length, *leaf.shape[3:])

        return outputs if self.slices == 1 else jax.tree.map(join, outputs)

    def _keywords(self, function: Function, extra: Extra, ledger: Ledger | None = None) -> Extra:
        """The keywords that a function may take; its context has the position of its slice."""
        keywords = {"microbatch": None, "state": None, "ctx": None, **extra}
        keywords["training"] = self.training
        if (ctx := keywords["ctx"]) is not None:
            own = {"offset": self._offset(ctx), "ledger": ledger, **function.context}
            keywords["ctx"] = ctx._replace(**own)
        return keywords

    def _offset(self, ctx: Context) -> Number:
        before = 0 if ctx.offset is None else ctx.offset
        if self.slices == 1:
            return before
        return before + ctx.microbatch % self.slices * self.length

    def carried(self, stage: int, params: ParamPair, x: PyTree, extra: Extra) -> tuple[object, ...]:
        """Shapes of what passes from slice to slice of a sequence in a stage: (carry, buffers by
        name), each () where there is none.
        """
        if self.slices == 1 or self.room:
            return ()
        found: tuple[object, ...] = jax.eval_shape(
            lambda p, h, e: self.run_stage(stage, p, h, e)[1].carried, params, x, extra
        )
        return found if jax.tree.leaves(found) else ()

    def total(
        self, losses: Array, counts: PyTree, shards: int = 1
    ) -> tuple[Array, Array, Array | None]:
        """The loss of the step, that of each microbatch, and the factor that the gradients still
        need (None for none), from sums over data shards.
        """
        if self.loss is Loss.SUM_OVER_COUNT:
            factor = share_of(jnp.sum(counts).astype(losses.dtype))
            return jnp.sum(losses) * factor, losses, factor
        losses = losses if shards == 1 else losses / shards
        return jnp.mean(losses), losses, None

    def returning_outputs(self) -> Functions:
        """The same stages, and a `last` that gives what the last of them returns as its metrics."""

        def last[T](_params: object, x: T, _microbatch: object) -> tuple[Array, T]:
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

    def run_whole(self, key: str, params: ParamPair, x: PyTree, extra: Extra) -> Any:
        """`first` or `last` with whole parameters (its own, shared), on one device.

        A spread one finds a mapped axis of length 1 in the place of the mesh's.
        """
        run = partial(getattr(self, f"run_{key}"), params, x, extra)
        if not self.spreads(key):
            return run()
        axis = getattr(self, key).context["axis"]
        every = jax.vmap(run, axis_name=axis, axis_size=1)()
        return jax.tree.map(lambda leaf: leaf[0], every)

    def run_first(self, params: ParamPair, _x: object, extra: Extra) -> PyTree:
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

    def run_stage[X](
        self, stage: int, params: ParamPair, x: X, extra: Extra
    ) -> tuple[X, StageOutput]:
        """Stage number, (stage parameters, shared), x, extra -> y and what it returns besides.

        "carried" in `extra` is (carry, buffers) of the slice before.  With a cache "state" is
        (carries, buffers) of all its sequences.
        """
        (own, shared), function = params, self.stages[stage]
        ctx: Any = extra.get("ctx")
        before = cache = extra.get("state" if self.room else "carried", ())
        if self.room and cache:
            at = ctx.microbatch // self.slices
            before = jax.tree.map(lambda leaf: leaf[at], cache)
        ledger: Any = None
        if self.passes and ctx is not None:
            number = self._offset(ctx) if self.room else ctx.microbatch % self.slices
            ledger = Ledger(self, number, before[1] if before else None)
        keywords = self._keywords(function, extra | {"shared": shared}, ledger)
        if "carry" in function.wants:
            carry = self._first_carry(function, own, x, keywords)
            if before:
                is_first = keywords["ctx"].offset == 0
                carry = jax.tree.map(partial(jnp.where, is_first), carry, before[0])
            keywords["carry"] = carry
        out = function.run(own, x, keywords=keywords)
        passes = [name for name in ("state", "carry") if name in function.wants]
        why = {"loss": "stage_loss=True"} if self.stage_loss else {}
        why |= {name: f"it takes `{name}`" for name in passes}
        returned = function.results({"x": "", **why}, out)
        loss: Any = returned.get("loss", ())
        if self.stage_loss:
            loss = jnp.float32(0) if loss is None else function.loss_of(loss)
        for name in passes:
            returned[name] = _same_form(function, name, keywords[name], returned[name])
        state, carry = returned.get("state", ()), returned.get("carry", ())
        buffers: dict[str, Array] = {}
        rows: tuple[dict[str, Array], Number] | tuple[()] = ()
        if ledger is not None and ledger.rows:
            buffers, rows = ledger.buffers, (ledger.rows, ledger.number)
        if not self.room or not cache:
            return returned["x"], StageOutput(loss, state, (carry, buffers), rows)

        def put(whole: Array, own: Array) -> Array:
            """The sequence's carry, or its rows at their position, in the cache."""
            zero, sizes = jnp.int32(0), zip(whole.shape[1:], own.shape, strict=True)
            starts = [ledger.number if room > length else zero for room, length in sizes]
            return lax.dynamic_update_slice(whole, own[None], [at, *starts])

        kept = jax.tree.map(put, cache, (carry, ledger.rows))
        return returned["x"], StageOutput(loss, kept)

    def _first_carry(self, function: Function, own: PyTree, x: PyTree, keywords: Extra) -> PyTree:
        """The carry of the first slice of a sequence: what the model says, or zeros of the shapes
        that the stage returns for a carry that is the number 0.
        """
        if self.carry is not None:
            return jax.tree.map(jnp.asarray, self.carry(own, x))
        ctx = keywords["ctx"]
        ledger = None if ctx.ledger is None else ctx.ledger.again()
        zero = jnp.zeros((), jax.tree.leaves(x)[0].dtype)
        asked = {**keywords, "ctx": ctx._replace(ledger=ledger), "carry": zero}
        try:
            out = jax.eval_shape(lambda: function.run(own, x, keywords=asked))
            return zeros_of(out[-1])
        except Exception as error:
            raise PipelineError(
                f"`{function.name}` takes `carry`, but the shapes of the first one cannot be "
                "inferred from the number 0; give jaxpipe.Model(..., "
                "carry=function(stage_params, x) -> the first carry)"
            ) from error

    def run_last(self, params: ParamPair, y: PyTree, extra: Extra) -> tuple[Array, PyTree]:
        """(last parameters, shared), y, extra -> scalar to differentiate, {"count", "metrics"}."""
        own, shared = params
        if self.last is None:
            raise PipelineError(
                "this pipeline has no `last` function; give Model(..., last=function that "
                "returns the loss)"
            )
        keywords = self._keywords(self.last, extra | {"shared": shared})
        out = self.last.run(own, y, extra["microbatch"], keywords=keywords)
        aux: dict[str, PyTree] = {"count": (), "metrics": ()}
        if self.has_metrics:
            both = {"loss": "", "metrics": "has_metrics=True"}
            out, aux["metrics"] = self.last.results(both, out).values()
        if self.loss is Loss.SUM_OVER_COUNT:
            both = {"sum": "", "count": "loss=Loss.SUM_OVER_COUNT"}
            out, count = self.last.results(both, out).values()
            found = one_array(count)
            is_real = any(jnp.issubdtype(found.dtype, kind) for kind in _REAL)
            if found.shape or not is_real:
                raise PipelineError(
                    "`last` must return (sum, count) with a scalar count; the count is "
                    f"{described(count)}: take its sum"
                )
            aux["count"] = summable(found)
        advice = (
            "; take its mean, for instance, or write Model(..., has_metrics=True) for (loss, "
            "metrics), loss=Loss.SUM_OVER_COUNT for (sum, count)"
        )
        return self.last.loss_of(out, advice), aux


def _same_form[T](function: Function, name: str, before: T, after: T) -> T:
    """State or carry as a stage returns it; PipelineError where it is not like the one before."""
    before, after = (jax.tree.map(jnp.asarray, tree) for tree in (before, after))
    if shapes_of(before) != shapes_of(after):
        raise PipelineError(
            f"`{function.name}` takes {name} as {described(before)} but returns "
            f"{described(after)}; return the same tree"
        )
    return after


def check_forms(x: PyTree, y: PyTree) -> None:
    """PipelineError where a stage returns another tree, shape or dtype than x has."""
    x_tree: PyTreeDef = jax.tree.structure(x)
    y_tree: PyTreeDef = jax.tree.structure(y)
    if x_tree != y_tree:
        raise PipelineError(
            f"`stage` takes x as {x_tree} but returns {y_tree}; a stage's output is the next "
            "stage's input, so return the same tree"
        )
    faults = [
        f"`stage` takes {path} as {a.dtype}{list(a.shape)} but "
        f"returns {b.dtype}{list(b.shape)}; a stage's output is the next stage's input, so return "
        "the same shape and dtype (or cast in `first`)"
        for (path, a), b in zip(by_index(x, "x").items(), jax.tree.leaves(y), strict=True)
        if a.shape != b.shape or a.dtype != b.dtype
    ]
    PipelineError.refuse("", faults)
