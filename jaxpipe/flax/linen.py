"""linen modules in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn

from ..arrays import PyTree
from ..errors import PipelineError
from ..layouts.layout import Layout
from ..model.model import Model
from .common import (
    End,
    blocks_per_stage,
    check_ends,
    divided,
    layered,
    mesh_specs,
    period,
    scanned,
    stacked,
    wanted,
)
from .linen_layers import by_layout
from .linen_parts import (
    Variables,
    apart,
    applied,
    difference,
    end_function,
    given_keywords,
    kind_of,
    params_of,
    streams,
    unboxed_ends,
)
from .models import FlaxModel, check_cut, named_specs, stack_size, stacked_specs


@dataclass(frozen=True)
class LinenStages(FlaxModel):
    """A model of linen modules by stages of equal size: leaves of stages are [S, blocks of a stage,
    ...].
    """

    _pattern: int  # blocks of a group; 0 where variables came stacked

    def to_linen(self, params: dict[str, PyTree], state: PyTree = None) -> Any:
        """Canonical parameters, and state, as the blocks' variables, in the form in which they were
        given: a list, or stacked.

        Parameters of first, last and shared are those of their modules already.
        """
        own, other = layered(params["stages"]), layered(self.state if state is None else state)
        if not self._pattern:
            return {"params": own, **other}
        count = jax.tree.leaves((own, other))[0].shape[0]
        found = []
        for i in range(count):
            group, rest = jax.tree.map(lambda leaf, i=i: leaf[i], (own, other))
            found += [
                {"params": g, **r}
                for g, r in zip(
                    _each(group, self._pattern), _each(rest, self._pattern), strict=True
                )
            ]
        return found


def from_linen(
    blocks: nn.Module | Sequence[nn.Module],
    variables: Variables | Sequence[Variables],
    *,
    num_stages: int | None = None,
    layout: Layout | str | None = None,
    first: End | None = None,
    last: End | None = None,
    shared: tuple[Any, Any] | None = None,
    call: Callable[..., Any] | None = None,
    rngs: Sequence[str] = ("dropout",),
    rules: Mapping[str, Any] | None = None,
    stage_loss: bool = False,
    **contract: Any,
) -> Any:
    """Make the functions and canonical parameters of a pipeline from linen modules and their
    variables, as they are.

    Random numbers come from the step's key (`rng=`), a key for each layer and microbatch.  Blocks
    need not be alike: a pattern that every stage repeats is enough.

    Args:
        blocks: the module of every block, or a list with each block's own.
        variables: a list with each block's variables (see `submodules`), or variables with a
            leading axis of blocks (as `nn.scan`, `nn.vmap` or a vmapped `init` make them).
        num_stages: S; divides the number of blocks.  The model is then a `LinenStages`.
        layout: instead of num_stages, the letters of each stage, as `from_nnx` takes them; the
            model is then a `LinenLayers`.
        first, last: what comes before and after the blocks; their functions are given bound
            modules.
        shared: (modules, variables) that several of these functions use: given, bound, as `shared`
            by keyword.
        call: `call(block, x) -> x`, where it is not `block(x)`; it may take training, microbatch,
            ctx and shared by keyword, as in `lambda block, x, *, training: block(x,
            train=training)`.
        rngs: the collections for which modules draw random numbers.
        rules: where `nn.with_partitioning` names logical axes, the mesh axis of each (or None).
        stage_loss: blocks, or `call`, return (x, loss), and the losses are added to that of the
            microbatch.  A loss that blocks sow comes so: `call` reads it in `block.variables`.
        contract: `loss`, `has_metrics` and `frozen`, as `jaxpipe.Model` takes them.

    Raises:
        PipelineError: blocks do not divide into stages, are unlike, or do not fit their variables.
            A step raises it for values that blocks sow and nobody takes.
    """
    check_ends(first=first, last=last)
    check_cut("from_linen", num_stages, layout)
    if layout is not None:
        modules, boxed, stack = _blocks(blocks, variables)
        if stack:
            raise PipelineError("with layout=, give a list with each block's variables")
        return by_layout(
            modules,
            boxed,
            layout,
            first=first,
            last=last,
            shared=shared,
            call=call,
            rngs=rngs,
            rules=rules,
            stage_loss=stage_loss,
            contract=contract,
        )
    assert num_stages is not None
    modules, boxed, stack = _blocks(blocks, variables)
    given = [nn.meta.unbox(dict(v)) for v in boxed]
    first, last, shared, specs = unboxed_ends(first, last, shared, rules)
    if stack:
        count, length = _stack_size(given[0]), 0
        own, state = (divided(dict(tree), num_stages) for tree in apart(given[0]))
        per_stage = blocks_per_stage(count, num_stages)
    else:
        per_block = blocks_per_stage(len(given), num_stages)
        kinds = [kind_of(m, v) for m, v in zip(modules, given, strict=True)]
        length = period(kinds, per_block, lambda i, j: difference(kinds[i], kinds[j]))
        per_stage = per_block // length
        parts = [apart(v) for v in given]
        own, state = (
            stacked([_group(tree, i, length) for i in range(0, len(given), length)], num_stages)
            for tree in zip(*parts, strict=True)
        )
    total = per_stage * num_stages
    ends = {"first": first, "last": last}
    params = {
        "stages": own,
        **{
            key: params_of(end.modules, end.variables)
            for key, end in ends.items()
            if end is not None
        },
    }
    if shared is not None:
        params["shared"] = params_of(*shared)
    group = tuple(modules[: max(length, 1)])
    how = {"stateful": bool(jax.tree.leaves(state)), "stage_loss": stage_loss}
    model = Model(
        _stage(group, call, shared, rngs, per_stage=per_stage, pattern=max(length, 1), **how),
        first=None
        if first is None
        else end_function(first, "first", shared, rngs, ("microbatch",), total),
        last=None
        if last is None
        else end_function(last, "last", shared, rngs, ("x", "microbatch"), total + 1),
        stage_loss=stage_loss,
        **contract,
    )
    return LinenStages(
        model=model,
        params=params,
        state=state,
        specs=named_specs({**specs, "stages": _stage_specs(boxed, length, rules)}),
        layout=None,
        _pattern=length,
    )


def _stage_specs(
    boxed: Sequence[Variables], length: int, rules: Mapping[str, Any] | None
) -> PyTree:
    """Sharding metadata of the blocks' parameters; those of the first group stand for all."""
    if length:
        return mesh_specs(
            nn.get_partition_spec(_group([apart(v)[0] for v in boxed], 0, length)), rules, lead=1
        )
    own = apart(boxed[0])[0]
    return stacked_specs(nn.get_partition_spec(own), nn.meta.unbox(own), rules)


