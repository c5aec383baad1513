"""The user's `first`, `stages` and `last` as a pipeline runs them, and the inputs of each
microbatch.
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
    summable,
    zeros_of,
)
from ..errors import PipelineError
from ..table.kinds import By
from .batch import Positioned, map_rows, positions, split_batch
from .calls import Context, Function, UserFunction, one_array
from .keys import keys_of
from .ledger import Ledger

_REAL = (jnp.bool_, jnp.integer, jnp.floating)


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
    # positions of the buffers of a cache, in which carries and rows pass from call to call as the
    # stages' state; 0 where a call has none
    room: int = 0
    # of spread functions: the pipe axis, and by part the lengths of parameters that are cut
    axis: str | None = None
    sizes: ByPart = field(default_factory=dict)

    @property
    def cuts(self) -> ByPart:
        """The dims along which parameters of spread functions are cut; those under "shared" only
        where every function that takes them is spread.
        """
        ends = {key: end for key in ("first", "last") if (end := getattr(self, key)) is not None}
        dims = {key: end.spread.dims for key, end in ends.items() if end.spread}
        takers = [f for f in (*self.stages, *ends.values()) if "shared" in f.wants]
        shared = [f.spread.shared for f in takers if f.spread]
        if not takers or len(shared) < len(takers):
            return dims
        if any(one != shared[0] for one in shared):
            raise PipelineError(
                f"`first` is given jaxpipe.spread(..., shared={shared[0]!r}) and `last` "
                f"shared={shared[-1]!r}; shared parameters are cut in one way: give both the same"
            )
        return {**dims, "shared": shared[0]}

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

    def _keywords(self, extra: Extra, **own: object) -> Extra:
        """The keywords that a function may take; its context has the position of its slice, and
        these fields.
        """
        keywords = {"microbatch": None, "state": None, "ctx": None, **extra}
        keywords["training"] = self.training
        if (ctx := keywords["ctx"]) is not None:
            keywords["ctx"] = ctx._replace(offset=self._offset(ctx), **own)
        return keywords

    def _share(self, key: str) -> Extra:
        """What the context of `first` or `last` has besides where it is spread."""
        if not self.spreads(key):
            return {}
        sizes = {"sizes": self.sizes[key], "shared_sizes": self.sizes.get("shared")}
        return {"axis": self.axis, **sizes}

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

    def wants(self, stage: int) -> frozenset[str]:
        """The keywords of a stage whose values differ by microbatch or stage."""
        own = self.stages[stage].wants
        more = {"ctx"} if "carry" in own else set()
        more |= {"ctx", "state"} if self.room else set()
        return own & {"ctx", "microbatch", "state"} | more

    @property
    def has_state(self) -> bool:
        """Whether any stage keeps state from microbatch to microbatch."""
        return any("state" in self.wants(stage) for stage in range(len(self.stages)))

    def run_whole(self, key: str, params: ParamPair, x: PyTree, extra: Extra) -> Any:
        """`first` or `last` with whole parameters (its own, shared), on one device.

        A spread one finds a mapped axis of length 1 in the place of the mesh's.
        """
        run = partial(getattr(self, f"run_{key}"), params, x, extra)
        if not self.spreads(key):
            return run()
        every = jax.vmap(run, axis_name=self.axis, axis_size=1)()
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
        keywords = self._keywords(extra | {"shared": shared}, **self._share("first"))
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
            ledger = Ledger(
                self.slices, self.room, self.in_place, number, before[1] if before else None
            )
        keywords = self._keywords(extra | {"shared": shared}, ledger=ledger)
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
            taken, left = (jax.tree.map(jnp.asarray, own[name]) for own in (keywords, returned))
            check_forms(function.name, name, taken, left)
            returned[name] = left
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
        keywords = self._keywords(extra | {"shared": shared}, **self._share("last"))
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


def check_forms(name: str, what: str, before: PyTree, after: PyTree) -> None:
    """PipelineError where a function returns x, its state or its carry as another tree, or with
    other shapes or dtypes, than it takes.
    """
    taken: PyTreeDef = jax.tree.structure(before)
    returned: PyTreeDef = jax.tree.structure(after)
    why, cast = "", ""
    if what == "x":
        why, cast = "a stage's output is the next stage's input, so ", " (or cast in `first`)"
    if taken != returned:
        raise PipelineError(
            f"`{name}` takes {what} as {taken} but returns {returned}; {why}return the same tree"
        )
    faults = [
        f"`{name}` takes {path} as {a.dtype}{list(a.shape)} but returns {b.dtype}{list(b.shape)}; "
        f"{why}return the same shape and dtype{cast}"
        for (path, a), b in zip(by_index(before, what).items(), jax.tree.leaves(after), strict=True)
        if a.shape != b.shape or a.dtype != b.dtype
    ]
    PipelineError.refuse("", faults)
