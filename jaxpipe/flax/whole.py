"""A whole flax model split into the functions and parameters of a pipeline.  A trace of the model
finds its parts before and after the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import jax
import numpy as np
from flax import core, linen as nn, nnx
from flax.nnx.filterlib import Filter
from flax.traverse_util import flatten_dict, unflatten_dict

from ..arrays import Leaf, Leaves, Params, PyTree, Rng, shapes_of, zeros_of
from ..errors import PipelineError
from ..jaxprs.dataflow import inputs_of
from ..layouts.layout import Layout
from ..model.calls import Function, UserFunction
from ..model.functions import Extra
from ..model.settings import SpecEntry
from .adapter import BlockSettings, adapt
from .linen_blocks import LinenModel, linen_unit, names_of, split_variables, variables_of
from .nnx_blocks import NnxModel, NnxUnit, check_distinct, nnx_unit
from .units import TAKES, End, Unit, UnitCall, Vars

_FAULTY = "the model cannot be split at its blocks"


BlockArguments: TypeAlias = tuple[tuple[object, ...], Extra]  # by position, and by keyword


class BlockCall(NamedTuple):
    """A call of a block in the model."""

    number: int
    block: nn.Module | None  # as linen calls it
    x: PyTree
    more: BlockArguments  # after x

    @classmethod
    def of(cls, number: int, block: nn.Module | None, given: BlockArguments) -> BlockCall:
        """PipelineError where a block has no x."""
        if not given[0]:
            raise PipelineError("a block must take x as its first positional argument")
        return cls(number, block, given[0][0], (given[0][1:], given[1]))


OnBlock: TypeAlias = Callable[[BlockCall], PyTree]  # what a call of a block does
CallInputs: TypeAlias = tuple[Vars, PyTree, Rng]  # parameters, microbatch, key
_ARRAY = jax.Array | np.ndarray


class _Reached(Exception):
    """The model calls its first block: the call."""


@dataclass(frozen=True)
class Whole:
    """A model without its blocks."""

    unit: Unit  # whose call is the loss
    pattern: str  # the path of a block, with {} for its number
    count: int  # of blocks
    watch: Callable[[OnBlock], AbstractContextManager[object]]  # for calls of blocks
    # a block's number, the block as it was called, and how a pipeline calls it -> its unit
    block: Callable[[int, nn.Module | None, UserFunction], Unit]

    def run(self, inputs: CallInputs, on_block: OnBlock, *, training: bool) -> PyTree:
        """The result of `loss` where calls of blocks do `on_block`.  Parameters that are not given
        are zeros: no result depends on them.
        """
        params, microbatch, key = inputs
        every = flatten_dict(params)
        for path, leaf in flatten_dict(self.unit.params).items():
            if path not in every:
                every[path] = zeros_of(leaf)
        keywords = dict.fromkeys(self.unit.function.wants & {"training"}, training)
        call = UnitCall((microbatch,), key, keywords, training)
        with self.watch(on_block):
            return self.unit.run(unflatten_dict(every), self.unit.state, call)[0]

    def reach(self, inputs: CallInputs, *, training: bool) -> BlockCall:
        """The call of the first block."""

        def stop(call: BlockCall) -> NoReturn:
            raise _Reached(call)

        try:
            self.run(inputs, stop, training=training)
        except _Reached as reached:
            found: BlockCall = reached.args[0]
            return found
        raise PipelineError(
            "the model calls none of its blocks as block(x); from_nnx and from_linen take blocks "
            "that are called otherwise"
        )


@dataclass(frozen=True, kw_only=True)
class OuterPart(Unit):
    """The model before or after its blocks, or the parameters that both use."""

    whole: Whole
    tied: bool  # the function takes `shared` parameters too

    @cached_property
    def function(self) -> Function:
        """It takes `shared`, where parameters are."""
        wants = frozenset({"shared"} if self.tied else ())
        return replace(self.whole.unit.function, wants=wants)

    def build(self, params: Vars, state: Vars, key: Rng, *, training: bool) -> Vars:
        """The parameters: functions put them into the model themselves."""
        return params

    def run(self, params: Vars, state: Vars, call: UnitCall) -> tuple[PyTree, Vars]:
        """x before the blocks, or the loss after them."""
        own = flatten_dict(params) | flatten_dict(call.keywords.get("shared", {}))
        *x, microbatch = call.arguments
        inputs = (unflatten_dict(own), microbatch, call.key)
        if x:
            return self.whole.run(inputs, lambda *_: x[0], training=call.training), state
        return self.whole.reach(inputs, training=call.training).x, state


def _part(whole: Whole, name: str, paths: set[Any], *, tied: bool) -> OuterPart:
    """The part of a model that has these parameters."""

    def own(tree: Vars) -> PyTree:
        flat = flatten_dict(core.unfreeze(tree))
        return unflatten_dict({path: flat[path] for path in flat if path in paths})

    unit, names = whole.unit, {"/".join(map(str, path)) for path in paths}
    return OuterPart(
        name=f"`{name}`",
        modules=unit.modules,
        call=unit.call,
        takes=("modules", *TAKES[name]),
        params=own(unit.params),
        state={},  # other variables are constants of the model
        specs=own(unit.specs),
        random=unit.random,
        frozen=unit.frozen & names,
        replaced=unit.replaced & names,
        whole=whole,
        tied=tied,
    )


def _call_faults(calls: Sequence[BlockCall], outs: Sequence[PyTree], pattern: str) -> list[str]:
    """Calls that are not one of each block in order, each with the result of the one before."""
    if [one.number for one in calls] != list(range(len(outs))):
        order = ", ".join(pattern.format(one.number) for one in calls)
        return [f"it calls {order}, not each of the {len(outs)} blocks once, in order"]
    faults = [
        f"{pattern.format(i)} is not called with what {pattern.format(i - 1)} returned: "
        "move what is between them into a block, and take nn.remat off blocks "
        "(jaxpipe.Memory(remat=) recomputes them)"
        for i, one in enumerate(calls)
        if i and _form(one.x) != _form(outs[i - 1])
    ]
    return faults + [
        f"{pattern.format(i)} is called with other arguments than {pattern.format(0)}: make "
        "them attributes of the blocks"
        for i, one in enumerate(calls)
        if _form(one.more) != _form(calls[0].more)
    ]


def _trace(whole: Whole, shapes: PyTree) -> tuple[list[BlockCall], list[set[object]]]:
    """The calls of blocks; the inputs that x before the blocks, further arrays of blocks and the
    loss are made of.

    An input is a parameter (its path), "microbatch", "key", or the result of a block (its number).
    """
    params, key = shapes_of(whole.unit.params), jax.random.key(0)
    x = jax.eval_shape(lambda *own: whole.reach(own, training=True).x, params, shapes, key)
    calls: list[BlockCall] = []

    def traced(
        params: Vars, microbatch: PyTree, key: jax.Array, outs: Sequence[PyTree]
    ) -> tuple[PyTree, Leaves, PyTree]:
        calls.clear()

        def on_block(call: BlockCall) -> PyTree:
            calls.append(call)
            return outs[call.number]

        out = whole.run((params, microbatch, key), on_block, training=True)
        PipelineError.refuse(_FAULTY, _call_faults(calls, outs, whole.pattern))
        return calls[0].x, _arrays(calls[0].more), out

    closed, results = jax.make_jaxpr(traced, return_shape=True)(
        params, shapes, key, [x] * whole.count
    )
    leaves = jax.tree_util.tree_leaves_with_path(params)
    inputs: Leaves = [tuple(entry.key for entry in path) for path, _ in leaves]
    inputs += [*("microbatch" for _ in jax.tree.leaves(shapes)), "key"]
    inputs += [i for i in range(whole.count) for _ in jax.tree.leaves(x)]
    reads = jax.tree.unflatten(jax.tree.structure(results), inputs_of(closed))
    named = [*enumerate(inputs)]
    return calls, [
        {own for bits in jax.tree.leaves(part) for n, own in named if bits >> n & 1}
        for part in reads
    ]


def parts_of(whole: Whole, batch: PyTree) -> tuple[dict[str, Unit], list[Unit]]:
    """The units before and after the blocks, found by a trace of the model, and the units of
    the blocks; PipelineError for a model that cannot be split, with all faults.
    """
    shapes, pattern = jax.eval_shape(lambda batch: batch, batch), whole.pattern
    calls, (before, between, after) = _trace(whole, shapes)
    paths = set(flatten_dict(whole.unit.params))
    faults = [
        f"what {pattern.format(i)} returns is also used after the blocks; only the last block's "
        "result may be: let x be a tuple that carries it"
        for i in range(whole.count - 1)
        if i in after
    ]
    faults += [
        f"the blocks take an array that is made from the parameter {'/'.join(map(str, path))!r}: "
        "let x be a tuple that carries it"
        for path in sorted(paths & between, key=str)
    ]
    if "key" in between:
        faults.append("the blocks take an array of random numbers: let x be a tuple that has it")
    PipelineError.refuse(_FAULTY, faults)
    first = paths & before
    last = paths & after | paths - first
    tied = first & last
    own = {"first": first - tied, "last": last - tied}
    own |= {"shared": tied} if tied else {}
    ends: dict[str, Unit] = {
        name: _part(whole, name, part, tied=bool(tied)) for name, part in own.items()
    }
    call = _call(whole, shapes, arrays=bool(_arrays(calls[0].more)))
    return ends, [whole.block(one.number, one.block, call) for one in calls]


def _call(whole: Whole, shapes: PyTree, *, arrays: bool) -> UserFunction:
    """How a pipeline calls a block: as the model calls the first one.  Arrays among the arguments
    are made again from the microbatch.
    """

    def more(rows: PyTree, training: bool) -> BlockArguments:
        # None of these arguments depends on a parameter or on the key.
        return whole.reach(({}, rows, jax.random.key(0)), training=training).more

    def with_arrays(
        block: UserFunction, x: PyTree, *, training: bool, microbatch: PyTree
    ) -> object:
        arguments, keywords = more(microbatch, training)
        return block(x, *arguments, **keywords)

    def with_values(block: UserFunction, x: PyTree, *, training: bool) -> object:
        found: Leaves = []
        jax.eval_shape(lambda rows: found.append(more(rows, training)), shapes)
        arguments, keywords = found[0]
        return block(x, *arguments, **keywords)

    return with_arrays if arrays else with_values


def _arrays(tree: PyTree) -> Leaves:
    """The leaves that are arrays."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, _ARRAY)]


