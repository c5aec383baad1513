"""A timeline as a self-contained page: the chart with tooltips, and all numbers; and as a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, TypeAlias

from ..engine.simulate import COLUMNS, Timeline
from ..errors import MAX_COST, JaxpipeError, quoted, typed
from ..table.kinds import KIND_NAMES, KINDS
from . import svg
from .chart import MAX_WIDTH, BarPart, Chart, bars_of, costs_of, number, title_of

TraceEvent: TypeAlias = dict[str, Any]

# Threads of a device's process.  The halves of a pair run at the same time, and slices of one
# thread must nest.
_THREADS = {
    BarPart.WHOLE: 0,
    BarPart.TOP: 0,
    BarPart.BOTTOM: 1,
    BarPart.STRIP: 2,
    BarPart.LINK: 3,
}
_THREAD_NAMES = ("compute", "compute (backward of a pair)", "transfers", "gathers")


@typed(JaxpipeError)
def to_trace(timeline: Timeline, *, unit_us: float = 1000.0, over: Timeline | None = None) -> str:
    """Write a timeline as trace JSON, to be opened in ui.perfetto.dev or chrome://tracing.

    Args:
        timeline: what `jaxpipe.simulate` returned.
        unit_us: microseconds in the trace for one unit of cost; by default a unit is a millisecond.
        over: what was planned, where the timeline is that of a run: it becomes further processes,
            one a device.

    Raises:
        JaxpipeError: `unit_us` is not positive.
        ScheduleError: `over` is of another table.

    >>> import jaxpipe as jp
    >>> json.loads(to_trace(jp.simulate(jp.schedules.build("gpipe", devices=2, microbatches=1))))[
    ...     "otherData"
    ... ]["makespan"]
    6
    """
    if not 0 < unit_us <= MAX_COST:
        why = f"it is the length of one unit of cost in microseconds, of {MAX_COST:g} at most"
        raise JaxpipeError(f"unit_us must be positive, not {quoted(unit_us)}: {why}")
    parts = (_slices, _counters, _flows)
    events = [event for part in parts for event in part(timeline, unit_us)]
    if over is not None:
        compared = timeline.over(over)
        first = timeline.schedule.num_devices
        events += _slices(over, unit_us, first=first, suffix=" (planned)")
        events.append(_event("i", 0, compared.sentence, tid=0, ts=0, s="g"))
    numbers = {"makespan": timeline.makespan, "bubble": timeline.bubble}
    about = {"title": title_of(timeline), **numbers}
    trace = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    return json.dumps(trace, separators=(",", ":")) + "\n"


def _slices(
    timeline: Timeline, unit_us: float, *, first: int = 0, suffix: str = ""
) -> Iterator[TraceEvent]:
    """Every bar, after the names and the order of devices and threads in the viewer; `first` is the
    process of the first device.
    """
    bars, slices = tuple(bars_of(timeline)), timeline.schedule.slices
    for device in range(timeline.schedule.num_devices):
        process, name = first + device, f"device {device}{suffix}"
        yield _event("M", process, "process_name", args={"name": name})
        yield _event("M", process, "process_sort_index", args={"sort_index": process})
    for device, thread in sorted({(bar.device, _THREADS[bar.part]) for bar in bars}):
        process, named = first + device, {"name": _THREAD_NAMES[thread]}
        yield _event("M", process, "thread_name", tid=thread, args=named)
        order = {"sort_index": thread}
        yield _event("M", process, "thread_sort_index", tid=thread, args=order)
    for bar in bars:
        stage, kind, microbatch = bar.action
        args: TraceEvent = {"stage": stage, "chunk": bar.chunk, "microbatch": microbatch}
        if slices > 1:
            args |= {"sequence": microbatch // slices, "slice": microbatch % slices}
        args["kind"] = kind.name
        when = {"ts": bar.start * unit_us, "dur": bar.length * unit_us}
        place = {"cat": kind.name, "tid": _THREADS[bar.part], **when}
        yield _event("X", first + bar.device, str(bar.action), **place, args=args)


def _event(phase: str, process: int, name: str, **more: object) -> TraceEvent:
    return {"ph": phase, "pid": process, "name": name, **more}


def _counters(timeline: Timeline, unit_us: float) -> Iterator[TraceEvent]:
    """The activation memory of each device, at each change (the last of several at one time)."""
    for device in range(timeline.schedule.num_devices):
        for time, held in dict(timeline.memory(device)).items():
            count = {"held": held}
            yield _event("C", device, "activations", ts=time * unit_us, args=count)


def _flows(timeline: Timeline, unit_us: float) -> Iterator[TraceEvent]:
    """An arrow from each producer to its consumer on another device."""
    bars, table = tuple(bars_of(timeline)), timeline.schedule.encoded
    producer, crosses = table.producer.tolist(), table.crosses.tolist()
    for bar in bars:
        if not crosses[bar.number]:
            continue
        source = bars[producer[bar.number]]
        # A flow is attached to the slice that is open at its time; at its end a slice is closed
        # already.
        leaves = source.start + 0.99 * source.length
        for phase, end, time in (("s", source, leaves), ("f", bar, bar.start)):
            more: TraceEvent = {"bp": "e"} if phase == "f" else {}
            more |= {"id": bar.number, "cat": "flow", "tid": _THREADS[end.part]}
            yield _event(phase, end.device, "message", ts=time * unit_us, **more)


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
    chart = Chart(timeline, width, memory=True, given_title=title, has_heading=False)
    t, s, csv = timeline, timeline.schedule, timeline.schedule.to_csv()
    left_out = f"The table has {len(csv):,} characters; write it with --format csv."
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return Template(page).substitute(
        title=escape(chart.title),
        style=_styles(chart.shades),
        chart=svg.draw(chart, critical_path=True),
        makespan=number(t.makespan),
        span=number(t.span),
        bubble=f"{t.bubble:.2%}",
        peak=max(t.peak_activations, default=0),
        num_devices=s.num_devices,
        stages=f"{s.num_stages} stages, {s.num_chunks} a device",
        microbatches=s.num_microbatches,
        actions=f"{s.encoded.num_actions:,} actions in all",
        over="" if over is None else _over(timeline, over, chart),
        devices=_devices(timeline),
        costs=escape(costs_of(timeline)),
        table=escape(csv) if len(csv) <= _MOST_TEXT else left_out,
        # "<" is escaped so that no name can end the script element.
        data=json.dumps(_data(chart), separators=(",", ":")).replace("<", "\\u003c"),
    )


def _over(ran: Timeline, planned: Timeline, chart: Chart) -> str:
    """The plan's chart in the scale of the run's (as far as it can be drawn), the sentence and
    tables that compare them.
    """
    compared = ran.over(planned)
    free = Chart(planned, memory=True, has_heading=False)
    wanted = free.left + max(free.span * chart.unit, _LEAST_WIDTH) + free.right
    below = replace(free, fixed_width=min(wanted, MAX_WIDTH))
    scale = "" if math.isclose(below.unit, chart.unit) else " (at another scale)"
    losses = [(escape(cause), number(time)) for cause, time in compared.losses]
    return (
        f"<h2>Planned{scale}</h2><p>{escape(compared.sentence)}</p>"
        f"<div class=frame>{svg.draw(below)}</div><h2>Run against plan</h2><div "
        f"class=scroll><table>{_table(('cause', 'time'), losses)}</table><br>"
        f"<table>{_table(COLUMNS, compared.rows())}</table></div>"
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


def _devices(timeline: Timeline) -> str:
    """A table with one row per device."""
    stages = timeline.schedule.placement.stages_of
    rows = zip(device_rows(timeline), stages, strict=True)
    texts = [(row[0], " ".join(map(str, own)), *row[1:]) for row, own in rows]
    return _table((DEVICE_COLUMNS[0], "stages", *DEVICE_COLUMNS[1:]), texts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The lines of a table."""
    lines = [("th", head), *(("td", row) for row in rows)]
    texts = ("".join(f"<{tag}>{cell}</{tag}>" for cell in line) for tag, line in lines)
    return "\n".join(f"<tr>{text}</tr>" for text in texts)


def _data(chart: Chart) -> dict[str, object]:
    """The data with which the page's script finds the bar under the pointer: geometry, and the bars
    of each device in order.
    """
    rows: list[list[object]] = [[] for _ in range(chart.timeline.schedule.num_devices)]
    for bar in chart.bars:
        (stage, kind, microbatch), part = bar.action, bar.part.value
        row = (bar.start, bar.end, int(kind), stage, microbatch, bar.chunk, part)
        rows[bar.device].append(row)
    geometry = ("left", "unit", "top", "row", "pitch", "width")
    return {
        "rows": rows,
        "kinds": KIND_NAMES,
        "descriptions": [spec.description for spec in KINDS],
        "makespan": chart.timeline.makespan,
        **{name: getattr(chart, name) for name in geometry},
    }
