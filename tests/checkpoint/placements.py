"""Pipelines over every kind of placement, for tests that need no step and so compile none."""

from __future__ import annotations

import jaxpipe as jp
from tests.checkpoint import runs


def uneven() -> jp.Schedule:
    """Four stages on three devices: one holds two, and they are not neighbours; all forwards, then
    all backwards.
    """
    homes = (0, 1, 1, 2)
    count = range(runs.MICROBATCHES)

    def row(device: int) -> str:
        mine = [s for s, home in enumerate(homes) if home == device]
        cells = [f"{s}F{m}" for m in count for s in mine] + [
            f"{s}B{m}" for m in count for s in reversed(mine)
        ]
        return ",".join(cells)

    return jp.check(jp.Schedule.from_csv("\n".join(map(row, range(3))), name="uneven"))


def pipelines() -> dict[str, jp.Pipeline]:
    """Loop, vee, bidirectional and uneven; all of four stages."""
    return {
        "1f1b": runs.pipeline("1f1b", 4),
        "interleaved_1f1b": runs.pipeline("interleaved_1f1b", 2),
        "zbv": runs.pipeline("zbv", 2),
        "dualpipe": runs.pipeline("dualpipe", 4),
        "uneven": runs.pipeline("uneven", 3, schedule=uneven()),
    }
