"""`check`: every rule that a table must obey; the error lists all broken rules and marks their
cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ScheduleError, Violation, quoted
from .activations import Release, live_activations
from .grid import grid
from .run_order import Transfers
from .schedule import Schedule
from .typed import typed

# An error's text stays readable: the rest is in `.violations`.
_MOST_SHOWN, MOST_COLUMNS = 100, 60


@typed()
def check(
    schedule: Schedule,
    *,
    transfers: Transfers = Transfers.RENDEZVOUS,
    max_activations: int | Sequence[int] | None = None,
    release: Release = Release.WEIGHT_GRAD,
) -> Schedule:
    """Return the schedule if it is valid, or raise ScheduleError with every broken rule in
    `.violations`.

    The rules are named range, duplicate, completeness, placement, order, slice, reverse, overlap,
    transfer, deadlock and memory.  The error shows the grid with the cells marked
    `<-- ERROR HERE`; a deadlock is shown as the cycle of devices that wait for each other.

    With several slices a sequence, forwards of a sequence run in the order of its slices on every
    stage (slice), and backwards in reverse order (reverse).

    Args:
        schedule: the table, with or without SEND and RECV.
        transfers: how SEND and RECV behave where it runs.  RENDEZVOUS is the strictest: a table
            that cannot deadlock there cannot deadlock anywhere.  It makes no difference to a table
            without SEND and RECV.
        max_activations: cap on the activations (stage and microbatch pairs between F and B or W)
            that a device may hold at once; one number, or one for each device.
        release: whether activations die at W (the default) or already at I, where the backward is
            split.

    Raises:
        ScheduleError: a rule is broken.

    >>> import jaxpipe as jp
    >>> s = jp.schedules.build("1f1b", devices=4, microbatches=8)
    >>> jp.check(s, max_activations=4) is s
    True
    """
    found = schedule.violations_under(transfers)
    if max_activations is not None and not schedule.encoded.too_sparse:
        found = (*found, *_over_cap(schedule, max_activations, release))
    if not found:
        return schedule
    name = f"schedule {schedule.name!r}" if schedule.name else "the schedule"
    head = f"{name} breaks {len(found)} rule{'s' if len(found) > 1 else ''}:"
    raise ScheduleError(report(schedule, found, head, most=_MOST_SHOWN), found)


def _over_cap(schedule: Schedule, cap: int | Sequence[int], release: Release) -> list[Violation]:
    """The rule of memory: one violation for each device that exceeds its cap, at the first action
    that does.
    """
    table = schedule.encoded
    caps = list(cap) if isinstance(cap, Sequence) else [cap] * table.num_devices
    if len(caps) != table.num_devices:
        return [
            Violation(
                "memory",
                f"max_activations has {len(caps)} entries for {table.num_devices} devices; give "
                "one number, or one for each device",
            )
        ]
    live = live_activations(table, release)
    found = []
    for device, most in enumerate(caps):
        held = live[table.first[device] : table.first[device + 1]]
        over = np.flatnonzero(held > most)
        if not len(over):
            continue
        number = table.first[device] + int(over[0])
        message = (
            f"device {device} may hold {quoted(most)} activations, but holds "
            f"{held[over[0]]} while {table.text(number)} runs"
        )
        found.append(
            Violation("memory", f"{message} and {held.max()} at its peak", *table.cell_of(number))
        )
    return found


def report(
    schedule: Schedule, found: Sequence[Violation], head: str, *, most: int | None = None
) -> str:
    """All violations (or the first ones) and the grid with their cells marked."""
    lines = [head, *(f"  {violation}" for violation in found[:most])]
    if most is not None and len(found) > most:
        lines.append(f"  ... and {len(found) - most} more (all are in .violations)")
    marked = {
        (v.device, v.position) for v in found if v.device is not None and v.position is not None
    }
    marked |= {cell for v in found for cell in v.others}
    picture = grid(schedule.rows, marked=marked, most_columns=MOST_COLUMNS, slices=schedule.slices)
    return "\n".join([*lines, picture])
