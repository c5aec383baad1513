"""A `Model` made of units: the blocks under stages or letters, and the functions before and after
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..arrays import Params, PyTree, described
from ..errors import PipelineError
from ..layouts.layout import LETTERS, Layout, parse_layout
from ..model.layers import EMBEDDING, LOSS
from ..model.model import Model
from ..model.settings import is_spec
from .units import Unit, end_function, layer_function, stage_function, tree_at

_LETTERS = "layout=, the letters of each stage"

T = TypeVar("T", bound="FlaxModel")


@dataclass(frozen=True)
class Form:
    """The settings of a model of blocks.

    Attributes:
        maker: the function that the user called, for messages.
        num_stages, layout: how blocks are cut into stages, in one of the two ways.
        rules, stage_loss, ignore, contract: as `from_nnx` takes them.
    """

    maker: str
    num_stages: int | None
    layout: Layout | str | None
    rules: Mapping[str, Any] | None
    stage_loss: bool
    ignore: Sequence[str]
    contract: Mapping[str, Any]

    def __post_init__(self) -> None:
        if (self.layout is None) == (self.num_stages is None):
            raise PipelineError(
                f"give {self.maker} either num_stages=, for stages of equal size, or {_LETTERS}"
            )


@dataclass(frozen=True)
class FlaxModel:
    """A model of flax modules as a pipeline takes it.

    Attributes:
        model: its functions and their loss contract, for `Pipeline`.
        params: canonical parameters.  Those of stages are leaves [S, blocks of a stage, ...] with
            `num_stages=` (under "0", "1" where blocks of a stage differ in a pattern), and {letter:
            leaves [layers, ...] in model order} with `layout=`.
        state: the blocks' other variables (batch statistics), for `Pipeline.place_state`; {} where
            there are none.
        specs: sharding metadata of the variables, for `Sharding(specs=)`; None where no variable
            names an axis.
        layout: the layers of each stage, for `Pipeline(layout=)`; None with `num_stages=`.
    """

    model: Model
    params: Params
    state: PyTree
    specs: dict[str, PyTree] | None
    layout: Layout | str | None
    _ends: dict[str, Unit]  # first, last and shared
    _blocks: tuple[Unit, ...]  # one where they are stacked
    _places: tuple[tuple[str, int], ...]  # of each block: its tree, "" for the only one, and row

    def _by_block(self, *trees: PyTree) -> list[tuple[PyTree, ...]]:
        """Trees like the stages', canonical, for each block; for all at once where they are
        stacked.
        """
        if self.layout is None:
            trees = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), trees)
        if len(self._blocks) < len(self._places):
            return [trees]
        return [
            tuple(
                jax.tree.map(lambda leaf, row=row: leaf[row], tree_at(tree, key)) for tree in trees
            )
            for key, row in self._places
        ]


def adapt(
    kind: type[T],
    blocks: Sequence[Unit],
    *,
    ends: Mapping[str, Unit],
    form: Form,
    stack: bool = False,
) -> T:
    """The model of blocks.

    Args:
        kind: of model that is made.
        blocks: in order; one whose variables have a leading axis of blocks with `stack`.
        ends: `first`, `last` and `shared`, where there are any.
        form: the settings.
        stack: see above.

    Raises:
        PipelineError: blocks do not divide into stages, are unlike, or keep state under letters.
    """
    keys = _keys_of_stack(blocks[0], form) if stack else _keys(blocks, form)
    members = {key: [i for i, own in enumerate(keys) if own == key] for key in dict.fromkeys(keys)}
    units = {key: blocks[own[0]] for key, own in members.items()}

    def tree(trees: Sequence[PyTree]) -> PyTree:
        """Trees of blocks -> a tree like the stages', canonical."""
        if stack:
            return jax.tree.map(lambda leaf: _cut(leaf, form.num_stages), trees[0])
        found = {
            key: jax.tree.map(
                lambda *leaves: _cut(_stacked(leaves), form.num_stages), *(trees[i] for i in own)
            )
            for key, own in members.items()
        }
        return found.get("", found)

    specs = {
        key: _mesh_specs(unit, form.rules, lead=int(form.num_stages is not None), stack=stack)
        for key, unit in units.items()
    }
    state = tree([block.state for block in blocks])
    every = {"stages": specs.get("", specs)} | {
        key: _mesh_specs(unit, form.rules) for key, unit in ends.items()
    }
    return kind(
        model=_model(units, keys, ends, state, form),
        params={"stages": tree([block.params for block in blocks])}
        | {key: unit.params for key, unit in ends.items()},
        state=state if _has(state) else {},
        specs=every if _names_axes(every) else None,
        layout=form.layout,
        _ends=dict(ends),
        _blocks=tuple(blocks),
        _places=tuple((key, members[key].index(i)) for i, key in enumerate(keys)),
    )


