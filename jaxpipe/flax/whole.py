"""A whole flax model split into the functions and parameters of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import core, nnx
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from ..arrays import Params, PyTree
from ..errors import PipelineError
from ..layouts.layout import Layout
from ..model.own_rules import inputs_of
from . import linen
from . import nnx as of_nnx
from .adapter import adapt, check_cut
from .common import Unit

# What a call of block i does: (i, block, arguments, keywords) -> x.
OnBlock: TypeAlias = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]
Watch: TypeAlias = Callable[[OnBlock], AbstractContextManager[Any]]
Leaves: TypeAlias = "dict[tuple[Any, ...], Any]"  # of nested dicts, by path


class _Reached(Exception):
    """The model calls its first block."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.keywords = arguments, keywords


@dataclass(frozen=True)
class _Whole:
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
            path: leaves[path] if path in leaves else jnp.zeros(leaf.shape, leaf.dtype)
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
class _Part(Unit):
    """The model before or after its blocks, or the parameters that both use."""

    whole: _Whole
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


class WholeLinenModel(linen.LinenModel):
    """A whole linen model as a pipeline takes it (see `FlaxModel`)."""

    def to_linen(self, params: Params, state: PyTree = None) -> Any:
        """Canonical parameters, and the blocks' state, as the variables of the whole model."""
        part: Any = self._units["last"]
        found = flatten_dict({"params": {}, **part.whole.unit.state})
        for key in self._units:
            found |= flatten_dict({"params": params[key]})
        for i, own in enumerate(super().to_linen(params, state)):
            names = _names(part.name, i)
            found |= {
                (path[0], *names, *path[1:]): leaf for path, leaf in flatten_dict(own).items()
            }
        return unflatten_dict(found)


def from_flax_model(
    model: Any,
    blocks: str = "blocks_{}",
    *,
    loss: Callable[..., Any],
    batch: PyTree,
    variables: Any = None,
    num_stages: int | None = None,
    layout: Layout | str | None = None,
    ignore: Sequence[str] = ("layer_idx",),
    rngs: Sequence[str] = ("dropout",),
    trainable: Any = nnx.Param,
    frozen: Any = None,
    rules: Mapping[str, Any] | None = None,
    **contract: Any,
) -> linen.LinenModel | of_nnx.NnxModel:
    """Split a whole flax model, nnx or linen, into the functions and canonical parameters of a
    pipeline; the model stays as it is.

    The code before the first block becomes `first`, and the code after the last one `last`.
    Parameters that both use, such as a tied embedding, become `shared`.  Blocks are called one
    after the other, each with what the one before returned.  They may take more arguments, equal
    for all blocks: Python values, or arrays made from the microbatch alone, such as masks and
    positions.

    Args:
        model: an nnx module, or a linen module without variables.
        blocks: the path of block i, `{}` for i: "blocks_{}", "decoder/layers_{}", or for an
            `nnx.List` "blocks/{}".
        loss: `loss(model, microbatch)`, as `last` returns it; linen modules come bound.  It may
            take `training` by keyword.
        batch: the rows of a microbatch, arrays or ShapeDtypeStructs.
        variables: linen only: the model's variables.
        num_stages, layout: as `from_nnx` takes them.
        ignore: attributes of blocks in which blocks of one kind may differ.  All of these blocks
            run with those of the first one.
        rngs: linen only; see `from_linen`.
        trainable: nnx only; see `from_nnx`.
        frozen: a filter of nnx; for linen as `jaxpipe.Model` takes it.
        rules: as `from_nnx` takes them.
        contract: `loss`'s form: `has_metrics`.

    Raises:
        PipelineError: there are no such blocks, or the model does more between them than to hand
            x on; every fault is listed.

    Example:
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.embed = nnx.Embed(7, 4, rngs=rngs)
        ...         self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(4)])
        ...
        ...     def __call__(self, tokens):
        ...         x = self.embed(tokens)
        ...         for block in self.blocks:
        ...             x = block(x)
        ...         return self.embed.attend(x)
        >>> found = from_flax_model(
        ...     Net(nnx.Rngs(0)),
        ...     "blocks/{}",
        ...     num_stages=2,
        ...     loss=lambda net, microbatch: jnp.mean(net(microbatch["tokens"]) ** 2),
        ...     batch={"tokens": jnp.zeros((2, 3), int)},
        ... )
        >>> sorted(found.params), found.params["shared"]["embed"]["embedding"].shape
        (['first', 'last', 'shared', 'stages'], (7, 4))
    """
    check_cut("from_flax_model", num_stages, layout)
    if unknown := sorted(contract.keys() - {"has_metrics"}):
        raise PipelineError(
            f"from_flax_model has no argument {', '.join(unknown)}; blocks that return a loss, and "
            "other loss contracts, go to from_nnx or from_linen"
        )
    if blocks.count("{}") != 1:
        raise PipelineError(
            f"blocks={blocks!r} must have one {{}} for the number of a block; variables with a "
            "leading axis of blocks (nn.scan, nnx.vmap) go to from_linen or from_nnx"
        )
    if isinstance(model, nn.Module):
        if variables is None:
            raise PipelineError("a linen model needs variables=, as model.init returns them")
        how: dict[str, Any] = contract if frozen is None else {**contract, "frozen": frozen}
        own, outer = _split_variables(variables, blocks)
        unit: Any = linen._LinenUnit("the model", model, loss, outer, tuple(rngs), constant=True)
        whole = _Whole(unit, partial(_linen_calls, blocks, len(own)))
        kind: type[Any] = WholeLinenModel
        kind_of: Any = linen._kind_of
        difference = linen._difference
    else:
        how = contract
        given = {"trainable": trainable, "not_trained": frozen}
        modules, hollow, calls = _split_modules(model, blocks)
        unit = of_nnx._NnxUnit("the model", hollow, loss, constant=True, **given)
        whole = _Whole(unit, calls)
        kind, kind_of, difference = of_nnx.NnxModel, of_nnx._kind_of, of_nnx._difference
        own = modules
    count = len(own)
    parts = _parts(whole, blocks, batch, count)
    call, seen = parts.call, parts.blocks
    units: list[Any]
    if isinstance(model, nn.Module):
        units = [
            linen._LinenUnit(
                "a block", module.clone(parent=None, name=None), call, tree, tuple(rngs)
            )
            for module, tree in zip(seen, own, strict=True)
        ]
    else:
        of_nnx._check_distinct({f"block {i}": block for i, block in enumerate(own)})
        units = [of_nnx._NnxUnit("a block", block, call, **given) for block in own]
    made: linen.LinenModel | of_nnx.NnxModel = adapt(
        kind,
        units,
        stack=False,
        ends=parts.ends,
        num_stages=num_stages,
        layout=layout,
        kind_of=partial(kind_of, ignore=tuple(ignore)),
        difference=difference,
        rules=rules,
        stage_loss=False,
        contract=how,
    )
    return made


