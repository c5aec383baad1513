"""Puts the collective actions L, E and G into the rows of a table, and the late part H of L.

Vocabulary parallelism (Yeung et al. 2024, Balancing Pipeline Parallelism with Vocabulary
Parallelism, arXiv 2411.05288) cuts the embedding and the head of a language model over the
pipeline's devices.  Here all devices do their shares of one microbatch in one step of the program.
A collective action costs nothing where every device is between two actions at that time.  A device
in the middle of an action keeps the others waiting.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from ..engine.costs import Costs
from ..engine.simulate import shortest, simulate
from ..errors import Count, PipelineError, ScheduleError, typed
from ..table.clock import NEVER
from ..table.kinds import BESIDE, TRANSFERS, Action, Kind, Value, readers
from ..table.schedule import Schedule, check, named
from .insertion import Insertion
from .rewrites import refuse, split_backward, without_kinds

# The share of the makespan that devices may lose by waiting for each other before backwards are
# split: a split costs code and a stash.
_WORTH_A_SPLIT = 0.01
# The same for a table of overlapped pairs: with separate W neighbours run unlike ticks, and the
# program is up to 15 % longer than the table.
_WORTH_A_SPLIT_OF_PAIRS = 0.03

_LATE = readers(Value.SHARE_STASH)
# Times whose relative difference is smaller are equal: three thirds of an L are not always an L.
_ROUNDING = 1e-9


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


@typed()
def defer_last(
    schedule: Schedule, *, max_deferred: Count = 1, costs: Costs | None = None
) -> Schedule:
    """Move the gradient of `last`'s parameters from L to an H in idle time, where that shortens
    the step.

    An L is a collective action, and an H is done by one device alone for its part of the
    parameters.  An H is placed where its device waits.  If the device never waits, the H comes
    before the L that would exceed `max_deferred`, or at the end of the row.  All other actions keep
    their places.

    For each deferred H, a device keeps the gradient of its logits and the hidden state of a
    microbatch.  1F1B with whole backwards has much idle time.  Zero-bubble tables have none, since
    their W fill it.  The zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) defer W in the
    same way, and Megatron-LM's `defer_embedding_wgrad_compute` defers the head's gradient.

    Args:
        schedule: a table with L that `check` accepts, without SEND and RECV.  Its own H are
            dropped.
        max_deferred: the most H that a device may defer at once, at least 1.
        costs: the times by which waits are found (`Costs.last` of a whole L,
            `Costs.last_weight_grad` of an H); if None, all are 1, and an H takes a third.

    Returns:
        The table with an H for every L; or the table without H, where H does not shorten the step.

    Raises:
        ScheduleError: the table breaks a rule, has SEND and RECV, or no L; `max_deferred` is no
            whole number of at least 1.
        CostError: a sequence of costs does not have one entry per stage.

    >>> import jaxpipe as jp
    >>> table = jp.spread_last(jp.schedules.build("gpipe", devices=2, microbatches=2), split=False)
    >>> print(defer_last(table).to_csv(), end="")
    0F0,0F1,0L0,0H0,0L1,0H1,0B0,0B1
    1F0,1L0,1F1,1H0,1L1,1B0,1B1,1H1
    """
    plain = without_kinds(schedule, set(_LATE))
    check(plain)
    refuse(plain, TRANSFERS, BESIDE, how="defer what L does without them")
    if not plain.encoded.spreads_last:
        raise ScheduleError(
            "the table has no L, whose work could be deferred; jaxpipe.spread_last puts L into it"
        )
    costs = costs or Costs()
    if plain.encoded.forward_only:
        return plain
    later = _with_late_parts(plain, costs, max_deferred)
    shorter = simulate(later, costs).makespan < (1 - _ROUNDING) * simulate(plain, costs).makespan
    return later if shorter else plain


def _with_late_parts(plain: Schedule, costs: Costs, most: int) -> Schedule:
    """The table with an H wherever one fits before an action that has to wait."""
    (kind,) = _LATE
    added = [
        [Action(d, kind, m) for m in range(plain.num_microbatches)]
        for d in range(plain.num_devices)
    ]
    insertion = Insertion(plain, costs.for_stages(plain.num_stages), added)
    loop, table = insertion.loop, insertion.table
    # Per device, the H that are left to do.
    left: list[deque[int]] = [deque() for _ in plain.rows]

    def before(number: int, devices: Sequence[int]) -> Iterator[int]:
        is_last = table.kind[number] == Kind.L
        for d in devices:
            if is_last and len(left[d]) == most:
                yield left[d].popleft()
        begin = loop.begin(number)
        for d in devices:
            while left[d] and loop.free[d] + (1 - _ROUNDING) * loop.duration[left[d][0]] <= begin:
                yield left[d].popleft()
            if is_last:
                left[d].append(int(table.at[kind, d, table.microbatch[number]]))

    return insertion.run(chain(insertion.filled(before), chain.from_iterable(left)))


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
    return shortest((whole, _shortest(split_backward(plain), costs, kinds)), costs)


def _shortest(plain: Schedule, costs: Costs, kinds: frozenset[Kind]) -> Schedule:
    """The fastest table by the costs, of those with collective actions at several rhythms.

    A collective action that runs as soon as it is due can come in the middle of other actions,
    where times differ a little or transfers take time.  A device that has just begun an action
    then keeps all others waiting.  At the rhythm of equal times it has not begun.
    """
    # With F, I and W that all take the mean, the same without transfers, and the costs.
    stages = plain.num_stages
    by_stage = costs.for_stages(stages)
    mean = sum((*by_stage.forward, *by_stage.input_grad, *by_stage.weight_grad)) / (3 * stages)
    at_once = replace(costs, transfer=0)
    equal = replace(at_once, forward=mean, input_grad=mean, weight_grad=mean)
    equal = replace(equal, backward=None, overlap=None, recompute=None)
    rhythms = {c.for_stages(stages): c for c in (equal, at_once, costs)}
    tables = dict.fromkeys(_TableRun(plain, each, kinds).table() for each in rhythms.values())
    return shortest(tables, costs)


def _refuse(schedule: Schedule, kinds: frozenset[Kind]) -> None:
    """ScheduleError for a table that cannot have collective actions."""
    check(schedule)
    name = "`last`" if Kind.L in kinds else "`first`"
    how = f"spread {name} without them, then put them in"
    refuse(schedule, TRANSFERS, BESIDE, how=how)
    if schedule.num_stages < schedule.num_devices:
        raise ScheduleError(
            f"the table has fewer stages ({schedule.num_stages}) than devices "
            f"({schedule.num_devices}), and the share of {name} on device "
            "d is written as that of stage d: use as many stages as devices, or more, or a "
            f"{name} that is not spread"
        )


class _TableRun:
    """Runs a table action by action, as early as each can start, with collectives where they are
    due.

    An L is due when the last stage's output is ready.  An E is due when the first stage's device
    has nothing else to do before its F, and a G when too many wait.  At an L, devices also do an E
    and a G whose gradient is ready, so that collective actions come in equal sets: one that comes
    alone needs code of its own in the program, or a predicate.
    """

    def __init__(self, schedule: Schedule, costs: Costs, kinds: frozenset[Kind]) -> None:
        microbatches = range(schedule.num_microbatches)
        added = [
            [Action(d, kind, m) for kind in sorted(kinds) for m in microbatches]
            for d in range(schedule.num_devices)
        ]
        self._insertion = Insertion(schedule, costs.for_stages(schedule.num_stages), added)
        self._loop = loop = self._insertion.loop
        table, own = self._insertion.table, self._insertion.own
        # Per device, the cells that are left, by the number of their first action.
        self._last, seconds = table.last_half.tolist(), {*loop.second_half.values()}
        rows = (own[a:b] for a, b in pairwise(schedule.encoded.first))
        self._left = [deque(i for i in row if i not in seconds) for row in rows]
        # A collective has the number of its first member; that of the table's own ones too.
        collectives = {each.members[0]: each for each in table.collectives.values()}
        self._kind = {number: Kind(int(table.kind[number])) for number in collectives}
        # By action: the new collective that reads its result, and of an F the E that it waits for.
        new = {n: each for n, each in collectives.items() if self._kind[n] in kinds}
        self._source = {loop.need[n]: n for n in new}
        self._entry = {each.user: n for n, each in new.items() if self._kind[n] is Kind.E}
        # By number, the devices of the actions that need its result.
        self._readers = defaultdict[int, list[int]](list)
        for device, need in zip(loop.device, loop.need, strict=True):
            self._readers[need].append(device)
        self._enter(simulate(schedule, costs).starts)
        # The sets that are still to come, with which a G may come.
        self._sets = sum(kind is not Kind.G for kind in self._kind.values())
        self._waiting: deque[int] = deque()  # each G whose B has run
        self._entered = 0  # E that are done, and whose F is not
        self._queue: list[tuple[float, bool, int]] = []  # time, whether it is a cell, and number

    def _enter(self, starts: Sequence[float]) -> None:
        """Choose how many E come with each L: each E comes with the last L before its F that has no
        other, while few inputs wait.
        """
        self._inputs: deque[int] = deque()  # each E that is left, in the order of their F
        self._with_input: dict[int, int] = {}
        waiting, most = 0, 1 + len(self._left) // 2
        order = sorted(range(len(starts)), key=starts.__getitem__)
        for number in (self._insertion.own[i] for i in reversed(order)):
            if self._kind.get(number) is Kind.L:
                count = min(waiting, max(1, waiting - most))
                self._with_input[number], waiting = count, waiting - count
                first, rest = number, waiting
            elif number in self._entry:
                self._inputs.appendleft(self._entry[number])
                waiting += 1
        if self._with_input:
            self._with_input[first] += rest

    def table(self) -> Schedule:
        """Run it to its end."""
        found = self._insertion.run(self._policy())
        assert not any(self._left), "a valid table runs to its end"
        return found

    def _policy(self) -> Iterator[int]:
        loop = self._loop
        for device in range(len(self._left)):
            self._offer(device)
        while self._queue:
            time, is_cell, number = heapq.heappop(self._queue)
            if loop.ends[number] < NEVER:
                continue
            if is_cell and loop.begin(number) > time:
                self._offer(loop.device[number])
            elif is_cell:
                yield from self._run(number)
            elif number not in self._waiting:
                yield from self._collective(number)
            # More G may wait where an L may follow, none where no set does.
            most = 2 + len(self._left) // 2 if self._with_input else 1
            most = most if self._sets else 0
            while len(self._waiting) > most and loop.ready(self._waiting[0]) <= time:
                yield from self._collective(self._waiting[0])

    def _offer(self, device: int) -> None:
        """Put a device's next cell into the queue, if it can start, or the collective that it
        waits for.
        """
        loop = self._loop
        if not self._left[device]:
            return
        cell = self._left[device][0]
        if cell in loop.groups:
            # One that the table has already, when all devices have reached it.
            members = loop.groups[cell]
            if all(row and row[0] == i for row, i in zip(self._left, members, strict=True)):
                heapq.heappush(self._queue, (loop.ready(members[0]), False, members[0]))
        elif (start := loop.begin(cell)) < NEVER:
            heapq.heappush(self._queue, (start, True, cell))
        else:
            for half in {cell, self._last[cell]} & self._entry.keys():
                heapq.heappush(self._queue, (loop.free[device], False, self._entry[half]))

    def _run(self, cell: int) -> Iterator[int]:
        device, last = self._loop.device[cell], self._last[cell]
        self._left[device].popleft()
        for half in range(cell, last + 1):
            yield half
            self._entered -= half in self._entry
        if last in self._source:
            number = self._source[last]
            if self._kind[number] is Kind.G:
                self._waiting.append(number)
            heapq.heappush(self._queue, (self._loop.ready(number), False, number))
        for other in {device, *self._readers.get(last, ())}:
            self._offer(other)

    def _collective(self, number: int) -> Iterator[int]:
        """A collective action begins when the last device is free; until then, each device runs
        the actions that fit.
        """
        loop, begin, moved = self._loop, self._loop.begin(number), True
        while moved:
            moved = False
            for left in self._left:
                while left and left[0] not in loop.groups:
                    if loop.begin(left[0]) + loop.duration[self._last[left[0]]] > begin:
                        break
                    yield from self._run(left[0])
                    moved = True
        for each in self._set(number):
            yield each
            self._sets -= self._kind[each] is not Kind.G
            self._entered += self._kind[each] is Kind.E
            for row, member in zip(self._left, loop.groups[each], strict=True):
                if row and row[0] == member:  # one that the table has already
                    row.popleft()
        for device in range(len(self._left)):
            self._offer(device)

    def _set(self, number: int) -> Iterator[int]:
        """A collective and those that come with it."""
        yield number
        if self._kind[number] is not Kind.E:
            lone = not self._with_input and not self._entered
            for _ in range(self._with_input.get(number, int(lone))):
                while self._inputs and self._loop.ends[self._inputs[0]] < NEVER:
                    self._inputs.popleft()
                if self._inputs:
                    yield self._inputs.popleft()
        if self._waiting and self._waiting[0] == number:
            self._waiting.popleft()
        elif self._waiting and self._loop.ready(self._waiting[0]) <= self._loop.free[0]:
            yield self._waiting.popleft()


def with_shares(schedule: Schedule, costs: Costs | None, spread: Collection[str]) -> Schedule:
    """The schedule with L exactly where `last` is spread, and E and G where `first` is;
    PipelineError where it cannot be.

    They are placed by `costs` where these say how long a share takes.
    """
    for name, kind, put in (("last", "L", spread_last), ("first", "E", spread_first)):
        there = getattr(schedule.encoded, f"spreads_{name}")
        spreads = name in spread
        if there and not spreads:
            raise PipelineError(
                f"{named(schedule)} has {kind}, a share of `{name}` on every device, "
                f"but `{name}` is not spread; give {name}=jaxpipe.spread(...), or take {kind} out "
                "with jaxpipe.transforms.remove_spread"
            )
        try:
            if spreads and not there:
                timed = costs is not None and getattr(costs, name) is not None
                schedule = put(schedule, costs=costs if timed else None)
        except ScheduleError as error:
            raise PipelineError(
                f"`{name}` cannot be spread with {named(schedule)}: {error}"
            ) from error
    return schedule
