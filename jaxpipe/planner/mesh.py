"""Meshes for a published decoder: the numbers of devices along the tensor, pipe and data axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import PlanError, quoted
from ..lowering.target import Target
from .layer_cost import FIRST, LAST, Ends, LayerCost
from .memory import device_work
from .request import SCHEDULES, Request, refuse_kinds, ways
from .result import PipelinePlan, Plans, Rejected, gib
from .search import Search, roomy
from .transformer import HOST, Transformer

_SHAPES = 3  # meshes whose tables are built
_FAR = 1e12  # seconds
_ROWS = (1, 2, 4)  # rows of a microbatch


class Decoder(NamedTuple):
    """A published decoder by its sizes, as `examples/llama.py` has it."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int


def decoders() -> Mapping[str, Decoder]:
    """The names of `examples/llama.py --model`."""
    small, large = (
        Decoder(32, 4096, 32, 8, 14_336, 128_256),
        Decoder(80, 8192, 64, 8, 28_672, 128_256),
    )
    return {
        "llama2-7b": Decoder(32, 4096, 32, 32, 11_008, 32_000),
        "llama2-13b": Decoder(40, 5120, 40, 40, 13_824, 32_000),
        "llama2-70b": large._replace(vocab=32_000),
        "llama3-8b": small,
        "llama3-70b": large,
        "llama3.1-8b": small,
        "llama3.1-70b": large,
        "llama3.1-405b": Decoder(126, 16_384, 128, 8, 53_248, 128_256),
        "llama3.2-1b": Decoder(16, 2048, 32, 8, 8192, 128_256),
        "llama3.2-3b": Decoder(28, 3072, 24, 8, 8192, 128_256),
    }


def transformer(decoder: Decoder, **settings: float) -> Transformer:
    """The decoder's layers, and how a device computes them."""
    return Transformer(
        width=decoder.width,
        vocab=decoder.vocab,
        ffn=decoder.hidden,
        gated=True,
        kv_share=decoder.kv_heads / decoder.heads,
        head=decoder.width / decoder.heads,
        **settings,  # type: ignore[arg-type]
    )


