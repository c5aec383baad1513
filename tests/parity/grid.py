"""The full grid of parity, in one command.

python -m tests.parity.grid                  run what out/parity.jsonl does not have yet; `python -m
tests.parity.report` makes the table python -m tests.parity.grid --fresh          run everything
again python -m tests.parity.grid --only zbv       cases whose text holds this

Results are kept with a digest of the code that gave them: what another version of jaxpipe or
torch_ref gave is run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import asdict
from typing import Any

from .results import GRID, load, sources

SECONDS = 600


def main() -> int:
    """Run the grid; 1 if any case failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--only", default="", help="run only the cases whose text holds this")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--most",
        type=int,
        default=None,
        help="run at most so many cases, for instance to go on later",
    )
    options = parser.parse_args()
    virtual_devices()
    from .cases import VERSIONS, full_grid

    cases, _ = full_grid()
    if options.fresh:
        GRID.unlink(missing_ok=True)
    have = load(GRID)
    left = [c for c in cases if str(c) not in have and options.only in str(c)]
    # A run that is stopped leaves a fair sample: the MLP first, which has most tables and is
    # compiled soonest, in the order of a shuffle.
    random.Random(0).shuffle(left)
    left.sort(key=lambda c: (c.model != "mlp", c.model in VERSIONS, c.model))
    _run(left[: options.most], options.workers)
    failed = {text: entry for text, entry in load(GRID).items() if not entry["passed"]}
    for text, entry in failed.items():
        print(f"FAILED {text}: {entry}")
    return 1 if failed else 0


def virtual_devices() -> None:
    """Eight CPU devices and float64, before JAX is imported here or in a worker."""
    assert "jax" not in sys.modules
    flag = "--xla_force_host_platform_device_count=8"
    os.environ.update(
        JAX_PLATFORMS="cpu",
        JAX_ENABLE_X64="1",
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip(),
    )


def _run(cases: list[Any], workers: int) -> None:
    from rich.progress import track

    from .measure import measure
    from .workers import run_all

    GRID.parent.mkdir(parents=True, exist_ok=True)
    version = sources()
    with GRID.open("a") as out:
        for done in track(
            run_all(measure, cases, workers=workers, seconds=SECONDS),
            total=len(cases),
            description="parity",
        ):
            numbers = {} if done.result is None else asdict(done.result)
            passed = done.result is not None and done.result.passed
            entry = {
                "case": str(done.case),
                **asdict(done.case),
                **numbers,
                "passed": passed,
                "fault": done.fault,
            }
            out.write(
                json.dumps({**entry, "seconds": round(done.seconds, 1), "sources": version}) + "\n"
            )
            out.flush()


if __name__ == "__main__":
    raise SystemExit(main())
