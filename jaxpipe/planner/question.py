"""What `plan` is asked, checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import PlanError, quoted
from ..layouts.layout import parse_layout
from ..lowering.target import RunsOn, Target
from ..table.limits import is_number, is_whole
from ..table.typed import plain
from .layer_cost import LayerCost, Remat

# Units that are mixed up differ by thousands: milliseconds for seconds, gigabytes for bytes.
_REMATS = tuple(kind.value for kind in Remat)
_LEAST_MEMORY, _MOST_SECONDS, _UNLIKE = 1e6, 3600.0, 1e5


class _Kind(NamedTuple):
    """Which values an argument takes, and what to write."""

    accepts: Callable[[Any], bool]
    wants: str


def _is_count(value: object) -> bool:
    return is_whole(value) and value >= 1


def _are(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a sequence of values that are accepted; NumPy's arrays of no dimension
    only look like one.
    """

    def are(value: Any) -> bool:
        listed = (
            isinstance(value, Collection)
            and not isinstance(value, str | bytes | Mapping)
            and getattr(value, "ndim", 1) == 1
        )
        return listed and all(map(accepts, value))

    return are


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_hop(value: object) -> bool:
    return is_number(value) and 0 <= value < float("inf")


def _is_function(value: object) -> bool:
    return value is None or callable(value)


_KINDS = {
    "model": _Kind(
        _is_text, "a text with a letter for each layer, such as 'Et*80,L', or a Model of letters"
    ),
    "costs": _Kind(lambda v: isinstance(v, Mapping), "a mapping, {'t': jaxpipe.LayerCost(...)}"),
    "microbatches": _Kind(
        lambda v: _is_count(v) or _are(_is_count)(v),
        "a whole number of at least 1, or a few of them",
    ),
    "transfer": _Kind(
        lambda v: _is_hop(v) or (isinstance(v, Mapping) and _are(_is_hop)(list(v.values()))),
        "seconds, 0 or more",
    ),
    "schedules": _Kind(
        lambda v: v is None or _is_text(v) or _are(_is_text)(v),
        "names of schedules, such as ('1f1b', 'zb_h1')",
    ),
    "chunks": _Kind(_are(_is_count), "a few whole numbers of at least 1, such as (1, 2)"),
    "remat": _Kind(_are(lambda v: v is None or _is_text(v)), "some of (None, 'full', 'stages')"),
    "search": _Kind(_is_hop, "seconds, 0 or more"),
    "seed": _Kind(lambda v: is_whole(v) and 0 <= v < 2**31, "a whole number of at least 0"),
    "most": _Kind(_is_count, "a whole number of at least 1"),
    "progress": _Kind(_is_function, "a function of (done, of), or None"),
    "traced": _Kind(
        _is_function, "a function of a plan, as jaxpipe.measuring.traced_memory makes it, or None"
    ),
    "axis": _Kind(_is_text, "the name of a mesh axis"),
    "data_axes": _Kind(lambda v: _is_text(v) or _are(_is_text)(v), "names of mesh axes"),
}


def refuse(given: Mapping[str, Any]) -> None:
    """PlanError that lists the arguments of `plan` of another kind than they must be."""
    wrong = {name: value for name, value in given.items() if not _KINDS[name].accepts(value)}
    if wrong:
        faults = [
            f"{name} must be {_KINDS[name].wants}, not {quoted(value)}"
            for name, value in wrong.items()
        ]
        raise PlanError.listing("there is no plan for this", faults)


class Axes(NamedTuple):
    """Of the mesh, as `Pipeline` takes them."""

    pipe: str
    data: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """The arguments of `plan`, valid ones."""

    layers: str
    costs: Mapping[str, LayerCost]
    devices: int
    microbatches: int
    memory: float | None
    transfer: float
    schedules: tuple[str, ...]
    chunks: tuple[int, ...]
    remat: tuple[Remat, ...]
    axes: Axes
    target: Target
    one_of_many: bool = False  # other numbers of microbatches are asked for too

    @classmethod
    def of(
        cls,
        layers: str,
        costs: Mapping[str, LayerCost],
        devices: int,
        microbatches: int,
        memory: float | None,
        transfer: float,
        schedules: Sequence[str],
        chunks: Sequence[int],
        remat: Sequence[str | None],
        mesh: Any,
        axes: Axes,
    ) -> Question:
        """PlanError that lists everything that is wrong."""
        faults = (
            []
            if _is_count(devices)
            else [f"devices must be a whole number of at least 1, not {quoted(devices)}"]
        )
        faults += [
            f"costs has a key {quoted(c)}; its keys are the letters of layers"
            for c in costs
            if not _is_text(c)
        ]
        faults += [
            f"remat holds {quoted(r)}; it is None, 'full' or 'stages'"
            for r in remat
            if r not in _REMATS
        ]
        names = [schedules] if isinstance(schedules, str) else list(schedules)
        if memory is not None and not (is_number(memory) and memory > 0):
            faults.append(f"memory must be bytes that a device has, or None, not {quoted(memory)}")
        faults += _mesh_faults(mesh, axes, devices)
        faults += [
            f"costs[{quoted(c)}] must be a jaxpipe.LayerCost, not {quoted(v)}"
            for c, v in costs.items()
            if not isinstance(v, LayerCost)
        ]
        if faults:
            raise PlanError.listing("there is no plan for this", faults)
        memory, transfer = None if memory is None else plain(memory), plain(transfer)
        model = parse_layout(layers, devices=1, letters="".join(sorted({*"EtmL", *costs})))
        letters = model.layers
        if model.num_stages > 1:
            faults.append(
                f"layers={quoted(layers)} already holds '|'; write the layers alone, e.g. 'Et*80,L'"
            )
        missing = sorted(set(letters) - set(costs))
        faults += [
            f"costs are missing for layer {c!r}; give costs[{c!r}] = jaxpipe.LayerCost(...)"
            for c in missing
        ]
        if devices * min(chunks, default=1) > len(letters):
            faults.append(
                f"{len(letters)} layers are too few for {devices} devices of {min(chunks)} stages; "
                f"use at most {len(letters) // min(chunks)} devices"
            )
        if not missing:
            faults += _unit_faults({c: costs[c] for c in letters}, memory, transfer)
        if faults:
            raise PlanError.listing("there is no plan for this", faults)
        kinds = tuple(dict.fromkeys(Remat(r) for r in remat))
        stages = tuple(dict.fromkeys(chunks))
        target = _target(mesh, axes)
        return cls(
            letters,
            costs,
            devices,
            microbatches,
            memory,
            transfer,
            tuple(names),
            stages,
            kinds,
            axes,
            target,
        )


