"""Simulate a table: when each action starts and ends, which devices idle and why, how much memory
they hold, the critical path, and a run compared with its plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from ..errors import ScheduleError, Violation, quoted, typed
from ..table.columns import in_columns
from ..table.encoded import (
    Encoded,
    IntArray,
    SplitMemory,
    Transfers,
    activation_changes,
    live,
    live_activations,
    row_peaks,
    split_peaks,
)
from ..table.gathered import whole_changes
from ..table.kinds import BESIDE, LINKED, Action, Kind, Overlap, Sharded, Value, makers
from ..table.schedule import Schedule, check
from .costs import Costs, StageCosts
from .loop import action_durations, hold_transfers, loop_of

_NOTHING = 0.005  # of the planned makespan: less is not worth a word in the sentence
_LONGEST_TURN = 32  # microbatches after which a steady state repeats
_EQUAL = 1e-9  # of the last start: sums of the same times in another order
COLUMNS = ("device", "busy", "planned", "ratio", "idle", "planned")


class Idle(NamedTuple):
    """A device's idle time by cause; the three add up to makespan - busy."""

    warmup: float  # before its first action
    waiting: float  # between its actions: an input is not there yet
    drain: float  # after its last action


class MemoryStep(NamedTuple):
    """From `time` on, a device holds `held` of activation memory."""

    time: float
    held: float


