"""Where all devices do what they do together: L, E and G put into the rows of a table.

Vocabulary parallelism (Yeung et al. 2024, Balancing Pipeline Parallelism with Vocabulary
Parallelism, arXiv 2411.05288) cuts the embedding and the head of a language model over the
pipeline's devices.  Here all devices do their shares of one microbatch in one step of the program,
so that is where all of them meet.  A meeting costs nothing where every device is between two
actions then; what is in the middle of an action keeps the others waiting.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from ..engine.costs import Costs
from ..engine.loop import action_durations
from ..engine.simulate import simulate
from ..errors import ScheduleError
from ..table.action import Action, Cell, Kind
from ..table.check import check
from ..table.encoded import Encoded
from ..table.kinds import KINDS, TOGETHER, End, Value, makers, readers
from ..table.run_order import Transfers, senders, waits
from ..table.schedule import Schedule
from .align_shares import align_shares
from .split_backward import split_backward

# The share of the makespan that devices may lose by waiting for each other before backwards are
# split: a split costs code and a stash.
_WORTH_A_SPLIT = 0.01
# The same for a table of overlapped pairs: with W apart neighbours run unlike ticks, and the
# program is up to 15 % longer than the table.
_WORTH_A_SPLIT_OF_PAIRS = 0.03
# So many gradients of the first stage's input may wait for a meeting that is for something else.
_MOST_WAITING = 1


def place_together(
    schedule: Schedule, kinds: frozenset[Kind], *, costs: Costs | None, split: bool | None
) -> Schedule:
    """The table with these kinds of what all devices do together in every row for every microbatch,
    those that it had dropped.

    Args:
        schedule: a compute-only table that `check` accepts, with at least as many stages as
            devices.
        kinds: those of L, E and G that are placed; what the table has of the others stays where it
            is.
        costs: the costs by which they are placed; all 1 where it is None.
        split: split backwards B into I and W: True, False, or where devices would else wait for
            each other (None).
    """
    plain = without(schedule, kinds)
    _refuse(plain, kinds)
    costs = costs or Costs()
    if split is not None:
        return _shortest(split_backward(plain) if split else plain, costs, kinds)
    # Nobody waits at a meeting where the table takes no longer than without any, and all that is
    # done in them besides.
    stage_costs = costs.for_stages(plain.num_stages)
    added = sum(max(stage_costs.of(kind) or (0,)) for kind in kinds) * plain.num_microbatches
    worth = _WORTH_A_SPLIT_OF_PAIRS if len(plain.encoded.pairs) else _WORTH_A_SPLIT
    enough = (1 + worth) * (simulate(plain, costs).makespan + added)
    whole = _shortest(plain, costs, kinds)
    if simulate(whole, costs).makespan <= enough or not plain.encoded.of_kinds((Kind.B,)).any():
        return whole
    return min(
        (whole, _shortest(split_backward(plain), costs, kinds)),
        key=lambda table: simulate(table, costs).makespan,
    )


def _shortest(plain: Schedule, costs: Costs, kinds: frozenset[Kind]) -> Schedule:
    """The table that takes the least time by the costs, of those that have their meetings at
    several rhythms.

    Meetings that are held as soon as they are due fall into the middle of actions where times
    differ a little, or transfers take some: a device that has begun just before keeps all others
    waiting for nearly a whole action.  At the rhythm of equal times it has not begun.
    """
    found = {
        _Run(plain, rhythm, kinds).table(): None for rhythm in _rhythms(costs, plain.num_stages)
    }
    return (
        next(iter(found))
        if len(found) == 1
        else min(found, key=lambda table: simulate(table, costs).makespan)
    )


def _rhythms(costs: Costs, stages: int) -> list[Costs]:
    """The costs, the same without transfers, and with F, I and W that all take the mean."""
    by_stage = costs.for_stages(stages)
    mean = sum((*by_stage.forward, *by_stage.input_grad, *by_stage.weight_grad)) / (3 * stages)
    at_once = replace(costs, transfer=0)
    equal = replace(
        at_once,
        forward=mean,
        input_grad=mean,
        weight_grad=mean,
        backward=None,
        overlap=None,
        recompute=None,
    )
    return list({each.for_stages(stages): each for each in (equal, at_once, costs)}.values())


def without(schedule: Schedule, kinds: Collection[Kind]) -> Schedule:
    """The table without these kinds, what only these feed (H, without L), and idle cells."""
    gone = {
        *kinds,
        *(
            late
            for kind in kinds
            if KINDS[kind].together
            for value in KINDS[kind].makes
            for late in readers(value)
        ),
    }
    rows = [
        [c for c in row if c is not None and (not isinstance(c, Action) or c.kind not in gone)]
        for row in schedule.cells
    ]
    return schedule.with_rows(rows)


def _refuse(schedule: Schedule, kinds: frozenset[Kind]) -> None:
    """ScheduleError for a table that cannot have what all devices do together."""
    check(schedule)
    name = "`last`" if Kind.L in kinds else "`first`"
    if schedule.has_transfers:
        raise ScheduleError(
            f"the table has SEND and RECV; spread {name} without them (jaxpipe.remove_transfers "
            "takes them out)"
        )
    if schedule.num_stages < schedule.num_devices:
        raise ScheduleError(
            f"the table has fewer stages ({schedule.num_stages}) than devices "
            f"({schedule.num_devices}), and the share of {name} on device "
            "d is written as that of stage d: use as many stages as devices, or more, or a "
            f"{name} that is not spread"
        )


@dataclass
class _Device:
    """A device while the table is run: the cells that are left, when it is free, and its
    new row.
    """

    left: deque[int]  # by the number of a cell's last action
    free: float = 0
    row: list[Cell] = field(default_factory=list)


class _Run:
    """Runs a table action by action, as early as each can start, with meetings as soon as they are
    due.

    An L is due when the last stage's output is there, an E when the first stage's device has
    nothing else to do before its F.  Whenever all devices meet they also do the E of the first
    stage's next F, and the G whose gradients are there: that makes nobody wait.  A G has a meeting
    of its own where more than one would wait, and when no other meeting is to come.
    """

    def __init__(self, schedule: Schedule, costs: Costs, kinds: frozenset[Kind]) -> None:
        table = schedule.encoded
        by_stage = costs.for_stages(table.num_stages)
        self._schedule, self._table, self._placed = schedule, table, kinds
        self._durations = action_durations(table, by_stage)
        wait = waits(table, Transfers.ASYNC)
        latency = np.array(by_stage.transfer)[table.stage[senders(table, wait)]]
        self._needs = _needs_of_cells(table, wait.tolist(), latency.tolist())
        self._users: dict[int, list[int]] = {}
        for user, needs in self._needs.items():
            for need, _ in needs:
                self._users.setdefault(need, []).append(user)
        whole = table.last_half == np.arange(table.num_actions)
        self._devices = [
            _Device(deque((a + np.flatnonzero(whole[a:b])).tolist()))
            for a, b in pairwise(table.first)
        ]
        self._ends: dict[int, float] = {}
        alone = table.num_devices == 1
        stages = {kind: _end(kind).stage % table.num_stages for kind in TOGETHER}
        self._hop = {
            kind: 0 if alone else by_stage.transfer[stage] for kind, stage in stages.items()
        }
        self._length = {
            kind: max((by_stage.of(kind) or (0,))[: table.num_devices]) for kind in TOGETHER
        }
        # By cell: what it makes for a meeting, and what meetings must be over before it.
        self._sources: dict[int, list[tuple[Kind, int]]] = {}
        self._held: dict[int, list[tuple[Kind, int]]] = {}
        for kind in {*kinds, *(Kind(k) for k in table.kind[table.together].tolist())}:
            for found, value in ((self._sources, _end(kind).needs), (self._held, _end(kind).feeds)):
                for m, cell in enumerate(_cells(table, value, stages[kind])):
                    if cell >= 0:
                        found.setdefault(cell, []).append((kind, m))
        self._met: dict[tuple[Kind, int], float] = {}  # when what is made in a meeting is there
        # meetings that are to be held for their own sake
        self._due: list[tuple[float, Kind, int]] = []
        self._asked: set[tuple[Kind, int]] = set()  # those that have been in `_due`
        self._waiting: list[tuple[float, int]] = []  # microbatches of G whose gradient is there
        self._to_come = (
            len(kinds & {Kind.E, Kind.L}) * schedule.num_microbatches
            + len(table.meetings) // table.num_devices
        )
        self._queue: list[tuple[float, int, int]] = []  # (start, device, cell)

    def table(self) -> Schedule:
        """Run it to its end."""
        for device in range(len(self._devices)):
            self._offer(device)
        while self._queue or self._due:
            if self._due and (not self._queue or self._due[0][0] <= self._queue[0][0]):
                due, kind, microbatch = heapq.heappop(self._due)
                if (kind, microbatch) not in self._met:
                    self._meet(due, kind, microbatch)
                continue
            start, device, cell = heapq.heappop(self._queue)
            mine = self._devices[device]
            if mine.left and mine.left[0] == cell and start == self._start(device):
                self._run(device, start)
        assert not any(device.left for device in self._devices), "a valid table runs to its end"
        found = self._schedule.with_rows([device.row for device in self._devices])
        return found if self._placed == {Kind.L} else align_shares(found)

    def _start(self, device: int) -> float | None:
        """When a device's next cell can start; None where it lacks something, waits for all
        devices, or there is none.
        """
        mine = self._devices[device]
        if not mine.left or mine.left[0] in self._table.meetings:
            return None
        ready = mine.free
        cell = mine.left[0]
        for need, latency in self._needs.get(cell, ()):
            if need not in self._ends:
                return None
            ready = max(ready, self._ends[need] + latency)
        for meeting in self._held.get(cell, ()):
            if meeting not in self._met:
                return None
            ready = max(ready, self._met[meeting])
        return ready

    def _offer(self, device: int) -> None:
        """Put a device's next cell into the queue, if it can start; ask for the meeting that it
        waits for.
        """
        start, mine = self._start(device), self._devices[device]
        if start is not None:
            heapq.heappush(self._queue, (start, device, mine.left[0]))
        elif mine.left and mine.left[0] in self._table.meetings:
            self._ask_for_own(mine.left[0])
        elif mine.left:
            for kind, microbatch in self._held.get(mine.left[0], ()):
                if kind is Kind.E and kind in self._placed:
                    self._ask(mine.free, kind, microbatch)

    def _ask(self, due: float, kind: Kind, microbatch: int) -> None:
        """Have a meeting for this, once."""
        if (kind, microbatch) not in self._asked:
            self._asked.add((kind, microbatch))
            heapq.heappush(self._due, (due, kind, microbatch))

    def _ask_for_own(self, cell: int) -> None:
        """Have a meeting that the table has itself, when all devices are there and what it needs
        is.
        """
        meeting = self._table.meetings[cell]
        if any(
            not d.left or d.left[0] != i
            for d, i in zip(self._devices, meeting.members, strict=True)
        ):
            return
        kind = Kind(int(self._table.kind[cell]))
        ready = (
            0.0
            if meeting.source < 0
            else self._ends[int(self._table.last_half[meeting.source])] + self._hop[kind]
        )
        self._ask(ready, kind, int(self._table.microbatch[cell]))

    def _run(self, device: int, start: float) -> None:
        mine = self._devices[device]
        cell = mine.left.popleft()
        mine.row.append(self._schedule.rows[device][int(self._table.position[cell])])
        mine.free = self._ends[cell] = start + self._durations[cell]
        for kind, microbatch in self._sources.get(cell, ()):
            if kind in self._placed:
                self._made(mine.free + self._hop[kind], kind, microbatch)
        self._offer(device)
        for user in self._users.get(cell, ()):
            other = int(self._table.device[user])
            if self._devices[other].left and self._devices[other].left[0] == user:
                self._offer(other)

    def _made(self, there: float, kind: Kind, microbatch: int) -> None:
        """What a meeting reads is there."""
        if kind is not Kind.G:
            self._ask(there, kind, microbatch)
            return
        heapq.heappush(self._waiting, (there, microbatch))
        if not self._to_come or len(self._waiting) > _MOST_WAITING:
            self._ask(*self._waiting[0][:1], kind, self._waiting[0][1])

    def _meet(self, due: float, kind: Kind, microbatch: int) -> None:
        """All devices meet when the last of them is free; before that, each does what fits."""
        begin = max(due, *(device.free for device in self._devices))
        moved = True
        while moved:
            moved = False
            for number, device in enumerate(self._devices):
                start = self._start(number)
                if start is not None and start + self._durations[device.left[0]] <= begin:
                    self._run(number, start)
                    moved = True
        self._together(begin, kind, microbatch)
        for next_microbatch in self._next_inputs() if kind is not Kind.E else ():
            self._together(begin, Kind.E, next_microbatch)
        while self._waiting and self._waiting[0][0] <= begin:
            there, waiting = heapq.heappop(self._waiting)
            if (Kind.G, waiting) not in self._met:
                self._together(there, Kind.G, waiting)
        if not self._to_come:
            while self._waiting:
                there, waiting = heapq.heappop(self._waiting)
                self._ask(there, Kind.G, waiting)
        for number in range(len(self._devices)):
            self._offer(number)

    def _next_inputs(self) -> list[int]:
        """The microbatches of the first stage's next F on each device that has it, where their E is
        not done.
        """
        if Kind.E not in self._placed:
            return []
        found = []
        for device in self._devices:
            held = (
                meeting
                for cell in device.left
                for meeting in self._held.get(cell, ())
                if meeting[0] is Kind.E
            )
            found += [
                microbatch
                for kind, microbatch in (next(held, (Kind.E, -1)),)
                if microbatch >= 0 and (kind, microbatch) not in self._met
            ]
        return found

    def _together(self, begin: float, kind: Kind, microbatch: int) -> None:
        """All devices do this, as soon as all are free."""
        begin = max(begin, *(device.free for device in self._devices))
        end = begin + self._length[kind]
        self._met[kind, microbatch] = end + self._hop[kind]
        self._to_come -= kind is not Kind.G or kind not in self._placed
        for number, device in enumerate(self._devices):
            if kind not in self._placed:
                self._ends[device.left.popleft()] = end
            device.row.append(Action(number, kind, microbatch))
            device.free = end


def _end(kind: Kind) -> End:
    end = KINDS[kind].end
    assert end is not None
    return end


def _cells(table: Encoded, value: Value | None, stage: int) -> list[int]:
    """By microbatch, the cell that makes a value of a stage; -1 for none."""
    if value is None:
        return []
    found = np.full(table.num_microbatches, -1)
    for kind in makers(value):
        made = table.at[kind, stage]
        found = np.where(made >= 0, table.last_half[made], found)
    return found.tolist()


def _needs_of_cells(
    table: Encoded, wait: list[int], latency: list[float]
) -> dict[int, list[tuple[int, float]]]:
    """By cell, the cells of other devices that feed it and how long their results take
    to arrive.
    """
    found: dict[int, list[tuple[int, float]]] = {}
    for i, need in enumerate(wait):
        if need >= 0:
            found.setdefault(int(table.last_half[i]), []).append(
                (int(table.last_half[need]), latency[i])
            )
    return found
