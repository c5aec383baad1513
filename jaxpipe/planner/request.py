"""The arguments of `plan`, checked, and the choices that they leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeAlias

from ..engine.costs import Costs
from ..errors import MAX_COST, Count, Fits, PlanError, is_whole, quoted
from ..layouts.layout import Layout, parse_layout
from ..lowering.target import PricesByKind, RunsOn, Target
from .layer_cost import (
    FIRST,
    LAST,
    LayerCost,
    Remat,
    balanced,
    device_work,
    exchanges,
    stage_costs,
)
from .replicas import Replicas

# Schedules that are tried where none are named, the more promising ones first.  `dualpipe` keeps
# every stage's parameters twice, and `auto`, which takes longest to build, is hardly ever shorter.
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
)
# Runs of all microbatches need few gathers, where stages take turns in being whole (Lamy-Poirier
# 2022, "Breadth-First Pipeline Parallelism").
IN_TURN = "looped_bfs"
MAX_ACTIVE = (None, 1, 2, 3)  # stages of a device that are whole at a time; None: all of them
# The types of arguments of `plan`.
Above0: TypeAlias = Annotated[float, Fits("a number above 0", lambda n: 0 < n <= MAX_COST)]
SomeCounts: TypeAlias = Annotated[
    Sequence[Count],
    Fits("one or a few whole numbers of at least 1, such as (1, 2)", len),
]
Names: TypeAlias = str | Sequence[str]
Policies: TypeAlias = Annotated[
    Sequence[str | None],
    Fits("some of (None, 'full', 'stages') and names of policies"),
]
# Units that are mixed up differ by thousands: milliseconds for seconds, gigabytes for bytes.
_LEAST_MEMORY, _MOST_SECONDS = 1e6, 3600.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """Valid arguments of `plan`, for one number of microbatches."""

    layers: str
    costs: Mapping[str, LayerCost]
    devices: int
    microbatches: int
    memory: float | None = None
    transfer: float = 0.0
    schedules: tuple[str, ...] = SCHEDULES
    chunks: tuple[int, ...] = (1, 2, 4)
    remat: tuple[Remat | str, ...] = (Remat.NONE,)  # texts are `jax.checkpoint` policies
    offloads: bool = False  # residuals may be kept in the host's memory
    host_bandwidth: float = 2.5e10
    axis: str = "pipe"
    data_axes: tuple[str, ...] = ()
    target: Target = field(default_factory=Target)
    one_of_many: bool = False  # there are requests for other numbers of microbatches
    replicas: Replicas = field(default_factory=Replicas)
    # of the stages of a device that are whole at a time; None: all of them, gathered once a step
    max_active: tuple[int | None, ...] = (None,)
    by_name: bool = False  # only tables that a name builds, for programs that take a name
    label: tuple[str, ...] = ()  # the shape of its mesh
    mesh: Mapping[str, int] = field(default_factory=dict)  # where the mesh was chosen
    slices: int = 1  # of a sequence; costs and microbatches are of slices


def requests(arguments: Mapping[str, Any]) -> list[Request]:
    """Requests from the arguments of `plan` by name, one for each number of microbatches and of
    slices of a sequence; PlanError lists all faults.  "prices" are those of the user's machine.
    """
    by_number = _by_number(*(arguments[name] for name in ("microbatches", "costs", "transfer")))
    return [
        _request(arguments, costs, m, hop, slices, one_of_many=len(by_number) > 1)
        for m, (costs, hop) in by_number.items()
        for slices in dict.fromkeys(arguments["slices"])
    ]


def _by_number(
    microbatches: int | Sequence[int], costs: Mapping[Any, Any], transfer: Any
) -> dict[int, tuple[Mapping[str, LayerCost], float]]:
    """For each number of microbatches the costs, and the seconds of a hop."""
    if isinstance(microbatches, int):
        wrong = ["costs are"] * any(map(is_whole, costs))
        wrong += ["transfer is"] * isinstance(transfer, Mapping)
        _refuse(
            *(
                f"{name} given by number of microbatches, but microbatches is one number; give "
                "what holds for that number alone, or several numbers of microbatches"
                for name in wrong
            )
        )
        return {microbatches: (costs, transfer)}
    counts = dict.fromkeys(microbatches)
    hops = transfer if isinstance(transfer, Mapping) else dict.fromkeys(counts, transfer)
    faults = []
    if missing := [str(m) for m in counts if not isinstance(costs.get(m), Mapping)]:
        faults.append(
            f"costs are missing for {', '.join(missing)} microbatches: a microbatch of another "
            "size costs something else; give costs={8: {...}, 16: {...}}, each measured for the "
            "microbatch of that number"
        )
    if missing := [str(m) for m in counts if m not in hops]:
        faults.append(
            f"transfer is missing for {', '.join(missing)} microbatches; give the seconds of a hop "
            "for each number, or one number for all"
        )
    _refuse(*faults)
    return {m: (costs[m], hops[m]) for m in counts}


def _request(
    arguments: Mapping[str, Any],
    costs: Mapping[str, LayerCost],
    microbatches: int,
    transfer: float,
    slices: int,
    *,
    one_of_many: bool,
) -> Request:
    """One request; each microbatch is a slice where there are several of a sequence."""
    devices, mesh, chunks = (arguments[n] for n in ("devices", "mesh", "chunks"))
    axis, data_axes = arguments["axis"], _names(arguments["data_axes"])
    memory, fsdp = arguments["memory"], arguments["fsdp"] or {}
    data_axes += tuple(name for name in fsdp if name not in data_axes)
    split_axis, split = next(iter(fsdp.items()), ("data", 1))
    _refuse(
        *(
            f"costs has a key {quoted(c)}; its keys are the letters of layers"
            for c in costs
            if not isinstance(c, str)
        ),
        *(
            f"costs[{quoted(c)}] must be a jaxpipe.LayerCost, not {quoted(v)}"
            for c, v in costs.items()
            if not isinstance(v, LayerCost)
        ),
        *_mesh_faults(mesh, axis, data_axes, {**fsdp, axis: devices}),
        *_fsdp_faults(fsdp, axis, arguments["max_active"]),
    )
    remat = allowed_remat(arguments["remat"], costs, stages=memory is not None)
    letters = _letters(arguments["model"], costs, devices, min(chunks))
    _refuse(*_unit_faults({c: costs[c] for c in letters}, memory, transfer))
    target = _target(mesh, (axis, *data_axes), arguments["prices"])
    return Request(
        layers=letters,
        costs=costs if slices == 1 else {c: cost.sliced(slices) for c, cost in costs.items()},
        devices=devices,
        microbatches=microbatches * slices,
        memory=memory,
        transfer=transfer / slices,
        schedules=_names(arguments["schedules"]) or (*SCHEDULES, *[IN_TURN] * (split > 1)),
        chunks=tuple(dict.fromkeys(chunks)),
        remat=remat,
        offloads=memory is not None and "residuals" in arguments["offload"] and target.on_gpus,
        host_bandwidth=arguments["host_bandwidth"],
        axis=axis,
        data_axes=data_axes,
        replicas=Replicas(
            axis=split_axis, count=split, fsdp=split > 1, bandwidth=arguments["fsdp_bandwidth"]
        ),
        max_active=tuple(dict.fromkeys(arguments["max_active"])),
        target=target,
        one_of_many=one_of_many,
        slices=slices,
    )


def allowed_remat(
    names: Sequence[str | None] | None, costs: Mapping[str, LayerCost], *, stages: bool
) -> tuple[Remat | str, ...]:
    """What may be computed again: what is named, or else everything; without a limit of memory,
    `stages` recompute nothing to make room.
    """
    known = sorted({name for cost in costs.values() for name in cost.policies})
    if names is None:
        return (Remat.NONE, *known, Remat.FULL, *([Remat.STAGES] if stages else []))
    _refuse(
        *(
            f"remat holds {quoted(name)}; it is None, 'full', 'stages' or a policy of which some "
            f"layer has costs ({', '.join(known) or 'none has'})"
            for name in names
            if name not in known and name not in [kind.value for kind in Remat]
        )
    )
    return tuple(dict.fromkeys(name if name in known else Remat(name) for name in names))


def _letters(text: str, costs: Mapping[str, LayerCost], devices: int, chunks: int) -> str:
    """The letters of a model's layers."""
    model = parse_layout(text, devices=1, letters="".join(sorted({*"EtmL", *costs})))
    letters = model.layers
    faults = [
        f"costs are missing for layer {c!r}; give costs[{c!r}] = jaxpipe.LayerCost(...)"
        for c in sorted(set(letters) - set(costs))
    ]
    if model.num_stages > 1:
        faults.append(
            f"layers={quoted(text)} already holds '|'; write the layers alone, e.g. 'Et*80,L'"
        )
    if devices * chunks > len(letters):
        faults.append(
            f"{len(letters)} layers are too few for {devices} devices of {chunks} stages; "
            f"use at most {len(letters) // chunks} devices"
        )
    _refuse(*faults)
    return letters


