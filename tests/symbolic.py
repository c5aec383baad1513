"""Runs a lowered program with symbols for arrays: what each slot holds is known, so every read can be checked.

An interpreter of its own, written from the meaning of `Program`'s columns and positions, not from the passes that fill them: it
proves a program right without compiling anything.  Devices that a permute does not reach get zeros, and write them, as in JAX.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxpipe.program.ir import NOBODY, BlockUse, Column, Payload, Permute, Presence, Program, TickTemplate
from jaxpipe.program.liveness import LastUse, Liveness
from jaxpipe.table.action import Action, Kind

C = Column


class Wrong(AssertionError):
    """The program reads, writes or sends something that it must not."""


class Value(NamedTuple):
    """The array `name` of a stage and microbatch: x (input), ri, rw (residuals), dy (gradient of the output), st (stash), fr."""

    name: str
    stage: int
    microbatch: int


ZEROS = Value("zeros", -1, -1)
SIZES = {"x": "x", "ri": "residual_input", "rw": "residual_weight", "c": "cotangent", "st": "stash", "fr": "first"}


@dataclass
class _Held:
    """A value in a slot, when it was written and when it was read last (moments: see `_Run._trip`)."""

    value: Value
    written: int
    read: int = -1


@dataclass
class _Device:
    """The pools of one device, what was ever in them, and what it sends."""

    pools: dict[str, list[_Held]]
    history: dict[str, list[_Held]]
    out: dict[Payload, Value] = field(default_factory=lambda: dict.fromkeys(Payload, ZEROS))


def run_symbolically(program: Program, liveness: Liveness | None = None) -> dict[str, int]:
    """Run all ticks; `Wrong` says which read finds the wrong value, or what was never done.

    Returns, by the names in `Slots`, the most values of each pool that are between their writing and their last reading on one device.
    """
    run = _Run(program, liveness or Liveness())
    run.run()
    return {name: max(_most_at_once(device.history[pool]) for device in run.devices) for pool, name in SIZES.items()}


class _Run:
    def __init__(self, program: Program, liveness: Liveness) -> None:
        self.program, self.liveness = program, liveness
        self.stages_of = program.schedule.placement.stages_of
        self.last_stage = program.schedule.num_stages - 1
        sizes = {pool: getattr(program.slots, name) for pool, name in SIZES.items()}
        self.devices = [
            _Device({pool: [_Held(ZEROS, -1) for _ in range(size)] for pool, size in sizes.items()}, {pool: [] for pool in sizes})
            for _ in program.schedule.rows
        ]
        self.moment = 0
        self.done: Counter[object] = Counter()
        self.training = not program.schedule.forward_only

    def run(self) -> None:
        tick = 0
        for segment in self.program.segments:
            if segment.start != tick:
                raise Wrong(f"ticks {tick}..{segment.start} are in no segment")
            for _ in range(segment.repeats):
                self._trip(segment.templates, tick)
                tick += segment.period
        if tick != self.program.num_ticks:
            raise Wrong(f"the segments end at tick {tick} of {self.program.num_ticks}")
        self._check_done()

    def _trip(self, positions: tuple[TickTemplate, ...], start: int) -> None:
        awaited: dict[int, list[tuple[Permute, int, int, list[Value]]]] = {}
        for j, position in enumerate(positions):
            # Blocks of one direction, of the other, arrivals: what is read in one of these is overwritten in the next at the soonest.
            self.moment = 3 * (start + j)
            for before, use in zip((None, *position.blocks), position.blocks, strict=False):
                if before is not None and (before.block.kind is Kind.F) is not (use.block.kind is Kind.F):
                    self.moment += 1
                for device in range(len(self.devices)):
                    self._block(use, device, start + j)
            for lane, permute in self._exchange(position, start + j):
                _check_permute(permute)
                arrived = [ZEROS] * len(self.devices)
                for source, target in permute.pairs:
                    arrived[target] = self.devices[source].out[permute.payload]
                awaited.setdefault(j + permute.delay, []).append((permute, lane, start + j, arrived))
            # A program may send only what the tick has made: what is sent again later counts as nothing.
            for device_state in self.devices:
                device_state.out = dict.fromkeys(Payload, ZEROS)
            self.moment = 3 * (start + j) + 2
            for permute, lane, tick, arrived in awaited.pop(j, []):
                pool = "x" if permute.payload is Payload.ACTIVATION else "c"
                for device, value in enumerate(arrived):
                    self._arrive(device, tick, pool, C.ARRIVAL + lane, value)
        if awaited:
            raise Wrong(f"a transfer of the trip from tick {start} is awaited after the trip")

    def _exchange(self, position: TickTemplate, tick: int) -> list[tuple[int, Permute]]:
        """The permutes that the table names, each with its lane: its place among those of its payload, activations first."""
        (number,) = set(self.program.table[tick, :, C.EXCHANGE].tolist())
        exchange = position.exchanges[number]
        if len(position.exchanges) > 1 and any(p.delay for p in exchange):
            raise Wrong(f"tick {tick}: what is under a predicate must be over when that is")
        most = max(sum(p.payload is Payload.ACTIVATION for p in other) for other in position.exchanges)
        found, nexts = [], {Payload.ACTIVATION: 0, Payload.COTANGENT: most}
        for permute in exchange:
            found.append((nexts[permute.payload], permute))
            nexts[permute.payload] += 1
        return found

    def _arrive(self, device: int, tick: int, pool: str, column: int, value: Value) -> None:
        """Write what arrives; where the table has ~slot, the slot stays as it is."""
        slot = int(self.program.table[tick, device, column])
        if slot >= 0:
            self._write(device, tick, pool, column, value)
        elif ~slot >= len(self.devices[device].pools[pool]):
            raise Wrong(f"tick {tick}, device {device}: keeps {pool}[{~slot}], which is not there")

    def _block(self, use: BlockUse, device: int, tick: int) -> None:
        kind, chunk = use.block
        row = self.program.table[tick, device]
        runs = row[C.F_CHUNK] == chunk if kind is Kind.F else row[C.B_CHUNK] == chunk and row[C.B_KIND] == kind
        if use.active is Presence.ALWAYS and not runs:
            raise Wrong(f"tick {tick}: device {device} runs {use} unasked")
        if use.active is Presence.NEVER or not runs:
            return
        stage = self.stages_of[device][chunk]
        where = f"tick {tick}, device {device}, {stage}{kind.name}"
        (self._forward if kind is Kind.F else self._backward)(use, device, tick, stage, where)

    def _forward(self, use: BlockUse, device: int, tick: int, stage: int, where: str) -> None:
        row = self.program.table[tick, device]
        microbatch = int(row[C.F_MICROBATCH])
        _same(where, "stage number", int(row[C.F_STAGE]), stage)
        if _happens(use.first, row[C.F_FIRST]):
            _same(where, "`first`'s stage", stage, 0)
            self._write(device, tick, "x", C.F_X, Value("x", 0, microbatch))
            self._write(device, tick, "fr", C.F_FR, Value("fr", 0, microbatch))
        self._read(device, tick, "x", C.F_X, Value("x", stage, microbatch), where)
        if self.training:
            self._write(device, tick, "ri", C.F_RI, Value("ri", stage, microbatch))
            self._write(device, tick, "rw", C.F_RW, Value("rw", stage, microbatch))
        y = Value("x", stage + 1, microbatch)
        if Presence.ALWAYS not in (use.last, use.local):
            self.devices[device].out[Payload.ACTIVATION] = y
        if _happens(use.local, row[C.F_LOCAL]):
            self._write(device, tick, "x", C.F_OUT, y)
        if _happens(use.last, row[C.F_LAST]):
            _same(where, "`last`'s stage", stage, self.last_stage)
            self.done["loss", microbatch] += 1
            if self.training:
                self._write(device, tick, "c", C.F_OUT, Value("dy", stage, microbatch))
        self.done[Action(stage, Kind.F, microbatch)] += 1

    def _backward(self, use: BlockUse, device: int, tick: int, stage: int, where: str) -> None:
        row = self.program.table[tick, device]
        kind, microbatch = use.block.kind, int(row[C.B_MICROBATCH])
        _same(where, "stage number", int(row[C.B_STAGE]), stage)
        # What the stage's own code reads: residuals of I, residuals of W, input, cotangent, stash.
        late = kind is Kind.W
        reads = {"rw": C.B_RW} if late else {"ri": C.B_RI, "rw": C.B_RW, "c": C.B_DY}
        if self.liveness.x is LastUse.WEIGHT_GRAD or (self.liveness.x is LastUse.INPUT_GRAD and not late):
            reads["x"] = C.B_X
        if self.liveness.cotangent is LastUse.WEIGHT_GRAD:
            reads["c"] = C.B_DY
        if late:
            reads["st"] = C.B_STASH
        for pool, column in reads.items():
            self._read(device, tick, pool, column, Value("dy" if pool == "c" else pool, stage, microbatch), where)
        if kind is Kind.I:
            self._write(device, tick, "st", C.B_STASH, Value("st", stage, microbatch))
        if kind is not Kind.W:
            dx = Value("dy", stage - 1, microbatch)
            if Presence.ALWAYS not in (use.first, use.local):
                self.devices[device].out[Payload.COTANGENT] = dx
            if _happens(use.local, row[C.B_LOCAL]):
                self._write(device, tick, "c", C.B_OUT, dx)
            if _happens(use.first, row[C.B_FIRST]):
                _same(where, "`first`'s stage", stage, 0)
                self._read(device, tick, "fr", C.B_FR, Value("fr", 0, microbatch), where)
                self.done["first", microbatch] += 1
        self.done[Action(stage, kind, microbatch)] += 1

    def _read(self, device: int, tick: int, pool: str, column: int, expected: Value, where: str) -> None:
        slot = self.program.table[tick, device, column]
        held = self.devices[device].pools[pool][slot]
        _same(where, f"{pool}[{slot}]", held.value, expected)
        held.read = self.moment

    def _write(self, device: int, tick: int, pool: str, column: int, value: Value) -> None:
        slot = self.program.table[tick, device, column]
        slots = self.devices[device].pools[pool]
        if not 0 <= slot < len(slots):
            raise Wrong(f"tick {tick}, device {device}: writes {pool}[{slot}] of {len(slots)}")
        slots[slot] = _Held(value, self.moment)
        self.devices[device].history[pool].append(slots[slot])

    def _check_done(self) -> None:
        schedule = self.program.schedule
        wanted: Counter[object] = Counter(action for _, _, action in schedule.actions())
        for microbatch in range(schedule.num_microbatches):
            wanted["loss", microbatch] = 1
            if self.training:
                wanted["first", microbatch] = 1
        if wanted != self.done:
            raise Wrong(f"never done: {dict(wanted - self.done)}; done too often: {dict(self.done - wanted)}")


def _most_at_once(history: list[_Held]) -> int:
    """The most values that share a moment, their writing and last reading included; what nobody reads is not counted."""
    read = [held for held in history if held.read >= 0]
    alive = highest = 0
    for _, _, step in sorted([(held.written, 0, 1) for held in read] + [(held.read, 1, -1) for held in read]):
        alive += step
        highest = max(highest, alive)
    return highest


def _happens(presence: Presence, flag: int) -> bool:
    """Whether a part of a block runs: a part without a predicate does so whatever the table says."""
    return presence is Presence.ALWAYS or (presence is Presence.SOMETIMES and flag != 0)


def _same(where: str, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Wrong(f"{where}: {what} is {found}, not {expected}")


def _check_permute(permute: Permute) -> None:
    sources, targets = [s for s, _ in permute.pairs], [t for _, t in permute.pairs]
    if len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
        raise Wrong(f"{permute}: a source or a target twice")
    following = dict(permute.pairs)
    for start in following:
        at = following.get(start, NOBODY)
        while at not in (start, NOBODY):
            at = following.get(at, NOBODY)
        if at == start:
            raise Wrong(f"{permute} holds a cycle")
