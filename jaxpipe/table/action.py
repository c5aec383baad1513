"""One cell of a schedule table: an action or an overlapped pair, and its text.

The text form is torch.distributed.pipelining's (`_Action.__str__`): `[stage][kind][microbatch]`,
e.g. `2F0`. Actions are named tuples, not dataclasses: the table of a large job holds half a million
of them, and a tuple is built five times faster than a frozen dataclass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from ..errors import ParseError, quoted
from .kinds import BACKWARD_HALVES, COMPUTE, FORWARD_HALVES, TRANSFERS
from .kinds import KIND_NAMES as KIND_NAMES
from .kinds import Kind as Kind
from .limits import MAX_DIGITS


class Action(NamedTuple):
    """One action of one device: `Action(2, Kind.F, 0)` prints as `2F0`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{KIND_NAMES[self.kind]}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward (B or I) of different microbatches that run as one step:
    `(0F7;7B3)OVERLAP_F_B`.

    Source: DualPipe (DeepSeek-V3, section 3.2.1), where the communication of one half overlaps the
    compute of the other.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Cell: TypeAlias = Action | Overlap | None
Row: TypeAlias = tuple[Cell, ...]

_NUMBER = f"([0-9]{{1,{MAX_DIGITS}}})"
_KIND = "|".join(sorted(KIND_NAMES, key=len, reverse=True))
_ACTION = re.compile(rf"{_NUMBER}({_KIND}){_NUMBER}")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def parts(cell: Cell) -> tuple[Action, ...]:
    """The actions in a cell: none, one, or the two of an overlapped pair."""
    if cell is None:
        return ()
    if isinstance(cell, Overlap):
        return tuple(cell)
    return (cell,)


def parse_action(text: str) -> Action:
    """Read one action, `2F0`; ParseError points at the first character that does not fit."""
    match = _ACTION.fullmatch(_text(text))
    if match is not None:
        return Action(int(match[1]), Kind[match[2]], int(match[3]))
    raise ParseError(
        f"{quoted(text)} is not an action: {_why_not(text)}; write [stage][kind][microbatch], "
        "e.g. 2F0 or 1SEND_F3"
    )


def parse_cell(text: str) -> Cell:
    """Read one cell: empty (idle), an action, or `(0F7;7B3)OVERLAP_F_B`; ParseError says what is
    wrong.

    >>> parse_cell("2F0")
    Action(stage=2, kind=<Kind.F: 0>, microbatch=0)
    """
    text = _text(text).strip()
    if not text:
        return None
    if not text.startswith("("):
        return parse_action(text)
    match = _OVERLAP.fullmatch(text)
    if match is None:
        raise ParseError(f"{quoted(text)} is not an overlapped pair; write (0F7;7B3)OVERLAP_F_B")
    forward, backward = parse_action(match[1].strip()), parse_action(match[2].strip())
    if forward.kind not in FORWARD_HALVES or backward.kind not in BACKWARD_HALVES:
        must = f"the first must be {_any_of(FORWARD_HALVES)}, the second {_any_of(BACKWARD_HALVES)}"
        raise ParseError(
            f"{quoted(text)} overlaps {forward.kind.name} with {backward.kind.name}; {must}"
        )
    return Overlap(forward, backward)


def _any_of(kinds: Sequence[Kind]) -> str:
    return " or ".join(kind.name for kind in kinds)


def _text(given: str) -> str:
    """The text as it is; ParseError for another type than str."""
    if isinstance(given, str):
        return given
    raise ParseError(f"{quoted(given)} is not text; write a str, e.g. '2F0'")


def _why_not(text: str) -> str:
    """The first character that does not fit an action, and the expected one."""
    stage = re.match("[0-9]+", text)
    if stage is None:
        return "character 1 must start the stage number"
    if stage.end() > MAX_DIGITS:
        return f"the stage number has {stage.end():,} digits, of {MAX_DIGITS} at most"
    kind = re.compile(_KIND).match(text, stage.end())
    if kind is None:
        return (
            f"character {stage.end() + 1} must start a kind "
            f"({' '.join(kind.name for kind in (*COMPUTE, *TRANSFERS))})"
        )
    microbatch = re.compile("[0-9]+").match(text, kind.end())
    if microbatch is None:
        return f"character {kind.end() + 1} must start the microbatch number"
    if len(microbatch[0]) > MAX_DIGITS:
        return f"the microbatch number has {len(microbatch[0]):,} digits, of {MAX_DIGITS} at most"
    return (
        f"{quoted(text[microbatch.end() :])} follows at character {microbatch.end() + 1}, "
        "where the action ends"
    )
