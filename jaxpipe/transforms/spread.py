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
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ..engine.costs import Costs
from ..engine.loop import NEVER, Insertion
from ..engine.simulate import simulate
from ..errors import ScheduleError
from ..table.kinds import KINDS, Action, Kind
from ..table.schedule import Schedule, check
from ..table.typed import typed
from .align_collectives import align_collectives
from .rewrites import refuse_transfers, split_backward, without_kinds

# The share of the makespan that devices may lose by waiting for each other before backwards are
# split: a split costs code and a stash.
_WORTH_A_SPLIT = 0.01
# The same for a table of overlapped pairs: with separate W neighbours run unlike ticks, and the
# program is up to 15 % longer than the table.
_WORTH_A_SPLIT_OF_PAIRS = 0.03
# The most gradients of the first stage's input that may wait for a collective action of another
# kind.
_MOST_WAITING = 1


@typed()
def spread_last(
    schedule: Schedule, *, costs: Costs | None = None, split: bool | None = None
) -> Schedule:
    """Put an L into every row for every microbatch, after the last stage's F and before its B,
    where devices lose the least time.

    Every row keeps its order, so no device holds more activations than before.  An L is a
    collective action: it begins when all devices are free, and a device that is free sooner runs
    the actions that fit into the wait.  Idle cells, and each L that the table has already, are
    dropped.

    Where F, I and W take equally long, no device waits.  In 1F1B, a B that takes twice as long as
    an F makes neighbours wait; backwards that are split into I and W avoid these waits.

    Args:
        schedule: a compute-only table that `check` accepts, with at least as many stages as
            devices.
        costs: the costs by which L are placed (`Costs.last` is the time of an L); all 1 where it is
            None.
        split: split backwards B into I and W (`split_backward`): True, False, or None for a split
            only where devices would wait for each other without it.

    Raises:
        ScheduleError: the table breaks a rule, has SEND and RECV, or fewer stages than devices.
        CostError: a sequence of costs does not have one entry per stage.

    >>> import jaxpipe as jp
    >>> print(
    ...     spread_last(
    ...         jp.schedules.build("gpipe", devices=2, microbatches=2), split=False
    ...     ).to_csv(),
    ...     end="",
    ... )
    0F0,0F1,0L0,0L1,0B0,0B1
    1F0,1L0,1F1,1L1,1B0,1B1
    """
    return _placed(schedule, frozenset({Kind.L}), costs, split)


@typed()
def spread_first(
    schedule: Schedule, *, costs: Costs | None = None, split: bool | None = None
) -> Schedule:
    """Put an E into every row for every microbatch, before the first stage's F, and a G after its
    B: `first` and its gradient.

    Both are collective actions, as L is (`spread_last`).  Where the table has L, the E of the first
    stage's next F and the G of its last B come right after an L, so spread `last` first.  Where it
    has none, an E is due when the first stage's device comes to the F, and a G comes with it.

    Every row keeps its order.  The first stage's device holds the input of at most one more
    microbatch, and the gradient of two.  A table without backwards gets no G.

    Args:
        schedule: a compute-only table that `check` accepts, with at least as many stages as
            devices.
        costs: the costs by which they are placed (`Costs.first`: the time of an E,
            `Costs.first_grad`: of a G); all 1 where it is None.
        split: split backwards B into I and W (`split_backward`): True, False, or None for a split
            only where devices would wait for each other without it.

    Raises:
        ScheduleError: the table breaks a rule, has SEND and RECV, or fewer stages than devices.
        CostError: a sequence of costs does not have one entry per stage.

    >>> import jaxpipe as jp
    >>> print(
    ...     spread_first(
    ...         jp.schedules.build("gpipe", devices=2, microbatches=2), split=False
    ...     ).to_csv(),
    ...     end="",
    ... )
    0E0,0F0,0E1,0F1,0B0,0G0,0B1,0G1
    1E0,1E1,1F0,1F1,1B0,1B1,1G0,1G1
    """
    kinds = {Kind.E} if schedule.encoded.forward_only else {Kind.E, Kind.G}
    return _placed(schedule, frozenset(kinds), costs, split)


