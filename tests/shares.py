"""Programs with one entry of their shares broken."""

from dataclasses import replace


def changed(program, **fields):
    """The program with other entries of its shares."""
    (share,) = program.ticks.collectives
    new = {name: change(getattr(share, name).copy()) for name, change in fields.items()}
    return replace(program, ticks=replace(program.ticks, collectives=(share.changed(**new),)))


def put(tick, device, value):
    def change(table):
        table[tick, device] = value
        return table

    return change
