"""Arguments of the command line: a name or file becomes a schedule, `F,I,W,T` costs, `key=value`
options.  Its output: tables and progress on a terminal, plain columns in a pipe.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..engine.costs import Cost, Costs
from ..errors import MAX_TEXT, JaxpipeError, ScheduleError, quoted
from ..schedules.registry import build, describe, names
from ..table.columns import in_columns
from ..table.encoded import Transfers
from ..table.kinds import Release
from ..table.placement import Placement
from ..table.schedule import MOST_COLUMNS, Objective, Schedule, check, marked_grid
from ..table.text import csv_lines, drawn, json_value

_MOST_WIDTH = 24  # characters of a cell that are printed: (10F100;11B100)OVERLAP_F_B fits
_MOST_DIGITS = 18  # of a whole number; whether it is too large is checked where it is used
_WHOLE = re.compile(f"[+-]?[0-9]{{1,{_MOST_DIGITS}}}")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SIZE = re.compile(r"([0-9]+\.?[0-9]*(?:[eE][0-9]+)?)\s*(?:([KMGT])(I?)B)?", re.IGNORECASE)
_COSTS = ("forward", "input_grad", "weight_grad", "transfer")  # the parts of --costs
# Costs with a flag of their own name.
OTHER_COSTS = tuple(
    field.name
    for field in dataclasses.fields(Costs)
    if field.name not in (*_COSTS, "release", "unit")
)
# Arguments of `build` that have a flag of their own.
_SHAPE = ("devices", "microbatches", "chunks", "slices", "forward_only")


class UsageError(JaxpipeError):
    """An invalid command line (exit status 2)."""


class InvalidScheduleError(ScheduleError):
    """An invalid table (exit status 1); the message holds every violation and the marked grid."""


def whole(text: str) -> int:
    """An argument that is a whole number, for argparse."""
    if _WHOLE.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a whole number (of at most {_MOST_DIGITS} digits)"
        )
    return int(text)


def number(text: str) -> float:
    """An argument that is a number, for argparse; an int where it is one, so that whole costs give
    whole makespans.
    """
    if _WHOLE.fullmatch(text.strip()):
        return int(text)
    if _REAL.fullmatch(text.strip()) is None:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number")
    return float(text)


def size(text: str) -> float:
    """An argument that is a number of bytes, `80GB` or `74.5GiB`, for argparse."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a size; write 80GB, 74.5GiB or a number of bytes"
        )
    power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
    return float(match[1]) * (2.0**10 if match[3] else 1e3) ** power


def cost(text: str) -> Cost:
    """An argument that is a number, or numbers joined by colons, one per stage, for argparse."""
    numbers = [number(part) for part in text.split(":")]
    return numbers[0] if len(numbers) == 1 else numbers


def costs(text: str) -> dict[str, Cost]:
    """An argument that is F,I,W,T, for argparse."""
    fields = text.split(",")
    if len(fields) not in (3, 4):
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} must be F,I,W,T: three or four numbers joined by commas, e.g. "
            "1,1,1,0.1"
        )
    return dict(zip(_COSTS, map(cost, fields), strict=False))


def flag(name: str) -> str:
    """The flag of an argument."""
    return f"--{name.replace('_', '-')}"


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of these arguments that are not None, by name."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def require(arguments: argparse.Namespace, *names: str, advice: str) -> None:
    """UsageError with the flags of these arguments that the command line does not give, in place of
    the braces of the advice.
    """
    found = given(arguments, *names)
    if missing := [flag(name) for name in names if name not in found]:
        raise UsageError(advice.format(" and ".join(missing)))


def is_file(source: str) -> bool:
    """Whether a NAME|FILE is a file: `-`, a known suffix, a path, or an existing file that has no
    schedule's name.
    """
    path = Path(source)
    is_path = source == "-" or "/" in source or "\\" in source or path.exists()
    return source not in names() and (is_path or path.suffix in (".csv", ".json"))


