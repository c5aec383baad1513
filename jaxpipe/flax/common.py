"""What nnx and linen have in common: blocks put into stages, a stage that scans over them, and
functions with the right keywords.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..arrays import PyTree, summable
from ..errors import PipelineError
from ..layouts.layout import LETTERS, Layout, parse_layout

OFFERED = ("ctx", "microbatch", "shared", "training")


@dataclass(frozen=True)
class End:
    """What comes before the first block, or after the last one: modules, and a function of them.

    Args:
        modules: a module, or a tuple or dict of them.
        call: `call(modules, microbatch) -> x` before the blocks, `call(modules, x, microbatch) ->
            loss` after them; it may take `shared`, `ctx` and `training` by keyword.
        variables: linen only: the modules' variables, a tuple or dict of them likewise.
    """

    modules: Any
    call: Callable[..., Any]
    variables: Any = None


def check_ends(**ends: Any) -> None:
    """PipelineError for what is given as `first` or `last` and is no `End`."""
    faults = []
    for name, end in ends.items():
        if end is None or isinstance(end, End):
            continue
        takes = "module, microbatch" if name == "first" else "module, x, microbatch"
        given = "a function" if inspect.isfunction(end) else f"a {type(end).__name__}"
        first = "None" if inspect.isfunction(end) else "module"
        faults.append(
            f"{name}= is {given}; write {name}=End({first}, lambda {takes}: ...), the module and "
            "how it is called"
        )
    if faults:
        raise PipelineError("\n".join(faults), tuple(faults))


def letters_of(layout: Layout | str) -> str:
    """The letters of the blocks in model order."""
    if isinstance(layout, str):
        known = {*LETTERS, *(c for c in layout if c.isalpha())}
        layout = parse_layout(layout, devices=1, letters="".join(sorted(known)))
    return "".join(layout.stages).replace("E", "").replace("L", "")


def without_names(tree: PyTree) -> bool:
    """Whether no spec of a tree names an axis."""
    return not any(
        entry is not None
        for spec in jax.tree.leaves(tree, is_leaf=is_spec)
        if is_spec(spec)
        for entry in spec
    )


def is_spec(value: Any) -> bool:
    """A leaf of a tree of specs."""
    return isinstance(value, PartitionSpec)


def mesh_specs(
    tree: PyTree, rules: Mapping[str, Any] | None, *, lead: int = 0, drop: int = 0
) -> PyTree:
    """The specs that flax's metadata gives, for leaves with `lead` axes before their own (of which
    metadata names `drop` already).

    Args:
        tree: of PartitionSpecs, or None.
        rules: logical name -> mesh axis, a tuple of them, or None; names that are not in it are
            mesh axes.
        lead: leading axes that the pipeline adds.
        drop: leading entries of a spec of full length to leave out, those of an axis of blocks.
    """
    known = rules or {}

    def entry(names: Any) -> Any:
        if isinstance(names, tuple):
            return (
                tuple(found for name in names if (found := known.get(name, name)) is not None)
                or None
            )
        return known.get(names, names)

    def translate(spec: Any) -> Any:
        return (
            PartitionSpec(*(None,) * lead, *map(entry, tuple(spec)[drop:]))
            if is_spec(spec)
            else None
        )

    return jax.tree.map(translate, tree, is_leaf=is_spec)


def wanted(call: Callable[..., Any]) -> frozenset[str]:
    """Which of the keywords that a pipeline offers a function takes."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    named = {
        p.name
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
        or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty)
    }
    return frozenset(named & set(OFFERED))


def with_keywords(
    function: Callable[..., Any], positional: Sequence[str], keywords: frozenset[str], name: str
) -> Callable[..., Any]:
    """The function, with a signature that says which keywords it takes."""
    fixed = [inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in positional]
    named = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in sorted(keywords)]
    function.__signature__ = inspect.Signature([*fixed, *named])  # type: ignore[attr-defined]
    function.__name__ = name
    return function


def blocks_per_stage(count: int, num_stages: int) -> int:
    """How many blocks a stage has; PipelineError where they do not divide."""
    if count and num_stages > 0 and count % num_stages == 0:
        return count // num_stages
    fits = [s for s in range(1, count + 1) if count % s == 0]
    raise PipelineError(
        f"{count} blocks do not divide into {num_stages} stages of equal size; num_stages may be "
        f"one of {fits}"
    )


