"""A program as text: pools, segments, and what each device does in each tick with which slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..table.effects import Access, Effect
from ..table.kinds import Kind
from ..table.schedule import Schedule
from .pools import POOL_OF, Pool
from .records import NOBODY, IntTable, TickRecord
from .segments import Segment

# Ticks that are printed; the steady state is in the segments anyway.
MOST_TICKS = 64


def show(
    schedule: Schedule,
    segments: Sequence[Segment],
    ticks: TickRecord[IntTable],
    pools: Sequence[Pool],
    effects: Callable[[Kind], Sequence[Effect]],
    *,
    most_ticks: int = MOST_TICKS,
) -> str:
    """The whole program on a screen, where its ticks fit on one.

    A cell is the action, the slots that it reads, and after ">" those that it writes: `2F3 x1>w0`
    is the forward of microbatch 3 through stage 2, which reads slot 1 of pool x and keeps residuals
    in slot 0 of pool w.  `<x2` is what arrives in slot 2 at the end of the tick, `i0 w0>h3` what
    goes to the host's memory and `h3>i1 w1` what comes back from it.
    """
    num_ticks = len(ticks.forward.kind)
    name = schedule.name or "schedule"
    shape = (
        f"{schedule.num_devices} devices, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches"
    )
    lines = [f"program of {name}: {shape}, {num_ticks} ticks", *(f"pool {pool}" for pool in pools)]
    lines += map(str, segments)
    shown = min(num_ticks, most_ticks)
    at = {
        tick: segment
        for segment in segments
        for tick in range(segment.start, min(segment.stop, shown))
    }
    cells = [
        [_cell(effects, ticks, at[tick], tick, d) for d in range(schedule.num_devices)]
        for tick in range(shown)
    ]
    widths = [
        max([len(f"device {d}"), *(len(row[d]) for row in cells)])
        for d in range(schedule.num_devices)
    ]
    lines.append(
        "tick | " + " | ".join(f"device {d}".ljust(w) for d, w in enumerate(widths)).rstrip()
    )
    for tick, row in enumerate(cells):
        lines.append(
            f"{tick:4} | "
            + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        )
    if shown < num_ticks:
        lines.append(f" ... | {num_ticks - shown} more ticks")
    return "\n".join(lines)


def _cell(
    effects: Callable[[Kind], Sequence[Effect]],
    ticks: TickRecord[IntTable],
    segment: Segment,
    tick: int,
    device: int,
) -> str:
    """What one device does in one tick."""
    record: Any = ticks.map(lambda table: int(table[tick, device]))
    template = segment.template(tick)
    parts = [
        _action(each, effects(Kind(each.kind)), device)
        for each in (*record.collectives, record.backward, record.forward)
        if each.kind != NOBODY
    ]
    if template.blocks and template.blocks[0].block.runs_forward:
        parts.reverse()
    for arrival, permute in zip(record.arrivals, template.permutes, strict=False):
        if arrival.takes and any(target == device for _, target in permute.pairs):
            parts.append(
                f"<{POOL_OF[permute.payload].letter}{arrival.slot}"
                + (f"+{permute.delay}" if permute.delay else "")
            )
    for move in record.moves:
        parts += (
            [f"i{move.from_input} w{move.from_weight}>h{move.to_host}"]
            if move.stores != NOBODY
            else []
        )
        parts += (
            [f"h{move.from_host}>i{move.to_input} w{move.to_weight}"]
            if move.fetches != NOBODY
            else []
        )
    return " ".join(part for part in parts if part)


def _action(record: Any, effects: Sequence[Effect], device: int) -> str:
    """An action, what it reads, and after ">" what it writes."""
    happen = [e for e in effects if e.field and (e.when is None or getattr(record, e.when))]
    read = {e.field: e for e in happen if e.access is Access.READ}
    # What `first` makes inside of a forward is that forward's input.
    written = [e for e in happen if e.access is not Access.READ and e.field not in read]
    before, after = (
        " ".join(f"{e.place.letter}{getattr(record, e.field)}" for e in those)
        for those in (read.values(), written)
    )
    slots = before + (f">{after}" if after else "")
    name = f"{getattr(record, 'stage', device)}{Kind(record.kind).name}{record.microbatch}"
    return f"{name} {slots}".rstrip()
