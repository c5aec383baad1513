"""Colours of the pictures: a hue for each kind of action, a shade for each chunk, for light and
dark pages.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

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

    page: str
    text: str
    muted: str
    line: str
    idle: str
    hatch: str
    transfer: str
    critical: str
    memory: str
    shades: dict[Kind, Shades]


LIGHT = Palette(
    page="#ffffff",
    text="#1b1f24",
    muted="#667080",
    line="#d5dae1",
    idle="#f0f2f5",
    hatch="#dde1e7",
    transfer="#8a94a3",
    critical="#d7263d",
    memory="#9aa5b4",
    shades={spec.kind: spec.light for spec in KINDS if spec.light is not None},
)
DARK = Palette(
    page="#12161c",
    text="#e6eaf0",
    muted="#95a0b0",
    line="#303845",
    idle="#1c222b",
    hatch="#2a323e",
    transfer="#76818f",
    critical="#ff5d6c",
    memory="#5f6c7d",
    shades={spec.kind: spec.dark for spec in KINDS if spec.dark is not None},
)


def shade(palette: Palette, kind: Kind, *, chunk: int, chunks: int) -> str:
    """The colour of a kind's chunk, from the first chunk's to the last chunk's."""
    first, last = (_rgb(c) for c in palette.shades[kind])
    at = chunk / (chunks - 1) if chunks > 1 else 0.0
    return _hex(tuple(a + (b - a) * at for a, b in zip(first, last, strict=True)))  # type: ignore[arg-type]


def ink_on(colour: str) -> str:
    """White where its contrast is at least 3.5 to 1 (bold figures need 3), else near-black.
    Source: WCAG 2.2, 1.4.3.
    """
    red, green, blue = (_linear(channel / 255) for channel in _rgb(colour))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#ffffff" if 1.05 / (luminance + 0.05) >= 3.5 else "#10151c"


def style(palette: Palette, *, chunks: int, scope: str) -> str:
    """CSS for the classes that the drawing uses, each selector under `scope`."""
    rules = [
        (
            "",
            "font-family:ui-sans-serif,system-ui,'Segoe UI','Helvetica "
            f"Neue',Arial,sans-serif;fill:{palette.text}",
        ),
        (".page", f"fill:{palette.page}"),
        (".title", "font-size:15px;font-weight:600"),
        (".muted", f"fill:{palette.muted};font-size:11.5px"),
        (".label", "font-size:12px"),
        (".axis", f"stroke:{palette.line};stroke-width:1;fill:none"),
        (".idle", f"fill:{palette.idle}"),
        (".hatch", f"stroke:{palette.hatch};stroke-width:1.5;fill:none"),
        (".transfer", f"fill:{palette.transfer}"),
        (".critical", f"stroke:{palette.critical};stroke-width:2;fill:none"),
        (".memory", f"fill:{palette.memory}"),
    ]
    for kind in palette.shades:
        for chunk in range(chunks):
            colour = shade(palette, kind, chunk=chunk, chunks=chunks)
            rules.append((f".{kind.name}{chunk}", f"fill:{colour}"))
            rules.append((f".on{kind.name}{chunk}", f"fill:{ink_on(colour)}"))
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
