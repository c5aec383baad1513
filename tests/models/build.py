"""Name -> twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Twin
from .conv import conv
from .gpt import gpt
from .gpt_nnx import gpt_nnx
from .gpt_plain import gpt_plain
from .mlp import mlp, mlp_linen, mlp_nnx
from .moe import moe
from .rnn import rnn


def _builders() -> dict[str, Callable[..., Twin]]:
    written_once = {"conv": conv, "gpt": gpt, "mlp": mlp, "moe": moe, "rnn": rnn}
    return written_once | {
        "gpt_nnx": gpt_nnx,
        "gpt_plain": gpt_plain,
        "mlp_linen": mlp_linen,
        "mlp_nnx": mlp_nnx,
    }


def names() -> tuple[str, ...]:
    """Every model that is written twice."""
    return tuple(_builders())


def twin(name: str, stages: int, **flags: Any) -> Twin:
    """The twin with this name and number of stages; flags are the fields of the torch_ref model."""
    return _builders()[name](stages, **flags)
