"""How a pipeline uses its mesh and its memory: `Sharding` and `Memory`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from ..arrays import PyTree
from ..errors import PipelineError
from ..lowering.slots import Offload
from ..table.schedule import Schedule
from .specs import axes_of


@dataclass(frozen=True)
class Sharding:
    """Which axes of the mesh a pipeline uses, and for what.

    Args:
        pipe: the name of the pipe axis.
        data: mesh axes over which the batch's rows are spread.  Gradients are reduced over them
            once a step.
        fsdp: a mesh axis, one of `data`, over which parameters, gradients and optimizer state are
            split too.  Parameters are gathered once a step.
        specs: PartitionSpecs of tensor parallelism, for axes left to the partitioner, without the
            axis of stages (or layers): a tree like the canonical parameters (or one for all of a
            list of stages).  One spec may stand for a subtree; a leaf without a spec is whole.
        local: axes of `data` that specs may name.  A parameter that is split over such an axis is
            never gathered: functions are given the device's own part and exchange what they need
            by themselves, as inside `shard_map` (experts, with an all-to-all).  Its gradient is
            summed over the other data axes alone.
        replicated: mesh axes along which parameters and rows are whole, as for a function that
            uses such an axis by itself (a sharding constraint, a `shard_map` inside a stage).  An
            axis of several devices that is in no argument is an error: they would all do the same
            work.
        outer: split the parameters of first and last, and the shared ones, over the pipe axis, as
            fsdp does over its axis.

    Example:
        >>> import jaxpipe as jp
        >>> jp.Sharding(data="data", fsdp="data").data
        ('data',)
    """

    pipe: str = "pipe"
    data: str | Sequence[str] = ()
    fsdp: str | None = None
    specs: Mapping[str, PyTree] | None = None
    replicated: str | Sequence[str] = ()
    outer: bool = False
    local: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("data", "replicated", "local"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes over which blocks do not communicate."""
        axes = (self.pipe, *self.data)
        return tuple(name for name in axes if name not in self.local)

    def check(self, schedule: Schedule, mesh: Mesh) -> None:
        """PipelineError lists every fault of the mesh for this schedule."""
        faults = []
        sizes, pipe, data = dict(mesh.shape), self.pipe, tuple(self.data)
        if pipe not in sizes:
            faults.append(
                f"the mesh has no axis {pipe!r}; its axes are {sizes}: write Sharding(pipe=) one "
                f"of them, or name a mesh axis {pipe!r}"
            )
        elif sizes[pipe] != schedule.num_devices:
            faults.append(
                f"schedule {schedule.name!r} is for {schedule.num_devices} devices but mesh axis "
                f"{pipe!r} has {sizes[pipe]}; build the schedule with devices={sizes[pipe]}, or a "
                f"mesh with {schedule.num_devices} along {pipe!r}"
            )
        for name in data:
            if name not in sizes:
                faults.append(f"the mesh has no data axis {name!r}; its axes are {sizes}")
            if name == pipe:
                faults.append(f"{name!r} is the pipe axis and cannot be a data axis too")
        if self.fsdp is not None and self.fsdp not in data:
            faults.append(
                f"fsdp={self.fsdp!r} must be one of data={data}: its devices see different rows "
                "of the batch"
            )
        named = axes_of(self.specs)
        for name in self.local:
            if name not in data:
                faults.append(
                    f"local={name!r} must be one of data={data}: its devices see different rows "
                    "of the batch"
                )
            elif name not in named and sizes.get(name, 1) > 1:
                faults.append(
                    f"local={name!r}, but no spec splits a parameter over {name!r}; name it in "
                    "specs=, or take it out of local="
                )
        used = {pipe, *data, *self.replicated, *named}
        faults += [
            f"mesh axis {name!r} is in no argument, so its {size} devices would all do the same "
            f"work; write Sharding(data={name!r}) to spread the rows of the batch over it, specs= "
            f"to split parameters over it, or replicated={name!r} if that is meant"
            for name, size in sizes.items()
            if size > 1 and name not in used
        ]
        if faults:
            raise PipelineError.listing("the mesh does not fit", faults)


@dataclass(frozen=True)
class Memory:
    """How a pipeline trades time and precision for memory.

    Args:
        remat: "full", or a `jax.checkpoint` policy: what the backward of a stage recomputes.
        offload: "residuals" keeps in the host's memory what forwards leave for backwards that are
            some ticks later.  It is fetched a tick ahead, at the same time as compute, so that a
            device holds what the next ticks need.
        accumulate: least dtype of gradient accumulators and of the gradients returned; None for
            the parameters' own.

    Raises:
        PipelineError: a value is none of these; every fault is listed.

    Example:
        >>> import jaxpipe as jp
        >>> jp.Memory(remat="full", offload="residuals").offload.value
        'residuals'
    """

    remat: str | Callable[..., bool] | None = None
    offload: Offload | str | None = None
    accumulate: Any = jnp.float32

    def __post_init__(self) -> None:
        faults = []
        if self.remat is not None and self.remat != "full" and not callable(self.remat):
            faults.append(
                f'remat must be None, "full" or a jax.checkpoint policy; got {self.remat!r}'
            )
        try:
            offload = Offload.NOTHING if self.offload is None else Offload(self.offload)
            object.__setattr__(self, "offload", offload)
        except ValueError:
            faults.append(f'offload must be "residuals" or None; got {self.offload!r}')
        if not _is_floating(self.accumulate):
            faults.append(
                "accumulate must be a floating dtype, or None for the parameters' own; got "
                f"{self.accumulate!r}"
            )
        if faults:
            raise PipelineError("\n".join(faults), tuple(faults))


def _is_floating(dtype: Any) -> bool:
    """Whether it is None or a floating dtype."""
    if dtype is None:
        return True
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
