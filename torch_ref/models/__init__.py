"""The reference models; each file's docstring has its exact formulas, parameter names
and shapes.
"""

from .base import Context, StagedModel, SumCount, WithAux
from .build import build, names
from .conv import ConvNet
from .gpt import GPT
from .llama import Llama
from .mixture import Mixture
from .mlp import MLP
from .moe import MoE
from .rnn import RNN

__all__ = [
    "GPT",
    "MLP",
    "RNN",
    "Context",
    "ConvNet",
    "Llama",
    "Mixture",
    "MoE",
    "StagedModel",
    "SumCount",
    "WithAux",
    "build",
    "names",
]
