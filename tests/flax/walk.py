"""A whole pass through an adapted model's functions, one after the other, as a pipeline
calls them.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import jax

import jaxpipe as jp
from jaxpipe.model.keys import keys_of
from jaxpipe.table.kinds import By


class Key(NamedTuple):
    """The seed of a step's key."""

    seed: int


def through(
    model: Any,
    params: Any,
    batch: Any,
    *,
    key: Key | None = None,
    state: Any = None,
    training: bool = True,
) -> tuple[Any, Any]:
    """(loss, or x where the model has no ends, and the blocks' new state) of one microbatch."""
    rng = None if key is None else jax.random.key(key.seed)
    state = model.state if state is None else state
    return jax.jit(lambda *a: _through(model, *a, training))(params, batch, rng, state)


def _through(
    model: Any, params: Any, batch: Any, rng: Any, state: Any, training: bool
) -> tuple[Any, Any]:
    num_stages = jax.tree.leaves(params["stages"])[0].shape[0]

    def call(of: By, stage: int, *arguments: Any, **more: Any) -> Any:
        functions = {By.FIRST: model.model.first, By.LAST: model.model.last}
        function = functions.get(of, model.model.stages)
        keys = keys_of(of, rng, stage=stage, microbatch=0, sequence=0)
        have = {
            "ctx": jp.Context(stage, 0, **keys),
            "microbatch": batch,
            "shared": params.get("shared"),
            "training": training,
            **more,
        }
        named = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        ]
        return function(*arguments, **{name: have[name] for name in named})

    functions = model.model
    x = batch if functions.first is None else call(By.FIRST, 0, params["first"], batch)
    states = []
    for s in range(num_stages):
        own, rest = jax.tree.map(lambda leaf, s=s: leaf[s], (params["stages"], state))
        x = call(By.STAGE, s, own, x, state=rest)
        if jax.tree.leaves(state):
            x, new = x
            states.append(new)
    if functions.last is not None:
        x = call(By.LAST, num_stages - 1, params["last"], x, batch)
    return x, jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *states) if states else {}
