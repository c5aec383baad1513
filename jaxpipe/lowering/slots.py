"""Pass: give every value that outlives its tick a buffer slot, by liveness, and write the program's table."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program.ir import NOBODY, Column, Payload, Program, Segment, Slots
from ..program.liveness import LastUse, Liveness
from ..table.action import Kind
from ..table.encoded import IntArray
from .assign_ticks import Ticks
from .requirements import chunks_of, consumers

C = Column


class _Values(NamedTuple):
    """Values of one pool, each on a device and live over a closed interval of moments (see `_moment`).

    `ticks[k]` and `columns[k]` are the k-th entry, for each value, of the device's table that names its slot.
    """

    device: IntArray
    begin: IntArray
    end: IntArray
    ticks: IntArray
    columns: IntArray


class _Pool(IntEnum):
    X = 0
    RESIDUAL_INPUT = 1
    RESIDUAL_WEIGHT = 2
    COTANGENT = 3
    STASH = 4
    FIRST = 5


_ARRIVE = 2


def _moment(tick: IntArray, phase: int) -> IntArray:
    """Ticks in thirds: blocks of one direction, then of the other, then what arrives over transfers."""
    return 3 * tick + phase


def assign_slots(ticks: Ticks, segments: Sequence[Segment], *, liveness: Liveness | None = None) -> Program:
    """Allocate slots by linear scan over live intervals, so that a pool has exactly as many slots as its peak.

    Poletto and Sarkar 1999 (linear scan register allocation); intervals of one device form an interval graph, for which
    the greedy choice is optimal.  A device that takes part in an exchange without a message for it writes what it gets
    to a free slot; where none is free it keeps what a slot has, which the table says as ~slot.
    """
    writer = _Writer(ticks, segments, liveness or Liveness())
    return writer.program()


class _Writer:
    """Fills the table; arrays of actions are indexed by their numbers in the encoded schedule."""

    def __init__(self, ticks: Ticks, segments: Sequence[Segment], liveness: Liveness) -> None:
        table = ticks.schedule.encoded
        self._schedule, self._actions = ticks.schedule, table
        self._segments = tuple(segments)
        self._liveness = liveness
        self._when = ticks.when
        self._user = consumers(table)
        self._local = (self._user >= 0) & (table.device[self._user] == table.device)
        self._forward_phase, self._backward_phase = (0, 1) if ticks.forward_first else (1, 0)
        self._arrivals = _Arrivals(self._segments, ticks.num_ticks, table.num_devices)
        shape = (ticks.num_ticks, table.num_devices, C.ARRIVAL + max(self._arrivals.widest, 1))
        self._table: NDArray[np.int32] = np.zeros(shape, np.int32)
        self._table[:, :, [C.F_CHUNK, C.B_CHUNK]] = NOBODY
        self._table[:, :, C.EXCHANGE] = self._arrivals.choice[:, None]

    def program(self) -> Program:
        """Write the actions, then for each pool the slots of its values."""
        self._write_actions()
        sizes = [self._allocate(pool, values) for pool, values in self._values().items()]
        return Program(self._schedule, self._segments, self._table, Slots(*sizes))

    def _write_actions(self) -> None:
        """What runs where; all but the slots."""
        table = self._actions
        forward = table.kind == Kind.F
        for f_column, b_column, entries in (
            (C.F_CHUNK, C.B_CHUNK, chunks_of(self._schedule)),
            (C.F_STAGE, C.B_STAGE, table.stage),
            (C.F_MICROBATCH, C.B_MICROBATCH, table.microbatch),
            (C.F_FIRST, C.B_FIRST, table.stage == 0),
            (C.F_LOCAL, C.B_LOCAL, self._local),
        ):
            column = np.where(forward, f_column, b_column)
            self._table[self._when, table.device, column] = entries
        column = np.where(forward, C.F_LAST, C.B_KIND)
        self._table[self._when, table.device, column] = np.where(forward, table.stage == table.num_stages - 1, table.kind)

    def _values(self) -> dict[_Pool, _Values]:
        """What each pool must hold."""
        table = self._actions
        forward = np.flatnonzero(table.kind == Kind.F)
        by_input, _ = self._last_uses(forward)
        kept = forward[by_input >= 0]
        by_input, by_weight = self._last_uses(kept)
        now = _moment(self._when[kept], self._forward_phase)
        tick = self._when[kept]
        first = table.stage[kept] == 0
        dgrad = np.flatnonzero(table.kind == Kind.I)
        wgrad = table.at[Kind.W][table.stage[dgrad], table.microbatch[dgrad]]
        begin = _moment(self._when[dgrad], self._backward_phase)
        stash = self._for_backward(dgrad, begin, (self._when[dgrad], C.B_STASH), C.B_STASH, wgrad, wgrad)
        firsts = self._for_backward(kept[first], now[first], (tick[first], C.F_FR), C.B_FR, by_input[first], by_input[first])
        return {
            _Pool.X: self._inputs(forward),
            _Pool.RESIDUAL_INPUT: self._for_backward(kept, now, (tick, C.F_RI), C.B_RI, by_input, by_input),
            _Pool.RESIDUAL_WEIGHT: self._for_backward(kept, now, (tick, C.F_RW), C.B_RW, by_input, by_weight),
            _Pool.COTANGENT: self._cotangents(kept),
            _Pool.STASH: stash,
            _Pool.FIRST: firsts,
        }

    def _last_uses(self, forward: IntArray) -> tuple[IntArray, IntArray]:
        """Of each forward, its I (or B) and its W (or B); -1 in a forward-only table."""
        table = self._actions
        at = (table.stage[forward], table.microbatch[forward])
        both = table.at[Kind.B][at]
        return table.backward_at[at], np.where(both >= 0, both, table.at[Kind.W][at])

    def _for_backward(
        self, holder: IntArray, begin: IntArray, written: tuple[IntArray, IntArray | int], read: int, early: IntArray, late: IntArray
    ) -> _Values:
        """Values on the devices of `holder` that the backward actions `early` and `late` read."""
        tick, column = written
        ticks = np.stack([tick, self._when[early], self._when[late]])
        columns = np.full_like(ticks, read)
        columns[0] = column
        return _Values(self._actions.device[holder], begin, _moment(self._when[late], self._backward_phase), ticks, columns)

    def _inputs(self, forward: IntArray) -> _Values:
        """Stage inputs: from `first`, from the chunk before on this device, or over a transfer."""
        table, when = self._actions, self._when
        source = table.producer[forward]
        tick = when[forward]
        now = _moment(tick, self._forward_phase)
        column, begin = self._arrival(source, Payload.ACTIVATION, table.device[forward])
        local = self._local[source]
        begin = np.where(source < 0, now, np.where(local, _moment(when[source], self._forward_phase), begin))
        column = np.where(source < 0, C.F_X, np.where(local, C.F_OUT, column))
        by_input, by_weight = self._last_uses(forward)
        readers = np.stack([by_input, by_input if self._liveness.x is LastUse.INPUT_GRAD else by_weight])
        kept = (readers >= 0) & (self._liveness.x is not LastUse.FORWARD)
        ticks = np.stack([tick, np.where(source < 0, tick, when[source]), *np.where(kept, when[readers], tick)])
        columns = np.stack([np.full_like(tick, C.F_X), column, *np.where(kept, C.B_X, C.F_X)])
        end = np.where(kept[1], _moment(when[readers[1]], self._backward_phase), now)
        return _Values(table.device[forward], begin, end, ticks, columns)

    def _cotangents(self, kept: IntArray) -> _Values:
        """Gradients of stage outputs: from `last` behind its forward, from the chunk behind on this device, or over a transfer."""
        table, when = self._actions, self._when
        by_input, by_weight = self._last_uses(kept)
        late = by_input if self._liveness.cotangent is LastUse.INPUT_GRAD else by_weight
        source = table.producer[by_input]
        column, begin = self._arrival(source, Payload.COTANGENT, table.device[kept])
        local = self._local[source]
        made = np.where(source < 0, kept, source)
        here = np.where(source < 0, _moment(when[kept], self._forward_phase), _moment(when[source], self._backward_phase))
        begin = np.where((source < 0) | local, here, begin)
        column = np.where(source < 0, C.F_OUT, np.where(local, C.B_OUT, column))
        return self._for_backward(kept, begin, (when[made], column), C.B_DY, by_input, late)

    def _arrival(self, source: IntArray, payload: Payload, target: IntArray) -> tuple[IntArray, IntArray]:
        """The columns of the permutes that carry transfers, and when these write; anything where nothing is carried."""
        crosses = (source >= 0) & ~self._local[source]
        column, begin = np.zeros_like(source), np.zeros_like(source)
        sent = source[crosses]
        lane, arrives = self._arrivals.find(self._when[sent], payload, self._actions.device[sent], target[crosses])
        column[crosses], begin[crosses] = C.ARRIVAL + lane, _moment(arrives, _ARRIVE)
        return column, begin

    def _allocate(self, pool: _Pool, values: _Values) -> int:
        """Linear scan on every device; returns the pool's size."""
        devices = range(self._actions.num_devices)
        mine = [np.flatnonzero(values.device == d) for d in devices]
        size = max(1, *(_peak(values.begin[chosen], values.end[chosen]) for chosen in mine))
        slots = np.zeros(len(values.device), np.int64)
        for device, chosen in zip(devices, mine, strict=True):
            tick, column, arrives = self._strays(pool, device, values.ticks[:, chosen], values.columns[:, chosen])
            moments, back = np.unique(_moment(arrives, _ARRIVE), return_inverse=True)
            slots[chosen], free = _scan(values.begin[chosen], values.end[chosen], moments, size)
            self._table[tick, device, column] = free[back]
        self._table[values.ticks, values.device, values.columns] = slots
        return size

    def _strays(self, pool: _Pool, device: int, ticks: IntArray, columns: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """(tick, column, tick of arrival) of what permutes bring to a device that has no message in them."""
        payload = {_Pool.X: Payload.ACTIVATION, _Pool.COTANGENT: Payload.COTANGENT}.get(pool)
        strays = self._arrivals.payload == (NOBODY - 1 if payload is None else payload)
        arrival = columns >= C.ARRIVAL
        strays[ticks[arrival], columns[arrival] - C.ARRIVAL] = False
        tick, lane = np.nonzero(strays)
        return tick, C.ARRIVAL + lane, tick + self._arrivals.delay[tick, lane]


class _Arrivals:
    """What arrives in every tick: `payload[tick, lane]` (NOBODY where nothing does) and `delay[tick, lane]`."""

    def __init__(self, segments: Sequence[Segment], num_ticks: int, num_devices: int) -> None:
        templates = [p for segment in segments for p in segment.templates]
        self.widest = max((len(p.lanes) for p in templates), default=0)
        self.choice = np.zeros(num_ticks, np.int64)
        self._exchange = np.zeros(num_ticks, np.int64)
        count = sum(len(p.exchanges) for p in templates)
        payload, delay = np.full((count, self.widest), NOBODY), np.zeros((count, self.widest), np.int64)
        self._lane = np.full((count, len(Payload), num_devices, num_devices), -1)
        at = 0
        for segment in segments:
            ticks = slice(segment.start, segment.stop)
            self.choice[ticks] = segment.chosen.ravel()
            starts = at + np.cumsum([0, *(len(p.exchanges) for p in segment.templates)])[:-1]
            self._exchange[ticks] = np.tile(starts, segment.repeats) + self.choice[ticks]
            for template in segment.templates:
                for number, exchange in enumerate(template.exchanges):
                    for lane, permute in zip(template.lanes_of(number), exchange, strict=True):
                        payload[at, lane], delay[at, lane] = permute.payload, permute.delay
                        for source, target in permute.pairs:
                            self._lane[at, permute.payload, source, target] = lane
                    at += 1
        self.payload, self.delay = payload[self._exchange], delay[self._exchange]

    def find(self, tick: IntArray, payload: Payload, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray]:
        """The lane of the permute that carries each transfer, and the tick at whose end it writes."""
        lane = self._lane[self._exchange[tick], payload, source, target]
        assert (lane >= 0).all(), "no permute carries a transfer"
        return lane, tick + self.delay[tick, lane]


def _scan(begin: IntArray, end: IntArray, strays: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """The lowest free slot for each life, and for each stray moment one that is free then, or ~0 where none is."""
    free = list(range(size))
    live: list[tuple[int, int]] = []
    slots, spare = [0] * len(begin), [0] * len(strays)
    starts = np.concatenate([begin, strays])
    stops = np.concatenate([end, strays]).tolist()
    # What begins in a moment is placed before that moment's strays.
    order = np.lexsort((stops, np.arange(len(starts)) >= len(begin), starts)).tolist()
    now = starts.tolist()
    for i in order:
        while live and live[0][0] < now[i]:
            heapq.heappush(free, heapq.heappop(live)[1])
        if i >= len(begin):
            spare[i - len(begin)] = free[0] if free else ~0
            continue
        slots[i] = heapq.heappop(free)
        heapq.heappush(live, (stops[i], slots[i]))
    return np.array(slots, np.int64), np.array(spare, np.int64)


def _peak(begin: IntArray, end: IntArray) -> int:
    """The most lives that hold one moment."""
    moments = np.concatenate([2 * begin, 2 * end + 1])
    steps = np.concatenate([np.ones_like(begin), -np.ones_like(end)])
    return int(np.cumsum(steps[np.argsort(moments, kind="stable")]).max(initial=0))
