"""The arguments of a step, their faults and those of costs; and models under policies of
`jax.checkpoint`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import LossScale, Params, PyTree, Rng, described, is_key, without_numpy
from ..engine.costs import Costs
from ..errors import PipelineError, is_number, quoted
from ..table.schedule import Schedule
from .batch import Positioned
from .calls import Function, UserFunction
from .ledger import Ledger
from .model import Model


class StepArguments(NamedTuple):
    """The arguments of a step: arrays, or their shapes."""

    params: Params  # placed
    batch: PyTree  # leaves [rows, ...]
    rng: Rng = None  # the step's key
    state: PyTree = ()  # the stages' own, placed; or those of a cache
    scale: LossScale = None  # a factor of the loss


_SECONDS = "seconds"  # how the unit of costs begins that `measure` returns


def rematerialised(
    stages: Sequence[Function], remat: str | Callable[..., bool] | None
) -> tuple[Function, ...]:
    """The stages under `jax.checkpoint`; equal ones stay equal."""
    if remat is None:
        return tuple(stages)
    policy = None if isinstance(remat, str) else remat
    changed = {f: replace(f, call=_checkpointed(f.call, policy)) for f in stages}
    return tuple(changed[function] for function in stages)


def under_policies(model: Model, policies: Mapping[str, str]) -> Model:
    """The same model whose layers of these letters run under a policy of
    `jax.checkpoint_policies`, by its name.
    """
    if not isinstance(model.stages, Mapping):
        raise PipelineError(
            "policies are of the letters of layers, but the model is not given by letters"
        )
    changed = {
        letter: _checkpointed(model.stages[letter], getattr(jax.checkpoint_policies, name))
        for letter, name in policies.items()
    }
    return model.changed(stages={**model.stages, **changed})


def _checkpointed(call: UserFunction, policy: Callable[..., bool] | None) -> UserFunction:
    """The call under `jax.checkpoint`; rows that it appends leave it as results."""

    @functools.wraps(call)
    def run(*arguments: object, **keywords: Any) -> PyTree:
        ledger: Ledger | None = getattr(keywords.get("ctx"), "ledger", None)
        arguments = without_numpy(arguments)  # what is traced may be an index of them

        def traced() -> tuple[PyTree, dict[str, jax.Array], dict[str, jax.Array]]:
            if ledger is None:
                return call(*arguments, **keywords), {}, {}
            own = ledger.again()
            ctx = keywords["ctx"]._replace(ledger=own)
            return call(*arguments, **{**keywords, "ctx": ctx}), own.rows, own.buffers

        out, rows, buffers = jax.checkpoint(traced, policy=policy)()
        if ledger is not None:
            ledger.rows |= rows
            ledger.buffers |= buffers
        return out

    return run


def check_costs(costs: Costs | None, schedule: Schedule) -> None:
    """PipelineError for costs in anything but seconds, CostError for those of other stages."""
    if costs is None:
        return
    if not costs.unit.startswith(_SECONDS):
        raise PipelineError(
            "costs must be in seconds, since predicates and transfers are, but their unit is "
            f"{costs.unit!r}; take them from jaxpipe.measure, or say so: jaxpipe.Costs(..., "
            'unit="seconds, estimated")'
        )
    costs.for_stages(schedule.num_stages)


def key_faults(rng: Any) -> list[str]:
    """Faults of the step's key."""
    words, shape = getattr(rng, "dtype", None) == np.uint32, np.shape(rng)
    if rng is None or (is_key(rng) and not shape) or (words and len(shape) == 1):
        return []
    if is_key(rng):
        return [f"rng holds {shape} keys, but a step takes one; give one of them"]
    number = rng if isinstance(rng, int) else 0
    return [f"rng={quoted(rng)} is no key; write rng=jax.random.key({number})"]


def scale_faults(scale: Any) -> list[str]:
    """Faults of the factor of the loss."""
    is_array, kinds = hasattr(scale, "dtype"), (jnp.floating, jnp.integer)
    is_real = is_array and any(jnp.issubdtype(scale.dtype, kind) for kind in kinds)
    if scale is None or is_number(scale) or (is_real and not np.shape(scale)):
        return []
    what = described(scale) if is_array else quoted(scale)
    return [f"scale must be a number or a scalar array, a factor of the loss, not {what}"]


def donated_faults(given: StepArguments) -> list[str]:
    """Arguments whose arrays are gone: XLA may end the process where they are read."""
    names = {"state": "cache"} if isinstance(given.batch, Positioned) else {}
    return [
        f"{count} arrays of {names.get(name, name)} are deleted: a call that donates them "
        "(donate_argnums=) was given them before; go on with what that call returned, or do not "
        "donate them"
        for name, tree in given._asdict().items()
        if (count := sum(map(_is_deleted, jax.tree.leaves(tree))))
    ]


def _is_deleted(leaf: object) -> bool:
    is_traced = isinstance(leaf, jax.core.Tracer)
    return isinstance(leaf, jax.Array) and not is_traced and leaf.is_deleted()
