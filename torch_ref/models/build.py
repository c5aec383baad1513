"""Name and sizes -> model, for files and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..errors import TorchRefError
from .base import StagedModel
from .conv import ConvNet
from .gpt import GPT
from .llama import Llama
from .mlp import MLP
from .moe import MoE
from .rnn import RNN


def _models() -> dict[str, type[Any]]:
    return {"conv": ConvNet, "gpt": GPT, "llama": Llama, "mlp": MLP, "moe": MoE, "rnn": RNN}


def names() -> tuple[str, ...]:
    """Every name that `build` accepts."""
    return tuple(sorted(_models()))


def build(name: str, config: Mapping[str, Any]) -> StagedModel:
    """Make a model of its name and fields, `{"num_stages": 2, "width": 16}`; TorchRefError names
    every field that is not one.
    """
    models = _models()
    if name not in models:
        raise TorchRefError(f"there is no model {name!r}; write one of {', '.join(names())}")
    known = [field.name for field in fields(models[name])]
    unknown = [key for key in config if key not in known]
    if unknown:
        raise TorchRefError(
            f"{name} has no {', '.join(unknown)}; its fields are {', '.join(known)}"
        )
    if "num_stages" not in config:
        raise TorchRefError(f"{name} needs num_stages, the number of stages of the table")
    model: StagedModel = models[name](**config)
    return model
