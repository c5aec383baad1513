"""The errors that jaxpipe raises for what a user wrote.  Every one is a ValueError."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

# A message stays readable, however many faults there are: it shows this many characters of a value,
# and this many faults.
_MOST_CHARACTERS, _MOST_FAULTS = 60, 100
_MOST_BITS = 512  # of a whole number that is written out


class JaxpipeError(ValueError):
    """Base of every error about user input: what is invalid, where, why, and what to
    write instead.  `.faults` holds every fault.
    """

    faults: tuple[str, ...]

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults or (message,)

    @classmethod
    def listing(cls, head: str, faults: Iterable[str]) -> Self:
        """The error whose message has a line for each fault (the first hundred), below `head`."""
        found = tuple(faults)
        return cls(listed(head, found) if head else "\n".join(found), found)

    @classmethod
    def refuse(cls, head: str, faults: Iterable[str]) -> None:
        """Raise the error that lists the faults, where there are any.

        >>> PipelineError.refuse("the mesh does not fit", [])
        """
        if found := tuple(faults):
            raise cls.listing(head, found)


class ParseError(JaxpipeError):
    """Text that is not an action, a table or a layout; the message points at the character."""


@dataclass(frozen=True)
class Violation:
    """One broken rule: its name, a sentence, and the cell (device, position in its row) if there is
    one.

    `others` are further cells that are involved (a deadlock's cycle, the first of two duplicates).
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
    """A schedule that cannot be built or that breaks the rules of a table; `.violations` holds
    every one.
    """

    violations: tuple[Violation, ...]

    def __init__(self, message: str, faults: tuple[Violation | str, ...] = ()) -> None:
        super().__init__(message, tuple(map(str, faults)))
        self.violations = tuple(fault for fault in faults if isinstance(fault, Violation))


class CostError(JaxpipeError):
    """Costs that do not fit: a list of another length than the stages, or a cost that is negative
    or not a number.
    """


class PipelineError(JaxpipeError):
    """A mesh, parameter tree, batch or function that does not fit the schedule; `.faults` holds
    every one.
    """


class PlanError(JaxpipeError):
    """A model, costs or a memory limit for which there is no plan; `.faults` holds every reason."""


class CheckpointError(JaxpipeError):
    """A checkpoint that is not there or is of another model, or a state that cannot be saved;
    `.faults` holds every one.
    """


class ProgramError(JaxpipeError):
    """A lowered program that does not compute its schedule: a bug of jaxpipe, found before anything
    is compiled.
    """


def quoted(value: object, most: int = _MOST_CHARACTERS) -> str:
    """A value as an error shows it: its repr, shortened where it is long.  Never fails, whatever
    the value is.

    >>> quoted("2F0"), quoted("x" * 1000, 3), quoted(10**5000)
    ("'2F0'", "'xxx'... (1,000 characters)", 'a number of about 5,001 digits')
    """
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]!r}... ({len(value):,} characters)"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of about {int(value.bit_length() * 0.30103) + 1:,} digits"
    short = reprlib.Repr()
    short.maxstring = short.maxother = most
    try:
        text = short.repr(value)
    except Exception:  # a repr of the user's own
        return f"<{type(value).__name__}>"
    return text if len(text) <= 2 * most else text[: 2 * most] + "..."


def listed(head: str, faults: Sequence[object]) -> str:
    """A message with a line for each fault below `head`; of very many, the first hundred and the
    number of the others.

    >>> print(listed("two things are wrong", ["this", "that"]))
    two things are wrong:
      this
      that
    """
    lines = [f"{head}:", *(f"  {fault}" for fault in faults[:_MOST_FAULTS])]
    if len(faults) > _MOST_FAULTS:
        lines.append(f"  ... and {len(faults) - _MOST_FAULTS:,} more")
    return "\n".join(lines)
