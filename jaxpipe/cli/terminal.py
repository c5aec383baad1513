"""Output of the command: tables and progress on a terminal, plain columns in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

# Wide enough that no line of plain output is wrapped.
_NEVER_FOLD = 1_000_000
BEST = "bold green"  # the style of a best row
_PATIENCE = 10.0  # seconds in silence


def write(text: str) -> None:
    """Print text as it is, with a newline at its end."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def complain(text: str) -> None:
    """Print text to stderr as it is."""
    sys.stderr.write(text + "\n")


def save(path: Path, text: str) -> None:
    """Write text into a file, with a newline at its end, and say so."""
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    complain(f"wrote {path}")


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
    console = console or Console(highlight=False)
    person = console.is_terminal
    table = Table(
        box=box.SIMPLE_HEAD if person else None,
        pad_edge=person,
        header_style="bold" if person else "",
    )
    for i, name in enumerate(header):
        folds = person and (0 < i < left or i == len(header) - 1)
        justify: Literal["left", "right"] = "left" if i < left else "right"
        table.add_column(Text(name), justify=justify, no_wrap=not folds)
    for i, row in enumerate(rows):
        table.add_row(*map(Text, row), style=(styles or {}).get(i, ""))
    if person:
        console.print(table)
        return
    plain = Console(highlight=False, width=_NEVER_FOLD, color_system=None)
    with plain.capture() as capture:
        plain.print(table)
    write("\n".join(line.rstrip() for line in capture.get().splitlines()))


@contextmanager
def counting(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, of how many) that shows them on stderr: a bar on a terminal,
    else a line if it takes long.  A bar that is never counted shows that work goes on.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _once(title)
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)


def _once(title: str) -> Callable[[int, int], None]:
    """A function of (done, of how many) that prints them once, when some seconds have
    passed.
    """
    late = [time.monotonic() + _PATIENCE]

    def tell(done: int, of: int) -> None:
        if late and time.monotonic() > late[0]:
            late.clear()
            complain(f"{title}: {done} of {of} done")

    return tell
