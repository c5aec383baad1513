"""The SPMD executor: program + user functions -> one `shard_map` program, whose body prepares, runs
the segments and reduces.

A segment is emitted template by template, from the stages' code: blocks, permutes, and the writes
of arrivals to their slots.  A block that is timed calls the host at its begin and its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from ..arrays import Leaves, Params, PyTree, Scalar
from ..errors import PipelineError
from ..program.ir import NOBODY, POOL_OF, Program, Record, TickRecord
from ..program.segments import BlockUse, Loop, Payload, Point, Presence, Segment, Transit
from ..stage.model_code import Clock, Inputs, Job, ModelCode
from ..table.kinds import Kind
from .actions import StageAction, pair_block, share_block
from .block import Block, State, is_ordered, run_in_order, run_where, settled
from .pools import HostMoves, Packing, StageEntries, shared_buffers
from .step import DeviceStep, finish, prepare, with_replicas
from .xla import inside, mapped, split_entries, whole_entries

# The scopes of transfers in a profile and in a compiled program.  The second is of transfers that
# are awaited in a later tick.
EXCHANGE, WITH_SLACK = "exchange", "exchange_with_slack"


def _after(leaf: Any, state: State) -> Any:
    """The leaf, with a dependence on the end of earlier blocks of the tick (the token is False
    after every block).
    """
    return jnp.where(state["token"], jnp.zeros_like(leaf), leaf) if is_ordered(leaf) else leaf


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
    active: Presence
    tests_kind: bool = False  # stages of other kinds may run the block too
    # whether it is of a pair: None where the template has none
    paired: bool | None = None


def _scanned(body: Callable[[State, Any], State], state: State, lines: Any) -> State:
    """The state after the body has run for each of the lines, in one loop."""
    return lax.scan(lambda state, line: (body(state, line), None), state, lines)[0]


@dataclass(frozen=True)
class TickEmitter:
    """Turns segments into code."""

    step: DeviceStep

    @property
    def _program(self) -> Program:
        return self.step.code.program

    @cached_property
    def _packing(self) -> Packing:
        return Packing.of(self.step.buffers)

    def run_segment(self, segment: Segment, table: Any, state: State) -> State:
        """Emit one period of ticks; scan it over the segment's rows of the table where it repeats.

        `table` has a line of numbers for each tick: the record of this device.
        """
        lines = table[segment.start : segment.stop].reshape(
            segment.repeats, segment.period, table.shape[1]
        )
        flies = bool(segment.in_flight)

        def trip(state: State, lines: Any) -> State:
            if segment.loops:
                return self._loops(segment, segment.loops, 0, lines.astype(jnp.int32), state)
            records = [self._record(line) for line in lines.astype(jnp.int32)]
            rows, brought = {j - flies: record for j, record in enumerate(records)}, _Brought()
            for j in range(segment.period):
                state = self._tick(segment, j, rows, state, brought)
            assert not brought, "a transfer is awaited after its trip"
            return state

        if flies:
            # A trip also has the last tick of the previous trip.  The first trip has zeros there,
            # so that nothing arrives.
            nothing = jnp.zeros_like(lines[:1, -1:])
            lines = jnp.concatenate([jnp.concatenate([nothing, lines[:-1, -1:]]), lines], axis=1)
        state = trip(state, lines[0]) if len(lines) == 1 else _scanned(trip, state, lines)
        for transit in segment.in_flight:  # after the last trip
            last = self._record(lines[-1, -1].astype(jnp.int32))
            with jax.named_scope(EXCHANGE):
                brought, state = self._permuted(transit, state)
            state = self._arrive(transit, last, brought, state, keep=True)
        return state

    def _loops(
        self, segment: Segment, loops: Sequence[Loop], start: int, numbers: Any, state: State
    ) -> State:
        """Loops that begin at a tick of the trip, with the lines of their ticks."""
        begin = 0
        for loop in loops:
            own = numbers[begin : begin + loop.times * loop.ticks]

            def once(state: State, lines: Any, loop: Loop = loop, at: int = start + begin) -> State:
                if loop.body:
                    return self._loops(segment, loop.body, at, lines, state)
                return self._tick(segment, at, {at: self._record(lines[0])}, state, {})

            if loop.times == 1:
                state = once(state, own)
            else:
                state = _scanned(once, state, own.reshape(loop.times, loop.ticks, -1))
            begin += len(own)
        return state

    def _record(self, line: Any) -> TickRecord[Scalar]:
        """A line of numbers as a record."""
        column = iter(range(line.shape[0]))
        return self._program.ticks.map(lambda _: line[next(column)])

    def _tick(
        self, segment: Segment, j: int, rows: _Rows, state: State, brought: _Brought
    ) -> State:
        """One tick; `brought` records the transfers in flight."""
        row, begun = rows[j], -1
        moves = HostMoves.of(self._program, segment.sharing(j), self._packing, row)
        state = moves.begin(state)
        for place, runs in self._runs(segment, j):
            if place != begun:
                state = self._transfers(segment, Point(j, place), rows, state, brought)
                begun = place
            for run in runs:
                with jax.named_scope(self._scope(run)):
                    state = self._run(run, row, state)
            state = moves.store(state)
        state = moves.end(state)
        end = Point(j, len(segment.templates[j].blocks))
        return self._transfers(segment, end, rows, state, brought)

    def _runs(self, segment: Segment, j: int) -> Iterator[tuple[int, list[_Run]]]:
        """(block before which it is, what is run there): pairs, then the blocks of a template."""
        template, ticks = segment.templates[j], segment.sharing(j)
        # NOBODY, the last stage, has the kind NOBODY
        kind_of = np.array([*self.step.code.kind_of, NOBODY])
        kinds = [kind_of[self._stages(use)[ticks]] for use in template.blocks]
        fuses = self.step.job.clock is None and not self._program.schedule.encoded.recomputes
        ahead = self._program.pairs[ticks] & fuses
        assert template.paired or not ahead.any(), "a pair that its template does not know of"
        paired = set()
        for (f, forward), (b, backward) in product(enumerate(template.blocks), repeat=2):
            if forward.block.kind is not Kind.F or backward.block.kind not in self._program.joint:
                continue
            both = ahead & (kinds[f] != NOBODY) & (kinds[b] != NOBODY)
            counts = Counter(zip(kinds[f][both].tolist(), kinds[b][both].tolist(), strict=True))
            if not counts:
                continue
            paired |= {f, b}
            uses, pairs, several = (forward, backward), sorted(counts.items()), len(counts) > 1
            runs = [_Run(uses, kind, Presence.of(n, both.size), several, True) for kind, n in pairs]
            yield 0, runs
        for place, (use, of) in enumerate(zip(template.blocks, kinds, strict=True)):
            apart = False if place in paired else None
            own = (of != NOBODY) & ~ahead if place in paired else of != NOBODY
            those, active = np.unique(of[own]).tolist(), Presence.of(int(own.sum()), own.size)
            several = len(those) > 1
            yield place, [_Run((use,), (kind,), active, several, apart) for kind in those]

    def _transfers(
        self, segment: Segment, at: Point, rows: _Rows, state: State, brought: _Brought
    ) -> State:
        """Issue the permutes of a point of the trip, and write the arrivals that are due there."""
        for transit in segment.transits:
            point = transit.issued
            if self.step.blocking and point.block:
                # It would delay the blocks of its tick, so it follows them.
                point = Point(point.tick, len(segment.templates[point.tick].blocks))
            if point == at and (-1 in rows or not transit.from_before):
                with jax.named_scope(WITH_SLACK if transit.is_late else EXCHANGE):
                    brought[transit], state = self._permuted(transit, state)
        # A transfer with slack is written to its slot some ticks later, so that nothing before
        # depends on it.  Readers of the pool must end before that write (see `run_in_order`), or
        # XLA writes to a copy.
        for transit in [t for t in brought if t.written == at]:
            row = rows[-1 if transit.from_before else transit.tick]
            takes = self._program.ticks.arrivals[transit.lane].takes
            keep = transit.from_before or not bool(takes[segment.sharing(transit.tick)].all())
            state = self._arrive(transit, row, brought.pop(transit), state, keep=keep)
        return state

    def _permuted(self, transit: Transit, state: State) -> tuple[Leaves, State]:
        """The values that a permute brings to this device (zeros where nothing is sent to it), and
        the state after it.

        On CPU devices (`blocking`) a permute holds one of the process's few threads until all
        partners have arrived.  It therefore starts after earlier work of the tick, and later work
        starts after it.  Otherwise two permutes in flight could keep a block from starting for
        which a partner waits, and all devices would hang.  On GPUs the permute runs during the
        blocks.
        """
        permute, blocking = transit.permute, self.step.blocking
        sent = state["sent_x" if permute.payload is Payload.ACTIVATION else "sent_dx"]
        sent = [_after(leaf, state) for leaf in sent] if blocking else sent
        brought = [lax.ppermute(leaf, self.step.job.axis, permute.pairs) for leaf in sent]
        return brought, settled(brought, state) if blocking else state

    def _arrive(
        self, transit: Transit, row: TickRecord[Scalar], new: Leaves, state: State, *, keep: bool
    ) -> State:
        """Write a permute's arrivals to their slots after the end of earlier blocks.  With `keep`,
        some devices have no arrival and no free slot, and their slots keep their contents.
        """
        place = POOL_OF[transit.permute.payload]
        buffer, pool = self.step.buffers[place], state[place.value]
        with jax.named_scope(EXCHANGE):
            # Both depend on the token, because a pool of one slot needs no slot number.  Otherwise
            # XLA would write all arrivals of a trip in one fusion.
            at: Record[Scalar] = row.arrivals[transit.lane].map(
                lambda number: jnp.where(state["token"], 0, number)
            )
            slots = buffer.whole(pool, at.slot)
            if keep:
                pairs = zip([slot.load() for slot in slots], new, strict=True)
                new = [jnp.where(at.takes == 0, old, leaf) for old, leaf in pairs]
            pool = [slot.store(leaf) for slot, leaf in zip(slots, new, strict=True)]
            return state | {place.value: pool}

    def _run(self, run: _Run, row: TickRecord[Scalar], state: State) -> State:
        """Run a block, or a pair, under its predicate."""
        step, (use, *others), program = self.step, run.uses, self._program
        action, record = use.block.kind, row.of(use.block.kind)
        records = [row.of(each.block.kind) for each in run.uses]
        flags = [program.asks(row, each.block) for each in run.uses]
        if run.paired:
            flags.append(row.distinct)
        elif run.paired is not None:
            flags.append(jnp.logical_not(row.pairs(program.joint)))
        if run.tests_kind:
            kinds = jnp.array(step.code.kind_of)
            flags += [kinds[r.stage] == kind for r, kind in zip(records, run.kinds, strict=True)]
        if use.block.is_share:
            block, stage = share_block(step, action, record), lax.axis_index(step.job.axis)
        else:
            parts = zip(run.uses, run.kinds, records, strict=True)
            actions = [StageAction(step, *part) for part in parts]
            block = pair_block(*actions) if others else actions[0].block()
            stage = record.stage
        flag = reduce(jnp.logical_and, flags)
        active, how = Presence.SOMETIMES if run.tests_kind else run.active, run_in_order
        if others:
            return how(active, flag, block, state)
        if step.job.clock is not None:
            # It is always under a predicate: a loop's body begins when all of its inputs are
            # computed.
            active = Presence.SOMETIMES
            block = clocked(block, (jnp.int32(int(action)), stage, record.microbatch), step.job)
        elif use.block.is_collective and active is Presence.ALWAYS:
            how = run_where  # its exchange keeps it in order
        state = how(active, flag, block, state)
        waits = step.blocking and use.block.is_collective
        return settled(jax.tree.leaves(block.part(state)), state) if waits else state

    def _scope(self, run: _Run) -> str:
        """The name under which a profile shows a block: "F stage 3" where no other stage runs this
        code, else "F chunk 0".
        """
        if len(run.uses) == 2:
            return " with ".join(str(use.block) for use in run.uses)
        block = run.uses[0].block
        if block.is_share:
            return block.kind.name
        every = np.unique(self._stages(run.uses[0])).tolist()
        stages = [s for s in every if s != NOBODY and self.step.code.kind_of[s] == run.kinds[0]]
        where = f"stage {stages[0]}" if len(stages) == 1 else f"chunk {block.chunk}"
        return f"{block.kind.name} {where}"

    def _stages(self, use: BlockUse) -> NDArray[np.int64]:
        """`[tick, device]`: the stage of which a device runs a block, 0 of a share; NOBODY where
        it runs none.
        """
        ticks, block = self._program.ticks, use.block
        stages = 0 if block.is_share else ticks.of(block.kind).stage
        return np.where(self._program.asks(ticks, block), stages, NOBODY)


CANNOT_BE_TIMED = (
    "this step cannot be profiled on CPU devices: its functions permute over a mesh axis, so all "
    "devices run every block at once (ring attention permutes; the partitioner does for a roll, "
    "slice or concatenation along a dimension that is split); profile it without that axis, or "
    "on GPUs"
)


def look(
    job: Job, params: Params, batch: PyTree, rng: Any, state: PyTree
) -> tuple[Job, Inputs, ModelCode]:
    """Trace `prepare` alone: what one device starts from, as tracers."""
    found: tuple[Job, Inputs, ModelCode] = inside(
        job, partial(prepare, job), _in_specs(job), *(params, batch, rng, state)
    )
    return found


def _in_specs(job: Job) -> tuple[Any, ...]:
    """The splits of parameters, the batch, the key and the stages' own state."""
    rows, kept = PartitionSpec(job.data_axes or None), PartitionSpec(job.axis)
    own = jax.tree.map(lambda plan: plan.spec(job.axis, manual=True), job.plans)
    return own, rows, PartitionSpec(), kept


