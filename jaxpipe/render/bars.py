"""A timeline as bars, which all pictures draw."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from ..engine.timeline import Timeline
from ..table.action import Action, parts
from ..table.kinds import COMPUTE


class Part(enum.Enum):
    """Which part of a device's row a bar fills."""

    WHOLE = 0
    TOP = 1  # the forward of an overlapped pair
    BOTTOM = 2  # its backward
    STRIP = 3  # a transfer


_PAIR = (Part.TOP, Part.BOTTOM)


class Bar(NamedTuple):
    """One action of one device, from `start` to `end`; `number` is its number in
    `schedule.encoded`.
    """

    number: int
    device: int
    start: float
    end: float
    action: Action
    chunk: int
    part: Part


def bars_of(timeline: Timeline) -> Iterator[Bar]:
    """Every action of the timeline, device by device, in the order of its row."""
    chunk_of = [
        {stage: chunk for chunk, stage in enumerate(stages)}
        for stages in timeline.schedule.placement.stages_of
    ]
    times = zip(timeline.starts, timeline.ends, strict=True)
    # `schedule.encoded` numbers actions row by row, idle cells left out, a pair's forward before
    # its backward: this order.
    i = 0
    for device, row in enumerate(timeline.schedule.rows):
        for cell in row:
            halves = parts(cell)
            for half, action in enumerate(halves):
                part = (
                    _PAIR[half]
                    if len(halves) == 2
                    else Part.WHOLE
                    if action.kind.is_compute
                    else Part.STRIP
                )
                yield Bar(
                    i, device, *next(times), action, chunk_of[device].get(action.stage, 0), part
                )
                i += 1


def title_of(timeline: Timeline) -> str:
    """`1f1b: 4 devices, 8 microbatches, 2 chunks`."""
    s = timeline.schedule
    counts = [(s.num_devices, "device"), (s.num_microbatches, "microbatch")]
    words = [
        f"{n} {word}{'' if n == 1 else 'es' if word.endswith('h') else 's'}" for n, word in counts
    ]
    words += [f"{s.slices} slices a sequence"] if s.slices > 1 else []
    chunks = [f"{s.num_chunks} chunks"] if s.num_chunks > 1 else []
    return f"{s.name or 'schedule'}: {', '.join(words + chunks)}"


DEVICE_COLUMNS = (
    *("device", "busy", "idle", "warmup", "waiting", "drain"),
    *("peak activations", "peak memory"),
)


def device_rows(timeline: Timeline) -> list[tuple[str, ...]]:
    """A row for each device: busy, idle by cause, peaks."""
    t, rows = timeline, []
    for d, (busy, idle) in enumerate(zip(t.busy, t.idle, strict=True)):
        times = map(number, (busy, sum(idle), *idle))
        rows.append((str(d), *times, str(t.peak_activations[d]), number(t.peak_memory[d])))
    return rows


def number(value: float) -> str:
    """A time or a size, rounded for readers: whole numbers as they are, others to four significant
    digits.
    """
    return (
        f"{value:.10g}"
        if float(value).is_integer()
        else f"{value:.4g}"
        if abs(value) < 1000
        else f"{value:.1f}"
    )


def costs_of(timeline: Timeline) -> str:
    """`F 1, B 2, transfer 0`: the costs of the kinds that occur, `varies` where stages differ."""
    schedule, kinds = timeline.schedule, set(timeline.schedule.encoded.kind.tolist())
    costs = timeline.costs.for_stages(schedule.num_stages)
    shown = [
        (kind.name, values)
        for kind in COMPUTE
        if kind in kinds and (values := costs.of(kind)) is not None
    ]
    return ", ".join(
        f"{name} {_one(values)}" for name, values in [*shown, ("transfer", costs.transfer)]
    )


def _one(values: tuple[float, ...]) -> str:
    return number(values[0]) if len(set(values)) == 1 else "varies"
