"""Where the commands of this folder keep what they found, a JSON object a line, until `report`
makes the table of it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out"
GRID, PEER, MUTATIONS, TRAINING = (
    OUT / f"parity{part}.jsonl" for part in ("", "_peer", "_mutations", "_training")
)
TABLE = ROOT / "benchmarks/results/parity.txt"
# The engines; a result of other sources says nothing of these.
ENGINES = ("jaxpipe", "torch_ref")


def sources() -> str:
    """A digest of the engines' code."""
    total = hashlib.sha256()
    for path in sorted(path for folder in ENGINES for path in (ROOT / folder).rglob("*.py")):
        total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()[:16]


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
