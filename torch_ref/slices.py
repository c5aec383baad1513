"""Slices of a sequence: the values that one slice leaves to the later slices on the same stage.

Microbatch m of a table with K slices is slice m % K of sequence m // K.  A stage may hand on a
carry to the next slice, and it may append rows that all later slices read.  Both are plain outputs
of the slice that made them, and plain inputs of the later slices.  So no buffer has rows of later
slices, and no mask has to hide them.  The gradients that later slices give for an output add up,
and the backward of the slice that made the output starts from their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import tree
from .errors import TorchRefError

# What a slice leaves: {"carry": a value, () where there is none, "rows": {name: rows}}.
Left: TypeAlias = dict[str, Any]


class Passing:
    """What one run of a stage takes from the slices before it, and what it leaves.

    Args:
        number: of the slice in its sequence.
        before: what the slices before it left, in order.
    """

    def __init__(self, number: int = 0, before: Sequence[Left] = ()) -> None:
        self.number = number
        self.inputs = [
            leaf.detach().requires_grad_(leaf.is_floating_point())
            for leaf in tree.leaves(list(before))
        ]
        self.before: list[Left] = tree.rebuild(list(before), self.inputs)
        self.left: Left = {"carry": (), "rows": {}}

    def append(self, name: str, rows: Tensor, dim: int) -> Tensor:
        """The rows of all slices so far; TorchRefError for a name that does not fit."""
        if name in self.left["rows"]:
            raise TorchRefError(f"rows {name!r} are appended twice; give each their own name")
        absent = [n for n, left in enumerate(self.before) if name not in left["rows"]]
        if absent:
            raise TorchRefError(
                f"slice {self.number} appends rows {name!r}, but slice {absent[0]} did not; "
                "append the same names in every slice"
            )
        self.left["rows"][name] = rows
        return torch.cat([*(left["rows"][name] for left in self.before), rows], dim)


class Sequences:
    """What the slices of all sequences have left on each stage, and the gradients of it."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self.left: dict[tuple[int, int], Left] = {}  # (stage, microbatch) -> what it left
        # -> the gradients of its leaves that later slices have given
        self.arrived: dict[tuple[int, int], list[Tensor | None]] = {}

    def before(self, m: int) -> range:
        """The earlier slices of the same sequence."""
        return range(m - m % self.slices, m)

    def is_followed(self, m: int) -> bool:
        """Whether the sequence has a later slice."""
        return (m + 1) % self.slices > 0

    def passing(self, stage: int, m: int) -> Passing:
        """What a run of a stage is given."""
        return Passing(m % self.slices, [self.left[stage, n] for n in self.before(m)])

    def keep(self, stage: int, m: int, left: Left | None, *, forward_only: bool) -> None:
        """Keep what a slice left; a table of forwards drops all of it with the last slice."""
        if left is not None:
            kept = [leaf.detach() for leaf in tree.leaves(left)]
            self.left[stage, m] = tree.rebuild(left, kept)
        elif forward_only:
            for n in self.before(m):
                del self.left[stage, n]

    def take(self, stage: int, m: int) -> list[Tensor | None]:
        """The gradients of what a slice left; both are dropped, since no later slice is to come."""
        left = self.left.pop((stage, m), None)
        count = 0 if left is None else len(tree.leaves(left))
        return self.arrived.pop((stage, m), [None] * count)

    def give(self, stage: int, m: int, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of all that slice m was given to those of the slices that made it."""
        given = iter(gradients)
        for n in self.before(m):
            count = len(tree.leaves(self.left[stage, n]))
            sums = self.arrived.get((stage, n), [None] * count)
            self.arrived[stage, n] = [_added(total, next(given)) for total in sums]


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None else total if more is None else total + more
