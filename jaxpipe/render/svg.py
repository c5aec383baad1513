"""A Gantt chart as SVG: a row per device, hue by kind, shade by chunk, microbatch numbers."""

from __future__ import annotations

import enum
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from string import Template
from typing import ClassVar, NamedTuple, TypeAlias
from xml.etree.ElementTree import Element, SubElement, tostring

from ..engine.simulate import Timeline
from ..errors import JaxpipeError, quoted, typed
from ..table.kinds import KINDS, Action, Kind, Shades, parts
from ..table.text import microbatch_label, parse_cell

Box: TypeAlias = tuple[float, float, float, float]  # x, y, width and height


class BarPart(enum.Enum):
    """Which part of a device's row a bar fills."""

    WHOLE = 0
    TOP = 1  # the forward of an overlapped pair
    BOTTOM = 2  # its backward
    STRIP = 3  # a transfer


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


def bars_of(timeline: Timeline) -> Iterator[Bar]:
    """Every action of the timeline, device by device, in the order of its row."""
    schedule, pairs = timeline.schedule, set(timeline.schedule.encoded.pairs.tolist())
    starts, ends, chunks = timeline.starts, timeline.ends, schedule.chunks.tolist()
    for i, (device, _, action) in enumerate(schedule.actions()):
        part = BarPart.WHOLE if action.kind.is_compute else BarPart.STRIP
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
_COLUMNS = (("idle", 54.0), ("peak act.", 122.0))
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
    right: ClassVar[float] = PAD + _COLUMNS[-1][1]  # the room right of the chart

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
        """Every bar with a length."""
        return tuple(bar for bar in bars_of(self.timeline) if bar.length > 0)

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
        lengths = sorted(b.length for b in self.bars if b.part is not BarPart.STRIP)
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
        }[bar.part]
        return self.x(bar.start), y + top, bar.length * self.unit, height

    @cached_property
    def legend(self) -> tuple[LegendEntry, ...]:
        """The meaning of the colours, in lines where the picture is narrow."""
        schedule = self.timeline.schedule
        kinds = sorted({bar.action.kind for bar in self.bars})
        swatches: list[tuple[tuple[str, ...], str]] = []
        for kind in (kind for kind in kinds if kind.is_compute):
            boxes = tuple(f"{kind.name}{shade}" for shade in range(self.shades))
            swatches.append((boxes, f"{kind.name}  {KINDS[kind].description}"))
        if not all(kind.is_compute for kind in kinds):
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


SCOPE = ".jaxpipe"
# With more bars than this (a large job has a hundred thousand), those of a colour share one path.
MOST_ELEMENTS = 4000

_HATCHED = "url(#jaxpipe-hatch)"
_DIGIT = 0.58  # width of a digit in ems, in the sans-serif fonts of the style


class Theme(enum.Enum):
    """Colours for a light page, for a dark one, or for whichever the reader's system prefers."""

    LIGHT = "light"
    DARK = "dark"
    AUTO = "auto"


@dataclass(frozen=True)
class Palette:
    """The colours of one theme."""

    colours: dict[str, str]
    shades: dict[Kind, Shades]  # the colours of the first and of the last chunk


# On a light page, and on a dark one.
_COLOURS = {
    "page": ("#ffffff", "#12161c"),
    "text": ("#1b1f24", "#e6eaf0"),
    "muted": ("#667080", "#95a0b0"),
    "line": ("#d5dae1", "#303845"),
    "idle": ("#f0f2f5", "#1c222b"),
    "hatch": ("#dde1e7", "#2a323e"),
    "transfer": ("#8a94a3", "#76818f"),
    "critical": ("#d7263d", "#ff5d6c"),
    "memory": ("#9aa5b4", "#5f6c7d"),
}
LIGHT, DARK = (
    Palette(
        {name: colours[page] for name, colours in _COLOURS.items()},
        {spec.kind: spec.shades[page] for spec in KINDS if spec.shades is not None},
    )
    for page in range(2)
)
# A class of the drawing and its style a line; $page is a colour.
_STYLE = """
 font-family:ui-sans-serif,system-ui,'Segoe UI','Helvetica Neue',Arial,sans-serif;fill:$text
.page fill:$page
.title font-size:15px;font-weight:600
.muted fill:$muted;font-size:11.5px
.label font-size:12px
.axis stroke:$line;stroke-width:1;fill:none
.idle fill:$idle
.hatch stroke:$hatch;stroke-width:1.5;fill:none
.transfer fill:$transfer
.critical stroke:$critical;stroke-width:2;fill:none
.memory fill:$memory
"""


