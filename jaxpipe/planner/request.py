"""The arguments of `plan`, checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import PlanError, quoted
from ..layouts.layout import parse_layout
from ..lowering.target import RunsOn, Target
from ..table.limits import is_number, is_whole
from ..table.typed import plain
from .layer_cost import FIRST, LAST, LayerCost, Remat

# Schedules that are tried where none are named, the more promising ones first.  `dualpipe` keeps
# every stage's parameters twice.
SCHEDULES = (
    "1f1b",
    "zb_h1",
    "zbv",
    "interleaved_1f1b",
    "interleaved_zb",
    "zb_h2",
    "v_half",
    "v_min",
    "gpipe",
    "auto",
)
# Of the arguments of `plan` that need not be given.
DEFAULTS: Mapping[str, Any] = {
    "memory": None,
    "transfer": 0.0,
    "schedules": None,
    "chunks": (1, 2, 4),
    "slices": (1,),
    "remat": None,
    "offload": (None, "residuals"),
    "host_bandwidth": 2.5e10,
    "search": 0,
    "seed": 0,
    "most": 8,
    "within": None,
    "progress": None,
    "traced": None,
    "mesh": None,
    "axis": "pipe",
    "data_axes": (),
}
_NO_PLAN = "there is no plan for this"
# Units that are mixed up differ by thousands: milliseconds for seconds, gigabytes for bytes.
_LEAST_MEMORY, _MOST_SECONDS, _UNLIKE = 1e6, 3600.0, 1e5


@dataclass(frozen=True)
class Request:
    """Valid arguments of `plan`, for one number of microbatches."""

    layers: str
    costs: Mapping[str, LayerCost]
    devices: int
    microbatches: int
    memory: float | None
    transfer: float
    schedules: tuple[str, ...]
    chunks: tuple[int, ...]
    remat: tuple[Remat, ...]
    policies: tuple[str, ...]  # names of `jax.checkpoint` policies that may be chosen
    offloads: bool  # residuals may be kept in the host's memory
    host_bandwidth: float
    axis: str
    data_axes: tuple[str, ...]
    target: Target
    one_of_many: bool  # there are requests for other numbers of microbatches
    reduction: float = 0.0  # seconds in which replicas sum gradients, outside the table
    gathered: float = 0.0  # devices that split parameters and accumulators (fsdp)
    by_name: bool = False  # only tables that a name builds, for programs that take a name
    label: tuple[str, ...] = ()  # the shape of its mesh
    mesh: Mapping[str, int] = field(default_factory=dict)  # where the mesh was chosen
    slices: int = 1  # of a sequence; costs and microbatches are of slices


def requests(arguments: Mapping[str, Any]) -> tuple[Request, ...]:
    """Requests from the arguments of `plan` by name, one for each number of microbatches; PlanError
    lists all faults.
    """
    arguments = {**DEFAULTS, **arguments}
    wrong = [name for name, (accepts, _) in _ACCEPTED.items() if not accepts(arguments[name])]
    _refuse(
        *(f"{name} must be {_ACCEPTED[name][1]}, not {quoted(arguments[name])}" for name in wrong)
    )
    costs, microbatches, transfer = (arguments[n] for n in ("costs", "microbatches", "transfer"))
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
        return tuple(_sliced(arguments, costs, microbatches, transfer, one_of_many=False))
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
    hops = transfer if isinstance(transfer, Mapping) else dict.fromkeys(counts, transfer)
    if without := [count for count in counts if count not in hops]:
        raise PlanError(
            f"transfer is missing for {', '.join(map(str, without))} microbatches; give the "
            "seconds of a hop for each number, or one number for all"
        )
    return tuple(
        request
        for m in counts
        for request in _sliced(arguments, costs[m], m, hops[m], one_of_many=len(counts) > 1)
    )


def _sliced(
    arguments: Mapping[str, Any],
    costs: Mapping[str, Any],
    microbatches: int,
    transfer: float,
    *,
    one_of_many: bool,
) -> Iterator[Request]:
    """A request for each number of slices of a sequence; without slices that is a microbatch."""
    for slices in dict.fromkeys(arguments["slices"]):
        own = {
            c: cost.sliced(slices) if isinstance(cost, LayerCost) else cost
            for c, cost in costs.items()
        }
        found = _request(
            arguments,
            costs if slices == 1 else own,
            microbatches * slices,
            transfer / slices,
            one_of_many=one_of_many,
        )
        yield replace(found, slices=slices)


def _request(
    arguments: Mapping[str, Any],
    costs: Mapping[str, Any],
    microbatches: int,
    transfer: float,
    *,
    one_of_many: bool,
) -> Request:
    devices, mesh, chunks, remat = (arguments[n] for n in ("devices", "mesh", "chunks", "remat"))
    axis, data_axes = arguments["axis"], _names(arguments["data_axes"])
    memory = None if arguments["memory"] is None else plain(arguments["memory"])
    known = {name for c in costs.values() if isinstance(c, LayerCost) for name in c.policies}
    if remat is None:
        # Without a limit of memory, stages recompute nothing to make room.
        remat = (None, *sorted(known), "full", *(() if memory is None else ("stages",)))
    offload = arguments["offload"] if memory is not None else ()
    _refuse(
        *(
            f"costs has a key {quoted(c)}; its keys are the letters of layers"
            for c in costs
            if not isinstance(c, str)
        ),
        *(
            f"remat holds {quoted(r)}; it is None, 'full', 'stages' or a policy of which some "
            f"layer has costs ({', '.join(sorted(known)) or 'none has'})"
            for r in remat
            if r not in [kind.value for kind in Remat] and r not in known
        ),
        *_mesh_faults(mesh, axis, data_axes, devices),
        *(
            f"costs[{quoted(c)}] must be a jaxpipe.LayerCost, not {quoted(v)}"
            for c, v in costs.items()
            if not isinstance(v, LayerCost)
        ),
    )
    text = arguments["model"]
    model = parse_layout(text, devices=1, letters="".join(sorted({*"EtmL", *costs})))
    letters, least = model.layers, min(chunks, default=1)
    missing = sorted(set(letters) - set(costs))
    faults = [
        f"costs are missing for layer {c!r}; give costs[{c!r}] = jaxpipe.LayerCost(...)"
        for c in missing
    ]
    if model.num_stages > 1:
        faults.append(
            f"layers={quoted(text)} already holds '|'; write the layers alone, e.g. 'Et*80,L'"
        )
    if devices * least > len(letters):
        faults.append(
            f"{len(letters)} layers are too few for {devices} devices of {least} stages; "
            f"use at most {len(letters) // least} devices"
        )
    if not missing:
        faults += _unit_faults({c: costs[c] for c in letters}, memory, plain(transfer))
    _refuse(*faults)
    target = _target(mesh, (axis, *data_axes))
    return Request(
        layers=letters,
        costs=costs,
        devices=devices,
        microbatches=microbatches,
        memory=memory,
        transfer=plain(transfer),
        schedules=_names(arguments["schedules"] if arguments["schedules"] is not None else ())
        or SCHEDULES,
        chunks=tuple(dict.fromkeys(chunks)),
        remat=tuple(dict.fromkeys(Remat(r) for r in remat if r not in known)),
        policies=tuple(dict.fromkeys(r for r in remat if r in known)),
        offloads="residuals" in offload and target.on_gpus,
        host_bandwidth=plain(arguments["host_bandwidth"]),
        axis=axis,
        data_axes=data_axes,
        target=target,
        one_of_many=one_of_many,
    )


def _refuse(*faults: str) -> None:
    """Raise a PlanError that lists the faults, if there are any."""
    if faults:
        raise PlanError.listing(_NO_PLAN, list(faults))


def _names(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _is_count(value: object) -> bool:
    return is_whole(value) and value >= 1


def _are(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A test for a sequence of accepted values.  NumPy scalars are not sequences."""

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


