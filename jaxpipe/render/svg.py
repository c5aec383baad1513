"""A Gantt chart as SVG: a row per device, hue by kind, shade by chunk, microbatch numbers."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from string import Template
from xml.etree.ElementTree import Element, SubElement, tostring

from ..engine.simulate import Timeline
from ..errors import JaxpipeError, typed
from ..table.kinds import KINDS, Kind, parts
from ..table.text import microbatch_label, parse_cell
from .chart import COLUMNS, PAD, Bar, BarPart, Box, Chart, costs_of, number

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


LIGHT, DARK = range(2)
# On a light page, and on a dark one.
COLOURS = {
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
# Likewise, the colours of the first and of the last chunk.
SHADES = {spec.kind: spec.shades for spec in KINDS if spec.shades is not None}
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
    light, dark = (style(page, chunks=chart.shades) for page in (LIGHT, DARK))
    both = f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
    sheet = {Theme.LIGHT: light, Theme.DARK: dark, Theme.AUTO: both}[theme]
    return draw(chart, critical_path=critical_path, sheet=sheet)


def shade(page: int, kind: Kind, *, chunk: int, chunks: int) -> str:
    """The colour of a kind's chunk, from the first chunk's to the last chunk's."""
    at = chunk / (chunks - 1) if chunks > 1 else 0.0
    one, other = (bytes.fromhex(colour[1:]) for colour in SHADES[kind][page])
    mixed = (round(a + (b - a) * at) for a, b in zip(one, other, strict=True))
    return f"#{bytes(mixed).hex()}"


def ink_on(colour: str) -> str:
    """White where its contrast is 3.5 to 1 (WCAG 2.2, 1.4.3: bold figures need 3), else black."""
    weighted = zip((0.2126, 0.7152, 0.0722), bytes.fromhex(colour[1:]), strict=True)
    luminance = sum(weight * (channel / 255) ** 2.2 for weight, channel in weighted)
    return "#ffffff" if 1.05 / (luminance + 0.05) >= 3.5 else "#10151c"


def style(page: int, *, chunks: int, within: str = "") -> str:
    """CSS for the classes that the drawing uses, each selector of drawings `within` another."""
    colours = {name: own[page] for name, own in COLOURS.items()}
    sheet = Template(_STYLE.strip("\n")).substitute(colours)
    rules = [line.split(" ", 1) for line in sheet.splitlines()]
    for kind in SHADES:
        for chunk in range(chunks):
            colour = shade(page, kind, chunk=chunk, chunks=chunks)
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
    for name, end in COLUMNS:
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
        for (_, end), value in zip(COLUMNS, values, strict=True):
            _text(root, "label", chart.x(chart.span) + end, middle, value, "end")


def _draw_numbers(root: Element, chart: Chart) -> None:
    """The microbatch's number in each bar that has room for it."""
    sizes: dict[float, list[tuple[str, float, float, str]]] = defaultdict(list)
    for bar in chart.bars:
        if bar.is_thin:
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
