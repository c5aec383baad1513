"""One table of text: to the screen, and to a file where asked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 260


@dataclass(frozen=True)
class Result:
    """What a benchmark has to say: a title, the machine, one table, and notes that tell how to read it."""

    title: str
    machine: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def print(self, console: Console) -> None:
        """Print it all."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(self.columns):
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
        self.print(Console(width=WIDTH))
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            self.print(Console(file=file, width=WIDTH))
        text = "\n".join(line.rstrip() for line in path.read_text().splitlines())
        path.write_text(text + "\n")


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option that every benchmark has."""
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the table here too")