# For each argument, the test of its values and the text of an error.
_ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (
        _is_text,
        "a text with a letter for each layer, such as 'Et*80,L', or a Model of letters",
    ),
    "costs": (lambda v: isinstance(v, Mapping), "a mapping, {'t': jaxpipe.LayerCost(...)}"),
    "devices": (_is_count, "a whole number of at least 1"),
    "microbatches": (
        lambda v: _is_count(v) or _are(_is_count)(v),
        "a whole number of at least 1, or a few of them",
    ),
    "memory": (
        lambda v: v is None or (is_number(v) and v > 0),
        "bytes that a device has, or None",
    ),
    "transfer": (
        lambda v: _is_hop(v) or (isinstance(v, Mapping) and _are(_is_hop)(list(v.values()))),
        "seconds, 0 or more",
    ),
    "schedules": (
        lambda v: v is None or _is_text(v) or _are(_is_text)(v),
        "names of schedules, such as ('1f1b', 'zb_h1')",
    ),
    "chunks": (_are(_is_count), "a few whole numbers of at least 1, such as (1, 2)"),
    "slices": (
        lambda v: _are(_is_count)(v) and len(v) > 0,
        "one or a few whole numbers of at least 1, such as (1, 4, 16)",
    ),
    "remat": (
        lambda v: v is None or _are(lambda r: r is None or _is_text(r))(v),
        "some of (None, 'full', 'stages') and of the names of policies",
    ),
    "offload": (
        _are(lambda v: v is None or v == "residuals"),
        "(None,) or (None, 'residuals')",
    ),
    "host_bandwidth": (lambda v: _is_hop(v) and v > 0, "bytes a second, above 0"),
    "within": (lambda v: v is None or (_is_hop(v) and v > 0), "seconds, above 0, or None"),
    "search": (_is_hop, "seconds, 0 or more"),
    "seed": (lambda v: is_whole(v) and 0 <= v < 2**31, "a whole number of at least 0"),
    "most": (_is_count, "a whole number of at least 1"),
    "progress": (_is_function, "a function of (done, of), or None"),
    "traced": (_is_function, "a function of a plan, as jaxpipe.traced_memory makes it, or None"),
    "axis": (_is_text, "the name of a mesh axis"),
    "data_axes": (lambda v: _is_text(v) or _are(_is_text)(v), "names of mesh axes"),
}