def _model(
    units: Mapping[str, Unit],
    keys: Sequence[str],
    ends: Mapping[str, Unit],
    state: PyTree,
    form: Form,
) -> Model:
    """The functions of blocks and ends, and their loss contract."""
    shared, stage_loss, count = ends.get("shared"), form.stage_loss, len(keys)
    options: dict[str, Any] = {"stage_loss": stage_loss, **form.contract}
    parts = {f"stages/{key}".rstrip("/"): unit for key, unit in units.items()} | dict(ends)
    if frozen := {f"{part}/{path}" for part, unit in parts.items() for path in unit.frozen}:
        options["frozen"] = lambda path, _leaf: path in frozen
    outer: dict[str, Any] = {
        key: end_function(ends[key], key, count + number, shared)
        for number, key in enumerate(("first", "last"))
        if key in ends
    }
    if form.num_stages is not None:
        groups = count // form.num_stages // len(units)
        stage = stage_function(units, groups, shared, stateful=_has(state), stage_loss=stage_loss)
        return Model(stage, **outer, **options)
    if letters := [letter for letter, tree in state.items() if _has(tree)]:
        raise PipelineError(
            f"blocks of letters {letters} have variables that are no parameters (batch "
            "statistics), which only stages of equal size can keep: give num_stages= instead of "
            "layout=, or make them parameters that are frozen"
        )
    layers = {key: layer_function(unit, key, shared, stage_loss) for key, unit in units.items()}
    named = {"first": EMBEDDING, "last": LOSS}
    layers |= {named[key]: function for key, function in outer.items()}
    first, last = (letter if letter in layers else "" for letter in (EMBEDDING, LOSS))
    return Model(layers, layers=first + "".join(keys) + last, **options)


def _keys(blocks: Sequence[Unit], form: Form) -> list[str]:
    """The key of each block's tree: its letter, its place in a pattern, or "" for the only tree.

    PipelineError for blocks that do not fit the form.
    """
    kinds = [block.kind(form.ignore) for block in blocks]
    if form.num_stages is not None:
        per_stage = _blocks_per_stage(len(blocks), form.num_stages)
        length = _period(blocks, kinds, per_stage)
        return [str(i % length) if length > 1 else "" for i in range(len(blocks))]
    assert form.layout is not None
    letters = _letters_of(form.layout)
    if len(letters) != len(blocks):
        raise PipelineError(
            f"the layout has {len(letters)} layers between E and L, but there are {len(blocks)} "
            "blocks"
        )
    for i, letter in enumerate(letters):
        first = letters.index(letter)
        if kinds[i] != kinds[first]:
            raise PipelineError(
                f"blocks of letter {letter!r} are unlike: {blocks[first].difference(blocks[i])}; "
                "give them letters of their own"
            )
    return letters


def _keys_of_stack(unit: Unit, form: Form) -> list[str]:
    """The same where variables have a leading axis of blocks."""
    count = _stack_size(unit)
    if form.num_stages is None:
        raise PipelineError(
            "with layout=, give a list with each block's variables, not variables with a "
            "leading axis of blocks"
        )
    _blocks_per_stage(count, form.num_stages)
    return [""] * count


def _letters_of(layout: Layout | str) -> list[str]:
    """The letters of the blocks in model order."""
    if isinstance(layout, str):
        known = {*LETTERS, *(c for c in layout if c.isalpha())}
        layout = parse_layout(layout, devices=1, letters="".join(sorted(known)))
    return [letter for letter in "".join(layout.stages) if letter not in (EMBEDDING, LOSS)]


