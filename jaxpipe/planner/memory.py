"""What one device holds while the lowered program runs: parameters, accumulators, optimizer state, pools, workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..layouts.layout import Layout
from ..lowering.plan import Plan
from ..table.kinds import Kind
from ..table.placement import Placement
from .layer_cost import FIRST, LAST, LayerCost, Remat, is_first, is_last, total

# Buffers of one boundary each besides the pools: what is sent forwards and backwards, and what arrives.
_TRANSFER_BUFFERS = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on one device by what they are for.

    All devices run one program, so pools, and what `first` and `last` hold, are the same on all of them; so is the room for parameters.
    """

    stages: float  # parameters, accumulators and optimizer state of the device's layers
    outer: float  # those of `first` and `last`, which every device holds
    residuals: float  # pools of what forwards keep
    stash: float  # and of what I leaves for W
    boundaries: float  # pools of stage inputs and of cotangents, and buffers of transfers
    workspace: float  # while a layer runs

    @property
    def total(self) -> float:
        """All of it."""
        return self.stages + self.outer + self.residuals + self.stash + self.boundaries + self.workspace


def memory_of(layout: Layout, placement: Placement, costs: Mapping[str, LayerCost], plan: Plan, *, remat: Remat) -> Memory:
    """The memory of a device for a schedule's plan; pools are as large as on the device that needs most."""
    slots = plan.program().slots
    splits = bool(plan.ticks.schedule.encoded.of_kinds((Kind.I,)).any())
    last = layout.num_stages - 1
    inner = [
        [costs[letter] for letter in letters if not (is_first(s, letter) or is_last(s, last, letter))]
        for s, letters in enumerate(layout.stages)
    ]
    kept = max(total(stage, "residuals") for stage in inner)
    left = max(total(stage, "stash") for stage in inner)
    outer = [costs[letter] for letter in (FIRST, LAST) if letter in layout.layers]
    # Every stage takes what the last layer of the one before it returns.
    boundary = max((costs[letters[-1]].boundary for letters in layout.stages[:-1] if letters), default=0.0)
    boundary = max(boundary, costs[FIRST].boundary if FIRST in layout.layers else 0.0)
    full = remat is Remat.FULL
    return Memory(
        stages=max(sum(total(inner[s], "held_bytes") for s in stages) for stages in placement.stages_of),
        outer=total(outer, "held_bytes"),
        residuals=0.0 if full else kept * slots.residual_weight,
        stash=(left + full * kept) * slots.stash if splits else 0.0,
        boundaries=boundary * (slots.x + slots.cotangent + _TRANSFER_BUFFERS),
        workspace=max(costs[letter].workspace for letter in layout.layers) + (0.0 if splits or not full else kept),
    )