def body(
    job: Job,
    params: Params,
    batch: PyTree,
    rng: Any,
    kept: tuple[PyTree, ...],
    *,
    entries: Sequence[StageEntries] | None,
) -> tuple[dict[str, Any], dict[str, PyTree]]:
    """Run the step on each device; return ({"loss", "losses", "metrics", "state"}, gradients laid
    out like `params`).

    The arguments are those of `prepare`.  `entries` is None where no axis is left to the
    partitioner.

    Every permute of XLA:CPU waits for all devices of the program, also for those outside its pairs.
    Under predicates, some devices would wait in the permute of one block and some in that of
    another, until XLA ends the process.  Where blocks permute, all devices therefore run every
    block at once, and keep the result where its predicate holds (see `block`).

    With axes that are left to the partitioner, permutes are assumed: a block compiled alone does
    not show every one, because the partitioner decides from the whole program.  Timing needs
    predicates, and `jaxpipe.inspect.profile` refuses blocks that permute.
    """
    job, inputs, code = prepare(job, params, batch, rng, kept)
    assumed = bool(job.partition.auto_axes) and job.clock is None
    waits = job.target.on_cpus and lax.axis_size(job.axis) > 1
    everywhere = waits and (assumed or code.permutes)
    if everywhere and job.clock is not None:
        raise PipelineError(CANNOT_BE_TIMED)
    if entries is None:
        entries = tuple(whole_entries(job, kind) for kind in code.kinds)
    buffers = shared_buffers(code.kinds, entries)
    if job.observe is not None:
        job.observe(job, code, entries)
    with jax.named_scope("prepare"):
        chunks = with_replicas(job, inputs.owned)
        step = DeviceStep(job, inputs, code, buffers, everywhere, chunks).with_once()
        emitter, state = TickEmitter(step), step.empty_state()
        # One table takes one slice per trip.  Dozens of arrays would take dozens of slices.
        table = jnp.asarray(_narrow(np.stack(code.program.ticks.columns, axis=-1)))
        rows = lax.dynamic_index_in_dim(table, lax.axis_index(job.axis), 1, keepdims=False)
    with jax.named_scope("ticks"):
        for segment in code.program.segments:
            state = emitter.run_segment(segment, rows, state)
    with jax.named_scope("finish"):
        return finish(step, state, params)