class ActionTimes(Mapping[str, float]):
    """Times by action: `times["2F0"]`, `times["(0F7;7B3)OVERLAP_F_B"]`, `times[Action(...)]`."""

    def __init__(self, table: Encoded, times: Sequence[float]) -> None:
        self._times: dict[str, float] = {}
        for number, time in enumerate(times):
            self._times[table.cell_text(number)] = self._times[table.text(number)] = time

    def __getitem__(self, key: str | Action | Overlap) -> float:
        try:
            return self._times[str(key)]
        except (IndexError, TypeError, ValueError):  # no action has such a text
            raise KeyError from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._times)

    def __len__(self) -> int:
        return len(self._times)


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule runs.  `starts` and `ends` follow the numbers of
    `schedule.encoded`.

    All times are in the unit of `costs`; a pipeline's step starts at 0.
    """

    schedule: Schedule
    costs: Costs
    transfers: Transfers
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @cached_property
    def start(self) -> ActionTimes:
        """Start by action text; an overlapped pair's text and the texts of its halves are
        all keys.
        """
        return ActionTimes(self.schedule.encoded, self.starts)

    @cached_property
    def end(self) -> ActionTimes:
        """End by action text."""
        return ActionTimes(self.schedule.encoded, self.ends)

    @cached_property
    def makespan(self) -> float:
        """End of the last action: the time of one step, with its flush."""
        return max(self.ends, default=0)

    @cached_property
    def span(self) -> float:
        """The longest time from a device's first start to its last end (the time per step where
        steps follow each other).
        """
        return max((last - first for first, last in self._active), default=0)

    @cached_property
    def period(self) -> float | None:
        """The time of a microbatch in the steady state, where the table repeats: all stages and
        kinds start the same time later, K microbatches on.

        Of the least K for which two turns of K microbatches or more, and at least half of all
        microbatches, are alike, the longest repeat counts.  None where nothing repeats so long.
        What repeats faster than the busiest device works is a group of microbatches in one chunk.
        """
        table = self.schedule.encoded
        microbatches = table.num_microbatches
        chosen = np.flatnonzero(table.is_compute & table.in_range)
        when = np.array(self.starts)[chosen]
        group = table.kind[chosen] * table.num_stages + table.stage[chosen]
        _, counts = np.unique(group, return_counts=True)
        if not len(chosen) or (counts != microbatches).any():
            return None
        # Per stage and kind, the starts in order.
        times = when[np.lexsort((when, group))].reshape(-1, microbatches)
        near = _EQUAL * max(1.0, float(times.max()))
        for turn in range(1, min(_LONGEST_TURN, microbatches // 2) + 1):
            later = times[:, turn:] - times[:, :-turn]
            same = np.ptp(later, axis=0) <= near
            # The longest run of one value where all agree.
            changes = ~same[1:] | ~same[:-1] | (np.abs(np.diff(later[0])) > near)
            edges = np.array([0, *np.flatnonzero(changes) + 1, len(same)])
            lengths = np.where(same[edges[:-1]], np.diff(edges), 0)
            longest = int(lengths.argmax())
            period = float(later[0, edges[longest + 1] - 1]) / turn
            enough = max(2, turn, microbatches / 2 - turn)
            if lengths[longest] >= enough and period >= max(self.busy) / microbatches - near:
                return period
        return None

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per device, the time spent in compute actions."""
        table = self.schedule.encoded
        whole = table.is_compute & (table.last_half == np.arange(table.num_actions))
        spent = np.array(self.ends)[whole] - np.array(self.starts)[whole]
        total = np.zeros(table.num_devices, spent.dtype)
        np.add.at(total, table.device[whole], spent)
        return tuple(total.tolist())

    @property
    def bubble(self) -> float:
        """The idle fraction of all devices' time: 1 - busy / (P * makespan)."""
        room = self.schedule.num_devices * self.makespan
        return 1 - sum(self.busy) / room if room else 0.0

    @cached_property
    def _active(self) -> tuple[tuple[float, float], ...]:
        """Per device, its first start and last end of a compute action; (makespan, makespan) where
        it has none.
        """
        table, none = self.schedule.encoded, (self.makespan, self.makespan)
        compute = table.is_compute.tolist()
        rows = ([i for i in range(a, b) if compute[i]] for a, b in pairwise(table.first))
        return tuple((self.starts[row[0]], self.ends[row[-1]]) if row else none for row in rows)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """Per device, its idle time split by cause."""
        return tuple(
            Idle(first, last - first - busy, self.makespan - last)
            for (first, last), busy in zip(self._active, self.busy, strict=True)
        )

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per device, the most activations (a stage's of one microbatch each) that live at once.

        They live from the start of F (of R where the table has one) to the end of B, or of I or W
        as `costs.release` says.  In a forward-only table they live while F runs, so the peak is 1.
        """
        table = self.schedule.encoded
        return row_peaks(table, live_activations(table, self.costs.release))

    @cached_property
    def peak_parameters(self) -> tuple[int, ...]:
        """Per device, the most stages whose parameters are gathered at once; zeros without U."""
        return self._most_whole(Sharded.PARAMETERS)

    @cached_property
    def peak_gradients(self) -> tuple[int, ...]:
        """Per device, the most stages whose gradients are whole at once; zeros without X."""
        return self._most_whole(Sharded.GRADIENT)

    def _most_whole(self, whole: Sharded) -> tuple[int, ...]:
        table = self.schedule.encoded
        return row_peaks(table, live(table, *whole_changes(table, whole)))

    @property
    def peak_offloaded(self) -> SplitMemory:
        """Per device, the most activations in its own memory and in its host's, of a pipeline with
        `offload="residuals"`.

        Activations that are first read four actions of their device after they are made, or later,
        wait on the host.  Copies between the memories take no time here, and the two that are under
        way at a time are counted on both sides.

        >>> import jaxpipe as jp
        >>> jp.simulate(
        ...     jp.schedules.build("1f1b", devices=8, microbatches=16)
        ... ).peak_offloaded.device
        (3, 3, 3, 3, 3, 3, 2, 1)
        """
        return split_peaks(self.schedule.encoded, self.costs.release)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """Per device, the most memory of activations, kept stage inputs, and parameters and
        gradients that are whole from a U or to an X at once, in the unit of `costs.activation`.
        """
        memory = map(self.memory, range(self.schedule.num_devices))
        return tuple(max((held for _, held in steps), default=0) for steps in memory)

    @cached_property
    def _changes(self) -> tuple[IntArray, IntArray]:
        """Per action, the memory that is taken at its start, and what is freed at its end."""
        table = self.schedule.encoded
        costs = self.costs.for_stages(table.num_stages)
        begins, ends, inputs = activation_changes(table, self.costs.release)
        # The rows that the slices of a sequence append: from its first forward to its last
        # backward, which is that of its first slice.
        forward = table.of_kinds((Kind.F,))
        opens = forward & (table.slice == 0)
        closes = table.of_kinds(makers(Value.INPUT_GRAD)) & (table.slice == 0)
        if table.forward_only:
            closes = forward & (table.slice == table.slices - 1)
        activation, checkpoint, buffer = (
            np.array(sizes)[table.stage]
            for sizes in (costs.activation, costs.checkpoint, costs.buffer)
        )
        taken = begins * activation + inputs * checkpoint + opens * buffer
        freed = ends * activation + closes * buffer
        for what in Sharded:
            gathered, dropped = whole_changes(table, what)
            size = np.array(getattr(costs, what.value))[table.stage]
            taken, freed = taken + gathered * size, freed + dropped * size
        return taken, freed

    @typed()
    def memory(self, device: int) -> tuple[MemoryStep, ...]:
        """Memory of a device over time (see `peak_memory`), a step where it changes (what dies goes
        before what begins).
        """
        table = self.schedule.encoded
        if not 0 <= device < table.num_devices:
            most = table.num_devices - 1
            raise ScheduleError(f"there is no device {quoted(device)}; devices go from 0 to {most}")
        row = slice(table.first[device], table.first[device + 1])
        taken, freed = self._changes
        changes = np.stack([taken[row], -freed[row]], axis=1).ravel()
        times = [*chain.from_iterable(zip(self.starts[row], self.ends[row], strict=True))]
        # U and X begin and end beside the others
        order = np.argsort(times, kind="stable")
        held = np.cumsum(changes[order]).tolist()
        return tuple(
            MemoryStep(times[i], held[n]) for n, i in enumerate(order.tolist()) if changes[i]
        )

    @typed()
    def over(self, planned: Timeline) -> Comparison:
        """This run compared with what was planned: a sentence about where time was lost, and a
        table (`str()` has both).

        ScheduleError where the other is of another placement or number of microbatches.
        """
        return Comparison(self, planned)

    @cached_property
    def critical_path(self) -> tuple[str, ...]:
        """A longest chain of cells (as text) from time 0 to the makespan, each released by the one
        before it.
        """
        table = self.schedule.encoded
        chain = self._chain(self.costs.for_stages(table.num_stages))
        return tuple(map(table.cell_text, chain))

    def _chain(self, costs: StageCosts) -> list[int]:
        """Numbers of the actions on a longest chain, in order of time (of an overlapped pair, its
        forward half): from the action that ends last back, at each step to the one that released
        it.

        Where its device and its input release an action at the same time, the chain stays on the
        device.
        """
        table, ends = self.schedule.encoded, self.ends
        if table.num_actions == 0:
            return []
        loop = loop_of(table, costs, self.transfers)
        loop.ends = list(ends)
        # A posted RECV holds nothing up: its device may have gone on.
        is_posted = self.transfers is Transfers.ASYNC
        posted = set(table.receives.tolist()) if is_posted else set()
        posted.update(np.flatnonzero(table.of_kinds(BESIDE) & ~table.of_kinds(LINKED)).tolist())
        first_half = {second: first for first, second in loop.second_half.items()}
        timed = table.is_compute | table.of_kinds(LINKED)
        last = max(np.flatnonzero(timed).tolist(), key=lambda i: ends[i])
        chain = [first_half.get(last, last)]
        while True:
            number = chain[-1]
            # What released it: the time, whether it is on the same device, and its number.
            found: list[tuple[float, bool, int]] = []
            for member in loop.groups.get(number, (number,)):
                row = range(member - 1, table.first[table.device[member]] - 1, -1)
                own = (i for i in row if loop.device[i] == loop.device[member] and i not in posted)
                if (before := next(own, -1)) >= 0:
                    found.append((ends[before], member == number, before))
            for half in {number, loop.second_half.get(number, number)}:
                if (gather := loop.also.get(half, -1)) >= 0:
                    found.append((ends[gather], False, gather))
                if loop.need[half] >= 0:
                    arrives = ends[loop.need[half]] + loop.latency[half]
                    found.append((arrives, False, loop.need[half]))
            if not found:
                return chain[::-1]
            released = max(found)[2]
            chain.append(first_half.get(released, released))


class LostTime(NamedTuple):
    """Time that the run's critical path spent beyond the plan, and on what."""

    cause: str
    time: float


@dataclass(frozen=True)
class Comparison:
    """What ran against what was planned; `str()` is a sentence and tables.

    Attributes:
        ran: the timeline of a run (`Pipeline.profile`).
        planned: the same table simulated.
    """

    ran: Timeline
    planned: Timeline

    def __post_init__(self) -> None:
        ran, plan = self.ran.schedule, self.planned.schedule
        if (ran.placement, ran.num_microbatches) != (plan.placement, plan.num_microbatches):
            raise ScheduleError(
                "a run cannot be compared with a plan of another placement, or of another number "
                f"of microbatches ({ran.num_microbatches} and {plan.num_microbatches}); simulate "
                "the run's table"
            )

    @property
    def error(self) -> float:
        """How far the plan's makespan is from the run's, as a share of the run's; below 0 where the
        run took longer.
        """
        return self.planned.makespan / self.ran.makespan - 1 if self.ran.makespan else 0.0

    @cached_property
    def losses(self) -> tuple[LostTime, ...]:
        """Along the run's critical path, what took longer than planned: largest first.  They add up
        to the whole difference.

        Actions by stage; transfers (a device waited for a message after it was sent); the host, or
        the device's own overhead (nothing was waited for); and what the plan spends on its own
        critical path beyond the planned times along the run's.
        """
        table = self.ran.schedule.encoded
        at_once = Costs(transfer=0).for_stages(table.num_stages)
        costs = self.planned.costs.for_stages(table.num_stages)
        lengths = action_durations(table, costs)
        found: dict[str, float] = {}
        planned_path = 0.0
        last_end, last_device, last_stage = 0.0, -1, 0
        for number in self.ran._chain(at_once):
            begin, end = self.ran.starts[number], self.ran.ends[number]
            stage, device = int(table.stage[number]), int(table.device[number])
            crossed = last_device not in (-1, device)
            wait = costs.transfer[last_stage] if crossed else 0.0
            cause = "transfers" if crossed else "gaps between actions of a device"
            found[cause] = found.get(cause, 0.0) + (begin - last_end) - wait
            length = lengths[int(table.last_half[number])]
            slower = f"stage {stage}"
            found[slower] = found.get(slower, 0.0) + (end - begin) - length
            planned_path += wait + length
            last_end, last_device, last_stage = end, device, stage
        found["another critical path than planned"] = planned_path - self.planned.makespan
        losses = (LostTime(cause, time) for cause, time in found.items())
        return tuple(sorted(losses, key=lambda loss: -abs(loss.time)))

    @property
    def sentence(self) -> str:
        """Where the time went, in a sentence."""
        ran, planned = self.ran.makespan, self.planned.makespan
        more = ran - planned
        worth = [loss for loss in self.losses if abs(loss.time) > _NOTHING * planned]
        share = f"{abs(more) / planned if planned else 0:.1%} {'more' if more >= 0 else 'less'}"
        text = f"the step took {ran:.4g}, {share} than the {planned:.4g} planned"
        if not worth:
            return text
        return f"{text}: " + ", ".join(f"{loss.time:+.3g} in {loss.cause}" for loss in worth[:4])

    def rows(self) -> list[tuple[str, ...]]:
        """Per device: busy and idle time, run and planned; below `COLUMNS`."""
        rows: list[tuple[str, ...]] = []
        for device, (busy, plan) in enumerate(zip(self.ran.busy, self.planned.busy, strict=True)):
            ratio = f"{busy / plan:.3f}" if plan else "-"
            idle = (f"{sum(t.idle[device]):.4g}" for t in (self.ran, self.planned))
            rows.append((str(device), f"{busy:.4g}", f"{plan:.4g}", ratio, *idle))
        return rows

    def __str__(self) -> str:
        return f"{self.sentence}\n{in_columns([COLUMNS, *self.rows()], left=0)}"


@typed()
def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    transfers: Transfers = Transfers.ASYNC,
    max_memory: float | None = None,
) -> Timeline:
    """Simulate a table: each action starts when its device is free and its inputs have arrived.

    An input from another device arrives `costs.transfer` after its producer ended.  Idle cells take
    no time.  A collective action (L, E, G) starts and ends at the same time on all devices.  A
    transfer comes before it (from the last stage's F to L, from the first stage's B to G) and after
    it (from L to the last stage's B, from E to the first stage's F).

    U and X run on a link of their device, beside its other actions: they start when the action
    before them in the row has ended, one after the other.  What uses parameters waits for their U.

    SEND and RECV take no time of their own, and the message leaves at the SEND.  `transfers` says
    who waits for it: the consumer (ASYNC), the RECV (BUFFERED), or both SEND and RECV (RENDEZVOUS).

    Args:
        schedule: a table that `check` accepts for these `transfers`.
        costs: times and sizes; all 1, and transfers 0, where it is None.
        transfers: how SEND and RECV behave, in a table that has them.
        max_memory: the most activation memory (in units of `costs.activation`) that a device may
            hold.

    Raises:
        ScheduleError: the table breaks a rule, or needs more than `max_memory`.
        CostError: a sequence of costs does not have one entry per stage.

    >>> import jaxpipe as jp
    >>> t = simulate(
    ...     jp.schedules.build("1f1b", devices=4, microbatches=8),
    ...     Costs(forward=1, input_grad=1, weight_grad=1),
    ... )
    >>> t.makespan, t.start["3F0"], t.peak_activations
    (33, 3, (4, 3, 2, 1))
    """
    costs = costs or Costs()
    check(schedule, transfers=transfers)
    table = schedule.encoded
    times = costs.for_stages(table.num_stages)
    loop = loop_of(table, times, transfers)
    loop.run(schedule.run_order(transfers).order)
    if table.has_transfers:
        hold_transfers(table, transfers, loop, times)
    # The halves of an overlapped pair start and end together.
    halves = table.last_half.tolist()
    starts, ends = (tuple(map(each.__getitem__, halves)) for each in (loop.starts, loop.ends))
    timeline = Timeline(schedule, costs, transfers, starts, ends)
    if max_memory is not None:
        may = f"may hold {max_memory} of activations, but holds"
        found = (
            Violation("memory", f"device {d} {may} {peak} at its peak")
            for d, peak in enumerate(timeline.peak_memory)
            if peak > max_memory
        )
        ScheduleError.refuse("the schedule needs too much memory", found)
    return timeline


def shortest(schedules: Iterable[Schedule], costs: Costs) -> Schedule:
    """The schedule with the least makespan under these costs; of equals, the first."""
    return min(schedules, key=lambda schedule: simulate(schedule, costs).makespan)
