"""The promise of every lowering pass: ticks keep the table, segments have all that ticks need,
slots hold every value.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxpipe.lowering.slots import assign_slots
from jaxpipe.lowering.ticks import (
    NO_TRANSFER,
    Ticks,
    assign_ticks,
    joined_ticks,
    modulo_ticks,
)
from jaxpipe.program.ir import Program
from jaxpipe.program.segments import Block, Segment
from jaxpipe.program.verify import faults as program_faults
from jaxpipe.table.encoded import Transfers
from jaxpipe.table.kinds import Kind
from jaxpipe.table.order import waiting
from jaxpipe.table.schedule import Schedule
from tests.contract import Contract
from tests.passes import cut

Faults = tuple[str, ...]


class Cut(NamedTuple):
    """Ticks with the segments that they were cut into."""

    ticks: Ticks
    segments: tuple[Segment, ...]


def ticks_faults(schedule: Schedule, ticks: Ticks) -> Faults:
    """Each device keeps its row's order, a cell a tick (or F and a backward, or W and F); what a
    cell needs is there a tick before.
    """
    table, when = schedule.encoded, ticks.when
    found = [] if ticks.schedule is schedule else ["the ticks are of another table"]
    if len(when) != table.num_actions or (len(when) and when.min() < 0):
        return (*found, "not every action has a tick")
    for i, j in pairwise(range(table.num_actions)):
        if table.device[i] != table.device[j]:
            continue
        one, other = Block(Kind(table.kind[i]), 0), Block(Kind(table.kind[j]), 0)
        paired = one.runs_forward and not other.runs_forward and not other.is_collective
        joined = one.kind is Kind.W and other.kind is Kind.F
        if when[i] > when[j] or (when[i] == when[j] and not (paired or joined)):
            found.append(
                f"{table.text(i)} and {table.text(j)} of one row run in ticks {when[i]} and "
                f"{when[j]}"
            )
    for meeting in dict.fromkeys(table.collectives.values()):
        if len({int(when[i]) for i in meeting.members}) > 1:
            found.append(
                f"devices do {table.text(meeting.members[0])} and its like in different ticks"
            )
    for i, need in enumerate(waiting(table, Transfers.ASYNC).need.tolist()):
        if need >= 0 and when[need] >= when[i]:
            found.append(
                f"{table.text(i)} runs in tick {when[i]}, what it needs of another device in "
                f"tick {when[need]}"
            )
    if ticks.num_ticks % ticks.period:
        found.append(f"{ticks.num_ticks} ticks are no multiple of the period {ticks.period}")
    return tuple(found)


def segments_faults(ticks: Ticks, cut: Cut) -> Faults:
    """Segments follow each other, have every block that their ticks need, and carry every transfer
    in time.
    """
    found = []
    marks = [0, *(segment.stop for segment in cut.segments)]
    if [segment.start for segment in cut.segments] != marks[:-1] or marks[-1] != ticks.num_ticks:
        return ("the segments do not cover the ticks once, in order",)
    (every_block, counts), (edges, slack) = ticks.blocks, ticks.transfers
    runs = counts[:, :, 0] > 0
    for segment in cut.segments:
        for tick in range(segment.start, segment.stop):
            template = segment.template(tick)
            blocks = {every_block[i] for i in np.flatnonzero(runs[tick])}
            missing = blocks - {use.block for use in template.blocks}
            found += [f"tick {tick} has no code for {block}" for block in sorted(missing)]
            carried = {(p.payload, *pair): p.delay for p in template.permutes for pair in p.pairs}
            for i in np.flatnonzero(slack[tick] < NO_TRANSFER).tolist():
                edge, room = edges[i], int(slack[tick, i])
                delay = carried.get(tuple(edge))
                if delay is None or delay > room:
                    found.append(
                        f"tick {tick}: {edge.payload.name} {edge.source} > {edge.target} is not "
                        f"carried within {room} ticks"
                    )
    return tuple(found)


def slots_faults(cut: Cut, program: Program) -> Faults:
    """The program has the cut's segments, and is valid (`program.verify`)."""
    return (
        *(() if program.segments == cut.segments else ("the program has other segments",)),
        *map(str, program_faults(program)),
    )


def _ticks(name: str, run: Callable[[Schedule], Ticks]) -> Contract[Schedule, Ticks]:
    return Contract(name, run, ticks_faults)


TICKS = (
    _ticks("assign_ticks", assign_ticks),
    _ticks("joined_ticks", joined_ticks),
    _ticks("joined_ticks as one", lambda schedule: joined_ticks(schedule, as_one=True)),
    _ticks("modulo_ticks", modulo_ticks),
    _ticks("modulo_ticks shifted", lambda schedule: modulo_ticks(schedule, shift=1)),
)
SEGMENTS: Contract[Ticks, Cut] = Contract(
    "cheapest", lambda ticks: Cut(ticks, cut(ticks)), segments_faults
)
SLOTS: Contract[Cut, Program] = Contract(
    "assign_slots", lambda cut: assign_slots(cut.ticks, cut.segments), slots_faults
)
