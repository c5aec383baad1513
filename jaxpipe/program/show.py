"""A program as text: pools, segments, and what each device does in each tick with which slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..table.encoded import Encoded
from ..table.kinds import Kind
from ..table.schedule import Schedule
from .pools import POOL_OF, Pool, PoolName
from .records import NOBODY, IntTable, TickRecord, map_fields
from .segments import Segment

# Ticks that are printed; the steady state is in the segments anyway.
MOST_TICKS = 64


def show(
    schedule: Schedule,
    segments: Sequence[Segment],
    ticks: TickRecord[IntTable],
    pools: Sequence[Pool],
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
        [_cell(schedule.encoded, ticks, at[tick], tick, d) for d in range(schedule.num_devices)]
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
    table: Encoded, ticks: TickRecord[IntTable], segment: Segment, tick: int, device: int
) -> str:
    """What one device does in one tick."""
    record: Any = map_fields(lambda table: int(table[tick, device]), ticks)
    template = segment.template(tick)
    parts = [_backward(record.backward, table), _forward(record.forward, table)]
    parts += [
        _share(share, device, training=not table.forward_only, leaves=table.defers_last)
        for share in record.shares
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


def _slots(*slots: tuple[PoolName, Any, bool]) -> str:
    return " ".join(f"{pool.letter}{slot}" for pool, slot, used in slots if used)


def _share(share: Any, device: int, *, training: bool, leaves: bool) -> str:
    if share.kind == NOBODY:
        return ""
    kind = Kind(share.kind)
    read = _slots(
        (PoolName.LAST, share.y, kind is Kind.L), (PoolName.FIRST, share.y, kind is Kind.G)
    )
    written = _slots(
        (PoolName.COTANGENT, share.out, kind is Kind.L and training),
        (PoolName.X, share.out, kind is Kind.E),
    )
    text = f"{device}{kind.name}{share.microbatch}"
    left = _slots((PoolName.SHARE, share.stash, leaves and kind is Kind.L))
    here = read if share.is_source else ""
    made = " ".join(part for part in (written if share.is_source else "", left) if part)
    return " ".join(part for part in (text, here + (f">{made}" if made else "")) if part)


def _forward(f: Any, table: Encoded) -> str:
    if f.chunk == NOBODY:
        return ""
    training, spread = not table.forward_only, table.spreads_last
    written = _slots(
        (PoolName.FIRST, f.first, bool(f.is_first and training and not table.spreads_first)),
        (PoolName.RESIDUAL_INPUT, f.residual_input, bool(f.keeps)),
        (PoolName.RESIDUAL_WEIGHT, f.residual_weight, bool(f.keeps)),
        (PoolName.X, f.out, bool(f.is_local)),
        (PoolName.LAST, f.out, bool(f.is_last and spread)),
        (PoolName.COTANGENT, f.out, bool(f.is_last and training and not spread)),
    )
    read = _slots((PoolName.X, f.x, True))
    return f"{f.stage}{Kind(f.kind).name}{f.microbatch} {read}" + (f">{written}" if written else "")


def _backward(b: Any, table: Encoded) -> str:
    if b.chunk == NOBODY:
        return ""
    if b.kind == Kind.H:
        return f"{b.stage}H{b.microbatch} {PoolName.SHARE.letter}{b.stash}"
    weight, split = b.kind == Kind.W, b.kind != Kind.B
    first = bool(b.is_first and not weight)
    read = _slots(
        (PoolName.X, b.x, True),
        (PoolName.RESIDUAL_INPUT, b.residual_input, not weight),
        (PoolName.RESIDUAL_WEIGHT, b.residual_weight, True),
        (PoolName.COTANGENT, b.cotangent, not weight),
        (PoolName.STASH, b.stash, weight),
        (PoolName.FIRST, b.first, first and not table.spreads_first),
    )
    written = _slots(
        (PoolName.STASH, b.stash, split and not weight),
        (PoolName.COTANGENT, b.out, bool(b.is_local and not weight)),
        (PoolName.FIRST, b.first, first and table.spreads_first),
    )
    return f"{b.stage}{Kind(b.kind).name}{b.microbatch} {read}" + (f">{written}" if written else "")