def _blocks_per_stage(count: int, num_stages: int) -> int:
    """How many blocks a stage has; PipelineError where they do not divide."""
    if count and num_stages > 0 and count % num_stages == 0:
        return count // num_stages
    fits = [s for s in range(1, count + 1) if count % s == 0]
    raise PipelineError(
        f"{count} blocks do not divide into {num_stages} stages of equal size; num_stages may be "
        f"one of {fits}, or give {_LETTERS}"
    )


def _period(blocks: Sequence[Unit], kinds: Sequence[Any], per_stage: int) -> int:
    """The length of the shortest pattern of kinds that every stage repeats; PipelineError where
    stages are unlike.
    """
    for length in range(1, per_stage + 1):
        if per_stage % length == 0 and all(
            kind == kinds[i % length] for i, kind in enumerate(kinds)
        ):
            return length
    i = next(i for i, kind in enumerate(kinds) if kind != kinds[i % per_stage])
    other = i % per_stage
    raise PipelineError(
        f"blocks {other} and {i} are unlike: {blocks[other].difference(blocks[i])}; every stage "
        f"must have the same sequence of blocks, and with {len(kinds) // per_stage} stages of "
        f"{per_stage} block {i} has the place of block {other}.  Give {_LETTERS}, with one for "
        "each kind of block"
    )


def _stack_size(unit: Unit) -> int:
    """How many blocks stacked variables hold; PipelineError where they disagree."""
    variables = {**unit.params, **unit.state}
    leading = {leaf.shape[:1] for leaf in jax.tree.leaves(variables)}
    if len(leading) != 1 or () in leading:
        raise PipelineError(
            "stacked variables must all have a leading axis of blocks, of one length; these have "
            f"{described(variables, 4)}: make it with nnx.vmap (in linen nn.scan, or a vmapped "
            "init), or give a list of blocks (of a whole model its blocks, and the rest in first= "
            "and last=)"
        )
    return int(leading.pop()[0])


def _has(tree: PyTree) -> bool:
    """Whether a tree has leaves."""
    return bool(jax.tree.leaves(tree))


def _stacked(leaves: Sequence[Any]) -> Any:
    """Leaves of blocks -> [blocks, ...]; ShapeDtypeStructs likewise."""
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return leaves[0].update(shape=(len(leaves), *leaves[0].shape))
    return jnp.stack(leaves)


def _cut(leaf: Any, num_stages: int | None) -> Any:
    """[blocks, ...] -> [S, blocks of a stage, ...] where there are stages of equal size;
    ShapeDtypeStructs likewise.
    """
    if num_stages is None:
        return leaf
    shape = (num_stages, leaf.shape[0] // num_stages, *leaf.shape[1:])
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(shape=shape)
    return leaf.reshape(shape)


def _names_axes(tree: PyTree) -> bool:
    """Whether a spec of a tree names an axis."""
    specs = [spec for spec in jax.tree.leaves(tree, is_leaf=is_spec) if spec is not None]
    return any(entry is not None for spec in specs for entry in spec)


def _mesh_specs(
    unit: Unit, rules: Mapping[str, Any] | None, *, lead: int = 0, stack: bool = False
) -> PyTree:
    """Specs of mesh axes from those of flax's metadata.

    Args:
        unit: whose specs they are.
        rules: logical name -> mesh axis, a tuple of them, or None; names that are not in it are
            mesh axes.
        lead: leading axes that the pipeline adds.
        stack: the variables have a leading axis of blocks.  A spec of full length has an entry for
            it, as `nnx.vmap` and `nn.scan` add it; that entry is left out.
    """
    known = rules or {}

    def entry(names: Any) -> Any:
        if not isinstance(names, tuple):
            return known.get(names, names)
        return tuple(axis for n in names if (axis := known.get(n, n)) is not None) or None

    def translated(spec: Any, leaf: Any) -> Any:
        if spec is None:
            return None
        drop = int(stack and len(spec) == leaf.ndim)
        return PartitionSpec(*(None,) * lead, *map(entry, tuple(spec)[drop:]))

    return jax.tree.map(translated, unit.specs, unit.params, is_leaf=is_spec)
