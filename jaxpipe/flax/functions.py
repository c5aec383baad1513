"""The functions of a model of units: `first`, `last`, a layer, and a stage of several blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import PyTree, summable
from ..errors import PipelineError
from .common import Call, Unit


def tree_at(tree: PyTree, key: str) -> PyTree:
    """The tree of a kind of block: one of several by key, or the only one."""
    return tree.get(key, {}) if key else tree


def _call(
    unit: Unit,
    arguments: tuple[PyTree, ...],
    number: Any,
    shared: Unit | None,
    given: Mapping[str, Any],
) -> Call:
    """The call of the unit with this number in the whole model: its key, which is the same however
    blocks are put into stages, and the user's keywords, with shared parameters as modules.
    """
    ctx, training = given.get("ctx"), given.get("training", True)
    common = ctx.microbatch_rng if unit.random and ctx is not None else None
    keywords = {name: given[name] for name in unit.wants}
    if "shared" in keywords and shared is not None:
        keywords["shared"] = shared.build(keywords["shared"], shared.state, None, training=training)
    key = None if common is None else jax.random.fold_in(common, number)
    return Call(arguments, key, keywords, training)


def _taken(unit: Unit) -> frozenset[str]:
    """The keywords that a function of a unit takes."""
    return unit.wants | {"training"} | ({"ctx"} if unit.random else set())


def end_function(
    unit: Unit, name: str, takes: tuple[str, ...], number: int, shared: Unit | None
) -> Callable[..., Any]:
    """`first` or `last`; its variables that are no parameters are constants."""

    def function(params: PyTree, *arguments: Any, **given: Any) -> Any:
        return unit.run(params, unit.state, _call(unit, arguments, number, shared, given))[0]

    return _with_keywords(function, ("params", *takes), _taken(unit) - {"microbatch"}, name)


def _run_block(
    unit: Unit,
    shared: Unit | None,
    params: PyTree,
    state: PyTree,
    x: PyTree,
    number: Any,
    given: Mapping[str, Any],
    *,
    stage_loss: bool,
) -> tuple[PyTree, Any, PyTree]:
    """x, the loss (None without `stage_loss`) and the state after a block."""
    out, new = unit.run(params, state, _call(unit, (x,), number, shared, given))
    return *_with_loss(unit.name, out, stage_loss=stage_loss), new


def layer_function(
    unit: Unit, letter: str, shared: Unit | None, stage_loss: bool
) -> Callable[..., Any]:
    """The function of a layer."""

    def layer(params: PyTree, x: PyTree, **given: Any) -> PyTree:
        number = given["ctx"].layer if unit.random else 0
        x, loss, _ = _run_block(unit, shared, params, {}, x, number, given, stage_loss=stage_loss)
        return (x, loss) if stage_loss else x

    return _with_keywords(layer, ("params", "x"), _taken(unit), f"layer_{letter}")


def stage_function(
    units: Mapping[str, Unit],
    groups: int,
    shared: Unit | None,
    *,
    stateful: bool,
    stage_loss: bool,
) -> Callable[..., Any]:
    """The function of a stage: a scan over groups of blocks, each of which has one of every unit
    in order.
    """

    def stage(params: PyTree, x: PyTree, **given: Any) -> Any:
        ctx = given.get("ctx")
        start = 0 if ctx is None else ctx.stage * groups

        def group(x: PyTree, row: Any) -> tuple[PyTree, tuple[Any, PyTree]]:
            index, own, state = row
            losses, after = [], {}
            for i, (key, unit) in enumerate(units.items()):
                number = (start + index) * len(units) + i
                own_state = tree_at(state, key)
                x, loss, after[key] = _run_block(
                    unit,
                    shared,
                    tree_at(own, key),
                    own_state,
                    x,
                    number,
                    given,
                    stage_loss=stage_loss,
                )
                losses.append(loss)
            new = after.get("", after) if stateful else {}
            # flax may widen statistics.
            new = jax.tree.map(lambda after, before: after.astype(before.dtype), new, state)
            return x, (sum(losses) if stage_loss else None, new)

        rows = (jnp.arange(groups), params, given["state"] if stateful else {})
        x, (losses, state) = jax.lax.scan(group, x, rows)
        more = [jnp.sum(losses, axis=0)] if stage_loss else []
        more += [state] if stateful else []
        return (x, *more) if more else x

    # `Pipeline` reads this: leaves are [S, layers, ...].
    stage.stacks_layers = True  # type: ignore[attr-defined]
    keywords = frozenset().union(*map(_taken, units.values()), {"state"} if stateful else set())
    return _with_keywords(stage, ("params", "x"), keywords, "stage")


def _with_keywords(
    function: Callable[..., Any], positional: Sequence[str], keywords: frozenset[str], name: str
) -> Callable[..., Any]:
    """The function, with a signature that says which keywords it takes."""
    fixed = [inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in positional]
    named = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in sorted(keywords)]
    function.__signature__ = inspect.Signature([*fixed, *named])  # type: ignore[attr-defined]
    function.__name__ = name
    return function


def _with_loss(what: str, out: Any, *, stage_loss: bool) -> tuple[PyTree, Any]:
    """x and the loss that a block returned (None without `stage_loss`); PipelineError otherwise."""
    if not stage_loss:
        return out, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise PipelineError(
            f"{what} must return (x, loss), since stage_loss=True; it returns "
            f"{jax.tree.structure(out)}"
        )
    return out[0], summable(out[1])
