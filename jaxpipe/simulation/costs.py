"""What actions cost: one number for all stages, or one a stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

from ..errors import CostError
from ..table.kinds import KINDS, Kind, Release

Cost: TypeAlias = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Costs in any one unit of time (and of memory); each is a number, or a sequence of one entry a stage.

    Whole numbers stay whole, so `makespan` of whole costs is an int.

    Args:
        forward: time of F.
        input_grad: time of I.
        weight_grad: time of W.
        transfer: time from the end of a producer until its result is on another device (latency of one hop); an entry
            of a sequence is for what that stage sends, forwards or backwards.
        backward: time of a full backward B; I + W where it is None.
        overlap: time of an overlapped pair; the sum of its halves where it is None.  An entry of a sequence is for
            pairs whose forward is of that stage.
        activation: memory that a stage's activations of one microbatch take.
        release: whether they die at the end of W (the default) or of I, where the backward is split.
        recompute: time of R; as `forward` where it is None.
        checkpoint: memory of a stage's input of one microbatch, which is all that its F keeps where the table has an R for it.

    Raises:
        CostError: an entry is negative or not a finite number.  `simulate` raises it too, where a sequence has another
            length than the schedule has stages.

    >>> Costs(forward=[1, 2], transfer=0.5).forward
    (1, 2)
    """

    forward: Cost = 1
    input_grad: Cost = 1
    weight_grad: Cost = 1
    transfer: Cost = 0
    backward: Cost | None = None
    overlap: Cost | None = None
    activation: Cost = 1
    release: Release = Release.WEIGHT_GRAD
    recompute: Cost | None = None
    checkpoint: Cost = 0

    def __post_init__(self) -> None:
        faults = []
        for name, value in self._given():
            entries = (value,) if _is_number(value) else tuple(value)  # type: ignore[arg-type]
            if not _is_number(value):
                object.__setattr__(self, name, entries)
            faults += [f"{name} holds {e!r}; a cost is a finite number >= 0" for e in entries if not _is_cost(e)]
        if faults:
            raise CostError("\n".join(faults))

    def _given(self) -> list[tuple[str, Cost]]:
        """(name, value) of each cost that is not None."""
        values = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "release"]
        return [(name, value) for name, value in values if value is not None]

    def for_stages(self, num_stages: int) -> StageCosts:
        """Every cost as a tuple of one entry a stage; CostError lists each sequence of another length."""
        wrong = [
            f"Costs.{name} has {len(value)} entries, but the schedule has {num_stages} stages; give one number, or one a stage"
            for name, value in self._given()
            if isinstance(value, tuple) and len(value) != num_stages
        ]
        if wrong:
            raise CostError("\n".join(wrong))
        every = {name: _spread(value, num_stages) for name, value in self._given()}
        split = tuple(i + w for i, w in zip(every["input_grad"], every["weight_grad"], strict=True))
        return StageCosts(
            forward=every["forward"],
            input_grad=every["input_grad"],
            weight_grad=every["weight_grad"],
            backward=every.get("backward", split),
            transfer=every["transfer"],
            overlap=every.get("overlap"),
            activation=every["activation"],
            recompute=every.get("recompute", every["forward"]),
            checkpoint=every["checkpoint"],
        )


@dataclass(frozen=True)
class StageCosts:
    """`Costs` with one entry a stage each; `overlap` is None where a pair costs the sum of its halves."""

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...]
    transfer: tuple[float, ...]
    overlap: tuple[float, ...] | None
    activation: tuple[float, ...]
    recompute: tuple[float, ...]
    checkpoint: tuple[float, ...]

    def of(self, kind: Kind) -> tuple[float, ...] | None:
        """The time of each stage's actions of a kind; None where these take none of their own."""
        name = KINDS[kind].cost
        return None if name is None else getattr(self, name)


def _spread(value: Cost, num_stages: int) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * num_stages


def _is_number(value: object) -> bool:
    """True for Python's and numpy's real numbers."""
    return not isinstance(value, str) and hasattr(value, "__float__") and not hasattr(value, "__len__")


def _is_cost(value: object) -> bool:
    return _is_number(value) and math.isfinite(float(value)) and float(value) >= 0  # type: ignore[arg-type]
