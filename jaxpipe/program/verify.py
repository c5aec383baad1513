"""Proof that a program computes its schedule: every value is followed through the slots, with
symbols for arrays.

It reads nothing but the program, knows nothing of the passes that made it, and is linear in the
number of actions (arrays of numpy, no loop over ticks), so that it can run before every
compilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import ProgramError
from .accesses import accesses, flow_faults
from .code_rules import Fault, ProgramRule, code_faults, running, ticks_of
from .ir import Program
from .segments import Permute, Segment, room_of

# An error's text stays readable: the rest is in `.faults`.
_MOST_SHOWN = 20


def verify(program: Program) -> Program:
    """Return the program if it is valid, or raise ProgramError with every broken rule in `.faults`.

    The rules are those of `ProgramRule`: segments cover the ticks; permutes have distinct ends and
    no cycle; each action of the table runs exactly once, on its device, in code that its tick has;
    every read finds the value that it needs; nothing alive is overwritten; slots exist; and no pool
    is larger than its peak.

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
    lines = [
        f"the lowering of {name} is wrong, which is a bug in jaxpipe ({len(found)} faults):",
        *map(str, found[:_MOST_SHOWN]),
    ]
    raise ProgramError("\n  ".join(lines), tuple(map(str, found)))


def faults(program: Program) -> tuple[Fault, ...]:
    """Every broken rule; what a broken structure means for values is looked at once the structure
    holds.
    """
    found = list(_segment_faults(program.segments, program.num_ticks)) or list(
        _lane_faults(program)
    )
    if found:
        return tuple(found)
    blocks = tuple(running(program))
    found = list(code_faults(program, blocks))
    if not found:
        for pool in program.pools:
            found += flow_faults(pool, accesses(program, pool.name, blocks))
    return tuple(found)


def _segment_faults(segments: Sequence[Segment], num_ticks: int) -> Iterator[Fault]:
    """Segments follow each other and cover all ticks; what a trip awaits, it issued, or the last
    tick of the trip before.
    """
    tick = 0
    for segment in segments:
        if segment.start != tick:
            yield Fault(
                ProgramRule.SEGMENTS, f"ticks {tick}..{segment.start} are in no segment, or in two"
            )
        tick = segment.stop
        for j, template in enumerate(segment.templates):
            for permute in template.permutes:
                yield from _permute_faults(permute)
                if permute.delay > room_of(segment.period, j):
                    yield Fault(
                        ProgramRule.EXCHANGE,
                        f"({permute}) of tick {j} is awaited too late for trips of "
                        f"{segment.period} ticks",
                    )
    if tick != num_ticks:
        yield Fault(ProgramRule.SEGMENTS, f"the segments end at tick {tick} of {num_ticks}")


def _permute_faults(permute: Permute) -> Iterator[Fault]:
    """Distinct sources, distinct targets, no cycle."""
    sources, targets = zip(*permute.pairs, strict=True) if permute.pairs else ((), ())
    if len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
        yield Fault(ProgramRule.PERMUTE, f"({permute}) has a source or a target twice")
        return
    following = dict(permute.pairs)
    for start in following:
        at: int | None = following[start]
        while at is not None and at != start:
            at = following.get(at)
        if at == start:
            yield Fault(ProgramRule.PERMUTE, f"({permute}) holds a cycle")
            return


def _lane_faults(program: Program) -> Iterator[Fault]:
    """No slot takes what arrives over a lane that the tick's template has not."""
    for segment in program.segments:
        for j, template in enumerate(segment.templates):
            ticks = ticks_of(segment, j)
            takes = [
                arrival.takes[ticks] for arrival in program.ticks.arrivals[len(template.permutes) :]
            ]
            for tick in ticks[np.any(takes, axis=(0, 2))] if takes else ():
                yield Fault(
                    ProgramRule.EXCHANGE,
                    "a slot takes what arrives over a lane that the tick has not",
                    int(tick),
                )
