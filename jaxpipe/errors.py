"""The errors that jaxpipe raises for what a user wrote.  Every one is a ValueError."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


class JaxpipeError(ValueError):
    """Base of every error about user input: says what, where, why, and what to write instead."""


class ParseError(JaxpipeError):
    """Text that is not an action, a table or a layout; the message points at the character."""


@dataclass(frozen=True)
class Violation:
    """One broken rule: the rule's short name, the cell (device, position in its row) if there is one, and a sentence.

    `others` are further cells that take part (a deadlock's cycle, the first of two duplicates).
    """

    rule: str
    message: str
    device: int | None = None
    position: int | None = None
    others: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        where = "" if self.device is None else f" [device {self.device}, position {self.position}]"
        return f"{self.rule}{where}: {self.message}"


class ScheduleError(JaxpipeError):
    """A schedule that cannot be built or that breaks the rules of a table; `.violations` holds every one."""

    violations: tuple[Violation, ...]

    def __init__(self, message: str, violations: tuple[Violation, ...] = ()) -> None:
        super().__init__(message)
        self.violations = violations


class CostError(JaxpipeError):
    """Costs that do not fit: a list of another length than the stages, or a cost that is negative or not a number."""


class FaultsError(JaxpipeError):
    """An error that lists every fault: `.faults` holds them."""

    faults: tuple[str, ...]

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults or (message,)

    @classmethod
    def listing(cls, head: str, faults: Iterable[str]) -> Self:
        """The error whose message has a line for each fault, below `head`."""
        found = tuple(faults)
        return cls(f"{head}:\n" + "\n".join(f"  {fault}" for fault in found), found)


class PipelineError(FaultsError):
    """A mesh, parameter tree, batch or function that does not fit the schedule; `.faults` holds every one."""


class CheckpointError(FaultsError):
    """A checkpoint that is not there or is of another model, or a state that cannot be saved; `.faults` holds every one."""


class ProgramError(FaultsError):
    """A lowered program that does not compute its schedule: a bug of jaxpipe, found before anything is compiled."""
