"""Estimated costs of the layers of a decoder-only transformer: flops at a reached rate, bytes by
formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import CostError, listed, quoted
from ..table.limits import is_number
from .layer_cost import Ends, Kept, LayerCost


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A transformer by its sizes, and the rates of a device (`jaxpipe plan --width ...`).

    An estimate, not a measurement: matmuls alone take time, attention is causal and keeps no scores
    (Dao et al. 2022, FlashAttention). Parameters are 2 bytes each, gradients 4, the optimizer's
    state (Adam's moments and a master copy) 12.

    Args:
        width: of the hidden state.
        vocab: of embedding and head.
        context: tokens of a sequence.
        rows: sequences of a microbatch.
        ffn: width of the MLP; 4 times the width where it is None.
        gated: whether the MLP has three matrices (SwiGLU).
        kv_share: width of keys and values as a share of the width (grouped queries: 1/8 for 64
            heads and 8 of keys).
        q_share: width of the queries as a share of the width.
        head: features of a head.
        tensor: devices that share a layer (tensor parallelism); they share what it computes and
            keeps, and sum the hidden state twice in each pass.
        sequence: whether they share what is between layers too, by time.
        shards: devices over which optimizer state is sharded.
        flops: floating point operations a second that one device reaches in matmuls.
        bandwidth: bytes a second between neighbours of the pipeline.
        loss_tokens: tokens of a row whose logits are there at a time; all where it is None.
        latency: seconds of a hop besides.
        tensor_bandwidth: bytes a second of a device in sums over the devices of a layer.
    """

    width: float
    vocab: float
    context: float = 4096
    rows: float = 1
    ffn: float | None = None
    gated: bool = False
    kv_share: float = 1.0
    q_share: float = 1.0
    head: float = 128
    tensor: float = 1
    sequence: bool = False
    shards: float = 1
    flops: float = 4e14
    bandwidth: float = 5e10
    loss_tokens: float | None = None
    latency: float = 1e-5
    tensor_bandwidth: float = 3e11

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be a number above 0, not {quoted(value)}"
            for name, value in vars(self).items()
            if value is not None
            and name not in ("gated", "sequence", "latency")
            and not (is_number(value) and value > 0)
        ]
        if faults:
            raise CostError(listed("there is no transformer of these sizes", faults))

    @property
    def tokens(self) -> float:
        """Of a microbatch."""
        return self.context * self.rows

    @property
    def boundary(self) -> float:
        """Bytes of the hidden state of a microbatch that a device has between layers."""
        return self._whole / (self.tensor if self.sequence else 1)

    @property
    def _whole(self) -> float:
        return 2 * self.width * self.tokens

    @property
    def transfer(self) -> float:
        """Seconds of a hop."""
        return self.latency + self._whole / self.tensor / self.bandwidth

    def costs(self) -> dict[str, LayerCost]:
        """Of the embedding "E", a layer "t", and the head with its loss "L"."""
        ffn = 4 * self.width if self.ffn is None else self.ffn
        queries, keys = self.width * self.q_share, self.width * self.kv_share
        matrices = 3 if self.gated else 2
        weights = self.width * (2 * queries + 2 * keys + matrices * ffn)
        rate = self.tensor * self.flops
        matmul = 2 * weights * self.tokens / rate
        # Scores and values, half of them masked: 2 * context * queries a token; the backward does
        # twice as much.
        scores = 2 * self.context * queries * self.tokens / rate
        summed = 2 * self._all_reduce
        forward = matmul + scores + summed
        # Numbers of 2 bytes that a token's forward keeps besides its input: the queries, keys and
        # values, attention's output and x after it, and the hidden features of the MLP (two of a
        # GELU, three of a SwiGLU).  Under "dots" the results of products with weights; attention is
        # done again.
        between = self.width * (self.tensor if not self.sequence else 1)
        none = between + 2 * queries + 2 * keys + matrices * ffn
        dots = between + queries + 2 * keys + (matrices - 1) * ffn
        # I leaves these for W: the gradients of the results of products with weights, and the
        # recomputed inputs.
        left = 2 * between + queries + 2 * keys + (1 if self.gated else 0) * ffn

        def numbers(count: float) -> float:
            return 2 * self.tokens * count / self.tensor

        # Statistics of two norms and of attention's rows, 4 bytes each.
        statistics = 4 * self.tokens * (3 + queries / self.head / self.tensor)
        table = self.vocab * self.width
        head = 2 * table * self.tokens / rate
        logits = 4 * self.vocab * self.tokens / self.tensor
        return {
            "E": LayerCost(
                forward=0,
                input_grad=0,
                weight_grad=0,
                boundary=self.boundary,
                ends=Ends.EITHER,
                **self._held(table),
            ),
            "t": LayerCost(
                forward=forward,
                input_grad=matmul + 2 * scores + summed,
                weight_grad=matmul,
                residuals=numbers(none) + statistics,
                boundary=self.boundary,
                stash=numbers(left),
                policies={
                    "dots_with_no_batch_dims_saveable": Kept(
                        numbers(dots), scores, numbers(left + between + (matrices - 2) * ffn)
                    ),
                    "nothing_saveable": Kept(
                        0.0, forward, numbers(left + 2 * between + (matrices - 1) * ffn)
                    ),
                },
                **self._held(weights),
            ),
            "L": LayerCost(
                forward=head,
                input_grad=head,
                weight_grad=head,
                workspace=2 * logits * min(1, (self.loss_tokens or self.context) / self.context),
                stash=logits / 2,
                ends=Ends.EITHER,
                **self._held(table),
            ),
        }

    @property
    def _all_reduce(self) -> float:
        """Seconds in which the devices of a layer sum a hidden state."""
        return 2 * (self.tensor - 1) / self.tensor * self._whole / self.tensor_bandwidth

    def _held(self, weights: float) -> dict[str, Any]:
        each = weights / self.tensor
        return {"parameters": 2 * each, "gradients": 4 * each, "optimizer": 12 * each / self.shards}
