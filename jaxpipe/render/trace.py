"""A timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is Chrome's Trace Event Format (JSON): one process per device, complete events ("X") for
actions, counters ("C") for held activations, flow arrows ("s", "f") from a producer to its consumer
on another device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from ..engine.timeline import Timeline
from ..errors import JaxpipeError, quoted
from ..table.kinds import KIND_NAMES
from ..table.limits import MAX_COST
from ..table.typed import typed
from .chart import Bar, Part, bars_of, title_of

Event: TypeAlias = dict[str, Any]

# Threads of a device's process.  The halves of a pair run at the same time, and slices of one
# thread must nest.
_THREADS = {Part.WHOLE: 0, Part.TOP: 0, Part.BOTTOM: 1, Part.STRIP: 2}
_THREAD_NAMES = ("compute", "compute (backward of a pair)", "transfers")


@typed(JaxpipeError)
def to_trace(
    timeline: Timeline, *, unit_us: float = 1000.0, flows: bool = True, over: Timeline | None = None
) -> str:
    """Write a timeline as trace JSON, to be opened in ui.perfetto.dev or chrome://tracing.

    Args:
        timeline: what `jaxpipe.simulate` returned.
        unit_us: microseconds in the trace for one unit of cost; by default a unit is a millisecond.
        flows: draw an arrow for each message between devices.
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
    bars = tuple(bars_of(timeline))
    events = [*_named(timeline, bars, unit_us), *_counters(timeline, unit_us)]
    if flows:
        events += _flows(timeline, bars, unit_us)
    if over is not None:
        compared = timeline.over(over)
        planned = _named(over, tuple(bars_of(over)), unit_us)
        events += _planned_events(planned, timeline.schedule.num_devices)
        events.append(_event("i", 0, compared.sentence, tid=0, ts=0, s="g"))
    about = {"title": title_of(timeline), "makespan": timeline.makespan, "bubble": timeline.bubble}
    trace = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    return json.dumps(trace, separators=(",", ":")) + "\n"


def _planned_events(events: Iterable[Event], devices: int) -> Iterator[Event]:
    """The events of the plan, each device a process of its own after those of the run."""
    for event in events:
        moved = event | {"pid": event["pid"] + devices}
        if event["name"] == "process_name":
            moved["args"] = {"name": f"{event['args']['name']} (planned)"}
        elif event["name"] == "process_sort_index":
            moved["args"] = {"sort_index": event["args"]["sort_index"] + devices}
        yield moved


def _named(timeline: Timeline, bars: tuple[Bar, ...], unit_us: float) -> Iterator[Event]:
    """Every bar, after the names and the order of devices and threads in the viewer."""
    for device in range(timeline.schedule.num_devices):
        yield _event("M", device, "process_name", args={"name": f"device {device}"})
        yield _event("M", device, "process_sort_index", args={"sort_index": device})
    for device, thread in sorted({(bar.device, _THREADS[bar.part]) for bar in bars}):
        name, order = {"name": _THREAD_NAMES[thread]}, {"sort_index": thread}
        yield _event("M", device, "thread_name", tid=thread, args=name)
        yield _event("M", device, "thread_sort_index", tid=thread, args=order)
    yield from (_slice(bar, unit_us, timeline.schedule.slices) for bar in bars)


def _event(phase: str, device: int, name: str, **more: Any) -> Event:
    return {"ph": phase, "pid": device, "name": name, **more}


def _slice(bar: Bar, unit_us: float, slices: int) -> Event:
    stage, kind, microbatch = bar.action
    where = {"stage": stage, "chunk": bar.chunk, "microbatch": microbatch}
    if slices > 1:
        where |= {"sequence": microbatch // slices, "slice": microbatch % slices}
    return _event(
        "X",
        bar.device,
        str(bar.action),
        cat=KIND_NAMES[kind],
        tid=_THREADS[bar.part],
        ts=bar.start * unit_us,
        dur=(bar.end - bar.start) * unit_us,
        args={**where, "kind": KIND_NAMES[kind]},
    )


def _counters(timeline: Timeline, unit_us: float) -> Iterator[Event]:
    """The activation memory of each device, at each change (the last of several at one time)."""
    for device in range(timeline.schedule.num_devices):
        for time, held in dict(timeline.memory(device)).items():
            yield _event("C", device, "activations", ts=time * unit_us, args={"held": held})


def _flows(timeline: Timeline, bars: tuple[Bar, ...], unit_us: float) -> Iterator[Event]:
    """An arrow from each producer to its consumer on another device."""
    table = timeline.schedule.encoded
    producer, crosses = table.producer.tolist(), table.crosses.tolist()
    for bar in bars:
        if not crosses[bar.number]:
            continue
        source = bars[producer[bar.number]]
        # A flow is attached to the slice that is open at its time; at its end a slice is closed
        # already.
        leaves = source.start + 0.99 * (source.end - source.start)
        for phase, end, time in (("s", source, leaves), ("f", bar, bar.start)):
            more: Event = {"bp": "e"} if phase == "f" else {}
            more |= {"id": bar.number, "cat": "flow", "tid": _THREADS[end.part]}
            yield _event(phase, end.device, "message", ts=time * unit_us, **more)
