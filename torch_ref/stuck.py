"""Says why a table cannot go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .table import Action, Cell, Place, Table


def why_stuck(
    table: Table, at: Sequence[int], lacks: Callable[[int, Cell], list[tuple[Action, Action]]]
) -> str:
    """The message: per device, the cell that it stands at, what the cell lacks, and where that is
    in the table.
    """
    lines = ["the table cannot go on; every device waits:"]
    for device, row in enumerate(table.rows):
        if at[device] == len(row):
            lines.append(f"  device {device} has done its whole row")
            continue
        place = Place(device, at[device])
        for action, need in lacks(device, row[at[device]]):
            lines.append(
                f"  {place}: {action} needs {need}, {_where_is(table.places.get(need), place)}"
            )
    lines.append("put every action after what it needs")
    return "\n".join(lines)


def _where_is(found: Place | None, place: Place) -> str:
    if found is None:
        return "which no device has"
    if found == place:
        return "which is the other half of the same pair"
    if found.device == place.device:
        return (
            f"which comes later in the same row (position {found.position}): it is used "
            "before it exists"
        )
    return f"which has not run yet ({found})"
