"""Decoder-only transformers by their sizes: estimated costs of layers (flops at a reached rate,
bytes by formula), and meshes for a published one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from typing import Annotated, Any, NamedTuple, TypeAlias

from ..errors import CostError, Count, Fits, PlanError, is_cost, quoted, set_typed, typed
from ..lowering.target import PricesByKind, Target
from ..prices import read_prices
from .candidate import PipelinePlan, Plans, Rejected, gib
from .layer_cost import FIRST, LAST, Ends, Kept, LayerCost, device_work
from .plan import Search
from .request import SCHEDULES, Above0, Policies, Request, SomeCounts, allowed_remat

HOST = 8  # devices of a host, which share its fast links
_From0: TypeAlias = Annotated[float, Fits("a number of at least 0", is_cost)]


class _HalfLayer(NamedTuple):
    """A half of a layer.  Numbers of 2 bytes are of one token and of all devices that share the
    layer: without remat, under "dots" (results of products with weights are kept), and under
    "layer".
    """

    weights: float  # on the devices that share the layer
    active: float  # weights that a token is multiplied with
    kept: tuple[float, ...]  # by the forward, its input not counted
    left: tuple[float, ...]  # by I for W: gradients of the results of products, recomputed inputs
    again: float = 0.0  # weights of products that are done again under "dots"
    exchange: float = 0.0  # seconds in which rows are sent to experts and back


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A transformer by its sizes, and the rates of a device (`jaxpipe plan --width ...`).

    An estimate, not a measurement: matmuls alone take time, attention is causal and keeps no scores
    (Dao et al. 2022, FlashAttention), and layers keep what they do on GPUs (`GPU_FORM`).
    Parameters are 2 bytes each, gradients 4, the optimizer's state (Adam's moments and a master
    copy) 12.

    Args:
        width: of the hidden state.
        vocab: of embedding and head.
        context: tokens of a sequence.
        rows: sequences of a microbatch.
        ffn: width of the MLP, or of one expert; 4 times the width where it is None.
        gated: whether the MLP has three matrices (SwiGLU), as experts always have.
        experts: of a layer; 0 where its MLP is not split into experts.
        chosen: experts of a token.
        shared: width of the experts that every token has.
        capacity: times the tokens of an even load for which an expert has room; 0 where experts
            take all tokens (the room is then for all tokens of all `expert_devices`).
        expert_devices: devices that share the experts, each with rows of its own.
        kv_share: width of keys and values as a share of the width (grouped queries: 1/8 for 64
            heads and 8 of keys).
        q_share: width of the queries as a share of the width.
        head: features of a head.
        normed: whether queries and keys of a head are normed (Qwen3).
        post_norms: whether the results of attention and MLP are normed too (Gemma 2).
        tied: whether embedding and head have one table.
        tensor: devices that share a layer (tensor parallelism); they share what it computes and
            keeps, and sum the hidden state twice in each pass.
        sequence: whether they share what is between layers too, by time.
        shards: devices over which optimizer state is sharded.
        flops: floating point operations a second that one device reaches in matmuls.
        bandwidth: bytes a second between neighbours of the pipeline, each on a host of its own.
        loss_tokens: tokens of a row whose logits are there at a time; all where it is None.
        latency: seconds of a hop besides.
        tensor_bandwidth: bytes a second of a device in sums over the devices of a layer, and in
            exchanges with the devices of other experts.
    """

    width: Above0
    vocab: Above0
    context: Above0 = 4096
    rows: Above0 = 1
    ffn: Above0 | None = None
    gated: bool = False
    kv_share: Above0 = 1.0
    q_share: Above0 = 1.0
    head: Above0 = 128
    experts: _From0 = 0
    chosen: Above0 = 1
    shared: _From0 = 0
    capacity: _From0 = 0
    expert_devices: Above0 = 1
    normed: bool = False
    post_norms: bool = False
    tied: bool = False
    tensor: Above0 = 1
    sequence: bool = False
    shards: Above0 = 1
    flops: Above0 = 4e14
    bandwidth: Above0 = 5e10
    loss_tokens: Above0 | None = None
    latency: _From0 = 1e-5
    tensor_bandwidth: Above0 = 3e11

    def __post_init__(self) -> None:
        set_typed(self, CostError)

    @property
    def tokens(self) -> float:
        """The number of tokens of a microbatch."""
        return self.context * self.rows

    @property
    def boundary(self) -> float:
        """Bytes of the hidden state of a microbatch that a device has between layers."""
        return self._whole / (self.tensor if self.sequence else 1)

    @property
    def _whole(self) -> float:
        return 2 * self.width * self.tokens

    def on(self, devices: float) -> Transformer:
        """The same where its pipelines and replicas are on so many devices: those of one host have
        its fast links.
        """
        here = devices * max(self.tensor, self.expert_devices) <= HOST
        return replace(self, bandwidth=self.tensor_bandwidth) if here else self

    @property
    def transfer(self) -> float:
        """Seconds of a hop."""
        return self.latency + self._whole / self.tensor / self.bandwidth

    def costs(self) -> dict[str, LayerCost]:
        """Of the embedding "E", a layer "t", and the head with its loss "L"."""
        table = self.vocab * self.width
        head = self._seconds * table
        logits = 4 * self.vocab * self.tokens / self.tensor
        return {
            "E": LayerCost(
                forward=0,
                input_grad=0,
                weight_grad=0,
                boundary=self.boundary,
                ends=Ends.WITH_LAST if self.tied else Ends.EITHER,
                **self._held(table),
            ),
            "t": self._layer(),
            "L": LayerCost(
                forward=head,
                input_grad=head,
                weight_grad=head,
                workspace=2 * logits * min(1, (self.loss_tokens or self.context) / self.context),
                stash=logits / 2,
                ends=Ends.EITHER,
                **self._held(0 if self.tied else table),
            ),
        }

    @property
    def _seconds(self) -> float:
        """The seconds that a weight takes in a forward."""
        return 2 * self.tokens / (self.tensor * self.flops)

    def _layer(self) -> LayerCost:
        each = self._seconds
        attention, mlp = self._attention(), self._experts() if self.experts else self._mlp()
        matmul = each * (attention.active + mlp.active)
        # Scores and values, half of them masked: 2 * context * queries a token; the backward does
        # twice as much.
        scores = each * self.context * self._queries
        # The devices of a layer sum a hidden state twice.
        summed = 2 * (self.tensor - 1) / self.tensor * self._whole / self.tensor_bandwidth
        moved = 2 * summed + mlp.exchange
        # Statistics of norms and of attention's rows, 4 bytes each.
        heads = (self._queries + 2 * self.normed * (self._queries + self._keys)) / self.head
        statistics = 4 * self.tokens * (6 + heads / self.tensor)
        kept, left = (
            [
                2 * self.tokens * (one + other) / self.tensor
                for one, other in zip(*both, strict=True)
            ]
            for both in ((attention.kept, mlp.kept), (attention.left, mlp.left))
        )
        forward, dots = matmul + scores + moved, scores + each * mlp.again + mlp.exchange
        return LayerCost(
            forward=forward,
            input_grad=matmul + 2 * scores + moved,
            weight_grad=matmul,
            residuals=kept[0] + statistics,
            boundary=self.boundary,
            stash=left[0],
            attention=scores,
            rows=2 * 2 * self._keys * self.tokens / self.tensor,
            policies={
                "dots_with_no_batch_dims_saveable": Kept(kept[1], dots, left[1]),
                "nothing_saveable": Kept(kept[2], forward, left[2]),
            },
            **self._held(attention.weights + mlp.weights),
        )

    @property
    def _queries(self) -> float:
        return self.width * self.q_share

    @property
    def _keys(self) -> float:
        return self.width * self.kv_share

    @property
    def _features(self) -> float:
        return 4 * self.width if self.ffn is None else self.ffn

    @property
    def _between(self) -> float:
        return self.width * (1 if self.sequence else self.tensor)

    def _attention(self) -> _HalfLayer:
        """It keeps queries, keys and values (before and after a norm), its output, and x after
        it, or the two results that are normed; x too where devices share it by time, for what they
        exchange is not made again.
        """
        queries, keys, x = self._queries, self._keys, self._between
        weights = self.width * 2 * (queries + keys)
        projected = queries + 2 * keys
        dots, normed = projected + x * (1 + self.post_norms), self.normed * (queries + keys)
        return _HalfLayer(
            weights=weights,
            active=weights,
            kept=(dots + queries + normed + x * (self.post_norms and self.sequence), dots, 0.0),
            left=(projected + x, projected + queries + x, projected + queries + 2 * x),
        )

    def _mlp(self) -> _HalfLayer:
        """It keeps the results of its first products: the features of a GELU, twice as many of a
        SwiGLU.  Functions of them are computed again in the backward's fusions.
        """
        count, features = 3 if self.gated else 2, self._features
        weights, x = count * self.width * features, self._between
        return _HalfLayer(
            weights=weights,
            active=weights,
            kept=((count - 1) * features, (count - 1) * features, 0.0),
            left=tuple(x + j * features for j in (1, 1, count)),
        )

    def _experts(self) -> _HalfLayer:
        """They keep the rows that they receive and return, two hidden features of each, and the
        router's scores.  Products of experts are done again under "dots": they have a batch
        dimension.
        """
        features, own, devices = self._features, 3 * self.shared, self.expert_devices
        run = self.chosen * (self.capacity or 1)
        room = run if self.capacity else run * devices
        # A device that shares a layer has all rows of experts.  Scores have 4 bytes.
        rows, copies = room * self.width * self.tensor, 1 if self.sequence else self.tensor
        scores, routes = 2 * self.experts * copies, self.chosen * (self.width + 8) * copies
        dots = 2 * self.shared + scores
        x, hidden = self._between, room * features
        common = x * (self.shared > 0)  # the shared expert's input, or its result's gradient
        return _HalfLayer(
            weights=self.width * (3 * self.experts * features / devices + own + self.experts),
            active=self.width * (3 * run * features + own + self.experts),
            kept=(routes + rows + 2 * hidden + dots, dots, 0.0),
            left=tuple(
                first + scores + i * rows + j * hidden + k * self.shared
                for first, i, j, k in ((common, 1, 1, 1), (0.0, 2, 3, 2), (common, 2, 3, 3))
            ),
            again=self.width * 3 * run * features,
            exchange=2 * run * self._whole * (1 - 1 / devices) / self.tensor_bandwidth,
        )

    def _held(self, weights: float) -> dict[str, Any]:
        each = weights / self.tensor
        return {"parameters": 2 * each, "gradients": 4 * each, "optimizer": 12 * each / self.shards}


