"""The memory of a device during a step, from the sizes of layers or of a traced model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, zip_longest

import numpy as np

from ..engine.simulate import Timeline
from ..layouts.layout import Layout
from ..program.ir import UNDER_WAY, Slots
from ..table.kinds import Kind
from ..table.schedule import Schedule
from .layer_cost import FIRST, LAST, LayerCost, Remat, spread_letters, total
from .replicas import Replicas

# On GPUs, the part of the room of results that are made after the ticks which XLA gives to values
# of the ticks: 0.47, 0.60 and 0.63 of stacks in programs of Llama 3 8B's layers, 0.74 of the parts
# that reductions leave in one of Llama 3 70B's.
REUSED = 0.5


@dataclass(frozen=True, kw_only=True)
class _Held:
    """Bytes on one device that do not depend on the number of entries of pools."""

    parameters: float
    gradients: float
    optimizer: float = 0.0
    batch: float = 0.0  # all rows of a step
    state: float = 0.0  # the stages' own state, before the step and after it
    gathered: float = 0.0  # whole parameters and accumulators, of those that the mesh splits
    hoisted: float = 0.0  # values that are computed from parameters once a step
    # of gradients, besides results and whole ones: of single layers, and of parts that are added to
    accumulators: float = 0.0
    sent: float = 0.0  # values that are to be sent, are under way, or arrive during a block
    raveled: float = 0.0  # copies of raveled values of a pool
    work: float = 0.0  # own arrays of the block that needs most


@dataclass(frozen=True, kw_only=True)
class Sizes(_Held):
    """Sizes from which the memory of a device is computed.

    All devices run one program.  Pools, the values of `first` and `last`, and the room for
    parameters are the same on all of them.
    """

    entry: Mapping[str, float]  # an entry of each pool, by its name in `Slots`
    # gradients of parameters on several devices, where their sum is a separate array; GPUs sum in
    # place
    summed: float = 0.0
    # the same of `first` and of `last`, less the freed arrays of a block
    ends: tuple[float, ...] = ()
    # results of gradients that are made after the last tick, on GPUs
    late: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MemoryParts(_Held):
    """Bytes on one device by purpose."""

    pools: Mapping[str, float]
    summed: float  # results of sums of gradients, less the values whose room they reuse
    reused: float  # less than 0: room of results that values of the ticks have before them
    host: float  # in the host's memory

    @property
    def held(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """The bytes in the device's memory."""
        found = self.facts()
        return sum(found.values()) - found["host"]

    def facts(self) -> dict[str, float]:
        """Each part as one number."""
        return {**vars(self), "pools": sum(self.pools.values())}


def memory_of(slots: Slots, sizes: Sizes) -> MemoryParts:
    """The memory of a device, from the number of entries in each pool."""
    away = sizes.entry.get("host", 0.0)
    pools = {
        name: size * getattr(slots, name) for name, size in sizes.entry.items() if name != "host"
    }
    pools["host"] = UNDER_WAY * away if slots.host else 0.0
    ticks = sum(pools.values()) + sizes.hoisted + sizes.sent + sizes.raveled + sizes.work
    return MemoryParts(
        **{field.name: getattr(sizes, field.name) for field in fields(_Held)},
        pools=pools,
        summed=max(0, sizes.summed - ticks, *sizes.ends),
        reused=-REUSED * min(sizes.late, ticks),
        host=(slots.host + 1) * away if slots.host else 0.0,
    )


