"""What each tick needs, read off the ticks: blocks, who runs them, and the transfers between devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..action import Action, Kind, parts
from .assign_ticks import Ticks
from .program import Block, BlockUse, Payload, Permute, Position, Presence


class Edge(NamedTuple):
    """A transfer from one device to another at the end of a tick."""

    payload: Payload
    source: int
    target: int


class Count(NamedTuple):
    """How many devices run a block in a tick, and how many of those for the first, the last, a locally consumed stage."""

    active: int
    first: int
    last: int
    local: int

    def plus(self, other: Count) -> Count:
        """Element by element."""
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class TickFacts:
    """The static needs of one tick."""

    blocks: dict[Block, Count]
    forward_first: bool
    slack: dict[Edge, int]  # each transfer, and how many ticks it may take beyond the one it is issued in

    @property
    def edges(self) -> frozenset[Edge]:
        """The transfers."""
        return frozenset(self.slack)

    @property
    def signature(self) -> tuple[frozenset[Block], frozenset[Edge]]:
        """Ticks with equal signatures can share their code."""
        return frozenset(self.blocks), self.edges


class Where(NamedTuple):
    """Where an action runs."""

    device: int
    tick: int


def locate(ticks: Ticks) -> dict[Action, Where]:
    """Action -> device and tick."""
    return {a: Where(d, t) for d, row in enumerate(ticks.cells) for t, cell in enumerate(row) for a in parts(cell)}


def consumer_of(action: Action, last_stage: int, where: dict[Action, Where]) -> Where | None:
    """Who uses the output of an F, or the input gradient of a B or I, as a stage of its own; None where nobody does."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        return None if stage == last_stage else where[Action(stage + 1, Kind.F, microbatch)]
    if kind is Kind.W or stage == 0:
        return None
    return where.get(Action(stage - 1, Kind.B, microbatch)) or where[Action(stage - 1, Kind.I, microbatch)]


def collect(ticks: Ticks) -> list[TickFacts]:
    """The facts of every tick, in order."""
    schedule = ticks.schedule
    last_stage = schedule.num_stages - 1
    where = locate(ticks)
    found: list[TickFacts] = [TickFacts({}, ticks.forward_first, {}) for _ in range(ticks.num_ticks)]
    for action, (device, tick) in where.items():
        target = consumer_of(action, last_stage, where)
        block = Block(action.kind, schedule.placement.chunk_of(action.stage, device))
        local = target is not None and target.device == device
        count = Count(1, int(action.stage == 0), int(action.stage == last_stage), int(local))
        blocks = found[tick].blocks
        blocks[block] = blocks[block].plus(count) if block in blocks else count
        if target is not None and not local:
            payload = Payload.ACTIVATION if action.kind is Kind.F else Payload.COTANGENT
            found[tick].slack[Edge(payload, device, target.device)] = target.tick - tick - 1
    # Equal ticks share one value, so that what is made of many ticks costs no more than what is made of the different ones.
    shared: dict[object, TickFacts] = {}
    return [shared.setdefault((frozenset(f.blocks.items()), frozenset(f.slack.items())), f) for f in found]


def position_of(group: Iterable[TickFacts], num_devices: int, *, room: int = 0) -> Position:
    """One position that serves every tick in the group: the union of their blocks and of their transfers.

    `room` is the number of ticks that follow in the same trip: a transfer with slack is awaited up to that much later.
    """
    total: dict[Block, Count] = {}
    delays: dict[Edge, int] = {}
    count_of: dict[int, tuple[TickFacts, int]] = {}
    for facts in group:
        count_of[id(facts)] = (facts, count_of.get(id(facts), (facts, 0))[1] + 1)
    for facts, times in count_of.values():
        for block, count in facts.blocks.items():
            scaled = Count(*(n * times for n in count))
            total[block] = total[block].plus(scaled) if block in total else scaled
        for edge, slack in facts.slack.items():
            delays[edge] = min(delays.get(edge, room), slack)
    forward_first = any(facts.forward_first for facts, _ in count_of.values())
    everyone = num_devices * sum(times for _, times in count_of.values())
    uses = tuple(
        BlockUse(
            block,
            Presence.of(count.active, everyone),
            Presence.of(count.first, count.active),
            Presence.of(count.last, count.active),
            Presence.of(count.local, count.active),
        )
        # Backward blocks go first, so that the forward of the same tick may write what they free; in fused ticks last.
        for block, count in sorted(total.items(), key=lambda item: ((item[0].kind is Kind.F) is not forward_first, item[0]))
    )
    return Position(uses, permutes_of(delays))


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
