"""From what ticks need to the code that serves them all: blocks under predicates, and exchanges to choose among."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program.templates import Block, BlockUse, Part, Payload, Permute, Presence, TickTemplate, parts_in_order
from ..table.encoded import BoolArray, IntArray
from .limits import LIMITS
from .requirements import NO_TRANSFER, Edge, Requirements


def uses_of(requirements: Requirements, group: IntArray) -> tuple[BlockUse, ...]:
    """The union of the blocks of every tick in the group, in the order in which code that serves them all has them."""
    times = np.bincount(requirements.codes[group])
    present = np.flatnonzero(times)
    total = np.tensordot(times[present], requirements.counts[present], 1).tolist()
    everyone = requirements.num_devices * len(group)
    return tuple(
        BlockUse(
            block,
            Presence.of(active, everyone),
            Presence.of(first, active),
            Presence.of(last, active),
            Presence.of(local, active),
        )
        for block, (active, first, last, local) in sorted(
            zip(requirements.blocks, total, strict=True), key=lambda item: _place(item[0], requirements)
        )
        if active
    )


def template_of(
    requirements: Requirements, group: IntArray, uses: tuple[BlockUse, ...], *, room: int = 0, gated: bool = False
) -> tuple[TickTemplate, IntArray]:
    """One template that serves every tick in the group: the union of their blocks (`uses_of`), and the exchanges that they choose among.

    The second value is each tick's choice.  With `gated`, unless most ticks need all transfers, those that transfer different things have
    exchanges of their own as far as that pays (`exchanges_of`); else one exchange serves them all.  `room` is the longest delay that
    the trip has place for (`room_of`): in an exchange that every tick makes, a transfer with slack is awaited up to that much later.
    """
    codes = requirements.codes[group]
    times = np.bincount(codes)
    present = np.flatnonzero(times)
    often = times[present]
    slack = requirements.slack[present]
    needed = slack < NO_TRANSFER
    here = np.flatnonzero(needed.any(axis=0))
    edges = [requirements.edges[i] for i in here.tolist()]
    paired = bool(requirements.paired[present].any())
    needed = needed[:, here]
    if not gated or 2 * int(often[needed.all(axis=1)].sum()) >= len(codes):
        least = np.minimum(slack[:, here].min(axis=0, initial=NO_TRANSFER), room)
        delays = dict(zip(edges, least.tolist(), strict=True))
        return TickTemplate(uses, (permutes_of(delays),), paired), np.zeros(len(codes), np.int64)
    exchanges, made = exchanges_of(needed, often)
    choice = np.zeros(len(times), np.int64)
    choice[present] = made
    sets = [[edges[i] for i in np.flatnonzero(row).tolist()] for row in exchanges]
    return TickTemplate(uses, tuple(permutes_of(dict.fromkeys(each, 0)) for each in sets), paired), choice[codes]


def _place(block: Block, requirements: Requirements) -> tuple[int, Block]:
    """Where a block stands in its tick.

    Backward blocks go first, so that the forward of the same tick may write what they free, and of them those that need no transfer, so
    that transfers run beside them; in fused ticks all backward blocks are last.
    """
    return parts_in_order(requirements.forward_first).index(Part.of(block.kind)), block


def exchanges_of(needs: BoolArray, times: IntArray) -> tuple[BoolArray, IntArray]:
    """A few sets of transfers, each the union of some of the needs, such that little is transferred for nothing.

    `needs[i, edge]` marks the transfers of a need, and `times[i]` is how often it occurs; the result is `[set, edge]`, and the number of
    the set that serves each need.  Two sets become one, those first for which that transfers the least more, until there are few enough
    of them and one less would transfer too much more (agglomerative clustering).
    """
    packed = np.packbits(needs, axis=1)
    # Small sets first, and of equal size those with the first edges.
    keys = [(size, row.tobytes()) for size, row in zip(needs.sum(axis=1).tolist(), ~packed, strict=True)]
    place = {key: i for i, key in enumerate(sorted(set(keys)))}
    cluster = np.array([place[key] for key in keys])
    count: NDArray[np.float64] = np.bincount(cluster, weights=times).astype(np.float64)
    distinct = np.unique(cluster, return_index=True)[1]
    held = _words(packed[distinct])
    members = needs[distinct].astype(np.float64)  # of float, so that sizes of unions are matrix products
    sizes = members.sum(axis=1)
    enough = LIMITS.saves_enough * float(count @ sizes)
    more = _additional(count[:, None], count, sizes[:, None], sizes, members @ members.T)
    np.fill_diagonal(more, np.inf)
    # Of each set, the first of those with which it would be cheapest to be one, so that not all pairs are compared again each time.
    nearest = more.argmin(axis=1)
    least = more[np.arange(len(count)), nearest]
    for left in range(len(count), 1, -1):
        a = int(least.argmin())
        b = int(nearest[a])
        if left <= LIMITS.most_exchanges and least[a] > enough:
            break
        cluster[cluster == b] = a
        held[a] |= held[b]
        sizes[a] = np.bitwise_count(held[a]).sum()
        count[a] += count[b]
        count[b], more[b], more[:, b] = 0, np.inf, np.inf
        common = np.bitwise_count(held & held[a]).sum(axis=1).astype(np.float64)
        alike = np.where(np.isfinite(more[a]), _additional(count[a], count, sizes[a], sizes, common), np.inf)
        more[a] = more[:, a] = alike
        closer = (alike < least) | ((alike == least) & (a < nearest))
        lost = np.flatnonzero(((nearest == a) | (nearest == b)) & np.isfinite(least) & ~(alike < least))
        least[closer], nearest[closer] = alike[closer], a
        again = np.append(lost, (a, b))
        nearest[again] = more[again].argmin(axis=1)
        least[again] = more[again, nearest[again]]
    used, made = np.unique(cluster, return_inverse=True)
    return np.unpackbits(held[used].view(np.uint8), axis=1, count=needs.shape[1]).astype(bool), made


def _words(packed: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The same bits in longer words, of which there are fewer to count."""
    return np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8))).view(np.uint64)


def _additional(
    count: NDArray[np.float64] | np.float64,
    counts: NDArray[np.float64],
    size: NDArray[np.float64] | np.float64,
    sizes: NDArray[np.float64],
    common: NDArray[np.float64],
) -> NDArray[np.float64]:
    """How much more would be transferred if one set were one with each of the others, with which it has so many edges in common."""
    found: NDArray[np.float64] = (counts + count) * (sizes + size - common) - counts * sizes - count * size
    return found


def permutes_of(delays: Mapping[Edge, int]) -> tuple[Permute, ...]:
    """Colour edges into permutes: by payload, delay and direction, then greedily so that sources and targets are distinct.

    Wrap-around edges of a ring point against their payload's direction, so they come out as a permute of their own.
    """
    groups: dict[tuple[Payload, int, bool], list[_Colour]] = {}
    for (payload, source, target), delay in sorted(delays.items()):
        colours = groups.setdefault((payload, delay, source > target), [])
        for colour in colours:
            if source not in colour.sources and target not in colour.targets:
                break
        else:
            colours.append(colour := _Colour([], set(), set()))
        colour.pairs.append((source, target))
        colour.sources.add(source)
        colour.targets.add(target)
    return tuple(Permute(payload, tuple(c.pairs), delay) for (payload, delay, _), colours in sorted(groups.items()) for c in colours)


class _Colour(NamedTuple):
    """The pairs of one permute, and which devices they have at each end."""

    pairs: list[tuple[int, int]]
    sources: set[int]
    targets: set[int]
