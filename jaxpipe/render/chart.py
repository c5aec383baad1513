"""The geometry of a Gantt chart: the place of every bar, row and legend entry."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from ..engine.simulate import Timeline
from ..errors import JaxpipeError, quoted
from ..table.kinds import KINDS, Action
from ..table.text import microbatch_label


class Part(enum.Enum):
    """Which part of a device's row a bar fills."""

    WHOLE = 0
    TOP = 1  # the forward of an overlapped pair
    BOTTOM = 2  # its backward
    STRIP = 3  # a transfer


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

    @property
    def length(self) -> float:
        """The time that a bar takes."""
        return self.end - self.start


def bars_of(timeline: Timeline) -> Iterator[Bar]:
    """Every action of the timeline, device by device, in the order of its row."""
    schedule, pairs = timeline.schedule, set(timeline.schedule.encoded.pairs.tolist())
    starts, ends, chunks = timeline.starts, timeline.ends, schedule.chunks.tolist()
    for i, (device, _, action) in enumerate(schedule.actions()):
        part = Part.WHOLE if action.kind.is_compute else Part.STRIP
        if i in pairs:
            part = Part.TOP
        elif i - 1 in pairs:
            part = Part.BOTTOM
        yield Bar(i, device, starts[i], ends[i], action, chunks[i], part)


def title_of(timeline: Timeline) -> str:
    """`1f1b: 4 devices, 8 microbatches, 2 chunks`."""
    s = timeline.schedule
    p, m = s.num_devices, s.num_microbatches
    parts = [f"{p} device{'s' if p != 1 else ''}", f"{m} microbatch{'es' if m != 1 else ''}"]
    parts += [f"{s.slices} slices a sequence"] if s.slices > 1 else []
    parts += [f"{s.num_chunks} chunks"] if s.num_chunks > 1 else []
    return f"{s.name or 'schedule'}: {', '.join(parts)}"


DEVICE_COLUMNS = (
    *("device", "busy", "idle", "warmup", "waiting", "drain"),
    *("peak activations", "peak memory"),
)


def device_rows(timeline: Timeline) -> list[tuple[str, ...]]:
    """A row for each device: busy, idle by cause, peaks."""
    t, rows = timeline, []
    for d, (busy, idle) in enumerate(zip(t.busy, t.idle, strict=True)):
        times = map(number, (busy, sum(idle), *idle))
        peaks = (str(t.peak_activations[d]), number(t.peak_memory[d]))
        rows.append((str(d), *times, *peaks))
    return rows


def number(value: float) -> str:
    """A time or a size, rounded for readers: whole numbers as they are, others to four significant
    digits.
    """
    if float(value).is_integer():
        return f"{value:.10g}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"


def costs_of(timeline: Timeline) -> str:
    """`F 1, B 2, transfer 0`: the costs of the kinds that occur, `varies` where stages differ."""
    schedule = timeline.schedule
    costs = timeline.costs.for_stages(schedule.num_stages)
    shown = {kind.name: costs.of(kind) for kind in sorted(schedule.encoded.kinds)}
    shown["transfer"] = costs.transfer
    return ", ".join(
        f"{name} {number(values[0]) if len(set(values)) == 1 else 'varies'}"
        for name, values in shown.items()
        if values is not None
    )


# The columns of numbers right of the chart, with their widths.
COLUMNS = (("idle", 44.0), ("peak act.", 68.0))
PAD = 16.0
AXIS = 34.0
_GUTTER, _HEADING, _COLUMN_NAMES = 66.0, 48.0, 26.0
_MOST_SHADES = 8
_MAX_AUTO_WIDTH, MAX_WIDTH = 12000.0, 100_000.0
# What XML 1.0 forbids: control characters, halves of surrogate pairs, two code points that are not
# characters.
_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def require_printable(heading: str) -> None:
    """JaxpipeError for a heading with characters that XML forbids."""
    if _NOT_XML.search(heading):
        why = "holds characters that a picture cannot show; give a title without them"
        raise JaxpipeError(f"the title {quoted(heading)} {why}")


class Entry(NamedTuple):
    """One entry of the legend: the classes of its swatches, its text, and its place."""

    boxes: tuple[str, ...]
    text: str
    x: float
    y: float
    cell: float