@dataclass(frozen=True)
class _Parts:
    ends: dict[str, Unit]
    blocks: list[Any]  # as they were called
    call: Callable[..., Any]  # of a block


def _parts(whole: _Whole, pattern: str, batch: PyTree, count: int) -> _Parts:
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
    calls: list[tuple[int, Any, Any, Any]] = []

    def traced(leaves: list[Any], microbatch: PyTree, key: Any, outs: list[PyTree]) -> Any:
        calls.clear()

        def on_block(i: int, block: Any, arguments: Any, keywords: Any) -> Any:
            calls.append((i, block, arguments[0], (arguments[1:], keywords)))
            return outs[i]

        known = dict(zip(paths, leaves, strict=True))
        out = whole.run(known, microbatch, key, on_block, training=True)
        faults = [
            f"{pattern.format(i)} is not called with what {pattern.format(i - 1)} returned: "
            "move what is between them into a block, and take nn.remat off blocks "
            "(jaxpipe.Memory(remat=) recomputes them)"
            for i, _, x, _ in calls
            if i and not _same(x, outs[i - 1])
        ]
        faults += [
            f"{pattern.format(i)} is called with other arguments than {pattern.format(0)}: make "
            "them attributes of the blocks"
            for i, _, _, extra in calls
            if not _same(extra, calls[0][3])
        ]
        if [i for i, *_ in calls] != list(range(count)):
            order = ", ".join(pattern.format(i) for i, *_ in calls)
            faults = [f"it calls {order}, and not each of the {count} blocks once, in order"]
        if faults:
            raise PipelineError.listing("the model cannot be split at its blocks", faults)
        return calls[0][2], _arrays(calls[0][3]), out

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
    leading = len(paths) + len(jax.tree.leaves(shapes)) + 1
    width = len(jax.tree.leaves(x))
    faults = [
        f"what {pattern.format(i)} returns is also used after the blocks; only the last block's "
        "result may be: let x be a tuple that carries it"
        for i in range(count - 1)
        if after >> (leading + i * width) & ((1 << width) - 1)
    ]
    made_of = [p for n, p in enumerate(paths) if between >> n & 1]
    faults += [
        f"the blocks take an array that is made from the parameter {'/'.join(map(str, path))!r}: "
        "let x be a tuple that carries it"
        for path in made_of
    ]
    if between >> (leading - 1) & 1:
        faults.append("the blocks take an array of random numbers: let x be a tuple that has it")
    if faults:
        raise PipelineError.listing("the model cannot be split at its blocks", faults)
    first = {path for n, path in enumerate(paths) if before >> n & 1}
    last = {path for n, path in enumerate(paths) if after >> n & 1 or not before >> n & 1}
    tied = frozenset(first & last)

    def part(name: str, own: set[Any], **how: Any) -> Unit:
        return _Part(name, None, None, whole, frozenset(own), bool(tied), **how)

    parts = {"first": part("`first`", first - tied), "last": part(pattern, last - tied, after=True)}
    if tied:
        parts["shared"] = part("`shared`", set(tied))
    return _Parts(
        parts, [block for _, block, *_ in calls], _call(whole, shapes, arrays=numbers > 0)
    )