_SHAPES = 3  # meshes whose tables are built
_ROWS = (1, 2, 4)  # rows of a microbatch
_SPLIT = ("parameters", "gradients", "optimizer")  # what replicas split under fsdp


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
    model = _llama(published[name], context=context, flops=flops, loss_tokens=min(context, 1024))
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
    held = sum(c.held_bytes + request.gathered * (c.parameters + c.gradient_bytes) for c in parts)
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
    return 0.0, request.microbatches * work + ramp + request.reduction


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
    # Replicas sum gradients once a step, and under fsdp gather parameters of half the bytes.
    # Nothing of it is hidden.
    link = model.tensor_bandwidth if data * tensor <= HOST else model.bandwidth
    summed = sum(whole[c].gradient_bytes for c in letters) / pipe * (data - 1) / data / link
    for fsdp in (0, 1) if data > 1 else (0,):
        costs = {c: cost.divided(data if fsdp else 1, _SPLIT) for c, cost in whole.items()}
        yield Request(
            layers=letters,
            costs=costs | {FIRST: replace(costs[FIRST], ends=Ends.ONE)},
            devices=pipe,
            microbatches=count,
            memory=memory,
            transfer=model.transfer,
            schedules=tuple(schedules or SCHEDULES),
            chunks=tuple(chunks) if pipe > 1 else (1,),
            remat=allowed_remat(remat or None, whole, stages=False),
            data_axes=("data",),
            target=Target(communicates=tensor > 1).measured(prices),
            reduction=(1.5 if fsdp else 2) * summed,
            gathered=data if fsdp else 0,
            label=(text + (" fsdp" if fsdp else ""), f"M {count}"),
            mesh={**mesh, "fsdp": fsdp},
            by_name=True,
        )


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
