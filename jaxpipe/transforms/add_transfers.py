"""Transforms that add actions: SEND and RECV for every value that crosses devices, without deadlock
and with no receive earlier than necessary; and R, a forward that is run again.

Each SEND should come right after its producer, each RECV right before its consumer.  With transfers
that block both sides, such rows may deadlock: a cycle of devices, at least one of which waits at a
SEND (a cycle of receives alone would be a deadlock of the compute-only table).  There, and only
there, the receiver of such a SEND receives it early: before the action at which it waits.

At least one SEND of each cycle can be received early at no cost: the one whose producer ended
first, since everything else in the cycle waits for an action that ended later.  So the table keeps
its makespan under the given costs where transfers take no time. Where several SENDs qualify, the
choice counts lock-steps, in which each SEND and RECV takes a step too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np

from ..engine.costs import Costs
from ..engine.simulate import Timeline, simulate
from ..errors import ScheduleError, quoted, typed
from ..table.clock import EventLoop
from ..table.encoded import Transfers
from ..table.kinds import (
    BESIDE,
    COLLECTIVES,
    MESSAGES,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    Cell,
    Kind,
    Message,
    Value,
    parts,
    readers,
)
from ..table.order import Cycle, Wait, run_order
from ..table.schedule import Schedule, check
from .insertion import Insertion
from .rewrites import refuse, remove_recompute


@typed()
def add_transfers(schedule: Schedule, *, costs: Costs | None = None) -> Schedule:
    """Put SEND and RECV into the rows of a compute-only table; none between stages on one device.

    The result runs without deadlock both where a SEND returns at once and where SEND and RECV wait
    for each other.  A RECV comes right before its consumer, unless that would deadlock: then it
    comes as late as it can, and where transfers take no time the makespan is still that of the
    compute-only table.  An overlapped pair receives before it and sends after it.  Idle cells are
    dropped (torch 2.13 accepts none in a table with transfers).

    Args:
        schedule: a compute-only table that `check` accepts.
        costs: the costs by which one of several blocked messages is chosen; all 1 where it is None.

    Raises:
        ScheduleError: the table breaks a rule, has transfers already, or has L.

    >>> import jaxpipe as jp
    >>> print(
    ...     add_transfers(jp.schedules.build("gpipe", devices=2, microbatches=1)).to_csv(), end=""
    ... )
    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    """
    refuse(schedule, TRANSFERS, how="they go into a table without them")
    refuse(schedule, COLLECTIVES, how="no SEND and RECV are defined for them")
    timeline = simulate(schedule, costs)
    late = _with_late_receives(timeline)
    return late.with_rows(_early_in_cycles(late, timeline))


_BY_USER: dict[int, Message] = {user: each for each in MESSAGES for user in each.users}


def _with_late_receives(timeline: Timeline) -> Schedule:
    """The table with each SEND right after its producer and each RECV right before its consumer;
    those of a pair are in order of urgency.
    """
    table = timeline.schedule.encoded
    columns = table.stage, table.kind, table.microbatch, table.producer, table.last_half
    stage, kind, microbatch, producer, last_half = (column.tolist() for column in columns)
    users = np.flatnonzero(table.crosses).tolist()
    # By the last action of the cell that they are for.
    receives, sends = defaultdict[int, list[Cell]](list), defaultdict[int, list[Cell]](list)
    for user in sorted(users, key=lambda user: timeline.ends[producer[user]]):
        receive = Action(stage[user], _BY_USER[kind[user]].receive, microbatch[user])
        receives[last_half[user]].append(receive)
    for user in sorted(users, key=timeline.starts.__getitem__):
        maker = producer[user]
        send = Action(stage[maker], _BY_USER[kind[user]].send, microbatch[maker])
        sends[last_half[maker]].append(send)
    rows: list[list[Cell]] = []
    number = -1
    for row in timeline.schedule.rows:
        rows.append([])
        for cell in (cell for cell in row if cell is not None):
            number += len(parts(cell))
            rows[-1] += (*receives.get(number, ()), cell, *sends.get(number, ()))
    return timeline.schedule.with_rows(rows)


def _early_in_cycles(late: Schedule, timeline: Timeline) -> list[list[Cell]]:
    """The rows in which a message of each cycle of devices that wait for each other is received
    earlier: before the action at which its receiver waits.
    """
    table = late.encoded
    own = ~table.of_kinds(TRANSFERS)
    starts, ends = np.full((2, table.num_actions), np.inf)
    starts[own], ends[own] = timeline.starts, timeline.ends
    ready = ends[table.producer].tolist()  # of a SEND
    # When the first compute action from there on starts in its row.
    rows = [np.minimum.accumulate(starts[a:b][::-1])[::-1] for a, b in pairwise(table.first)]
    wanted = np.concatenate([[], *rows]).tolist()
    is_send, place = table.of_kinds(SENDS).tolist(), table.position.tolist()
    deadline = _deadlines(late, timeline)
    left = [list(row) for row in late.rows]
    early = defaultdict[tuple[int, int], list[Cell]](list)  # by device and place

    def receive_early(cycle: Cycle) -> Wait:
        """Receive the cheapest SEND of a cycle early, and go on without it."""
        both = zip(cycle, (*cycle[1:], cycle[0]), strict=True)
        send, receiver = min(
            ((send, receiver) for send, receiver in both if is_send[send.at]),
            key=lambda two: (ready[two[0].at] > wanted[two[1].at], -deadline[two[1].at]),
        )
        row, then = left[send.other], place[send.on]
        early[send.other, place[receiver.at]].append(row[then])
        row[then] = None
        return send

    run_order(table, Transfers.RENDEZVOUS, broken=receive_early)
    return [
        [each for n, cell in enumerate(row) for each in (*early.get((d, n), ()), cell) if each]
        for d, row in enumerate(left)
    ]


def _deadlines(late: Schedule, timeline: Timeline) -> list[float]:
    """Per action, the last lock-step in which it delays nothing, counted back from the end.

    With time turned round, a SEND waits for its RECV, and may share its step.
    """
    table, given = late.encoded, timeline.schedule.encoded
    # Cells in an order in which they can run, each with its transfers.
    turn = np.empty(given.num_actions, np.int64)
    turn[list(timeline.schedule.run_order(Transfers.ASYNC).order)] = np.arange(len(turn))
    is_receive = table.of_kinds(RECEIVES)
    cell = np.cumsum(~table.of_kinds(TRANSFERS)) - 1 + is_receive
    order = np.argsort(turn[given.last_half][cell], kind="stable")
    mate = np.full(table.num_actions, -1)
    mate[table.producer[is_receive]] = table.receives
    is_step = (table.last_half == np.arange(table.num_actions)).astype(np.int64)
    tasks = table.device, mate, np.full_like(mate, -1), is_step
    loop = EventLoop(tasks, [0] * table.num_devices)
    loop.run(order[::-1].tolist())
    return [-start for start in loop.starts]


_USERS = readers(Value.ACTIVATIONS)


@typed()
def add_recompute(
    schedule: Schedule,
    *,
    stages: Collection[int] | None = None,
    lead: int | None = 1,
    costs: Costs | None = None,
    max_activations: int | None = None,
) -> Schedule:
    """Put an R before each B or I: in an earlier bubble that is long enough, where this shortens
    the table; else right before it.

    Right before its B or I, an R runs while that one waits for its gradient.  In an earlier bubble
    it holds activations from there on, which `lead` bounds.  An R that is in the table already is
    placed again; idle cells are dropped.

    Args:
        schedule: a compute-only table that `check` accepts.
        stages: the stages that recompute; all where it is None.
        lead: how many activations a device may have recomputed already and not used yet while it
            runs another action; 0 puts each R right before its B or I, None sets no bound.
        costs: the costs by which bubbles are found; all 1 where it is None.
        max_activations: how many activations a device has room for: the fewest microbatches are
            recomputed for which it is enough, as far as those stages can make room; every one where
            it is None.

    Raises:
        ScheduleError: the table breaks a rule, has SEND and RECV, or no backward; a stage does not
            exist; `lead` is negative; `max_activations` is less than 1, or given with a `lead` that
            has no bound.
        CostError: a sequence of costs does not have one entry per stage.

    >>> import jaxpipe as jp
    >>> print(add_recompute(jp.schedules.build("1f1b", devices=2, microbatches=2)).to_csv(), end="")
    0F0,0F1,0R0,0B0,0R1,0B1
    1F0,1R0,1B0,1F1,1R1,1B1
    >>> print(
    ...     add_recompute(
    ...         jp.schedules.build("1f1b", devices=2, microbatches=3), max_activations=1
    ...     ).to_csv(),
    ...     end="",
    ... )
    0F0,0F1,0B0,0F2,0R1,0B1,0R2,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """
    _refuse(schedule, stages, lead, max_activations)
    chosen = range(schedule.num_stages) if stages is None else stages
    had = {action for _, _, action in schedule.actions() if action.kind is Kind.R}
    plain = remove_recompute(schedule)

    def placed(lead: int | None) -> Timeline:
        if max_activations is None:
            wanted = had | {
                Action(stage, Kind.R, m)
                for stage in chosen
                for m in range(schedule.num_microbatches)
            }
        else:
            # Activations that are recomputed early are held in addition.
            wanted = had | fewest_recomputed(
                plain, chosen, max_activations - (lead or 0), again=had
            )
        return simulate(_with_recompute(plain, wanted, costs or Costs(), lead=lead), costs)

    has_room = max_activations is None or max_activations > (lead or 0)
    timelines = map(placed, (0, lead) if has_room else (0,))
    return min(timelines, key=lambda timeline: timeline.makespan).schedule


def _refuse(
    schedule: Schedule,
    stages: Collection[int] | None,
    lead: int | None,
    max_activations: int | None,
) -> None:
    """ScheduleError for a table that cannot take an R, and for invalid arguments."""
    check(schedule)
    refuse(schedule, TRANSFERS, BESIDE, how="add R without them, then put them in")
    if schedule.forward_only:
        raise ScheduleError(
            "the table has no backward, so nothing is recomputed; give it B, or I and W, for "
            "every F"
        )
    unknown = sorted(set(stages or ()) - set(range(schedule.num_stages)))
    cap, last = f"max_activations={quoted(max_activations)}", schedule.num_stages - 1
    texts = {
        f"stages={quoted(unknown)} do not exist; stages go from 0 to {last}": unknown,
        f"lead={quoted(lead)} must be 0 or more, or None for no bound": (lead or 0) < 0,
        f"{cap} must be at least 1: a backward needs those of its own microbatch": (
            max_activations is not None and max_activations < 1
        ),
        f"lead=None has no bound, so {cap} cannot be kept; write lead=1": (
            lead is None and max_activations is not None
        ),
    }
    ScheduleError.refuse("R cannot be added", (text for text, wrong in texts.items() if wrong))


def _with_recompute(
    plain: Schedule, wanted: Collection[Action], costs: Costs, *, lead: int | None
) -> Schedule:
    """The table with the wanted R, each as early as a wait of its device has room for it.

    An R never prolongs the wait that it fills, so no action starts later than with every R right
    before its B or I.
    """
    added: list[list[Action]] = [[] for _ in plain.rows]  # in the order of their use
    for device, _, action in plain.actions():
        again = action._replace(kind=Kind.R)
        if action.kind in _USERS and again in wanted:
            added[device].append(again)
    insertion = Insertion(plain, costs.for_stages(plain.num_stages), added)
    loop, table = insertion.loop, insertion.table
    # Per device, the R that are still to be placed, and those that are placed and not used yet.
    stops = zip(table.first[1:], added, strict=True)
    pending = [deque(range(stop - len(each), stop)) for stop, each in stops]
    early: list[set[int]] = [set() for _ in added]

    users = np.flatnonzero(table.of_kinds(_USERS))
    same = table.stage[users], table.microbatch[users]
    numbers, forwards = (table.at[kind][same].tolist() for kind in (Kind.R, Kind.F))
    own_of = dict(zip(users.tolist(), numbers, strict=True))
    forward_of = dict(zip(numbers, forwards, strict=True))
    last_half = table.last_half.tolist()

    def place(device: int) -> int:
        early[device].add(pending[device][0])
        return pending[device].popleft()

    def before(number: int, devices: Sequence[int]) -> Iterator[int]:
        own, begin = own_of.get(last_half[number], -1), loop.begin(number)
        for d in devices:
            if pending[d] and pending[d][0] == own:
                yield place(d)
            early[d].discard(own)
            while pending[d] and loop.free[d] < begin and len(early[d]) != lead:
                first = pending[d][0]
                kept = loop.ends[forward_of[first]] <= loop.free[d]
                if loop.free[d] + loop.duration[first] > begin or not kept:
                    break
                yield place(d)

    return insertion.run(insertion.filled(before))


def fewest_recomputed(
    schedule: Schedule,
    stages: Collection[int],
    max_activations: int,
    *,
    again: Collection[Action] = (),
) -> frozenset[Action]:
    """The fewest R of these stages with which no device holds more activations than that; those in
    `again` are kept in any case.

    Every activation is held from its B or I until it is released, and from its F where that keeps
    it.  Where there are too many, the one with the latest backward is dropped, as a cache drops the
    page that is read last (Belady 1966): no choice takes fewer R.  Where W come so late that the
    activations held from I on are too many alone, more than `max_activations` stay.

    >>> import jaxpipe as jp
    >>> schedule = jp.schedules.build("1f1b", devices=4, microbatches=8)
    >>> sorted(str(action) for action in fewest_recomputed(schedule, range(4), 3))
    ['0R3', '0R6']
    """
    table, found = schedule.encoded, list[Action]()
    # By the R that each microbatch of a stage would have: its backward, and what releases it.
    used, released = (
        {Action(s, Kind.R, m): int(number) for (s, m), number in np.ndenumerate(table.maker(value))}
        for value in (Value.INPUT_GRAD, Value.WEIGHT_GRAD)
    )
    held: set[Action] = set()  # nothing is at the end of a row
    mine = np.flatnonzero(table.of_kinds((Kind.F, Kind.B, Kind.I, Kind.W)))
    columns = table.stage, table.kind, table.microbatch, table.last_half
    every = zip(mine.tolist(), *(column[mine].tolist() for column in columns), strict=True)
    for i, stage, kind, m, now in every:
        own = Action(stage, Kind.R, m)
        # The backward of a recomputed one finds it not held.
        if kind != Kind.F or own not in again:
            held.add(own)
        while len(held) > max_activations:
            later = [r for r in held if r.stage in stages and used[r] > now]
            if not later:
                break
            found.append(max(later, key=used.__getitem__))
            held.remove(found[-1])
        if released[own] == i:
            held.remove(own)
    return frozenset(found)
