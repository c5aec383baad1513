"""A Gantt chart as SVG: one row per device, hue by kind, shade by chunk, microbatch numbers, idle
time hatched; and its colours, for light and dark pages.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from dataclasses import dataclass
from string import Template
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from ..engine.simulate import Timeline
from ..errors import JaxpipeError
from ..table.kinds import KINDS, Kind, Shades, parts
from ..table.text import parse_cell
from ..table.typed import typed
from .chart import COLUMNS, PAD, Bar, Chart, Part, costs_of, number, title_of

SCOPE = ".jaxpipe"
# With more bars than this, bars of one colour share one path instead of being elements of their own
# (with a hover title).
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
    """The colours of one theme; `shades[kind]` are the colours of the first and of the
    last chunk.
    """

    colours: dict[str, str]
    shades: dict[Kind, Shades]


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
        width: of the picture, in pixels; by default as wide as the microbatch numbers need, but at
            most 12000.
        theme: colours; AUTO follows the reader's system.
        memory: draw the activation memory held over time under each device's row.
        critical_path: outline a longest chain of actions.

    Raises:
        JaxpipeError: `width` leaves no room for the chart.

    >>> import jaxpipe as jp
    >>> to_svg(jp.simulate(jp.schedules.build("1f1b", devices=2, microbatches=2)))[:4]
    '<svg'
    """
    chart = Chart(timeline, width, memory, heading=title or title_of(timeline))
    root = draw(chart, critical_path=critical_path)
    light, dark = (style(p, chunks=chart.shades, scope=SCOPE) for p in (LIGHT, DARK))
    both = f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
    sheet = Element("style")
    sheet.text = {Theme.LIGHT: light, Theme.DARK: dark, Theme.AUTO: both}[theme]
    root.insert(0, sheet)
    return tostring(root, encoding="unicode")


def shade(palette: Palette, kind: Kind, *, chunk: int, chunks: int) -> str:
    """The colour of a kind's chunk, from the first chunk's to the last chunk's."""
    at = chunk / (chunks - 1) if chunks > 1 else 0.0
    ends = zip(*map(_rgb, palette.shades[kind]), strict=True)
    return "#" + bytes(round(a + (b - a) * at) for a, b in ends).hex()


def ink_on(colour: str) -> str:
    """White where its contrast is at least 3.5 to 1 (bold figures need 3), else near-black.
    Source: WCAG 2.2, 1.4.3.
    """
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in _rgb(colour))
    )
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#ffffff" if 1.05 / (luminance + 0.05) >= 3.5 else "#10151c"


def _rgb(colour: str) -> bytes:
    return bytes.fromhex(colour[1:])


def style(palette: Palette, *, chunks: int, scope: str) -> str:
    """CSS for the classes that the drawing uses, each selector under `scope`."""
    sheet = Template(_STYLE.strip("\n")).substitute(palette.colours)
    rules = [line.split(" ", 1) for line in sheet.splitlines()]
    for kind in palette.shades:
        for chunk in range(chunks):
            colour = shade(palette, kind, chunk=chunk, chunks=chunks)
            rules.append([f".{kind.name}{chunk}", f"fill:{colour}"])
            rules.append([f".on{kind.name}{chunk}", f"fill:{ink_on(colour)}"])
    return "".join(f"{scope} {name}".rstrip() + f"{{{body}}}" for name, body in rules)


def draw(chart: Chart, *, critical_path: bool) -> Element:
    """The whole picture."""
    width, height = _px(chart.width), _px(chart.height)
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": SCOPE[1:]})
    label, view = chart.heading or title_of(chart.timeline), f"0 0 {width} {height}"
    root.attrib |= {"role": "img", "aria-label": label}
    root.attrib |= {"width": width, "height": height, "viewBox": view}
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
    return root


def _draw_heading(root: Element, chart: Chart) -> None:
    """The title and the numbers of the whole step, and the names of the columns on the right."""
    x = chart.x(chart.span) + 10
    for name, width in COLUMNS:
        x += width
        _text(root, "muted", x, chart.top - 7, name, "end")
    if not chart.heading:
        return
    t, room = chart.timeline, chart.width - 2 * PAD
    _fitted(root, "title", 28, chart.heading, size=15, room=room)
    peak, costs = max(t.peak_activations, default=0), costs_of(t)
    summary = f"makespan {number(t.makespan)}  ·  bubble {t.bubble:.1%}  ·  peak activations {peak}"
    # Costs only where they fit; a page or a caption can give them, too.
    if 6.0 * (len(summary) + len(costs) + 5) < room:
        summary += f"  ·  {costs}"
    _fitted(root, "muted", 47, summary, size=11.5, room=room)


def _fitted(root: Element, kind: str, y: float, text: str, *, size: float, room: float) -> None:
    """A line of the heading, in smaller type where the picture is narrow."""
    line = _text(root, kind, PAD, y, text)
    fits = room / (0.56 * max(len(text), 1))
    if fits < size:
        line.set("style", f"font-size:{_px(fits)}px")