def questions(
    layers: str,
    costs: Mapping[Any, Any],
    devices: int,
    microbatches: int | Sequence[int],
    memory: float | None,
    transfer: float | Mapping[int, float],
    *rest: Any,
) -> tuple[Question, ...]:
    """One for each number of microbatches; PlanError where costs are not given for each."""
    if is_whole(microbatches):
        if any(is_whole(key) for key in costs):
            raise PlanError(
                "costs are given by number of microbatches, but microbatches is one number; "
                f"write microbatches={tuple(costs)} or give the costs of that number alone"
            )
        if isinstance(transfer, Mapping):
            raise PlanError(
                "transfer is given by number of microbatches, but microbatches is one number; "
                "give its seconds alone"
            )
        return (Question.of(layers, costs, devices, microbatches, memory, transfer, *rest),)
    assert not isinstance(microbatches, int)
    counts = tuple(dict.fromkeys(microbatches))
    if not counts:
        raise PlanError(
            "microbatches is empty; give one number or a few to choose among, such as (8, 16)"
        )
    missing = [count for count in counts if not isinstance(costs.get(count), Mapping)]
    if missing:
        raise PlanError(
            f"costs are missing for {', '.join(map(str, missing))} microbatches: a microbatch of "
            "another size costs something else; give "
            "costs={8: {...}, 16: {...}}, each measured for the microbatch of that number"
        )
    hops = {
        count: transfer.get(count, 0.0) if isinstance(transfer, Mapping) else transfer
        for count in counts
    }
    found = (
        Question.of(layers, costs[count], devices, count, memory, hops[count], *rest)
        for count in counts
    )
    return tuple(replace(question, one_of_many=len(counts) > 1) for question in found)


def _target(mesh: Any, axes: Axes) -> Target:
    if mesh is None:
        return Target()
    if isinstance(mesh, RunsOn):
        return Target(mesh)
    return mesh if isinstance(mesh, Target) else Target.of(mesh, (axes.pipe, *axes.data))


def _mesh_faults(mesh: Any, axes: Axes, devices: int) -> list[str]:
    """What a plan's `Pipeline` would refuse too."""
    if mesh is None or isinstance(mesh, RunsOn | Target):
        return []
    if not (hasattr(mesh, "devices") and hasattr(mesh, "shape")):
        return [f"mesh must be a jax.sharding.Mesh, or None for NVIDIA GPUs, not {quoted(mesh)}"]
    sizes = dict(mesh.shape)
    faults = [
        f"the mesh has no data axis {name!r}; its axes are {sizes}"
        for name in axes.data
        if name not in sizes
    ]
    if axes.pipe not in sizes:
        faults.append(
            f"the mesh has no axis {axes.pipe!r}; its axes are {sizes}: write axis= one of them"
        )
    elif sizes[axes.pipe] != devices:
        faults.append(
            f"devices is {devices}, but mesh axis {axes.pipe!r} has {sizes[axes.pipe]}; write "
            f"devices={sizes[axes.pipe]}"
        )
    return faults


def _unit_faults(
    costs: Mapping[str, LayerCost], memory: float | None, transfer: float
) -> list[str]:
    """Numbers that are thousands of times too large or small beside the others."""
    faults = []
    if memory is not None and memory < _LEAST_MEMORY:
        faults.append(f"memory={memory:g} is {memory:g} bytes; for gigabytes write {memory:g}e9")
    seconds = {c: cost.forward + cost.backward_seconds for c, cost in costs.items()}
    long = [c for c, s in seconds.items() if s > _MOST_SECONDS]
    faults += [
        f"layer {c!r} takes {seconds[c]:g} seconds a microbatch; times are in seconds: possible "
        "typo"
        for c in long
    ]
    timed = {c: s for c, s in seconds.items() if s > 0 and c not in ("E", "L")}
    if timed and max(timed.values()) > _UNLIKE * min(timed.values()):
        slow, fast = max(timed, key=lambda c: timed[c]), min(timed, key=lambda c: timed[c])
        faults.append(
            f"layer {slow!r} takes {timed[slow]:g} s and layer {fast!r} {timed[fast]:g} s; are "
            "both in seconds? (milliseconds are 1e-3)"
        )
    if timed and transfer > 1000 * max(timed.values()):
        faults.append(
            f"transfer={transfer:g} s is over a thousand times a layer's {max(timed.values()):g} "
            "s; are both in seconds?"
        )
    for letter, cost in costs.items():
        small = [
            name for name in ("parameters", "residuals", "boundary") if 0 < getattr(cost, name) < 1
        ]
        faults += [
            f"layer {letter!r}: {name}={getattr(cost, name):g} is less than a byte; sizes are in "
            "bytes"
            for name in small
        ]
    return faults
