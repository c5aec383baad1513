"""Proof that a program computes its schedule: every value is followed through the slots, with symbols for arrays.

It reads nothing but the program, knows nothing of the passes that made it, and is linear in the number of actions (arrays of numpy,
no loop over ticks), so that it can run before every compilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import ProgramError
from .accesses import accesses
from .code_rules import code_faults, running, ticks_of
from .faults import Fault, Rule
from .flow import flow_faults
from .ir import Program
from .segments import Segment, room_of
from .templates import Permute

# An error's text stays readable: the rest is in `.faults`.
_MOST_SHOWN = 20


def verify(program: Program) -> Program:
    """Return the program if it is valid, or raise ProgramError with every broken rule in `.faults`.

    The rules are those of `Rule`: segments cover the ticks; permutes have distinct ends and no cycle; all devices choose the same
    exchange; each action of the table runs exactly once, on its device, in code that its tick has; every read finds the value that it
    needs; nothing alive is overwritten; slots exist; and no pool is larger than its peak.

    Raises:
        ProgramError: a rule is broken, which is a fault of the lowering and not of the caller.

    >>> import jaxpipe as jp
    >>> from jaxpipe.lowering.plan import plan_of
    >>> program = plan_of(jp.schedules.build("zb_h1", devices=4, microbatches=8)).program()
    >>> verify(program) is program
    True
    """
    found = faults(program)
    if not found:
        return program
    name = program.schedule.name or "this schedule"
    lines = [f"the lowering of {name} is wrong, which is a bug in jaxpipe ({len(found)} faults):", *map(str, found[:_MOST_SHOWN])]
    raise ProgramError("\n  ".join(lines), tuple(map(str, found)))


def faults(program: Program) -> tuple[Fault, ...]:
    """Every broken rule; what a broken structure means for values is looked at once the structure holds."""
    found = list(_segment_faults(program.segments, program.num_ticks)) or list(_exchange_faults(program))
    if found:
        return tuple(found)
    blocks = running(program)
    found = list(code_faults(program, blocks))
    if not found:
        for pool in program.pools:
            found += flow_faults(pool, accesses(program, pool.name, blocks))
    return tuple(found)


def _segment_faults(segments: Sequence[Segment], num_ticks: int) -> Iterator[Fault]:
    """Segments follow each other and cover all ticks; what a trip awaits, it issued, or the last tick of the trip before."""
    tick = 0
    for segment in segments:
        if segment.start != tick:
            yield Fault(Rule.SEGMENTS, f"ticks {tick}..{segment.start} are in no segment, or in two")
        tick = segment.stop
        for j, template in enumerate(segment.templates):
            for permute in template.permutes:
                yield from _permute_faults(permute)
                if permute.delay > room_of(segment.period, j):
                    yield Fault(Rule.EXCHANGE, f"({permute}) of tick {j} is awaited too late for trips of {segment.period} ticks")
                if permute.delay and len(template.exchanges) > 1:
                    yield Fault(Rule.EXCHANGE, f"({permute}) is under a predicate, and must be over when that is")
    if tick != num_ticks:
        yield Fault(Rule.SEGMENTS, f"the segments end at tick {tick} of {num_ticks}")


def _permute_faults(permute: Permute) -> Iterator[Fault]:
    """Distinct sources, distinct targets, no cycle."""
    sources, targets = zip(*permute.pairs, strict=True) if permute.pairs else ((), ())
    if len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
        yield Fault(Rule.PERMUTE, f"({permute}) has a source or a target twice")
        return
    following = dict(permute.pairs)
    for start in following:
        at: int | None = following[start]
        while at is not None and at != start:
            at = following.get(at)
        if at == start:
            yield Fault(Rule.PERMUTE, f"({permute}) holds a cycle")
            return


def _lane_faults(program: Program) -> Iterator[Fault]:
    """No slot takes what arrives over a lane that the tick's exchange has not."""
    for segment in program.segments:
        for j, template in enumerate(segment.templates):
            ticks = ticks_of(segment, j)
            for number in range(len(template.exchanges)):
                mine = ticks[program.ticks.exchange[ticks, 0] == number]
                unused = sorted(set(range(len(program.ticks.arrivals))) - set(template.lanes_of(number)))
                for tick in sorted(
                    {int(mine[k]) for lane in unused for k in program.ticks.arrivals[lane].takes[mine].any(axis=1).nonzero()[0]}
                ):
                    yield Fault(Rule.EXCHANGE, "a slot takes what arrives over a lane that the exchange has not", tick)


def _exchange_faults(program: Program) -> Iterator[Fault]:
    """All devices make the same exchange, which their template has, and which the segment says."""
    choice = program.ticks.exchange
    for tick in (choice != choice[:, :1]).any(axis=1).nonzero()[0].tolist():
        yield Fault(Rule.EXCHANGE, f"devices choose different exchanges: {choice[tick].tolist()}", tick)
    yield from _lane_faults(program)
    for segment in program.segments:
        said = segment.chosen.ravel()
        made = choice[segment.start : segment.stop, 0]
        for tick in (said[: len(made)] != made).nonzero()[0].tolist():
            yield Fault(Rule.EXCHANGE, f"devices make exchange {made[tick]}, the segment says {said[tick]}", segment.start + tick)
