"""What one device holds while the lowered program runs: parameters, accumulators, optimizer state,
pools, workspace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest

from ..engine.timeline import Timeline
from ..layouts.layout import Layout
from ..program.pools import Slots
from ..table.kinds import Kind
from ..table.placement import Placement
from ..table.schedule import Schedule
from .layer_cost import FIRST, LAST, LayerCost, Remat, is_first, is_last, total

# Buffers of one boundary each besides the pools: what is sent forwards and backwards.
_TRANSFER_BUFFERS = 2


@dataclass(frozen=True)
class Memory:
    """Bytes on one device by what they are for.

    All devices run one program, so pools, and what `first` and `last` hold, are the same on all of
    them; so is the room for parameters.
    """

    stages: float  # parameters, accumulators and optimizer state of the device's layers
    outer: float  # those of `first` and `last`, which every device holds
    residuals: float  # pools of what forwards keep
    stash: float  # and of what I leaves for W
    boundaries: float  # pools of stage inputs and of cotangents, and buffers of transfers
    workspace: float  # while a block runs
    batch: float = 0.0  # the whole batch of a step, and what is computed from parameters once
    # gradients of `first` and `last` as they come out of a sum over devices, but for what lies
    # there before
    summed: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.stages
            + self.outer
            + self.residuals
            + self.stash
            + self.boundaries
            + self.workspace
            + self.batch
            + self.summed
        )


def least_bytes(layers: str, costs: Mapping[str, LayerCost], devices: int) -> float:
    """Parameters, gradients and optimizer state that some device holds, however layers
    are split.
    """
    inner = sum(costs[c].held_bytes for c in layers if c not in (FIRST, LAST))
    return inner / devices + sum(costs[c].held_bytes for c in {*layers} & {FIRST, LAST})


def least_slots(timeline: Timeline) -> Slots:
    """Entries of pools that any program of a simulated table has: it keeps the order of rows, so
    that as many forwards are kept.
    """
    return Slots(
        x=1,
        residual_input=1,
        residual_weight=max(timeline.peak_activations),
        cotangent=1,
        stash=1,
        first=1,
    )


def memory_of(
    layout: Layout,
    schedule: Schedule,
    costs: Mapping[str, LayerCost],
    slots: Slots,
    *,
    remat: Remat,
    in_place: bool = True,
) -> Memory:
    """The memory of a device for a program of a schedule; pools are as large as on the device that
    needs most.

    `in_place` says whether gradients are summed over devices where they are, as on GPUs and not on
    CPU devices.
    """
    placement = schedule.placement
    splits = bool(schedule.encoded.of_kinds((Kind.I,)).any())
    inner = _inner(layout)
    kept = _slot_bytes([_kept(letters, costs, "residuals") for letters in inner])
    left = _slot_bytes([_kept(letters, costs, "stash") for letters in inner])
    outer = [costs[letter] for letter in (FIRST, LAST) if letter in layout.layers]
    # Every stage takes what the last layer of the one before it returns.
    boundary = max(
        (costs[letters[-1]].boundary for letters in layout.stages[:-1] if letters), default=0.0
    )
    boundary = max(boundary, costs[FIRST].boundary if FIRST in layout.layers else 0.0)
    full = remat is Remat.FULL
    # Recomputed residuals are arrays of the block that uses them, which the work space of a layer
    # does not have.
    again = 0.0 if splits or not full else kept
    found = Memory(
        stages=_chunk_bytes(inner, placement, costs, "held_bytes"),
        outer=total(outer, "held_bytes"),
        residuals=0.0 if full else kept * slots.residual_weight,
        stash=(left + full * kept) * slots.stash if splits else 0.0,
        boundaries=boundary * (slots.x + slots.cotangent + _TRANSFER_BUFFERS),
        workspace=max(
            total(outer[:1], "workspace"),
            total(outer[1:], "workspace"),
            *(costs[c].workspace for letters in inner for c in letters),
        )
        + again,
        batch=schedule.num_microbatches * total(outer, "batch")
        + total(outer, "hoisted")
        + _chunk_bytes(inner, placement, costs, "hoisted"),
    )
    ticks = found.residuals + found.stash + found.boundaries + found.workspace
    return (
        found
        if in_place
        else replace(found, summed=max(0.0, total(outer, "gradient_bytes") - ticks))
    )


def optimizer_bytes(layout: Layout, placement: Placement, costs: Mapping[str, LayerCost]) -> float:
    """Of a device's optimizer state."""
    outer = [costs[letter] for letter in (FIRST, LAST) if letter in layout.layers]
    return total(outer, "optimizer_bytes") + _chunk_bytes(
        _inner(layout), placement, costs, "optimizer_bytes"
    )


def _inner(layout: Layout) -> list[str]:
    """The letters of each stage that are neither `first` nor `last`."""
    last = layout.num_stages - 1
    return [
        "".join(c for c in letters if not (is_first(s, c) or is_last(s, last, c)))
        for s, letters in enumerate(layout.stages)
    ]


def _runs(letters: str) -> list[tuple[str, int]]:
    """Letters with the lengths of their runs, which are scans."""
    return [(letter, len(list(run))) for letter, run in groupby(letters)]


def _kept(letters: str, costs: Mapping[str, LayerCost], name: str) -> list[float]:
    """Bytes of the arrays that a stage keeps of one microbatch: its layers' own, and, where they
    are a scan, what each of them takes.
    """
    found = []
    for letter, count in _runs(letters):
        own = getattr(costs[letter], name)
        found += [own * count] + ([costs[letter].boundary * count] if count > 1 and own else [])
    return found


def _slot_bytes(kinds: Sequence[Sequence[float]]) -> float:
    """Of a slot that holds any of several kinds of values: the largest arrays of each kind share
    their room, then the next largest.
    """
    ranked = [sorted(kind, reverse=True) for kind in kinds]
    return sum(max(ranks) for ranks in zip_longest(*ranked, fillvalue=0.0))


def _chunk_bytes(
    inner: Sequence[str], placement: Placement, costs: Mapping[str, LayerCost], name: str
) -> float:
    """Of parameters, say: a chunk has, of each kind of layer, as much room as the device needs that
    has most of it.
    """
    found = 0.0
    for stages in zip_longest(*placement.stages_of):
        counts = [Counter(inner[s]) for s in stages if s is not None]
        found += sum(
            max(count[c] for count in counts) * getattr(costs[c], name)
            for c in set().union(*counts)
        )
    return found
