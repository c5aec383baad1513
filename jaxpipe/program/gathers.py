"""The rules of programs, and that of gathers: what is in each room, from tick to tick."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ..table.kinds import Sharded, users
from .ir import NOBODY, Program


class ProgramRule(enum.Enum):
    """The rules that `verify` checks."""

    SEGMENTS = "segments"  # the segments cover every tick once, in order
    PERMUTE = "permute"  # a permute has distinct sources and targets, all up or all down
    # what arrives has a permute; transfers end in the trip that begins them or the next
    EXCHANGE = "exchange"
    # every action of the table runs exactly once, on its device; so every gradient is added exactly
    # once
    ACTION = "action"
    # a collective action has a tick of its own
    COLLECTIVE = "collective"
    # the template has the code of each action, and its code does nothing else
    CODE = "code"
    SLOT = "slot"  # every slot exists
    VALUE = "value"  # every read finds the value that it needs
    OVERWRITTEN = "overwritten"  # no value is overwritten before its last read
    POOL = "pool"  # no pool is larger, or smaller, than its peak
    # where parameters are gathered during the step, each action finds those of its stage, and each
    # gradient is reduced to its stage's
    GATHER = "gather"


@dataclass(frozen=True)
class Fault:
    """One broken rule, with where it was found."""

    rule: ProgramRule
    message: str
    tick: int | None = None
    device: int | None = None

    def __str__(self) -> str:
        places = (("tick", self.tick), ("device", self.device))
        where = ", ".join(f"{name} {at}" for name, at in places if at is not None)
        return f"{self.rule.value}{f' [{where}]' if where else ''}: {self.message}"


def gather_faults(program: Program) -> Iterator[Fault]:
    """What is in each room of each device, from tick to tick: before the blocks of a tick come
    reductions, and then gathers.
    """
    devices = range(program.schedule.num_devices)
    for links, room, device in product(program.ticks.links, range(program.num_rooms), devices):
        columns = (links.columns[f"{name}_{room}"][:, device] for name in ("gather", "reduce"))
        gathers, reduces = (column.tolist() for column in columns)
        chunk_of = {s: v for v, s in enumerate(program.schedule.placement.stages_of[device])}
        held = made = NOBODY  # the chunk of the parameters, and of a gradient that is not reduced
        for tick in range(program.num_ticks):
            if reduces[tick] != NOBODY:
                if reduces[tick] != made:
                    message = f"reduces chunk {reduces[tick]}, but room {room} holds {made}"
                    yield Fault(ProgramRule.GATHER, message, tick, device)
                made = NOBODY
            held = gathers[tick] if gathers[tick] != NOBODY else held
            for record in (program.ticks.forward, program.ticks.backward):
                kind, chunk, stage = (
                    int(record.columns[name][tick, device]) for name in ("kind", "chunk", "stage")
                )
                if kind == NOBODY or chunk != room:
                    continue
                own = chunk_of.get(stage, NOBODY)
                if held != own:
                    message = f"room {room} does not hold the parameters of stage {stage}"
                    yield Fault(ProgramRule.GATHER, message, tick, device)
                if kind in users(Sharded.GRADIENT):
                    if made not in (NOBODY, own):
                        message = f"room {room} holds a gradient of chunk {made}, not {own}"
                        yield Fault(ProgramRule.GATHER, message, tick, device)
                    made = own
        if made != NOBODY:
            message = f"the gradient of chunk {made} in room {room} is never reduced"
            yield Fault(ProgramRule.GATHER, message, device=device)
