"""What waits in the host's memory."""

from __future__ import annotations

import enum


class Offload(enum.Enum):
    """What is kept in the host's memory."""

    NOTHING = "nothing"
    # what forwards keep for their backwards, where these are some ticks away
    RESIDUALS = "residuals"