@typed(JaxpipeError)
def to_svg(
    timeline: Timeline,
    *,
    title: str | None = None,
    width: float | None = None,
    theme: Theme = Theme.AUTO,
    memory: bool = False,
    critical_path: bool = False,
) -> str:
    """Draw a timeline as a Gantt chart and return the SVG's text.

    Args:
        timeline: what `jaxpipe.simulate` returned.
        title: the heading; schedule, devices and microbatches where it is None.
        width: in pixels; by default as wide as the microbatch numbers need, but at most 12000.
        theme: colours; AUTO follows the reader's system.
        memory: draw the activation memory held over time under each device's row.
        critical_path: outline a longest chain of actions.

    Raises:
        JaxpipeError: `width` leaves no room for the chart.

    >>> import jaxpipe as jp
    >>> to_svg(jp.simulate(jp.schedules.build("1f1b", devices=2, microbatches=2)))[:4]
    '<svg'
    """
    chart = Chart(timeline, width, memory, title)
    light, dark = (style(palette, chunks=chart.shades) for palette in (LIGHT, DARK))
    both = f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
    sheet = {Theme.LIGHT: light, Theme.DARK: dark, Theme.AUTO: both}[theme]
    return draw(chart, critical_path=critical_path, sheet=sheet)


def shade(palette: Palette, kind: Kind, *, chunk: int, chunks: int) -> str:
    """The colour of a kind's chunk, from the first chunk's to the last chunk's."""
    at = chunk / (chunks - 1) if chunks > 1 else 0.0
    one, other = (bytes.fromhex(colour[1:]) for colour in palette.shades[kind])
    mixed = (round(a + (b - a) * at) for a, b in zip(one, other, strict=True))
    return f"#{bytes(mixed).hex()}"


def ink_on(colour: str) -> str:
    """White where its contrast is 3.5 to 1 (WCAG 2.2, 1.4.3: bold figures need 3), else black."""
    weighted = zip((0.2126, 0.7152, 0.0722), bytes.fromhex(colour[1:]), strict=True)
    luminance = sum(weight * (channel / 255) ** 2.2 for weight, channel in weighted)
    return "#ffffff" if 1.05 / (luminance + 0.05) >= 3.5 else "#10151c"


def style(palette: Palette, *, chunks: int, within: str = "") -> str:
    """CSS for the classes that the drawing uses, each selector of drawings `within` another."""
    sheet = Template(_STYLE.strip("\n")).substitute(palette.colours)
    rules = [line.split(" ", 1) for line in sheet.splitlines()]
    for kind in palette.shades:
        for chunk in range(chunks):
            colour = shade(palette, kind, chunk=chunk, chunks=chunks)
            rules.append([f".{kind.name}{chunk}", f"fill:{colour}"])
            rules.append([f".on{kind.name}{chunk}", f"fill:{ink_on(colour)}"])
    named = ((f"{within}{SCOPE} {name}".rstrip(), body) for name, body in rules)
    return "".join(f"{name}{{{body}}}" for name, body in named)


def draw(chart: Chart, *, critical_path: bool = False, sheet: str = "") -> str:
    """The text of the whole picture, with a style sheet of its own or that of its page."""
    width, height = _px(chart.width), _px(chart.height)
    box = f"0 0 {width} {height}"
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": SCOPE[1:]})
    root.attrib |= {"role": "img", "aria-label": chart.title}
    root.attrib |= {"width": width, "height": height, "viewBox": box}
    if sheet:
        SubElement(root, "style").text = sheet
    _add_hatch(root)
    _add(root, "rect", "page", width=chart.width, height=chart.height, rx=8)
    _draw_heading(root, chart)
    _draw_rows(root, chart)
    _draw_bars(root, chart)
    _draw_numbers(root, chart)
    if chart.memory:
        _draw_memory(root, chart)
    if critical_path:
        _draw_critical_path(root, chart)
    _draw_axis(root, chart)
    _draw_legend(root, chart)
    return tostring(root, encoding="unicode")


