"""What every reference model is: a first function, S stages, a last function, and named parameters.

Parameters are a flat mapping from a name to an array.  A name is a path joined by "/", and its
first part says who owns the array:

    first/...    used by `first` only
    stages/...   a leading axis of S stages, in model order (then a leading axis of L layers, where
    a stage stacks layers) last/...     used by `last` only shared/...   used by several of them (a
    tied embedding); its gradient is the sum over all uses

A dense layer's `kernel` is [in, out], as in flax.  A convolution's is [height, width, in, out].
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import WeightsError
from ..slices import Passing

Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]
Params: TypeAlias = Mapping[str, Tensor]
Batch: TypeAlias = Mapping[str, Tensor]
# What flows between stages: a tensor, or a dict, tuple or list of such values.
Value: TypeAlias = Any


@dataclass(frozen=True)
class Context:
    """Where a function runs: the stage, the microbatch and the training step (a path for
    randomness, later).

    With slices of sequences a microbatch is a slice, and `passing` connects it with the others of
    its sequence on the same stage.
    """

    stage: int
    microbatch: int
    step: int = 0
    passing: Passing = field(default_factory=Passing)

    @property
    def carry(self) -> Value:
        """What the slice before handed on; None for the first slice of a sequence."""
        before = self.passing.before
        return before[-1]["carry"] if before else None

    def hand_on(self, carry: Value) -> None:
        """Give a value to the next slice of the sequence."""
        self.passing.left["carry"] = carry

    def append(self, name: str, rows: Tensor, dim: int = 1) -> Tensor:
        """The rows of this name of all slices so far, joined along `dim`; later slices get these
        rows too.
        """
        return self.passing.append(name, rows, dim)

    def offset(self, length: int) -> int:
        """Position in its sequence of the first row of a slice of this length."""
        return self.passing.number * length


@dataclass(frozen=True)
class WithAux:
    """A stage's output together with an auxiliary loss (a scalar) that is added to its microbatch's
    loss.
    """

    x: Value
    aux: Tensor


@dataclass(frozen=True)
class SumCount:
    """A loss as a sum and a count: the whole batch's loss is the sum of sums divided once by the
    sum of counts.
    """

    loss_sum: Tensor
    count: Tensor


class StagedModel(abc.ABC):
    """A model cut into S stages, as pure functions of named parameters.

    `first` and `last` see the names `first/...`, `last/...` and `shared/...`; a stage sees its own
    slice of every `stages/...` (without the leading axis of S) and `shared/...`.
    """

    num_stages: int
    # Whether stages are right for slices of sequences: they pass on all that later slices need.
    takes_slices: ClassVar[bool] = False
    # Whether `last` returns a sum and a count: a field of the models that can do both.
    sum_count: bool

    @abc.abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and whole shape, the leading axis of S included."""

    def first(self, params: Params, microbatch: Batch, ctx: Context) -> Value:
        """Turn a microbatch into the first stage's input; by default it is the microbatch's `x`."""
        return microbatch["x"]

    @abc.abstractmethod
    def stage(self, params: Params, x: Value, ctx: Context) -> Value | WithAux:
        """Run one stage."""

    @abc.abstractmethod
    def last(self, params: Params, x: Value, microbatch: Batch, ctx: Context) -> Tensor | SumCount:
        """Turn the last stage's output into the microbatch's loss: a scalar, or a sum and
        a count.
        """

    def init(self, seed: int = 0, *, dtype: Any = np.float64) -> Arrays:
        """Draw weights: kernels and embeddings normal with deviation 1/sqrt(fan in), scales near
        one, biases near zero.

        Scales and biases are not exactly one and zero, so that a mistake in them shows.
        """
        rng = np.random.default_rng(seed)
        return {
            name: _draw(rng, name, shape).astype(dtype) for name, shape in self.shapes().items()
        }

    def check(self, weights: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Raise WeightsError that lists every missing, unexpected and wrongly shaped array."""
        shapes = self.shapes()
        faults = [
            f"{name} is missing (shape {shape})"
            for name, shape in shapes.items()
            if name not in weights
        ]
        faults += [
            f"{name} is not a parameter of this model" for name in weights if name not in shapes
        ]
        faults += [
            f"{name} has shape {tuple(weights[name].shape)}; it must be {shape}"
            for name, shape in shapes.items()
            if name in weights and tuple(weights[name].shape) != shape
        ]
        if faults:
            raise WeightsError(
                "the weights do not fit the model:\n" + "\n".join(f"  {f}" for f in faults)
            )


def dense(params: Params, name: str, x: Tensor) -> Tensor:
    """`x @ name/kernel + name/bias`."""
    return torch.matmul(x, params[f"{name}/kernel"]) + params[f"{name}/bias"]


def owner(name: str) -> str:
    """The first part of a parameter's name: first, stages, last or shared."""
    return name.split("/", 1)[0]


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    noise = rng.standard_normal(shape)
    if name.endswith("scale"):
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    fan_in = (
        math.prod(shape[-4:-1]) if name.startswith(("stages/conv", "first/conv")) else shape[-2]
    )
    return noise / math.sqrt(fan_in)
