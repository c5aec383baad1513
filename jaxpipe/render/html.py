"""A timeline as one self-contained page: the chart with tooltips, and all numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from string import Template

from ..engine.simulate import COLUMNS, Timeline
from ..errors import JaxpipeError
from ..table.kinds import KIND_NAMES, KINDS
from ..table.typed import typed
from . import svg

# Characters of the table that a page shows; a longer one would slow the page down, and `--format
# csv` writes it too.
_MOST_TEXT = 200_000
_LEAST_WIDTH = 101  # pixels for time


@typed(JaxpipeError)
def to_html(
    timeline: Timeline,
    *,
    title: str | None = None,
    width: float | None = None,
    over: Timeline | None = None,
) -> str:
    """Draw a timeline as one self-contained HTML page: chart, tooltips, zoom, numbers, the table;
    light and dark.

    Args:
        timeline: what `jaxpipe.simulate` returned.
        title: the heading; schedule, devices and microbatches where it is None.
        width: of the chart at zoom 1, in pixels, as in `to_svg`.
        over: what was planned, where the timeline is that of a run: drawn below at the same scale,
            with where time was lost.

    Raises:
        JaxpipeError: `width` leaves no room for the chart.
        ScheduleError: `over` is of another table.

    >>> import jaxpipe as jp
    >>> to_html(jp.simulate(jp.schedules.build("1f1b", devices=2, microbatches=2)))[:15]
    '<!DOCTYPE html>'
    """
    chart = svg.Chart(timeline, width, memory=True, given_title=title, has_heading=False)
    csv = timeline.schedule.to_csv()
    left_out = f"The table has {len(csv):,} characters; write it with --format csv."
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return Template(page).substitute(
        title=escape(chart.title),
        style=_styles(chart.shades),
        chart=svg.draw(chart, critical_path=True),
        **_numbers(timeline),
        over="" if over is None else _over(timeline, over, chart),
        devices=_devices(timeline),
        costs=escape(svg.costs_of(timeline)),
        table=escape(csv) if len(csv) <= _MOST_TEXT else left_out,
        # "<" is escaped so that no name can end the script element.
        data=json.dumps(_data(chart), separators=(",", ":")).replace("<", "\\u003c"),
    )


def _over(ran: Timeline, planned: Timeline, chart: svg.Chart) -> str:
    """The plan's chart in the scale of the run's (as far as it can be drawn), the sentence and
    tables that compare them.
    """
    compared = ran.over(planned)
    free = svg.Chart(planned, memory=True, has_heading=False)
    wanted = free.left + max(free.span * chart.unit, _LEAST_WIDTH) + free.right
    below = replace(free, fixed_width=min(wanted, svg.MAX_WIDTH))
    scale = "" if math.isclose(below.unit, chart.unit) else " (at another scale)"
    losses = [(escape(cause), svg.number(time)) for cause, time in compared.losses]
    return (
        f"<h2>Planned{scale}</h2><p>{escape(compared.sentence)}</p>"
        f"<div class=frame>{svg.draw(below)}</div><h2>Run against plan</h2><div "
        f"class=scroll><table>{_lines(('cause', 'time'), losses)}</table><br>"
        f"<table>{_lines(COLUMNS, compared.rows())}</table></div>"
    )


def _styles(shades: int) -> str:
    """The chart's colours: light, dark where the system prefers it, and whichever the reader
    chooses.
    """
    by_system, by_reader = (
        svg.style(svg.DARK, chunks=shades, within=f":root{where} ")
        for where in (":not([data-theme=light])", "[data-theme=dark]")
    )
    light = svg.style(svg.LIGHT, chunks=shades)
    return f"{light}@media(prefers-color-scheme:dark){{{by_system}}}{by_reader}"


def _numbers(timeline: Timeline) -> dict[str, str]:
    """The numbers of the whole step."""
    t, s = timeline, timeline.schedule
    return {
        "makespan": svg.number(t.makespan),
        "span": svg.number(t.span),
        "bubble": f"{t.bubble:.2%}",
        "peak": str(max(t.peak_activations, default=0)),
        "num_devices": str(s.num_devices),
        "stages": f"{s.num_stages} stages, {s.num_chunks} a device",
        "microbatches": str(s.num_microbatches),
        "actions": f"{s.encoded.num_actions:,} actions in all",
    }


def _devices(timeline: Timeline) -> str:
    """A table with one row per device."""
    stages = timeline.schedule.placement.stages_of
    rows = zip(svg.device_rows(timeline), stages, strict=True)
    texts = [(row[0], " ".join(map(str, own)), *row[1:]) for row, own in rows]
    return _lines((svg.DEVICE_COLUMNS[0], "stages", *svg.DEVICE_COLUMNS[1:]), texts, "\n")


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]], between: str = "") -> str:
    """The lines of a table."""
    lines = [_line("th", head), *(_line("td", row) for row in rows)]
    return between.join(lines)


def _line(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _data(chart: svg.Chart) -> dict[str, object]:
    """The data with which the page's script finds the bar under the pointer: geometry, and the bars
    of each device in order.
    """
    rows: list[list[tuple[object, ...]]] = [[] for _ in range(chart.timeline.schedule.num_devices)]
    for bar in chart.bars:
        stage, kind, microbatch = bar.action
        rows[bar.device].append(
            (bar.start, bar.end, int(kind), stage, microbatch, bar.chunk, bar.part.value)
        )
    geometry = ("left", "unit", "top", "row", "pitch", "width")
    return {
        "rows": rows,
        "kinds": KIND_NAMES,
        "descriptions": [spec.description for spec in KINDS],
        "makespan": chart.timeline.makespan,
        **{name: getattr(chart, name) for name in geometry},
    }
