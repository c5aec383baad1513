"""Puts the collective actions L, E and G into the rows of a table.

Vocabulary parallelism (Yeung et al. 2024, Balancing Pipeline Parallelism with Vocabulary
Parallelism, arXiv 2411.05288) cuts the embedding and the head of a language model over the
pipeline's devices.  Here all devices do their shares of one microbatch in one step of the program.
A collective action costs nothing where every device is between two actions at that time.  A device
in the middle of an action keeps the others waiting.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import pairwise

from ..engine.costs import Costs
from ..engine.loop import NEVER, Insertion
from ..engine.simulate import simulate
from ..errors import ScheduleError
from ..table.action import Action, Kind
from ..table.check import check
from ..table.encoded import Encoded
from ..table.kinds import KINDS, Value, makers, readers
from ..table.schedule import Schedule
from .align_collectives import align_collectives
from .backward import split_backward

# The share of the makespan that devices may lose by waiting for each other before backwards are
# split: a split costs code and a stash.
_WORTH_A_SPLIT = 0.01
# The same for a table of overlapped pairs: with separate W neighbours run unlike ticks, and the
# program is up to 15 % longer than the table.
_WORTH_A_SPLIT_OF_PAIRS = 0.03
# The most gradients of the first stage's input that may wait for a collective action of another
# kind.
_MOST_WAITING = 1


def place_collectives(
    schedule: Schedule, kinds: frozenset[Kind], *, costs: Costs | None, split: bool | None
) -> Schedule:
    """The table with collective actions of these kinds in every row for every microbatch.

    Actions of these kinds that the table has already are dropped.

    Args:
        schedule: a compute-only table that `check` accepts, with at least as many stages as
            devices.
        kinds: those of L, E and G that are placed; actions of the others keep their places.
        costs: the costs by which they are placed; all 1 where it is None.
        split: split backwards B into I and W: True, False, or None for a split only where devices
            would wait for each other without it.
    """
    plain = without_kinds(schedule, kinds)
    _refuse(plain, kinds)
    costs = costs or Costs()
    if split is not None:
        return _shortest(split_backward(plain) if split else plain, costs, kinds)
    # No device waits for a collective action where the makespan grows by no more than their time.
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
    """The fastest table by the costs, of those with collective actions at several rhythms.

    A collective action that runs as soon as it is due can come in the middle of other actions,
    where times differ a little or transfers take time.  A device that has just begun an action
    then keeps all others waiting.  At the rhythm of equal times it has not begun.
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