def least_slots(timeline: Timeline) -> Slots:
    """The least entries of pools of any program of a simulated table.  A program keeps the order of
    rows, so it keeps as many forwards, each with its input, and as many I wait for their W.
    """
    peak, table = max(timeline.peak_activations), timeline.schedule.encoded
    waiting = np.cumsum(table.of_kinds((Kind.I,)).astype(int) - table.of_kinds((Kind.W,)))
    before = np.concatenate([[0], waiting])[np.asarray(table.first)[table.device]]
    stash = int((waiting - before).max(initial=1))
    slices, rows = timeline.schedule.slices, {}
    if slices > 1:
        rows = {"buffer": -(-peak // slices), "buffer_gradient": 1}
    return Slots(
        **rows,
        x=peak,
        residual_input=1,
        residual_weight=peak,
        cotangent=1,
        stash=stash,
        first=1,
    )


def layer_sizes(
    layout: Layout,
    schedule: Schedule,
    costs: Mapping[str, LayerCost],
    *,
    remat: Remat,
    on_gpus: bool = True,
    replicas: Replicas = Replicas(),  # noqa: B008  it is frozen
    max_active: int | None = None,
) -> Sizes:
    """Sizes on a device by sums of the sizes of layers; pools have the size of the device that
    needs most.

    On GPUs gradients are summed over devices in place, and layers have accumulators of their own;
    on CPU devices neither holds.  Replicas that split parameters and accumulators have whole copies
    of them during the step: of all stages of a device, or of `max_active`.
    """
    splits = bool(schedule.encoded.of_kinds((Kind.I,)).any())
    inner = [letters.strip(FIRST + LAST) for letters in layout.stages]
    kept, left = (
        _slot_bytes([_kept(letters, costs, name, apart=on_gpus) for letters in inner])
        for name in ("residuals", "stash")
    )
    outer = [costs[letter] for letter in (FIRST, LAST) if letter in layout.layers]
    # Every stage takes the output of a layer.
    boundary = max((costs[c].boundary for c in layout.layers if c != LAST), default=0.0)
    full = remat is Remat.FULL
    # Recomputed residuals are arrays of the block that uses them.  The work space of a layer does
    # not include them.
    again = 0.0 if splits or not full else kept

    def chunks(name: str) -> list[float]:
        return _chunk_bytes(inner, schedule, costs, name, alike=max_active is not None)

    def held(name: str, *, most: int | None = None) -> float:
        return total(outer, name) + sum(chunks(name)[:most])

    # Layers have accumulators of their own on GPUs, and parts where stages take turns.
    has_own = max_active is not None or (on_gpus and not replicas.fsdp)
    accumulators = sum(chunks("gradient_bytes")) if has_own else 0.0
    late, gathered = accumulators, 0.0
    if replicas.fsdp:
        gathered = replicas.count * held("common_bytes", most=max_active)
        # Where stages take turns in the room for them, it has copies of all that they have.
        gathered += 0.0 if max_active is None else sum(chunks("local_bytes")[:max_active])
        late = held("gradient_bytes")
    spread = spread_letters(layout.layers, costs)
    residuals = 0.0 if full else kept
    rows = max(total([costs[c] for c in letters], "rows") for letters in layout.stages)
    rows = rows if schedule.slices > 1 else 0.0
    return Sizes(
        parameters=held("parameters"),
        gradients=held("gradient_bytes"),
        gathered=gathered,
        optimizer=held("optimizer_bytes"),
        batch=schedule.num_microbatches * total(outer, "batch"),
        hoisted=held("hoisted", most=max_active),
        entry={
            "x": boundary,
            "cotangent": boundary,
            "residual_weight": residuals,
            "stash": left + full * kept if splits else 0.0,
            "last": boundary if LAST in spread else 0.0,
            "first": boundary if FIRST in spread else 0.0,
            "share": boundary + costs[LAST].stash if LAST in spread else 0.0,
            "host": residuals,
            "buffer": rows,
            "buffer_gradient": rows,
        },
        accumulators=accumulators,
        late=late * on_gpus,
        # Each way one value, and on GPUs one that is under way and one that arrives during a block.
        sent=(6 if on_gpus else 2) * boundary,
        work=max(costs[c].workspace for c in layout.layers) + again,
        summed=0.0 if on_gpus else total(outer, "gradient_bytes"),
    )


def _kept(letters: str, costs: Mapping[str, LayerCost], name: str, *, apart: bool) -> list[float]:
    """Bytes of the arrays that a stage keeps of one microbatch: its layers' residuals, or stash,
    and each layer's input.  Where layers are `apart`, the first one's is the stage's own.
    """
    found = []
    for place, (letter, run) in enumerate(groupby(letters)):  # each a scan, if not apart
        own, count = getattr(costs[letter], name), len(list(run))
        inputs = count - (place == 0) if apart else count * (count > 1)
        if own or name == "residuals":
            found += [own * count, costs[letter].boundary * inputs]
    return found


def _slot_bytes(kinds: Sequence[Sequence[float]]) -> float:
    """Bytes of a slot that holds any of several kinds of values: the largest arrays of each kind
    share their room, then the next largest.
    """
    ranked = [sorted(kind, reverse=True) for kind in kinds]
    return sum(max(ranks) for ranks in zip_longest(*ranked, fillvalue=0.0))


def _chunk_bytes(
    inner: Sequence[str],
    schedule: Schedule,
    costs: Mapping[str, LayerCost],
    name: str,
    *,
    alike: bool,
) -> list[float]:
    """Bytes of each chunk, of parameters for example.  For each kind of layer, a chunk has the room
    of the device with the most of it; all chunks have the same where they are stored `alike`.
    """
    counts = [Counter(letters) for letters in inner]
    chunks = [
        counts if alike else [counts[s] for s in stages if s is not None]
        for stages in zip_longest(*schedule.placement.stages_of)
    ]
    return [
        sum(max(n[c] for n in own) * getattr(costs[c], name) for c in set().union(*own))
        for own in chunks
    ]
