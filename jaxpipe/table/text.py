"""Rows that are read and written: as objects, as torch's CSV, as JSON, which also keeps placement,
number of microbatches and name, and as the grid that people read.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ..errors import (
    MAX_COUNT,
    MAX_DEVICES,
    MAX_DIGITS,
    MAX_FAULTS,
    MAX_TEXT,
    ParseError,
    ScheduleError,
    Violation,
    is_whole,
    listed,
    quoted,
)
from .encoded import NUM_KINDS
from .kinds import (
    BACKWARD_HALVES,
    FORWARD_HALVES,
    KIND_NAMES,
    KINDS,
    Action,
    Cell,
    Kind,
    Overlap,
    Row,
    parts,
)

_NUMBER = f"([0-9]{{1,{MAX_DIGITS}}})"
_KIND = "|".join(sorted(KIND_NAMES, key=len, reverse=True))
_ACTION = re.compile(rf"{_NUMBER}({_KIND}){_NUMBER}")
_NEARLY = re.compile(rf"([0-9]*)((?:{_KIND})?)([0-9]*)")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
MARK = "<-- ERROR HERE"
_REACH = 8  # columns that are drawn on each side of marks
_CELL_TYPES = {Action, Overlap, type(None)}
_LARGEST = 2**63  # of numpy's whole numbers
JSON_FORMAT, JSON_VERSION = "jaxpipe.schedule", 1
_ANY_ACTION = re.compile("[0-9]+[A-Z_]+[0-9]*")
_PAIR = re.compile(r"\([^()]*\)OVERLAP_F_B")
_SEPARATORS = ";\t|: "  # of other programs, where a table has a comma
# The names of U, D and X in torch's CSV, where no number follows them.
_NAMED = {spec.in_csv: spec.kind for spec in KINDS if spec.in_csv}
_WITHOUT_NUMBER = re.compile(rf"{_NUMBER}({'|'.join(_NAMED)})")
UNNUMBERED = -1


def parse_action(text: str) -> Action:
    """Read one action, `2F0`; ParseError points at the first character that does not fit."""
    match = _ACTION.fullmatch(_text(text))
    if match is not None:
        return Action(int(match[1]), Kind[match[2]], int(match[3]))
    write = "write [stage][kind][microbatch], e.g. 2F0 or 1SEND_F3"
    raise ParseError(f"{quoted(text)} is not an action: {_why_not(text)}; {write}")


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
        write = "write (0F7;7B3)OVERLAP_F_B"
        raise ParseError(f"{quoted(text)} is not an overlapped pair; {write}")
    forward, backward = parse_action(match[1].strip()), parse_action(match[2].strip())
    if forward.kind not in FORWARD_HALVES or backward.kind not in BACKWARD_HALVES:
        overlaps = f"overlaps {forward.kind.name} with {backward.kind.name}"
        raise ParseError(f"{quoted(text)} {overlaps}; the first must be F, the second B or I")
    return Overlap(forward, backward)


def _text(text: str) -> str:
    """The text as it is; ParseError for another type than str."""
    if isinstance(text, str):
        return text
    raise ParseError(f"{quoted(text)} is not text; write a str, e.g. '2F0'")


def _why_not(text: str) -> str:
    """The first character that does not fit an action, and the expected one."""
    match = _NEARLY.match(text)
    assert match is not None  # it matches an empty text too
    stage, kind, microbatch = match.groups()
    if not stage:
        return "character 1 must start the stage number"
    if len(stage) > MAX_DIGITS:
        return f"the stage number has {len(stage):,} digits, of {MAX_DIGITS} at most"
    if not kind:
        return f"character {len(stage) + 1} must start a kind ({' '.join(KIND_NAMES)})"
    if not microbatch:
        return f"character {match.end() + 1} must start the microbatch number"
    if len(microbatch) > MAX_DIGITS:
        return f"the microbatch number has {len(microbatch):,} digits, of {MAX_DIGITS} at most"
    rest = quoted(text[match.end() :])
    return f"{rest} follows at character {match.end() + 1}, where the action ends"


def rows_from_csv(text: str) -> list[list[Cell]]:
    """Read one line per device, one action per cell, an empty cell where idle (an empty line is a
    device without actions).

    Reads compute-only and compute-and-transfer tables, also those that torch 2.13 writes: a U, D or
    X has its name UNSHARD, RESHARD or REDUCE_GRAD there, and the number `UNNUMBERED` here.
    ScheduleError lists every cell that is not an action (reading stops after a thousand).
    """
    bad: list[Violation] = []
    rows = _rows(csv_lines(text), bad, lambda d, c: f"line {d + 1}, column {c + 1}")
    _raise_if(bad, f"the CSV is not a schedule{_hint(text, rows, bad)}")
    if not any(map(any, rows)):
        write = "write one line per device and one action per cell, e.g. 0F0,0B0"
        raise ScheduleError(f"the CSV holds no action; {write}")
    return rows


def _hint(text: str, rows: Sequence[Sequence[Cell]], bad: Sequence[Violation]) -> str:
    """A change of the whole file that would make its cells right; empty for none."""
    for cell in (cell for line in (csv_lines(text) if bad else ()) for cell in line):
        if separator := _other_separator(cell):
            return f": wrong separator {separator!r}; write a comma between cells"
    header = any(violation.device == 0 for violation in bad) and not any(rows[0])
    return ": remove the header row" if header and any(map(any, rows)) else ""


def _other_separator(cell: str) -> str:
    """The separator between the actions of a cell that holds several; empty where it holds one."""
    text = _PAIR.sub("0F0", cell)
    for separator in _SEPARATORS:
        cells = [part.strip() for part in text.split(separator)]
        actions = all(not part or _ANY_ACTION.fullmatch(part) for part in cells)
        if len(cells) > 1 and any(cells) and actions:
            return separator
    return ""


def csv_lines(text: str) -> Iterator[list[str]]:
    """The cells of each line, as text; ScheduleError where it is not CSV, or is far too long for a
    table.
    """
    reader = csv.reader(io.StringIO(_readable(text, "CSV").removeprefix("\ufeff")))
    try:
        for count, line in enumerate(reader, 1):
            if count > MAX_DEVICES:
                many = f"the CSV has more than {MAX_DEVICES:,} lines"
                raise ScheduleError(f"{many}; write one line per device")
            yield line
    except csv.Error as error:
        why = "a carriage return without a line feed; end lines with \\n or \\r\\n"
        if "field limit" in str(error):
            most = f"{csv.field_size_limit():,}"
            why = f"a cell has more than {most} characters; write an action, e.g. 2F0"
        raise ScheduleError(f"line {reader.line_num}: {why}") from None


def rows_to_csv(rows: Sequence[Row]) -> str:
    """Write one line per device, one action per cell, an empty cell where idle."""
    return "".join(f"{','.join(map(_in_csv, row))}\n" for row in rows)


def _in_csv(cell: Cell) -> str:
    if isinstance(cell, Action) and (name := KINDS[cell.kind].in_csv):
        return f"{cell.stage}{name}"
    return "" if cell is None else str(cell)


def table_to_json(fields: Mapping[str, object], rows: Sequence[Row]) -> str:
    """Write a table as one JSON object, with one line per device."""
    head = {"format": JSON_FORMAT, "version": JSON_VERSION, **fields}
    texts = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    cells = ([None if c is None else str(c) for c in row] for row in rows)
    lines = ",\n".join(f"    {json.dumps(row)}" for row in cells)
    texts.append(f'  "rows": [\n{lines}\n  ]')
    return "{\n" + ",\n".join(texts) + "\n}\n"


def table_from_json(text: str) -> dict[str, Any]:
    """The fields that `table_to_json` writes; ScheduleError for another JSON."""
    data = json_value(text)
    if not isinstance(data, dict) or data.get("format") != JSON_FORMAT:
        must = f'it must be an object with "format": "{JSON_FORMAT}"'
        raise ScheduleError(f"the JSON is not a schedule: {must}")
    if data.get("version") != JSON_VERSION:
        version = quoted(data.get("version"))
        reads = f"this jaxpipe reads version {JSON_VERSION}"
        raise ScheduleError(f"the JSON has version {version}; {reads}")
    return data


def rows_from_json(texts: Sequence[Sequence[str | None]]) -> list[list[Cell]]:
    """The cells of each device; ScheduleError lists every one that is wrong."""
    bad: list[Violation] = []
    rows = _rows(texts, bad, lambda d, c: f'"rows"[{d}][{c}]')
    _raise_if(bad, "the JSON is not a schedule")
    return rows


def json_value(text: str) -> object:
    """The value of a JSON text; ScheduleError says where it is not JSON."""
    _readable(text, "JSON")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        why = f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}"
    except RecursionError:
        must = "a schedule is an object with lists of lists"
        why = f"the JSON is nested too deeply; {must}"
    except ValueError:  # Python reads no number of more than some thousand digits
        largest = f"{MAX_COUNT:,} is the largest that a schedule holds"
        why = f"the JSON holds a number of thousands of digits; {largest}"
    raise ScheduleError(why)


def _readable(text: str, what: str) -> str:
    """The text as it is; ScheduleError for another type than str, or one that is far too long."""
    if not isinstance(text, str):
        raise ScheduleError(f"{quoted(text)} is not text; give the {what} as a str")
    if len(text) > MAX_TEXT:
        most = f"a table has at most {MAX_TEXT:,}"
        raise ScheduleError(f"the {what} has {len(text):,} characters; {most}")
    return text


def _rows(
    lines: Iterable[Sequence[str | None]],
    bad: list[Violation],
    place: Callable[[int, int], str],
) -> list[list[Cell]]:
    """Read the cells of each device, adding violations to `bad` until that is full."""
    rows: list[list[Cell]] = []
    for device, texts in enumerate(lines):
        rows.append([])
        for column, text in enumerate(texts):
            try:
                match = _WITHOUT_NUMBER.fullmatch((text or "").strip())
                unnumbered = match and Action(int(match[1]), _NAMED[match[2]], UNNUMBERED)
                rows[-1].append(unnumbered or (parse_cell(text) if text else None))
            except ParseError as error:
                message = f"{place(device, column)}: {error}"
                bad.append(Violation("parse", message, device, column))
            if len(bad) >= MAX_FAULTS:
                return rows
    return rows


def _raise_if(bad: Sequence[Violation], what: str) -> None:
    """ScheduleError with all that was found to be wrong."""
    if len(bad) >= MAX_FAULTS:
        what = f"{what}, and is read no further after {len(bad):,} faults"
    if bad:
        raise ScheduleError(listed(what, [v.message for v in bad]), tuple(bad))


def plain_rows(rows: Iterable[Iterable[Cell]]) -> tuple[Row, ...]:
    """The rows as tuples, whole numbers as Python's own; ScheduleError where there are none, or
    where they hold anything but cells.
    """
    try:
        table = tuple(map(tuple, rows))
    except TypeError as error:
        why = "are not the rows of a table; give each device a list of its actions"
        raise ScheduleError(f"{quoted(rows)} {why}") from error
    odd = {device: row for device, row in enumerate(table) if not _is_plain(row)}
    bad = tuple(
        Violation("cell", f"{quoted(cell)} {why}", device, position)
        for device, row in odd.items()
        for position, cell in enumerate(row)
        if (why := _fault(cell))
    )
    ScheduleError.refuse("the table holds things that are not actions", bad)
    return tuple(
        tuple(map(_plain_cell, row)) if device in odd else row for device, row in enumerate(table)
    )


def _is_plain(row: Row) -> bool:
    """Whether a row holds cells with Python's own numbers; a large table has a million of them."""
    if (types := set(map(type, row))) - _CELL_TYPES:
        return False
    only = types == {Action}
    actions: Sequence[Any] = row if only else [*chain.from_iterable(map(parts, row))]
    if set(map(type, actions)) - {Action}:
        return False
    flat = [*chain.from_iterable(actions), *Action(0, Kind.F, 0)]
    kinds, numbers = flat[1::3], [*flat[::3], *flat[2::3]]
    if {*map(type, numbers)} - {int} or {*map(type, kinds)} - {Kind}:
        return False
    return bool(min(numbers) > -_LARGEST and max(numbers) < _LARGEST)


