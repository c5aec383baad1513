"""Pass: give every value that outlives its tick a buffer slot, by liveness, and write the program's
records.  Moments are numbers: before, within and after the blocks of each tick.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..program.ir import (
    ARRIVAL,
    MOVE,
    NOBODY,
    POOL_OF,
    UNDER_WAY,
    IntTable,
    Program,
    Record,
    TickRecord,
    columns_of,
)
from ..program.segments import Payload, Segment
from ..table.effects import (
    ALWAYS,
    MOVES,
    TOGETHER,
    Access,
    Effect,
    Liveness,
    Place,
    effects_of,
    flags_of,
)
from ..table.encoded import LEAST_AWAY, IntArray
from ..table.kinds import MESSAGES, RECOMPUTE, RUNS_FORWARD, SHARES, Kind, Offload, Value, makers
from .ticks import Ticks


class _Code:
    """The blocks and permutes of every tick, and moments: before each block of a tick and during
    it, in the order in which its template has them, then after them all.

    Attributes:
        payload: `[tick, lane]`; -1 where there is none.
        written: `[tick, lane]`, the moment in which what it brings is written.
    """

    def __init__(self, segments: Sequence[Segment], ticks: Ticks) -> None:
        templates = [each for segment in segments for each in segment.templates]
        lanes = max((len(each.permutes) for each in templates), default=0)
        self._span = 2 * max((len(each.blocks) for each in templates), default=0) + 2
        self._blocks = np.zeros(ticks.num_ticks, np.int64)
        chunks, devices = 1 + int(ticks.chunks.max(initial=0)), ticks.schedule.num_devices
        self._place = np.zeros((ticks.num_ticks, len(Kind), chunks, 2), np.int64)
        # The number of an edge, and its lane in each tick.
        self._edge = np.zeros((len(Payload), devices, devices), np.int64)
        for number, edge in enumerate(ticks.transfers[0]):
            self._edge[edge] = number
        self._lane = np.full(ticks.transfers[1].shape, -1)
        self.payload = np.full((ticks.num_ticks, max(lanes, 1)), -1)
        self.written = np.zeros(self.payload.shape, np.int64)
        for segment in segments:
            for j, template in enumerate(segment.templates):
                mine = segment.ticks(j)
                self._blocks[mine] = len(template.blocks)
                for place, use in enumerate(template.blocks):
                    kind, chunk, keeps = use.block
                    self._place[mine, kind, chunk, int(keeps)] = place
                for lane, permute in enumerate(template.permutes):
                    self.payload[mine, lane] = permute.payload
                    for pair in permute.pairs:
                        self._lane[mine, self._edge[permute.payload, *pair]] = lane
            for transit in segment.transits:
                at = segment.ticks(transit.tick), transit.lane
                self.written[at] = self.before(*segment.written(transit))

    def before(self, tick: IntArray, block: IntArray | int = 0) -> IntArray:
        """Right before a block, or after all: what arrives is written to its slot."""
        return self._span * tick + 2 * block

    def during(self, tick: IntArray, *block: IntArray) -> IntArray:
        """The time at which a block (kind, chunk, keeps) runs."""
        return self.before(tick, self._place[tick, *block]) + 1

    def blocks_done(self, tick: IntArray) -> IntArray:
        """When a pair, which runs as one, has read and written all that its blocks do."""
        return self.before(tick, self._blocks[tick]) - 1

    def after(self, tick: IntArray) -> IntArray:
        """The time at which a tick is over."""
        return self._span * (tick + 1) - 1

    def lane(self, tick: IntArray, payload: Payload, *ends: IntArray) -> IntArray:
        """The lane of the permute that carries each transfer from a source to a target."""
        found: IntArray = self._lane[tick, self._edge[payload, *ends]]
        assert (found >= 0).all(), "no permute carries a transfer"
        return found


_STORES, _FETCHES = MOVES


class _Uses(NamedTuple):
    """Readings and writings of values of a pool, and the field of the records that has their slots.

    A value is the number stage * M + microbatch; residuals that come back from the host are other
    values than those that went there.
    """

    slots: IntTable
    at: tuple[IntArray, ...]  # of the records: [lane,] tick, device
    value: IntArray
    moment: IntArray  # see `_Code`


def assign_slots(
    ticks: Ticks,
    segments: Sequence[Segment],
    *,
    liveness: Liveness | None = None,
    offload: Offload = Offload.NOTHING,
    together: bool = False,
) -> Program:
    """Allocate slots by linear scan over live intervals, so that a pool has exactly as many slots
    as its peak.

    Poletto and Sarkar 1999 (linear scan register allocation); intervals of one device form an
    interval graph, for which the greedy choice is optimal.  A device that takes part in an exchange
    without a message for it writes the received value to a free slot; where none is free the slot
    keeps its value (`Arrival.takes` is 0).

    With `together`, a microbatch has one slot number in all pools of `TOGETHER`, from its forward
    to the last backward.

    A value that waits on the host has a slot there, and two intervals on the device: before it
    leaves, and after it returns.  No value waits where that saves no memory.
    """
    needs = liveness or Liveness()
    program = _Writer(ticks, segments, needs, together=together).program()
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
        self,
        ticks: Ticks,
        segments: Sequence[Segment],
        liveness: Liveness,
        *,
        moves: bool = False,
        together: bool = False,
    ) -> None:
        self._together = together
        table = ticks.schedule.encoded
        self._schedule, self._actions, self._liveness = ticks.schedule, table, liveness
        self._segments, self._code = tuple(segments), _Code(segments, ticks)
        self._when, self._joint, self._rooms = ticks.when, ticks.joint, ticks.rooms
        self._chunks = ticks.chunks
        self._number = table.stage * table.num_microbatches + table.microbatch
        keeps = (~table.recomputed).astype(np.int64)
        blocks = table.kind, ticks.chunks, keeps
        self._runs = self._code.during(ticks.when, *blocks)  # the moment of each action
        lanes, shape = self._code.payload.shape[1], (ticks.num_ticks, table.num_devices)
        self._arrival = {name: np.zeros((lanes, *shape), np.int32) for name in ARRIVAL}
        self._ticks = self._empty(shape, moves)
        self.moved = self._moved() if moves else np.zeros((3, 0), np.int64)

    def _empty(self, shape: tuple[int, int], moves: bool) -> TickRecord[IntTable]:
        """Ticks in which nobody does anything."""

        def record(names: Sequence[str]) -> Record[IntTable]:
            nobody = ("kind", "chunk", *MOVE)
            return Record({n: np.full(shape, NOBODY * (n in nobody), np.int32) for n in names})

        def of(*kinds: Kind) -> Record[IntTable]:
            return record(columns_of(kinds, slices=self._actions.slices > 1))

        lanes = zip(*(self._arrival[name] for name in ARRIVAL), strict=True)
        return TickRecord(
            of(*RUNS_FORWARD),
            of(Kind.B, Kind.I, Kind.W),
            tuple(Record(dict(zip(ARRIVAL, each, strict=True))) for each in lanes),
            (of(*SHARES),) if self._actions.shares.any() else (),
            (record(MOVE),) if moves else (),
            () if self._rooms is None else (self._rooms.links(self._when, shape),),
        )

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
        pools = {}
        for place in sorted((p for p in Place if p.is_pool), key=lambda p: p in ALWAYS):
            uses = list(self._uses(place))
            if self._together and place in TOGETHER and uses:
                uses = [use for each in TOGETHER for use in self._uses(each)]
            if uses or place in ALWAYS:
                pools[place] = self._allocate(place, uses)
        return Program(
            self._schedule,
            self._segments,
            self._ticks,
            pools,
            self._liveness,
            self._joint,
            together=self._together,
            room=None if self._rooms is None else self._rooms.room,
        )

    def _write_actions(self) -> None:
        """All columns but the slots."""
        table = self._actions
        columns = {
            "kind": table.kind,
            "chunk": self._chunks,
            "stage": table.stage,
            "microbatch": table.microbatch,
            **flags_of(table),
        }
        for kind in table.kinds:
            own, mine = self._ticks.of(kind).columns, table.kind == kind
            for name in own.keys() & columns.keys():
                own[name][self._when[mine], table.device[mine]] = columns[name][mine]

    def _uses(self, pool: Place) -> Iterator[_Uses]:
        """Every use of a pool: by actions, transfers, and moves to the host and back."""
        table = self._actions
        for kind in sorted(table.kinds):
            for effect in effects_of(kind, table.kinds, self._liveness):
                if effect.place is pool:
                    yield self._of_actions(kind, effect)
        for message, payload in zip(MESSAGES, Payload, strict=True):
            if POOL_OF[payload] is pool:
                # values that permutes bring
                users = np.flatnonzero(table.crosses & table.of_kinds(message.users))
                sent, device = table.producer[users], table.device[users]
                tick = self._when[sent]
                lane = self._code.lane(tick, payload, table.device[sent], device)
                moment = self._code.written[tick, lane]
                at = lane, tick, device
                yield _Uses(self._arrival["slot"], at, self._number[users], moment)
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
            pairs = self._ticks.pairs(self._joint)
            moment = np.where(pairs[tick, device], self._code.blocks_done(tick), moment)
            if effect.place in _STORES.reads.values():
                value = value + np.where(np.isin(value, self.moved[0]), self._back, 0)
        return _Uses(getattr(record, effect.field), (tick, device), value, moment)

    def _of_moves(self, pool: Place) -> Iterator[_Uses]:
        """Values that are copied to the host, and back."""
        value, leaves, comes = self.moved
        if not len(value):
            return
        (record,), code = self._ticks.moves, self._code
        device = self._actions.device[self._actions.backward_at.reshape(-1)[value]]
        record.stores[leaves, device] = record.fetches[comes, device] = value
        for columns, values, tick, moment in (
            (_STORES.reads, value, leaves, code.after(leaves - 1)),
            (_STORES.writes, value, leaves, code.before(leaves)),
            (_FETCHES.reads, value, comes, code.before(comes)),
            (_FETCHES.writes, value + self._back, comes, code.after(comes)),
        ):
            for name in (name for name, place in columns.items() if place is pool):
                yield _Uses(getattr(record, name), (tick, device), values, moment)

    @property
    def _back(self) -> int:
        """The number of a value that comes back from the host, less that of one that leaves."""
        return self._actions.num_stages * self._actions.num_microbatches

    def _allocate(self, pool: Place, uses: Sequence[_Uses]) -> int:
        """Linear scan on every device; returns the pool's size."""
        none = np.zeros(0, np.int64)
        value = np.concatenate([none, *(use.value for use in uses)])
        moment = np.concatenate([none, *(use.moment for use in uses)])
        values, which = np.unique(value, return_inverse=True)
        begin = np.full(len(values), moment.max(initial=0))
        end = np.zeros(len(values), np.int64)
        np.minimum.at(begin, which, moment)
        np.maximum.at(end, which, moment)
        owner = np.zeros(len(values), np.int64)
        owner[which] = np.concatenate([none, *(use.at[-1] for use in uses)])
        # what permutes bring to devices that have no message in them
        payloads = [payload for payload, name in POOL_OF.items() if name is pool]
        strays = np.zeros(self._arrival["slot"].shape, bool)
        strays[:] = np.isin(self._code.payload, payloads).T[..., None]
        for use in uses:
            if use.slots is self._arrival["slot"]:
                strays[use.at] = False
                self._arrival["takes"][use.at] = 1
        lane, tick, device = np.nonzero(strays)
        arrives = self._code.written[tick, lane]
        slots, spare = np.zeros(len(values), np.int64), np.zeros(len(lane), np.int64)
        for d in range(self._actions.num_devices):
            mine, stray = owner == d, device == d
            slots[mine], spare[stray] = _scan(begin[mine], end[mine], arrives[stray])
        size = 1 + int(slots.max(initial=0))
        self._arrival["slot"][strays] = np.where(spare < size, spare, 0)
        self._arrival["takes"][strays] = spare < size
        for use in uses:
            use.slots[use.at] = slots[np.searchsorted(values, use.value)]
        return size


def _scan(begin: IntArray, end: IntArray, strays: IntArray) -> tuple[IntArray, IntArray]:
    """The lowest free slot for each life, and for each stray moment the lowest that is free then;
    it may be one more than lives need.
    """
    free: list[int] = []
    slots: list[int] = [0] * len(begin)
    spare: list[int] = [0] * len(strays)
    size = 0
    starts = np.concatenate([begin, strays])
    stops = np.concatenate([end, strays])
    # What begins in a moment is placed before that moment's strays.
    order = np.lexsort((stops, np.arange(len(starts)) >= len(begin), starts))
    ending = np.argsort(end, kind="stable")
    # How many lives are over when each one begins: a slot is free from the moment after its life's
    # last.
    over = np.searchsorted(end[ending], starts[order], side="left").tolist()
    leaving, gone = ending.tolist(), 0
    for i, ended in zip(order.tolist(), over, strict=True):
        while gone < ended:
            heapq.heappush(free, slots[leaving[gone]])
            gone += 1
        if i >= len(begin):
            spare[i - len(begin)] = free[0] if free else size
        elif free:
            slots[i] = heapq.heappop(free)
        else:
            slots[i], size = size, size + 1
    return np.array(slots, np.int64), np.array(spare, np.int64)
