"""From what ticks need to the code that serves them all: blocks under predicates, and exchanges to choose among."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    cluster = np.array([distinct.index(need) for need in needs])
    count: NDArray[np.float64] = np.bincount(cluster, weights=times).astype(np.float64)
    number = {edge: i for i, edge in enumerate(edges)}
    members = np.zeros((len(distinct), len(edges)))  # 1 where a set has an edge: of float, so that sizes of unions are matrix products
    for row, need in zip(members, distinct, strict=True):
        row[[number[edge] for edge in need]] = 1
    sizes = members.sum(axis=1)
    enough = LIMITS.saves_enough * float(count @ sizes)
    more = _additional(count[:, None], count, sizes[:, None], sizes, members @ members.T)
    np.fill_diagonal(more, np.inf)
    for left in range(len(count), 1, -1):
        a, b = divmod(int(more.argmin()), len(count))
        if left <= LIMITS.most_exchanges and more[a, b] > enough:
            break
        cluster[cluster == b] = a
        members[a] = np.maximum(members[a], members[b])
        sizes[a] = members[a].sum()
        count[a] += count[b]
        count[b], more[b], more[:, b] = 0, np.inf, np.inf
        alike = _additional(count[a], count, sizes[a], sizes, members @ members[a])
        more[a] = more[:, a] = np.where(np.isfinite(more[a]), alike, np.inf)
    used, made = np.unique(cluster, return_inverse=True)
    return [frozenset(edge for edge, held in zip(edges, members[a], strict=True) if held) for a in used], made


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
    groups: dict[tuple[Payload, int, bool], list[list[tuple[int, int]]]] = {}
    for (payload, source, target), delay in sorted(delays.items()):
        colours = groups.setdefault((payload, delay, source > target), [])
        for colour in colours:
            if all(source != s and target != t for s, t in colour):
                colour.append((source, target))
                break
        else:
            colours.append([(source, target)])
    return tuple(Permute(payload, tuple(c), delay) for (payload, delay, _), colours in sorted(groups.items()) for c in colours)
