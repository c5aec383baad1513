"""Name -> twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Twin
from .conv import conv
from .gpt import gpt
from .mlp import mlp, mlp_nnx
from .moe import moe
from .rnn import rnn


def _builders() -> dict[str, Callable[..., Twin]]:
    return {"conv": conv, "gpt": gpt, "mlp": mlp, "mlp_nnx": mlp_nnx, "moe": moe, "rnn": rnn}


def names() -> tuple[str, ...]:
    """Every model that is written twice."""
    return tuple(_builders())


def twin(name: str, stages: int, **flags: Any) -> Twin:
    """The twin with this name and number of stages; flags are the fields of the torch_ref model."""
    return _builders()[name](stages, **flags)