def _draw_heading(root: Element, chart: Chart) -> None:
    """The title and the numbers of the whole step, and the names of the columns on the right."""
    for name, end in _COLUMNS:
        _text(root, "muted", chart.x(chart.span) + end, chart.top - 7, name, "end")
    if not chart.has_heading:
        return
    t, room = chart.timeline, chart.width - 2 * PAD
    _fit(_text(root, "title", PAD, 28, chart.title), 15, room)
    texts = [f"makespan {number(t.makespan)}", f"bubble {t.bubble:.1%}"]
    texts += [f"peak activations {max(t.peak_activations, default=0)}", costs_of(t)]
    _fit(_text(root, "muted", PAD, 47, "  ·  ".join(texts)), 11.5, room)


def _fit(line: Element, size: float, room: float) -> None:
    """Set a line in smaller type where the picture is narrow."""
    fits = room / (0.56 * max(len(line.text or ""), 1))
    if fits < size:
        line.set("style", f"font-size:{_px(fits)}px")


def _draw_rows(root: Element, chart: Chart) -> None:
    """Each device's name, its idle background, and its numbers."""
    t = chart.timeline
    length, makespan = chart.span * chart.unit, t.makespan or 1
    for device in range(t.schedule.num_devices):
        y = chart.y(device)
        box = (chart.left, y, length, chart.row)
        _rect(root, "idle", box, rx=3)
        _rect(root, "", box, rx=3, fill=_HATCHED)
        middle = y + chart.row / 2 + 4
        _text(root, "label", chart.left - 8, middle, f"device {device}", "end")
        values = f"{1 - t.busy[device] / makespan:.0%}", str(t.peak_activations[device])
        for (_, end), value in zip(_COLUMNS, values, strict=True):
            _text(root, "label", chart.x(chart.span) + end, middle, value, "end")


def _draw_numbers(root: Element, chart: Chart) -> None:
    """The microbatch's number in each bar that has room for it."""
    sizes: dict[float, list[tuple[str, float, float, str]]] = defaultdict(list)
    for bar in chart.bars:
        if bar.part is BarPart.STRIP:
            continue
        x, y, width, height = chart.box(bar)
        text = microbatch_label(bar.action.microbatch, chart.timeline.schedule.slices)
        size = min(12.0, height * 0.62, (width - 3) / (_DIGIT * len(text)))
        if size >= 7:
            # Few sizes, so that the numbers of a picture look alike.
            middle, base = x + width / 2, y + height / 2 + size * 0.36
            place = (f"on{_class(bar, chart.shades)}", middle, base, text)
            sizes[math.floor(size * 2) / 2].append(place)
    for size, labels in sizes.items():
        group = _add(root, "g")
        group.attrib |= {"font-size": _px(size), "text-anchor": "middle"}
        for label in labels:
            _text(group, *label)


def _draw_memory(root: Element, chart: Chart) -> None:
    """Under each row, the activation memory of its device over time; one scale for all devices."""
    most = max(chart.timeline.peak_memory, default=0) or 1
    depth = chart.row * 0.6 - 2
    for device in range(chart.timeline.schedule.num_devices):
        base = chart.y(device) + chart.row + depth + 2
        path = [f"M{_px(chart.left)} {_px(base)}"]
        for time, held in chart.timeline.memory(device):
            path.append(f"H{_px(chart.x(time))}V{_px(base - depth * held / most)}")
        _add(root, "path", "memory", d="".join(path) + f"V{_px(base)}z")


def _draw_critical_path(root: Element, chart: Chart) -> None:
    """Outline the actions of the critical path."""
    cells = map(parse_cell, chart.timeline.critical_path)
    wanted = {action for cell in cells for action in parts(cell)}
    boxes = (chart.box(bar) for bar in chart.bars if bar.action in wanted)
    inner = ((x + 1, y + 1, w - 2, h - 2) for x, y, w, h in boxes if w > 2)
    _add(root, "path", "critical", d="".join(map(_rectangle, inner)))