def _refuse(*faults: str) -> None:
    """Raise a PlanError that lists the faults, if there are any."""
    PlanError.refuse("there is no plan for this", faults)


def _names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """A name, some names, or none."""
    return (names,) if isinstance(names, str) else tuple(() if names is None else names)


def _target(mesh: object, own: tuple[str, ...], prices: PricesByKind) -> Target:
    if not (mesh is None or isinstance(mesh, RunsOn | Target)):
        return Target.of(mesh, own, prices)
    target = mesh if isinstance(mesh, Target) else Target(mesh or RunsOn.GPUS)
    return target.measured(prices) if target.on_gpus and target.prices is None else target


def _mesh_faults(
    mesh: object, axis: str, data_axes: tuple[str, ...], devices: Mapping[str, int]
) -> list[str]:
    """Faults of the mesh that a plan's `Pipeline` would refuse too."""
    if mesh is None or isinstance(mesh, RunsOn | Target):
        return []
    if not (hasattr(mesh, "devices") and hasattr(mesh, "shape")):
        return [f"mesh must be a jax.sharding.Mesh, or None for NVIDIA GPUs, not {quoted(mesh)}"]
    sizes = dict(mesh.shape)
    faults = [
        f"the mesh has no {kind} {name!r}; its axes are {sizes}: write {option}= one of them"
        for kind, option, names in (
            ("axis", "axis", (axis,)),
            ("data axis", "data_axes", data_axes),
        )
        for name in names
        if name not in sizes
    ]
    return faults + [
        f"{'devices' if name == axis else 'fsdp'} is {count}, but mesh axis {name!r} has "
        f"{sizes[name]}; write that number"
        for name, count in devices.items()
        if sizes.get(name, count) != count
    ]


