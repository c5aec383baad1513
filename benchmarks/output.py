"""One table of text: to the screen, and to a file where asked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 260
Row: TypeAlias = "tuple[str, ...]"


@dataclass(frozen=True)
class Result:
    """What a benchmark has to say: a title, the machine, one table, and notes that tell how to read
    it.
    """

    title: str
    machine: Sequence[str]
    columns: str | Sequence[str]  # names, or one text with two spaces between them
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def print(self, console: Console) -> None:
        """Print it all."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        names = self.columns.split("  ") if isinstance(self.columns, str) else self.columns
        for i, name in enumerate(names):
            table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        for line in (self.title, *self.machine):
            console.print(line, highlight=False, markup=False)
        console.print(table, highlight=False, markup=False)
        for line in self.notes:
            console.print(line, highlight=False, markup=False)

    def write(self, path: Path | None) -> None:
        """Print to the screen, and into a file too where one is given."""
        write_all([self], path)


def write_all(results: Sequence[Result], path: Path | None) -> None:
    """Print tables to the screen, one after the other, and into one file too where it is given; the
    machine stands above the first.
    """
    consoles = [Console(width=WIDTH)]
    text = StringIO()
    consoles += [] if path is None else [Console(file=text, width=WIDTH)]
    for console in consoles:
        for number, result in enumerate(results):
            if number:
                console.print()
            (replace(result, machine=()) if number else result).print(console)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n")


class Command(argparse.ArgumentParser):
    """The command of a benchmark, described by its module's docstring, with the option that every
    one has.
    """

    def __init__(self, text: str | None) -> None:
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument(
            "-o", "--output", type=Path, metavar="FILE", help="write the table here too"
        )

    def option(
        self, name: str, default: Any, metavar: str, text: str | None = None, **more: Any
    ) -> None:
        """Add an option of the type of its default; one of several values has a list of them."""
        several = isinstance(default, list | tuple)
        one = default[0] if several and default else "" if several else default
        more |= {"nargs": "*"} if several else {}
        self.add_argument(name, default=default, type=type(one), metavar=metavar, help=text, **more)


def told(rows: Iterable[Row]) -> list[Row]:
    """The rows, each printed to the error output as soon as it is known."""
    found = []
    for row in rows:
        found.append(row)
        print(*row, sep="  ", file=sys.stderr, flush=True)
    return found
