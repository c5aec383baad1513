"""The reference models; each file's docstring has its exact formulas, parameter names and shapes."""

from .base import Context, StagedModel, SumCount, WithAux
from .gpt import GPT
from .mlp import MLP

__all__ = ["GPT", "MLP", "Context", "StagedModel", "SumCount", "WithAux"]