def _narrow(table: Any) -> Any:
    """The table in the smallest signed integers that hold it.  It is a constant of the program, and
    grows with M.
    """
    narrower = (table.astype(dtype) for dtype in (np.int8, np.int16))
    return next((small for small in narrower if (small == table).all()), table)


@dataclass(frozen=True)
class TracedStep:
    """A training step that is traced and not compiled."""

    job: Job
    code: ModelCode
    entries: tuple[StageEntries, ...]  # the entries of pools, by kind of stage
    # the `jax.stages.Traced` step of (params, batch), and `rng` and `state` where they are given
    function: Any


class SpmdExecutor:
    """Runs a job's program on the devices of its mesh, all in one program (an `Executor`)."""

    compiles = True

    def run(
        self, job: Job, params: Params, batch: PyTree, rng: Any, state: tuple[PyTree, ...]
    ) -> tuple[dict[str, Any], dict[str, PyTree]]:
        """Do the job; it may be traced."""
        specs, entries = _in_specs(job), None
        if job.partition.auto_axes and job.training:
            # The model is traced once more for the entries.
            cut, inputs, code = look(job, params, batch, rng, state)
            entries = split_entries(cut, code, inputs.owned)
        run = mapped(
            partial(body, job, entries=entries),
            job.mesh,
            job.axes,
            in_specs=specs,
            out_specs=(job.result_specs, specs[0] if job.training else PartitionSpec()),
        )
        results: tuple[dict[str, Any], dict[str, PyTree]] = run(params, batch, rng, state)
        return results


