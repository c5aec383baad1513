"""Programs with one entry of their shares broken."""

from dataclasses import replace


def changed(program, **fields):
    """The program with other entries of its shares."""
    (share,) = program.ticks.collectives
    new = {name: change(getattr(share, name).copy()) for name, change in fields.items()}
    slots = share.slots | {name: new.pop(name) for name in share.slots.keys() & new.keys()}
    broken = replace(share, **new, slots=slots)
    return replace(program, ticks=replace(program.ticks, collectives=(broken,)))


def put(tick, device, value):
    def change(table):
        table[tick, device] = value
        return table

    return change
