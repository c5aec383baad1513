"""The arguments of a check: the devices and the numbers of runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

AT = "doctor-at: "


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Settings of a run of the doctor, the same for every check.

    Args:
        devices: of the pipe axis; None takes all that there are.
        steps: of each program whose results are compared.
        repeats: of what is timed.
        coordinator, processes, process: as `jax.distributed.initialize` takes them, where this is
            one of several processes.
    """

    devices: int | None = None
    steps: int = 200
    repeats: int = 5
    coordinator: str | None = None
    processes: int = 1
    process: int = 0

    def facts(self) -> dict[str, Any]:
        """The values for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Scope:
        """The scope that `facts` describe."""
        return cls(**facts)


def at(what: str) -> None:
    """Print the begin of a part, so that a hang can be located."""
    print(f"{AT}{what}", file=sys.stderr, flush=True)
