"""What a device keeps of a microbatch between its actions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .cut import PendingWeights, Uses
from .models.base import Value
from .slices import Left


@dataclass
class Saved:
    """What a forward keeps for its backward."""

    inputs: list[Tensor]
    uses: Uses
    roots: list[Tensor]  # the outputs, or the loss; an auxiliary loss is the last one
    seeds: list[Tensor | None]  # the gradients of roots that are known already: of losses
    embedded: list[Tensor]  # what `first` made, on stage 0
    embedding_uses: Uses | None
    earlier: list[Tensor]  # further inputs, which earlier slices of the sequence left


@dataclass
class Input:
    """What a forward keeps where the table has an R for it: the stage's input; None on stage 0,
    which starts from the batch.
    """

    x: Value | None


@dataclass
class Ran:
    """What running a stage gives; `y` is handed on, or the loss and its count are
    the microbatch's.
    """

    saved: Saved
    y: Value
    aux: Tensor | None
    loss: Tensor | None = None
    count: Tensor | None = None
    left: Left | None = None  # to later slices of the sequence, where there are any


@dataclass
class Late:
    """What an input gradient leaves for the weight gradient."""

    stage: PendingWeights
    first: PendingWeights | None
