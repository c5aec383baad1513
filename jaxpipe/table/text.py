"""Tables as text: torch's CSV, and JSON, which also keeps placement, number of microbatches and
name.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import ParseError, ScheduleError, Violation, listed, quoted
from .kinds import Cell, Row, parse_cell
from .limits import MAX_COUNT, MAX_DEVICES, MAX_FAULTS, MAX_TEXT, is_whole

JSON_FORMAT, JSON_VERSION = "jaxpipe.schedule", 1
# Actions of torch's tables that are not part of the pipeline: sharding of parameters and reduction
# of gradients.
_ACTION, _PAIR = re.compile("[0-9]+[A-Z_]+[0-9]*"), re.compile(r"\([^()]*\)OVERLAP_F_B")
_SEPARATORS = ";\t|: "  # of other programs, where a table has a comma
_OF_PARAMETERS = re.compile(r"\s*[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)\s*")


def rows_from_csv(text: str) -> list[list[Cell]]:
    """Read one line per device, one action per cell, an empty cell where idle (an empty line is a
    device without actions).

    Reads compute-only and compute-and-transfer tables, also those that torch 2.13 writes: their
    actions UNSHARD, RESHARD and REDUCE_GRAD are left out.  ScheduleError lists every cell that is
    not an action (reading stops after a thousand).
    """
    bad: list[Violation] = []
    lines = (
        [(i, cell) for i, cell in enumerate(line) if not _OF_PARAMETERS.fullmatch(cell)]
        for line in csv_lines(text)
    )
    rows = _rows(lines, bad, csv_place)
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
        actions = all(not part or _ACTION.fullmatch(part) for part in cells)
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
    lines = (",".join("" if c is None else str(c) for c in row) for row in rows)
    return "".join(f"{line}\n" for line in lines)


def table_to_json(fields: Mapping[str, object], rows: Sequence[Row]) -> str:
    """Write a table as one JSON object, with one line per device."""
    head = {"format": JSON_FORMAT, "version": JSON_VERSION, **fields}
    texts = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    cells = ([None if c is None else str(c) for c in row] for row in rows)
    lines = ",\n".join(f"    {json.dumps(row)}" for row in cells)
    texts.append(f'  "rows": [\n{lines}\n  ]')
    return "{\n" + ",\n".join(texts) + "\n}\n"


def table_from_json(text: str) -> tuple[dict[str, Any], list[list[Cell]]]:
    """The fields and the rows that `table_to_json` writes; ScheduleError lists every field and cell
    that is wrong.
    """
    data = json_value(text)
    if not isinstance(data, dict) or data.get("format") != JSON_FORMAT:
        must = f'it must be an object with "format": "{JSON_FORMAT}"'
        raise ScheduleError(f"the JSON is not a schedule: {must}")
    if data.get("version") != JSON_VERSION:
        version = quoted(data.get("version"))
        reads = f"this jaxpipe reads version {JSON_VERSION}"
        raise ScheduleError(f"the JSON has version {version}; {reads}")
    bad = _field_faults(data)
    cells = [] if bad else data["rows"]
    lines = ([(i, cell or "") for i, cell in enumerate(row)] for row in cells)
    rows = _rows(lines, bad, json_place)
    _raise_if(bad, "the JSON is not a schedule")
    return data, rows


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


def csv_place(device: int, column: int) -> str:
    """The name of a cell of a CSV in errors."""
    return f"line {device + 1}, column {column + 1}"


def json_place(device: int, column: int) -> str:
    """The name of a cell of a JSON table in errors."""
    return f'"rows"[{device}][{column}]'


def _rows(
    lines: Iterable[Sequence[tuple[int, str]]],
    bad: list[Violation],
    place: Callable[[int, int], str],
) -> list[list[Cell]]:
    """Read the cells of each device, given with their columns, adding violations to `bad` until
    that is full.
    """
    rows: list[list[Cell]] = []
    for device, texts in enumerate(lines):
        rows.append([])
        for position, (column, text) in enumerate(texts):
            try:
                rows[-1].append(parse_cell(text) if text else None)
            except ParseError as error:
                message = f"{place(device, column)}: {error}"
                bad.append(Violation("parse", message, device, position))
            if len(bad) >= MAX_FAULTS:
                return rows
    return rows


def _field_faults(data: dict[str, Any]) -> list[Violation]:
    """Violations for fields that are missing or of the wrong type."""
    fields: dict[str, tuple[str, Callable[[Any], object]]] = {
        "name": ("a string", lambda v: v is None or isinstance(v, str)),
        "num_devices": ("a whole number >= 1", lambda v: _is_count(v, 1)),
        "num_microbatches": ("a whole number >= 0", _is_count),
        "slices": ("a whole number >= 1, or left out", lambda v: v is None or _is_count(v, 1)),
        "stage_to_device": (
            "a list with a device, or a list of devices, for each stage",
            lambda v: _is_list(v, lambda e: _is_count(e) or (_is_list(e, _is_count) and e)),
        ),
        "rows": (
            "a list of lists of actions (strings) and nulls, one for each device",
            lambda v: _is_list(v, lambda row: _is_list(row, lambda c: isinstance(c, str | None))),
        ),
    }
    bad = [
        Violation("parse", f'"{key}" must be {what}, not {quoted(data.get(key))}')
        for key, (what, is_good) in fields.items()
        if not is_good(data.get(key))
    ]
    if not bad and len(data["rows"]) != data["num_devices"]:
        count = f"{len(data['rows'])} entries for {data['num_devices']} devices"
        bad.append(Violation("parse", f'"rows" has {count}'))
    return bad


def _is_count(value: object, least: int = 0) -> bool:
    return is_whole(value) and least <= value <= MAX_COUNT


def _is_list(value: object, is_good: Callable[[Any], object]) -> bool:
    return isinstance(value, list) and all(map(is_good, value))


def _raise_if(bad: Sequence[Violation], what: str) -> None:
    """ScheduleError with all that was found to be wrong."""
    if len(bad) >= MAX_FAULTS:
        what = f"{what}, and is read no further after {len(bad):,} faults"
    if bad:
        raise ScheduleError(listed(what, [v.message for v in bad]), tuple(bad))
