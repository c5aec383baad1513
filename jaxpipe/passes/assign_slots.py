"""Pass: give every value that outlives its tick a buffer slot, by liveness, and write the program's table."""

from __future__ import annotations

import enum
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..action import Action, Kind
from .assign_ticks import Ticks
from .facts import Where, consumer_of, locate
from .program import NOBODY, Column, Payload, Program, Segment, Slots

C = Column


class LastUse(enum.Enum):
    """The last action of a stage and microbatch that reads a value."""

    FORWARD = "F"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


@dataclass(frozen=True)
class Liveness:
    """Until when the stage's code needs what it keeps; `stage.py` reads it off the stage's jaxprs."""

    x: LastUse = LastUse.WEIGHT_GRAD
    cotangent: LastUse = LastUse.INPUT_GRAD
    first: LastUse = LastUse.INPUT_GRAD


class _Life(NamedTuple):
    """A value of one pool on one device, live over a closed interval of moments (see `_moment`)."""

    begin: int
    end: int
    cells: tuple[tuple[int, Column], ...]  # (tick, column) entries of the table that name its slot


class _Pool(enum.IntEnum):
    X = 0
    RESIDUAL_INPUT = 1
    RESIDUAL_WEIGHT = 2
    COTANGENT = 3
    STASH = 4
    FIRST = 5


_ARRIVE = 2


def _moment(tick: int, phase: int) -> int:
    """Ticks in thirds: blocks of one direction, then of the other, then what arrives over transfers."""
    return 3 * tick + phase


def assign_slots(ticks: Ticks, segments: Sequence[Segment], *, liveness: Liveness | None = None) -> Program:
    """Allocate slots by linear scan over live intervals, so that a pool has exactly as many slots as its peak.

    Poletto and Sarkar 1999 (linear scan register allocation); intervals of one device form an interval graph, for which
    the greedy choice is optimal.  A device that a permute reaches without a message for it writes what it gets to a
    free slot; where none is free the pool has one more.
    """
    writer = _Writer(ticks, segments, liveness or Liveness())
    return writer.program()