def _placed(
    schedule: Schedule, kinds: frozenset[Kind], costs: Costs | None, split: bool | None
) -> Schedule:
    """The table with collective actions of these kinds in every row for every microbatch.

    Actions of these kinds that the table has already are dropped; those of other kinds keep their
    places.
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


def _refuse(schedule: Schedule, kinds: frozenset[Kind]) -> None:
    """ScheduleError for a table that cannot have collective actions."""
    check(schedule)
    name = "`last`" if Kind.L in kinds else "`first`"
    refuse_transfers(schedule, f"spread {name} without them")
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
        self._placed = kinds
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
        # A collective has the number of its first member; that of the table's own ones too.
        self._own = {collective.members[0] for collective in table.collectives.values()}
        self._kind = {number: Kind(int(table.kind[number])) for number in self._own}
        # By action: the collective that reads its result, and the E that it waits for.
        self._source: dict[int, int] = {}
        self._input: dict[int, int] = {}
        for kind in sorted(kinds):
            end = KINDS[kind].end
            assert end is not None
            stage = end.stage % table.num_stages
            latency = 0 if hop is None else hop[stage]
            length = max((by_stage.of(kind) or (0,))[:devices])
            sources, users = (
                [] if value is None else table.maker(value)[stage].tolist()
                for value in (end.needs, end.feeds)
            )
            for m in range(table.num_microbatches):
                members = tuple(
                    self._insertion.add(d, Action(d, kind, m), length) for d in range(devices)
                )
                number = members[0]
                self._loop.groups |= dict.fromkeys(members, members)
                self._kind[number] = kind
                if sources:
                    source = int(table.last_half[sources[m]])
                    self._loop.wait(number, source, latency)
                    self._source[source] = number
                if users and users[m] >= 0:
                    self._loop.wait(users[m], number, latency)
                    if kind is Kind.E:
                        self._input[users[m]] = number
        self._to_come = sum(map(self._counts, self._kind))
        # Collective actions that are due alone; each G whose gradient is ready.
        self._due: list[tuple[float, Kind, int]] = []
        self._waiting: list[tuple[float, int]] = []
        self._queue: list[tuple[float, int, int]] = []  # (start, device, cell)

    def _counts(self, number: int) -> bool:
        """Whether a collective comes whether or not a G waits for it."""
        return self._kind[number] is not Kind.G or number in self._own

    def _is_left(self, number: int) -> bool:
        return self._loop.ends[number] == NEVER

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
                due, _, number = heapq.heappop(self._due)
                if self._is_left(number):
                    yield from self._run_collective(due, number)
                continue
            start, device, cell = heapq.heappop(self._queue)
            if start == self._start(device) and self._left[device][0] == cell:
                yield from self._run(device)

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
                self._ask(self._loop.ready(members[0]), members[0])
        elif left:
            halves = (left[0], self._loop.second_half.get(left[0], left[0]))
            for number in {self._input[half] for half in halves if half in self._input}:
                self._ask(self._loop.free[device], number)

    def _ask(self, due: float, number: int) -> None:
        """Have a collective for this."""
        heapq.heappush(self._due, (due, self._kind[number], number))

    def _run(self, device: int) -> Iterator[int]:
        cell = self._left[device].popleft()
        yield cell
        last = self._loop.second_half.get(cell, cell)
        if last != cell:
            yield last
        if last in self._source:
            number = self._source[last]
            there = self._loop.ready(number)
            if self._kind[number] is not Kind.G:
                self._ask(there, number)
            else:
                heapq.heappush(self._waiting, (there, number))
                if not self._to_come or len(self._waiting) > _MOST_WAITING:
                    self._ask(*self._waiting[0])
        self._offer(device)
        for user in self._users.get(last, ()):
            other = self._loop.device[user]
            if other != device:
                self._offer(other)

    def _run_collective(self, due: float, number: int) -> Iterator[int]:
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
        yield self._taken(number)
        for following in self._next_inputs() if self._kind[number] is not Kind.E else ():
            yield self._taken(following)
        while self._waiting and self._waiting[0][0] <= begin:
            waiting = heapq.heappop(self._waiting)[1]
            if self._is_left(waiting):
                yield self._taken(waiting)
        while self._waiting and not self._to_come:
            self._ask(*heapq.heappop(self._waiting))
        for device in range(len(self._left)):
            self._offer(device)

    def _next_inputs(self) -> list[int]:
        """The E of the first stage's next F on each device that has it, where it is not done."""
        found = []
        for left in self._left if self._input else ():
            halves = (half for i in left for half in (i, self._loop.second_half.get(i, -1)))
            following = next((self._input[half] for half in halves if half in self._input), -1)
            if following >= 0 and self._is_left(following):
                found.append(following)
        return found

    def _taken(self, number: int) -> int:
        """A collective that comes now; one of the table's own leaves the rows."""
        self._to_come -= self._counts(number)
        if number in self._own:
            for left in self._left:
                left.popleft()
        return number
