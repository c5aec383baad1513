"""`jaxpipe doctor`: checks of this machine, each with a verdict."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..lowering.prices import read_prices, write_prices
from .arguments import UsageError, file_path
from .terminal import Terminal


def doctor_command(arguments: argparse.Namespace, terminal: Terminal) -> bool:
    """Run the checks, print a line each, and write prices and a report; False where one is
    wrong.
    """
    if find_spec("jax") is None:
        raise UsageError(
            f"the checks run JAX, which {sys.executable} does not have: install jax, jax[cuda12] "
            "for NVIDIA GPUs, or jax[tpu]"
        )
    # By name: the checks may be deleted.
    doctor = import_module("jaxpipe.doctor.run")
    scope = _scope(arguments, doctor)
    checks = [c for c in doctor.CHECKS if (arguments.only or "") in c.item]
    if not checks:
        raise UsageError(
            f"no check has {arguments.only!r} in its title; titles are "
            f"{', '.join(c.item for c in doctor.CHECKS)}"
        )
    if arguments.output is not None and not arguments.output.lower().endswith((".html", ".htm")):
        raise UsageError(f"the report is HTML: {arguments.output} must end in .html")
    writes = not arguments.no_prices and scope.process == 0
    if writes:
        read_prices()  # the checks take minutes: a faulty file is refused before them
    page_path = None if arguments.output is None else file_path(arguments.output)
    with terminal.counting("checking") as progress:
        report = doctor.run(scope, minutes=arguments.minutes, checks=checks, tell=progress)
    facts: dict[str, Any] = asdict(report) | {"prices_file": None}
    if report.prices and writes:
        versions = next((line.measured for line in report.lines if line.item == "versions"), "")
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        path = write_prices(report.kind, report.prices, ", ".join(filter(None, [day, versions])))
        facts["prices_file"] = str(path)
        terminal.complain(f"wrote the prices of {report.kind} to {path}")
    if page_path is not None:
        page = import_module("jaxpipe.doctor.page")
        page_path.write_text(page.to_page(report), encoding="utf-8")
        terminal.complain(f"wrote {arguments.output}")
    if arguments.json:
        terminal.write(json.dumps(facts))
    else:
        header = ("item", "verdict", "measured", "expected", "what to do")
        rows = [(e.item, e.verdict.value, e.measured, e.expected, e.advice) for e in report.lines]
        terminal.table(header, rows, left=len(header))
    return bool(report.is_good)


def _scope(arguments: argparse.Namespace, doctor: Any) -> Any:
    """What the checks are given; UsageError for numbers that do not fit."""
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
    if faults:
        raise UsageError("; ".join(faults))
    return doctor.Scope(
        devices=arguments.devices,
        steps=arguments.steps,
        coordinator=arguments.coordinator,
        processes=arguments.processes,
        process=arguments.process,
    )