def submodule(variables: Variables, name: str) -> dict[str, PyTree]:
    """The variables of one submodule: {"params": {"embed": tree}} -> {"params": tree};
    PipelineError if there is none.
    """
    found = {collection: tree[name] for collection, tree in variables.items() if name in tree}
    if not found:
        raise PipelineError(
            f"no submodule is called {name!r}; the names are "
            f"{sorted({n for tree in variables.values() for n in tree})}"
        )
    return found


def submodules(variables: Variables, pattern: str) -> list[dict[str, PyTree]]:
    """The variables of submodules with numbered names, in order: "Block_{}" finds Block_0, Block_1,
    ...
    """
    names = {name for tree in variables.values() for name in tree}
    found: list[dict[str, PyTree]] = []
    while pattern.format(len(found)) in names and "{" in pattern:
        found.append(submodule(variables, pattern.format(len(found))))
    if not found:
        raise PipelineError(
            f"no submodule is called {pattern.format(0)!r}; the names are {sorted(names)}"
        )
    return found


def _stage(
    modules: tuple[nn.Module, ...],
    call: Callable[..., Any] | None,
    shared: tuple[Any, Any] | None,
    rngs: Sequence[str],
    *,
    per_stage: int,
    pattern: int,
    stateful: bool,
    stage_loss: bool,
) -> Callable[..., Any]:
    """The stage function: the blocks of a stage, scanned."""
    wants = frozenset() if call is None else wanted(call)

    def run(
        params: PyTree, state: PyTree, x: PyTree, key: Any, given: dict[str, Any]
    ) -> tuple[PyTree, Any, PyTree]:
        how = {
            "call": call,
            "keywords": given_keywords(shared, wants, given),
            "training": given["training"],
            "stage_loss": stage_loss,
        }
        losses, after = [], []
        for i, (module, own, rest) in enumerate(
            zip(modules, _each(params, pattern), _each(state, pattern), strict=True)
        ):
            x, loss, new = applied(module, own, rest, x, rngs=streams(rngs, key, i), **how)
            losses.append(loss)
            after.append(new)
        return x, sum(losses) if stage_loss else None, (_join(after) if stateful else {})

    return scanned(
        run,
        groups=per_stage,
        wants=wants | {"training"},
        random=bool(rngs),
        stateful=stateful,
        stage_loss=stage_loss,
    )


def _group(trees: Sequence[PyTree], start: int, length: int) -> PyTree:
    """The trees of a group: that of its only block, or one for each block by number."""
    return trees[start] if length == 1 else {str(i): trees[start + i] for i in range(length)}


def _each(tree: PyTree, length: int) -> list[PyTree]:
    """The inverse of `_group`."""
    return [tree] if length == 1 else [tree.get(str(i), {}) for i in range(length)]


def _join(trees: Sequence[PyTree]) -> PyTree:
    return _group(trees, 0, len(trees))


def _blocks(blocks: Any, variables: Any) -> tuple[list[nn.Module], list[Variables], bool]:
    """Modules, variables, and whether these are of all blocks at once."""
    many = not isinstance(blocks, nn.Module)
    modules = list(blocks) if many else [blocks]
    odd = sorted({type(m).__name__ for m in modules if not isinstance(m, nn.Module)})
    if odd or not modules:
        raise PipelineError(
            f"blocks must be a linen module or a list of them; got {', '.join(odd) or 'none'}"
        )
    if isinstance(variables, Mapping):
        if many:
            raise PipelineError(
                "variables with a leading axis of blocks are of one module; give that module, or "
                "a list of variables"
            )
        return modules, [variables], True
    found = list(variables)
    if many and len(found) != len(modules):
        raise PipelineError(
            f"there are {len(modules)} blocks but variables of {len(found)}; give each block's "
            "own, in order"
        )
    return (modules if many else modules * len(found)), found, False


def _stack_size(variables: Variables) -> int:
    """How many blocks stacked variables hold; PipelineError where they disagree."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return stack_size(
        {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves},
        "stacked variables",
    )