def clocked(block: Block, what: tuple[Scalar, ...], job: Job) -> Block:
    """The same block, with a call of the host at its begin and one at its end.

    `what` is the kind, the number before it in the table, and the microbatch.
    """
    clock, data_axes = job.clock, job.data_axes
    assert clock is not None

    def run(state: State) -> State:
        shard = lax.axis_index(data_axes) if data_axes else jnp.int32(0)
        numbers = (shard, lax.axis_index(job.axis), *what)
        zero = _call_host(clock, jnp.int32(0), *numbers)
        # The block is in a loop whose predicate is the answer of the first call.  A block whose
        # pools have one slot each needs no number of its record, so XLA would run it before its
        # begin is noted.  The second call depends on the values that the block wrote.
        after = run_where(Presence.SOMETIMES, zero == 0, block, state)
        wrote = _touched(jax.tree.leaves(block.part(after)))
        _call_host(clock, jnp.int32(1), *numbers, wrote=[wrote])
        return after

    return Block(block.changes, run)


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
        array, rest = jnp.stack([partner, *operands[: len(numbers)]]), operands[len(numbers) :]
        answer: Scalar = io_callback(clock, jax.ShapeDtypeStruct((), jnp.int32), array, rest)
        return answer

    spec = PartitionSpec()
    mapped = jax.shard_map(call, in_specs=spec, out_specs=spec, axis_names={*left}, check_vma=False)
    answer: Scalar = (mapped if left else call)(*numbers, *wrote)
    return answer


def _touched(leaves: Leaves) -> Scalar:
    """A number that depends on all leaves: the sum of one number of each.  (A flag that is False at
    first, as of `settled`, XLA would compute.)
    """
    corners = [
        leaf[(0,) * leaf.ndim]
        for leaf in leaves
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.number)
    ]
    return sum((jnp.real(corner).astype(jnp.float32) for corner in corners), start=jnp.float32(0))
