"""The user's `first`, `stage` and `last`, brought to one calling form."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import PyTree, described, summable
from ..errors import PipelineError
from .slices import CacheLedger, Ledger, Positioned, join_slices, slice_length, split_slices
from .user_shardings import check_returned, refusal


class Context(NamedTuple):
    """The context of a call, for functions that take `ctx` by keyword: stage and microbatch index
    (int32 scalars), and a key of both.

    `rng` depends on the step's key, the stage, the microbatch and the data shard, never on the
    schedule; it is None where the step got no key.
    """

    stage: Any
    microbatch: Any
    rng: Any = None
    microbatch_rng: Any = None  # a key of the step and the microbatch alone: equal on all stages
    # where the model is given by layers: the layer's number, from which `rng` is made instead of
    # the stage
    layer: Any = None
    # of a function under `jaxpipe.spread`: the name of the pipe axis, for collectives
    axis: str | None = None
    # and there: for each parameter, the whole length of the dim that is cut, without padding; 0
    # where it is whole
    sizes: PyTree = None
    shared_sizes: PyTree = None  # the same for the shared parameters
    # position in its sequence of the slice's first row of time; 0 where sequences are whole
    offset: Any = None
    ledger: Any = None  # where `append` writes
    sequence_rng: Any = None  # with several slices, a key of the step and the sequence

    def append(self, name: str, rows: Any, axis: int = 1) -> Any:
        """Write a slice's rows into the buffer of its sequence in this stage; the whole buffer.

        Rows [..., T / K, ...] are at `offset` along `axis` of the buffer [..., T, ...].  Rows of
        later slices are there too in a backward, so the reader masks what comes after its own
        position.  The gradients of all slices that read a row add up before the slice that made it
        has its backward.

        Raises:
            PipelineError: a name is used twice in a stage.

        Example:
            keys = ctx.append("keys", h @ params["k"])
        """
        return rows if self.ledger is None else self.ledger.append(name, rows, axis)

    def position_keys(self, count: int) -> Any:
        """A key for each of the slice's `count` positions, [count], of the stage (or layer), the
        sequence and the position: random numbers that do not depend on how a sequence is cut.

        Example:
            keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (width,)))(
                ctx.position_keys(x.shape[1])
            )
        """
        common = self.microbatch_rng if self.sequence_rng is None else self.sequence_rng
        if common is None:
            raise PipelineError(
                "ctx.position_keys needs the step's key; pass rng=jax.random.key(...)"
            )
        key = jax.random.fold_in(common, self.stage if self.layer is None else self.layer)
        return jax.vmap(lambda at: jax.random.fold_in(key, at))(
            self.offset + jnp.arange(count, dtype=jnp.int32)
        )


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


def inverse_count(count: Any, dtype: Any) -> Any:
    """The factor of sums: 1 / count, and 0 for a count of 0: the loss and gradients are 0 then."""
    count = count.astype(dtype)
    return jnp.where(count == 0, 0, 1 / jnp.where(count == 0, 1, count))


STAGE_KEYWORDS = ("carry", "ctx", "microbatch", "shared", "state", "training")
# of `first` and `last`, which are given the microbatch anyway
OUTER_KEYWORDS = ("ctx", "shared", "training")


@dataclass(frozen=True)
class Function:
    """A user function and which of the keywords offered to it it takes."""

    call: Callable[..., Any]
    name: str
    wants: frozenset[str]
    spread: bool = False  # runs on all devices of the pipe axis at once
    cached: bool = False  # its carry and appended rows are its state, from call to call

    @classmethod
    def of(
        cls,
        call: Callable[..., Any],
        name: str,
        offered: Collection[str] = STAGE_KEYWORDS,
        *,
        takes: Sequence[str] = ("params", "x"),
    ) -> Function:
        """Read the signature for the keywords that are offered; PipelineError if it cannot be
        called so.

        `takes` names what is passed by position.
        """
        if not callable(call):
            raise PipelineError(f"`{name}` must be a function; got {type(call).__name__}")
        try:
            signature = inspect.signature(call)
        except (TypeError, ValueError):
            return cls(call, name, frozenset())
        parameters = list(signature.parameters.values())
        # A parameter after those that are passed by position may be given by its name, whether it
        # has a default or not.
        named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        named += [p for p in parameters[len(takes) :] if p.kind is p.POSITIONAL_OR_KEYWORD]
        wants = frozenset({p.name for p in named} & set(offered))
        try:
            signature.bind(*takes, **dict.fromkeys(wants))
        except TypeError as error:
            raise PipelineError(
                f"`{name}` is called as {name}({', '.join(takes)}), and by keyword with those of "
                f"{', '.join(sorted(offered))} that it "
                f"takes, but its parameters are {signature}: {error}"
            ) from None
        return cls(call, name, wants)

    def under(self, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Function:
        """The same function changed, with the keywords that it is known to take (a wrapper hides
        its signature).
        """
        return replace(self, call=change(self.call))

    @property
    def wants_arrays(self) -> frozenset[str]:
        """The keywords whose values differ by microbatch or stage."""
        more = {"ctx"} if "carry" in self.wants else set()
        more |= {"ctx", "state"} if self.cached else set()
        return self.wants & {"ctx", "microbatch", "state"} | more

    def run(
        self, *arguments: PyTree, shared: PyTree, extra: dict[str, PyTree], training: bool
    ) -> Any:
        """Call it with those keywords that it takes."""
        have = {
            "shared": shared,
            "training": training,
            **{k: extra.get(k) for k in ("carry", "ctx", "microbatch", "state")},
        }
        return self.calling(
            lambda: self.call(*arguments, **{k: have[k] for k in sorted(self.wants)}),
            arguments,
            have["ctx"],
        )

    def loss_of(self, loss: Any) -> Any:
        """The loss that a stage or a layer returns besides x, as a scalar; PipelineError for what
        is none.

        None is no loss, and a Python number is one.
        """
        if loss is None:
            return jnp.zeros((), jnp.float32)
        try:
            found = jnp.asarray(loss)
        except (TypeError, ValueError):
            what: Any = jax.tree.structure(loss)
        else:
            weak = jax.typeof(found).weak_type and jnp.issubdtype(found.dtype, jnp.integer)
            if found.shape == () and (weak or jnp.issubdtype(found.dtype, jnp.floating)):
                # Half a precision ends at 65504, and losses are summed.
                return summable(found)
            what = f"{found.dtype}{list(found.shape)}"
        raise PipelineError(
            f"`{self.name}` must return a floating scalar as its loss; it returns {what}"
        )

    def calling(self, call: Callable[[], Any], arguments: Sequence[PyTree], ctx: Any) -> Any:
        """Call it; an error from inside says which function it was and what it was given."""
        try:
            found = call()
        except PipelineError:
            raise
        except Exception as error:
            text = str(error)
            if (
                "ctx" in self.wants
                and isinstance(ctx, Context)
                and ctx.rng is None
                and re.search(r"\b(key|PRNG)", text)
            ):
                raise PipelineError(
                    f"`{self.name}` uses ctx.rng, but the step got no key; pass "
                    "rng=jax.random.key(...)"
                ) from error
            if refused := refusal(self.name, error):
                raise refused from error
            what = "; ".join(described(tree) for tree in arguments)
            error.add_note(
                f"jaxpipe: this was raised by `{self.name}` ({_place(self.call)}) when it was "
                f"traced with ({what})"
            )
            raise
        check_returned(self.name, found)
        return found


def _place(call: Callable[..., Any]) -> str:
    """The name, file and line of a function."""
    call = inspect.unwrap(call)
    code = getattr(call, "__code__", None)
    name = getattr(call, "__qualname__", type(call).__name__)
    return (
        name
        if code is None
        else f"{name}, {code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
    )


def split_batch(batch: PyTree, count: int, slices: int = 1, time: tuple[str, ...] = ()) -> PyTree:
    """Leaves [rows, ...] -> [M, rows / M, ...], rows in order; see `split_slices` for slices."""
    if slices > 1:
        return split_slices(batch, count, slices, time)
    return jax.tree.map(
        lambda leaf: leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:]), batch
    )


def make_extra(
    batch: PyTree, rng: Any, stage: Any, microbatch: Any, wants: frozenset[str], slices: int = 1
) -> dict[str, PyTree]:
    """The microbatch's rows of the batch and the context, those of them that are wanted."""
    extra: dict[str, PyTree] = {}
    position = None
    if isinstance(batch, Positioned):
        batch, position = batch.batch, batch.position[microbatch // slices]
    if "microbatch" in wants:
        extra["microbatch"] = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, microbatch, 0, keepdims=False), batch
        )
    if "ctx" in wants:
        key = (
            None if rng is None else jax.random.fold_in(jax.random.fold_in(rng, stage), microbatch)
        )
        common = None if rng is None else jax.random.fold_in(rng, microbatch)
        extra["ctx"] = Context(stage, microbatch, key, common, offset=position)
        if rng is not None and slices > 1:
            of_sequence = jax.random.fold_in(rng, microbatch // slices)
            extra["ctx"] = extra["ctx"]._replace(sequence_rng=of_sequence)
    return extra


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
    axis: str | None = None  # where `first` or `last` is spread: the axis in its context
    sizes: Mapping[str, PyTree] = field(default_factory=dict)
    slices: int = 1  # of a sequence
    time: tuple[str, ...] = ()  # leaves of the batch with a time axis
    length: int = 0  # of a slice, once the batch is known
    carry: Callable[..., Any] | None = None  # (stage's parameters, x) -> the first carry
    # buffers have a slice's rows before the stage reads them (`model.slices.Ledger`)
    in_place: bool = False
    room: int = 0  # positions of the buffers of a cache; 0 where a call has none

    def with_cache(self, room: int) -> Functions:
        """The same functions, whose carries and rows pass from call to call."""
        stages = tuple(replace(function, cached=True) for function in self.stages)
        return replace(self, stages=stages, room=room)

    def split(self, batch: PyTree, count: int) -> PyTree:
        """The rows of each microbatch."""
        if isinstance(batch, Positioned):
            return replace(batch, batch=self.split(batch.batch, count))
        return split_batch(batch, count, self.slices, self.time)

    def for_batch(self, batch: PyTree) -> Functions:
        """The same functions, for a batch that is cut."""
        rows = batch.batch if isinstance(batch, Positioned) else batch
        return replace(self, length=slice_length(rows, self.time)) if self._passes else self

    @property
    def _passes(self) -> bool:
        """Whether anything passes from slice to slice, or from call to call."""
        return self.slices > 1 or self.room > 0

    def join(self, outputs: PyTree) -> PyTree:
        """What the last stage returned for each microbatch, by whole sequences."""
        return outputs if self.slices == 1 else join_slices(outputs, self.slices, self.length)

    def _placed(self, extra: dict[str, PyTree], ledger: Any = None) -> dict[str, PyTree]:
        """What a function is given besides parameters and x, with the position of its slice."""
        ctx = extra.get("ctx")
        if ctx is None:
            return extra
        return {**extra, "ctx": ctx._replace(offset=self._offset(ctx), ledger=ledger)}

    def _offset(self, ctx: Any) -> Any:
        before = 0 if ctx.offset is None else ctx.offset
        return before + (ctx.microbatch % self.slices * self.length if self.slices > 1 else 0)

    def _ledger(self, ctx: Any, buffers: Any) -> Ledger:
        """Where a stage appends rows."""
        sequence, number = ctx.microbatch // self.slices, ctx.microbatch % self.slices
        if self.room:
            return CacheLedger(self.room, sequence, self._offset(ctx), buffers)
        return Ledger(self.slices, number, buffers, holds=self.in_place)

    def carried(self, stage: int, params: PyTree, x: PyTree, extra: dict[str, PyTree]) -> PyTree:
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
            factor = inverse_count(jnp.sum(counts), losses.dtype)
            return jnp.sum(losses) * factor, losses, factor
        losses = losses if shards == 1 else losses / shards
        return jnp.mean(losses), losses, None

    def returning_outputs(self) -> Functions:
        """The same stages, and a `last` that gives what the last of them returns as its metrics."""
        last = Function(
            lambda _params, x, _microbatch: (jnp.zeros((), jnp.float32), x), "last", frozenset()
        )
        return replace(self, last=last, loss=Loss.MEAN, has_metrics=True)

    @property
    def spreads_first(self) -> bool:
        """Whether `first` runs on all devices at once."""
        return self.first is not None and self.first.spread

    @property
    def spreads_last(self) -> bool:
        """Whether `last` runs on all devices at once."""
        return self.last is not None and self.last.spread

    def _with_sizes(self, key: str, extra: dict[str, PyTree]) -> dict[str, PyTree]:
        """The extra inputs of a spread function, with the sizes in its context."""
        ctx = extra["ctx"]._replace(
            axis=self.axis, sizes=self.sizes.get(key), shared_sizes=self.sizes.get("shared")
        )
        return {**extra, "ctx": ctx}

    @property
    def has_state(self) -> bool:
        """Whether any stage keeps state from microbatch to microbatch."""
        return any("state" in function.wants_arrays for function in self.stages)

    def run_first(self, params: PyTree, _x: PyTree, extra: dict[str, PyTree]) -> PyTree:
        """(first parameters, shared), (), extra -> x."""
        own, shared = params
        if self.first is None:
            if not isinstance(extra["microbatch"], Mapping) or "x" not in extra["microbatch"]:
                raise PipelineError(
                    'without `first`, a microbatch\'s "x" is the input of the first stage, but '
                    "the batch has none; "
                    'give a dict with "x", or Model(..., first=function(first_params, '
                    "microbatch) -> x)"
                )
            return extra["microbatch"]["x"]
        extra = self._placed(self._with_sizes("first", extra) if self.first.spread else extra)
        return self.first.run(
            own, extra["microbatch"], shared=shared, extra=extra, training=self.training
        )

    def run_stage(
        self, stage: int, params: PyTree, x: PyTree, extra: dict[str, PyTree]
    ) -> tuple[PyTree, StageOutput]:
        """Stage number, (stage parameters, shared), x, extra -> y and what it returns besides."""
        given = extra.get("state" if self.room else "carried", ())
        y, returned = self._run_stage(stage, params, x, extra, given)
        if not self.room or not given:
            return y, returned
        # the carry and the rows of one sequence of the cache
        carry, buffers = returned.carried
        at = extra["ctx"].microbatch // self.slices
        kept = jax.tree.map(
            lambda whole, own: jax.lax.dynamic_update_index_in_dim(whole, own, at, 0),
            given[0],
            carry,
        )
        return y, returned._replace(state=(kept, buffers), carried=(), rows=())

    def _run_stage(
        self, stage: int, params: PyTree, x: PyTree, extra: dict[str, PyTree], given: PyTree
    ) -> tuple[PyTree, StageOutput]:
        """The same; `given` is what passes from the slice before, or the cache."""
        own, shared = params
        function = self.stages[stage]
        ledger, first = None, ()
        if self._passes and "ctx" in function.wants_arrays:
            ledger = self._ledger(extra["ctx"], given[1] if given else None)
        extra = self._placed(extra, ledger)
        if "carry" in function.wants:
            first = self._first_carry(function, own, x, shared, extra)
            extra = {**extra, "carry": self._carry(first, given, extra)}
        out = function.run(own, x, shared=shared, extra=extra, training=self.training)
        names = [
            "x",
            *(["loss"] if self.stage_loss else []),
            *(["state"] if "state" in function.wants else []),
            *(["carry"] if "carry" in function.wants else []),
        ]
        appended: tuple[PyTree, PyTree] = ({}, ())
        if ledger is not None and ledger.rows:
            appended = ledger.buffers, (ledger.rows, ledger.number)
        if len(names) == 1:
            return out, StageOutput(carried=((), appended[0]), rows=appended[1])
        if not isinstance(out, tuple) or len(out) != len(names):
            why = " and ".join(
                [
                    *(["stage_loss=True"] if self.stage_loss else []),
                    *(f"it takes `{name}`" for name in ("state", "carry") if name in names),
                ]
            )
            raise PipelineError(
                f"`{function.name}` must return ({', '.join(names)}), since {why}; it returns "
                f"{jax.tree.structure(out)}"
            )
        found = dict(zip(names, out, strict=True))
        loss = function.loss_of(found["loss"]) if self.stage_loss else ()
        state = self._handed_on(function, "state", found, extra)
        carry = self._handed_on(function, "carry", found, extra)
        return found["x"], StageOutput(loss, state, (carry, appended[0]), appended[1])

    def _first_carry(
        self, function: Function, own: PyTree, x: PyTree, shared: PyTree, extra: dict[str, PyTree]
    ) -> PyTree:
        """What the first slice of a sequence is given as carry: zeros where the model says nothing,
        of the shapes that the stage returns for a carry that is the number 0.
        """
        if self.carry is not None:
            return jax.tree.map(jnp.asarray, self.carry(own, x))
        zero = jnp.zeros((), jax.tree.leaves(x)[0].dtype)

        def returned(own: PyTree, x: PyTree, shared: PyTree, extra: dict[str, PyTree]) -> PyTree:
            ctx = extra["ctx"]
            fresh = ctx._replace(ledger=None if ctx.ledger is None else ctx.ledger.again())
            return function.run(
                own,
                x,
                shared=shared,
                extra={**extra, "ctx": fresh, "carry": zero},
                training=self.training,
            )[-1]

        try:
            shapes = jax.eval_shape(partial(returned, extra=extra), own, x, shared)
        except Exception as error:
            raise PipelineError(
                f"`{function.name}` takes `carry`, but the shapes of the first one cannot be "
                "inferred from the number 0; give jaxpipe.Model(..., "
                "carry=function(stage_params, x) -> the first carry)"
            ) from error
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

    def _carry(self, first: PyTree, given: PyTree, extra: dict[str, PyTree]) -> PyTree:
        """The carry of a slice: that of the slice before, or the first one."""
        if not given:
            return first
        ctx, before = extra["ctx"], given[0]
        if self.room:
            before = jax.tree.map(lambda leaf: leaf[ctx.microbatch // self.slices], before)
        return jax.tree.map(lambda a, b: jnp.where(ctx.offset == 0, a, b), first, before)

    @staticmethod
    def _handed_on(
        function: Function, name: str, found: dict[str, Any], extra: dict[str, PyTree]
    ) -> PyTree:
        """State or carry as the stage returns it; PipelineError where it is not like the given."""
        if name not in found:
            return ()
        given, new = extra[name], jax.tree.map(jnp.asarray, found[name])
        form = [
            jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a)), tree)
            for tree in (given, new)
        ]
        if form[0] != form[1]:
            raise PipelineError(
                f"`{function.name}` takes {name} of (shape, dtype) {form[0]} but returns "
                f"{form[1]}; return the same tree"
            )
        return new

    def run_last(self, params: PyTree, y: PyTree, extra: dict[str, PyTree]) -> tuple[Any, PyTree]:
        """(last parameters, shared), y, extra -> scalar to differentiate, {"count", "metrics"}."""
        own, shared = params
        if self.last is None:
            raise PipelineError(
                "this pipeline has no `last` function; give Model(..., last=function that "
                "returns the loss)"
            )
        extra = self._placed(self._with_sizes("last", extra) if self.last.spread else extra)
        out = self.last.run(
            own, y, extra["microbatch"], shared=shared, extra=extra, training=self.training
        )
        metrics: PyTree = ()
        if self.has_metrics:
            out, metrics = self._pair(out, "(loss, metrics), since has_metrics=True")
        count: PyTree = ()
        if self.loss is Loss.SUM_OVER_COUNT:
            out, count = self._pair(out, "(sum, count), since loss=Loss.SUM_OVER_COUNT")
            count = self._count(count)
        if isinstance(out, tuple):
            raise PipelineError(
                f"`last` must return a floating scalar loss; it returns a tuple of {len(out)}: "
                "for (loss, metrics) write "
                "Model(..., has_metrics=True), for (sum, count) write loss=Loss.SUM_OVER_COUNT"
            )
        out = jnp.asarray(out)
        if out.shape != () or not jnp.issubdtype(out.dtype, jnp.floating):
            raise PipelineError(
                "`last` must return a floating scalar loss; it returns "
                f"{out.dtype}{list(out.shape)}: take its mean, for instance"
            )
        return summable(out), {"count": count, "metrics": metrics}

    @staticmethod
    def _count(count: Any) -> Any:
        """The count in a dtype in which those of all microbatches can be added; PipelineError where
        it is no number.
        """
        count = jnp.asarray(count)
        if count.shape != () or jnp.issubdtype(count.dtype, jnp.complexfloating):
            raise PipelineError(
                "`last` must return (sum, count) with a scalar count; the count is "
                f"{count.dtype}{list(count.shape)}: take its sum"
            )
        return summable(count)

    @staticmethod
    def _pair(out: Any, what: str) -> tuple[Any, Any]:
        if not isinstance(out, tuple) or len(out) != 2:
            raise PipelineError(f"`last` must return {what}; it returns {jax.tree.structure(out)}")
        return out
