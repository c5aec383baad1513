"""What the command line means: a name or a file to a schedule, `F,I,W,T` to costs, `key=value` to options."""

from __future__ import annotations

import argparse
import ast
import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

from ..errors import JaxpipeError, ScheduleError
from ..schedules import build, names
from ..schedules.registry import describe
from ..simulation.costs import Cost, Costs
from ..table.activations import Release
from ..table.check import check
from ..table.grid import MARK, grid
from ..table.placement import Placement
from ..table.run_order import Transfers
from ..table.schedule import Schedule

# Columns of a table's grid that are printed around what is marked.
MOST_COLUMNS = 60
# Costs with a flag of their own name.
_OTHER_COSTS = ("backward", "overlap", "recompute", "activation", "checkpoint")


class UsageError(JaxpipeError):
    """A command line that makes no sense (exit status 2)."""


class WrongScheduleError(ScheduleError):
    """A table that breaks a rule (exit status 1); the message holds every violation and the marked grid."""


def is_file(source: str) -> bool:
    """Whether a NAME|FILE is a file: `-`, a known suffix, a path, or something that exists and is no schedule's name."""
    if source in names():
        return False
    return source == "-" or Path(source).suffix in (".csv", ".json") or "/" in source or "\\" in source or Path(source).exists()


def load(source: str, arguments: argparse.Namespace, costs: Costs | None, *, transfers: Transfers = Transfers.RENDEZVOUS) -> Schedule:
    """Read or build one schedule and check it.

    `costs` go to schedules that are made to measure.  UsageError where the arguments do not fit the source, WrongScheduleError where
    a file's table is wrong.
    """
    if not is_file(source):
        return named(source, arguments, costs)
    given = [f"--{name}" for name in ("devices", "microbatches", "chunks") if getattr(arguments, name) is not None]
    given += ["--option"] if arguments.option else []
    given += ["--forward-only"] if arguments.forward_only else []
    if given:
        raise UsageError(f"{', '.join(given)} cannot be given for {source}: a file has its own shape; write the name of a schedule instead")
    return checked(read(source), transfers=transfers)


def named(name: str, arguments: argparse.Namespace, costs: Costs | None, *, chunks: int | None = None) -> Schedule:
    """Build a named schedule from the command line's shape and options."""
    entry = describe(name)
    missing = [f"--{what}" for what in ("devices", "microbatches") if getattr(arguments, what) is None]
    if missing:
        raise UsageError(f"{name} needs {' and '.join(missing)}, e.g. jaxpipe show {name} --devices 4 --microbatches 8")
    options = read_options(arguments.option)
    if costs is not None and "costs" not in options and any(option.name == "costs" for option in entry.options):
        options["costs"] = costs
    chunks = arguments.chunks if chunks is None else chunks
    if options.get("placement") is not None:
        options["placement"] = _placement(options["placement"], arguments.devices, entry.chunks.natural if chunks is None else chunks)
    return build(
        name,
        devices=arguments.devices,
        microbatches=arguments.microbatches,
        chunks=chunks,
        forward_only=arguments.forward_only,
        **options,
    )


def read(source: str) -> Schedule:
    """Read a table from a .csv or .json file, or CSV from standard input; it may be wrong still."""
    text, name = (sys.stdin.read(), "stdin") if source == "-" else (_text_of(Path(source)), Path(source).stem)
    try:
        if Path(source).suffix == ".json":
            return Schedule.from_json(text)
        return Schedule.from_csv(text, name=name)
    except ScheduleError as error:
        raise WrongScheduleError(f"{source}: {_with_raw_grid(text, error)}", error.violations) from error
    except JaxpipeError as error:
        raise WrongScheduleError(f"{source}: {error}") from error


def checked(schedule: Schedule, *, transfers: Transfers = Transfers.RENDEZVOUS, max_activations: int | None = None) -> Schedule:
    """The schedule, or WrongScheduleError with every violation (an error's own text stops at a hundred) and the marked grid."""
    try:
        return check(schedule, transfers=transfers, max_activations=max_activations)
    except ScheduleError as error:
        found = error.violations
        marked = {(v.device, v.position) for v in found if v.device is not None and v.position is not None}
        marked |= {cell for v in found for cell in v.others}
        lines = [f"{schedule.name or 'the schedule'} is wrong, {len(found)} violation{'' if len(found) == 1 else 's'}:"]
        lines += [f"  {v}" for v in found] or [f"  {error}"]
        raise WrongScheduleError("\n".join([*lines, grid(schedule.rows, marked=marked, most_columns=MOST_COLUMNS)]), found) from error


