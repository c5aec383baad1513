"""Meshes and plans for published decoders, and the command lines of examples/llama.py that run
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import product
from typing import Any

from ..errors import Count, PlanError, quoted, typed
from ..lowering.target import PricesByKind, Target
from ..prices import read_prices
from .candidate import PipelinePlan, Plans, Rejected, gib
from .layer_cost import FIRST, LAST, Ends, device_work, exchanges
from .replicas import Replicas
from .request import (
    IN_TURN,
    MAX_ACTIVE,
    SCHEDULES,
    Above0,
    Policies,
    Request,
    SomeCounts,
    allowed_remat,
)
from .search import Search
from .transformer import HOST, Transformer

_SHAPES = 3  # meshes whose tables are built
_ROWS = (1, 2, 4)  # rows of a microbatch


def decoders() -> dict[str, dict[str, int]]:
    """The sizes of published decoders by name, from decoders.json: layers, width, heads, those of
    keys and values, the width of the MLP, and vocabulary.  `examples/llama.py --model` takes them.
    """
    found: dict[str, dict[str, int]] = json.loads(
        (files(__package__) / "decoders.json").read_text()
    )
    return found


def _llama(sizes: Mapping[str, int], **options: Any) -> Transformer:
    """A decoder of these sizes, with grouped queries and a gated MLP."""
    return Transformer(
        width=sizes["width"],
        vocab=sizes["vocab"],
        ffn=sizes["hidden"],
        gated=True,
        kv_share=sizes["kv_heads"] / sizes["heads"],
        head=sizes["width"] / sizes["heads"],
        **options,
    )


@typed(PlanError)
def plan_mesh(
    name: str,
    *,
    gpus: Count,
    batch: Count,
    context: Count,
    memory: Above0,
    tensor: SomeCounts = (1, 2, 4, 8),
    schedules: Sequence[str] | None = None,
    chunks: SomeCounts = (1, 2, 4),
    remat: Policies | None = None,
    within: Above0 | None = None,
    progress: Callable[[int, int], None] | None = None,
    most: Count = 5,
    flops: Above0 = 4e14,
    fp8: bool = False,
) -> Plans:
    """The fastest plans of a published decoder on so many devices, with the mesh chosen too.

    Args:
        name: one of `decoders()`.
        gpus: devices in all; hosts have eight.
        batch: rows of a step.
        context: tokens of a row.
        memory: bytes that a device has.
        tensor: devices that may share a layer, within a host.
        schedules, chunks, remat: to choose among, as for `plan`, but neither "auto" nor "stages":
            `examples/llama.py` builds its table by name.
        within, progress: as for `plan`.
        most: how many plans to return.
        flops: floating point operations a second that a device reaches in matmuls of bfloat16.
        fp8: as for `Transformer`.

    Raises:
        PlanError: there is no such name or no such mesh, or nothing fits.
    """
    by_search = [n for n in (*(schedules or ()), *(remat or ())) if n in ("auto", "stages")]
    if by_search:
        raise PlanError(
            f"{' and '.join(map(quoted, by_search))} cannot be chosen with the mesh: "
            "examples/llama.py builds its table by name; leave it out"
        )
    published = decoders()
    if name not in published:
        raise PlanError(f"there is no model {quoted(name)}; the names are {', '.join(published)}")
    choices: dict[str, Any] = {
        "schedules": schedules,
        "chunks": chunks,
        "remat": remat,
        "memory": memory,
    }
    prices = read_prices()
    layers = published[name]["layers"]
    own = {"context": context, "flops": flops, "fp8": fp8}
    model = _llama(published[name], loss_tokens=min(context, 1024), **own)
    wanted = [
        request
        for mesh, own in _meshes(model, gpus, batch, tensor, layers)
        if mesh["pipe"] == 1 or mesh["pipe"] * min(chunks) <= layers + len("EL")
        for request in _requests(layers, own, mesh, batch, prices=prices, **choices)
    ]
    if not wanted:
        raise PlanError(
            f"no mesh of {gpus} devices has rows for each replica and layers for each stage; "
            f"{quoted(name)} has {layers} layers, and a step {batch} rows"
        )
    wanted.sort(key=_promise)
    search = Search(wanted[:_SHAPES], most=most, within=within, progress=progress)
    plans = search.plans(search=0, seed=0)
    others = map(_slower, wanted[_SHAPES:])
    return Plans(plans, (*plans.rejected, *others), plans.prices)


def _slower(request: Request) -> Rejected:
    """A mesh whose tables are not built."""
    name = ", ".join((*request.label, f"rows {request.mesh['rows']}"))
    lacks, seconds = _promise(request)
    if lacks:
        return Rejected(
            name, f"parameters and activations of 1F1B do not fit by {gib(lacks)}", None
        )
    return Rejected(name, f"takes about {seconds:.4g} s, and {_SHAPES} meshes take less", seconds)


def _promise(request: Request) -> tuple[float, float]:
    """Bytes that 1F1B lacks with any remat, and else the seconds of a step with the bubble of
    interleaving and the least remat with which it fits.  Meshes are ranked by it.
    """
    assert request.memory is not None
    layer, ends = request.costs["t"], [request.costs[c] for c in (FIRST, LAST)]
    count = len(request.layers) - len(ends)
    parts = [*ends, *[layer] * -(-count // request.devices)]
    fits = [v for v in request.chunks if request.devices * v <= len(request.layers)]
    # at the least, of one of its stages
    whole = [*ends, *[layer] * -(-count // (request.devices * max(fits, default=1)))]
    shards = request.replicas.count if request.replicas.fsdp else 0
    held = sum(c.held_bytes for c in parts) + shards * sum(c.common_bytes for c in whole)
    ways = [layer, *(layer.under(str(name)) for name in request.remat)]
    for cost in sorted(ways, key=lambda cost: cost.backward_seconds):
        kept = count * (cost.residuals + cost.boundary) + cost.stash + ends[1].workspace
        if held + kept <= request.memory:
            break
    else:
        return held + kept - request.memory, 0.0
    costs = {**request.costs, "t": cost}
    work = device_work(request.layers, costs, request.devices, again=False)
    chunks = max(1, min(4, count // request.devices))
    ramp = (request.devices - 1) * work / (2 * chunks)
    return 0.0, request.microbatches * work + ramp + sum(exchanges(parts, request.replicas))


def _meshes(
    model: Transformer, gpus: int, batch: int, tensor: Sequence[int], layers: int
) -> Iterator[tuple[dict[str, int], Transformer]]:
    """Sizes of axes, with the rows of a microbatch, and the model on such a mesh."""
    heads = round(model.width * model.kv_share / model.head)  # of keys and values
    for shared, pipe, rows in product(tensor, range(1, layers + 1), _ROWS):
        data, left = divmod(gpus, shared * pipe)
        if left or shared > min(HOST, heads) or batch % (data * rows):
            continue
        if batch // (data * rows) >= pipe:
            own = replace(model, tensor=shared, rows=rows, sequence=shared > 1)
            mesh = {"pipe": pipe, "data": data, "tensor": shared, "rows": rows}
            yield mesh, own.on(pipe * data)


def _requests(
    layers: int,
    model: Transformer,
    mesh: Mapping[str, int],
    batch: int,
    *,
    prices: PricesByKind,
    schedules: Sequence[str] | None,
    chunks: Sequence[int],
    remat: Sequence[str | None] | None,
    memory: float,
) -> Iterator[Request]:
    """With parameters and optimizer state split over replicas (fsdp), and without."""
    whole, letters = model.costs(), "E" + "t" * layers + "L"
    pipe, data, tensor, rows = mesh.values()
    text, count = f"pipe {pipe} x data {data} x tensor {tensor}", batch // (data * rows)
    link = model.tensor_bandwidth if data * tensor <= HOST else model.bandwidth
    for fsdp in (0, 1) if data > 1 else (0,):
        costs = {c: cost.split(data) if fsdp else cost for c, cost in whole.items()}
        yield Request(
            layers=letters,
            costs=costs | {FIRST: replace(costs[FIRST], ends=Ends.ONE)},
            devices=pipe,
            microbatches=count,
            memory=memory,
            transfer=model.transfer,
            schedules=tuple(schedules or (*SCHEDULES, *[IN_TURN] * fsdp)),
            chunks=tuple(chunks) if pipe > 1 else (1,),
            remat=allowed_remat(remat or None, whole, stages=False),
            data_axes=("data",),
            target=Target(communicates=tensor > 1).measured(prices),
            replicas=Replicas(count=data, fsdp=bool(fsdp), bandwidth=link),
            max_active=MAX_ACTIVE,
            label=(text + (" fsdp" if fsdp else ""), f"M {count}"),
            mesh={**mesh, "fsdp": fsdp},
            by_name=True,
        )


_REMAT = {"dots_with_no_batch_dims_saveable": "dots", "nothing_saveable": "layer"}


def command_of(
    name: str, plan: PipelinePlan, *, batch: int, context: int, fp8: bool = False
) -> str:
    """The command line of `examples/llama.py` that runs a plan of `plan_mesh`."""
    mesh, table = plan.mesh, plan.schedule
    remat = (
        "stage" if plan.remat == "full" else _REMAT.get(dict(plan.policies).get("t", ""), "none")
    )
    flags = [f"--{axis} {mesh[axis]}" for axis in ("pipe", "data", "tensor")]
    flags += ["--sequence"] if mesh["tensor"] > 1 else []
    flags += ["--fsdp"] if mesh["fsdp"] else []
    flags += [f"--max-active {plan.max_active}"] if plan.max_active else []
    flags += [f"--schedule {table.name}", f"--chunks {table.num_chunks}"]
    flags += [f'--layout "{plan.layout}"', f"--microbatches {table.num_microbatches}"]
    flags += [f"--rows {batch}", f"--context {context}", f"--remat {remat}"]
    flags += ["--attention cudnn", f"--loss-tokens {min(context, 1024)}"]
    flags += ["--spread-head"] if plan.spread else []
    flags += ["--fp8"] if fp8 else []
    cluster = "--cluster " if mesh["pipe"] * mesh["data"] * mesh["tensor"] > HOST else ""
    return f"python examples/llama.py --model {name} {cluster}{' '.join(flags)}"
