"""The parts of a whole flax model before and after its blocks, found by tracing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import core
from flax.traverse_util import flatten_dict, unflatten_dict

from ..arrays import PyTree, zeros_of
from ..errors import PipelineError
from ..model.own_rules import inputs_of
from .units import Call, Unit

# What a call of block i does: (i, block, arguments, keywords) -> x.
OnBlock: TypeAlias = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]
Leaves: TypeAlias = "dict[tuple[Any, ...], Any]"  # of nested dicts, by path


_FAULTY = "the model cannot be split at its blocks"


class _Reached(Exception):
    """The model calls its first block."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.keywords = arguments, keywords


@dataclass(frozen=True)
class Whole:
    """A model without its blocks."""

    unit: Unit  # whose call is the loss
    pattern: str  # the path of a block, with {} for its number
    count: int  # of blocks
    watch: Callable[[OnBlock], AbstractContextManager[Any]]  # how calls of blocks are seen
    # a block's number, the block as it was called, and how a pipeline calls it -> its unit
    block: Callable[[int, Any, Callable[..., Any]], Unit]

    def run(
        self, leaves: Leaves, microbatch: PyTree, key: Any, on_block: OnBlock, *, training: bool
    ) -> Any:
        """The result of `loss` where calls of blocks do `on_block`.  Parameters that are not given
        are zeros: no result depends on them.
        """
        params = {
            path: leaves[path] if path in leaves else zeros_of(leaf)
            for path, leaf in self.leaves.items()
        }
        keywords = {"training": training} if "training" in self.unit.wants else {}
        call = Call((microbatch,), key, keywords, training)
        with self.watch(on_block):
            return self.unit.run(unflatten_dict(params), self.unit.state, call)[0]

    def reach(self, leaves: Leaves, microbatch: PyTree, key: Any, *, training: bool) -> _Reached:
        """The arguments of the first block."""

        def stop(_i: int, _block: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            raise _Reached(arguments, keywords)

        try:
            self.run(leaves, microbatch, key, stop, training=training)
        except _Reached as reached:
            if not reached.arguments:
                raise PipelineError(
                    "a block must take x as its first positional argument"
                ) from None
            return reached
        raise PipelineError(
            "the model calls none of its blocks as block(x); from_nnx and from_linen take blocks "
            "that are called otherwise"
        )

    @property
    def leaves(self) -> Leaves:
        """The parameters by path."""
        found: Leaves = flatten_dict(self.unit.params)
        return found


@dataclass(frozen=True, kw_only=True)
class Part(Unit):
    """The model before or after its blocks, or the parameters that both use."""

    whole: Whole
    is_last: bool
    tied: bool  # the function takes `shared` parameters too

    @cached_property
    def wants(self) -> frozenset[str]:
        """`shared`, where parameters are."""
        return frozenset({"shared"} if self.tied else ())

    def build(self, params: PyTree, state: PyTree, key: Any, *, training: bool) -> PyTree:
        """The parameters: functions put them into the model themselves."""
        return params

    def run(self, params: PyTree, state: PyTree, call: Call) -> tuple[Any, PyTree]:
        """x before the blocks, or the loss after them."""
        leaves = {**flatten_dict(params), **flatten_dict(call.keywords.get("shared", {}))}
        *x, microbatch = call.arguments
        if self.is_last:
            return self.whole.run(
                leaves, microbatch, call.key, lambda *_: x[0], training=call.training
            ), state
        reached = self.whole.reach(leaves, microbatch, call.key, training=call.training)
        return reached.arguments[0], state


def _part(whole: Whole, name: str, paths: set[Any], *, tied: bool) -> Part:
    """The part of a model that has these parameters."""

    def own(tree: PyTree) -> PyTree:
        flat = flatten_dict(core.unfreeze(tree))
        return unflatten_dict({path: leaf for path, leaf in flat.items() if path in paths})

    unit = whole.unit
    return Part(
        name=f"`{name}`",
        modules=unit.modules,
        call=unit.call,
        params=own(unit.params),
        state={},  # other variables are constants of the model
        specs=own(unit.specs),
        random=unit.random,
        frozen=unit.frozen & {"/".join(map(str, path)) for path in paths},
        whole=whole,
        is_last=name == "last",
        tied=tied,
    )


class _BlockCall(NamedTuple):
    """A call of a block while the model is traced."""

    number: int
    block: Any
    x: PyTree
    more: tuple[tuple[Any, ...], dict[str, Any]]  # arguments after x, and keywords


def _call_faults(calls: Sequence[_BlockCall], outs: Sequence[PyTree], pattern: str) -> list[str]:
    """Calls that are not one of each block in order, each with the result of the one before."""
    if [one.number for one in calls] != list(range(len(outs))):
        order = ", ".join(pattern.format(one.number) for one in calls)
        return [f"it calls {order}, and not each of the {len(outs)} blocks once, in order"]
    faults = [
        f"{pattern.format(i)} is not called with what {pattern.format(i - 1)} returned: "
        "move what is between them into a block, and take nn.remat off blocks "
        "(jaxpipe.Memory(remat=) recomputes them)"
        for i, one in enumerate(calls)
        if i and not _same(one.x, outs[i - 1])
    ]
    return faults + [
        f"{pattern.format(i)} is called with other arguments than {pattern.format(0)}: make "
        "them attributes of the blocks"
        for i, one in enumerate(calls)
        if not _same(one.more, calls[0].more)
    ]


def parts_of(whole: Whole, batch: PyTree) -> tuple[dict[str, Unit], list[Unit]]:
    """The units before and after the blocks, by what a trace of the model reads, and the units of
    the blocks; PipelineError for a model that cannot be split, with all faults.
    """
    like, key, pattern = whole.leaves, jax.random.key(0), whole.pattern
    paths = list(like)
    abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in like.values()]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), jnp.result_type(a)), batch)

    def x_of(leaves: list[Any], microbatch: PyTree, key: Any) -> PyTree:
        known = dict(zip(paths, leaves, strict=True))
        return whole.reach(known, microbatch, key, training=True).arguments[0]

    x = jax.eval_shape(x_of, abstract, shapes, key)
    calls: list[_BlockCall] = []

    def traced(leaves: list[Any], microbatch: PyTree, key: Any, outs: list[PyTree]) -> Any:
        calls.clear()

        def on_block(i: int, block: Any, arguments: Any, keywords: Any) -> Any:
            calls.append(_BlockCall(i, block, arguments[0], (arguments[1:], keywords)))
            return outs[i]

        known = dict(zip(paths, leaves, strict=True))
        out = whole.run(known, microbatch, key, on_block, training=True)
        PipelineError.refuse(_FAULTY, _call_faults(calls, outs, pattern))
        return calls[0].x, _arrays(calls[0].more), out

    closed, results = jax.make_jaxpr(traced, return_shape=True)(
        abstract, shapes, key, [x] * whole.count
    )
    # What each input of the trace is: a parameter, the microbatch, the key, a block's result.
    inputs: list[Any] = [*paths, *("microbatch" for _ in jax.tree.leaves(shapes)), "key"]
    inputs += [i for i in range(whole.count) for _ in jax.tree.leaves(x)]
    reads = jax.tree.unflatten(jax.tree.structure(results), inputs_of(closed))
    before, between, after = (
        {what for bits in jax.tree.leaves(part) for n, what in enumerate(inputs) if bits >> n & 1}
        for part in reads
    )
    faults = [
        f"what {pattern.format(i)} returns is also used after the blocks; only the last block's "
        "result may be: let x be a tuple that carries it"
        for i in range(whole.count - 1)
        if i in after
    ]
    faults += [
        f"the blocks take an array that is made from the parameter {'/'.join(map(str, path))!r}: "
        "let x be a tuple that carries it"
        for path in paths
        if path in between
    ]
    if "key" in between:
        faults.append("the blocks take an array of random numbers: let x be a tuple that has it")
    PipelineError.refuse(_FAULTY, faults)
    first = before.intersection(paths)
    last = after.intersection(paths) | (set(paths) - first)
    tied = first & last
    own = {"first": first - tied, "last": last - tied} | ({"shared": tied} if tied else {})
    ends: dict[str, Unit] = {
        name: _part(whole, name, part, tied=bool(tied)) for name, part in own.items()
    }
    call = _call(whole, shapes, arrays=bool(jax.tree.leaves(results[1])))
    return ends, [whole.block(one.number, one.block, call) for one in calls]


