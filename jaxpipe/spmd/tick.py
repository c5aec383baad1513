"""Emits the JAX program of the ticks of one period, template by template, from a Program and the stages' code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ..arrays import Leaves, Scalar
from ..program.code_rules import half_of
from ..program.ir import Program
from ..program.records import Arrival, Backward, Forward, TickRecord
from ..program.segments import BlockUse, Payload, Presence, Segment
from ..stage.job import Clock
from ..table.kinds import RECOMPUTE, Kind
from .backward import RunBackward
from .block import run_in_order
from .clock import Clocked
from .exchange import arrive, permuted, run_chosen
from .forward import RunForward, RunRecompute
from .shared_code import SharedCode
from .state import State, given


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
    def _has_recompute(self) -> bool:
        return bool(self.program.schedule.encoded.of_kinds(RECOMPUTE).any())

    def trip(self, segment: Segment, rows: list[TickRecord[Scalar]], state: State) -> State:
        """The ticks of one period.  `rows[j]` is what this device does in the j-th of them (int32 scalars)."""
        kinds, keeps = self._kinds_at(segment), self._keeps_at(segment)
        awaited: dict[int, list[tuple[Payload, bool, Arrival[Scalar], Leaves]]] = {}
        for j, (template, row) in enumerate(zip(segment.templates, rows, strict=True)):
            for use, those in zip(template.blocks, kinds[j], strict=True):
                for kind in those:
                    state = self._block(use, kind, row, state, asks=len(those) > 1)
            if len(template.exchanges) > 1:
                state = run_chosen(template, self.axis, self.shared.buffers, row, state, blocking=self.blocking)
            else:
                for lane, permute in zip(template.lanes_of(0), template.exchanges[0], strict=True):
                    brought, state = permuted(permute, self.axis, state, blocking=self.blocking)
                    awaited.setdefault(j + permute.delay, []).append((permute.payload, keeps[j][lane], row.arrivals[lane], brought))
            # A transfer with slack is written to its slot ticks later, so that nothing in between depends on it; what reads the pool in
            # between must be done by then (see `run_in_order`), or XLA makes the write on a copy.
            for payload, keep, arrival, leaves in awaited.pop(j, ()):
                at = replace(arrival, slot=jnp.where(given(state.token), 0, arrival.slot))
                state = arrive(state, payload, self.shared.buffers.sent(payload), at, leaves, keep=keep)
        assert not awaited, "a transfer is awaited after its trip"
        return state

    def _block(self, use: BlockUse, kind: int, row: TickRecord[Scalar], state: State, *, asks: bool) -> State:
        """A block of one kind of stage under its predicate; `asks`: other kinds of stages may run it too."""
        half: Forward[Scalar] | Backward[Scalar] = row.forward if use.block.runs_forward else row.backward
        predicate, stage = half.chunk == use.block.chunk, half.stage
        if isinstance(half, Backward) or self._has_recompute:
            predicate = jnp.logical_and(predicate, half.kind == int(use.block.kind))
        if isinstance(half, Forward):
            if self._has_recompute and use.block.kind is Kind.F:
                predicate = jnp.logical_and(predicate, (half.keeps != 0) == use.block.keeps)
            run = RunForward if use.block.kind is Kind.F else RunRecompute
            code: RunForward | RunRecompute | RunBackward = run(self.shared, use, kind, half)
        else:
            code = RunBackward(self.shared, use, kind, half)
        if asks:
            predicate = jnp.logical_and(predicate, jnp.array(self.shared.kind_of)[stage] == kind)
        if self.clock is None:
            return run_in_order(Presence.SOMETIMES if asks else use.active, predicate, code, state)
        # Under a predicate always: a loop's body begins when all that it reads is there.
        clocked = Clocked(code, self.clock, self.axis, self.data_axes)
        return run_in_order(Presence.NEVER if use.active is Presence.NEVER else Presence.SOMETIMES, predicate, clocked, state)

    def _kinds_at(self, segment: Segment) -> list[list[tuple[int, ...]]]:
        """For each template and each of its blocks, the kinds of the stages that run it."""
        kind_of = np.array(self.shared.kind_of)
        found = []
        for j, template in enumerate(segment.templates):
            ticks = slice(segment.start + j, segment.stop, segment.period)
            found.append([tuple(np.unique(kind_of[self._stages(use, ticks)]).tolist()) for use in template.blocks])
        return found

    def _stages(self, use: BlockUse, ticks: slice) -> NDArray[np.int32]:
        """The stages that run a block in these ticks."""
        half = half_of(self.program, use.block)
        return half.stage[ticks][(half.chunk[ticks] == use.block.chunk) & (half.kind[ticks] == int(use.block.kind))]

    def _keeps_at(self, segment: Segment) -> list[list[bool]]:
        """For each template and lane, whether a slot may keep what it has."""
        ticks = [slice(segment.start + j, segment.stop, segment.period) for j in range(segment.period)]
        return [[not bool(arrival.takes[rows].all()) for arrival in self.program.ticks.arrivals] for rows in ticks]
