"""Where the commands of this folder keep what they found, a JSON object a line, until `report`
makes the table of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.engines import engines

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out"
GRID, PEER, MUTATIONS, TRAINING = (
    OUT / f"parity{part}.jsonl" for part in ("", "_peer", "_mutations", "_training")
)
TABLE = ROOT / "benchmarks/results/parity.txt"


def sources() -> str:
    """A digest of the engines' code."""
    return engines()


def load(path: Path) -> dict[str, dict[str, Any]]:
    """The results that these sources gave, by case; of a case that was run twice, the later one."""
    if not path.exists():
        return {}
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return {entry["case"]: entry for entry in entries if entry.get("sources") == sources()}


def keep(path: Path, case: str, **found: Any) -> None:
    """Add a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(json.dumps({"case": case, **found, "sources": sources()}) + "\n")
