"""A timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is Chrome's Trace Event Format (JSON): one process per device, complete events ("X") for
actions, counters ("C") for held activations, flow arrows ("s", "f") from a producer to its consumer
on another device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

from ..engine.simulate import Timeline
from ..errors import JaxpipeError, quoted
from ..table.typed import MAX_COST, typed
from .svg import Part, bars_of, title_of

Event: TypeAlias = dict[str, Any]

# Threads of a device's process.  The halves of a pair run at the same time, and slices of one
# thread must nest.
_THREADS = {Part.WHOLE: 0, Part.TOP: 0, Part.BOTTOM: 1, Part.STRIP: 2}
_THREAD_NAMES = ("compute", "compute (backward of a pair)", "transfers")


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
) -> Iterator[Event]:
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
        args: Event = {"stage": stage, "chunk": bar.chunk, "microbatch": microbatch}
        if slices > 1:
            args |= {"sequence": microbatch // slices, "slice": microbatch % slices}
        args["kind"] = kind.name
        when = {"ts": bar.start * unit_us, "dur": bar.length * unit_us}
        place = {"cat": kind.name, "tid": _THREADS[bar.part], **when}
        yield _event("X", first + bar.device, str(bar.action), **place, args=args)


def _event(phase: str, process: int, name: str, **more: Any) -> Event:
    return {"ph": phase, "pid": process, "name": name, **more}


def _counters(timeline: Timeline, unit_us: float) -> Iterator[Event]:
    """The activation memory of each device, at each change (the last of several at one time)."""
    for device in range(timeline.schedule.num_devices):
        for time, held in dict(timeline.memory(device)).items():
            count = {"held": held}
            yield _event("C", device, "activations", ts=time * unit_us, args=count)


def _flows(timeline: Timeline, unit_us: float) -> Iterator[Event]:
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
            more: Event = {"bp": "e"} if phase == "f" else {}
            more |= {"id": bar.number, "cat": "flow", "tid": _THREADS[end.part]}
            yield _event(phase, end.device, "message", ts=time * unit_us, **more)
