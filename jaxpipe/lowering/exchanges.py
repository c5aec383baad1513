"""From what ticks need to the code that serves them all: blocks under predicates, and exchanges to choose among."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program.segments import Block, BlockUse, Part, Payload, Permute, Presence, TickTemplate, parts_in_order
from ..table.encoded import IntArray
from .limits import LIMITS
from .requirements import Edge, Requirements


def template_of(requirements: Requirements, group: IntArray, *, room: int = 0, gated: bool = False) -> tuple[TickTemplate, IntArray]:
    """One template that serves every tick in the group: the union of their blocks, and the exchanges that they choose among.

    The second value is each tick's choice.  With `gated`, unless most ticks need all transfers, those that transfer different things have
    exchanges of their own as far as that pays (`exchanges_of`); else one exchange serves them all.  `room` is the longest delay that
    the trip has place for (`room_of`): in an exchange that every tick makes, a transfer with slack is awaited up to that much later.
    """
    codes = requirements.codes[group]
    times = np.bincount(codes)
    present = np.flatnonzero(times).tolist()
    total: dict[Block, list[int]] = {}
    delays: dict[Edge, int] = {}
    for code in present:
        for block, count in requirements.kinds[code].blocks.items():
            sums = total.setdefault(block, [0] * len(count))
            for i, number in enumerate(count):
                sums[i] += number * int(times[code])
        for edge, slack in requirements.kinds[code].slack.items():
            delays[edge] = min(delays.get(edge, room), slack)
    everyone = requirements.num_devices * len(codes)
    uses = tuple(
        BlockUse(
            block,
            Presence.of(active, everyone),
            Presence.of(first, active),
            Presence.of(last, active),
            Presence.of(local, active),
        )
        for block, (active, first, last, local) in sorted(total.items(), key=lambda item: _place(item[0], requirements))
    )
    paired = any(requirements.kinds[code].paired for code in present)
    needs = [frozenset(requirements.kinds[code].slack) for code in present]
    complete = sum(int(times[code]) for code, need in zip(present, needs, strict=True) if len(need) == len(delays))
    if not gated or 2 * complete >= len(codes):
        return TickTemplate(uses, (permutes_of(delays),), paired), np.zeros(len(codes), np.int64)
    exchanges, made = exchanges_of(needs, times[present])
    choice = np.zeros(len(times), np.int64)
    choice[present] = made
    return TickTemplate(uses, tuple(permutes_of(dict.fromkeys(edges, 0)) for edges in exchanges), paired), choice[codes]


def _place(block: Block, requirements: Requirements) -> tuple[int, Block]:
    """Where a block stands in its tick.

    Backward blocks go first, so that the forward of the same tick may write what they free, and of them those that need no transfer, so
    that transfers run beside them; in fused ticks all backward blocks are last.
    """
    return parts_in_order(requirements.forward_first).index(Part.of(block.kind)), block


def exchanges_of(needs: Sequence[frozenset[Edge]], times: IntArray) -> tuple[list[frozenset[Edge]], IntArray]:
    """A few sets of transfers, each the union of some of the needs, such that little is transferred for nothing.

    `times[i]` is how often `needs[i]` occurs; the second value is the number of the set that serves it.  Two sets become one, those first
    for which that transfers the least more, until there are few enough of them and one less would transfer too much more
    (agglomerative clustering).
    """
    edges = sorted(frozenset[Edge]().union(*needs))
    distinct = sorted(set(needs), key=lambda need: (len(need), sorted(need)))
    place = {need: i for i, need in enumerate(distinct)}
    cluster = np.array([place[need] for need in needs])
    count: NDArray[np.float64] = np.bincount(cluster, weights=times).astype(np.float64)
    number = {edge: i for i, edge in enumerate(edges)}
    members = np.zeros((len(distinct), len(edges)))  # 1 where a set has an edge: of float, so that sizes of unions are matrix products
    for row, need in zip(members, distinct, strict=True):
        row[[number[edge] for edge in need]] = 1
    sizes = members.sum(axis=1)
    enough = LIMITS.saves_enough * float(count @ sizes)
    more = _additional(count[:, None], count, sizes[:, None], sizes, members @ members.T)
    np.fill_diagonal(more, np.inf)
    held = np.packbits(members.astype(bool), axis=1)
    # Of each set, the first of those with which it would be cheapest to be one, so that not all pairs are compared again each time.
    nearest, least = more.argmin(axis=1), more.min(axis=1)
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
        common = np.bitwise_count(held & held[a]).sum(axis=1, dtype=np.float64)
        alike = np.where(np.isfinite(more[a]), _additional(count[a], count, sizes[a], sizes, common), np.inf)
        more[a] = more[:, a] = alike
        closer = (alike < least) | ((alike == least) & (a < nearest))
        lost = np.flatnonzero(((nearest == a) | (nearest == b)) & np.isfinite(least) & ~(alike < least))
        least[closer], nearest[closer] = alike[closer], a
        again = np.union1d(lost, [a, b])
        nearest[again], least[again] = more[again].argmin(axis=1), more[again].min(axis=1)
    used, made = np.unique(cluster, return_inverse=True)
    sets = np.unpackbits(held[used], axis=1, count=len(edges)).astype(bool)
    return [frozenset(edge for edge, here in zip(edges, row, strict=True) if here) for row in sets.tolist()], made


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
