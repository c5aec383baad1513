"""Pass: give every value that outlives its tick a buffer slot, by liveness, and write the program's
records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..program.ir import Program
from ..program.liveness import LastUse, Liveness
from ..program.pools import POOL_OF, UNDER_WAY, Pool, PoolName
from ..program.records import IntTable, Move, empty_ticks, pairs_of
from ..program.segments import Segment
from ..program.templates import Payload
from ..table.encoded import BoolArray, IntArray
from ..table.kinds import RECOMPUTE, RUNS_FORWARD, Kind
from .arrivals import Arrivals
from .assign_ticks import Ticks
from .intervals import peak, scan
from .moments import Clock, places
from .offload import Offload, away
from .requirements import chunks_of, consumers, keeps, recompute_of


class _Entry(NamedTuple):
    """Where a table of the records names the slots of some values: `table[tick[k], device of value
    which[k]]`.
    """

    table: IntTable
    which: IntArray
    tick: IntArray


class _Values(NamedTuple):
    """Values of one pool, each on a device and live over a closed interval of moments (see
    `Clock`).
    """

    device: IntArray
    begin: IntArray
    end: IntArray
    entries: tuple[_Entry, ...]


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
    without a message for it writes what it gets to a free slot; where none is free it keeps what
    the slot has (`Arrival.takes` is 0).  A value that waits on the host has a slot there, and two
    lives on the device: until it has left, and from when it is back.  None waits where that saves
    no memory.
    """
    needs = liveness or Liveness()
    program = _Writer(ticks, segments, needs).program()
    if offload is Offload.NOTHING or not _any_away(ticks):
        return program
    other = _Writer(ticks, segments, needs, offload).program()
    # Both kinds of residuals are under way together: where one of them stays on the device anyway,
    # that costs more than the other saves.
    saved = min(
        getattr(program.slots, name) - getattr(other.slots, name)
        for name in ("residual_input", "residual_weight")
    )
    return other if saved > UNDER_WAY else program


def _any_away(ticks: Ticks) -> bool:
    """Whether any forward is so far from its backward that what it keeps may wait on the host."""
    table = ticks.schedule.encoded
    forward = np.flatnonzero(table.of_kinds(RUNS_FORWARD))
    reader = table.backward_at[table.stage[forward], table.microbatch[forward]]
    return bool(away(ticks.when[forward], ticks.when[reader])[reader >= 0].any())


