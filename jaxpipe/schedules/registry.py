"""Name -> generator."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ScheduleError
from ..schedule import Schedule
from .basic import gpipe, no_pipelining, one_f_one_b


def _generators() -> dict[str, Callable[..., Schedule]]:
    return {"1f1b": one_f_one_b, "gpipe": gpipe, "no_pipelining": no_pipelining}


def names() -> tuple[str, ...]:
    """Every name that `build` accepts, sorted."""
    return tuple(sorted(_generators()))


def build(name: str, *, devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Make the table of a named schedule for P devices, M microbatches and V chunks a device."""
    generators = _generators()
    if name not in generators:
        raise ScheduleError(f"there is no schedule {name!r}; write one of {', '.join(names())}")
    if devices < 1 or microbatches < 1 or chunks != 1:
        raise ScheduleError(f"{name} needs devices >= 1, microbatches >= 1 and chunks == 1; got {devices}, {microbatches} and {chunks}")
    return generators[name](devices=devices, microbatches=microbatches)
