"""Pass: give every value that outlives its tick a buffer slot, by liveness, and write the program's
records.  Moments are numbers: before, within and after the blocks of each tick.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..program.ir import Program
from ..program.records import POOL_OF, UNDER_WAY, IntTable, Pool, empty_ticks, pairs_of
from ..program.segments import Payload, Segment
from ..table.activations import LEAST_AWAY
from ..table.effects import (
    ALWAYS,
    MOVES,
    Access,
    Effect,
    Liveness,
    Offload,
    Place,
    effects_of,
    flags_of,
)
from ..table.encoded import IntArray
from ..table.kinds import MESSAGES, RECOMPUTE, RUNS_FORWARD, Kind, Value, makers
from .assign_ticks import Ticks


class Clock(NamedTuple):
    """Moments: before each block of a tick and during it, in the order in which its template has
    them, then after them all.
    """

    span: int  # of a tick

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Clock:
        """With room for the longest template."""
        return cls(
            2
            * max(
                (len(template.blocks) for segment in segments for template in segment.templates),
                default=0,
            )
            + 2
        )

    def before(self, tick: IntArray, block: IntArray | int = 0) -> IntArray:
        """Right before a block: what arrives is written to its slot."""
        return self.span * tick + 2 * block

    def during(self, tick: IntArray, block: IntArray) -> IntArray:
        """The time at which a block runs."""
        return self.before(tick, block) + 1

    def blocks_done(self, tick: IntArray) -> IntArray:
        """When a pair, which runs as one, has read and written all that its blocks do."""
        return self.after(tick) - 1

    def after(self, tick: IntArray) -> IntArray:
        """The time at which a tick is over."""
        return self.span * (tick + 1) - 1


def places(ticks: Ticks, segments: Sequence[Segment]) -> IntArray:
    """Per action, the number of its block in the template of its tick."""
    table, chunk = ticks.schedule.encoded, ticks.schedule.chunks
    templates = [template for segment in segments for template in segment.templates]
    number = np.zeros((len(templates), len(Kind), 1 + int(chunk.max(initial=0)), 2), np.int64)
    for blocks, template in zip(number, templates, strict=True):
        for place, use in enumerate(template.blocks):
            blocks[use.block.kind, use.block.chunk, int(use.block.keeps)] = place
    of, keeps = template_numbers(segments)[ticks.when], (~table.recomputed).astype(np.int64)
    found: IntArray = number[of, table.kind, chunk, keeps]
    return found


def template_numbers(segments: Sequence[Segment]) -> IntArray:
    """Per tick, the number of its template among those of all segments."""
    first = np.cumsum([0, *(segment.period for segment in segments)]).tolist()
    found = [
        np.tile(np.arange(segment.period) + at, segment.repeats)
        for segment, at in zip(segments, first, strict=False)
    ]
    return np.concatenate([*found, np.zeros(0, np.int64)])


NO_PAYLOAD = -1


class Arrivals:
    """Transfers of every tick: `payload[tick, lane]` (-1 where there is none) and the moment in
    which it is `written[tick, lane]`.
    """

    def __init__(
        self, segments: Sequence[Segment], num_ticks: int, num_devices: int, clock: Clock
    ) -> None:
        templates = [template for segment in segments for template in segment.templates]
        self.widest = max((len(template.permutes) for template in templates), default=0)
        payload = np.full((len(templates), self.widest), NO_PAYLOAD)
        self._lane = np.full((len(templates), len(Payload), num_devices, num_devices), -1)
        for at, template in enumerate(templates):
            for lane, permute in enumerate(template.permutes):
                payload[at, lane] = permute.payload
                for source, target in permute.pairs:
                    self._lane[at, permute.payload, source, target] = lane
        self._template = template_numbers(segments)
        self.payload = payload[self._template]
        self.written = np.repeat(clock.after(np.arange(num_ticks))[:, None], self.widest, axis=1)
        for segment in segments:
            for transit in segment.transits:
                sent = slice(segment.start + transit.tick, segment.stop, segment.period)
                tick, block = segment.written(transit)
                ended = block == segment.num_blocks(tick)
                self.written[sent, transit.lane] = np.where(
                    ended, clock.after(tick), clock.before(tick, block)
                )

    def find(
        self, tick: IntArray, payload: Payload, source: IntArray, target: IntArray
    ) -> tuple[IntArray, IntArray]:
        """The lane of the permute that carries each transfer, and the moment in which what it
        brings is written.
        """
        lane = self._lane[self._template[tick], payload, source, target]
        assert (lane >= 0).all(), "no permute carries a transfer"
        return lane, self.written[tick, lane]


_STORES, _FETCHES = MOVES


class _Uses(NamedTuple):
    """Readings and writings of values of a pool, and the field of the records that has their slots.

    A value is the number stage * M + microbatch; residuals that come back from the host are other
    values than those that went there.
    """

    slots: IntTable
    value: IntArray
    tick: IntArray  # of the record
    device: IntArray
    moment: IntArray  # see `Clock`


def assign_slots(
    ticks: Ticks,
    segments: Sequence[Segment],
    *,
    liveness: Liveness | None = None,
    offload: Offload = Offload.NOTHING,
) -> Program:
    """Allocate slots by linear scan over live intervals, so that a pool has exactly as many slots
    as its peak.

    Poletto and Sarkar 1999 (linear scan register allocation); intervals of one device form an
    interval graph, for which the greedy choice is optimal.  A device that takes part in an exchange
    without a message for it writes the received value to a free slot; where none is free the slot
    keeps its value (`Arrival.takes` is 0).

    A value that waits on the host has a slot there, and two intervals on the device: before it
    leaves, and after it returns.  No value waits where that saves no memory.
    """
    needs = liveness or Liveness()
    program = _Writer(ticks, segments, needs).program()
    if offload is Offload.NOTHING:
        return program
    writer = _Writer(ticks, segments, needs, moves=True)
    if not writer.moved.size:
        return program
    other = writer.program()
    # Both kinds of residuals are under way together: where one of them stays on the device anyway,
    # that costs more than the other saves.
    saved = min(
        getattr(program.slots, name) - getattr(other.slots, name)
        for name in ("residual_input", "residual_weight")
    )
    return other if saved > UNDER_WAY else program


class _Writer:
    """Fills the records; arrays of actions are indexed by their numbers in the encoded schedule."""

    def __init__(
        self, ticks: Ticks, segments: Sequence[Segment], liveness: Liveness, *, moves: bool = False
    ) -> None:
        table = ticks.schedule.encoded
        self._schedule, self._actions = ticks.schedule, table
        self._segments = tuple(segments)
        self._liveness = liveness
        self._when, self._joint = ticks.when, ticks.joint
        self._number = table.stage * table.num_microbatches + table.microbatch
        self._clock = Clock.of(self._segments)
        # the moment of each action
        self._runs = self._clock.during(self._when, places(ticks, self._segments))
        self._arrivals = Arrivals(self._segments, ticks.num_ticks, table.num_devices, self._clock)
        self._ticks = empty_ticks(
            ticks.num_ticks,
            table.num_devices,
            max(self._arrivals.widest, 1),
            collective=bool(table.shares.any()),
            slices=table.slices > 1,
            moves=moves,
        )
        # by the table of their slots
        self._lanes = {id(arrival.slot): n for n, arrival in enumerate(self._ticks.arrivals)}
        self.moved = self._moved() if moves else np.zeros((3, 0), np.int64)

    def _moved(self) -> IntArray:
        """Of residuals that wait on the host: the value, the tick in which they leave and that in
        which they come.

        They are those that live long (Wan et al. 2025, "PipeOffload").
        """
        table = self._actions
        reader = np.flatnonzero(table.of_kinds(makers(Value.INPUT_GRAD)))
        again, first = (
            table.at[kind, table.stage[reader], table.microbatch[reader]]
            for kind in (*RECOMPUTE, Kind.F)
        )
        begin, end = self._when[np.where(again >= 0, again, first)], self._when[reader]
        moves = np.stack([self._number[reader], begin + 1, end - 1])
        return moves[:, end - begin >= LEAST_AWAY]

    def program(self) -> Program:
        """Write the actions, then for each pool the slots of its values."""
        self._write_actions()
        pools = []
        for place in sorted((p for p in Place if p.is_pool), key=lambda p: p in ALWAYS):
            uses = list(self._uses(place))
            if uses or place in ALWAYS:
                pools.append(Pool(place, self._allocate(place, uses)))
        return Program(
            self._schedule, self._segments, self._ticks, tuple(pools), self._liveness, self._joint
        )

    def _write_actions(self) -> None:
        """All columns but the slots."""
        table = self._actions
        columns = {
            "kind": table.kind,
            "chunk": self._schedule.chunks,
            "stage": table.stage,
            "microbatch": table.microbatch,
            **flags_of(table),
        }
        for kind in table.kinds:
            record, mine = self._ticks.of(kind), table.kind == kind
            for name, column in columns.items():
                if hasattr(record, name):
                    getattr(record, name)[self._when[mine], table.device[mine]] = column[mine]

    def _uses(self, pool: Place) -> Iterator[_Uses]:
        """Every use of a pool: by actions, transfers, and moves to the host and back."""
        table = self._actions
        for kind in sorted(table.kinds):
            for effect in effects_of(kind, table.kinds, self._liveness):
                if effect.place is pool:
                    yield self._of_actions(kind, effect)
        for message, payload in zip(MESSAGES, Payload, strict=True):
            if POOL_OF[payload] is pool:
                mine = np.flatnonzero(table.crosses & table.of_kinds(message.users))
                yield from self._of_transfers(mine, payload)
        yield from self._of_moves(pool)

    def _of_actions(self, kind: Kind, effect: Effect) -> _Uses:
        """An effect of all actions of a kind."""
        table, record = self._actions, self._ticks.of(kind)
        mine = np.flatnonzero(table.kind == kind)
        if effect.when is not None:
            flags = getattr(record, effect.when)
            mine = mine[flags[self._when[mine], table.device[mine]] != 0]
        tick, device, moment = self._when[mine], table.device[mine], self._runs[mine]
        value = effect.of.value_in(table, table.stage[mine], table.microbatch[mine], device)
        if effect.access is Access.READ and kind not in RUNS_FORWARD:
            # Both actions of a pair run as one: the backward has read no sooner than the forward
            # has written.
            pairs = pairs_of(self._ticks, self._joint)
            moment = np.where(pairs[tick, device], self._clock.blocks_done(tick), moment)
            if effect.place in _STORES.reads.values():
                value = value + np.where(np.isin(value, self.moved[0]), self._back, 0)
        return _Uses(getattr(record, effect.field), value, tick, device, moment)

    def _of_transfers(self, users: IntArray, payload: Payload) -> Iterator[_Uses]:
        """Values that permutes bring to these actions."""
        table = self._actions
        sent = table.producer[users]
        tick, device = self._when[sent], table.device[users]
        lane, moment = self._arrivals.find(tick, payload, table.device[sent], device)
        for n in np.unique(lane).tolist():
            at = lane == n
            yield _Uses(
                self._ticks.arrivals[n].slot,
                self._number[users][at],
                tick[at],
                device[at],
                moment[at],
            )

    def _of_moves(self, pool: Place) -> Iterator[_Uses]:
        """Values that are copied to the host, and back."""
        value, leaves, comes = self.moved
        if not len(value):
            return
        (record,), clock = self._ticks.moves, self._clock
        device = self._actions.device[self._actions.backward_at.reshape(-1)[value]]
        record.stores[leaves, device] = record.fetches[comes, device] = value
        for columns, values, tick, moment in (
            (_STORES.reads, value, leaves, clock.after(leaves - 1)),
            (_STORES.writes, value, leaves, clock.before(leaves)),
            (_FETCHES.reads, value, comes, clock.before(comes)),
            (_FETCHES.writes, value + self._back, comes, clock.after(comes)),
        ):
            for name in (name for name, place in columns.items() if place is pool):
                yield _Uses(getattr(record, name), values, tick, device, moment)

    @property
    def _back(self) -> int:
        """The number of a value that comes back from the host, less that of one that leaves."""
        return self._actions.num_stages * self._actions.num_microbatches

    def _allocate(self, pool: Place, uses: Sequence[_Uses]) -> int:
        """Linear scan on every device; returns the pool's size."""
        none = np.zeros(0, np.int64)
        value, device_of, moment = (
            np.concatenate([none, *(getattr(use, name) for use in uses)])
            for name in ("value", "device", "moment")
        )
        values, which = np.unique(value, return_inverse=True)
        begin, end = np.full(len(values), moment.max(initial=0)), np.zeros(len(values), np.int64)
        np.minimum.at(begin, which, moment)
        np.maximum.at(end, which, moment)
        owner = np.zeros(len(values), np.int64)
        owner[which] = device_of
        devices = range(self._actions.num_devices)
        mine = [np.flatnonzero(owner == d) for d in devices]
        size = max(1, *(peak(begin[chosen], end[chosen]) for chosen in mine))
        strays = self._strays(pool, uses)
        first = np.searchsorted(strays[0], np.arange(len(mine) + 1)).tolist()
        slots = np.zeros(len(values), np.int64)
        for device, chosen in zip(devices, mine, strict=True):
            tick, lane, arrives = (
                column[first[device] : first[device + 1]] for column in strays[1:]
            )
            moments, back = np.unique(arrives, return_inverse=True)
            slots[chosen], free = scan(begin[chosen], end[chosen], moments, size)
            for n in np.unique(lane).tolist():
                at, spare = tick[lane == n], free[back][lane == n]
                self._ticks.arrivals[n].slot[at, device] = np.maximum(spare, 0)
                self._ticks.arrivals[n].takes[at, device] = spare >= 0
        for use in uses:
            use.slots[use.tick, use.device] = slots[np.searchsorted(values, use.value)]
            if id(use.slots) in self._lanes:
                self._ticks.arrivals[self._lanes[id(use.slots)]].takes[use.tick, use.device] = 1
        return size

    def _strays(
        self, pool: Place, uses: Sequence[_Uses]
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """(device, tick, lane, moment of arrival) of what permutes bring to devices that have no
        message in them, device by device.
        """
        payloads = [payload for payload, name in POOL_OF.items() if name is pool]
        strays = np.repeat(
            np.isin(self._arrivals.payload, payloads)[None], self._actions.num_devices, axis=0
        )
        for use in uses:
            if id(use.slots) in self._lanes:
                strays[use.device, use.tick, self._lanes[id(use.slots)]] = False
        device, tick, lane = np.nonzero(strays)
        return device, tick, lane, self._arrivals.written[tick, lane]


def scan(begin: IntArray, end: IntArray, strays: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """The lowest free slot for each life, and for each stray moment one that is free then, or -1
    where none is.
    """
    free = list(range(size))
    spare: list[int] = []
    slots = [0] * len(begin)
    starts = np.concatenate([begin, strays])
    stops = np.concatenate([end, strays])
    # What begins in a moment is placed before that moment's strays.
    order = np.lexsort((stops, np.arange(len(starts)) >= len(begin), starts))
    ending = np.argsort(end, kind="stable")
    # How many lives are over when each one begins: a slot is free from the moment after its life's
    # last.
    over = np.searchsorted(end[ending], starts[order], side="left").tolist()
    leaving, gone, values = ending.tolist(), 0, len(begin)
    take, put_back = heapq.heappop, heapq.heappush
    for i, ended in zip(order.tolist(), over, strict=True):
        while gone < ended:
            put_back(free, slots[leaving[gone]])
            gone += 1
        if i < values:
            slots[i] = take(free)
        else:
            spare.append(free[0] if free else -1)
    return np.array(slots, np.int64), np.array(spare, np.int64)


def peak(begin: IntArray, end: IntArray) -> int:
    """The most lives that hold one moment."""
    moments = np.concatenate([2 * begin, 2 * end + 1])
    steps = np.concatenate([np.ones_like(begin), -np.ones_like(end)])
    return int(np.cumsum(steps[np.argsort(moments, kind="stable")]).max(initial=0))