def _target(mesh: Any, own: tuple[str, ...]) -> Target:
    if not (mesh is None or isinstance(mesh, RunsOn | Target)):
        return Target.of(mesh, own)
    target = mesh if isinstance(mesh, Target) else Target(mesh or RunsOn.GPUS)
    return target.measured(None) if target.on_gpus and target.prices is None else target


def _mesh_faults(mesh: Any, axis: str, data_axes: tuple[str, ...], devices: int) -> list[str]:
    """Faults of the mesh that a plan's `Pipeline` would refuse too."""
    if mesh is None or isinstance(mesh, RunsOn | Target):
        return []
    if not (hasattr(mesh, "devices") and hasattr(mesh, "shape")):
        return [f"mesh must be a jax.sharding.Mesh, or None for NVIDIA GPUs, not {quoted(mesh)}"]
    sizes = dict(mesh.shape)
    faults = [
        f"the mesh has no data axis {name!r}; its axes are {sizes}"
        for name in data_axes
        if name not in sizes
    ]
    if axis not in sizes:
        faults.append(
            f"the mesh has no axis {axis!r}; its axes are {sizes}: write axis= one of them"
        )
    elif sizes[axis] != devices:
        faults.append(
            f"devices is {devices}, but mesh axis {axis!r} has {sizes[axis]}; write "
            f"devices={sizes[axis]}"
        )
    return faults


def _unit_faults(
    costs: Mapping[str, LayerCost], memory: float | None, transfer: float
) -> list[str]:
    """Faults of numbers that are thousands of times too large or small compared with the others."""
    faults = []
    if memory is not None and memory < _LEAST_MEMORY:
        faults.append(f"memory={memory:g} is {memory:g} bytes; for gigabytes write {memory:g}e9")
    seconds = {c: cost.forward + cost.backward_seconds for c, cost in costs.items()}
    faults += [
        f"layer {c!r} takes {s:g} seconds a microbatch; times are in seconds: possible typo"
        for c, s in seconds.items()
        if s > _MOST_SECONDS
    ]
    timed = {c: s for c, s in seconds.items() if s > 0 and c not in (FIRST, LAST)}
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
    faults += [
        f"layer {letter!r}: {name}={getattr(cost, name):g} is less than a byte; sizes are in bytes"
        for letter, cost in costs.items()
        for name in ("parameters", "residuals", "boundary")
        if 0 < getattr(cost, name) < 1
    ]
    return faults
