"""The full grid of parity, in one command, and the table of its results.

python -m tests.parity.grid                  run what out/parity.jsonl does not have yet, then write docs/parity.md
python -m tests.parity.grid --fresh          run everything again
python -m tests.parity.grid --only zbv       cases whose text holds this, without writing the table
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

_HEAD = """\
Written by `python -m tests.parity.grid`.  Each case builds a table, runs it in jaxpipe's lowered program on virtual CPU
devices and in `torch_ref`, and compares with the un-pipelined oracle (`tests/oracle.py`, plain JAX, float64).  An error is
the largest difference of an array's entries, relative to the array's largest entry: over the loss and every gradient (*step*),
over the losses of each microbatch from `Pipeline.losses` (*losses*), and over all of these in `torch_ref` (*torch_ref*)."""
RESULTS, TABLE = Path("out/parity.jsonl"), Path("docs/parity.md")
SECONDS = 600


def main() -> int:
    """Run the grid; 1 if any case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--only", default="", help="run only the cases whose text holds this")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--most", type=int, default=None, help="run at most so many cases, for instance to go on later")
    options = parser.parse_args()
    _virtual_devices()
    from .cases import full_grid

    cases, undefined = full_grid()
    if options.fresh:
        RESULTS.unlink(missing_ok=True)
    have = _load()
    left = [c for c in cases if str(c) not in have and options.only in str(c)][: options.most]
    _run(left, options.workers)
    have = _load()
    failed = [text for text, entry in have.items() if not entry["passed"]]
    for text in failed:
        print(f"FAILED {text}: {have[text]}")
    if not options.only and all(str(c) in have for c in cases):
        TABLE.write_text(_report([have[str(c)] for c in cases], len(undefined)))
        print(f"wrote {TABLE}")
    return 1 if failed else 0


def _virtual_devices() -> None:
    """Eight CPU devices and float64, before JAX is imported here or in a worker."""
    assert "jax" not in sys.modules
    flag = "--xla_force_host_platform_device_count=8"
    os.environ.update(JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip())


def _load() -> dict[str, dict[str, Any]]:
    if not RESULTS.exists():
        return {}
    entries = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {entry["case"]: entry for entry in entries}


def _run(cases: list[Any], workers: int) -> None:
    from rich.progress import track

    from .measure import measure
    from .workers import run_all

    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as out:
        for done in track(run_all(measure, cases, workers=workers, seconds=SECONDS), total=len(cases), description="parity"):
            numbers = {} if done.result is None else asdict(done.result)
            passed = done.result is not None and done.result.passed
            entry = {"case": str(done.case), **asdict(done.case), **numbers, "passed": passed, "fault": done.fault}
            out.write(json.dumps({**entry, "seconds": round(done.seconds, 1)}) + "\n")
            out.flush()


def _report(entries: list[dict[str, Any]], undefined: int) -> str:
    """The results as Markdown."""
    import jax
    import torch

    failed = [e for e in entries if not e["passed"]]
    exact = [e for e in entries if e["dtype"] == "float64"]
    lines = [
        "# Parity: one table, several engines, the same numbers",
        "",
        _HEAD,
        "",
        f"- cases: {len(entries)}, failed: {len(failed)}; combinations without such a table: {undefined}",
        f"- P in 1, 2, 4, 8; V in 1, 2, 3; M in 1, 2, 3, P, 2P, 4P + 1; jax {jax.__version__}, torch {torch.__version__}",
        "- limits: float64 1e-12; float32 and bfloat16 as derived in `tests/parity/tolerance.py` (both against the float64 oracle)",
        f"- time: {sum(e['seconds'] for e in entries) / 60:.0f} minutes of one process",
        "",
        "## float64, by schedule",
        "",
        *_rows(exact, "schedule"),
        "",
        "## float64, by model",
        "",
        *_rows(exact, "model"),
        "",
        "## The MLP in lower precision, by schedule",
        "",
    ]
    for dtype in ("float32", "bfloat16"):
        some = [e for e in entries if e["dtype"] == dtype]
        lines += [
            f"{dtype} (limits {min(e['limit'] for e in some):.1e} to {max(e['limit'] for e in some):.1e})",
            "",
            *_rows(some, "dtype"),
            "",
        ]
    lines += [f"FAILED {e['case']}: {e['fault'] or e}" for e in failed]
    return "\n".join(lines).rstrip() + "\n"


def _rows(entries: list[dict[str, Any]], key: str) -> list[str]:
    groups = defaultdict(list)
    for entry in entries:
        groups[entry[key]].append(entry)
    rows = [f"| {key} | cases | failed | step | losses | torch_ref |", "|---|---|---|---|---|---|"]
    for name, group in sorted(groups.items()):
        worst = [max((e.get(k, float("inf")) for e in group), default=0.0) for k in ("step", "losses", "torch")]
        failed = sum(not e["passed"] for e in group)
        rows.append(f"| {name} | {len(group)} | {failed} | " + " | ".join(f"{w:.1e}" for w in worst) + " |")
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
