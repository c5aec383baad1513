"""The catalogue: the generator of each name, and the arguments that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, TypeAlias

from ..engine.costs import Costs
from ..engine.simulate import shortest
from ..errors import (
    MAX_DEVICES,
    MAX_PAIRS,
    Count,
    Fits,
    ScheduleError,
    Seed,
    is_whole,
    misfit,
    quoted,
)
from ..table.placement import Placement
from ..table.schedule import Objective, Schedule
from ..transforms.rewrites import forward_only as only_forwards
from ._list_scheduling import forward_order
from .auto import auto
from .loop import (
    dualpipe,
    dualpipev,
    gpipe,
    interleaved_1f1b,
    interleaved_1f1b_overlap,
    looped_bfs,
    no_pipelining,
    one_f_one_b,
    one_f_one_b_overlap,
    sliced,
)
from .zero_bubble import interleaved_zb, v_half, v_min, zb_1p, zb_h1, zb_h2, zbv


@dataclass(frozen=True)
class ChunkCounts:
    """The chunks per device that a schedule takes: `natural` is used where none are asked for;
    `most` is None where any number is valid.
    """

    natural: int = 1
    least: int = 1
    most: int | None = 1

    def nearest(self, chunks: int) -> int:
        """The allowed number closest to `chunks`."""
        return max(self.least, chunks if self.most is None else min(chunks, self.most))

    def __str__(self) -> str:
        if self.most is None:
            return f"any, {self.natural} if not given"
        return str(self.least) if self.least == self.most else f"{self.least} or {self.most}"


@dataclass(frozen=True)
class Option:
    """One keyword that `build` passes on to a generator; `default` None means what
    `summary` says.
    """

    name: str
    default: object
    summary: str


@dataclass(frozen=True)
class NamedSchedule:
    """A named schedule; `summary` is one line, and `doc` states source, constraints, bubble and
    peak.

    `both_ways` is True where two pipelines run in opposite directions: the number of devices is
    even, and there are no slices of sequences.  `memory_bound` is True where the forwards are
    ordered so to save memory: an evaluation, which keeps nothing, uses another order.
    """

    name: str
    generator: Callable[..., Schedule]
    chunks: ChunkCounts
    why_chunks: str = ""
    both_ways: bool = False
    memory_bound: bool = False

    @property
    def summary(self) -> str:
        """The first paragraph of the generator's docstring, in one line."""
        return " ".join(self.doc.split("\n\n", 1)[0].split())

    @property
    def doc(self) -> str:
        """The generator's docstring: source, constraints, bubble, peak activations."""
        return inspect.getdoc(self.generator) or ""

    @property
    def options(self) -> tuple[Option, ...]:
        """The generator's own options, and `forward_only`, which every schedule has."""
        own = [
            p for p in inspect.signature(self.generator).parameters.values() if p.name not in _SHAPE
        ]
        defaults = {p.name: p.default for p in own} | {"forward_only": False}
        return tuple(Option(name, value, _OPTIONS[name][1]) for name, value in defaults.items())


_SHAPE = ("devices", "microbatches", "chunks", "slices")


# The type of each option's values, and what it means.
_OPTIONS: Mapping[str, tuple[object, str]] = {
    "costs": (Costs, "the times of the actions (a jaxpipe.Costs), to which the order is fitted"),
    "forward_only": (bool, "leave out all backwards, for evaluation"),
    "group_size": (
        Count,
        "microbatches that go through a chunk before the next chunk starts (P or more); "
        "without it, equal groups of P or more",
    ),
    "lean": (
        bool,
        "warm up with one forward per hop instead of two: fewer activations, and the same "
        "makespan where transfers take no time",
    ),
    "max_activations": (
        Count,
        "the most activations that a device may hold, if they are released at W",
    ),
    "objective": (
        Objective,
        "what is made short: makespan, the whole step, or period, the time of a microbatch in its "
        "steady state (on the command line makespan or period)",
    ),
    "search": (
        Annotated[float, Fits("a number of seconds from 0 to 86,400", lambda s: 0 <= s <= 86_400)],
        "seconds of search for a shorter table, by OR-tools (the extra jaxpipe[solver]); the "
        "same on any machine",
    ),
    "seed": (Seed, "of the random choices of `search`"),
    "placement": (
        Placement,
        "the devices of the stages (a jaxpipe.Placement; on the command line loop, vee, or the "
        "device of each stage: 0,1,1,0); without it a loop or a V, whichever gives the shorter "
        "schedule",
    ),
}
# Of devices and microbatches: what is too large for a table has an error of its own.
_FROM_1: TypeAlias = Annotated[int, Fits("a whole number of at least 1", lambda n: n >= 1)]
_V = "a V goes down the devices and up again"