def without_kinds(schedule: Schedule, kinds: Collection[Kind]) -> Schedule:
    """The table without these kinds, without kinds that read only their values (H reads those of
    L), and without idle cells.
    """
    gone = {
        *kinds,
        *(
            late
            for kind in kinds
            if KINDS[kind].is_collective
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
    """ScheduleError for a table that cannot have collective actions."""
    check(schedule)
    name = "`last`" if Kind.L in kinds else "`first`"
    if schedule.has_transfers:
        raise ScheduleError(
            f"the table has SEND and RECV; spread {name} without them "
            "(jaxpipe.transforms.remove_transfers takes them out)"
        )
    if schedule.num_stages < schedule.num_devices:
        raise ScheduleError(
            f"the table has fewer stages ({schedule.num_stages}) than devices "
            f"({schedule.num_devices}), and the share of {name} on device "
            "d is written as that of stage d: use as many stages as devices, or more, or a "
            f"{name} that is not spread"
        )


class _Run:
    """Runs a table action by action, as early as each can start, with collectives as soon as they
    are due.

    An L is due when the last stage's output is ready, and an E when the first stage's device has
    nothing else to do before its F.  At every collective action, devices also do the E of the first
    stage's next F, and each G whose gradient is ready: no device waits for that.  A G is due alone
    where more than one would wait, and when no other collective action follows.
    """

    def __init__(self, schedule: Schedule, costs: Costs, kinds: frozenset[Kind]) -> None:
        table = schedule.encoded
        by_stage = costs.for_stages(table.num_stages)
        self._table, self._placed = table, kinds
        self._insertion = Insertion(schedule, by_stage)
        self._loop = self._insertion.loop
        seconds = set(self._loop.second_half.values())
        # Per device, the cells that are left, by the number of their first action.
        self._left = [
            deque(i for i in range(a, b) if i not in seconds) for a, b in pairwise(table.first)
        ]
        # By number, the actions that need its result.
        self._users: dict[int, list[int]] = {}
        for user, need in enumerate(self._loop.need):
            self._users.setdefault(need, []).append(user)
        devices, hop = table.num_devices, by_stage.transfer if table.num_devices > 1 else None
        # By action: the collective that reads what it makes, and the E that it waits for.
        self._source: dict[int, tuple[Kind, int]] = {}
        self._input: dict[int, int] = {}
        self._collective: dict[tuple[Kind, int], int] = {}
        for kind in sorted(kinds):
            end = KINDS[kind].end
            assert end is not None
            stage = end.stage % table.num_stages
            latency = 0 if hop is None else hop[stage]
            length = max((by_stage.of(kind) or (0,))[:devices])
            sources, users = (_makers(table, value, stage) for value in (end.needs, end.feeds))
            for m in range(table.num_microbatches):
                members = tuple(
                    self._insertion.add(d, Action(d, kind, m), length) for d in range(devices)
                )
                self._loop.groups |= dict.fromkeys(members, members)
                self._collective[kind, m] = members[0]
                if sources:
                    self._loop.wait(members[0], int(table.last_half[sources[m]]), latency)
                    self._source[int(table.last_half[sources[m]])] = (kind, m)
                if users and users[m] >= 0:
                    self._loop.wait(users[m], members[0], latency)
                    if kind is Kind.E:
                        self._input[users[m]] = m
        # Collective actions that are due alone; each G whose gradient is ready.
        self._due: list[tuple[float, Kind, int]] = []
        self._enqueued: set[tuple[Kind, int]] = set()
        self._waiting: list[tuple[float, int]] = []
        self._to_come = (
            len(kinds & {Kind.E, Kind.L}) * schedule.num_microbatches
            + len(table.collectives) // devices
        )
        self._queue: list[tuple[float, int, int]] = []  # (start, device, cell)

    def table(self) -> Schedule:
        """Run it to its end."""
        found = self._insertion.run(self._policy())
        assert not any(self._left), "a valid table runs to its end"
        return found if self._placed == {Kind.L} else align_collectives(found)

    def _policy(self) -> Iterator[int]:
        for device in range(len(self._left)):
            self._offer(device)
        while self._queue or self._due:
            if self._due and (not self._queue or self._due[0][0] <= self._queue[0][0]):
                due, kind, microbatch = heapq.heappop(self._due)
                if self._loop.ends[self._number(kind, microbatch)] == NEVER:
                    yield from self._run_collective(due, kind, microbatch)
                continue
            start, device, cell = heapq.heappop(self._queue)
            if start == self._start(device) and self._left[device][0] == cell:
                yield from self._run(device)

    def _number(self, kind: Kind, microbatch: int) -> int:
        found = self._collective.get((kind, microbatch))
        return int(self._table.at[kind, 0, microbatch]) if found is None else found

    def _start(self, device: int) -> float:
        """When a device's next cell can start; `NEVER` where it lacks something, is a collective,
        or there is none.
        """
        left = self._left[device]
        return NEVER if not left or left[0] in self._loop.groups else self._loop.begin(left[0])

    def _offer(self, device: int) -> None:
        """Put a device's next cell into the queue, if it can start; ask for the collective that it
        waits for.
        """
        start, left = self._start(device), self._left[device]
        if start < NEVER:
            heapq.heappush(self._queue, (start, device, left[0]))
        elif left and left[0] in self._loop.groups:
            # One that the table has already, when all devices have reached it.
            members = self._loop.groups[left[0]]
            if all(row and row[0] == i for row, i in zip(self._left, members, strict=True)):
                kind = Kind(int(self._table.kind[left[0]]))
                self._ask(self._loop.ready(members[0]), kind, int(self._table.microbatch[left[0]]))
        elif left:
            halves = (left[0], self._loop.second_half.get(left[0], left[0]))
            for microbatch in {self._input[half] for half in halves if half in self._input}:
                self._ask(self._loop.free[device], Kind.E, microbatch)

    def _ask(self, due: float, kind: Kind, microbatch: int) -> None:
        """Have a collective for this, once."""
        if (kind, microbatch) not in self._enqueued:
            self._enqueued.add((kind, microbatch))
            heapq.heappush(self._due, (due, kind, microbatch))

    def _run(self, device: int) -> Iterator[int]:
        cell = self._left[device].popleft()
        yield cell
        last = self._loop.second_half.get(cell, cell)
        if last != cell:
            yield last
        if last in self._source:
            kind, microbatch = self._source[last]
            there = self._loop.ready(self._collective[kind, microbatch])
            if kind is not Kind.G:
                self._ask(there, kind, microbatch)
            else:
                heapq.heappush(self._waiting, (there, microbatch))
                if not self._to_come or len(self._waiting) > _MOST_WAITING:
                    self._ask(self._waiting[0][0], kind, self._waiting[0][1])
        self._offer(device)
        for user in self._users.get(last, ()):
            other = self._loop.device[user]
            if other != device:
                self._offer(other)

    def _run_collective(self, due: float, kind: Kind, microbatch: int) -> Iterator[int]:
        """A collective action begins when the last device is free; until then, each device runs
        the actions that fit.
        """
        begin = max(due, *self._loop.free)
        moved = True
        while moved:
            moved = False
            for device, left in enumerate(self._left):
                start = self._start(device)
                if start == NEVER:
                    continue
                last = self._loop.second_half.get(left[0], left[0])
                if start + self._loop.duration[last] <= begin:
                    yield from self._run(device)
                    moved = True
        yield self._collective_of(kind, microbatch)
        for following in self._next_inputs() if kind is not Kind.E else ():
            yield self._collective_of(Kind.E, following)
        while self._waiting and self._waiting[0][0] <= begin:
            waiting = heapq.heappop(self._waiting)[1]
            if self._loop.ends[self._collective[Kind.G, waiting]] == NEVER:
                yield self._collective_of(Kind.G, waiting)
        if not self._to_come:
            while self._waiting:
                there, waiting = heapq.heappop(self._waiting)
                self._ask(there, Kind.G, waiting)
        for device in range(len(self._left)):
            self._offer(device)

    def _next_inputs(self) -> list[int]:
        """The microbatches of the first stage's next F on each device that has it, where their E is
        not done.
        """
        found = []
        for left in self._left if self._input else ():
            halves = (half for i in left for half in (i, self._loop.second_half.get(i, -1)))
            following = next((self._input[half] for half in halves if half in self._input), -1)
            if following >= 0 and self._loop.ends[self._collective[Kind.E, following]] == NEVER:
                found.append(following)
        return found

    def _collective_of(self, kind: Kind, microbatch: int) -> int:
        """The number of a collective; one of the table's own leaves the rows."""
        self._to_come -= kind is not Kind.G or kind not in self._placed
        if kind not in self._placed:
            for left in self._left:
                left.popleft()
        return self._number(kind, microbatch)


def _makers(table: Encoded, value: Value | None, stage: int) -> list[int]:
    """By microbatch, the action that makes a value of a stage; -1 for none."""
    if value is None:
        return []
    found: list[int] = table.at[list(makers(value)), stage].max(axis=0).tolist()
    return found