def load(
    arguments: argparse.Namespace,
    costs: Costs,
    *,
    transfers: Transfers = Transfers.RENDEZVOUS,
) -> Schedule:
    """Read or build the schedule `arguments.source`, and check it.

    Costs that the command line gives go to schedules that take costs.  UsageError where the
    arguments do not fit the source, InvalidScheduleError where the table of a file is invalid.
    """
    source = arguments.source
    if not is_file(source):
        return _named(source, arguments, costs)
    own = ("devices", "microbatches", "chunks", "option", "forward_only")
    shape = [flag(name) for name in own if getattr(arguments, name)]
    if shape:
        raise UsageError(
            f"{', '.join(shape)} cannot be given for {source}: a file has its own shape; give "
            "the name of a schedule instead"
        )
    return checked(read(source, arguments.slices), transfers=transfers)


def _named(name: str, arguments: argparse.Namespace, costs: Costs) -> Schedule:
    """Build a named schedule from the command line's shape and options."""
    entry = describe(name)
    advice = f"{name} needs {{}}, e.g. jaxpipe show {name} --devices 4 --microbatches 8"
    require(arguments, "devices", "microbatches", advice=advice)
    options = read_options(arguments.option)
    has_costs = given(arguments, "costs", *OTHER_COSTS)
    if has_costs and any(option.name == "costs" for option in entry.options):
        options.setdefault("costs", costs)
    stages, devices = options.get("placement"), arguments.devices
    if stages in ("loop", "vee"):
        make = Placement.loop if stages == "loop" else Placement.vee
        chunks = entry.chunks.natural if arguments.chunks is None else arguments.chunks
        options["placement"] = make(devices=devices, chunks=chunks)
    elif isinstance(stages, tuple):
        options["placement"] = Placement.explicit(stages, devices=devices)
    return build(name, **given(arguments, *_SHAPE), **options)


def read(source: str, slices: int | None = None) -> Schedule:
    """Read a table from a .csv or .json file, or CSV from standard input; it is not checked yet.

    CSV does not hold the number of slices of a sequence, and JSON does.
    """
    text, name = read_text(source), "stdin" if source == "-" else Path(source).stem
    suffix = Path(source).suffix
    try:
        if suffix == ".json":
            table = Schedule.from_json(text)
        else:
            table = Schedule.from_csv(text, name=name)
        return table if slices is None else dataclasses.replace(table, slices=slices)
    except ScheduleError as error:
        why = _with_raw_grid(text, suffix, error)
        raise InvalidScheduleError(f"{source}: {why}", error.violations) from error


def checked(
    schedule: Schedule,
    *,
    transfers: Transfers = Transfers.RENDEZVOUS,
    max_activations: int | None = None,
) -> Schedule:
    """The schedule, or InvalidScheduleError with every violation (`check`'s own message has a
    hundred at most) and the marked grid.
    """
    try:
        return check(schedule, transfers=transfers, max_activations=max_activations)
    except ScheduleError as error:
        rules = error.violations
        name, count = schedule.name or "the schedule", len(rules)
        head = f"{name} is invalid, {count} violation{'s' * (count != 1)}:"
        text = "\n".join((head, *(f"  {each}" for each in rules or [error])))
        text += f"\n{marked_grid(schedule, rules)}" if rules else ""
        raise InvalidScheduleError(text, rules) from error


def read_costs(arguments: argparse.Namespace) -> Costs:
    """The costs that the command line gives."""
    own = given(arguments, *OTHER_COSTS)
    return Costs(**(arguments.costs or {}), **own, release=Release(arguments.release))


def read_options(pairs: list[str]) -> dict[str, Any]:
    """`["group_size=4", "lean=true"]` -> {"group_size": 4, "lean": True}; UsageError lists every
    pair that is none.
    """
    options: dict[str, Any] = {}
    faults = []
    for pair in pairs:
        key, sign, value = pair.partition("=")
        fault = ""
        if not key.isidentifier() or not sign:
            fault = "must be KEY=VALUE, e.g. --option group_size=4"
        elif key in options:
            fault = "is given twice; give it once"
        elif key in _SHAPE:
            fault = f"has a flag of its own; write {flag(key)}"
        elif key == "name":
            fault = "is the schedule's name; write it after the command, e.g. jaxpipe show 1f1b"
        faults += [f"--option {pair[:MOST_COLUMNS]} {fault}"] if fault else []
        options[key] = _value(value)
    UsageError.refuse("", faults)
    return options