def _fsdp_faults(fsdp: Mapping[str, int], axis: str, max_active: Sequence[int | None]) -> list[str]:
    faults = []
    if axis in fsdp:
        faults.append(f"fsdp names {axis!r}, the axis of the pipeline; write a data axis")
    if not fsdp and None not in max_active:
        faults.append(
            f"max_active is {tuple(max_active)}, but nothing is split, so nothing is gathered; "
            "give fsdp={'data': 8}, or leave max_active out"
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
    slowest = max((s for c, s in seconds.items() if c not in (FIRST, LAST)), default=0.0)
    if slowest and transfer > 1000 * slowest:
        faults.append(
            f"transfer={transfer:g} s is over a thousand times a layer's {slowest:g} s; are "
            "both in seconds?"
        )
    faults += [
        f"layer {letter!r}: {name}={getattr(cost, name):g} is less than a byte; sizes are in bytes"
        for letter, cost in costs.items()
        for name in ("parameters", "residuals", "boundary")
        if 0 < getattr(cost, name) < 1
    ]
    return faults


class Choice(NamedTuple):
    """A schedule, its chunks, its recomputation and its spread ends."""

    request: Request
    name: str
    chunks: int
    remat: Remat
    policies: tuple[tuple[str, str], ...]  # a letter and its `jax.checkpoint` policy
    spread: str  # the collective ends among "E" and "L"
    costs: Mapping[str, LayerCost]  # of its policies and shares
    cap: int | None = None  # of `auto`, on activations: at first twice as many as 1F1B has
    max_active: int | None = None

    @property
    def seconds(self) -> float:
        """A lower bound of its tables: a device's work, and what replicas exchange beside none."""
        request, again = self.request, self.remat is Remat.FULL
        work = device_work(request.layers, self.costs, request.devices, again=again)
        inner = [self.costs[c] for c in request.layers if c not in (FIRST, LAST)]
        once = 0.0 if self.rooms else sum(exchanges(inner, request.replicas))
        return request.microbatches * work + self.at_ends + once / request.devices

    @property
    def rooms(self) -> tuple[int, ...]:
        """The numbers of stages that may be whole at a time, but all of a device's."""
        most = self.chunks if self.request.replicas.fsdp else 0
        return tuple(n for n in self.request.max_active if n is not None and n < most)

    @property
    def at_ends(self) -> float:
        """Seconds in which replicas gather `first` and `last`, and sum their gradients."""
        ends = [self.costs[c] for c in (FIRST, LAST) if c in self.request.layers]
        return sum(exchanges(ends, self.request.replicas))

    @property
    def bytes(self) -> float:
        """A lower bound of what a device holds: parameters, gradients and optimizer state."""
        held = {c: self.costs[c].held_bytes for c in self.request.layers}
        inner = sum(held[c] for c in self.request.layers if c not in (FIRST, LAST))
        return inner / self.request.devices + sum(held[c] for c in {FIRST, LAST} & held.keys())

    @property
    def label(self) -> str:
        """Its name in a printed table."""
        request, names = self.request, dict.fromkeys(name for _, name in self.policies)
        letters = {n: "".join(c for c, name in self.policies if name == n) for n in names}
        parts = {
            f"cap {self.cap}": self.cap,
            f"M {request.microbatches}": request.one_of_many,
            f"K {request.slices}": request.slices > 1,
            f"spread {self.spread}": self.spread,
            f"max_active {self.max_active}": self.max_active,
            "remat full": self.remat is Remat.FULL,
            **{f"remat {n}" + (f" of {letters[n]}" if len(names) > 1 else ""): n for n in names},
        }
        shown = [text for text, is_shown in parts.items() if is_shown]
        return ", ".join([*request.label, self.name, f"V {self.chunks}", *shown])

    def layout(self) -> Layout:
        """Its layers in stages."""
        request = self.request
        return balanced(
            request.layers,
            self.costs,
            devices=request.devices,
            chunks=self.chunks,
            remat=self.remat,
        )

    def stage_costs(self, layout: Layout, *, recomputing: bool = False) -> Costs:
        """The times of a layout's stages."""
        remat = Remat.STAGES if recomputing else self.remat
        request = self.request
        return stage_costs(
            layout,
            self.costs,
            remat=remat,
            transfer=request.transfer,
            slices=request.slices,
            replicas=request.replicas,
        )