_ONE, _LOOP, _VEE = (
    ChunkCounts(),
    ChunkCounts(natural=2, most=None),
    ChunkCounts(natural=2, least=2, most=2),
)
_LOOPED = "looped_bfs and interleaved_1f1b take several"
_ZERO_BUBBLE = "interleaved_zb takes several"
_ENTRIES = {
    entry.name: entry
    for entry in (
        NamedSchedule("no_pipelining", no_pipelining, ChunkCounts(most=None)),
        NamedSchedule("gpipe", gpipe, _ONE, _LOOPED),
        NamedSchedule("1f1b", one_f_one_b, _ONE, _LOOPED),
        NamedSchedule("interleaved_1f1b", interleaved_1f1b, _LOOP),
        NamedSchedule("looped_bfs", looped_bfs, _LOOP),
        NamedSchedule(
            "1f1b_overlap", one_f_one_b_overlap, _ONE, "interleaved_1f1b_overlap takes several"
        ),
        NamedSchedule("interleaved_1f1b_overlap", interleaved_1f1b_overlap, _LOOP),
        NamedSchedule("zb_h1", zb_h1, _ONE, _ZERO_BUBBLE),
        NamedSchedule("zb_h2", zb_h2, _ONE, _ZERO_BUBBLE),
        NamedSchedule("zb_1p", zb_1p, _ONE, _ZERO_BUBBLE),
        NamedSchedule("interleaved_zb", interleaved_zb, _LOOP),
        NamedSchedule("zbv", zbv, _VEE, _V),
        NamedSchedule("v_half", v_half, _VEE, _V, memory_bound=True),
        NamedSchedule("v_min", v_min, _VEE, _V, memory_bound=True),
        NamedSchedule(
            "dualpipe",
            dualpipe,
            ChunkCounts(natural=2, least=1, most=2),
            "the stages per device, or S / P",
            both_ways=True,
        ),
        NamedSchedule("dualpipev", dualpipev, _VEE, _V),
        NamedSchedule("auto", auto, ChunkCounts(most=None), memory_bound=True),
    )
}


def names() -> tuple[str, ...]:
    """Every name that `build` accepts, sorted."""
    return tuple(sorted(_ENTRIES))


def describe(name: str) -> NamedSchedule:
    """A named schedule's summary, chunks and options.  ScheduleError for an unknown name.

    >>> describe("zb_h2").summary
    "Twice 1F1B's memory, and no bubble but the start (ZB-H2, Qi et al. 2024, section 2.2, figure 3
    bottom)."
    >>> [option.name for option in describe("interleaved_1f1b").options]
    ['group_size', 'lean', 'forward_only']
    """
    if isinstance(name, str) and name in _ENTRIES:
        return _ENTRIES[name]
    plain = {_plain(known): known for known in _ENTRIES}
    short = _plain(name[:_LONGEST_NAME]) if isinstance(name, str) else ""
    close = get_close_matches(short, plain, n=1, cutoff=0.7)
    hint = f"did you mean {plain[close[0]]!r}? " if close else ""
    raise ScheduleError(
        f"there is no schedule {quoted(name)}; {hint}The names are {', '.join(names())}"
    )


_LONGEST_NAME = 100  # that is compared with the names there are


def build(
    name: str,
    *,
    devices: int,
    microbatches: int,
    chunks: int | None = None,
    slices: int = 1,
    forward_only: bool = False,
    **options: Any,
) -> Schedule:
    """Make the table of a named schedule.

    Args:
        name: one of `names()`.
        devices: P, the number of devices in the pipeline.
        microbatches: M, the microbatches of one step.
        chunks: V, the stages per device; None takes the schedule's own default
            (`describe(name).chunks`).
        slices: K, the slices of a sequence; microbatch m is slice m % K of sequence m // K.  With
            several, each sequence's backwards run in reverse order (Seq1F1B, Sun et al. 2024).
        forward_only: leave out all backwards, for evaluation.
        options: the schedule's own options (`describe(name).options`).  A table that is fitted to
            `costs` is never longer under them than the table that is built without.

    Raises:
        ScheduleError: the name, a number or an option makes no sense, or there would be more than a
            million (2**20) pairs of stage and microbatch; the message lists every fault and the
            nearest setting that works.

    >>> print(build("gpipe", devices=2, microbatches=2, forward_only=True))
             | 0   1   2
    device 0 | 0F0 0F1
    device 1 |     1F0 1F1
    """
    entry = describe(name)
    faults = [
        *_faults(entry, devices, microbatches, chunks, slices),
        *_option_faults(entry, {**options, "forward_only": forward_only}),
    ]
    ScheduleError.refuse(f"{name} cannot be built", faults)
    if chunks is None:
        chunks = entry.chunks.natural
    arguments = {key: value for key, value in options.items() if value is not None}
    shape = dict(zip(_SHAPE, map(int, (devices, microbatches, chunks, slices)), strict=True))
    costs = arguments.get("costs")
    if costs is not None:
        stages = shape["devices"] * shape["chunks"]
        costs.for_stages(stages).factor_of(shape["microbatches"], slices)  # CostError
    schedule = _generated(entry, forward_only, **shape, **arguments)
    arguments.pop("costs", None)
    # a certified table, or one for slices, began with the better of both itself
    if costs is None or schedule.certificate is not None or slices > 1:
        return schedule
    # List scheduling is a heuristic: in some cases the table that was built without the costs is
    # the shorter one.
    return shortest((schedule, _generated(entry, forward_only, **shape, **arguments)), costs)


