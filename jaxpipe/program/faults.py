"""What can be wrong with a program."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ProgramRule(enum.Enum):
    """The rules that `verify` checks."""

    SEGMENTS = "segments"  # the segments cover every tick once, in order
    PERMUTE = "permute"  # a permute has distinct sources and targets, and no cycle
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


@dataclass(frozen=True)
class Fault:
    """One broken rule, with where it was found."""

    rule: ProgramRule
    message: str
    tick: int | None = None
    device: int | None = None

    def __str__(self) -> str:
        where = [
            f"{name} {at}"
            for name, at in (("tick", self.tick), ("device", self.device))
            if at is not None
        ]
        return f"{self.rule.value}{' [' + ', '.join(where) + ']' if where else ''}: {self.message}"
