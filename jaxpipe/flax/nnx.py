"""nnx modules in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

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
    with_loss,
)
from .models import FlaxModel, check_cut, named_specs, stack_size, stacked_specs
from .nnx_layers import by_layout
from .nnx_parts import (
    Part,
    calling,
    check_apart,
    difference,
    end_function,
    frozen_paths,
    given_keywords,
    is_in,
    kind_of,
    pure,
)


@dataclass(frozen=True)
class NnxStages(FlaxModel):
    """A model of nnx modules by stages of equal size: leaves of stages are [S, blocks of a stage,
    ...].
    """

    _parts: dict[str, Part]
    _blocks: tuple[Any, ...]  # one stacked module, or groups of modules

    def to_nnx(self, params: dict[str, PyTree], state: PyTree = None) -> None:
        """Write canonical parameters, and state, into the variables of the modules that the model
        was made of.
        """
        own = layered(params["stages"])
        other = layered({} if state is None else state)
        part = self._parts["stages"]
        if part.stack:
            part.write(self._blocks[0], own, other)
        else:
            for i, block in enumerate(self._blocks):
                part.write(block, *jax.tree.map(lambda leaf, i=i: leaf[i], (own, other)))
        for key in ("first", "last", "shared"):
            if key in self._parts:
                self._parts[key].write(self._parts[key].modules, params[key], {})


def from_nnx(
    blocks: Any,
    *,
    num_stages: int | None = None,
    layout: Layout | str | None = None,
    first: End | None = None,
    last: End | None = None,
    shared: Any = None,
    call: Callable[..., Any] | None = None,
    trainable: Any = nnx.Param,
    frozen: Any = None,
    rules: Mapping[str, Any] | None = None,
    stage_loss: bool = False,
    **contract: Any,
) -> Any:
    """Make the functions and canonical parameters of a pipeline from nnx modules, which stay as
    they are.

    Dropout draws from the step's key (`rng=`), a key for each layer and microbatch, and from no
    stream of the modules.  Evaluation runs the modules as `Module.eval` would.  Blocks need not be
    alike: a pattern that every stage repeats (local and global attention in turn) is enough.

    Args:
        blocks: a list of modules (`nnx.List`, `nnx.Sequential`), or one module whose variables have
            a leading axis of blocks (made by `nnx.vmap`).
        num_stages: S; divides the number of blocks.  The model is then a `NnxStages`.
        layout: instead of num_stages, the letters of each stage, "Ett|tttL" (see `parse_layout`): E
            is `first`, L is `last`, and every other letter the next block of the list.  Stages may
            have any numbers of blocks, and letters kinds of their own.  The model is then a
            `NnxLayers`.
        first, last: what comes before and after the blocks.
        shared: modules that several of these functions use (a tied embedding): they are given as
            `shared` by keyword.
        call: `call(block, x) -> x`, where it is not `block(x)`; it may take microbatch, ctx, shared
            and training by keyword.
        trainable: which variables are parameters (a filter of nnx); the blocks' others are state.
        frozen: which of them are not trained (a filter of nnx, `lambda path, v: not isinstance(v,
            nnx.LoRAParam)` say); see `Pipeline`.
        rules: where `nnx.with_partitioning` names logical axes, the mesh axis of each (or None).
        stage_loss: blocks, or `call`, return (x, loss), and the losses are added to that of the
            microbatch.  A loss that blocks sow comes so: `call` takes it with `nnx.capture`.
        contract: `loss` and `has_metrics`, as `jaxpipe.Model` takes them.

    Raises:
        PipelineError: blocks do not divide into stages, are unlike, or share a variable.  A step
            raises it for values that blocks sow and nobody takes.

    Example:
        >>> blocks = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(6)]
        >>> model = from_nnx(
        ...     blocks,
        ...     num_stages=2,
        ...     last=End(None, lambda _, x, microbatch: jnp.mean((x - microbatch["y"]) ** 2)),
        ... )
        >>> model.params["stages"]["kernel"].shape
        (2, 3, 4, 4)
    """
    check_ends(first=first, last=last)
    check_cut("from_nnx", num_stages, layout)
    if layout is not None:
        ends_given: dict[str, Any] = {"first": first, "last": last, "shared": shared, "call": call}
        return by_layout(
            list(blocks),
            layout,
            **ends_given,
            trainable=trainable,
            frozen=frozen,
            rules=rules,
            stage_loss=stage_loss,
            contract=contract,
        )
    assert num_stages is not None
    groups, stack = _groups(blocks, num_stages)
    parts = {"stages": Part.of(groups[0], trainable, stack=stack)}
    ends = {
        "first": None if first is None else first.modules,
        "last": None if last is None else last.modules,
        "shared": shared,
    }
    parts |= {
        key: Part.of(modules, trainable) for key, modules in ends.items() if modules is not None
    }
    check_apart(
        {
            **{f"block {i}": b for i, b in enumerate(groups)},
            **{k: m for k, m in ends.items() if m is not None},
        }
    )

    part = parts["stages"]
    if stack:
        own, state = (divided(pure(tree), num_stages) for tree in (part.params, part.rest))
        per_stage = blocks_per_stage(_stack_size(part), num_stages)
    else:
        split = [nnx.split(group, trainable, nnx.RngState, ...) for group in groups]
        own, state = (stacked([pure(s[i]) for s in split], num_stages) for i in (1, 3))
        per_stage = len(groups) // num_stages
    total = per_stage * num_stages
    params = {"stages": own, **{key: pure(parts[key].params) for key in parts if key != "stages"}}
    for key, end in (("first", first), ("last", last)):
        if end is not None:
            params.setdefault(key, {})
    model = Model(
        _stage(parts, call, per_stage, stage_loss=stage_loss),
        first=None
        if first is None
        else end_function(first, "first", parts, ("microbatch",), total),
        last=None
        if last is None
        else end_function(last, "last", parts, ("x", "microbatch"), total + 1),
        stage_loss=stage_loss,
        frozen=is_in(frozen_paths(parts, frozen)),
        **contract,
    )
    return NnxStages(
        model=model,
        params=params,
        state=state,
        specs=named_specs(_specs(parts, rules)),
        layout=None,
        _parts=parts,
        _blocks=tuple(groups),
    )


def _specs(parts: dict[str, Part], rules: Mapping[str, Any] | None) -> dict[str, PyTree]:
    """Sharding metadata of the variables, as `Pipeline` takes it."""
    found = {}
    for key, part in parts.items():
        tree = pure(nnx.get_partition_spec(part.params))
        if key != "stages":
            found[key] = mesh_specs(tree, rules)
        elif not part.stack:
            found[key] = mesh_specs(tree, rules, lead=1)  # the blocks of a stage
        else:
            found[key] = stacked_specs(tree, pure(part.params), rules)
    return found


def _stage(
    parts: dict[str, Part], call: Callable[..., Any] | None, per_stage: int, *, stage_loss: bool
) -> Callable[..., Any]:
    """The stage function: the blocks of a stage, scanned."""
    part = parts["stages"]
    wants = frozenset() if call is None else wanted(call)

    def run(
        params: PyTree, state: PyTree, x: PyTree, key: Any, given: dict[str, Any]
    ) -> tuple[PyTree, Any, PyTree]:
        training = given["training"]
        group = part.build(params, state, key, training=training)
        keywords = given_keywords(parts, wants, given)
        losses = []
        for block in group if isinstance(group, tuple) else (group,):
            out = calling(
                "a block",
                part,
                key,
                training,
                block if call is None else lambda x, **k: call(block, x, **k),  # noqa: B023
                (x,),
                keywords,
            )
            x, loss = with_loss("a block", out, stage_loss=stage_loss)
            losses.append(loss)
        return x, sum(losses) if stage_loss else None, part.state_of(group, "a block")

    how = {
        "random": part.random,
        "stateful": bool(jax.tree.leaves(part.rest)),
        "stage_loss": stage_loss,
    }
    return scanned(run, groups=per_stage, wants=wants | {"training"}, **how)


def _groups(blocks: Any, num_stages: int) -> tuple[list[Any], bool]:
    """Groups of blocks that all run the same code, or one stacked module; and which of the two."""
    if isinstance(blocks, nnx.Sequential):
        blocks = blocks.layers
    if isinstance(blocks, nnx.Module) and not isinstance(blocks, nnx.List):
        return [blocks], True
    found = list(blocks)
    if not found:
        raise PipelineError(
            "there are no blocks; give a list of nnx modules, or one whose variables have a "
            "leading axis of blocks"
        )
    odd = [
        f"block {i} is {type(b).__name__}"
        for i, b in enumerate(found)
        if not isinstance(b, nnx.Module)
    ]
    if odd:
        raise PipelineError(
            f"blocks must be nnx modules, but {', '.join(odd)}; a plain function goes into "
            "call=, or into a module"
        )
    per_stage = blocks_per_stage(len(found), num_stages)
    kinds = [kind_of(block) for block in found]
    length = period(kinds, per_stage, lambda i, j: difference(found[i], found[j]))
    groups = [tuple(found[i : i + length]) for i in range(0, len(found), length)]
    return [group[0] if length == 1 else group for group in groups], False


def _stack_size(part: Part) -> int:
    """How many blocks a stacked module holds; PipelineError where its variables disagree."""
    leaves = jax.tree_util.tree_leaves_with_path((pure(part.params), pure(part.rest)))
    named = {
        jax.tree_util.keystr(path[1:], simple=True, separator="/"): leaf for path, leaf in leaves
    }
    return stack_size(
        named,
        "a stacked module's variables",
        ": make it with nnx.vmap, or give a list of modules (of a whole model its blocks, and "
        "the rest in first= and last=)",
    )
