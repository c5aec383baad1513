"""The result of a simulation: times, idle time by cause, memory over time, the critical path, and a
run compared with its plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..errors import ScheduleError, quoted
from ..table.activations import Changes, Split, activation_changes, live_activations, split_peaks
from ..table.encoded import Encoded
from ..table.kinds import Action, Kind, Overlap, Value, makers
from ..table.run_order import Transfers
from ..table.schedule import Schedule
from ..table.typed import typed
from .costs import Costs, StageCosts
from .loop import Loop

_DGRAD, _WGRAD = makers(Value.INPUT_GRAD), makers(Value.WEIGHT_GRAD)
_NOTHING = 0.005  # of the planned makespan: less is not worth a word in the sentence
COLUMNS = ("device", "busy", "planned", "ratio", "idle", "planned")


class Idle(NamedTuple):
    """A device's idle time by cause; the three add up to makespan - busy."""

    warmup: float  # before its first action
    waiting: float  # between its actions: an input is not there yet
    drain: float  # after its last action


class Step(NamedTuple):
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
        """The time of a microbatch in the steady state; None where the step is too short, or too
        irregular, to have one.
        """
        return steady_period(self.schedule.encoded, self.starts, self.busy)

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
        table = self.schedule.encoded
        found = []
        for device in range(table.num_devices):
            row = np.arange(table.first[device], table.first[device + 1])
            row = row[table.is_compute[row]]
            found.append(
                (self.starts[row[0]], self.ends[row[-1]])
                if len(row)
                else (self.makespan, self.makespan)
            )
        return tuple(found)

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
        live = live_activations(table, self.costs.release)
        return tuple(
            int(live[a:b].max(initial=0))
            for a, b in zip(table.first[:-1], table.first[1:], strict=True)
        )

    @property
    def peak_offloaded(self) -> Split:
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
        """Per device, the most memory of activations and kept stage inputs at once, in the unit of
        `costs.activation`.
        """
        return tuple(
            max((held for _, held in self.memory(d)), default=0)
            for d in range(self.schedule.num_devices)
        )

    @cached_property
    def _changes(self) -> Changes:
        return activation_changes(self.schedule.encoded, self.costs.release)

    @typed()
    def memory(self, device: int) -> tuple[Step, ...]:
        """Activation memory of a device over time, a step where it changes (what dies goes before
        what begins).
        """
        table = self.schedule.encoded
        if not 0 <= device < table.num_devices:
            raise ScheduleError(
                f"there is no device {quoted(device)}; devices go from 0 to {table.num_devices - 1}"
            )
        row = slice(table.first[device], table.first[device + 1])
        costs = self.costs.for_stages(table.num_stages)
        columns = (
            *(change[row].tolist() for change in self._changes),
            table.stage[row].tolist(),
            self.starts[row],
            self.ends[row],
        )
        events: list[tuple[float, float]] = []
        for begin, die, kept, stage, start, end in zip(*columns, strict=True):
            change = begin * costs.activation[stage] + kept * costs.checkpoint[stage]
            if begin or change:
                events.append((start, change))
            if die:
                events.append((end, -costs.activation[stage]))
        if buffers := self._buffer_events(device):
            events = sorted(events + buffers, key=lambda event: (event[0], event[1] > 0))
        return _accumulate(events)

    def _buffer_events(self, device: int) -> list[tuple[float, float]]:
        """When the rows that the slices of a sequence append begin to take memory, and when they
        are freed: at the first forward, and at the end of the last backward.
        """
        table = self.schedule.encoded
        sizes = self.costs.for_stages(table.num_stages).buffer
        found: list[tuple[float, float]] = []
        last = table.at[Kind.F] if table.forward_only else table.backward_at
        place = table.slices - 1 if table.forward_only else 0
        for stage in np.flatnonzero(sizes).tolist():
            first_slices = np.arange(0, table.num_microbatches, table.slices)
            for begin, end in zip(
                table.at[Kind.F][stage, first_slices],
                last[stage, first_slices + place],
                strict=True,
            ):
                if table.device[begin] == device:
                    found.append((self.starts[begin], sizes[stage]))
                    found.append((self.ends[end], -sizes[stage]))
        return found

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
        chain = critical_chain(
            table, self.transfers, self.ends, self.costs.for_stages(table.num_stages)
        )
        return tuple(table.cell_text(i) for i in chain)