def period(kinds: Sequence[Any], per_stage: int, difference: Callable[[int, int], str]) -> int:
    """The length of the shortest pattern of kinds that every stage repeats; PipelineError where
    stages are unlike.

    Args:
        kinds: of each block, what must be equal for two blocks to run the same code.
        per_stage: blocks of a stage.
        difference: says what differs between two blocks, given their numbers.
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
        "same sequence of blocks, and with "
        f"{len(kinds) // per_stage} stages of {per_stage} block {i} stands where block {other} does"
    )


def stacked(trees: Sequence[PyTree], num_stages: int) -> PyTree:
    """Trees of one structure -> leaves [S, groups of a stage, ...]; ShapeDtypeStructs likewise."""

    def stack(*leaves: Any) -> Any:
        shape = (num_stages, len(leaves) // num_stages, *leaves[0].shape)
        if isinstance(leaves[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, leaves[0].dtype)
        return jnp.stack(leaves).reshape(shape)

    return jax.tree.map(stack, *trees)


def layered(tree: PyTree) -> PyTree:
    """Leaves [S, groups of a stage, ...] -> [groups, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def divided(tree: PyTree, num_stages: int) -> PyTree:
    """Leaves [groups, ...] -> [S, groups of a stage, ...]; ShapeDtypeStructs likewise."""

    def divide(leaf: Any) -> Any:
        shape = (num_stages, leaf.shape[0] // num_stages, *leaf.shape[1:])
        return (
            jax.ShapeDtypeStruct(shape, leaf.dtype)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else leaf.reshape(shape)
        )

    return jax.tree.map(divide, tree)


def key_of(ctx: Any, index: Any) -> Any:
    """A key for the layer with this number in the whole model, or None; the same however the layers
    are put into stages.
    """
    return (
        None
        if ctx is None or ctx.microbatch_rng is None
        else jax.random.fold_in(ctx.microbatch_rng, index)
    )


def no_key(what: str, error: Exception) -> PipelineError:
    """The error for random numbers without a key."""
    return PipelineError(
        f"{what} draws random numbers, but the step got no key; pass rng=jax.random.key(...) "
        f"({error})"
    )


def leaf_paths(tree: PyTree) -> set[str]:
    """Where the leaves of a tree are, "router/balance"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}


def with_loss(what: str, out: Any, *, stage_loss: bool) -> tuple[PyTree, Any]:
    """x and the loss that a block returned (None without `stage_loss`); PipelineError otherwise."""
    if not stage_loss:
        return out, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise PipelineError(
            f"{what} must return (x, loss), since stage_loss=True; it returns "
            f"{jax.tree.structure(out)}"
        )
    return out[0], summable(out[1])


def scanned(
    run: Callable[..., tuple[Any, Any, PyTree]],
    *,
    groups: int,
    wants: frozenset[str],
    random: bool,
    stateful: bool,
    stage_loss: bool,
) -> Callable[..., Any]:
    """A stage that runs its groups of blocks in order.

    Args:
        run: `run(params, state, x, key, given) -> (x, loss, new state)` of one group; `given` holds
            the keywords.
        groups: of each stage.
        wants: keywords that `run` takes.
        random: whether it needs a key for each group.
        stateful: whether the stage takes and returns state.
        stage_loss: whether the stage returns a loss, the sum of those of its groups.
    """

    def stage(params: PyTree, x: PyTree, **given: Any) -> Any:
        ctx = given.get("ctx")
        start = 0 if ctx is None else ctx.stage * groups

        def group(x: PyTree, row: Any) -> tuple[PyTree, tuple[Any, PyTree]]:
            index, own, state = row
            x, loss, new = run(own, state, x, key_of(ctx, start + index) if random else None, given)
            # flax may widen statistics.
            return x, (
                loss,
                jax.tree.map(lambda after, before: after.astype(before.dtype), new, state),
            )

        rows = (jnp.arange(groups), params, given["state"] if stateful else {})
        x, (losses, state) = jax.lax.scan(group, x, rows)
        found = (
            x,
            *([jnp.sum(losses, axis=0)] if stage_loss else []),
            *([state] if stateful else []),
        )
        return found if len(found) > 1 else x

    # `Pipeline` reads this: leaves are [S, layers, ...].
    stage.stacks_layers = True  # type: ignore[attr-defined]
    more = {"ctx"} if random else set()
    return with_keywords(
        stage, ("params", "x"), wants | more | ({"state"} if stateful else set()), "stage"
    )
