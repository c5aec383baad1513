"""Refuse stages whose state would need a gradient through it to an earlier microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.extend import core

from ..arrays import Leaves, PyTree
from ..errors import PipelineError
from ..jaxprs.cut import drop_dead
from ..jaxprs.equations import Atom
from ..jaxprs.flatten import flatten
from ..model.functions import StageOutput
from .code import inexact
from .trace import chosen, filled


def check_state_gradient(
    name: str,
    call: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, StageOutput]],
    params: PyTree,
    x: PyTree,
    extra: dict[str, PyTree],
    trained: Sequence[bool],
) -> None:
    """PipelineError where `call(params, x, extra)` depends on state that parameters or x determined
    in an earlier microbatch.

    Only dependences with a gradient count.  `trained` says whether each parameter has one.
    """
    state = jax.tree_util.tree_leaves_with_path(extra["state"])
    count = sum(inexact(leaf) for _, leaf in state)
    if not count:
        return
    jaxpr, moved = _tangents(call, params, x, extra, trained)
    results, after = jaxpr.outvars[:-count], jaxpr.outvars[-count:]

    def needed_by(outputs: Sequence[Atom]) -> tuple[list[bool], bool]:
        """The state that these outputs depend on, and whether they depend on parameters or x."""
        reads = drop_dead(jaxpr.replace(outvars=list(outputs)))[1][-moved:]
        return list(reads[-count:]), any(reads[:-count])

    read = needed_by(results)[0]
    while True:
        before, _ = needed_by([v for v, r in zip(after, read, strict=True) if r])
        grown = [a or b for a, b in zip(read, before, strict=True)]
        if grown == read:
            break
        read = grown
    names = ["state" + jax.tree_util.keystr(path) for path, leaf in state if inexact(leaf)]
    lost = [n for n, v, r in zip(names, after, read, strict=True) if r and needed_by([v])[1]]
    if lost:
        raise PipelineError(
            f"`{name}` would lose a gradient: it makes {', '.join(lost)} of its parameters or of "
            "x, "
            "and what it returns for later microbatches depends on that, but no gradient goes "
            "through "
            "the state back to an earlier microbatch. Where that gradient is not wanted, write "
            "state = jax.lax.stop_gradient(state) at the top of the stage; for running "
            "statistics, let "
            "x depend on the state only where training=False"
        )


def _tangents(
    call: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, StageOutput]],
    params: PyTree,
    x: PyTree,
    extra: dict[str, PyTree],
    trained: Sequence[bool],
) -> tuple[core.Jaxpr, int]:
    """The derivative, and how many tangents of trained parameters, x and state are its last inputs.

    Its outputs are the tangents of the stage's results.  The tangents of the new state are last.
    """
    parts = params, x, extra["state"]
    leaves, tree = jax.tree.flatten(parts)
    moves = [*trained, *(inexact(leaf) for leaf in leaves[len(trained) :])]
    moving = chosen(leaves, moves)

    def tangents(leaves: Leaves, extra: dict[str, PyTree], directions: Leaves) -> Leaves:
        def returned(values: Leaves) -> Leaves:
            params, x, state = jax.tree.unflatten(tree, filled(values, leaves, moves))
            y, more = call(params, x, {**extra, "state": state})
            return [leaf for leaf in jax.tree.leaves((y, more.loss, more.state)) if inexact(leaf)]

        _, derivative = jax.linearize(returned, chosen(leaves, moves))
        found: Leaves = derivative(directions)
        return found

    flat = flatten(jax.make_jaxpr(tangents)(leaves, extra, moving)).jaxpr
    return flat.replace(constvars=[], invars=[*flat.constvars, *flat.invars]), len(moving)