def _call(whole: Whole, shapes: PyTree, *, arrays: bool) -> Callable[..., Any]:
    """How a pipeline calls a block: as the model calls the first one.  Arrays among the arguments
    are made again from the microbatch.
    """

    def more(microbatch: PyTree, training: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # None of these arguments depends on a parameter or on the key.
        reached = whole.reach({}, microbatch, jax.random.key(0), training=training)
        return reached.arguments[1:], reached.keywords

    @cache
    def values(training: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found: list[Any] = []
        jax.eval_shape(lambda microbatch: found.append(more(microbatch, training)), shapes)
        arguments, keywords = found[0]
        return arguments, keywords

    def with_arrays(block: Any, x: PyTree, *, training: bool, microbatch: PyTree) -> Any:
        arguments, keywords = more(microbatch, training)
        return block(x, *arguments, **keywords)

    def with_values(block: Any, x: PyTree, *, training: bool) -> Any:
        arguments, keywords = values(training)
        return block(x, *arguments, **keywords)

    return with_arrays if arrays else with_values


def _arrays(tree: PyTree) -> list[Any]:
    """The leaves that are arrays."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array | np.ndarray)]


def _same(one: PyTree, other: PyTree) -> bool:
    """Whether two trees have the same arrays, and equal values elsewhere."""
    left, right = jax.tree.leaves(one), jax.tree.leaves(other)
    forms: list[Any] = [jax.tree.structure(one), jax.tree.structure(other)]
    return forms[0] == forms[1] and all(
        a is b or (not _arrays([a, b]) and a == b) for a, b in zip(left, right, strict=True)
    )
