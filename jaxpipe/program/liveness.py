"""Until when the backward reads what a forward keeps."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields


class LastUse(enum.Enum):
    """The last action of a stage and microbatch that reads a value."""

    FORWARD = "F"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


@dataclass(frozen=True)
class Liveness:
    """Until when the stage's code needs what it keeps; `stage.py` reads it off the
    stage's jaxprs.
    """

    x: LastUse = LastUse.WEIGHT_GRAD
    cotangent: LastUse = LastUse.INPUT_GRAD
    first: LastUse = LastUse.INPUT_GRAD


def longest(needs: Sequence[Liveness]) -> Liveness:
    """Until when any of several kinds of stages needs what it keeps."""
    order = list(LastUse)
    return Liveness(
        *(max((getattr(n, f.name) for n in needs), key=order.index) for f in fields(Liveness))
    )