_NAMED: dict[str, object] = {each.value: each for each in Objective}
_NAMED |= {"true": True, "false": False, "none": None}


def _value(text: str) -> object:
    """A whole number, several joined by commas, or the value of a name; else the text."""
    if text.lower() in _NAMED:
        return _NAMED[text.lower()]
    fields = text.split(",")
    if not all(_WHOLE.fullmatch(field.strip()) for field in fields):
        return text
    return int(text) if len(fields) == 1 else tuple(map(int, fields))


def read_text(source: str) -> str:
    """The text of a file, or of standard input for `-`; UsageError for binary data, and for more
    than any table has (the file may be endless).
    """
    try:
        if source == "-":
            text = sys.stdin.read(MAX_TEXT + 1)
        else:
            with Path(source).open(encoding="utf-8-sig") as file:
                text = file.read(MAX_TEXT + 1)
    except UnicodeDecodeError as error:
        why = f"not a text file ({error.reason} at byte {error.start})"
    else:
        if len(text) <= MAX_TEXT:
            return text
        why = f"more than {MAX_TEXT:,} characters, more than any table"
    raise UsageError(f"{source}: {why}; give a .csv or .json table")


def _with_raw_grid(text: str, suffix: str, error: ScheduleError) -> str:
    """The error and, where it is about cells, a grid of the cells as they are written, the faulty
    ones marked.
    """
    cells = ((v.device, v.position) for v in error.violations)
    marked = {(d, p) for d, p in cells if d is not None and p is not None}
    if not marked:
        return str(error)
    data: Any = json_value(text) if suffix == ".json" else {"rows": csv_lines(text)}
    rows = [dict(enumerate(_cut(cell or "") for cell in row)) for row in data["rows"]]
    picture = drawn(rows, marked, most_columns=MOST_COLUMNS, has_numbers=False)
    return f"{error}\n{picture}"


def _cut(cell: str) -> str:
    """A cell as the grid shows it."""
    cell = cell.strip()
    return cell if len(cell) <= _MOST_WIDTH else f"{cell[: _MOST_WIDTH - 3]}..."


BEST = "bold green"  # the style of a best row


def write(text: str) -> None:
    """Print text as it is, with a newline at its end."""
    sys.stdout.write(text.removesuffix("\n") + "\n")


def write_json(**facts: object) -> None:
    """Print facts as one JSON object."""
    write(json.dumps(facts))


def complain(text: str) -> None:
    """Print text to stderr as it is."""
    sys.stderr.write(text + "\n")


def save(output: str, text: str) -> None:
    """Write text into a file, with a newline at its end, and say so."""
    Path(output).write_text(text.removesuffix("\n") + "\n", encoding="utf-8")
    complain(f"wrote {output}")


def print_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: int = 1,
    styles: Mapping[int, str] | None = None,
    console: Console | None = None,
) -> None:
    """Print columns, the first `left` of them flush left.

    Args:
        header: the names of the columns.
        rows: the cells.
        left: see above.
        styles: of some rows, by number, on a terminal.
        console: where to print; stdout where it is None.
    """
    console, lines = console or Console(highlight=False), list(rows)
    if not console.is_terminal:
        write(in_columns([header, *lines], left=left))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        folds = 0 < i < left or i == len(header) - 1
        justify: Literal["left", "right"] = "left" if i < left else "right"
        table.add_column(Text(name), justify=justify, no_wrap=not folds)
    for i, row in enumerate(lines):
        table.add_row(*map(Text, row), style=(styles or {}).get(i, ""))
    console.print(table)


@contextmanager
def counting(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, of how many) that shows them as a bar on stderr, if that is a terminal.
    A bar that is never counted shows that work goes on.
    """
    console = Console(stderr=True, highlight=False)
    console.quiet = not console.is_terminal  # rich below 15 ends a hidden bar with a line
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=console.quiet) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
