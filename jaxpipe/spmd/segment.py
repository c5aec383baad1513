"""A segment of the program on one device, template by template, from the stages' code: blocks,
permutes, and the writes of arrivals to their slots.

A block that is timed calls the host at its begin and its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import product
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from ..arrays import Flag, Leaves, Scalar
from ..program.ir import NOBODY, POOL_OF, SENT_TO, Record, TickRecord
from ..program.segments import BlockUse, Point, Presence, Segment, TickLoop, Transit
from ..stage.setup import Clock, Setup
from ..table.kinds import Kind
from .actions import DeviceAction, pair_block
from .block import TOKEN, BlockCode, Key, State, held_back, run_where, settled
from .gathers import TickWork, one_after_another, works_of
from .pools import HostMoves
from .step import DeviceStep

# The scopes of transfers in a profile and in a compiled program.  The second is of transfers that
# are awaited in a later tick.
EXCHANGE, WITH_SLACK = "exchange", "exchange_with_slack"


# The records of this device in the ticks of a trip; -1 is the last tick of the previous trip.
_Rows: TypeAlias = Mapping[int, TickRecord[Scalar]]
# Values that issued permutes have brought and that are not yet in their slots.
_Brought: TypeAlias = dict[Transit, Leaves]


class _Run(NamedTuple):
    """The code under one predicate: a block of one kind of stage, or a forward and a backward of
    one tick that run as one.
    """

    uses: tuple[BlockUse, ...]
    kinds: tuple[int, ...]
    where: NDArray[np.bool_]  # by tick and device
    tests_kind: bool  # stages of other kinds may run the block too
    tests_pair: bool  # others run it as one with another block


class SegmentCode:
    """Turns a segment into code: one period of ticks, in a scan where it repeats."""

    def __init__(self, step: DeviceStep, segment: Segment) -> None:
        self.step, self.segment, self._program = step, segment, step.program

    def run(self, table: Array, state: State) -> State:
        """The state after the segment.

        `table` has a line of numbers for each tick: the record of this device.
        """
        segment = self.segment
        lines = table[segment.start : segment.stop]
        lines = lines.reshape(segment.repeats, segment.period, table.shape[1])
        flies = bool(segment.in_flight)

        def trip(state: State, lines: Array) -> tuple[State, None]:
            lines = lines.astype(jnp.int32)
            if segment.loops:
                return self._loops(segment.loops, 0, lines, state), None
            records = [self._record(line) for line in lines]
            rows = {j - flies: record for j, record in enumerate(records)}
            brought = _Brought()
            for j in range(segment.period):
                state = self._tick(j, rows, state, brought)
            assert not brought, "a transfer is awaited after its trip"
            return state, None

        if flies:
            # A trip also has the last tick of the previous trip.  The first trip has zeros there,
            # so that nothing arrives.
            before = jnp.concatenate([jnp.zeros_like(lines[:1, -1:]), lines[:-1, -1:]])
            lines = jnp.concatenate([before, lines], axis=1)
        once = len(lines) == 1
        state, _ = trip(state, lines[0]) if once else lax.scan(trip, state, lines)
        if flies:  # after the last trip
            last, brought = self._record(lines[-1, -1].astype(jnp.int32)), _Brought()
            state = self._exchange(Point(0, 0), {-1: last}, state, brought, late=False)
            for transit, new in brought.items():
                state = self._arrive(transit, last, new, state, keep=True)
        return state

    def _loops(self, loops: Sequence[TickLoop], start: int, lines: Array, state: State) -> State:
        """Loops that begin at a tick of the trip, with the lines of their ticks."""
        begin = 0
        for loop in loops:
            own = lines[begin : begin + loop.times * loop.ticks]
            once = partial(self._turn, loop, start + begin)
            if loop.times == 1:
                state, _ = once(state, own)
            else:
                state, _ = lax.scan(once, state, own.reshape(loop.times, loop.ticks, -1))
            begin += len(own)
        return state

    def _turn(self, loop: TickLoop, at: int, state: State, lines: Array) -> tuple[State, None]:
        """One turn of a loop."""
        if loop.body:
            return self._loops(loop.body, at, lines, state), None
        return self._tick(at, {at: self._record(lines[0])}, state, {}), None

    def _record(self, line: Array) -> TickRecord[Scalar]:
        """A line of numbers as a record."""
        column = iter(range(line.shape[0]))
        return self._program.ticks.map(lambda _: line[next(column)])

    def _tick(self, j: int, rows: _Rows, state: State, brought: _Brought) -> State:
        """One tick; `brought` records the transfers in flight."""
        row, begun, ticks = rows[j], -1, self.segment.sharing(j)
        moves = HostMoves(self.step.packing, self._program, ticks, row)
        works = list(works_of(self.step, ticks, row))
        every = [
            (place, [(run, self._beside(run, works, row)) for run in runs])
            for place, runs in self._runs(j)
        ]
        taken = [work for _, runs in every for _, own in runs for work in own]
        for work in works:
            state = work.apart_from(own for own in taken if own.room == work.room).run(state)
        state = moves.begin(state)
        for place, runs in every:
            if place != begun:
                begun = place
                state = self._exchange(Point(j, place), rows, state, brought)
            for run, own in runs:
                with jax.named_scope(self._scope(run)):
                    state = self._run(run, ticks, row, state, own)
            state = moves.store(state)
        return self._exchange(self.segment.end(j), rows, moves.end(state), brought)

    def _runs(self, j: int) -> Iterator[tuple[int, list[_Run]]]:
        """(block before which it is, what is run there): pairs, then the blocks of a template."""
        template, ticks = self.segment.templates[j], self.segment.sharing(j)
        blocks, program = template.blocks, self._program
        # NOBODY, the last stage, has the kind NOBODY
        kind_of = np.array([*self.step.code.kind_of, NOBODY])
        kinds = np.array([kind_of[self._stages(use)[ticks]] for use in blocks])

        def by_kinds(places: Sequence[int], where: NDArray[np.bool_], pair: bool) -> list[_Run]:
            """The runs of these blocks by kinds of stages, on the devices that run them all;
            `pair`: where others of these devices run a pair.
            """
            uses, own = tuple(blocks[p] for p in places), kinds[[*places]]
            those = where & (own != NOBODY).all(axis=0)
            found = sorted({*zip(*own[:, those].tolist(), strict=True)})
            alike = {k: those & (own == np.reshape(k, (-1, 1, 1))).all(axis=0) for k in found}
            return [_Run(uses, k, mine, len(found) > 1, pair) for k, mine in alike.items()]

        fuses = self.step.setup.clock is None and not program.schedule.encoded.recomputes
        ahead = program.pairs[ticks] & fuses
        assert template.paired or not ahead.any(), "a pair that its template does not know of"
        paired: set[int] = set()
        forwards = [p for p, use in enumerate(blocks) if use.block.kind is Kind.F]
        backwards = [p for p, use in enumerate(blocks) if use.block.kind in program.joint]
        for pair in product(forwards, backwards):
            if runs := by_kinds(pair, ahead, False):
                paired.update(pair)
                yield 0, runs
        for place in range(len(blocks)):
            apart = place in paired
            yield place, by_kinds([place], ~(ahead & apart), apart)

    def _exchange(
        self, at: Point, rows: _Rows, state: State, brought: _Brought, *, late: bool = True
    ) -> State:
        """Permute what is due at a point of the trip, and write the arrivals that are: the values
        that a permute brings to this device (zeros where nothing is sent to it) are in `brought`
        until then.  `late`: those with slack are awaited in a later tick.

        On CPU devices (`blocking`) a permute holds one of the process's few threads until all
        partners have arrived.  It therefore starts after earlier work of the tick, and later work
        starts after it.  Otherwise two permutes in flight could keep a block from starting for
        which a partner waits, and all devices would hang.  On GPUs the permute runs during the
        blocks.

        A transfer with slack is written to its slot some ticks later, so that nothing before
        depends on it.  Readers of the pool must end before that write (see `run_where`), or XLA
        writes to a copy.
        """
        blocking, axis = self.step.blocking, self.step.setup.axis
        for transit in self.segment.transits:
            point, permute = transit.issued, transit.permute
            if blocking and point.block:
                # It would delay the blocks of its tick, so it follows them.
                point = self.segment.end(point.tick)
            if point != at or _row_of(transit) not in rows:
                continue
            with jax.named_scope(WITH_SLACK if late and transit.is_late else EXCHANGE):
                sent = state[Key(SENT_TO[POOL_OF[permute.payload]])]
                sent = held_back(sent, state) if blocking else sent
                new = [lax.ppermute(leaf, axis, permute.pairs) for leaf in sent]
                brought[transit] = new
                state = settled(new, state) if blocking else state
        for transit in [t for t in brought if t.written == at]:
            takes = self._program.ticks.arrivals[transit.lane].takes
            every = bool(takes[self.segment.sharing(transit.tick)].all())
            keep = transit.from_before or not every
            row, new = rows[_row_of(transit)], brought.pop(transit)
            state = self._arrive(transit, row, new, state, keep=keep)
        return state

    def _arrive(
        self, transit: Transit, row: TickRecord[Scalar], new: Leaves, state: State, *, keep: bool
    ) -> State:
        """Write a permute's arrivals to their slots after the end of earlier blocks.  With `keep`,
        some devices have no arrival and no free slot, and their slots keep their contents.
        """
        place = POOL_OF[transit.permute.payload]
        buffer, pool = self.step.buffers[place], state[Key(place)]
        with jax.named_scope(EXCHANGE):
            # Both depend on the token, because a pool of one slot needs no slot number.  Otherwise
            # XLA would write all arrivals of a trip in one fusion.
            at: Record[Scalar] = row.arrivals[transit.lane].map(
                lambda number: jnp.where(state[TOKEN], 0, number)
            )
            slots = buffer.whole(pool, at.slot)
            if keep:
                pairs = zip([slot.load() for slot in slots], new, strict=True)
                new = [jnp.where(at.takes == 0, old, leaf) for old, leaf in pairs]
            pool = [slot.store(leaf) for slot, leaf in zip(slots, new, strict=True)]
            return state | {Key(place): pool}

    def _flag(self, run: _Run, row: TickRecord[Scalar]) -> Flag:
        """Whether this device runs it."""
        program = self._program
        flags = [program.asks(row, each.block) for each in run.uses]
        if len(run.uses) > 1:
            flags.append(row.distinct)
        elif run.tests_pair:
            flags.append(jnp.logical_not(row.pairs(program.joint)))
        if run.tests_kind:
            kinds = jnp.array(self.step.code.kind_of)
            for each, kind in zip(run.uses, run.kinds, strict=True):
                flags.append(kinds[row.of(each.block.kind).stage] == kind)
        return reduce(jnp.logical_and, flags)

    def _beside(
        self, run: _Run, works: Sequence[TickWork], row: TickRecord[Scalar]
    ) -> list[TickWork]:
        """What runs under one predicate with a block, beside its compute, for rooms that it does
        not use: of several on a device, that of the lowest.  A block that is timed is alone.
        """
        setup, blocks = self.step.setup, [use.block for use in run.uses]
        is_alone = not setup.form.beside or setup.clock is not None or blocks[0].is_share
        if not works or is_alone:
            return []
        flag, found = self._flag(run, row), list[TickWork]()
        for work in works:
            if work.room in [block.chunk for block in blocks]:
                continue
            lower = [other for other in found if other.room != work.room]
            own = work.apart_from(lower).only(run.where, flag)
            found += [own] if own.where.any() else []
        return found

    def _run(
        self,
        run: _Run,
        ticks: NDArray[np.int64],
        row: TickRecord[Scalar],
        state: State,
        works: Sequence[TickWork],
    ) -> State:
        """Run a block, or a pair, under its predicate, in ticks that share its code: with what runs
        beside it, and without.
        """
        step, first = self.step, run.uses[0].block
        records = [row.of(each.block.kind) for each in run.uses]
        parts = zip(run.uses, run.kinds, records, strict=True)
        actions = [DeviceAction(step, *part, self._slots(part[0], ticks)) for part in parts]
        block = pair_block(*actions) if len(actions) > 1 else actions[0].block()
        flag, is_timed = self._flag(run, row), step.setup.clock is not None
        for work in works:
            state = work._replace(block=one_after_another(work.block, block)).run(state)
        if is_timed:
            stage = lax.axis_index(step.setup.axis) if first.is_share else records[0].stage
            what = jnp.int32(int(first.kind)), stage, records[0].microbatch
            block = clocked(block, what, step.setup)
        # Where all devices run a collective action, its exchange keeps it in order.  What is timed
        # is in a loop, whose body begins when all of its inputs are computed.
        ordered = not first.is_collective
        rest = TickWork(run.where, flag, block, ordered, looped=is_timed).apart_from(works)
        state = rest.run(state) if rest.where.any() else state
        waits = step.blocking and first.is_collective
        return settled(jax.tree.leaves(block.part(state)), state) if waits else state

    def _scope(self, run: _Run) -> str:
        """The name under which a profile shows a block: "F stage 3" where no other stage runs this
        code, else "F chunk 0".
        """
        if len(run.uses) > 1:
            return " with ".join(str(use.block) for use in run.uses)
        block = run.uses[0].block
        if block.is_share:
            return block.kind.name
        every = {*self._stages(run.uses[0]).ravel().tolist()} - {NOBODY}
        stages = [s for s in every if self.step.code.kind_of[s] == run.kinds[0]]
        where = f"stage {stages[0]}" if len(stages) == 1 else f"chunk {block.chunk}"
        return f"{block.kind.name} {where}"

    def _slots(self, use: BlockUse, ticks: NDArray[np.int64]) -> list[int]:
        """The slots in which a block leaves or finds what it keeps in these ticks, where slots are
        arrays of their own.
        """
        program, block = self._program, use.block
        if not program.together or block.is_share or (block.kind is Kind.F and not block.keeps):
            return []
        runs = self._stages(use)[ticks] != NOBODY
        slots = program.ticks.of(block.kind).residual_weight[ticks][runs]
        return sorted({*slots.tolist()})

    def _stages(self, use: BlockUse) -> NDArray[np.int64]:
        """`[tick, device]`: the stage of which a device runs a block, 0 of a share; NOBODY where
        it runs none.
        """
        ticks, block = self._program.ticks, use.block
        stages = 0 if block.is_share else ticks.of(block.kind).stage
        return np.where(self._program.asks(ticks, block), stages, NOBODY)


def _row_of(transit: Transit) -> int:
    """The number of the records of a transfer, as `_Rows` has it."""
    return -1 if transit.from_before else transit.tick


def clocked(block: BlockCode, what: tuple[Scalar, ...], setup: Setup) -> BlockCode:
    """The same block, with a call of the host at its begin and one at its end.

    `what` is the kind, the number before it in the table, and the microbatch.
    """
    clock, data_axes = setup.clock, setup.data_axes
    assert clock is not None

    def run(state: State) -> State:
        shard = lax.axis_index(data_axes) if data_axes else jnp.int32(0)
        numbers = (shard, lax.axis_index(setup.axis), *what)
        zero = _call_host(clock, jnp.int32(0), *numbers)
        # The block is in a loop whose predicate is the answer of the first call.  A block whose
        # pools have one slot each needs no number of its record, so XLA would run it before its
        # begin is noted.  The second call depends on the values that the block wrote.
        after = run_where(Presence.SOMETIMES, zero == 0, block, state)
        wrote = _touched(jax.tree.leaves(block.part(after)))
        _call_host(clock, jnp.int32(1), *numbers, wrote=[wrote])
        return after

    return BlockCode(block.reads, block.changes, run, loops=block.loops)


def _call_host(clock: Clock, *numbers: Scalar, wrote: Sequence[Scalar] = ()) -> Scalar:
    """Call the host from each device and return its answer.  The host also gets the device's place
    along the axes that are left to the partitioner.

    JAX cannot call the host where an axis is left to the partitioner.  Nothing is computed here, so
    the call is mapped over those axes too.
    """
    left = jax.sharding.get_abstract_mesh().auto_axes

    def call(*operands: Scalar) -> Scalar:
        partner = lax.axis_index(left) if left else jnp.int32(0)
        # One array, because each array takes the host tens of microseconds.
        array = jnp.stack([partner, *operands[: len(numbers)]])
        number, rest = jax.ShapeDtypeStruct((), jnp.int32), operands[len(numbers) :]
        return io_callback(clock, number, array, rest)

    spec = PartitionSpec()
    mapped = jax.shard_map(call, in_specs=spec, out_specs=spec, axis_names={*left}, check_vma=False)
    return (mapped if left else call)(*numbers, *wrote)


def _touched(leaves: Leaves) -> Scalar:
    """A number that depends on all leaves: the sum of one number of each.  (A flag that is False at
    first, as of `settled`, XLA would compute.)
    """
    corners = [
        jnp.real(leaf[(0,) * leaf.ndim]).astype(jnp.float32)
        for leaf in leaves
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.number)
    ]
    return sum(corners, start=jnp.float32(0))