def plan_mesh(
    name: str,
    *,
    gpus: int,
    batch: int,
    context: int,
    memory: float,
    tensor: Sequence[int] = (1, 2, 4, 8),
    schedules: Sequence[str] | None = None,
    chunks: Sequence[int] = (1, 2, 4),
    remat: Sequence[str | None] | None = None,
    within: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    most: int = 5,
    flops: float = 4e14,
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
        flops: floating point operations a second that a device reaches in matmuls.

    Raises:
        PlanError: there is no such name or no such mesh, or nothing fits.
    """
    by_search = [n for n in (*(schedules or ()), *(remat or ())) if n in ("auto", "stages")]
    if by_search:
        raise PlanError(
            f"{' and '.join(map(quoted, by_search))} cannot be chosen with the mesh: "
            "examples/llama.py builds its table by name; leave it out"
        )
    if name not in decoders():
        raise PlanError(f"there is no model {quoted(name)}; the names are {', '.join(decoders())}")
    decoder = decoders()[name]
    choices: dict[str, Any] = {
        "schedules": schedules,
        "chunks": chunks,
        "remat": remat,
        "memory": memory,
    }
    refuse_kinds({**choices, "within": within, "devices": gpus, "most": most})
    settings = {"context": context, "flops": flops, "loss_tokens": min(context, 1024)}
    every = [
        request
        for shape in _shapes(decoder, gpus, batch, tensor)
        if shape.pipe == 1 or shape.pipe * min(chunks) <= decoder.layers + len("EL")
        for request in _requests(decoder, shape, settings, **choices)
    ]
    if not every:
        raise PlanError(
            f"no mesh of {gpus} devices has rows for each replica and layers for each stage; "
            f"{quoted(name)} has {decoder.layers} layers, and a step {batch} rows"
        )
    fitting, rejected = roomy(every)
    wanted = sorted(fitting, key=_promise)
    search = Search(wanted[:_SHAPES], most=most, within=within, progress=progress)
    plans = search.plans(search=0, seed=0)
    others = (*map(_slower, wanted[_SHAPES:]), *rejected)
    return Plans(plans, (*plans.rejected, *others), plans.prices)


def _slower(request: Request) -> Rejected:
    """A mesh whose tables are not built."""
    found = _promise(request)
    if found >= _FAR:
        lacking = gib(found - _FAR - (request.memory or 0))
        return Rejected(request.text, f"activations of 1F1B do not fit by {lacking}", None)
    why = f"takes about {found:.4g} s, and {_SHAPES} meshes take less"
    return Rejected(request.text, why, found)


def _promise(request: Request) -> float:
    """Seconds of a step with the bubble of interleaving and the least remat with which the
    activations of 1F1B fit.  Meshes are ranked by it.
    """
    chunks = max(1, min(4, (len(request.layers) - 2) // request.devices))
    layer = request.costs["t"]
    ends = [request.costs[c] for c in (FIRST, LAST)]
    count = len(request.layers) - len(ends)
    parts = [*ends, *[layer] * -(-count // request.devices)]
    held = sum(c.held_bytes + request.gathered * (c.parameters + c.gradient_bytes) for c in parts)
    assert request.memory is not None
    for policy in ("", *request.policies):
        cost = layer.under(policy)
        kept = count * (cost.residuals + cost.boundary) + cost.stash + ends[1].workspace
        if held + kept <= request.memory:
            break
    else:
        # Its memory is short, so it comes after all that fit.
        return _FAR + held + kept
    costs = {**request.costs, "t": cost}
    work = device_work(request.layers, costs, request.devices, again=False)
    ramp = (request.devices - 1) * work / (2 * chunks)
    return request.microbatches * work + ramp + request.reduction


class _Shape(NamedTuple):
    pipe: int
    data: int
    tensor: int
    rows: int  # of a microbatch
    microbatches: int


def _shapes(decoder: Decoder, gpus: int, batch: int, tensor: Sequence[int]) -> Iterator[_Shape]:
    for shared in tensor:
        if shared > min(HOST, decoder.kv_heads) or gpus % shared:
            continue
        for pipe in range(1, decoder.layers + 1):
            if gpus // shared % pipe:
                continue
            data = gpus // shared // pipe
            for rows in _ROWS:
                if batch % (data * rows) == 0 and batch // (data * rows) >= pipe:
                    yield _Shape(pipe, data, shared, rows, batch // (data * rows))


def _requests(
    decoder: Decoder,
    shape: _Shape,
    settings: Mapping[str, float],
    *,
    schedules: Sequence[str] | None,
    chunks: Sequence[int],
    remat: Sequence[str | None] | None,
    memory: float,
) -> Iterator[Request]:
    """With parameters and optimizer state split over replicas (fsdp), and without."""
    model = transformer(decoder, tensor=shape.tensor, rows=shape.rows, **settings)
    model = replace(model, sequence=shape.tensor > 1).on(shape.pipe * shape.data)
    whole = model.costs()
    layers = "E" + "t" * decoder.layers + "L"
    held = sum(whole[c].gradient_bytes for c in layers) / shape.pipe
    again, policies = ways(remat or (None, *whole["t"].policies, "full"), whole, stages=False)
    policies = tuple(sorted(policies, key=lambda name: whole["t"].policies[name].again))
    mesh = {"pipe": shape.pipe, "data": shape.data, "tensor": shape.tensor}
    text = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    for fsdp in (0, 1) if shape.data > 1 else (0,):
        costs = {c: _split(cost, shape.data if fsdp else 1) for c, cost in whole.items()}
        yield Request(
            layers=layers,
            costs=costs | {FIRST: replace(costs[FIRST], ends=Ends.ONE)},
            devices=shape.pipe,
            microbatches=shape.microbatches,
            memory=memory,
            transfer=model.transfer,
            schedules=tuple(schedules or (n for n in SCHEDULES if n != "auto")),
            chunks=tuple(chunks) if shape.pipe > 1 else (1,),
            remat=again,
            policies=policies,
            data_axes=("data",),
            target=Target(communicates=shape.tensor > 1).measured(None),
            reduction=_reduction(held, shape, fsdp, model),
            gathered=shape.data if fsdp else 0,
            label=(text + (" fsdp" if fsdp else ""), f"M {shape.microbatches}"),
            mesh={**mesh, "fsdp": fsdp, "rows": shape.rows},
            by_name=True,
        )


def _split(cost: LayerCost, devices: int) -> LayerCost:
    """The cost of a layer whose parameters replicas split."""
    return replace(
        cost,
        parameters=cost.parameters / devices,
        gradients=cost.gradient_bytes / devices,
        optimizer=cost.optimizer_bytes / devices,
    )


def _reduction(gradients: float, shape: _Shape, fsdp: int, model: Transformer) -> float:
    """Seconds in which replicas sum gradients once a step, and under fsdp gather parameters of half
    the bytes.  Nothing of it is hidden.
    """
    inside = shape.data * shape.tensor <= HOST
    link = model.tensor_bandwidth if inside else model.bandwidth
    return (1.5 if fsdp else 2) * (shape.data - 1) / shape.data * gradients / link


_REMAT = {"dots_with_no_batch_dims_saveable": "dots", "nothing_saveable": "layer"}


def command_of(name: str, plan: PipelinePlan, *, batch: int, context: int) -> str:
    """The command line of `examples/llama.py` that runs a plan of `plan_mesh`."""
    mesh, table = plan.mesh, plan.schedule
    remat = (
        "stage" if plan.remat == "full" else _REMAT.get(dict(plan.policies).get("t", ""), "none")
    )
    flags = [f"--{axis} {mesh[axis]}" for axis in ("pipe", "data", "tensor")]
    flags += ["--sequence"] if mesh["tensor"] > 1 else []
    flags += ["--fsdp"] if mesh["fsdp"] else []
    flags += [f"--schedule {table.name}", f"--chunks {table.num_chunks}"]
    flags += [f'--layout "{plan.layout}"', f"--microbatches {table.num_microbatches}"]
    flags += [f"--rows {batch}", f"--context {context}", f"--remat {remat}"]
    flags += ["--attention cudnn", f"--loss-tokens {min(context, 1024)}"]
    flags += ["--spread-head"] if plan.spread else []
    cluster = "--cluster " if mesh["pipe"] * mesh["data"] * mesh["tensor"] > HOST else ""
    return f"python examples/llama.py --model {name} {cluster}{' '.join(flags)}"