class Loss(NamedTuple):
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
        ran, planned = self.ran.schedule, self.planned.schedule
        if (ran.placement, ran.num_microbatches) != (planned.placement, planned.num_microbatches):
            raise ScheduleError(
                f"a run of {ran.num_stages} stages and {ran.num_microbatches} microbatches "
                "cannot be compared with a plan of "
                f"{planned.num_stages} stages and {planned.num_microbatches} microbatches, or of "
                "another placement; "
                "simulate the run's table"
            )

    @property
    def error(self) -> float:
        """How far the plan's makespan is from the run's, as a share of the run's; below 0 where the
        run took longer.
        """
        return self.planned.makespan / self.ran.makespan - 1 if self.ran.makespan else 0.0

    @cached_property
    def losses(self) -> tuple[Loss, ...]:
        """Along the run's critical path, what took longer than planned: largest first.  They add up
        to the whole difference.

        Actions by stage; transfers (a device waited for a message after it was sent); the host, or
        the device's own overhead (nothing was waited for); and what the plan spends on its own
        critical path beyond the planned times along the run's.
        """
        table = self.ran.schedule.encoded
        at_once = Costs(transfer=0).for_stages(table.num_stages)
        chain = critical_chain(table, self.ran.transfers, self.ran.ends, at_once)
        transfer = self.planned.costs.for_stages(table.num_stages).transfer
        found: dict[str, float] = {}
        planned_path = 0.0
        last_end, last_device, last_stage = 0.0, -1, 0
        for number in chain:
            begin, end = self.ran.starts[number], self.ran.ends[number]
            stage, device = int(table.stage[number]), int(table.device[number])
            crossed = last_device not in (-1, device)
            wait = transfer[last_stage] if crossed else 0.0
            cause = "transfers" if crossed else "gaps between actions of a device"
            found[cause] = found.get(cause, 0.0) + (begin - last_end) - wait
            length = self._planned_length(number)
            slower = f"stage {stage}"
            found[slower] = found.get(slower, 0.0) + (end - begin) - length
            planned_path += wait + length
            last_end, last_device, last_stage = end, device, stage
        found["another critical path than planned"] = planned_path - self.planned.makespan
        losses = (Loss(cause, time) for cause, time in found.items())
        return tuple(sorted(losses, key=lambda loss: -abs(loss.time)))

    def _planned_length(self, number: int) -> float:
        """The planned time of an action of the run (of a pair: of both halves); a whole backward
        may be planned as two halves.
        """
        table = self.ran.schedule.encoded
        plan = [self._of(n) for n in {number, int(table.last_half[number])}]
        return max(end for _, end in plan) - min(begin for begin, _ in plan)

    def _of(self, number: int) -> tuple[float, float]:
        """Planned start and end of an action of the run."""
        ran, plan = self.ran.schedule.encoded, self.planned.schedule.encoded
        kind = Kind(int(ran.kind[number]))
        stage, microbatch = int(ran.stage[number]), int(ran.microbatch[number])
        at = int(plan.at[kind, stage, microbatch])
        if at >= 0:
            return self.planned.starts[at], self.planned.ends[at]
        if kind in _DGRAD and kind in _WGRAD:  # a whole backward, which the plan may have in halves
            one, other = (
                int(plan.at[half, stage, microbatch])
                for kinds in (_DGRAD, _WGRAD)
                for half in kinds
                if half is not kind
            )
            if one >= 0 and other >= 0:
                took = sum(self.planned.ends[n] - self.planned.starts[n] for n in (one, other))
                return self.planned.starts[one], self.planned.starts[one] + took
        raise ScheduleError(
            f"the plan has no {ran.text(number)}, which ran; simulate the run's table"
        )

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
        lines = [COLUMNS, *self.rows()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
        table = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        ]
        return "\n".join([self.sentence, *table])


def _accumulate(events: list[tuple[float, float]]) -> tuple[Step, ...]:
    """Running totals of (time, change) events that are in order of time."""
    held: float = 0
    steps: list[Step] = []
    for time, change in events:
        held += change
        steps.append(Step(time, held))
    return tuple(steps)


_LONGEST_TURN = 32  # microbatches after which a steady state repeats
_EQUAL = 1e-9  # of the last start: sums of the same times in another order


def critical_chain(
    table: Encoded, transfers: Transfers, ends: Sequence[float], costs: StageCosts
) -> list[int]:
    """Numbers of the actions on a longest chain, in order of time (of an overlapped pair, its
    forward half): from the action that ends last back, at each step to the one that released it.

    Where its device and its input release an action at the same time, the chain stays on the
    device.
    """
    if table.num_actions == 0:
        return []
    loop = Loop.of(table, costs, transfers)
    loop.ends = list(ends)
    # A posted RECV holds nothing up: its device may have gone on.
    posted = set(table.receives.tolist()) if transfers is Transfers.ASYNC else set()
    first_half = {second: first for first, second in loop.second_half.items()}
    last = max(np.flatnonzero(table.is_compute).tolist(), key=lambda i: ends[i])
    chain = [first_half.get(last, last)]
    while True:
        number = chain[-1]
        # What released it: the time, whether it is on the same device, and its number.
        found: list[tuple[float, bool, int]] = []
        for member in loop.groups.get(number, (number,)):
            before = member - 1
            while before in posted:
                before -= 1
            if before >= table.first[loop.device[member]]:
                found.append((ends[before], member == number, before))
        for half in {number, loop.second_half.get(number, number)}:
            if loop.need[half] >= 0:
                found.append((loop.ready(half), False, loop.need[half]))
        if not found:
            return chain[::-1]
        released = max(found)[2]
        chain.append(first_half.get(released, released))


def steady_period(table: Encoded, starts: Sequence[float], busy: Sequence[float]) -> float | None:
    """The time of a microbatch where the table repeats: all stages and kinds start the same time
    later, K microbatches on.

    Of the least K for which two turns of K microbatches or more, and at least half of all
    microbatches, are alike, the longest repeat counts.  None where nothing repeats so long. What
    repeats faster than the busiest device works (`busy` is the time of all microbatches) is a group
    of microbatches in one chunk.
    """
    microbatches = table.num_microbatches
    chosen = np.flatnonzero(table.is_compute & table.in_range)
    when, group = np.array(starts)[chosen], (table.kind * table.num_stages + table.stage)[chosen]
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
        if lengths[longest] >= enough and period >= max(busy) / microbatches - near:
            return period
    return None
