"""Emits the JAX program of the ticks of one period, template by template, from a Program and the
stages' code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ..arrays import Leaves, Scalar
from ..program.ir import Program
from ..program.records import (
    NOBODY,
    Arrival,
    TickRecord,
    map_fields,
    pairs_of,
)
from ..program.segments import Loop, Point, Segment, Transit
from ..program.templates import BlockUse, Payload, Presence
from ..stage.job import Clock
from ..table.kinds import RECOMPUTE, Kind
from .block import run_in_order, run_where
from .clock import clocked
from .collective import collective_block
from .exchange import EXCHANGE, arrive, permuted, scope_of, settled
from .host import Luggage, Moving, Packing
from .shared_code import SharedCode
from .stage_block import StageAction, pair_block
from .state import State


class _Pair(NamedTuple):
    """Blocks that are run as one where one device has both in a tick."""

    ahead: BlockUse
    back: BlockUse
    active: Presence
    alone: tuple[int, int]  # how often either is run without the other
    total: int

    def __str__(self) -> str:
        return f"{self.ahead.block} with {self.back.block}"


@dataclass(frozen=True)
class _Code:
    """What is emitted for the ticks of a trip: the kinds of stages that run each block, and whether
    the slots of a lane may keep.
    """

    segment: Segment
    kinds: list[list[tuple[int, ...]]]
    keeps: list[list[bool]]


# What this device does in ticks of a trip, and by -1 in the last tick of the trip before.
_Rows: TypeAlias = Mapping[int, TickRecord[Scalar]]
# What permutes that are issued have brought, and is not yet in its slots.
_Brought: TypeAlias = dict[Transit, Leaves]


def _left(use: BlockUse, pairs: Sequence[_Pair]) -> Presence:
    """How often a block is run apart from pairs."""
    for pair in pairs:
        for own, alone in zip((pair.ahead, pair.back), pair.alone, strict=True):
            if own is use:
                return Presence.of(alone, pair.total)
    return use.active


def _is_pair(row: TickRecord[Scalar]) -> Any:
    """Whether this device has a forward and a whole backward in this tick, of which neither needs
    the other: see `pairs_of`.
    """
    forward, backward = row.forward, row.backward
    here = jnp.logical_and(
        forward.chunk != NOBODY,
        jnp.logical_and(backward.chunk != NOBODY, backward.kind == int(Kind.B)),
    )
    return jnp.logical_and(
        here,
        jnp.logical_or(forward.stage != backward.stage, forward.microbatch != backward.microbatch),
    )


@dataclass(frozen=True)
class TickEmitter:
    """Turns templates into code."""

    shared: SharedCode
    data_axes: tuple[str, ...]
    clock: Clock | None

    @property
    def program(self) -> Program:
        """The program."""
        return self.shared.program

    @cached_property
    def _packing(self) -> Packing:
        return Packing.of(self.shared.buffers)

    @cached_property
    def _has_recompute(self) -> bool:
        return bool(self.program.schedule.encoded.of_kinds(RECOMPUTE).any())

    def trip(
        self,
        segment: Segment,
        rows: Sequence[TickRecord[Scalar]],
        before: TickRecord[Scalar] | None,
        state: State,
    ) -> State:
        """The ticks of one period.  `rows[j]` is what this device does in the j-th of them (int32
        scalars).

        `before`: the last tick of the trip before, whose transfers in flight are issued first of
        all; None where there are none.
        """
        code = self._code(segment)
        own = dict(enumerate(rows)) | ({} if before is None else {-1: before})
        brought: _Brought = {}
        for j in range(segment.period):
            state = self._tick(code, j, own, state, brought)
        assert not brought, "a transfer is awaited after its trip"
        return state

    def looped_trip(self, segment: Segment, numbers: Any, state: State) -> State:
        """The same where ticks of a trip share their code.  `numbers`: what this device does, a
        line for each tick, int32.
        """
        return self._loops(self._code(segment), segment.loops, 0, numbers, state)

    def _loops(
        self, code: _Code, loops: Sequence[Loop], start: int, numbers: Any, state: State
    ) -> State:
        """Loops that begin at a tick of the trip, with the lines of their ticks."""
        begin = 0
        for loop in loops:
            mine = numbers[begin : begin + loop.times * loop.ticks]

            def once(
                state: State, lines: Any, loop: Loop = loop, at: int = start + begin
            ) -> tuple[State, None]:
                if loop.body:
                    return self._loops(code, loop.body, at, lines, state), None
                return self._tick(code, at, {at: self.record(lines[0])}, state, {}), None

            if loop.times == 1:
                state, _ = once(state, mine)
            else:
                state, _ = lax.scan(once, state, mine.reshape(loop.times, loop.ticks, -1))
            begin += len(mine)
        return state

    def record(self, line: Any) -> TickRecord[Scalar]:
        """A line of numbers as a record."""
        column, like = iter(range(line.shape[0])), cast("TickRecord[Any]", self.program.ticks)
        return map_fields(lambda _: line[next(column)], like)

    def _code(self, segment: Segment) -> _Code:
        return _Code(segment, self._kinds_at(segment), self._keeps_at(segment))

    def _tick(self, code: _Code, j: int, rows: _Rows, state: State, brought: _Brought) -> State:
        """One tick; what is under way in it is noted in `brought`."""
        segment, template, kinds, row = (
            code.segment,
            code.segment.templates[j],
            code.kinds[j],
            rows[j],
        )
        moves = Luggage(Moving.at(self.program, segment.sharing(j)), self._packing, row)
        way, state = moves.begin(state)
        state = self._transfers(code, Point(j, 0), rows, state, brought)
        fuses = self.clock is None and all(len(those) == 1 for those in kinds)
        pairs = self._pairs_at(segment, j) if fuses else []
        assert not pairs or template.paired, "a pair that its template does not know of"
        for pair in pairs:
            with jax.named_scope(str(pair)):
                both = [kinds[template.blocks.index(use)][0] for use in (pair.ahead, pair.back)]
                state = self._pair(pair, both, row, state)
            way, state = moves.store(way, state)
        for place, (use, those) in enumerate(zip(template.blocks, kinds, strict=True)):
            state = self._transfers(code, Point(j, place), rows, state, brought) if place else state
            left = _left(use, pairs)
            for kind in those if left is not Presence.NEVER else ():
                with jax.named_scope(self._scope(use, kind)):
                    state = self._block(
                        replace(use, active=left),
                        kind,
                        row,
                        state,
                        asks=len(those) > 1,
                        alone=bool(pairs),
                    )
            way, state = moves.store(way, state)
        state = moves.end(way, state)
        return (
            self._transfers(code, Point(j, len(template.blocks)), rows, state, brought)
            if template.blocks
            else state
        )

    def _transfers(
        self, code: _Code, at: Point, rows: _Rows, state: State, brought: _Brought
    ) -> State:
        """The permutes that are issued at a point of the trip, and what is written there of those
        under way.
        """
        under_way = [t for t in code.segment.transits if -1 in rows or not t.from_before]
        for transit in under_way:
            if self._issued(code.segment, transit) == at:
                with jax.named_scope(scope_of(transit)):
                    brought[transit], state = self._permuted(transit, state)
        # A transfer with slack is written to its slot ticks later, so that nothing in between
        # depends on it; what reads the pool in between must be done by then (see `run_in_order`),
        # or XLA makes the write on a copy.
        for transit in [t for t in brought if t.written == at]:
            row = rows[-1 if transit.from_before else transit.tick]
            keep = transit.from_before or code.keeps[transit.tick][transit.lane]
            state = self._arrive(
                transit.permute.payload,
                row.arrivals[transit.lane],
                brought.pop(transit),
                state,
                keep=keep,
            )
        return state

    def _permuted(self, transit: Transit, state: State) -> tuple[Leaves, State]:
        shared = self.shared
        return permuted(transit.permute, shared.axis, state, blocking=shared.blocking)

    def _issued(self, segment: Segment, transit: Transit) -> Point:
        """Where a permute is issued: where it would hold up the blocks of its tick, when they are
        over.
        """
        issued = transit.issued
        return (
            Point(issued.tick, len(segment.templates[issued.tick].blocks))
            if self.shared.blocking and issued.block
            else issued
        )

    def land(self, segment: Segment, last: TickRecord[Scalar], state: State) -> State:
        """What is in flight after the last trip; `last`: its last tick."""
        for transit in segment.in_flight:
            with jax.named_scope(EXCHANGE):
                brought, state = permuted(
                    transit.permute, self.shared.axis, state, blocking=self.shared.blocking
                )
            state = self._arrive(
                transit.permute.payload, last.arrivals[transit.lane], brought, state, keep=True
            )
        return state

    def _arrive(
        self,
        payload: Payload,
        arrival: Arrival[Scalar],
        leaves: Leaves,
        state: State,
        *,
        keep: bool,
    ) -> State:
        """Write what a permute has brought, no sooner than what ran before is over."""
        with jax.named_scope(EXCHANGE):
            # Both, since a pool of one slot has no slot to ask for: XLA would then write all
            # arrivals of a trip in one fusion.
            at = map_fields(lambda number: jnp.where(state["token"], 0, number), arrival)
            return arrive(state, payload, self.shared.buffers.sent(payload), at, leaves, keep=keep)

    def _block(
        self,
        use: BlockUse,
        kind: int,
        row: TickRecord[Scalar],
        state: State,
        *,
        asks: bool,
        alone: bool,
    ) -> State:
        """A block of one kind of stage under its predicate; `asks`: other kinds of stages may run
        it too; `alone`: pairs run apart.
        """
        action = use.block.kind
        record: Any = row.of(action)
        predicate = record.kind == int(action)
        if use.block.collective:
            stage, block = (
                lax.axis_index(self.shared.axis),
                collective_block(self.shared, action, record),
            )
        else:
            stage, block = (
                record.stage,
                StageAction(self.shared, use, kind, record).block(),
            )
            there = record.chunk == use.block.chunk
            asks_kind = not use.block.runs_forward or self._has_recompute
            predicate = jnp.logical_and(there, predicate) if asks_kind else there
            if action is Kind.F and self._has_recompute:
                predicate = jnp.logical_and(predicate, (record.keeps != 0) == use.block.keeps)
            if alone and action in (Kind.F, Kind.B):
                predicate = jnp.logical_and(predicate, jnp.logical_not(_is_pair(row)))
            if asks:
                predicate = jnp.logical_and(
                    predicate, jnp.array(self.shared.kind_of)[stage] == kind
                )
        active, run = Presence.SOMETIMES if asks else use.active, run_in_order
        if self.clock is not None:
            # Under a predicate always: a loop's body begins when all that it reads is there.
            active = Presence.NEVER if active is Presence.NEVER else Presence.SOMETIMES
            what = (jnp.int32(int(action)), stage, record.microbatch)
            block = clocked(block, what, self.clock, self.shared.axis, self.data_axes)
        elif use.block.together and active is Presence.ALWAYS:
            run = run_where  # in order by what it exchanges
        state = run(active, predicate, block, state)
        waits = self.shared.blocking and use.block.together
        return settled(jax.tree.leaves(block.part(state)), state) if waits else state

    def _pairs_at(self, segment: Segment, j: int) -> list[_Pair]:
        """The overlapped pairs of a template's ticks: a forward and a whole backward of one device
        in one tick.
        """
        ticks = segment.sharing(j)
        forward, backward = self.program.ticks.forward, self.program.ticks.backward
        ahead = pairs_of(forward, backward)[ticks]
        if self._has_recompute or not ahead.any():
            return []
        found = []
        uses = segment.templates[j].blocks
        for f in (use for use in uses if use.block.kind is Kind.F):
            for b in (use for use in uses if use.block.kind is Kind.B):
                both = (
                    ahead
                    & (forward.chunk[ticks] == f.block.chunk)
                    & (backward.chunk[ticks] == b.block.chunk)
                )
                runs = [
                    int(
                        (
                            (half.chunk[ticks] == use.block.chunk)
                            & (half.kind[ticks] == int(use.block.kind))
                            & ~ahead
                        ).sum()
                    )
                    for half, use in ((forward, f), (backward, b))
                ]
                if both.any():
                    found.append(
                        _Pair(
                            f,
                            b,
                            Presence.of(int(both.sum()), both.size),
                            (runs[0], runs[1]),
                            both.size,
                        )
                    )
        return found

    def _pair(
        self, pair: _Pair, kinds: Sequence[int], row: TickRecord[Scalar], state: State
    ) -> State:
        """A forward and a backward, of these kinds of stages, in one block."""
        forward = StageAction(self.shared, pair.ahead, kinds[0], row.forward)
        backward = StageAction(self.shared, pair.back, kinds[1], row.backward)
        here = jnp.logical_and(
            row.forward.chunk == pair.ahead.block.chunk, row.backward.chunk == pair.back.block.chunk
        )
        return run_in_order(
            pair.active, jnp.logical_and(_is_pair(row), here), pair_block(forward, backward), state
        )

    def _scope(self, use: BlockUse, kind: int) -> str:
        """The name under which a profile shows a block: "F stage 3" where no other stage runs this
        code, else "F chunk 0".
        """
        if use.block.collective:
            return use.block.kind.name
        every = np.unique(self._stages(use, np.arange(self.program.num_ticks))).tolist()
        stages = [s for s in every if self.shared.kind_of[s] == kind]
        return (
            f"{use.block.kind.name} "
            f"{f'stage {stages.pop()}' if len(stages) == 1 else f'chunk {use.block.chunk}'}"
        )

    def _kinds_at(self, segment: Segment) -> list[list[tuple[int, ...]]]:
        """For each template and each of its blocks, the kinds of the stages that run it."""
        kind_of = np.array(self.shared.kind_of)
        found = []
        for j, template in enumerate(segment.templates):
            ticks = segment.sharing(j)
            found.append(
                [
                    (0,)
                    if use.block.collective
                    else tuple(np.unique(kind_of[self._stages(use, ticks)]).tolist())
                    for use in template.blocks
                ]
            )
        return found

    def _stages(self, use: BlockUse, ticks: NDArray[np.int64]) -> NDArray[np.int32]:
        """The stages that run a block in these ticks."""
        record: Any = self.program.ticks.of(use.block.kind)
        runs = (record.chunk == use.block.chunk) & (record.kind == int(use.block.kind))
        found: NDArray[np.int32] = record.stage[ticks][runs[ticks]]
        return found

    def _keeps_at(self, segment: Segment) -> list[list[bool]]:
        """For each template and lane, whether a slot may keep what it has."""
        ticks = [segment.sharing(j) for j in range(segment.period)]
        return [
            [not bool(arrival.takes[rows].all()) for arrival in self.program.ticks.arrivals]
            for rows in ticks
        ]
