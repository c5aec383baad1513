"""The result of a simulation: times, idle time by cause, memory over time, the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..errors import ParseError, ScheduleError, quoted
from ..table.action import Action, Overlap, parse_cell, parts
from ..table.activations import Changes, Split, activation_changes, live_activations, split_peaks
from ..table.encoded import Encoded, plain_rows
from ..table.run_order import Transfers
from ..table.schedule import Schedule
from ..table.typed import typed
from .comparison import Comparison
from .costs import Costs
from .critical_path import critical_chain
from .period import steady_period


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
    """Times by action: `times["2F0"]`, `times["(0F7;7B3)OVERLAP_F_B"]`, `times[Action(...)]`.

    Times are looked up on demand; the texts of the actions are made only when one iterates.
    """

    def __init__(self, table: Encoded, times: tuple[float, ...]) -> None:
        self._table = table
        self._times = times

    def __getitem__(self, key: str | Action | Overlap) -> float:
        number = self._number(key)
        if number < 0:
            raise KeyError(key)
        return self._times[number]

    def _number(self, key: str | Action | Overlap) -> int:
        """The number of an action (of a pair: of its forward half), or -1."""
        try:
            ((cell,),) = plain_rows(((parse_cell(key) if isinstance(key, str) else key,),))
        except (ParseError, ScheduleError):
            return -1
        numbers = [self._find(half) for half in parts(cell)]
        if len(numbers) == 2 and numbers[1] != numbers[0] + 1:
            return -1
        if len(numbers) == 2 and self._table.last_half[numbers[0]] != numbers[1]:
            return -1
        return numbers[0] if numbers else -1

    def _find(self, action: Action) -> int:
        inside = (
            0 <= action.stage < self._table.num_stages
            and 0 <= action.microbatch < self._table.num_microbatches
        )
        return int(self._table.at[action.kind, action.stage, action.microbatch]) if inside else -1

    def __iter__(self) -> Iterator[str]:
        for i in range(self._table.num_actions):
            if self._table.last_half[i] != i:
                yield self._table.cell_text(i)
            yield self._table.text(i)

    def __len__(self) -> int:
        return self._table.num_actions + int(
            (self._table.last_half != np.arange(self._table.num_actions)).sum()
        )

    def __repr__(self) -> str:
        return f"<times of {self._table.num_actions} actions>"


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

    @property
    def start(self) -> ActionTimes:
        """Start by action text; an overlapped pair's text and the texts of its halves are
        all keys.
        """
        return ActionTimes(self.schedule.encoded, self.starts)

    @property
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
        return _accumulate(events)

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


def _accumulate(events: list[tuple[float, float]]) -> tuple[Step, ...]:
    """Running totals of (time, change) events that are in order of time."""
    held: float = 0
    steps: list[Step] = []
    for time, change in events:
        held += change
        steps.append(Step(time, held))
    return tuple(steps)
