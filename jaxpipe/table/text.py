"""Tables as text for files: torch's CSV, and JSON that keeps what the CSV does not (placement, microbatches, name)."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ParseError, ScheduleError, Violation
from .action import Cell, Row, parse_cell
from .placement import Placement

JSON_FORMAT, JSON_VERSION = "jaxpipe.schedule", 1
# What torch's tables hold besides: sharding of parameters and reduction of gradients, which jaxpipe does elsewhere.
_NOT_OF_THE_PIPELINE = re.compile(r"\s*\d+(UNSHARD|RESHARD|REDUCE_GRAD)\s*")


@dataclass(frozen=True)
class TableText:
    """What a JSON text holds."""

    rows: tuple[Row, ...]
    placement: Placement
    num_microbatches: int
    name: str


def rows_from_csv(text: str) -> list[list[Cell]]:
    """Read a line a device, an action a cell, an empty cell where idle (an empty line is a device without actions).

    Reads compute-only and compute-and-transfer tables, also those that torch 2.13 writes: their actions UNSHARD, RESHARD and
    REDUCE_GRAD are left out.  ScheduleError lists every cell that is not an action.
    """
    rows: list[list[Cell]] = []
    bad: list[Violation] = []
    for device, line in enumerate(csv.reader(io.StringIO(text.removeprefix("\ufeff")))):
        places = {f"line {device + 1}, column {column + 1}": cell for column, cell in enumerate(line)}
        rows.append(_cells({p: c for p, c in places.items() if not _NOT_OF_THE_PIPELINE.fullmatch(c)}, device, bad))
    _raise_if(bad, "the CSV is not a schedule")
    if not any(cell for row in rows for cell in row):
        raise ScheduleError("the CSV holds no action; write a line a device and an action a cell, e.g. 0F0,0B0")
    return rows


def rows_to_csv(rows: Sequence[Row]) -> str:
    """Write a line a device, an action a cell, an empty cell where idle."""
    return "".join(",".join("" if c is None else str(c) for c in row) + "\n" for row in rows)


def table_to_json(table: TableText) -> str:
    """Write a table as one JSON object, a line a device."""
    head = {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "name": table.name,
        "num_devices": table.placement.num_devices,
        "num_microbatches": table.num_microbatches,
        "stage_to_device": table.placement.stage_to_device,
    }
    fields = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines = ["    " + json.dumps([None if c is None else str(c) for c in row]) for row in table.rows]
    return "{\n" + ",\n".join(fields) + ',\n  "rows": [\n' + ",\n".join(lines) + "\n  ]\n}\n"


def table_from_json(text: str) -> TableText:
    """Read what `table_to_json` writes; ScheduleError lists every field and cell that is wrong."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    if not isinstance(data, dict) or data.get("format") != JSON_FORMAT:
        raise ScheduleError(f'the JSON is not a schedule: it must be an object with "format": "{JSON_FORMAT}"')
    if data.get("version") != JSON_VERSION:
        raise ScheduleError(f"the JSON has version {data.get('version')!r}; this jaxpipe reads version {JSON_VERSION}")
    bad = _field_faults(data)
    rows: list[list[Cell]] = []
    if not bad:
        for device, line in enumerate(data["rows"]):
            places = {f'"rows"[{device}][{column}]': cell or "" for column, cell in enumerate(line)}
            rows.append(_cells(places, device, bad))
    _raise_if(bad, "the JSON is not a schedule")
    placement = Placement.explicit(data["stage_to_device"], devices=data["num_devices"])
    return TableText(tuple(map(tuple, rows)), placement, data["num_microbatches"], data.get("name") or "")


def _cells(texts: dict[str, str], device: int, bad: list[Violation]) -> list[Cell]:
    """Read the cells of a row, given by place, adding what is wrong to `bad`."""
    row: list[Cell] = []
    for position, (place, text) in enumerate(texts.items()):
        try:
            row.append(parse_cell(text))
        except ParseError as error:
            bad.append(Violation("parse", f"{place}: {error}", device, position))
    return row


def _field_faults(data: dict[str, object]) -> list[Violation]:
    """Violations for fields that are missing or of the wrong type."""
    checks = (
        ("name", "a string", lambda v: v is None or isinstance(v, str)),
        ("num_devices", "a whole number >= 1", lambda v: _is_count(v) and v >= 1),
        ("num_microbatches", "a whole number >= 0", _is_count),
        ("stage_to_device", "a list with a device, or a list of devices, for each stage", _is_placement),
        ("rows", "a list of lists of actions (strings) and nulls, one for each device", _is_rows),
    )
    bad = [
        Violation("parse", f'"{key}" must be {what}, not {data.get(key)!r:.60}') for key, what, good in checks if not good(data.get(key))
    ]
    rows, devices = data.get("rows"), data.get("num_devices")
    if not bad and isinstance(rows, list) and len(rows) != devices:
        bad.append(Violation("parse", f'"rows" has {len(rows)} entries for {devices} devices'))
    return bad


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_placement(value: object) -> bool:
    return isinstance(value, list) and all(_is_count(e) or (isinstance(e, list) and e and all(map(_is_count, e))) for e in value)


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(row, list) and all(c is None or isinstance(c, str) for c in row) for row in value)


def _raise_if(bad: Sequence[Violation], what: str) -> None:
    if bad:
        raise ScheduleError(f"{what}:\n" + "\n".join(f"  {v.message}" for v in bad), tuple(bad))
