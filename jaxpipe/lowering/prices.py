"""The times of a program besides the stages' work: three numbers that can be measured on the user's
machine, by kind of device in the file that `jaxpipe doctor` writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from ..errors import CostError, quoted
from ..table.typed import is_number

# Assumed seconds of a stage's forward: one layer of a model of some billion parameters.
FORWARD = 5e-3
GUESSES = "guessed; `jaxpipe doctor` measures them"
TIMES = ("predicate", "hop", "sent")  # of `Overheads`


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Times in seconds, or in the unit of the costs (`in_unit`).

    The defaults are guesses, none of them measured on a GPU.  `jaxpipe doctor` measures them and
    writes them into a file (`lowering.prices`).

    Args:
        predicate: the time of a block's predicate, true or false.  As a node of a
            CUDA graph it takes about as long as some kernel launches; on the host (`ON_HOST`) it
            takes a copy of the flag and a wait.
        hop: the time of a transfer that a device waits for: 32 MiB over one direction of NVLink on
            an H100.
        sent: the compute time that a block loses to a transfer that runs during it: memory
            bandwidth, and processors that copy.
        source: where the times come from.
    """

    predicate: float = 3e-6
    hop: float = 100e-6
    sent: float = 15e-6
    source: str = field(default=GUESSES, compare=False)

    def in_unit(self, seconds: float) -> Overheads:
        """The same times where one unit takes so many seconds."""
        return replace(self, **{name: getattr(self, name) / seconds for name in TIMES})

    def __str__(self) -> str:
        times = ", ".join(f"{name} {getattr(self, name) * 1e6:.3g} us" for name in TIMES)
        return f"{times} ({self.source})"

    @property
    def collective(self) -> float:
        """Time of a predicate around a collective action.  It is in no CUDA graph, and no block
        runs during it.
        """
        return self.predicate + self.hop


GUESSED = Overheads()
# Blocks that hold collectives (tensor parallelism) are in no CUDA graph, so the host decides: 10 to
# 20 us.
ON_HOST = Overheads(predicate=15e-6)
# A TPU decides by itself, between two operations of its own sequence: a guess.
TPU_PREDICATE = 1e-6
NO_OVERHEADS = Overheads(predicate=0.0, hop=0.0, sent=0.0)


VARIABLE = "JAXPIPE_PRICES"
# The price of a predicate that the host decides.  The other prices have the names of `Overheads`.
ON_THE_HOST = "predicate_on_host"
NAMES = (*TIMES, ON_THE_HOST)


def prices_path() -> Path:
    """The file: `JAXPIPE_PRICES`, or prices.json in the user's folder of settings."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return user_config_path("jaxpipe", appauthor=False, roaming=True) / "prices.json"


def read_prices() -> dict[str, dict[str, Any]]:
    """Kind of device -> seconds by name, and the source of the measurement; empty without a file.

    Raises:
        CostError: the file is not one of prices.
    """
    path = prices_path()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise CostError(f"{path} cannot be read as prices ({error}); {_AGAIN}") from error
    wrong = [
        f"{kind}: {name} is {quoted(each.get(name))}, not seconds"
        for kind, each in (found.items() if isinstance(found, dict) else [])
        for name in NAMES
        if isinstance(each, dict) and name in each and not _is_seconds(each[name])
    ]
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        wrong.append("it must hold one object for each kind of device")
    CostError.refuse(f"{path} does not hold prices; {_AGAIN}", wrong)
    return dict(found)


def write_prices(kind: str, seconds: Mapping[str, float], where: str) -> Path:
    """Put the prices of one kind of device into the file; other kinds and prices stay."""
    path, found = prices_path(), read_prices()
    found[kind] = {**found.get(kind, {}), **seconds, "measured": where}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def measured_prices(
    kind: str | None, guess: Overheads, *, on_host: bool = False
) -> Overheads | None:
    """The prices of a kind of device; None where none were measured.

    Args:
        kind: as `device.device_kind` says it; None is the one kind of NVIDIA GPU that the
            file holds.
        guess: for prices that were not measured.
        on_host: the host decides predicates.

    Raises:
        CostError: the file is not one of prices.
    """
    found = read_prices()
    if kind is None:
        kinds = [name for name in found if "NVIDIA" in name]
        kind = kinds[0] if len(kinds) == 1 else None
    prices = found.get(kind, {}) if kind is not None else {}
    names = dict(zip(TIMES, TIMES, strict=True)) | ({"predicate": ON_THE_HOST} if on_host else {})
    seconds = {time: float(prices[name]) for time, name in names.items() if name in prices}
    if not seconds:
        return None
    source = f"measured on {kind}" + (f", {prices['measured']}" if "measured" in prices else "")
    missing = [name for name in TIMES if name not in seconds]
    source += f"; guessed: {', '.join(missing)}" if missing else ""
    return replace(guess, **seconds, source=source)


_AGAIN = "remove the file and run `jaxpipe doctor` again"


def _is_seconds(value: Any) -> bool:
    return is_number(value) and 0 <= value < float("inf")