class _Writer:
    """Fills the table."""

    def __init__(self, ticks: Ticks, segments: Sequence[Segment], liveness: Liveness) -> None:
        self._ticks = ticks
        self._segments = tuple(segments)
        self._liveness = liveness
        self._last_stage = ticks.schedule.num_stages - 1
        self._where = locate(ticks)
        self._permutes = [p.permutes for s in segments for _ in range(s.repeats) for p in s.positions]
        widest = max((len(p) for p in self._permutes), default=0)
        shape = (ticks.num_ticks, ticks.schedule.num_devices, C.ARRIVAL + max(widest, 1))
        self._table: NDArray[np.int32] = np.zeros(shape, np.int32)
        self._table[:, :, [C.F_CHUNK, C.B_CHUNK]] = NOBODY
        self._forward_phase, self._backward_phase = (0, 1) if ticks.forward_first else (1, 0)
        self._lives: dict[tuple[_Pool, int], list[_Life]] = defaultdict(list)

    def program(self) -> Program:
        """Write actions, then slots, then the slots of arrivals."""
        for action, where in self._where.items():
            if action.kind is Kind.F:
                self._forward(action, where)
            else:
                self._backward(action, where)
        sizes = [self._allocate(pool) for pool in _Pool]
        slots = Slots(*(max(1, size) for size in sizes))
        return Program(self._ticks.schedule, self._segments, self._table, slots)

    def _forward(self, action: Action, where: Where) -> None:
        stage, _, microbatch = action
        device, tick = where
        target = consumer_of(action, self._last_stage, self._where)
        row = self._table[tick, device]
        row[C.F_CHUNK] = self._ticks.schedule.placement.chunk_of(stage, device)
        row[C.F_STAGE], row[C.F_MICROBATCH] = stage, microbatch
        row[C.F_FIRST], row[C.F_LAST] = stage == 0, stage == self._last_stage
        row[C.F_LOCAL] = target is not None and target.device == device
        uses = self._backward_uses(action)
        self._keep_input(action, where, uses)
        now = _moment(tick, self._forward_phase)
        if not uses:
            return
        by_input, by_weight = uses[LastUse.INPUT_GRAD], uses[LastUse.WEIGHT_GRAD]
        self._live(_Pool.RESIDUAL_INPUT, device, now, by_input, (tick, C.F_RI), C.B_RI)
        self._live(_Pool.RESIDUAL_WEIGHT, device, now, by_weight, (tick, C.F_RW), C.B_RW, also=by_input)
        if stage == 0:
            self._live(_Pool.FIRST, device, now, by_input, (tick, C.F_FR), C.B_FR)
        if stage == self._last_stage:
            until = uses[self._liveness.cotangent]
            self._live(_Pool.COTANGENT, device, now, until, (tick, C.F_OUT), C.B_DY, also=by_input)

    def _backward(self, action: Action, where: Where) -> None:
        stage, kind, microbatch = action
        device, tick = where
        row = self._table[tick, device]
        target = consumer_of(action, self._last_stage, self._where)
        row[C.B_CHUNK] = self._ticks.schedule.placement.chunk_of(stage, device)
        row[C.B_KIND], row[C.B_STAGE], row[C.B_MICROBATCH] = kind, stage, microbatch
        row[C.B_FIRST] = stage == 0
        row[C.B_LOCAL] = target is not None and target.device == device
        now = _moment(tick, self._backward_phase)
        if kind is Kind.I:
            weight = self._where[Action(stage, Kind.W, microbatch)]
            self._live(_Pool.STASH, device, now, weight, (tick, C.B_STASH), C.B_STASH)
        if target is None:
            return
        source = Action(stage - 1, Kind.F, microbatch)
        uses = self._backward_uses(source)
        until, by_input = uses[self._liveness.cotangent], uses[LastUse.INPUT_GRAD]
        if row[C.B_LOCAL]:
            self._live(_Pool.COTANGENT, device, now, until, (tick, C.B_OUT), C.B_DY, also=by_input)
        else:
            column, begin = self._arrival(tick, Payload.COTANGENT, device, target.device)
            self._live(_Pool.COTANGENT, target.device, begin, until, (tick, column), C.B_DY, also=by_input)

    def _keep_input(self, action: Action, where: Where, uses: dict[LastUse, Where]) -> None:
        """The stage input: from `first`, from the chunk before on this device, or over a transfer."""
        stage, _, microbatch = action
        device, tick = where
        own = (tick, C.F_X)
        until = _moment(tick, self._forward_phase)
        cells = [own]
        if uses and self._liveness.x is not LastUse.FORWARD:
            until = _moment(uses[self._liveness.x].tick, self._backward_phase)
            readers = {uses[LastUse.INPUT_GRAD].tick, uses[self._liveness.x].tick}
            cells += [(t, C.B_X) for t in readers]
        if stage == 0:
            begin = _moment(tick, self._forward_phase)
        else:
            source = self._where[Action(stage - 1, Kind.F, microbatch)]
            local = source.device == device
            begin = _moment(source.tick, self._forward_phase)
            column = C.F_OUT
            if not local:
                column, begin = self._arrival(source.tick, Payload.ACTIVATION, source.device, device)
            cells.append((source.tick, column))
        self._lives[_Pool.X, device].append(_Life(begin, until, tuple(cells)))

    def _backward_uses(self, forward: Action) -> dict[LastUse, Where]:
        """Where I (or B) and W (or B) of a forward run; empty in a forward-only table."""
        stage, _, microbatch = forward
        both = self._where.get(Action(stage, Kind.B, microbatch))
        if both is not None:
            return {LastUse.INPUT_GRAD: both, LastUse.WEIGHT_GRAD: both}
        by_input = self._where.get(Action(stage, Kind.I, microbatch))
        if by_input is None:
            return {}
        return {LastUse.INPUT_GRAD: by_input, LastUse.WEIGHT_GRAD: self._where[Action(stage, Kind.W, microbatch)]}

    def _live(
        self,
        pool: _Pool,
        device: int,
        begin: int,
        until: Where,
        written: tuple[int, Column],
        read: Column,
        *,
        also: Where | None = None,
    ) -> None:
        """Note a value that a backward action reads last in tick `until` (and earlier in `also`)."""
        readers = {until.tick} | ({also.tick} if also else set())
        cells = {written, *((t, read) for t in readers)}
        self._lives[pool, device].append(_Life(begin, _moment(until.tick, self._backward_phase), tuple(sorted(cells))))

    def _arrival(self, tick: int, payload: Payload, source: int, target: int) -> tuple[Column, int]:
        """The table column of the permute that carries this transfer (an int past ARRIVAL for the later ones), and when it writes."""
        for i, permute in enumerate(self._permutes[tick]):
            if permute.payload is payload and (source, target) in permute.pairs:
                return int(C.ARRIVAL) + i, _moment(tick + permute.delay, _ARRIVE)  # type: ignore[return-value]
        raise AssertionError(f"no permute in tick {tick} carries {payload.name} from {source} to {target}")

    def _allocate(self, pool: _Pool) -> int:
        """Linear scan on every device; returns the pool's size."""
        devices = range(self._ticks.schedule.num_devices)
        size = max(_peak(self._lives[pool, d]) for d in devices)
        payload = {_Pool.X: Payload.ACTIVATION, _Pool.COTANGENT: Payload.COTANGENT}.get(pool)
        grown = size
        for device in devices:
            lives = [*self._lives[pool, device], *self._strays(payload, device)]
            grown = max(grown, self._scan(lives, device, size))
        return grown

    def _strays(self, payload: Payload | None, device: int) -> list[_Life]:
        """One-moment lives for what permutes bring to a device that has no message in them."""
        if payload is None:
            return []
        expected = {cell for pool in (_Pool.X, _Pool.COTANGENT) for life in self._lives[pool, device] for cell in life.cells}
        found = []
        for tick, permutes in enumerate(self._permutes):
            for i, permute in enumerate(permutes):
                cell = (tick, int(C.ARRIVAL) + i)
                if permute.payload is payload and cell not in expected:
                    moment = _moment(tick + permute.delay, _ARRIVE)
                    found.append(_Life(moment, moment, (cell,)))  # type: ignore[arg-type]
        return found

    def _scan(self, lives: list[_Life], device: int, size: int) -> int:
        """Give each life the lowest free slot; strays share slot `size` where all are taken.  Returns slots used."""
        free = list(range(size))
        live: list[tuple[int, int]] = []
        used = size
        for life in sorted(lives, key=lambda item: (item.begin, _is_stray(item), item.end)):
            while live and live[0][0] < life.begin:
                heapq.heappush(free, heapq.heappop(live)[1])
            if free:
                slot = heapq.heappop(free)
                heapq.heappush(live, (life.end, slot))
            else:
                assert _is_stray(life), "more values live than the pool's peak"
                slot, used = size, size + 1
            for tick, column in life.cells:
                self._table[tick, device, column] = slot
        return used


def _is_stray(life: _Life) -> bool:
    """True for what a permute brings to a device that awaits nothing."""
    return life.begin == life.end and life.begin % 3 == _ARRIVE


def _peak(lives: Sequence[_Life]) -> int:
    """The most lives that hold one moment."""
    steps = sorted([(life.begin, 0, 1) for life in lives] + [(life.end, 1, -1) for life in lives])
    alive = highest = 0
    for _, _, step in steps:
        alive += step
        highest = max(highest, alive)
    return highest
