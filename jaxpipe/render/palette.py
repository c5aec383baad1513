"""Colours of the pictures: a hue for each kind of action, a shade for each chunk, for light and
dark pages.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from string import Template

from ..table.kinds import KINDS, Kind, Shades

RGB = tuple[float, float, float]


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
LIGHT = Palette(
    {name: light for name, (light, _) in _COLOURS.items()},
    {spec.kind: spec.light for spec in KINDS if spec.light is not None},
)
DARK = Palette(
    {name: dark for name, (_, dark) in _COLOURS.items()},
    {spec.kind: spec.dark for spec in KINDS if spec.dark is not None},
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


def shade(palette: Palette, kind: Kind, *, chunk: int, chunks: int) -> str:
    """The colour of a kind's chunk, from the first chunk's to the last chunk's."""
    first, last = (_rgb(c) for c in palette.shades[kind])
    at = chunk / (chunks - 1) if chunks > 1 else 0.0
    red, green, blue = (a + (b - a) * at for a, b in zip(first, last, strict=True))
    return _hex((red, green, blue))


def ink_on(colour: str) -> str:
    """White where its contrast is at least 3.5 to 1 (bold figures need 3), else near-black.
    Source: WCAG 2.2, 1.4.3.
    """
    red, green, blue = (_linear(channel / 255) for channel in _rgb(colour))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#ffffff" if 1.05 / (luminance + 0.05) >= 3.5 else "#10151c"


def style(palette: Palette, *, chunks: int, scope: str) -> str:
    """CSS for the classes that the drawing uses, each selector under `scope`."""
    sheet = Template(_STYLE.strip("\n")).substitute(palette.colours)
    rules = [line.split(" ", 1) for line in sheet.splitlines()]
    for kind in palette.shades:
        for chunk in range(chunks):
            colour = shade(palette, kind, chunk=chunk, chunks=chunks)
            rules.append([f".{kind.name}{chunk}", f"fill:{colour}"])
            rules.append([f".on{kind.name}{chunk}", f"fill:{ink_on(colour)}"])
    return "".join(
        f"{scope}{' ' if selector else ''}{selector}{{{body}}}" for selector, body in rules
    )


def _rgb(colour: str) -> RGB:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def _hex(rgb: RGB) -> str:
    return "#" + "".join(f"{round(channel):02x}" for channel in rgb)


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
