"""Name -> generator, with what each accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ..errors import ScheduleError
from ..listing import forwards
from ..schedule import Schedule
from .basic import gpipe, no_pipelining, one_f_one_b
from .interleaved import interleaved_1f1b
from .looped_bfs import looped_bfs
from .overlapped import interleaved_1f1b_overlap, one_f_one_b_overlap
from .zero_bubble import interleaved_zb, zb_h1, zb_h2


@dataclass(frozen=True)
class Chunks:
    """The chunks a device that a schedule takes: `natural` where none are asked for, and the least and most (None: any)."""

    natural: int = 1
    least: int = 1
    most: int | None = 1

    def nearest(self, chunks: int) -> int:
        """The allowed number closest to `chunks`."""
        return max(self.least, chunks if self.most is None else min(chunks, self.most))

    def __str__(self) -> str:
        if self.most is None:
            return f"any, {self.natural} if not given" if self.least == 1 else f"{self.least} or more"
        return str(self.least) if self.least == self.most else f"{self.least} or {self.most}"


@dataclass(frozen=True)
class Option:
    """One keyword that `build` passes on to a generator."""

    name: str
    default: object
    summary: str


@dataclass(frozen=True)
class Entry:
    """What is known of a named schedule; `summary` is one line and `doc` states source, constraints, bubble and peak."""

    name: str
    generator: Callable[..., Schedule]
    chunks: Chunks
    why_chunks: str = ""
    even_devices: bool = False

    @property
    def summary(self) -> str:
        """The first sentence of the generator's docstring."""
        return self.doc.split("\n", 1)[0]

    @property
    def doc(self) -> str:
        """The generator's docstring: source, constraints, bubble, peak activations."""
        return inspect.getdoc(self.generator) or ""

    @property
    def options(self) -> tuple[Option, ...]:
        """The generator's own options, and `forward_only`, which every schedule has."""
        own = [p for p in inspect.signature(self.generator).parameters.values() if p.name not in _SHAPE]
        summaries = _option_summaries()
        return (*(Option(p.name, p.default, summaries[p.name]) for p in own), Option("forward_only", False, summaries["forward_only"]))


_SHAPE = ("devices", "microbatches", "chunks")


def _option_summaries() -> Mapping[str, str]:
    return {
        "forward_only": "leave out all backwards: the table of an evaluation",
        "group_size": "microbatches that go through a chunk before the next chunk's turn (at least P; default: equal groups of at least P)",
        "lean": "warm up with one forward a hop instead of two: fewer activations, the same makespan where transfers take no time",
    }


def _entries() -> tuple[Entry, ...]:
    one, loop = Chunks(), Chunks(natural=2, most=None)
    looped = "looped_bfs and interleaved_1f1b take several"
    return (
        Entry("no_pipelining", no_pipelining, Chunks(most=None)),
        Entry("gpipe", gpipe, one, looped),
        Entry("1f1b", one_f_one_b, one, looped),
        Entry("interleaved_1f1b", interleaved_1f1b, loop),
        Entry("looped_bfs", looped_bfs, loop),
        Entry("1f1b_overlap", one_f_one_b_overlap, one, "interleaved_1f1b_overlap takes several"),
        Entry("interleaved_1f1b_overlap", interleaved_1f1b_overlap, loop),
        Entry("zb_h1", zb_h1, one, "interleaved_zb takes several"),
        Entry("zb_h2", zb_h2, one, "interleaved_zb takes several"),
        Entry("interleaved_zb", interleaved_zb, loop),
    )


def names() -> tuple[str, ...]:
    """Every name that `build` accepts, sorted."""
    return tuple(sorted(entry.name for entry in _entries()))


def describe(name: str) -> Entry:
    """What a named schedule is and takes: summary, chunks, options.  ScheduleError for a name that is not there.

    >>> describe("zb_h2").summary
    "Twice 1F1B's memory, and no bubble but the start (Qi et al. 2024, section 2.3, figure 2 bottom)."
    >>> [option.name for option in describe("interleaved_1f1b").options]
    ['group_size', 'lean', 'forward_only']
    """
    known = {entry.name: entry for entry in _entries()}
    if name in known:
        return known[name]
    plain = {_plain(n): n for n in known}
    close = get_close_matches(_plain(str(name)), plain, n=1, cutoff=0.7)
    hint = f"did you mean {plain[close[0]]!r}? " if close else ""
    raise ScheduleError(f"there is no schedule {name!r}; {hint}The names are {', '.join(names())}")


def build(
    name: str,
    *,
    devices: int,
    microbatches: int,
    chunks: int | None = None,
    forward_only: bool = False,
    **options: Any,
) -> Schedule:
    """Make the table of a named schedule.

    Args:
        name: one of `names()`.
        devices: P, the number of devices in the pipeline.
        microbatches: M, the microbatches of one step.
        chunks: V, the stages a device holds; None takes the schedule's natural number (`describe(name).chunks`).
        forward_only: leave out all backwards, for evaluation.
        options: what else the schedule takes (`describe(name).options`).

    Raises:
        ScheduleError: the name, a number or an option makes no sense; the message lists every fault and the nearest
            setting that does.

    >>> print(build("1f1b", devices=2, microbatches=2))
             | 0   1   2   3   4
    device 0 | 0F0 0F1     0B0 0B1
    device 1 |     1F0 1B0 1F1 1B1
    """
    entry = describe(name)
    faults = _faults(entry, devices, microbatches, chunks, options)
    if faults:
        raise ScheduleError(f"{name} cannot be built:\n" + "\n".join(f"  {fault}" for fault in faults))
    if chunks is None or entry.chunks.most == entry.chunks.least:
        chunks = entry.chunks.natural
    schedule = entry.generator(devices=devices, microbatches=microbatches, chunks=chunks, **options)
    return forwards(schedule) if forward_only else schedule


def _faults(entry: Entry, devices: object, microbatches: object, chunks: object, options: Mapping[str, object]) -> list[str]:
    """Everything that is wrong with the arguments of `build`, each with what to write instead."""
    found = [
        f"{what} must be a whole number of at least 1, not {value!r}; the nearest that works is {what}=1"
        for what, value in (("devices", devices), ("microbatches", microbatches))
        if not _is_count(value)
    ]
    if entry.even_devices and isinstance(devices, int) and devices % 2:
        found.append(f"devices must be even, since two pipelines run against each other; not {devices}: write {devices + 1}")
    if chunks is not None and not _fits(entry, chunks):
        found.append(_chunk_fault(entry, chunks))
    known = [option.name for option in entry.options]
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            found.append(f"there is no option {name!r}; {hint}")
    if options.get("group_size") is not None and not _is_count(options["group_size"]):
        found.append(f"group_size must be a whole number of at least P, not {options['group_size']!r}; leave it out for equal groups")
    return found


def _fits(entry: Entry, chunks: object) -> bool:
    return _is_count(chunks) and entry.chunks.nearest(int(chunks)) == chunks  # type: ignore[call-overload]


def _chunk_fault(entry: Entry, chunks: object) -> str:
    nearest = entry.chunks.nearest(chunks) if isinstance(chunks, int) else entry.chunks.natural
    why = f" ({entry.why_chunks})" if entry.why_chunks else ""
    return f"chunks (stages a device) must be {entry.chunks}{why}, not {chunks!r}; the nearest that works is chunks={nearest}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _plain(name: str) -> str:
    """A name without case, underscores and torch's prefix, so that Interleaved1F1B finds interleaved_1f1b."""
    return name.lower().replace("_", "").replace("-", "").removeprefix("schedule")
