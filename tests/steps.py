"""How many lines of jaxpipe a call runs: a measure of work that is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jaxpipe

HERE = str(Path(jaxpipe.__file__).parent)


class TooManyStepsError(Exception):
    """A call has run more lines than it may."""


def steps(call: Callable[[], object], *, most: float = float("inf")) -> int:
    """The number of lines of the package that a call runs, whatever it returns; TooManyStepsError
    as soon as they are more than `most`.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        count += 1
        if count > most:
            raise TooManyStepsError(f"more than {most:,} steps")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