def _form(tree: PyTree) -> object:
    """A value that is equal for trees of the same arrays and of equal values elsewhere."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [id(leaf) if _arrays(leaf) else leaf for leaf in leaves]


class WholeLinenModel(LinenModel):
    """A whole linen model as a pipeline takes it (see `FlaxModel`)."""

    def to_linen(self, params: Params, state: Vars | None = None) -> Any:
        """Canonical parameters, and the blocks' state, as the variables of the whole model."""
        last = self._ends["last"]
        assert isinstance(last, OuterPart)
        whole = last.whole
        variables = flatten_dict(whole.unit.state)
        for key in self._ends:
            variables |= flatten_dict(variables_of(params[key], {}))
        for i, own in enumerate(super().to_linen(params, state)):
            names = names_of(whole.pattern, i)
            variables |= {
                (path[0], *names, *path[1:]): leaf for path, leaf in flatten_dict(own).items()
            }
        return unflatten_dict(variables)


def from_flax_model(
    model: nnx.Module | nn.Module,
    blocks: str = "blocks_{}",
    *,
    loss: UserFunction,
    batch: PyTree,
    variables: Vars | None = None,
    num_stages: int | None = None,
    layout: Layout | str | None = None,
    ignore: Sequence[str] = ("layer_idx",),
    rngs: Sequence[str] = ("dropout",),
    trainable: Filter = nnx.Param,
    frozen: Filter | Callable[[str, Leaf], bool] | Sequence[str] = None,
    rules: Mapping[str, SpecEntry] | None = None,
    **contract: object,
) -> LinenModel | NnxModel:
    """Split a whole flax model, nnx or linen, into the functions and canonical parameters of a
    pipeline; the model stays as it is.

    The code before the first block becomes `first`, and the code after the last one `last`.
    Parameters that both use, such as a tied embedding, become `shared`.  Blocks are called one
    after the other, each with the result of the one before.  They may take more arguments, equal
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
        >>> import jax.numpy as jnp
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
    form = BlockSettings(num_stages, layout, rules or {}, False, ignore, contract)
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
    kind: type[LinenModel | NnxModel] = NnxModel
    if isinstance(model, nn.Module):
        if variables is None:
            raise PipelineError("a linen model needs variables=, as model.init makes them")
        kind = WholeLinenModel
        if frozen is not None:
            form = replace(form, contract={**contract, "frozen": frozen})
        whole = _linen_blocks(model, blocks, loss, variables, tuple(rngs))
    else:
        make = partial(nnx_unit, trainable=trainable, frozen=frozen)
        whole = _nnx_blocks(model, blocks, loss, make)
    ends, units = parts_of(whole, batch)
    return adapt(kind, units, ends=ends, form=form)


def _linen_blocks(
    model: nn.Module, pattern: str, loss: UserFunction, variables: Vars, rngs: tuple[str, ...]
) -> Whole:
    """The model without the variables of its blocks."""
    own, outer = split_variables(variables, pattern)
    numbers = {names_of(pattern, i): i for i in range(len(own))}

    def watch(on_block: OnBlock) -> AbstractContextManager[object]:
        def intercept(
            method: UserFunction, x: tuple[object, ...], more: Extra, context: Any
        ) -> object:
            number = numbers.get(context.module.path)
            if number is None or context.method_name != "__call__":
                return method(*x, **more)
            if context.module.scope.parent is None:
                block = type(context.module).__name__
                raise PipelineError(
                    f"{pattern.format(number)} is called inside of a transformation of flax such "
                    f"as nn.remat: make it with {block}(...) instead of nn.remat({block})(...), "
                    f"and with name=f{pattern.replace('{}', '{i}').split('/')[-1]!r}, so that its "
                    "variables keep their names. jaxpipe.Memory(remat=) recomputes blocks"
                )
            return on_block(BlockCall.of(number, context.module, (x, more)))

        return cast(AbstractContextManager[object], nn.intercept_methods(intercept))

    def unit(number: int, module: nn.Module, call: UserFunction) -> Unit:
        unbound = module.clone(parent=None, name=None)
        return linen_unit("a block", End(unbound, call, own[number]), rngs=rngs)

    whole = linen_unit("the model", End(model, loss, outer), rngs=rngs)
    whole = replace(whole, takes=("model", "microbatch"))
    return Whole(whole, pattern, len(own), watch, unit)


def _nnx_blocks(
    model: nnx.Module, pattern: str, loss: UserFunction, make: partial[NnxUnit]
) -> Whole:
    """The model with functions in the place of its blocks."""
    own: Leaves = []
    # Blocks of an `nnx.List` are its attributes "0", "1", ...
    while (block := _at(model, names_of(pattern, len(own)))) is not None:
        own.append(block)
    if not own:
        raise PipelineError(
            f"the model has no block {pattern.format(0)!r}; give blocks= its path with {{}} for "
            f"the number, the names are {sorted(map(str, vars(model)))}"
        )
    check_distinct(own, {})
    running: list[OnBlock] = []

    def stub(number: int) -> UserFunction:
        return lambda *x, **more: running[0](BlockCall.of(number, None, (x, more)))

    hollow = nnx.clone(model)
    for i in range(len(own)):
        *path, name = names_of(pattern, i)
        setattr(_at(hollow, path), name, stub(i))

    def watch(on_block: OnBlock) -> AbstractContextManager[object]:
        running[:] = [on_block]
        return nullcontext()

    def unit(number: int, _block: None, call: UserFunction) -> Unit:
        return make("a block", End(own[number], call))

    # Variables are written into the user's model.
    whole = make("the model", End(hollow, loss))
    whole = replace(whole, modules=model, takes=("model", "microbatch"))
    return Whole(whole, pattern, len(own), watch, unit)


def _at(model: nnx.Module, names: Sequence[str]) -> nnx.Module | None:
    """The module at a path of attributes, or None."""
    return reduce(lambda module, name: getattr(module, name, None), names, model)
