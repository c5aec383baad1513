"""Decoder-only transformers by their sizes: estimated costs of layers (flops at a reached rate,
bytes by formula).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

from ..errors import CostError, Fits, is_cost, set_typed
from .layer_cost import Ends, Kept, LayerCost
from .request import Above0

HOST = 8  # devices of a host, which share its fast links
# Products in FP8 are so many times as fast as in bfloat16: 1,395 and 760 TFLOP/s of an H100 in
# products of 8192 x 8192 x 8192 by cuBLASLt.
FP8_SPEED = 1395 / 760
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
    left_in_fp8: tuple[float, ...]  # the same, where operands of products have one byte
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
        fp8: the products of layers with weights are in FP8, with a scale for each operand: they
            are `FP8_SPEED` times as fast, and W is left operands of one byte.  Parameters have two
            bytes still, of FP8 and transposed.  Experts need a capacity.
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
    fp8: bool = False

    def __post_init__(self) -> None:
        set_typed(self, CostError)
        if self.fp8 and self.experts and not self.capacity:
            raise CostError(
                "experts that take all tokens multiply by jax.lax.ragged_dot, for which flax has "
                "no FP8; give a capacity, or leave out fp8"
            )

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
        product = each / (FP8_SPEED if self.fp8 else 1)
        matmul = product * (attention.active + mlp.active)
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
            for both in (
                (attention.kept, mlp.kept),
                (attention.left_in_fp8, mlp.left_in_fp8)
                if self.fp8
                else (attention.left, mlp.left),
            )
        )
        forward, dots = matmul + scores + moved, scores + product * mlp.again + mlp.exchange
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
            **self._held(attention.weights + mlp.weights, self._routed),
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
            left_in_fp8=tuple((projected + x + one) / 2 for one in (0, queries, queries)),
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
            left_in_fp8=tuple(
                (i * x + j * features) / 2
                for i, j in ((1, count - 1), (1, count - 1), (count, count))
            ),
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
            left_in_fp8=tuple(
                first + scores + (common + i * rows + j * hidden + k * self.shared) / 2
                for first, i, j, k in ((0.0, 1, 2, 2), (0.0, 3, 3, 2), (x, 3, 3, 3))
            ),
            again=self.width * 3 * run * features,
            exchange=2 * run * self._whole * (1 - 1 / devices) / self.tensor_bandwidth,
        )

    @property
    def _routed(self) -> float:
        """Weights of the experts that a device has alone."""
        own = 3 * self.width * self.experts * self._features / self.expert_devices
        return own if self.expert_devices > 1 else 0.0

    def _held(self, weights: float, own: float = 0.0) -> dict[str, Any]:
        each = weights / self.tensor
        return {
            "parameters": 2 * each,
            "local": 2 * own / self.tensor,
            "gradients": 4 * each,
            "optimizer": 12 * each / self.shards,
        }
