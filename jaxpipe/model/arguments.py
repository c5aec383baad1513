"""Arguments of `Pipeline`: read, and refused with every fault named."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ..arrays import PyTree
from ..engine.costs import Costs
from ..errors import PipelineError, ScheduleError
from ..table.schedule import Schedule
from ..transforms.spread import spread_first, spread_last
from .functions import Function
from .model import Model
from .settings import Memory, Sharding
from .slices import Ledger

_SECONDS = "seconds"  # how the unit of costs begins that `measure` returns


def rematerialised(
    stages: Sequence[Function], remat: str | Callable[..., bool] | None
) -> list[Function]:
    """The stages under `jax.checkpoint`; equal ones stay equal."""
    if remat is None:
        return list(stages)
    policy = None if isinstance(remat, str) else remat
    changed = {
        function: function.under(lambda call: _checkpointed(call, policy)) for function in stages
    }
    return [changed[function] for function in stages]


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
    found = copy.copy(model)
    object.__setattr__(found, "stages", {**model.stages, **changed})
    return found


def _checkpointed(
    call: Callable[..., Any], policy: Callable[..., bool] | None
) -> Callable[..., Any]:
    """The call under `jax.checkpoint` of arrays alone: `training` stays a Python bool."""

    @functools.wraps(call)
    def run(*arguments: PyTree, **keywords: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten((arguments, keywords))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
        ledger: Ledger | None = getattr(keywords.get("ctx"), "ledger", None)

        def on_arrays(arrays: dict[int, Any]) -> tuple[PyTree, ...]:
            given = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            arguments, keywords = jax.tree.unflatten(tree, given)
            if ledger is None:
                return call(*arguments, **keywords), {}, {}
            own = ledger.again()
            keywords["ctx"] = keywords["ctx"]._replace(ledger=own)
            return call(*arguments, **keywords), own.rows, own.buffers

        out, rows, buffers = jax.checkpoint(on_arrays, policy=policy)(arrays)
        if ledger is not None:
            ledger.rows |= rows
            ledger.buffers |= buffers
        return out

    return run


def with_shares(
    schedule: Schedule, costs: Costs | None, *, first: Function | None, last: Function | None
) -> Schedule:
    """The schedule with L exactly where `last` is spread, and E and G where `first` is;
    PipelineError where it cannot be.

    They are placed by `costs` where these say how long a share takes.
    """
    table = schedule.encoded
    spreads_first, spreads_last = (end is not None and end.spread for end in (first, last))
    ends = (
        ("last", "L", spreads_last, table.spreads_last, spread_last),
        ("first", "E", spreads_first, table.spreads_first, spread_first),
    )
    for name, kind, spread, there, _ in ends:
        if there and not spread:
            raise PipelineError(
                f"schedule {schedule.name!r} has {kind}, a share of `{name}` on every device, "
                f"but `{name}` is not spread; give {name}=jaxpipe.spread(...), or take {kind} out "
                "with jaxpipe.transforms.remove_spread"
            )
    for name, _, spread, there, put in ends:
        if there or not spread:
            continue
        try:
            schedule = put(
                schedule,
                costs=costs if costs is not None and getattr(costs, name) is not None else None,
            )
        except ScheduleError as error:
            raise PipelineError(
                f"`{name}` cannot be spread with schedule {schedule.name!r}: {error}"
            ) from error
    return schedule


def costs_of(value: Costs | None, schedule: Schedule) -> Costs | None:
    """Costs in seconds, for the schedule's stages; PipelineError for anything else."""
    if value is None:
        return None
    if not isinstance(value, Costs):
        raise PipelineError(
            f"costs must be jaxpipe.Costs, as jaxpipe.measure returns them; got {value!r}"
        )
    if not value.unit.startswith(_SECONDS):
        raise PipelineError(
            "costs must be in seconds, since predicates and transfers are, but their unit is "
            f"{value.unit!r}; "
            'take them from jaxpipe.measure, or say so: jaxpipe.Costs(..., unit="seconds, '
            'estimated")'
        )
    value.for_stages(schedule.num_stages)
    return value


def check_kinds(model: Any, schedule: Any, mesh: Any, sharding: Any, memory: Any) -> None:
    """PipelineError for arguments of another kind, such as a schedule's name instead of a schedule;
    every fault is listed.
    """
    faults = []
    if not isinstance(model, Model):
        faults.append(
            f"model must be a jaxpipe.Model, not {model!r}; write jaxpipe.Model(stage, first=..., "
            "last=...)"
        )
    for name, value, kind in (("sharding", sharding, Sharding), ("memory", memory, Memory)):
        if not isinstance(value, kind):
            faults.append(f"{name} must be a jaxpipe.{kind.__name__}, not {value!r}")
    if not isinstance(schedule, Schedule):
        name = schedule if isinstance(schedule, str) else "1f1b"
        faults.append(
            f"schedule must be a Schedule, not {schedule!r}; write "
            f"jaxpipe.schedules.build({name!r}, devices=P, microbatches=M)"
        )
    if not isinstance(mesh, Mesh):
        faults.append(
            f'mesh must be a jax.sharding.Mesh, not {mesh!r}; write jax.make_mesh((P,), ("pipe",))'
        )
    if faults:
        raise PipelineError("\n".join(faults), tuple(faults))
