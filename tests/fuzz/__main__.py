"""Random models, tables, meshes, settings and calls against plain JAX: `MODELS=500 SEED=0 python -m
tests.fuzz`.

Every case runs in a worker, so that an abort or a hang is a finding and not the end.  SHRINK=1
makes what is found small.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from tests.parity.workers import run_all

from .case import Case, draw
from .trial import work

SECONDS = 240.0  # of a case


def outcome(done: Any) -> tuple[str, str]:
    """What a case gave, an abort or a hang included."""
    return done.result if done.result is not None else ("abort", done.fault)


def sort_of(kind: str, text: str) -> str:
    """A finding without its numbers and names: what others of the same cause share."""
    return kind + " " + re.sub(r"'[^']*'|\d+(\.\d+)?(e[+-]?\d+)?", "#", text)[:110]


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one choice less."""
    for field in fields(case):
        value = getattr(case, field.name)
        if field.name != "seed" and field.default is not MISSING and value != field.default:
            yield replace(case, **{field.name: field.default})
        if field.name in ("calls", "frozen", "first_ops", "last_ops", "passes") and len(value) > 1:
            yield from (
                replace(case, **{field.name: value[:i] + value[i + 1 :]}) for i in range(len(value))
            )
    for i, ops in enumerate(case.ops):
        for j in range(len(ops)):
            yield replace(case, ops=(*case.ops[:i], ops[:j] + ops[j + 1 :], *case.ops[i + 1 :]))
    if case.microbatches > 2 and not case.table.isdigit():
        yield replace(case, microbatches=case.microbatches - 1)


def shrunk(case: Case, wanted: str, budget: int = 60) -> Case:
    """A simpler case with a finding of the same sort."""
    for small in smaller(case):
        if budget <= 0:
            break
        budget -= 1
        done = next(run_all(work, [small], workers=1, seconds=SECONDS))
        if sort_of(*outcome(done))[:60] == wanted[:60]:
            return shrunk(small, wanted, budget)
    return case


def main() -> int:
    """1 where anything was wrong."""
    count, seed = int(os.environ.get("MODELS", "100")), int(os.environ.get("SEED", "0"))
    workers = int(os.environ.get("WORKERS", "1"))
    print(
        f"MODELS={count} SEED={seed} WORKERS={workers}, at most {SECONDS:.0f} s a model", flush=True
    )
    found: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for done in run_all(
        work, [draw(seed + i) for i in range(count)], workers=workers, seconds=SECONDS
    ):
        kind, text = outcome(done)
        found[kind] += 1
        if found.total() % 25 == 0:
            print(f"{found.total()} of {count}: {dict(found)}", flush=True)
        if kind == "ok":
            continue
        seen[sort_of(kind, text)] += 1
        if seen[sort_of(kind, text)] > (1 if kind == "refused" else 5):
            continue
        case = (
            shrunk(done.case, sort_of(kind, text))
            if os.environ.get("SHRINK") and kind != "refused"
            else done.case
        )
        print(f"{kind} ({done.seconds:.0f} s): {case}\n    {text}", flush=True)
    print(f"{count} models from seed {seed}: {dict(found)}")
    for what, times in seen.most_common():
        print(f"  {times:4} {what}")
    return 1 if set(found) - {"ok", "refused"} else 0


if __name__ == "__main__":
    sys.exit(main())
