"""Golden texts: what a person looked at once and found right.  `UPDATE_GOLDENS=1 pytest ...` writes
them again.
"""

from __future__ import annotations

import os
from pathlib import Path

GOLDENS = Path(__file__).parent / "goldens"


def check_golden(name: str, text: str) -> None:
    """Compare with tests/goldens/NAME, or write it where UPDATE_GOLDENS is set."""
    path = GOLDENS / name
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text)
    assert text == path.read_text(), (
        f"{name} changed; look at the difference, then run again with UPDATE_GOLDENS=1 if it is "
        "right"
    )
