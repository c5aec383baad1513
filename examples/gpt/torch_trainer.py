"""The third way of `--verify`: torch_ref runs the same table on the same weights, and
torch.optim.AdamW updates them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import jaxpipe as jp

# torch_ref is part of a checkout, and not of the wheel
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch_ref
from torch_ref import optim
from torch_ref.models import GPT as TorchGPT

from .model import GPT
from .optimizer import BETAS, EPS


class Torch:
    """torch_ref, which reads the table as CSV, and torch.optim.AdamW."""

    def __init__(
        self,
        model: GPT,
        schedule: jp.Schedule,
        args: argparse.Namespace,
        weights: dict[str, np.ndarray],
    ) -> None:
        self.table = schedule.to_csv()
        self.model = TorchGPT(
            num_stages=model.stages,
            layers_per_stage=model.layers // model.stages,
            vocab=model.vocab,
            block=model.context,
            width=model.width,
            heads=model.heads,
            mlp_ratio=model.mlp_ratio,
            tied=model.tied,
        )
        self.rule = optim.AdamW(
            lambda step: args.rate * min(1.0, (step + 1) / args.warmup),
            b1=BETAS[0],
            b2=BETAS[1],
            eps=EPS,
            weight_decay=args.decay,
            no_decay=tuple(name for name in weights if not name.endswith("kernel")),
            clip=args.clip,
        )
        self.clip: float = args.clip
        self.weights = {name: torch.tensor(value) for name, value in weights.items()}
        self.optimizer = self.rule.build(self.weights)
        self.steps = 0

    def step(self, batch: Any) -> tuple[float, dict[str, np.ndarray]]:
        result = torch_ref.run(
            self.table,
            self.model,
            batch,
            weights={name: w.numpy() for name, w in self.weights.items()},
        )
        clipped = optim.clip(
            {name: torch.from_numpy(g) for name, g in result.grads.items()}, self.clip
        )
        for name, weight in self.weights.items():
            weight.grad = clipped[name]
        for group in self.optimizer.param_groups:
            group["lr"] = optim.rate_of(self.rule.rate, self.steps)
        self.optimizer.step()
        self.steps += 1
        return float(result.loss), result.grads
