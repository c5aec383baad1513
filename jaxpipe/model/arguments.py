"""What `Pipeline` is given: read, and refused with every fault named."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..arrays import PyTree
from ..engine.costs import Costs
from ..errors import PipelineError, ScheduleError
from ..lowering.offload import Offload
from ..table.schedule import Schedule
from ..transforms.spread_first import spread_first
from ..transforms.spread_last import spread_last
from .functions import Function, Loss
from .vocabulary import VocabHead

_SECONDS = "seconds"  # how the unit of costs begins that `measure` returns


def rematerialised(
    stages: Sequence[Function], remat: str | Callable[..., bool] | None
) -> list[Function]:
    """The stages under `jax.checkpoint`; equal ones stay equal."""
    if remat is None:
        return list(stages)
    if remat != "full" and not callable(remat):
        raise PipelineError(f'remat must be None, "full" or a jax.checkpoint policy; got {remat!r}')
    policy = None if isinstance(remat, str) else remat
    changed = {
        function: function.under(lambda call: _checkpointed(call, policy)) for function in stages
    }
    return [changed[function] for function in stages]


def _checkpointed(
    call: Callable[..., Any], policy: Callable[..., bool] | None
) -> Callable[..., Any]:
    """The call under `jax.checkpoint`, which is given arrays alone: `training` stays a
    Python bool.
    """

    @functools.wraps(call)
    def run(*arguments: PyTree, **keywords: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten((arguments, keywords))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

        def on_arrays(arrays: dict[int, Any]) -> PyTree:
            given = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            arguments, keywords = jax.tree.unflatten(tree, given)
            return call(*arguments, **keywords)

        return jax.checkpoint(on_arrays, policy=policy)(arrays)

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
                f"but `{name}` is not spread; give "
                f"{name}=jaxpipe.spread(...), or take {kind} out with jaxpipe.remove_spread"
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


def ready_made(last: Function | None, loss: Loss, *, has_metrics: bool) -> Function | None:
    """A ready-made head returns what the loss contract asks for, with metrics where those are."""
    if last is None or not isinstance(last.call, VocabHead):
        return last
    return replace(last, call=last.call.returning(loss, has_metrics=has_metrics))


def loss_of(value: Any) -> Loss:
    """The loss contract; PipelineError for anything else."""
    if isinstance(value, Loss):
        return value
    known = " or ".join(f"Loss.{member.name}" for member in Loss)
    raise PipelineError(f"loss must be {known}; got {value!r}")


def accumulate_of(dtype: Any) -> Any:
    """The dtype, or None; PipelineError for anything else."""
    if dtype is None:
        return None
    try:
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return dtype
    except TypeError:
        pass
    raise PipelineError(
        f"accumulate_dtype must be a floating dtype, or None for the parameters' own; got {dtype!r}"
    )


def offload_of(value: Offload | str | None) -> Offload:
    """The choice; PipelineError for anything else."""
    try:
        return Offload.NOTHING if value is None else Offload(value)
    except ValueError:
        raise PipelineError(f'offload must be "residuals" or None; got {value!r}') from None


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


def check_kinds(schedule: Any, mesh: Any) -> None:
    """PipelineError for a schedule's name instead of a schedule, or a mesh's axis instead of a
    mesh.
    """
    faults = []
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


def as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    """One name, or several."""
    return (names,) if isinstance(names, str) else tuple(names)


def check_mesh(
    schedule: Schedule,
    mesh: Mesh,
    axis: str,
    data_axes: tuple[str, ...],
    fsdp: str | None,
    others: set[Any],
) -> None:
    """Every fault of the mesh for this schedule."""
    faults = []
    sizes = dict(mesh.shape)
    if axis not in sizes:
        faults.append(
            f"the mesh has no axis {axis!r}; its axes are {sizes}: write axis= one of them, or "
            f"name a mesh axis {axis!r}"
        )
    elif sizes[axis] != schedule.num_devices:
        faults.append(
            f"schedule {schedule.name!r} is for {schedule.num_devices} devices but mesh axis "
            f"{axis!r} has {sizes[axis]}; "
            f"build the schedule with devices={sizes[axis]}, or a mesh with "
            f"{schedule.num_devices} along {axis!r}"
        )
    for name in data_axes:
        if name not in sizes:
            faults.append(f"the mesh has no data axis {name!r}; its axes are {sizes}")
        if name == axis:
            faults.append(f"{name!r} is the pipe axis and cannot be a data axis too")
    if fsdp is not None and fsdp not in data_axes:
        faults.append(
            f"fsdp={fsdp!r} must be one of data_axes={data_axes}: its devices see different rows "
            "of the batch"
        )
    for name, size in sizes.items():
        if size > 1 and name not in {axis, *data_axes, *others}:
            faults.append(
                f"mesh axis {name!r} is in no argument, so its {size} devices would all do the "
                f"same work; write data_axes=({name!r},) to "
                "spread the rows of the batch over it, specs= to split parameters over it, or "
                f"replicated_axes=({name!r},) if that is meant"
            )
    if faults:
        raise PipelineError.listing("the mesh does not fit", faults)
