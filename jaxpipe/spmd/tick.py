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
from ..program.code_rules import half_of
from ..program.ir import Program
from ..program.records import NOBODY, Arrival, Backward, Forward, TickRecord, map_fields, pairs_of
from ..program.segments import Loop, Point, Segment, Transit
from ..program.templates import BlockUse, Payload, Presence
from ..stage.job import Clock
from ..table.kinds import RECOMPUTE, Kind
from .backward import RunBackward
from .block import run_in_order, run_where
from .clock import Clocked
from .exchange import EXCHANGE, arrive, permuted, scope_of, settled
from .forward import RunForward, RunRecompute
from .host import Luggage, Moving, Packing
from .pair import RunPair
from .share import RunDeferred, RunFirstGradient, RunFirstShare, RunShare
from .shared_code import SharedCode
from .state import State, given


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
    before: TickRecord[Scalar] | None  # the last tick of the trip before


# What this device does in ticks of a trip.
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

    program: Program
    axis: str
    shared: SharedCode
    data_axes: tuple[str, ...]
    clock: Clock | None
    blocking: bool  # a permute holds its device's thread until it is over (CPU): see `permuted`

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
        code = self._code(segment, before)
        brought: _Brought = {}
        for j in range(segment.period):
            state = self._tick(code, j, dict(enumerate(rows)), state, brought)
        assert not brought, "a transfer is awaited after its trip"
        return state

    def looped_trip(self, segment: Segment, numbers: Any, state: State) -> State:
        """The same where ticks of a trip share their code.  `numbers`: what this device does, a
        line for each tick, int32.
        """
        return self._loops(self._code(segment, None), segment.loops, 0, numbers, state)

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

    def _code(self, segment: Segment, before: TickRecord[Scalar] | None) -> _Code:
        return _Code(segment, self._kinds_at(segment), self._keeps_at(segment), before)

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
        under_way = [
            t for t in code.segment.transits if code.before is not None or not t.from_before
        ]
        for transit in under_way:
            if self._issued(code.segment, transit) == at:
                with jax.named_scope(scope_of(transit)):
                    brought[transit], state = permuted(
                        transit.permute, self.axis, state, blocking=self.blocking
                    )
        # A transfer with slack is written to its slot ticks later, so that nothing in between
        # depends on it; what reads the pool in between must be done by then (see `run_in_order`),
        # or XLA makes the write on a copy.
        for transit in [t for t in brought if t.written == at]:
            row = given(code.before) if transit.from_before else rows[transit.tick]
            keep = transit.from_before or code.keeps[transit.tick][transit.lane]
            state = self._arrive(
                transit.permute.payload,
                row.arrivals[transit.lane],
                brought.pop(transit),
                state,
                keep=keep,
            )
        return state

    def _issued(self, segment: Segment, transit: Transit) -> Point:
        """Where a permute is issued: where it would hold up the blocks of its tick, when they are
        over.
        """
        issued = transit.issued
        return (
            Point(issued.tick, len(segment.templates[issued.tick].blocks))
            if self.blocking and issued.block
            else issued
        )

    def land(self, segment: Segment, last: TickRecord[Scalar], state: State) -> State:
        """What is in flight after the last trip; `last`: its last tick."""
        for transit in segment.in_flight:
            with jax.named_scope(EXCHANGE):
                brought, state = permuted(transit.permute, self.axis, state, blocking=self.blocking)
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
            at = map_fields(lambda number: jnp.where(given(state.token), 0, number), arrival)
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
        if use.block.is_share:
            return self._share(use, row, state)
        half: Forward[Scalar] | Backward[Scalar] = (
            row.forward if use.block.runs_forward else row.backward
        )
        predicate, stage = half.chunk == use.block.chunk, half.stage
        if isinstance(half, Backward) or self._has_recompute:
            predicate = jnp.logical_and(predicate, half.kind == int(use.block.kind))
        if isinstance(half, Forward):
            if self._has_recompute and use.block.kind is Kind.F:
                predicate = jnp.logical_and(predicate, (half.keeps != 0) == use.block.keeps)
            run = RunForward if use.block.kind is Kind.F else RunRecompute
            code: RunForward | RunRecompute | RunBackward | RunDeferred = run(
                self.shared, use, kind, half
            )
        elif use.block.of_device:
            code = RunDeferred(self.shared, self.axis, half)
        else:
            code = RunBackward(self.shared, use, kind, half)
        if alone and use.block.kind in (Kind.F, Kind.B):
            predicate = jnp.logical_and(predicate, jnp.logical_not(_is_pair(row)))
        if asks:
            predicate = jnp.logical_and(predicate, jnp.array(self.shared.kind_of)[stage] == kind)
        if self.clock is None:
            return run_in_order(Presence.SOMETIMES if asks else use.active, predicate, code, state)
        # Under a predicate always: a loop's body begins when all that it reads is there.
        clocked = Clocked(code, int(use.block.kind), stage, self.clock, self.axis, self.data_axes)
        return run_in_order(
            Presence.NEVER if use.active is Presence.NEVER else Presence.SOMETIMES,
            predicate,
            clocked,
            state,
        )

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
        forward = RunForward(self.shared, pair.ahead, kinds[0], row.forward)
        backward = RunBackward(self.shared, pair.back, kinds[1], row.backward)
        here = jnp.logical_and(
            row.forward.chunk == pair.ahead.block.chunk, row.backward.chunk == pair.back.block.chunk
        )
        return run_in_order(
            pair.active, jnp.logical_and(_is_pair(row), here), RunPair(forward, backward), state
        )

    def _scope(self, use: BlockUse, kind: int) -> str:
        """The name under which a profile shows a block: "F stage 3" where no other stage runs this
        code, else "F chunk 0".
        """
        if use.block.of_device:
            return use.block.kind.name
        half = half_of(self.program, use.block)
        here = (half.chunk == use.block.chunk) & (half.kind == int(use.block.kind))
        stages = {int(s) for s in np.unique(half.stage[here]) if self.shared.kind_of[s] == kind}
        return (
            f"{use.block.kind.name} "
            f"{f'stage {stages.pop()}' if len(stages) == 1 else f'chunk {use.block.chunk}'}"
        )

    def _share(self, use: BlockUse, row: TickRecord[Scalar], state: State) -> State:
        """What all devices do together: under a predicate, where there is one, that all of them
        answer alike.
        """
        (share,) = row.shares
        shared = self.shared
        block: RunShare | RunFirstShare | RunFirstGradient
        block = RunShare(
            shared, self.axis, shared.kinds[shared.kind_of[-1]], share, waits=self.blocking
        )
        if use.block.kind is Kind.E:
            block = RunFirstShare(shared, share, waits=self.blocking)
        elif use.block.kind is Kind.G:
            block = RunFirstGradient(shared, share, waits=self.blocking)
        if self.clock is not None:
            clocked = Clocked(
                block,
                int(use.block.kind),
                lax.axis_index(self.axis),
                self.clock,
                self.axis,
                self.data_axes,
            )
            state = run_in_order(
                Presence.SOMETIMES, share.kind == int(use.block.kind), clocked, state
            )
        elif use.active is not Presence.ALWAYS:
            state = run_in_order(use.active, share.kind == int(use.block.kind), block, state)
        else:
            state = run_where(use.active, share.kind == int(use.block.kind), block, state)
        return settled(jax.tree.leaves(block.writes(state)), state) if self.blocking else state

    def _kinds_at(self, segment: Segment) -> list[list[tuple[int, ...]]]:
        """For each template and each of its blocks, the kinds of the stages that run it."""
        kind_of = np.array(self.shared.kind_of)
        found = []
        for j, template in enumerate(segment.templates):
            ticks = segment.sharing(j)
            found.append(
                [
                    (0,)
                    if use.block.of_device
                    else tuple(np.unique(kind_of[self._stages(use, ticks)]).tolist())
                    for use in template.blocks
                ]
            )
        return found

    def _stages(self, use: BlockUse, ticks: NDArray[np.int64]) -> NDArray[np.int32]:
        """The stages that run a block in these ticks."""
        half = half_of(self.program, use.block)
        return half.stage[ticks][
            (half.chunk[ticks] == use.block.chunk) & (half.kind[ticks] == int(use.block.kind))
        ]

    def _keeps_at(self, segment: Segment) -> list[list[bool]]:
        """For each template and lane, whether a slot may keep what it has."""
        ticks = [segment.sharing(j) for j in range(segment.period)]
        return [
            [not bool(arrival.takes[rows].all()) for arrival in self.program.ticks.arrivals]
            for rows in ticks
        ]