def _call(whole: _Whole, shapes: PyTree, *, arrays: bool) -> Callable[..., Any]:
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


def _names(pattern: str, number: int) -> tuple[str, ...]:
    return tuple(pattern.format(number).split("/"))


def _none(pattern: str, names: Any) -> PipelineError:
    return PipelineError(
        f"the model has no block {pattern.format(0)!r}; give blocks= its path with {{}} for the "
        f"number, the names are {sorted(map(str, names))}"
    )


def _split_variables(variables: Any, pattern: str) -> tuple[list[Any], Any]:
    """The variables of each block, and those of the rest, with their metadata."""
    trees = flatten_dict(core.unfreeze(variables))
    own: list[Any] = []
    while found := {
        path: leaf
        for path, leaf in trees.items()
        if path[1 : len(names := _names(pattern, len(own))) + 1] == names
    }:
        cut = {(path[0], *path[len(names) + 1 :]): leaf for path, leaf in found.items()}
        own.append(unflatten_dict(cut))
        trees = {path: leaf for path, leaf in trees.items() if path not in found}
    if not own:
        raise _none(pattern, {path[1] for path in trees})
    return own, unflatten_dict(trees)


def _linen_calls(pattern: str, count: int, on_block: OnBlock) -> AbstractContextManager[Any]:
    numbers = {_names(pattern, i): i for i in range(count)}

    def intercept(method: Any, arguments: Any, keywords: Any, context: Any) -> Any:
        number = numbers.get(context.module.path)
        if number is None or context.method_name != "__call__":
            return method(*arguments, **keywords)
        if context.module.scope.parent is None:
            block = type(context.module).__name__
            raise PipelineError(
                f"{pattern.format(number)} is called inside of a transformation of flax such as "
                f"nn.remat: make it with {block}(...) instead of nn.remat({block})(...), and with "
                f"name=f{pattern.replace('{}', '{i}').split('/')[-1]!r}, so that its variables "
                "keep their names. jaxpipe.Memory(remat=) recomputes blocks"
            )
        return on_block(number, context.module, arguments, keywords)

    found: AbstractContextManager[Any] = nn.intercept_methods(intercept)
    return found


class _Hook:
    """What calls of stubs do while a model runs."""

    on_block: OnBlock | None = None


class _Stub(nnx.Module):  # type: ignore[misc]
    """Stands in a model for a block."""

    def __init__(self, number: int, hook: _Hook) -> None:
        self.number, self.hook = number, hook

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        assert self.hook.on_block is not None
        return self.hook.on_block(self.number, None, arguments, keywords)


def _split_modules(model: Any, pattern: str) -> tuple[list[Any], Any, Watch]:
    """The blocks, the model with stubs in their place, and how calls of stubs are seen."""
    hook, found = _Hook(), list[Any]()
    hollow = copy(model)
    while (block := _at(model, _names(pattern, len(found)))) is not None:
        found.append(block)
    if not found:
        raise _none(pattern, vars(model))
    copied: set[tuple[str, ...]] = set()
    for i in range(len(found)):
        holder = hollow
        *path, name = _names(pattern, i)
        for depth, key in enumerate(path):
            if tuple(path[: depth + 1]) not in copied:
                copied.add(tuple(path[: depth + 1]))
                _put(holder, key, copy(_at(holder, (key,))))
            holder = _at(holder, (key,))
        _put(holder, name, _Stub(i, hook))

    @contextmanager
    def calls(on_block: OnBlock) -> Iterator[None]:
        before, hook.on_block = hook.on_block, on_block
        try:
            yield
        finally:
            hook.on_block = before

    return found, hollow, calls


def _at(module: Any, names: Sequence[str]) -> Any:
    """The module at a path of attributes, keys and indices, or None."""
    for name in names:
        if isinstance(module, nnx.List):
            module = module[int(name)] if int(name) < len(module) else None
        else:
            module = getattr(module, name, None)
    return module


def _put(module: Any, name: str, value: Any) -> None:
    if isinstance(module, nnx.List):
        module[int(name)] = value
    else:
        setattr(module, name, value)
