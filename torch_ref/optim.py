"""torch.optim with optax's formulas: what to write on each side to get the same steps.

    optax                                                       here
    chain(clip_by_global_norm(c), adamw(lr, b1, b2, eps,        AdamW(lr, b1=, b2=, eps=,
          weight_decay=, no_decay=, clip=c) weight_decay=, mask=))
    chain(clip_by_global_norm(c), add_decayed_weights(wd,       SGD(lr, momentum=, nesterov=,
          weight_decay=wd, no_decay=, clip=c) mask), sgd(lr, momentum, nesterov))
    linear_schedule / warmup_cosine_decay_schedule              Warmup / WarmupCosine

What is the same, and what is not (torch 2.13, optax 0.2.8):

- adamw: m_hat / (sqrt(v_hat) + eps), eps outside the root and after the bias correction, in both.
  torch divides sqrt(v) by the root of the correction and optax v by the correction: equal but for
  rounding.  optax's `eps_root` has no counterpart (leave it 0).
- weight decay: torch multiplies p by 1 - lr wd before the step, optax adds wd p to the update
  before it is scaled by lr: equal but for rounding.  Defaults differ: torch 1e-2, optax 1e-4; here
  there is none unless it is given.
- clipping: optax multiplies by c / norm, and only where norm >= c.  torch's `clip_grad_norm_`
  multiplies by c / (norm + 1e-6), which is not the same (relative 1e-6 / norm), so it is not used:
  `clip` below is optax's formula.
- schedules: optax asks for step 0, 1, 2, ... ; the first update has the rate of step 0 (0 where a
  warm-up starts at 0). `torch.optim.lr_scheduler.LambdaLR` counts in the same way. But optax
  computes a rate in float32, even under x64, since its count is an int32 (relative 1e-8, and a
  compiled program rounds it in another way than an uncompiled one); ours is a Python float.  To
  compare in float64, either give optax `lambda count: schedule(count.astype(jnp.float64))`, or give
  both sides one list: `rates`, `lambda count: jnp.asarray(rates)[count]`.
- SGD: torch's first momentum buffer is the gradient, optax's is the gradient plus decay times zero:
  the same.  torch's `weight_decay` is added to the gradient, which is `add_decayed_weights` before
  `sgd`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .errors import TorchRefError

# One rate for all steps, one a step, or a function of the step.
Rate: TypeAlias = float | Sequence[float] | Callable[[int], float]


@dataclass(frozen=True)
class Warmup:
    """From `init` to `peak` in a straight line over `steps` steps, `peak` from then on
    (optax.linear_schedule).
    """

    peak: float
    steps: int
    init: float = 0.0

    def __call__(self, step: int) -> float:
        """The rate of a step, from 0."""
        return (
            self.peak
            if step >= self.steps
            else self.init + (self.peak - self.init) * step / self.steps
        )


@dataclass(frozen=True)
class WarmupCosine:
    """A warm-up, then half a cosine down to `end` at step `decay_steps`
    (optax.warmup_cosine_decay_schedule).
    """

    peak: float
    warmup_steps: int
    decay_steps: int  # of warm-up and decay together
    init: float = 0.0
    end: float = 0.0

    def __post_init__(self) -> None:
        if self.decay_steps <= self.warmup_steps:
            raise TorchRefError(
                f"decay_steps ({self.decay_steps}) counts the warm-up too, so it must be more "
                f"than {self.warmup_steps}"
            )

    def __call__(self, step: int) -> float:
        """The rate of a step, from 0."""
        if step < self.warmup_steps:
            return Warmup(self.peak, self.warmup_steps, self.init)(step)
        whole = self.decay_steps - self.warmup_steps
        cosine = 0.5 * (1 + math.cos(math.pi * min(step - self.warmup_steps, whole) / whole))
        return self.end + (self.peak - self.end) * cosine


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay; names that match a pattern of `no_decay` (`*/bias`) are not
    decayed.
    """

    rate: Rate
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()
    clip: float | None = None

    def build(self, params: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """The optimizer of these parameters."""
        groups = _groups(params, self.weight_decay, self.no_decay)
        return torch.optim.AdamW(groups, lr=1.0, betas=(self.b1, self.b2), eps=self.eps)


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum; the weight decay is added to the gradient."""

    rate: Rate
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()
    clip: float | None = None

    def build(self, params: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """The optimizer of these parameters."""
        groups = _groups(params, self.weight_decay, self.no_decay)
        return torch.optim.SGD(groups, lr=1.0, momentum=self.momentum, nesterov=self.nesterov)


Optimizer: TypeAlias = AdamW | SGD


def rate_of(rate: Rate, step: int) -> float:
    """The learning rate of a step, from 0."""
    if callable(rate):
        return rate(step)
    if isinstance(rate, int | float):
        return rate
    if step >= len(rate):
        raise TorchRefError(
            f"there are {len(rate)} rates, but step {step} needs one more; give a rate for every "
            "step"
        )
    return rate[step]


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The root of the sum of all squares."""
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()


def clip(gradients: Mapping[str, Tensor], largest: float) -> dict[str, Tensor]:
    """optax.clip_by_global_norm: every gradient times `largest` / norm, where the norm is not below
    `largest`.
    """
    norm = global_norm(gradients.values())
    if norm < largest:
        return dict(gradients)
    return {name: gradient / norm * largest for name, gradient in gradients.items()}


def _groups(
    params: Mapping[str, Tensor], decay: float, no_decay: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The parameters with and those without weight decay; TorchRefError for a pattern that matches
    nothing.
    """
    idle = [pattern for pattern in no_decay if not any(fnmatch(name, pattern) for name in params)]
    if idle:
        raise TorchRefError(
            f"no_decay patterns {idle} match no parameter; the names are {', '.join(params)}"
        )
    spared = {name for name in params if any(fnmatch(name, pattern) for pattern in no_decay)}
    decayed = [value for name, value in params.items() if name not in spared]
    groups = [
        {"params": decayed, "weight_decay": decay},
        {"params": [params[n] for n in params if n in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
