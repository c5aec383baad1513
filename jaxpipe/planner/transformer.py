"""Costs of the layers of a decoder-only transformer, estimated from its sizes: flops at a rate that
is reached, bytes by formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import CostError, listed, quoted
from ..table.limits import is_number
from .layer_cost import LayerCost


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A transformer by its sizes, and how a device computes it; what `jaxpipe plan --width ...`
    describes.

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
        tensor: devices that share a layer (tensor parallelism); they share what it computes and
            keeps.
        shards: devices over which optimizer state is sharded.
        flops: floating point operations a second that one device reaches in matmuls.
        bandwidth: bytes a second between neighbours of the pipeline.
        latency: seconds of a hop besides.
    """

    width: float
    vocab: float
    context: float = 4096
    rows: float = 1
    ffn: float | None = None
    gated: bool = False
    kv_share: float = 1.0
    tensor: float = 1
    shards: float = 1
    flops: float = 4e14
    bandwidth: float = 5e10
    latency: float = 1e-5

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be a number above 0, not {quoted(value)}"
            for name, value in vars(self).items()
            if value is not None
            and name not in ("gated", "latency")
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
        """Bytes of the hidden state of a microbatch."""
        return 2 * self.width * self.tokens

    @property
    def transfer(self) -> float:
        """Seconds of a hop."""
        return self.latency + self.boundary / self.tensor / self.bandwidth

    def costs(self) -> dict[str, LayerCost]:
        """Of the embedding "E", a layer "t", and the head with its loss "L"."""
        ffn = 4 * self.width if self.ffn is None else self.ffn
        attention = self.width * self.width * (2 + 2 * self.kv_share)
        weights = attention + (3 if self.gated else 2) * self.width * ffn
        matmul = 2 * weights * self.tokens / self.tensor / self.flops
        # Scores and values, half of them masked: 2 * context * width a token; the backward does
        # twice as much.
        scores = 2 * self.context * self.width * self.tokens / self.tensor / self.flops
        # Inputs of matmuls and norms, 2 bytes each: x, its norm, q, k, v, attention's output, x
        # again, its norm, and the MLP's hidden ones.
        kept = (
            2
            * self.tokens
            * (self.width * (6 + 2 * self.kv_share) + (3 if self.gated else 2) * ffn)
            / self.tensor
        )
        table = self.vocab * self.width
        head = 2 * table * self.tokens / self.tensor / self.flops
        return {
            "E": LayerCost(
                forward=0, input_grad=0, weight_grad=0, boundary=self.boundary, **self._held(table)
            ),
            "t": LayerCost(
                forward=matmul + scores,
                input_grad=matmul + 2 * scores,
                weight_grad=matmul,
                residuals=kept,
                boundary=self.boundary,
                **self._held(weights),
            ),
            "L": LayerCost(
                forward=head,
                input_grad=head,
                weight_grad=head,
                workspace=2 * 4 * self.vocab * self.tokens / self.tensor,
                **self._held(table),
            ),
        }

    def _held(self, weights: float) -> dict[str, float]:
        each = weights / self.tensor
        return {"parameters": 2 * each, "gradients": 4 * each, "optimizer": 12 * each / self.shards}