class _Writer:
    """Fills the records; arrays of actions are indexed by their numbers in the encoded schedule."""

    def __init__(
        self,
        ticks: Ticks,
        segments: Sequence[Segment],
        liveness: Liveness,
        offload: Offload = Offload.NOTHING,
    ) -> None:
        table = ticks.schedule.encoded
        self._schedule, self._actions = ticks.schedule, table
        self._segments = tuple(segments)
        self._liveness = liveness
        self._when = ticks.when
        self._user = consumers(table)
        self._local = (self._user >= 0) & (table.device[self._user] == table.device)
        self._clock = Clock.of(self._segments)
        # the moment of each action
        self._runs = self._clock.during(self._when, places(ticks, self._segments))
        self._arrivals = Arrivals(self._segments, ticks.num_ticks, table.num_devices, self._clock)
        together = bool(table.together.any())
        lanes = max(self._arrivals.widest, 1)
        moves = offload is Offload.RESIDUALS
        self._ticks = empty_ticks(
            ticks.num_ticks, table.num_devices, lanes, together=together, moves=moves
        )
        # by the table of their slots
        self._lanes = {id(arrival.slot): n for n, arrival in enumerate(self._ticks.arrivals)}

    def program(self) -> Program:
        """Write the actions, then for each pool the slots of its values."""
        self._write_actions()
        pools = tuple(
            Pool(name, self._allocate(name, values)) for name, values in self._values().items()
        )
        return Program(self._schedule, self._segments, self._ticks, pools, self._liveness)

    def _write_actions(self) -> None:
        """What runs where; all but the slots."""
        table = self._actions
        forward, chain = table.of_kinds(RUNS_FORWARD), ~table.of_kinds(RECOMPUTE) & ~table.shares
        f, b = self._ticks.forward, self._ticks.backward
        chunk = chunks_of(self._schedule)
        common = (
            (f.kind, b.kind, table.kind),
            (f.chunk, b.chunk, chunk),
            (f.stage, b.stage, table.stage),
        )
        more = (
            (f.microbatch, b.microbatch, table.microbatch),
            (f.is_local, b.is_local, self._local),
        )
        for of_forward, of_backward, entries in (
            *common,
            *more,
            (f.is_first, b.is_first, chain & (table.stage == 0)),
        ):
            for target, mine in ((of_forward, forward), (of_backward, ~forward & ~table.together)):
                target[self._when[mine], table.device[mine]] = entries[mine]
        place: tuple[IntArray, IntArray] = (self._when[forward], table.device[forward])
        f.is_last[place] = (chain & (table.stage == table.num_stages - 1))[forward]
        f.keeps[place] = keeps(table)[forward] & (not table.forward_only)
        for share in self._ticks.shares:
            shares = np.flatnonzero(table.together)
            place = (self._when[shares], table.device[shares])
            share.kind[place], share.microbatch[place] = (
                table.kind[shares],
                table.microbatch[shares],
            )
            homes = np.array([table.meetings[i].home for i in shares.tolist()], np.int64)
            share.is_source[place] = table.device[homes] == table.device[shares]

    def _values(self) -> dict[PoolName, _Values]:
        """What each pool must hold."""
        table, f, b = self._actions, self._ticks.forward, self._ticks.backward
        forward = np.flatnonzero(table.kind == Kind.F)
        by_input, _ = self._last_uses(forward)
        kept = forward[by_input >= 0]
        by_input, by_weight = self._last_uses(kept)
        again = recompute_of(table, kept)
        maker = np.where(again >= 0, again, kept)  # of the residuals
        first = table.stage[kept] == 0
        dgrad = np.flatnonzero(table.kind == Kind.I)
        wgrad = table.at[Kind.W][table.stage[dgrad], table.microbatch[dgrad]]
        ends = (
            {PoolName.LAST: self._outputs(forward[table.stage[forward] == table.num_stages - 1])}
            if table.spreads_last
            else {}
        )
        if table.defers_last:
            ends[PoolName.SHARE] = self._share_stashes(np.flatnonzero(table.kind == Kind.H))
        begins = self._residuals(kept[first], f.first, b.first, by_input[first], by_input[first])
        held = {
            PoolName.RESIDUAL_INPUT: self._residuals(
                maker, f.residual_input, b.residual_input, by_input, by_input
            ),
            PoolName.RESIDUAL_WEIGHT: self._residuals(
                maker, f.residual_weight, b.residual_weight, by_input, by_weight
            ),
        }
        for move in self._ticks.moves:
            gone = np.flatnonzero(away(self._when[maker], self._when[by_input]))
            leaves, comes = self._when[maker[gone]] + 1, self._when[by_input[gone]] - 1
            sides = ((move.from_input, move.to_input), (move.from_weight, move.to_weight))
            pairs = zip(held.items(), sides, strict=True)
            held = {
                name: self._in_two(values, gone, leaves, comes, *tables)
                for (name, values), tables in pairs
            }
            ends[PoolName.HOST] = self._waiting(move, maker[gone], leaves, comes)
        return {
            **ends,
            PoolName.X: self._inputs(forward),
            **held,
            PoolName.COTANGENT: self._cotangents(kept),
            PoolName.STASH: self._for_backward(
                dgrad,
                self._runs[dgrad],
                self._all(b.stash, self._when[dgrad]),
                b.stash,
                wgrad,
                wgrad,
            ),
            PoolName.FIRST: self._input_gradients(by_input[first])
            if table.spreads_first
            else begins,
        }

    def _last_uses(self, forward: IntArray) -> tuple[IntArray, IntArray]:
        """Of each forward, its I (or B) and its W (or B); -1 in a forward-only table."""
        table = self._actions
        at = (table.stage[forward], table.microbatch[forward])
        both = table.at[Kind.B][at]
        return table.backward_at[at], np.where(both >= 0, both, table.at[Kind.W][at])

    def _residuals(
        self, holder: IntArray, written: IntTable, read: IntTable, early: IntArray, late: IntArray
    ) -> _Values:
        """What the forwards `holder` keep for their backwards."""
        tick = self._when[holder]
        return self._for_backward(
            holder, self._runs[holder], self._all(written, tick), read, early, late
        )

    def _in_two(
        self,
        values: _Values,
        gone: IntArray,
        leaves: IntArray,
        comes: IntArray,
        out: IntTable,
        home: IntTable,
    ) -> _Values:
        """Residuals on the device, where those that are `gone` have two lives: until they leave,
        and from when they are back.
        """
        written, *reads = values.entries
        back = np.arange(len(values.device))  # of each value, the life in which it is read
        back[gone] = len(back) + np.arange(len(gone))
        begin = np.concatenate([values.begin, self._clock.after(comes)])
        end = values.end.copy()
        end[gone] = self._clock.after(leaves - 1)
        entries = [written, *(read._replace(which=back[read.which]) for read in reads)]
        entries += [_Entry(out, gone, leaves), _Entry(home, back[gone], comes)]
        device = np.concatenate([values.device, values.device[gone]])
        return _Values(device, begin, np.concatenate([end, values.end[gone]]), tuple(entries))

    def _waiting(
        self, move: Move[IntTable], makers: IntArray, leaves: IntArray, comes: IntArray
    ) -> _Values:
        """What is on the host of these forwards, and which value it is."""
        table, every = self._actions, np.arange(len(makers))
        device = table.device[makers]
        for target, tick in ((move.stores, leaves), (move.fetches, comes)):
            target[tick, device] = (
                table.stage[makers] * table.num_microbatches + table.microbatch[makers]
            )
        entries = (_Entry(move.to_host, every, leaves), _Entry(move.from_host, every, comes))
        return _Values(device, self._clock.before(leaves), self._clock.before(comes), entries)

    def _for_backward(
        self,
        holder: IntArray,
        begin: IntArray,
        written: Sequence[_Entry],
        read: IntTable,
        early: IntArray,
        late: IntArray,
    ) -> _Values:
        """Values on the devices of `holder` that the backward actions `early` and `late` read."""
        reads = [
            entry for readers in (early, late) for entry in self._all(read, self._when[readers])
        ]
        return _Values(
            self._actions.device[holder], begin, self._read_until(late), (*written, *reads)
        )

    def _read_until(self, readers: IntArray) -> IntArray:
        """When a backward action has read: of a pair no sooner than the forward has written, since
        both run as one.
        """
        paired, tick = pairs_of(self._ticks.forward, self._ticks.backward), self._when[readers]
        found: IntArray = np.where(
            paired[tick, self._actions.device[readers]],
            self._clock.blocks_done(tick),
            self._runs[readers],
        )
        return found

    @staticmethod
    def _all(table: IntTable, tick: IntArray) -> list[_Entry]:
        """An entry for every value."""
        return [_Entry(table, np.arange(len(tick)), tick)]

    @staticmethod
    def _some(table: IntTable, where: BoolArray, tick: IntArray) -> list[_Entry]:
        """An entry for the values that are marked."""
        which = np.flatnonzero(where)
        return [_Entry(table, which, tick[which])]

    def _inputs(self, forward: IntArray) -> _Values:
        """Stage inputs: from `first`, from the chunk before on this device, or over a transfer."""
        table, when, f, b = self._actions, self._when, self._ticks.forward, self._ticks.backward
        source, tick = table.producer[forward], when[forward]
        now = self._runs[forward]
        made = np.where(source < 0, self._together(Kind.E, forward), -1)
        arrivals, begin = self._arrival(source, Payload.ACTIVATION, table.device[forward])
        local = (source >= 0) & self._local[source]
        begin = np.where(
            made >= 0,
            self._runs[made],
            np.where(source < 0, now, np.where(local, self._runs[source], begin)),
        )
        by_input, by_weight = self._last_uses(forward)
        late = by_input if self._liveness.x is LastUse.INPUT_GRAD else by_weight
        kept = (late >= 0) & (self._liveness.x is not LastUse.FORWARD)
        again = recompute_of(table, forward)
        recomputed = again >= 0
        end = np.where(recomputed, self._runs[again], now)
        end = np.where(kept, self._read_until(late), end)
        entries = [
            *self._all(f.x, tick),
            *self._some(f.out, local, when[source]),
            *arrivals,
            *self._some(f.x, recomputed, when[again]),
        ]
        entries += [
            entry
            for share in self._ticks.shares
            for entry in self._some(share.out, made >= 0, when[made])
        ]
        entries += [*self._some(b.x, kept, when[by_input]), *self._some(b.x, kept, when[late])]
        return _Values(table.device[forward], begin, end, tuple(entries))

    def _outputs(self, forward: IntArray) -> _Values:
        """Outputs of the last stage, from its forwards to the shares that read them."""
        tick = self._when[forward]
        (share,) = self._ticks.shares
        together = self._together(Kind.L, forward)
        entries = (
            *self._all(self._ticks.forward.out, tick),
            *self._all(share.y, self._when[together]),
        )
        return _Values(
            self._actions.device[forward], self._runs[forward], self._runs[together], entries
        )

    def _share_stashes(self, late: IntArray) -> _Values:
        """What L leaves on each device, to the H that read it."""
        table, (share,) = self._actions, self._ticks.shares
        made = table.at[Kind.L, table.stage[late], table.microbatch[late]]
        entries = (
            *self._all(share.stash, self._when[made]),
            *self._all(self._ticks.backward.stash, self._when[late]),
        )
        return _Values(table.device[late], self._runs[made], self._runs[late], entries)

    def _input_gradients(self, backward: IntArray) -> _Values:
        """Gradients of the first stage's input, from its backwards to the G that read them."""
        tick, together = self._when[backward], self._together(Kind.G, backward)
        (share,) = self._ticks.shares
        entries = (
            *self._all(self._ticks.backward.first, tick),
            *self._all(share.y, self._when[together]),
        )
        return _Values(
            self._actions.device[backward], self._runs[backward], self._runs[together], entries
        )

    def _together(self, kind: Kind, of: IntArray) -> IntArray:
        """The action in which all devices do this for the microbatches of these actions; -1 where
        the table has none of it.
        """
        found: IntArray = self._actions.at[kind, 0, self._actions.microbatch[of]]
        return found

    def _cotangents(self, kept: IntArray) -> _Values:
        """Gradients of stage outputs: from `last` after its forward, from the next chunk on this
        device, or over a transfer.
        """
        table, when, f, b = self._actions, self._when, self._ticks.forward, self._ticks.backward
        by_input, by_weight = self._last_uses(kept)
        late = by_input if self._liveness.cotangent is LastUse.INPUT_GRAD else by_weight
        source = table.producer[by_input]
        arrivals, begin = self._arrival(source, Payload.COTANGENT, table.device[kept])
        at_last, local = source < 0, (source >= 0) & self._local[source]
        begin = np.where(local, self._runs[source], begin)
        table_of, made = (
            (self._ticks.shares[0].out, self._together(Kind.L, kept))
            if table.spreads_last
            else (f.out, kept)
        )
        begin = np.where(at_last, self._runs[made], begin)
        written = [
            *self._some(table_of, at_last, when[made]),
            *self._some(b.out, local, when[source]),
            *arrivals,
        ]
        return self._for_backward(kept, begin, written, b.cotangent, by_input, late)

    def _arrival(
        self, source: IntArray, payload: Payload, target: IntArray
    ) -> tuple[list[_Entry], IntArray]:
        """The entries of what permutes carry, and when they write; anything where nothing is
        carried.
        """
        crosses = np.flatnonzero((source >= 0) & ~self._local[source])
        begin = np.zeros_like(source)
        sent = source[crosses]
        lane, begin[crosses] = self._arrivals.find(
            self._when[sent], payload, self._actions.device[sent], target[crosses]
        )
        tables = [arrival.slot for arrival in self._ticks.arrivals]
        return [
            _Entry(tables[n], crosses[lane == n], self._when[sent[lane == n]])
            for n in np.unique(lane).tolist()
        ], begin

    def _allocate(self, pool: PoolName, values: _Values) -> int:
        """Linear scan on every device; returns the pool's size."""
        devices = range(self._actions.num_devices)
        mine = [np.flatnonzero(values.device == d) for d in devices]
        size = max(1, *(peak(values.begin[chosen], values.end[chosen]) for chosen in mine))
        strays = self._strays(pool, values)
        first = np.searchsorted(strays[0], np.arange(len(mine) + 1)).tolist()
        slots = np.zeros(len(values.device), np.int64)
        for device, chosen in zip(devices, mine, strict=True):
            tick, lane, arrives = (
                column[first[device] : first[device + 1]] for column in strays[1:]
            )
            moments, back = np.unique(arrives, return_inverse=True)
            slots[chosen], free = scan(values.begin[chosen], values.end[chosen], moments, size)
            for n in np.unique(lane).tolist():
                at, spare = tick[lane == n], free[back][lane == n]
                self._ticks.arrivals[n].slot[at, device] = np.maximum(spare, 0)
                self._ticks.arrivals[n].takes[at, device] = spare >= 0
        for entry in values.entries:
            place = (entry.tick, values.device[entry.which])
            entry.table[place] = slots[entry.which]
            if id(entry.table) in self._lanes:
                self._ticks.arrivals[self._lanes[id(entry.table)]].takes[place] = 1
        return size

    def _strays(
        self, pool: PoolName, values: _Values
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """(device, tick, lane, moment of arrival) of what permutes bring to devices that have no
        message in them, device by device.
        """
        payloads = [payload for payload, name in POOL_OF.items() if name is pool]
        strays = np.repeat(
            np.isin(self._arrivals.payload, payloads)[None], self._actions.num_devices, axis=0
        )
        for entry in values.entries:
            if id(entry.table) in self._lanes:
                strays[values.device[entry.which], entry.tick, self._lanes[id(entry.table)]] = False
        device, tick, lane = np.nonzero(strays)
        return device, tick, lane, self._arrivals.written[tick, lane]