def _draw_rows(root: Element, chart: Chart) -> None:
    """Each device's name, its idle background, and its numbers."""
    t = chart.timeline
    length, makespan = chart.span * chart.unit, t.makespan or 1
    for device in range(t.schedule.num_devices):
        y = chart.y(device)
        _rect(root, "idle", chart.left, y, length, chart.row, rx=3)
        _rect(root, "", chart.left, y, length, chart.row, rx=3, fill=_HATCHED)
        middle = y + chart.row / 2 + 4
        _text(root, "label", chart.left - 8, middle, f"device {device}", "end")
        x = chart.x(chart.span) + 10
        idle = f"{1 - t.busy[device] / makespan:.0%}"
        values = (idle, str(t.peak_activations[device]))
        for (_, width), value in zip(COLUMNS, values, strict=True):
            x += width
            _text(root, "label", x, middle, value, "end")


def _draw_numbers(root: Element, chart: Chart) -> None:
    """The microbatch's number in each bar that has room for it."""
    sizes: dict[float, list[tuple[str, float, float, str]]] = defaultdict(list)
    for bar in chart.bars:
        if bar.part is Part.STRIP:
            continue
        (x, y, width, height), text = chart.box(bar), chart.label(bar.action.microbatch)
        size = min(12.0, height * 0.62, (width - 3) / (_DIGIT * len(text)))
        if size >= 7:
            # Few sizes, so that the numbers of a picture look alike.
            middle, base = x + width / 2, y + height / 2 + size * 0.36
            place = (f"on{_class(bar, chart.shades)}", middle, base, text)
            sizes[math.floor(size * 2) / 2].append(place)
    for size, labels in sizes.items():
        look: dict[str, Any] = {"font-size": size, "text-anchor": "middle"}
        group = _add(root, "g", **look)
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
    boxes = [chart.box(bar) for bar in chart.bars if bar.action in wanted]
    outlines = (_rectangle(x + 1, y + 1, w - 2, h - 2) for x, y, w, h in boxes if w > 2)
    _add(root, "path", "critical", d="".join(outlines))


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
        for chunk, box in enumerate(boxes):
            _rect(root, box, x, y, cell, 15)
            if box == "idle":
                _rect(root, "", x, y, cell, 15, fill=_HATCHED)
            if len(boxes) > 1:
                middle = x + cell / 2
                label = _text(root, f"on{box}", middle, y + 11.5, str(chunk), "middle")
                label.set("font-size", "10")
            x += cell
        kind, gap = ("label", 7) if boxes else ("muted", 0)
        _text(root, kind, x + gap, y + 12, text)


def _draw_bars(root: Element, chart: Chart) -> None:
    """A rectangle for each bar, with a title that browsers show on hovering; of many bars, one path
    for those of a colour: the table of a large job has a hundred thousand bars.
    """
    merged = len(chart.bars) > MOST_ELEMENTS
    paths: dict[str, list[str]] = defaultdict(list)
    group = root if merged else _add(root, "g")
    for bar in chart.bars:
        kind, (x, y, width, height) = _class(bar, chart.shades), chart.box(bar)
        # A thin line of background separates neighbours.
        gap = min(1.0, width * 0.2)
        if merged:
            paths[kind].append(_rectangle(x + gap / 2, y, width - gap, height))
            continue
        box = _rect(group, kind, x + gap / 2, y, width - gap, height, rx=min(2, width / 4))
        SubElement(box, "title").text = describe(bar, chart.timeline.schedule.slices)
    for kind, pieces in sorted(paths.items()):
        _add(root, "path", kind, d="".join(pieces))


def describe(bar: Bar, slices: int = 1) -> str:
    """The tooltip of a bar."""
    stage, kind, microbatch = bar.action
    name = KINDS[kind].description
    where = f", slice {microbatch % slices} of sequence {microbatch // slices}"
    return (
        f"{bar.action}: {name} of stage {stage}, microbatch {microbatch}"
        f"{where if slices > 1 else ''}\n"
        f"device {bar.device}, {number(bar.start)} to {number(bar.end)}"
    )


def _class(bar: Bar, shades: int) -> str:
    if bar.part is Part.STRIP:
        return "transfer"
    return f"{bar.action.kind.name}{min(bar.chunk, shades - 1)}"


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


def _add(parent: Element, tag: str, kind: str = "", **attributes: float | str) -> Element:
    values = {"class": kind} if kind else {}
    values |= {k: v if isinstance(v, str) else _px(v) for k, v in attributes.items()}
    return SubElement(parent, tag, values)


def _rect(
    parent: Element, kind: str, x: float, y: float, width: float, height: float, **more: float | str
) -> Element:
    return _add(parent, "rect", kind, x=x, y=y, width=width, height=height, **more)


def _text(parent: Element, kind: str, x: float, y: float, text: str, anchor: str = "") -> Element:
    more = {"text-anchor": anchor} if anchor else {}
    element = _add(parent, "text", kind, x=x, y=y, **more)
    element.text = text
    return element


def _rectangle(x: float, y: float, width: float, height: float) -> str:
    return f"M{_px(x)} {_px(y)}h{_px(width)}v{_px(height)}h{_px(-width)}z"


def _px(value: float) -> str:
    """A number of pixels, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
