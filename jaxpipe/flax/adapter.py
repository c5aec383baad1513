"""A `Model` made of units: the blocks under stages or letters, and the functions before and after
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..arrays import Params, PyTree, by_path
from ..errors import PipelineError
from ..layouts.layout import LETTERS, Layout, parse_layout
from ..model.layers import EMBEDDING, LOSS
from ..model.model import Model
from .common import (
    Unit,
    end_function,
    layer_function,
    mesh_specs,
    names_axes,
    stage_function,
    tree_at,
)

_MOST_SHOWN = 4  # shapes in a message
_LETTERS = "layout=, the letters of each stage"

T = TypeVar("T", bound="FlaxModel")


@dataclass(frozen=True)
class Form:
    """The settings of a model of blocks.

    Attributes:
        num_stages, layout: how blocks are cut into stages, in one of the two ways.
        rules, stage_loss, ignore, contract: as `from_nnx` takes them.
    """

    num_stages: int | None
    layout: Layout | str | None
    rules: Mapping[str, Any] | None
    stage_loss: bool
    ignore: Sequence[str]
    contract: Mapping[str, Any]

    def check(self, name: str) -> None:
        """PipelineError unless blocks are cut into stages in one of the two ways."""
        if (self.layout is None) == (self.num_stages is None):
            raise PipelineError(
                f"give {name} either num_stages=, for stages of equal size, or {_LETTERS}"
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
    _units: dict[str, Unit]  # first, last and shared
    _blocks: tuple[Unit, ...]  # one where they are stacked
    _places: tuple[tuple[str, int], ...]  # of each block: its tree, "" for the only one, and row

    def _stacks(self, tree: PyTree) -> PyTree:
        """A tree like the stages', canonical, with leaves [blocks, ...]."""
        if self.layout is not None:
            return tree
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)

    def _by_block(self, tree: PyTree) -> list[PyTree]:
        """A tree like the stages', canonical, as one for each block."""
        found = self._stacks(tree)
        return [
            jax.tree.map(lambda leaf, row=row: leaf[row], tree_at(found, key))
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
    own = _Blocks.of(blocks, form, stack=stack)
    params = {"stages": own.tree([block.params for block in blocks])}
    params |= {key: unit.params for key, unit in ends.items()}
    state = own.tree([block.state for block in blocks])
    specs = {"stages": own.specs} | {
        key: mesh_specs(unit.specs, unit.params, form.rules, lead=0, stack=False)
        for key, unit in ends.items()
    }
    frozen = own.frozen | {f"{key}/{path}" for key, unit in ends.items() for path in unit.frozen}
    return kind(
        model=_model(own, ends, state, frozen),
        params=params,
        state=state if _has(state) else {},
        specs=specs if names_axes(specs) else None,
        layout=form.layout,
        _units=dict(ends),
        _blocks=tuple(blocks),
        _places=own.places,
    )


@dataclass(frozen=True)
class _Blocks:
    """Blocks under the keys of their trees."""

    blocks: Sequence[Unit]
    form: Form
    stack: bool
    keys: Sequence[str]  # of each block in model order: its letter, its place in a pattern, or ""

    @classmethod
    def of(cls, blocks: Sequence[Unit], form: Form, *, stack: bool) -> _Blocks:
        """Find the keys; PipelineError for blocks that do not fit the form."""
        count = _stack_size(blocks[0]) if stack else len(blocks)
        kinds = [0] * count if stack else [block.kind(form.ignore) for block in blocks]

        def unlike(i: int, j: int) -> str:
            return blocks[i].difference(blocks[j])

        if form.num_stages is not None:
            length = _period(kinds, _blocks_per_stage(count, form.num_stages), unlike)
            keys = [""] * count if length == 1 else [str(i % length) for i in range(count)]
            return cls(blocks, form, stack, keys)
        assert form.layout is not None
        if stack:
            raise PipelineError(
                "with layout=, give a list with each block's variables, not variables with a "
                "leading axis of blocks"
            )
        keys = _letters_of(form.layout)
        _check_letters(keys, kinds, unlike)
        return cls(blocks, form, stack, keys)

    @cached_property
    def members(self) -> dict[str, list[int]]:
        """The numbers of the blocks of each key."""
        return {
            key: [i for i, own in enumerate(self.keys) if own == key]
            for key in dict.fromkeys(self.keys)
        }

    @cached_property
    def units(self) -> dict[str, Unit]:
        """The first block of each key, whose code the others run too."""
        return {key: self.blocks[own[0]] for key, own in self.members.items()}

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Of each block, the key and its row."""
        rows = {i: row for own in self.members.values() for row, i in enumerate(own)}
        return tuple((key, rows[i]) for i, key in enumerate(self.keys))

    def tree(self, trees: Sequence[PyTree]) -> PyTree:
        """Trees of blocks -> a tree like the stages', canonical."""
        found = {
            key: trees[0] if self.stack else jax.tree.map(_stacked, *(trees[i] for i in own))
            for key, own in self.members.items()
        }
        tree, stages = found.get("", found), self.form.num_stages
        return tree if stages is None else jax.tree.map(lambda leaf: _divided(leaf, stages), tree)

    @property
    def specs(self) -> PyTree:
        """The specs of the stages' parameters."""
        lead = 0 if self.form.num_stages is None else 1
        specs = {
            key: mesh_specs(unit.specs, unit.params, self.form.rules, lead=lead, stack=self.stack)
            for key, unit in self.units.items()
        }
        return specs.get("", specs)

    @property
    def frozen(self) -> set[str]:
        """The canonical paths of parameters that are not trained."""
        return {
            "/".join(name for name in ("stages", key, path) if name)
            for key, unit in self.units.items()
            for path in unit.frozen
        }


def _model(own: _Blocks, ends: Mapping[str, Unit], state: PyTree, frozen: set[str]) -> Model:
    """The functions of blocks and ends, and their loss contract."""
    shared, stage_loss, count = ends.get("shared"), own.form.stage_loss, len(own.keys)
    how: dict[str, Any] = {"stage_loss": stage_loss, **own.form.contract}
    if frozen:
        how["frozen"] = lambda path, _leaf: path in frozen
    outer: dict[str, Any] = {
        key: end_function(ends[key], key, takes, count + number, shared)
        for number, (key, takes) in enumerate(
            (("first", ("microbatch",)), ("last", ("x", "microbatch")))
        )
        if key in ends
    }
    if own.form.num_stages is not None:
        groups = count // own.form.num_stages // len(own.units)
        stage = stage_function(
            own.units, groups, shared, stateful=_has(state), stage_loss=stage_loss
        )
        return Model(stage, **outer, **how)
    _check_stateless(state)
    layers = {key: layer_function(unit, key, shared, stage_loss) for key, unit in own.units.items()}
    named = {"first": EMBEDDING, "last": LOSS}
    layers |= {named[key]: function for key, function in outer.items()}
    first, last = (letter if letter in layers else "" for letter in (EMBEDDING, LOSS))
    return Model(layers, layers=first + "".join(own.keys) + last, **how)


def _letters_of(layout: Layout | str) -> list[str]:
    """The letters of the blocks in model order."""
    if isinstance(layout, str):
        known = {*LETTERS, *(c for c in layout if c.isalpha())}
        layout = parse_layout(layout, devices=1, letters="".join(sorted(known)))
    return [letter for letter in "".join(layout.stages) if letter not in (EMBEDDING, LOSS)]


def _check_letters(
    letters: Sequence[str], kinds: Sequence[Any], difference: Callable[[int, int], str]
) -> None:
    """PipelineError for more or fewer letters than blocks, and for unlike blocks of a letter."""
    if len(letters) != len(kinds):
        raise PipelineError(
            f"the layout has {len(letters)} layers between E and L, but there are {len(kinds)} "
            "blocks"
        )
    for i, letter in enumerate(letters):
        first = letters.index(letter)
        if kinds[i] != kinds[first]:
            raise PipelineError(
                f"blocks of letter {letter!r} are unlike: {difference(first, i)}; give them "
                "letters of their own"
            )


def _check_stateless(state: Mapping[str, PyTree]) -> None:
    """PipelineError for letters whose blocks have other variables than parameters."""
    letters = [letter for letter, tree in state.items() if _has(tree)]
    if letters:
        raise PipelineError(
            f"blocks of letters {letters} have variables that are no parameters (batch "
            "statistics), which only stages of equal size can keep: give num_stages= instead of "
            "layout=, or make them parameters that are frozen"
        )


def _blocks_per_stage(count: int, num_stages: int) -> int:
    """How many blocks a stage has; PipelineError where they do not divide."""
    if count and num_stages > 0 and count % num_stages == 0:
        return count // num_stages
    fits = [s for s in range(1, count + 1) if count % s == 0]
    raise PipelineError(
        f"{count} blocks do not divide into {num_stages} stages of equal size; num_stages may be "
        f"one of {fits}, or give {_LETTERS}"
    )


def _period(kinds: Sequence[Any], per_stage: int, difference: Callable[[int, int], str]) -> int:
    """The length of the shortest pattern of kinds that every stage repeats; PipelineError where
    stages are unlike.
    """
    for length in range(1, per_stage + 1):
        if per_stage % length == 0 and all(
            kind == kinds[i % length] for i, kind in enumerate(kinds)
        ):
            return length
    i, kind = next((i, k) for i, k in enumerate(kinds) if k != kinds[i % per_stage])
    first = kinds.index(kind) if kind in kinds[:i] else i % per_stage
    other = i % per_stage if first != i % per_stage else first
    raise PipelineError(
        f"blocks {other} and {i} are unlike: {difference(other, i)}; every stage must have the "
        f"same sequence of blocks, and with {len(kinds) // per_stage} stages of {per_stage} block "
        f"{i} has the place of block {other}.  Give {_LETTERS}, with one for each kind of block"
    )


def _stack_size(unit: Unit) -> int:
    """How many blocks stacked variables hold; PipelineError where they disagree."""
    leaves = by_path(unit.params) | by_path(unit.state)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
        some = ", ".join(f"{name} {shape}" for name, shape in list(shapes.items())[:_MOST_SHOWN])
        more = f" and {len(shapes) - _MOST_SHOWN} more" if len(shapes) > _MOST_SHOWN else ""
        raise PipelineError(
            "stacked variables must all have a leading axis of blocks, of one length; these have "
            f"{some}{more}: make it with nnx.vmap (in linen nn.scan, or a vmapped init), or give a "
            "list of blocks (of a whole model its blocks, and the rest in first= and last=)"
        )
    return int(next(iter(shapes.values()))[0])


def _has(tree: PyTree) -> bool:
    """Whether a tree has leaves."""
    return bool(jax.tree.leaves(tree))


def _stacked(*leaves: Any) -> Any:
    """Leaves of blocks -> [blocks, ...]; ShapeDtypeStructs likewise."""
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return leaves[0].update(shape=(len(leaves), *leaves[0].shape))
    return jnp.stack(leaves)


def _divided(leaf: Any, num_stages: int) -> Any:
    """[blocks, ...] -> [S, blocks of a stage, ...]; ShapeDtypeStructs likewise."""
    shape = (num_stages, leaf.shape[0] // num_stages, *leaf.shape[1:])
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(shape=shape)
    return leaf.reshape(shape)