def read_costs(arguments: argparse.Namespace) -> Costs:
    """The costs that the command line gives; UsageError says which part cannot be read."""
    given: dict[str, Any] = {}
    if arguments.costs is not None:
        fields = arguments.costs.split(",")
        if len(fields) not in (3, 4):
            raise UsageError(f"--costs {arguments.costs!r} must be F,I,W,T: three or four numbers joined by commas, e.g. 1,1,1,0.1")
        kinds = ("forward", "input_grad", "weight_grad", "transfer")
        given = {kind: _cost("--costs", field) for kind, field in zip(kinds, fields, strict=False)}
    for name in _OTHER_COSTS:
        if getattr(arguments, name) is not None:
            given[name] = _cost(f"--{name}", getattr(arguments, name))
    return Costs(**given, release=Release(arguments.release))


def gives_costs(arguments: argparse.Namespace) -> bool:
    """Whether the command line says anything of costs."""
    return any(getattr(arguments, name) is not None for name in ("costs", *_OTHER_COSTS))


def read_options(pairs: list[str]) -> dict[str, Any]:
    """`["group_size=4", "lean=true"]` -> {"group_size": 4, "lean": True}; UsageError lists every pair without '='."""
    bad = [pair for pair in pairs if not pair.partition("=")[0].isidentifier() or "=" not in pair]
    if bad:
        raise UsageError(f"--option {', '.join(map(repr, bad))} must be KEY=VALUE, e.g. --option group_size=4")
    return {key: _value(value) for key, _, value in (pair.partition("=") for pair in pairs)}


def _placement(given: object, devices: int, chunks: int) -> Placement:
    """`loop`, `vee`, or the device of each stage (`0,1,1,0`)."""
    if given == "loop":
        return Placement.loop(devices=devices, chunks=chunks)
    if given == "vee":
        return Placement.vee(devices=devices, chunks=chunks)
    if isinstance(given, tuple) and all(isinstance(device, int) for device in given):
        return Placement.explicit(given, devices=devices)
    raise UsageError(f"--option placement={given} must be loop, vee, or the device of each stage, e.g. placement=0,1,1,0")


def _value(text: str) -> object:
    """A number, a truth value or None where the text is one, else the text."""
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _cost(flag: str, text: str) -> Cost:
    """A number, or numbers joined by colons, one a stage."""
    try:
        numbers = [_number(part) for part in text.split(":")]
    except ValueError:
        raise UsageError(f"{flag}: {text!r} is not a number (numbers joined by : are one a stage)") from None
    return numbers[0] if len(numbers) == 1 else numbers


def _number(text: str) -> float:
    """An int where it is one, so that whole costs give whole makespans."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file ({error.reason} at byte {error.start}); give a .csv or .json table") from error


def _with_raw_grid(text: str, error: ScheduleError) -> str:
    """The error and, where it is about cells, the cells as they were written, with those marked."""
    faulty = {v.message.partition(": ")[0] for v in error.violations}
    rows = _raw_cells(text)
    marked = {(d, p) for d, row in enumerate(rows) for p, (place, _) in enumerate(row) if place in faulty}
    if not marked:
        return str(error)
    columns = range(max(map(len, rows)))
    if len(columns) > MOST_COLUMNS:
        first = min(p for _, p in marked)
        columns = range(max(0, first - MOST_COLUMNS // 2), min(len(columns), first + MOST_COLUMNS // 2))
    cells = [[f"[{row[p][1]}]" if (d, p) in marked else row[p][1] for p in columns if p < len(row)] for d, row in enumerate(rows)]
    width = max(len(c) for row in cells for c in row)
    label = len(f"device {len(rows) - 1}")
    lines = [str(error)] + ([f"columns {columns.start + 1} to {columns.stop}:"] if len(columns) < max(map(len, rows)) else [])
    for device, row in enumerate(cells):
        tail = f"  {MARK}" if any(d == device for d, _ in marked) else ""
        lines.append(f"{f'device {device}':<{label}} |" + "".join(f" {c:<{width}}" for c in row).rstrip() + tail)
    return "\n".join(lines)


def _raw_cells(text: str) -> list[list[tuple[str, str]]]:
    """Per device, (place as the readers' errors name it, text) of each cell of a CSV or JSON table."""
    try:
        lines = json.loads(text)["rows"]
        return [[(f'"rows"[{d}][{p}]', c or "") for p, c in enumerate(row)] for d, row in enumerate(lines)]
    except (ValueError, KeyError, TypeError):
        lines = csv.reader(io.StringIO(text))
        return [[(f"line {d + 1}, column {p + 1}", c.strip()) for p, c in enumerate(row)] for d, row in enumerate(lines)]
