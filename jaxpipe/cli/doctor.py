"""`jaxpipe doctor`: checks of this machine, each with a verdict."""

from __future__ import annotations

import argparse
import io
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from ..lowering.target import read_prices, write_prices
from . import terminal

_STYLES = {"ok": "green", "slow": "yellow", "wrong": "bold red", "not tried": "bright_black"}
_PAGE_WIDTH = 180  # characters


def doctor_command(arguments: argparse.Namespace) -> bool:
    """Check this machine before a long run.  Checks are of versions with known faults, options of
    XLA, numbers of six schedules against the plain function, times of predicates, hops and copies,
    memory and speed.  Each check has a limit of time; a hang is ended and named.  Measured times go
    into a file that Pipeline and plan read (JAXPIPE_PRICES, or the user's folder of
    settings).  Exit status 1 where a line is wrong.
    """
    if find_spec("jax") is None:
        raise terminal.UsageError(
            f"the checks run JAX, which {sys.executable} does not have: install jax, jax[cuda12] "
            "for NVIDIA GPUs, or jax[tpu]"
        )
    # By name: the checks may be deleted.
    doctor = import_module("jaxpipe.doctor.run")
    _refuse(arguments)
    checks = [c for c in doctor.CHECKS if (arguments.only or "") in c.item]
    if not checks:
        raise terminal.UsageError(
            f"no check has {arguments.only!r} in its title; titles are "
            f"{', '.join(c.item for c in doctor.CHECKS)}"
        )
    page = None if arguments.output is None else terminal.file_path(arguments.output)
    writes = not arguments.no_prices and arguments.process == 0
    if writes:
        read_prices()  # the checks take minutes: a faulty file is refused before them
    names = ("devices", "steps", "coordinator", "processes", "process")
    scope = doctor.Scope(**{name: getattr(arguments, name) for name in names})
    with terminal.counting("checking") as progress:
        report = doctor.run(scope, minutes=arguments.minutes, checks=checks, tell=progress)
    facts: dict[str, Any] = asdict(report) | {"prices_file": None}
    if report.prices and writes:
        versions = next((line.measured for line in report.lines if line.item == "versions"), "")
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        path = write_prices(report.kind, report.prices, ", ".join(filter(None, [day, versions])))
        facts["prices_file"] = str(path)
        terminal.complain(f"wrote the prices of {report.kind} to {path}")
    if page is not None:
        picture = Console(record=True, file=io.StringIO(), width=_PAGE_WIDTH, force_terminal=True)
        picture.print(f"jaxpipe doctor: {report.kind or 'no device'}", highlight=False)
        _print(report, picture)
        for name, seconds in report.prices.items():
            picture.print(f"price of {name}: {seconds * 1e6:.3g} us", highlight=False)
        terminal.save(page, picture.export_html())
    if arguments.json:
        terminal.write(json.dumps(facts))
    else:
        _print(report)
    return bool(report.is_good)


def _print(report: Any, console: Console | None = None) -> None:
    header = ("item", "verdict", "measured", "expected", "what to do")
    rows = [(e.item, e.verdict.value, e.measured, e.expected, e.advice) for e in report.lines]
    styles = {i: _STYLES[row[1]] for i, row in enumerate(rows)}
    terminal.print_table(header, rows, left=len(header), styles=styles, console=console)


def _refuse(arguments: argparse.Namespace) -> None:
    """UsageError for numbers that do not fit."""
    several = arguments.coordinator is not None
    least = {"--devices": arguments.devices, "--steps": arguments.steps}
    faults = [f"{name} must be at least 1" for name, n in least.items() if n is not None and n < 1]
    if not arguments.minutes > 0:  # nan too
        faults.append("--minutes must be above 0")
    if not 0 <= arguments.process < arguments.processes:
        faults.append("--process must be a number from 0 to --processes less 1")
    if (arguments.processes > 1) != several:
        faults.append("several processes need --coordinator HOST:PORT, --processes and --process")
    if arguments.devices is not None and several and arguments.devices % arguments.processes:
        faults.append("--devices must divide over --processes")
    if not (arguments.output or ".html").lower().endswith((".html", ".htm")):
        faults.append(f"the report is HTML: {arguments.output} must end in .html")
    if faults:
        raise terminal.UsageError("; ".join(faults))