def _generated(entry: NamedSchedule, forward_only: bool, **arguments: Any) -> Schedule:
    """What a generator makes, or the forwards of it."""
    microbatches = arguments["microbatches"]
    if "slices" in inspect.signature(entry.generator).parameters:
        schedule = entry.generator(**arguments)
    else:
        slices = arguments.pop("slices")
        if "costs" in arguments and slices > 1:  # those of the table that is cut
            arguments["costs"] = replace(arguments["costs"], slice_factors=None)
        arguments["microbatches"] += slices - 1
        schedule = sliced(entry.generator(**arguments), slices)
    schedule = replace(schedule, name=entry.name)
    if not forward_only:
        return schedule
    if entry.memory_bound:
        return schedule.with_rows(forward_order(schedule.placement, microbatches).rows)
    return only_forwards(schedule)


def _faults(
    entry: NamedSchedule, devices: int, microbatches: int, chunks: int | None, slices: int
) -> Iterator[str]:
    """Everything that is wrong with the shape that `build` is given, each with what to write
    instead.
    """
    allowed = entry.chunks
    nearest = allowed.nearest(int(chunks)) if is_whole(chunks) else allowed.natural
    fits = is_whole(chunks) and 1 <= chunks == nearest
    numbers = (("devices", devices), ("microbatches", microbatches))
    if bad := [fault for name, value in numbers if (fault := misfit(name, value, _FROM_1))]:
        yield from (f"{fault}; the nearest that works is {fault.split()[0]}=1" for fault in bad)
    else:
        yield from _size_faults(devices, microbatches, nearest if fits else allowed.natural)
    if entry.both_ways and is_whole(devices) and devices % 2:
        yield (
            "devices must be even, since two pipelines run in opposite directions; not "
            f"{quoted(devices)}: write {quoted(int(devices) + 1)}"
        )
    if chunks is not None and not fits:
        why = f" ({entry.why_chunks})" if entry.why_chunks else ""
        yield (
            f"chunks (stages per device) must be {allowed}{why}, not {quoted(chunks)}; the "
            f"nearest that works is chunks={nearest}"
        )
    if fault := misfit("slices", slices, Count):
        yield fault
    elif slices > 1 and entry.both_ways:
        yield (
            f"slices={slices} is not possible: a stage is on two devices, and keeps a sequence on "
            "one; 1f1b and zbv take slices"
        )
    elif not bad and microbatches % slices:
        near = max(1, round(microbatches / slices)) * slices
        yield (
            f"microbatches={microbatches} are no whole sequences of slices={slices}; the nearest "
            f"that works is microbatches={near}"
        )


def _option_faults(entry: NamedSchedule, options: Mapping[str, object]) -> Iterator[str]:
    """Options that the schedule does not have, and values of the wrong kind; None always means "not
    given".
    """
    known = [option.name for option in entry.options]
    for name, value in options.items():
        if name not in known:
            close = get_close_matches(name[:_LONGEST_NAME], known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            yield f"there is no option {quoted(name)}; {hint}"
        elif value is not None and (fault := misfit(name, value, _OPTIONS[name][0])):
            yield f"{fault} ({_OPTIONS[name][1]})"


def _size_faults(devices: int, microbatches: int, chunks: int) -> Iterator[str]:
    """A table that is too large: its size, and how much is allowed."""
    stages = int(devices) * int(chunks)
    pairs = stages * int(microbatches)
    if devices > MAX_DEVICES:
        yield f"devices={quoted(devices)} is too many; a table has at most {MAX_DEVICES:,} devices"
    elif pairs > MAX_PAIRS:
        most = MAX_PAIRS // stages
        hint = f"the nearest that works is microbatches={most}" if most else "ask for fewer chunks"
        yield (
            f"devices={quoted(devices)}, chunks={quoted(chunks)} and "
            f"microbatches={quoted(microbatches)} make {quoted(pairs)} pairs of stage and "
            f"microbatch; a table holds at most {MAX_PAIRS:,}: {hint}"
        )


def _plain(name: str) -> str:
    """A name without case, underscores and torch's prefix, so that Interleaved1F1B finds
    interleaved_1f1b.
    """
    return name.lower().replace("_", "").replace("-", "").removeprefix("schedule")