@dataclass(frozen=True)
class Chart:
    """The geometry of one picture, in pixels; without a heading where `heading` is ""."""

    timeline: Timeline
    fixed_width: float | None
    memory: bool
    heading: str
    left: ClassVar[float] = PAD + _GUTTER  # where time 0 is
    # the room right of the chart, for the numbers of each device
    right: ClassVar[float] = PAD + 10 + sum(width for _, width in COLUMNS)

    def __post_init__(self) -> None:
        """JaxpipeError for a `fixed_width` that leaves less than 100 pixels for time or is far too
        large, or for a heading that XML forbids.
        """
        width, least = self.fixed_width, self.left + self.right + 100
        if width is not None and not least <= width <= MAX_WIDTH:
            why = "is too large" if width > least else "leaves no room for the chart"
            give = f"give {least:g} to {MAX_WIDTH:,.0f} pixels"
            raise JaxpipeError(f"width={quoted(width)} {why}; {give}")
        require_printable(self.heading or title_of(self.timeline))

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """Every bar with a length."""
        return tuple(bar for bar in bars_of(self.timeline) if bar.length > 0)

    @property
    def top(self) -> float:
        """The top of the first device's row."""
        return _COLUMN_NAMES + (_HEADING if self.heading else 0)

    @cached_property
    def shades(self) -> int:
        """The number of shades of a hue; chunks beyond that share the last one."""
        return min(max(self.timeline.schedule.num_chunks, 1), _MOST_SHADES)

    @cached_property
    def span(self) -> float:
        """The length of the time axis in units of time, never 0."""
        return float(self.timeline.makespan) or 1.0

    @cached_property
    def unit(self) -> float:
        """Pixels per unit of time."""
        if self.fixed_width is not None:
            return (self.fixed_width - self.left - self.right) / self.span
        lengths = sorted(b.length for b in self.bars if b.part is not Part.STRIP)
        # A tenth of the bars may be too short for their number, so that one short stage does not
        # stretch the picture.
        short = lengths[len(lengths) // 10] if lengths else self.span
        digits = len(self.label(max(self.timeline.schedule.num_microbatches - 1, 0)))
        least = 24.0 if self.span / short < 48 else 17.0
        wanted = max(least, 8.0 + 7.0 * digits) / short
        room = _MAX_AUTO_WIDTH - self.left - self.right
        return min(max(wanted, 420.0 / self.span), room / self.span)

    def label(self, microbatch: int) -> str:
        """The number of a microbatch, or of its sequence and slice, as bars show it."""
        return microbatch_label(microbatch, self.timeline.schedule.slices)

    @cached_property
    def row(self) -> float:
        """Height of a device's row of bars."""
        devices = self.timeline.schedule.num_devices
        if devices > 32:
            return 16.0
        tall = any(bar.part is Part.TOP for bar in self.bars)
        return (30.0 if devices <= 16 else 20.0) + (6.0 if tall else 0.0)

    @property
    def pitch(self) -> float:
        """From one device's row to the next."""
        return self.row + 6 + (self.row * 0.6 if self.memory else 0)

    @property
    def width(self) -> float:
        """The width of the picture in pixels."""
        return self.left + self.span * self.unit + self.right

    @property
    def bottom(self) -> float:
        """The place of the axis."""
        return self.top + self.pitch * self.timeline.schedule.num_devices

    @property
    def height(self) -> float:
        """The height of the picture in pixels."""
        return self.legend[-1].y + 15 + PAD

    def x(self, time: float) -> float:
        """The horizontal place of a time."""
        return self.left + time * self.unit

    def y(self, device: int) -> float:
        """The top of a device's row."""
        return self.top + self.pitch * device

    def box(self, bar: Bar) -> tuple[float, float, float, float]:
        """x, y, width and height of a bar."""
        y, half = self.y(bar.device), self.row / 2
        top, height = {
            Part.WHOLE: (0.0, self.row),
            Part.TOP: (0.0, half),
            Part.BOTTOM: (half, half),
            Part.STRIP: (self.row - 4, 4.0),
        }[bar.part]
        return self.x(bar.start), y + top, bar.length * self.unit, height

    @cached_property
    def legend(self) -> tuple[Entry, ...]:
        """The meaning of the colours, each entry with its place: broken into lines where the
        picture is narrow.
        """
        schedule = self.timeline.schedule
        kinds = sorted({bar.action.kind for bar in self.bars})
        swatches: list[tuple[tuple[str, ...], str]] = []
        for kind in (kind for kind in kinds if kind.is_compute):
            boxes = tuple(f"{kind.name}{shade}" for shade in range(self.shades))
            swatches.append((boxes, f"{kind.name}  {KINDS[kind].description}"))
        if not all(kind.is_compute for kind in kinds):
            swatches.append((("transfer",), "transfer"))
        swatches += [(("idle",), "idle")]
        swatches += [(("memory",), "activations held")] if self.memory else []
        meaning = "direction" if schedule.placement.is_bidirectional else "chunk"
        text = f"number: {'microbatch' if schedule.slices == 1 else 'sequence.slice'}"
        swatches += [((), f"{text}, shade: {meaning}" if self.shades > 1 else text)]
        entries, x, line = [], self.left, 0
        for boxes, text in swatches:
            cell = 15.0 if len(boxes) > 1 else 22.0
            length = cell * len(boxes) + 7 + 6.2 * len(text)
            if x > self.left and x + length > self.width - PAD:
                x, line = self.left, line + 1
            y = self.bottom + AXIS + 6 + 22 * line
            entries.append(Entry(boxes, text, x, y, cell))
            x += length + 14
        return tuple(entries)
