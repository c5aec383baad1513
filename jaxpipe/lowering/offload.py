"""Which residuals wait in the host's memory: those that live long."""

from __future__ import annotations

import enum

from ..table.activations import LEAST_AWAY
from ..table.encoded import BoolArray, IntArray


class Offload(enum.Enum):
    """What is kept in the host's memory."""

    NOTHING = "nothing"
    # what forwards keep for their backwards, where these are some ticks away
    RESIDUALS = "residuals"


def away(made: IntArray, read: IntArray) -> BoolArray:
    """Which values, made and first read in these ticks, wait on the host: those that live long (Wan
    et al. 2025, "PipeOffload").
    """
    found: BoolArray = read - made >= LEAST_AWAY
    return found
