"""The user's file of prices, which `jaxpipe doctor` writes: seconds by name, by kind of device.

Only the outermost calls read it: `Pipeline`, `plan`, and the commands.  They pass on what it holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from platformdirs import user_config_path

from .errors import CostError, is_cost, quoted
from .lowering.target import NAMES

_AGAIN = "remove the file and run `jaxpipe doctor` again"


def prices_path() -> Path:
    """The file: `JAXPIPE_PRICES`, or prices.json in the user's folder of settings."""
    named = os.environ.get("JAXPIPE_PRICES")
    if named:
        return Path(named)
    return user_config_path("jaxpipe", appauthor=False, roaming=True) / "prices.json"


def read_prices() -> dict[str, dict[str, float | str]]:
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
    wrong = ["it must hold one object for each kind of device"]
    if isinstance(found, dict) and all(isinstance(each, dict) for each in found.values()):
        wrong = [
            f"{kind}: {name} is {quoted(each[name])}, not seconds"
            for kind, each in found.items()
            for name in NAMES
            if name in each and not is_cost(each[name])
        ]
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
