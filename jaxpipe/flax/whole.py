"""A whole flax model split into the functions and parameters of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from flax import core, nnx
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from ..arrays import Params, PyTree
from ..errors import PipelineError
from ..layouts.layout import Layout
from .adapter import Form, adapt
from .linen import LinenModel, linen_unit
from .nnx import NnxModel, check_distinct, nnx_unit
from .parts import OnBlock, Whole, parts_of
from .units import Unit


class WholeLinenModel(LinenModel):
    """A whole linen model as a pipeline takes it (see `FlaxModel`)."""

    def to_linen(self, params: Params, state: PyTree = None) -> Any:
        """Canonical parameters, and the blocks' state, as the variables of the whole model."""
        last: Any = self._ends["last"]
        whole: Whole = last.whole
        found = flatten_dict({"params": {}, **whole.unit.state})
        for key in self._ends:
            found |= flatten_dict({"params": params[key]})
        for i, own in enumerate(super().to_linen(params, state)):
            names = _names(whole.pattern, i)
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
) -> LinenModel | NnxModel:
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
    form = Form("from_flax_model", num_stages, layout, rules, False, ignore, contract)
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
            raise PipelineError("a linen model needs variables=, as model.init returns them")
        kind = WholeLinenModel
        if frozen is not None:
            form = replace(form, contract={**contract, "frozen": frozen})
        whole = _linen_blocks(model, blocks, loss, variables, tuple(rngs))
    else:
        whole = _nnx_blocks(model, blocks, loss, trainable, frozen)
    ends, units = parts_of(whole, batch)
    return adapt(kind, units, ends=ends, form=form)


def _linen_blocks(
    model: nn.Module, pattern: str, loss: Callable[..., Any], variables: Any, rngs: tuple[str, ...]
) -> Whole:
    """The model without the variables of its blocks."""
    own, outer = _split_variables(variables, pattern)
    numbers = {_names(pattern, i): i for i in range(len(own))}

    def watch(on_block: OnBlock) -> AbstractContextManager[Any]:
        def intercept(method: Any, arguments: Any, keywords: Any, context: Any) -> Any:
            number = numbers.get(context.module.path)
            if number is None or context.method_name != "__call__":
                return method(*arguments, **keywords)
            if context.module.scope.parent is None:
                raise _transformed(pattern, number, type(context.module).__name__)
            return on_block(number, context.module, arguments, keywords)

        found: AbstractContextManager[Any] = nn.intercept_methods(intercept)
        return found

    def unit(number: int, module: Any, call: Callable[..., Any]) -> Unit:
        unbound = module.clone(parent=None, name=None)
        return linen_unit("a block", unbound, call, own[number], rngs)

    whole = linen_unit("the model", model, loss, outer, rngs, constant=True)
    whole = replace(whole, takes=("model", "microbatch"))
    return Whole(whole, pattern, len(own), watch, unit)


def _nnx_blocks(
    model: Any, pattern: str, loss: Callable[..., Any], trainable: Any, frozen: Any
) -> Whole:
    """The model with stubs for its blocks."""
    own: list[Any] = []
    while (block := _at(model, _names(pattern, len(own)))) is not None:
        own.append(block)
    if not own:
        raise _none(pattern, vars(model))
    check_distinct(own, {})
    hook, hollow = _Hook(), nnx.clone(model)
    for i in range(len(own)):
        *path, name = _names(pattern, i)
        _put(_at(hollow, path), name, _Stub(i, hook))

    @contextmanager
    def watch(on_block: OnBlock) -> Iterator[None]:
        before, hook.on_block = hook.on_block, on_block
        try:
            yield
        finally:
            hook.on_block = before

    make = partial(nnx_unit, trainable=trainable, frozen=frozen)

    def unit(number: int, _block: Any, call: Callable[..., Any]) -> Unit:
        return make("a block", own[number], call)

    # Variables are written into the user's model.
    whole = make("the model", hollow, loss, constant=True)
    whole = replace(whole, modules=model, takes=("model", "microbatch"))
    return Whole(whole, pattern, len(own), watch, unit)


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


def _transformed(pattern: str, number: int, block: str) -> PipelineError:
    return PipelineError(
        f"{pattern.format(number)} is called inside of a transformation of flax such as "
        f"nn.remat: make it with {block}(...) instead of nn.remat({block})(...), and with "
        f"name=f{pattern.replace('{}', '{i}').split('/')[-1]!r}, so that its variables "
        "keep their names. jaxpipe.Memory(remat=) recomputes blocks"
    )


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
