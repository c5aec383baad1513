"""Units of flax modules as a `Model`: blocks are stacked under stages or letters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..arrays import ByPart, Leaf, Leaves, Params, PyTree, described, in_rows, summable
from ..errors import PipelineError
from ..layouts.layout import LETTERS, Layout, parse_layout
from ..model.calls import UserFunction
from ..model.functions import Extra
from ..model.layers import EMBEDDING, LOSS
from ..model.model import Model
from ..model.replaced import Replaced
from ..model.settings import SpecEntry, is_spec, names_of
from .units import Unit, UnitCall, Vars


def tree_at(tree: PyTree, key: str) -> PyTree:
    """The tree of a kind of block: one of several by key, or the only one."""
    return tree.get(key, {}) if key else tree


def _run(
    unit: Unit,
    shared: Unit | None,
    params: Vars,
    state: Vars,
    arguments: tuple[PyTree, ...],
    offered: Extra,
) -> tuple[PyTree, Vars]:
    """Run the unit, whose key is that of the context.  The user's function gets shared parameters
    as modules.
    """
    ctx, training = offered.get("ctx"), offered.get("training", True)
    keywords = {name: offered[name] for name in unit.function.wants}
    if "shared" in keywords and shared is not None:
        keywords["shared"] = shared.build(keywords["shared"], shared.state, None, training=training)
    key = ctx.rng if unit.random and ctx is not None else None
    return unit.run(params, state, UnitCall(arguments, key, keywords, training))


def _function(unit: Unit, name: str, shared: Unit | None) -> UserFunction:
    """`first`, `last` or a layer: its variables that are no parameters are constants."""

    def function(params: Vars, *arguments: PyTree, **offered: object) -> PyTree:
        return _run(unit, shared, params, unit.state, arguments, offered)[0]

    return _with_keywords(function, ("params", *unit.takes[1:]), unit.keywords, name)


def _stage_function(
    units: Mapping[str, Unit],
    groups: int,
    shared: Unit | None,
    *,
    stateful: bool,
    stage_loss: bool,
) -> UserFunction:
    """The function of a stage: a scan over groups of blocks, each of which has one of every unit
    in order.  A block's key is the same however blocks are put into stages.
    """

    def stage(params: Vars, x: PyTree, **offered: PyTree) -> PyTree:
        ctx = offered.get("ctx")
        start = 0 if ctx is None else ctx.stage * groups

        def group(x: PyTree, row: Any) -> tuple[PyTree, tuple[Leaves, Vars]]:
            index, own, state = row
            losses, after = [], {}
            for i, (key, unit) in enumerate(units.items()):
                number = (start + index) * len(units) + i
                told = offered if ctx is None else {**offered, "ctx": ctx.at_layer(number)}
                trees = tree_at(own, key), tree_at(state, key)
                x, after[key] = _run(unit, shared, *trees, (x,), told)
                if stage_loss:
                    x, loss = unit.function.results(_RETURNED, x).values()
                    losses.append(summable(loss))
            new = after.get("", after) if stateful else {}
            # flax may widen statistics.
            new = jax.tree.map(lambda after, before: after.astype(before.dtype), new, state)
            return x, (losses, new)

        rows = (jnp.arange(groups), params, offered["state"] if stateful else {})
        x, (losses, state) = jax.lax.scan(group, x, rows)
        more: Leaves = [sum(map(jnp.sum, losses))] if stage_loss else []
        more += [state] if stateful else []
        return (x, *more) if more else x

    # `Pipeline` reads this: leaves are [S, layers, ...].
    stage.stacks_layers = True  # type: ignore[attr-defined]
    keywords = frozenset({"state"} if stateful else ())
    keywords = keywords.union(*(unit.keywords for unit in units.values()))
    return _with_keywords(stage, ("params", "x"), keywords, "stage")


def _with_keywords(
    function: UserFunction, positional: Sequence[str], keywords: frozenset[str], name: str
) -> UserFunction:
    """The function, with a signature that says which keywords it takes."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    names = zip(kinds, (positional, sorted(keywords)), strict=True)
    parameters = [inspect.Parameter(name, kind) for kind, own in names for name in own]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__name__ = name
    return function


_RETURNED = {"x": "", "loss": "stage_loss=True"}
_OUTER = {"first": EMBEDDING, "last": LOSS}
_LETTERS = "layout=, the letters of each stage"