def _plain_cell(cell: Cell) -> Cell:
    plain = [Action(int(a.stage), Kind(int(a.kind)), int(a.microbatch)) for a in parts(cell)]
    return Overlap(*plain) if isinstance(cell, Overlap) else plain[0] if plain else None


def _fault(cell: Cell) -> str:
    """Why it is no cell; an empty text where it is one."""
    actions = parts(cell)
    if type(cell) not in _CELL_TYPES or set(map(type, actions)) - {Action}:
        reads = "jaxpipe.table.parse_cell reads text"
        return f"is not an Action, an Overlap or None; {reads}"
    numbers = [number for action in actions for number in action]
    if not all(is_whole(number) and abs(number) < _LARGEST for number in numbers):
        return "must have whole numbers for its stage, kind and microbatch"
    wrong = [a.kind for a in actions if not 0 <= a.kind < NUM_KINDS]
    one_of = ", ".join(KIND_NAMES)
    return f"has kind {wrong[0]}; a kind is one of {one_of}" if wrong else ""


def drawn(
    cells: Sequence[Mapping[int, str]],
    marks: Collection[tuple[int, int]],
    *,
    most_columns: int | None = None,
    has_numbers: bool = True,
) -> str:
    """A line for each device, after one of the numbers of columns: the cells at `marks` (device,
    column) are bracketed, and their lines end in `MARK`.
    """
    steps = 1 + max((column for row in cells for column in row), default=-1)
    shown = _shown(steps, [column for _, column in marks], most_columns)
    texts = {"": [str(c) if c >= 0 else "..." for c in shown]} if has_numbers else {}
    for device, row in enumerate(cells):
        own = [(c, row.get(c, "") if c >= 0 else "...") for c in shown]
        bracketed = [f"[{text}]" if (device, c) in marks else text for c, text in own]
        texts[f"device {device}"] = bracketed
    width = max((len(text) for row in texts.values() for text in row), default=1)
    label, bad = max(map(len, texts)), {f"device {device}" for device, _ in marks}
    lines = []
    for name, line in texts.items():
        body = "".join(f" {text:<{width}}" for text in line).rstrip()
        lines.append(f"{name:<{label}} |{body}" + f"  {MARK}" * (name in bad))
    return "\n".join(lines)


