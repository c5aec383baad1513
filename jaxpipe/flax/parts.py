"""The parts of a whole flax model before and after its blocks, found by tracing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import core
from flax.traverse_util import flatten_dict, unflatten_dict

from ..arrays import PyTree, zeros_of
from ..errors import PipelineError
from ..model.own_rules import inputs_of
from .common import Unit

# What a call of block i does: (i, block, arguments, keywords) -> x.
OnBlock: TypeAlias = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]
Watch: TypeAlias = Callable[[OnBlock], AbstractContextManager[Any]]
Leaves: TypeAlias = "dict[tuple[Any, ...], Any]"  # of nested dicts, by path


_FAULTY = "the model cannot be split at its blocks"


class _Reached(Exception):
    """The model calls its first block."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.keywords = arguments, keywords


@dataclass(frozen=True)
class Whole:
    """A model without its blocks, and how calls of blocks are seen."""

    unit: Any  # whose call is the loss
    watch: Watch

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
        takes_training = "training" in self.unit.wants
        with self.watch(on_block):
            out, _ = self.unit.run(
                unflatten_dict(params),
                self.unit.state,
                (microbatch,),
                key,
                keywords={"training": training} if takes_training else {},
                training=training,
            )
        return out

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


@dataclass(frozen=True)
class Part(Unit):
    """The model before or after its blocks, or the parameters that both use."""

    whole: Whole
    paths: frozenset[tuple[Any, ...]]
    tied: bool  # the function takes `shared` parameters too
    after: bool = False

    def _own(self, tree: PyTree) -> PyTree:
        flat = flatten_dict(core.unfreeze(tree))
        return unflatten_dict({path: leaf for path, leaf in flat.items() if path in self.paths})

    @property
    def params(self) -> PyTree:
        """The parameters that results of this part depend on."""
        return self._own(self.whole.unit.params)

    @property
    def state(self) -> PyTree:
        """None: other variables are constants of the model."""
        return {}

    @property
    def specs(self) -> PyTree:
        """The metadata of these parameters."""
        return self._own(self.whole.unit.specs)

    @property
    def frozen(self) -> frozenset[str]:
        """The frozen paths among these."""
        own = {"/".join(map(str, path)) for path in self.paths}
        return frozenset(self.whole.unit.frozen & own)

    @property
    def random(self) -> bool:
        """Whether the model draws random numbers."""
        return bool(self.whole.unit.random)

    @property
    def wants(self) -> frozenset[str]:
        """`shared`, where parameters are."""
        return frozenset({"shared"} if self.tied else ())

    def build(self, params: PyTree, state: PyTree, key: Any, *, training: bool) -> PyTree:
        """The parameters: functions put them into the model themselves."""
        return params

    def run(
        self,
        params: PyTree,
        state: PyTree,
        arguments: Sequence[PyTree],
        key: Any,
        *,
        keywords: Mapping[str, Any],
        training: bool,
    ) -> tuple[Any, PyTree]:
        """x before the blocks, or the loss after them."""
        leaves = {**flatten_dict(params), **flatten_dict(keywords.get("shared", {}))}
        if not self.after:
            reached = self.whole.reach(leaves, arguments[0], key, training=training)
            return reached.arguments[0], state
        x, microbatch = arguments
        return self.whole.run(leaves, microbatch, key, lambda *_: x, training=training), state

    def write(self, params: PyTree, _state: PyTree) -> None:
        """Set these of the model's variables (nnx)."""
        unit = replace(self.whole.unit)  # which reads the variables again
        leaves = {**flatten_dict(unit.params), **flatten_dict(params)}
        unit.write(unflatten_dict(leaves), {})


@dataclass(frozen=True)
class Parts:
    """The parts of a model, and its blocks."""

    ends: dict[str, Unit]
    blocks: list[Any]  # as they were called
    call: Callable[..., Any]  # of a block


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


def parts_of(whole: Whole, pattern: str, batch: PyTree, count: int) -> Parts:
    """What comes before and after the blocks, by what a trace of the model reads; PipelineError
    for a model that cannot be split, with all faults.
    """
    like, key = whole.leaves, jax.random.key(0)
    paths = list(like)
    abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in like.values()]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), jnp.result_type(a)), batch)
    x = jax.eval_shape(
        lambda p, b, k: whole.reach(
            dict(zip(paths, p, strict=True)), b, k, training=True
        ).arguments[0],
        abstract,
        shapes,
        key,
    )
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

    closed, (x_out, extra, _) = jax.make_jaxpr(traced, return_shape=True)(
        abstract, shapes, key, [x] * count
    )
    reads = inputs_of(closed)
    ends, numbers = len(jax.tree.leaves(x_out)), len(jax.tree.leaves(extra))
    before, between, after = (
        _any(reads[:ends]),
        _any(reads[ends : ends + numbers]),
        _any(reads[ends + numbers :]),
    )
    leading, width = len(paths) + len(jax.tree.leaves(shapes)) + 1, len(jax.tree.leaves(x))
    faults = [
        f"what {pattern.format(i)} returns is also used after the blocks; only the last block's "
        "result may be: let x be a tuple that carries it"
        for i in range(count - 1)
        if after >> (leading + i * width) & ((1 << width) - 1)
    ]
    faults += [
        f"the blocks take an array that is made from the parameter {'/'.join(map(str, path))!r}: "
        "let x be a tuple that carries it"
        for n, path in enumerate(paths)
        if between >> n & 1
    ]
    if between >> (leading - 1) & 1:
        faults.append("the blocks take an array of random numbers: let x be a tuple that has it")
    PipelineError.refuse(_FAULTY, faults)
    first = {path for n, path in enumerate(paths) if before >> n & 1}
    last = {path for n, path in enumerate(paths) if after >> n & 1 or not before >> n & 1}
    tied = frozenset(first & last)

    def part(name: str, own: set[Any], **how: Any) -> Unit:
        return Part(name, None, None, whole, frozenset(own), bool(tied), **how)

    parts = {"first": part("`first`", first - tied), "last": part(pattern, last - tied, after=True)}
    if tied:
        parts["shared"] = part("`shared`", set(tied))
    return Parts(parts, [one.block for one in calls], _call(whole, shapes, arrays=numbers > 0))


def _call(whole: Whole, shapes: PyTree, *, arrays: bool) -> Callable[..., Any]:
    """How a pipeline calls a block: as the model calls the first one.  Arrays among the arguments
    are made again from the microbatch.
    """

    def more(microbatch: PyTree, *, training: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # None of these arguments depends on a parameter or on the key.
        reached = whole.reach({}, microbatch, jax.random.key(0), training=training)
        return reached.arguments[1:], reached.keywords

    def with_arrays(block: Any, x: PyTree, *, training: bool, microbatch: PyTree) -> Any:
        arguments, keywords = more(microbatch, training=training)
        return block(x, *arguments, **keywords)

    if arrays:
        return with_arrays
    known: dict[bool, Any] = {}
    for training in (True, False):

        def note(microbatch: PyTree, training: bool = training) -> None:
            known[training] = more(microbatch, training=training)

        jax.eval_shape(note, shapes)

    def without_arrays(block: Any, x: PyTree, *, training: bool) -> Any:
        arguments, keywords = known[bool(training)]
        return block(x, *arguments, **keywords)

    return without_arrays


def _any(bits: Sequence[int]) -> int:
    found = 0
    for own in bits:
        found |= own
    return found


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