T = TypeVar("T", bound="FlaxModel")


@dataclass(frozen=True)
class BlockSettings:
    """The settings of a model of blocks.

    Attributes:
        num_stages, layout: how blocks are cut into stages, in one of the two ways.
        rules, stage_loss, ignore, contract: as `from_nnx` takes them.
    """

    num_stages: int | None
    layout: Layout | str | None
    rules: Mapping[str, SpecEntry]
    stage_loss: bool
    ignore: Sequence[str]
    contract: Mapping[str, object]

    def __post_init__(self) -> None:
        if (self.layout is None) == (self.num_stages is None):
            raise PipelineError(f"give either num_stages=, for stages of equal size, or {_LETTERS}")


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
    state: Vars
    specs: ByPart | None
    layout: Layout | str | None
    _ends: dict[str, Unit]  # first, last and shared
    _blocks: tuple[Unit, ...]
    _places: tuple[tuple[str, int], ...]  # of each block: the key of its tree, and its row
    _stack: bool  # the only unit of blocks has variables of all of them

    def _by_block(self, *trees: Vars) -> list[tuple[Vars, ...]]:
        """Trees like the stages', canonical, for each block; for all at once where they are
        stacked.
        """
        if self.layout is None:
            trees = in_rows(trees)
        if self._stack:
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
    form: BlockSettings,
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
    keys = _keys(blocks, form, stack=stack)
    members = {key: [i for i, own in enumerate(keys) if own == key] for key in dict.fromkeys(keys)}
    units, stages = {key: blocks[own[0]] for key, own in members.items()}, form.num_stages

    def joined(*leaves: jax.Array) -> jax.Array:
        rows = leaves[0] if stack else jnp.stack(leaves)
        if stages is None:
            return rows
        return rows.reshape(stages, len(rows) // stages, *rows.shape[1:])

    def joined_or_shapes(*leaves: Any) -> Leaf:
        abstract = isinstance(leaves[0], jax.ShapeDtypeStruct)
        return jax.eval_shape(joined, *leaves) if abstract else joined(*leaves)

    def tree(trees: Sequence[Vars]) -> Vars:
        """Trees of blocks -> a tree like the stages', canonical."""
        found: dict[str, Vars] = {
            key: jax.tree.map(joined_or_shapes, *(trees[i] for i in own[: len(trees)]))
            for key, own in members.items()
        }
        return found.get("", found)

    specs = {
        key: _mesh_specs(unit, form.rules, lead=int(stages is not None), stack=stack)
        for key, unit in units.items()
    }
    state = tree([block.state for block in blocks])
    every = {"stages": specs.get("", specs)} | {
        key: _mesh_specs(unit, form.rules) for key, unit in ends.items()
    }
    names_axes = any(axis is not None for spec in jax.tree.leaves(every) for axis in spec)
    return kind(
        model=_model(units, keys, ends, state, form),
        params={"stages": tree([block.params for block in blocks])}
        | {key: unit.params for key, unit in ends.items()},
        state=state if _has(state) else {},
        specs=every if names_axes else None,
        layout=form.layout,
        _ends=dict(ends),
        _blocks=tuple(blocks),
        _places=tuple((key, members[key].index(i)) for i, key in enumerate(keys)),
        _stack=stack,
    )


def _model(
    units: Mapping[str, Unit],
    keys: Sequence[str],
    ends: Mapping[str, Unit],
    state: Vars,
    form: BlockSettings,
) -> Model:
    """The functions of blocks and ends, and their loss contract."""
    shared, stage_loss, count = ends.get("shared"), form.stage_loss, len(keys)
    options: dict[str, Any] = {"stage_loss": stage_loss, **form.contract}
    parts = {f"stages/{key}".rstrip("/"): unit for key, unit in units.items()}
    parts |= ends
    frozen = {f"{part}/{path}" for part, unit in parts.items() for path in unit.frozen}
    if frozen:
        options["frozen"] = lambda path, _leaf: path in frozen
    # scales, and histories of which each microbatch has changed one number
    own = [f"{part}/{path}" for part, unit in parts.items() for path in sorted(unit.replaced)]
    rules = {f"^{re.escape(path)}$": Replaced.MAX for path in own}
    options["replaced"] = {**rules, **options.get("replaced", {})}
    outer = {key: _function(ends[key], key, shared) for key in _OUTER if key in ends}
    if form.num_stages is not None:
        groups = count // form.num_stages // len(units)
        stage = _stage_function(units, groups, shared, stateful=_has(state), stage_loss=stage_loss)
        return Model(stage, first=outer.get("first"), last=outer.get("last"), **options)
    if letters := [letter for letter, tree in state.items() if _has(tree)]:
        raise PipelineError(
            f"blocks of letters {letters} have variables that are no parameters (batch "
            "statistics), which only stages of equal size can keep: give num_stages= instead of "
            "layout=, or make them parameters that are frozen"
        )
    layers = {key: _function(unit, f"layer_{key}", shared) for key, unit in units.items()}
    layers |= {_OUTER[key]: function for key, function in outer.items()}
    first, last = (letter if letter in layers else "" for letter in _OUTER.values())
    return Model(layers, layers=first + "".join(keys) + last, **options)


def _keys(blocks: Sequence[Unit], form: BlockSettings, *, stack: bool) -> list[str]:
    """The key of each block's tree: its letter, its place in a pattern, or "" for the only tree.

    PipelineError for blocks that do not fit the form.
    """
    if stack and form.layout is not None:
        raise PipelineError(
            "with layout=, give a list with each block's variables, not variables with a "
            "leading axis of blocks"
        )
    kinds = [_kind(block, form.ignore) for block in blocks]
    kinds *= _stack_size(blocks[0]) if stack else 1
    if form.layout is not None:
        keys = _letters(form.layout)
    else:
        keys = _pattern(kinds, form.num_stages or 0)
    if len(keys) != len(kinds):
        raise PipelineError(
            f"the layout has {len(keys)} layers between E and L, but there are {len(kinds)} blocks"
        )
    for i, key in enumerate(keys):
        first = keys.index(key)
        if kinds[i] != kinds[first]:
            raise PipelineError(
                f"blocks {first} and {i} are unlike: {_difference(kinds[first], kinds[i])}; "
                "blocks of one letter, and those at one place of every stage, must be alike.  "
                f"Give {_LETTERS}, with one for each kind of block"
            )
    return keys


def _kind(block: Unit, ignore: Sequence[str]) -> dict[str, str]:
    """A block's settings but for the attributes that are ignored."""
    return {
        name: text for name, text in block.settings().items() if name.split(".")[-1] not in ignore
    }


def _difference(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The first setting in which two blocks differ."""
    name = next(name for name in (*one, *other) if one.get(name) != other.get(name))
    left, right = (kind.get(name, "not there") for kind in (one, other))
    return f"{name} is {left} in one and {right} in the other"


def _letters(layout: Layout | str) -> list[str]:
    """The letters of the blocks in model order."""
    if isinstance(layout, str):
        known = {*LETTERS, *(c for c in layout if c.isalpha())}
        layout = parse_layout(layout, devices=1, letters="".join(sorted(known)))
    return [c for c in "".join(layout.stages) if c not in (EMBEDDING, LOSS)]


def _pattern(kinds: list[dict[str, str]], num_stages: int) -> list[str]:
    """The place of each block in the shortest pattern of kinds that stages repeat, "" where one is
    enough; PipelineError where blocks do not divide.
    """
    count = len(kinds)
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    if num_stages not in divisors:
        raise PipelineError(
            f"{count} blocks do not divide into {num_stages} stages of equal size; num_stages may "
            f"be one of {divisors}, or give {_LETTERS}"
        )
    own = count // num_stages
    lengths = (n for n in divisors if own % n == 0)
    length = next((n for n in lengths if kinds == kinds[:n] * (count // n)), own)
    return [str(i % length) if length > 1 else "" for i in range(count)]


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


def _mesh_specs(
    unit: Unit, rules: Mapping[str, SpecEntry], *, lead: int = 0, stack: bool = False
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

    def entry(names: SpecEntry) -> SpecEntry:
        if not isinstance(names, tuple):
            return names and rules.get(names, names)
        return tuple(axis for name in names for axis in names_of(rules.get(name, name))) or None

    def translated(spec: PartitionSpec | None, leaf: Leaf) -> PartitionSpec | None:
        if spec is None:
            return None
        drop = int(stack and len(spec) == leaf.ndim)
        return PartitionSpec(*(None,) * lead, *map(entry, tuple(spec)[drop:]))

    return jax.tree.map(translated, unit.specs, unit.params, is_leaf=is_spec)