def _draw_axis(root: Element, chart: Chart) -> None:
    end, y = chart.x(chart.span), chart.bottom + 2
    ticks = _ticks(chart.timeline.makespan, most=chart.span * chart.unit / 56)
    marks = "".join(f"M{_px(chart.x(t))} {_px(y)}v5" for t in ticks)
    _add(root, "path", "axis", d=f"M{_px(chart.left)} {_px(y)}H{_px(end)}{marks}")
    for tick in ticks:
        _text(root, "muted", chart.x(tick), y + 18, number(tick), "middle")
    _text(root, "muted", chart.left - 8, y + 18, "time", "end")


def _draw_legend(root: Element, chart: Chart) -> None:
    """A swatch for each kind, divided into the shades of its chunks."""
    for boxes, text, x, y, cell in chart.legend:
        for chunk, kind in enumerate(boxes):
            box = (x, y, cell, 15.0)
            _rect(root, kind, box)
            if kind == "idle":
                _rect(root, "", box, fill=_HATCHED)
            if len(boxes) > 1:
                middle = x + cell / 2
                label = _text(root, f"on{kind}", middle, y + 11.5, str(chunk), "middle")
                label.set("font-size", "10")
            x += cell
        kind, gap = ("label", 7) if boxes else ("muted", 0)
        _text(root, kind, x + gap, y + 12, text)


def _draw_bars(root: Element, chart: Chart) -> None:
    """A rectangle for each bar, with a title that browsers show; of many bars, a path a colour."""
    merged = len(chart.bars) > MOST_ELEMENTS
    paths: dict[str, list[str]] = defaultdict(list)
    group = root if merged else _add(root, "g")
    for bar in chart.bars:
        kind, (x, y, width, height) = _class(bar, chart.shades), chart.box(bar)
        # A thin line of background separates neighbours.
        gap = min(1.0, width * 0.2)
        box = (x + gap / 2, y, width - gap, height)
        if merged:
            paths[kind].append(_rectangle(box))
            continue
        drawn = _rect(group, kind, box, rx=min(2, width / 4))
        SubElement(drawn, "title").text = describe(bar, chart.timeline.schedule.slices)
    for kind, pieces in sorted(paths.items()):
        _add(root, "path", kind, d="".join(pieces))


def describe(bar: Bar, slices: int = 1) -> str:
    """The tooltip of a bar."""
    stage, kind, microbatch = bar.action
    where = f", slice {microbatch % slices} of sequence {microbatch // slices}"
    return (
        f"{bar.action}: {KINDS[kind].description} of stage {stage}, microbatch {microbatch}"
        f"{where if slices > 1 else ''}\n"
        f"device {bar.device}, {number(bar.start)} to {number(bar.end)}"
    )


def _class(bar: Bar, shades: int) -> str:
    own = f"{bar.action.kind.name}{min(bar.chunk, shades - 1)}"
    return "transfer" if bar.part is BarPart.STRIP else own


def _ticks(end: float, *, most: float) -> list[float]:
    """Round times from 0 on, at most about `most` of them."""
    if end <= 0:
        return [0.0]
    rough = end / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [step * i for i in range(math.floor(end / step * 1.000001) + 1)]


def _add_hatch(root: Element) -> None:
    """The pattern of idle time."""
    attributes = {"id": "jaxpipe-hatch", "width": "6", "height": "6"}
    attributes |= {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    pattern = SubElement(SubElement(root, "defs"), "pattern", attributes)
    _add(pattern, "path", "hatch", d="M0 0V6")


def _add(parent: Element, tag: str, kind: str = "", **more: float | str) -> Element:
    values = {"class": kind} if kind else {}
    values |= {k: v if isinstance(v, str) else _px(v) for k, v in more.items()}
    return SubElement(parent, tag, values)


def _rect(parent: Element, kind: str, box: Box, **more: float | str) -> Element:
    sides = zip(("x", "y", "width", "height"), box, strict=True)
    return _add(parent, "rect", kind, **dict(sides), **more)


def _text(parent: Element, kind: str, x: float, y: float, text: str, anchor: str = "") -> Element:
    more = {"text-anchor": anchor} if anchor else {}
    element = _add(parent, "text", kind, x=x, y=y, **more)
    element.text = text
    return element


def _rectangle(box: Box) -> str:
    x, y, width, height = box
    return f"M{_px(x)} {_px(y)}h{_px(width)}v{_px(height)}h{_px(-width)}z"


def _px(value: float) -> str:
    """A number of pixels, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