def microbatch_label(microbatch: int, slices: int) -> str:
    """The number of a microbatch; with several slices a sequence, that of the sequence and of the
    slice.

    >>> microbatch_label(7, 1), microbatch_label(7, 4)
    ('7', '1.3')
    """
    sequence, number = divmod(microbatch, slices)
    return str(microbatch) if slices == 1 else f"{sequence}.{number}"


def cell_label(cell: Cell, slices: int) -> str:
    """A cell's text for people."""
    if slices == 1:
        return str(cell)
    numbers = [microbatch_label(action.microbatch, slices) for action in parts(cell)]
    pairs = zip(parts(cell), numbers, strict=True)
    labels = [f"{action.stage}{action.kind.name}{number}" for action, number in pairs]
    return labels[0] if len(labels) == 1 else f"({';'.join(labels)})OVERLAP_F_B"


def _shown(steps: int, marks: Sequence[int], most: int | None) -> list[int]:
    """The columns to draw: all, or those from around the first mark on, as many as allowed; -1
    where some are left out.
    """
    if most is None or steps <= most:
        return list(range(steps))
    start = max(0, min(marks, default=0) - _REACH)
    stop = min(steps, start + most)
    if marks:
        stop = min(stop, 1 + _REACH + max(m for m in marks if m + _REACH < start + most))
    return [*[-1][:start], *range(start, stop), *[-1][: steps - stop]]
