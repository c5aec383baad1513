"""The geometry of a Gantt chart: a row for each device, a bar for each action, a legend."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeAlias

from ..engine.simulate import Timeline
from ..errors import JaxpipeError, quoted
from ..table.kinds import BESIDE, KINDS, TRANSFERS, Action
from ..table.text import microbatch_label

Box: TypeAlias = tuple[float, float, float, float]  # x, y, width and height


class BarPart(enum.Enum):
    """Which part of a device's row a bar fills."""

    WHOLE = 0
    TOP = 1  # the forward of an overlapped pair
    BOTTOM = 2  # its backward
    STRIP = 3  # a transfer
    LINK = 4  # what runs on a link beside the other actions


class Bar(NamedTuple):
    """One action of one device, from `start` to `end`."""

    number: int  # in `schedule.encoded`
    device: int
    start: float
    end: float
    action: Action
    chunk: int
    part: BarPart

    @property
    def length(self) -> float:
        """The time that a bar takes."""
        return self.end - self.start

    @property
    def is_thin(self) -> bool:
        """Whether it is too thin for a number."""
        return self.part in (BarPart.STRIP, BarPart.LINK)


def bars_of(timeline: Timeline) -> Iterator[Bar]:
    """Every action of the timeline, device by device, in the order of its row."""
    schedule, pairs = timeline.schedule, set(timeline.schedule.encoded.pairs.tolist())
    starts, ends, chunks = timeline.starts, timeline.ends, schedule.chunks.tolist()
    for i, (device, _, action) in enumerate(schedule.actions()):
        part = BarPart.STRIP if action.kind in TRANSFERS else BarPart.WHOLE
        if action.kind in BESIDE:
            part = BarPart.LINK
        if i in pairs:
            part = BarPart.TOP
        elif i - 1 in pairs:
            part = BarPart.BOTTOM
        yield Bar(i, device, starts[i], ends[i], action, chunks[i], part)


def title_of(timeline: Timeline) -> str:
    """`1f1b: 4 devices, 8 microbatches, 2 chunks`."""
    s = timeline.schedule
    p, m = s.num_devices, s.num_microbatches
    parts = [f"{p} device{'s' * (p != 1)}", f"{m} microbatch{'es' * (m != 1)}"]
    parts += [f"{s.slices} slices a sequence"] if s.slices > 1 else []
    parts += [f"{s.num_chunks} chunks"] if s.num_chunks > 1 else []
    return f"{s.name or 'schedule'}: {', '.join(parts)}"


def number(value: float) -> str:
    """A time or a size for readers: a whole number, or four significant digits."""
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


# The columns of numbers, with their ends right of the chart.
COLUMNS = (("idle", 54.0), ("peak act.", 122.0))
PAD, AXIS = 16.0, 34.0
_GUTTER, _HEADING, _COLUMN_NAMES = 66.0, 48.0, 26.0
_MOST_SHADES = 8
_MAX_AUTO_WIDTH, MAX_WIDTH = 12000.0, 100_000.0
# What XML 1.0 forbids: control characters, halves of surrogate pairs, two code points.
_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


class LegendEntry(NamedTuple):
    """One entry of the legend: the classes of its swatches, its text, and its place."""

    boxes: tuple[str, ...]
    text: str
    x: float
    y: float
    cell: float


@dataclass(frozen=True)
class Chart:
    """The geometry of one picture, in pixels.  The title is drawn where it has a heading."""

    timeline: Timeline
    fixed_width: float | None = None
    memory: bool = False
    given_title: str | None = None
    has_heading: bool = True
    left: ClassVar[float] = PAD + _GUTTER  # where time 0 is
    right: ClassVar[float] = PAD + COLUMNS[-1][1]  # the room right of the chart

    def __post_init__(self) -> None:
        """JaxpipeError for a width or a title that no picture can have."""
        width, least = self.fixed_width, self.left + self.right + 100
        if width is not None and not least <= width <= MAX_WIDTH:
            why = "is too large" if width > least else "leaves no room for the chart"
            give = f"give {least:g} to {MAX_WIDTH:,.0f} pixels"
            raise JaxpipeError(f"width={quoted(width)} {why}; {give}")
        if _NOT_XML.search(self.title):
            why = "a picture cannot show; give a title without them"
            raise JaxpipeError(f"the title {quoted(self.title)} holds characters that {why}")

    @property
    def title(self) -> str:
        """The given title, or the schedule and its sizes."""
        return self.given_title or title_of(self.timeline)

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """Every bar with a length, each above those that it runs beside."""
        bars = (bar for bar in bars_of(self.timeline) if bar.length > 0)
        return tuple(sorted(bars, key=lambda bar: bar.part is BarPart.LINK))

    @property
    def top(self) -> float:
        """The top of the first device's row."""
        return _COLUMN_NAMES + (_HEADING if self.has_heading else 0)

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
        lengths = sorted(b.length for b in self.bars if not b.is_thin)
        # A tenth of the bars may be too short for a number: one stage does not stretch a picture.
        short = lengths[len(lengths) // 10] if lengths else self.span
        s = self.timeline.schedule
        digits = len(microbatch_label(max(s.num_microbatches - 1, 0), s.slices))
        least = 24.0 if self.span / short < 48 else 17.0
        wanted = max(least, 8.0 + 7.0 * digits) / short
        room = _MAX_AUTO_WIDTH - self.left - self.right
        return min(max(wanted, 420.0 / self.span), room / self.span)

    @cached_property
    def row(self) -> float:
        """Height of a device's row of bars."""
        devices = self.timeline.schedule.num_devices
        if devices > 32:
            return 16.0
        has_pairs = any(bar.part is BarPart.TOP for bar in self.bars)
        return (30.0 if devices <= 16 else 20.0) + 6.0 * has_pairs

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

    def box(self, bar: Bar) -> Box:
        """The place of a bar."""
        y, half = self.y(bar.device), self.row / 2
        top, height = {
            BarPart.WHOLE: (0.0, self.row),
            BarPart.TOP: (0.0, half),
            BarPart.BOTTOM: (half, half),
            BarPart.STRIP: (self.row - 4, 4.0),
            BarPart.LINK: (0.0, 5.0),
        }[bar.part]
        return self.x(bar.start), y + top, bar.length * self.unit, height

    @cached_property
    def legend(self) -> tuple[LegendEntry, ...]:
        """The meaning of the colours, in lines where the picture is narrow."""
        schedule = self.timeline.schedule
        kinds = sorted({bar.action.kind for bar in self.bars})
        swatches: list[tuple[tuple[str, ...], str]] = []
        for kind in (kind for kind in kinds if kind not in TRANSFERS):
            boxes = tuple(f"{kind.name}{shade}" for shade in range(self.shades))
            swatches.append((boxes, f"{kind.name}  {KINDS[kind].description}"))
        if not set(kinds).isdisjoint(TRANSFERS):
            swatches.append((("transfer",), "transfer"))
        swatches.append((("idle",), "idle"))
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
            entries.append(LegendEntry(boxes, text, x, y, cell))
            x += length + 14
        return tuple(entries)
