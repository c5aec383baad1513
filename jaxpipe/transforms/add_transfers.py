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

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ..engine.costs import Costs
from ..engine.loop import Insertion
from ..engine.simulate import Timeline, simulate
from ..errors import ScheduleError, quoted, typed
from ..table.encoded import Encoded, Transfers, Wait, mates, run_order
from ..table.kinds import MESSAGES, SENDS, Action, Cell, Kind, Value, parts, readers
from ..table.schedule import Schedule, check
from .rewrites import refuse_transfers, remove_recompute


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
    if schedule.has_transfers:
        raise ScheduleError(
            "the table has SEND and RECV already; jaxpipe.transforms.remove_transfers removes them"
        )
    if schedule.encoded.is_collective.any():
        raise ScheduleError(
            "the table has L or E, for which no SEND and RECV are defined; "
            "jaxpipe.transforms.remove_spread takes them out"
        )
    timeline = simulate(schedule, costs)
    late = schedule.with_rows(_late_receives(timeline))
    return late.with_rows(_early_in_cycles(late, timeline))


_Urgent: TypeAlias = tuple[float, int, Action]


def _late_receives(timeline: Timeline) -> list[list[Cell]]:
    """The rows with each SEND right after its producer and each RECV right before its consumer."""
    table = timeline.schedule.encoded
    actions = [action for *_, action in timeline.schedule.actions()]
    # By action: its transfer, after what sorts those of a pair.
    before: dict[Action, _Urgent] = {}
    after: dict[Action, _Urgent] = {}
    for _, users, send, receive in MESSAGES:
        crossing = np.flatnonzero(table.crosses & table.of_kinds(users))
        for number, source in zip(
            crossing.tolist(), table.producer[crossing].tolist(), strict=True
        ):
            (stage, _, microbatch), (user, _, _) = actions[source], actions[number]
            sent, received = Action(stage, send, microbatch), Action(user, receive, microbatch)
            after[actions[source]] = timeline.starts[number], number, sent
            before[actions[number]] = timeline.ends[source], number, received
    return [
        [
            each
            for cell in row
            if cell is not None
            for each in (*_of(cell, before), cell, *_of(cell, after))
        ]
        for row in timeline.schedule.cells
    ]


def _of(cell: Cell, transfers: Mapping[Action, _Urgent]) -> list[Action]:
    """The transfers of a cell's actions, the most urgent first."""
    return [each for *_, each in sorted(transfers[a] for a in parts(cell) if a in transfers)]


def _early_in_cycles(late: Schedule, timeline: Timeline) -> list[list[Cell]]:
    """The rows, in which a message of each cycle of devices that wait for each other is received
    earlier: before the action at which its receiver waits.
    """
    table = late.encoded
    is_send, mate = table.of_kinds(SENDS).tolist(), mates(table).tolist()
    ready, wanted = _times(table, timeline)
    deadline = _deadlines(late, mate)
    early: dict[int, list[int]] = {}

    def first_received(cycle: Sequence[Wait]) -> int:
        """The SEND that is cheapest to receive early."""

        def price(place: int) -> tuple[bool, bool, float]:
            send, other = cycle[place].at, cycle[(place + 1) % len(cycle)].at
            return not is_send[send], ready[send] > wanted[other], -deadline[other]

        best = min(range(len(cycle)), key=price)
        send, at = cycle[best].at, cycle[(best + 1) % len(cycle)].at
        early.setdefault(at, []).append(mate[send])
        return send

    run_order(table, Transfers.RENDEZVOUS, first_received)
    moved = {number: table.action(number) for numbers in early.values() for number in numbers}
    rows: list[list[Cell]] = []
    number = 0
    for row in late.rows:
        rows.append([])
        for cell in row:
            rows[-1] += map(moved.__getitem__, early.get(number, ()))
            if number not in moved:
                rows[-1].append(cell)
            number += len(parts(cell))
    return rows


def _times(table: Encoded, timeline: Timeline) -> tuple[list[float], list[float]]:
    """By the costs, for each action: when the message of a SEND is there, and when the first
    compute action from there on starts in its row.
    """
    starts, ends = np.full((2, table.num_actions), np.inf)
    starts[table.is_compute], ends[table.is_compute] = timeline.starts, timeline.ends
    wanted = [np.minimum.accumulate(starts[a:b][::-1])[::-1] for a, b in pairwise(table.first)]
    return ends[table.producer].tolist(), np.concatenate(wanted).tolist()


def _deadlines(late: Schedule, mate: Sequence[int]) -> list[float]:
    """For each action, the last lock-step that delays nothing, counted back from the end."""
    table = late.encoded
    found: list[float] = [0] * table.num_actions
    is_step = (table.last_half == np.arange(table.num_actions)).tolist()
    ends, sends = set(table.first), table.of_kinds(SENDS).tolist()
    for i in reversed(late.run_order(Transfers.BUFFERED).order):
        if i + 1 not in ends:
            found[i] = found[i + 1] - is_step[i + 1]
        if sends[i]:
            found[i] = min(found[i], found[mate[i]])
    return found


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

    latest = placed(0)
    early = (
        latest if max_activations is not None and max_activations <= (lead or 0) else placed(lead)
    )
    return (early if early.makespan < latest.makespan else latest).schedule


def _refuse(
    schedule: Schedule,
    stages: Collection[int] | None,
    lead: int | None,
    max_activations: int | None,
) -> None:
    """ScheduleError for a table that cannot take an R, and for invalid arguments."""
    check(schedule)
    refuse_transfers(schedule, "add R first, then transfers")
    if schedule.forward_only:
        raise ScheduleError(
            "the table has no backward, so nothing is recomputed; give it B, or I and W, for "
            "every F"
        )
    unknown = sorted(set(stages or ()) - set(range(schedule.num_stages)))
    stages_go = f"stages go from 0 to {schedule.num_stages - 1}"
    cap = f"max_activations={quoted(max_activations)}"
    own = "the backward itself needs those of its microbatch"
    texts = {
        f"stages={quoted(unknown)} do not exist; {stages_go}": unknown,
        f"lead={quoted(lead)} must be 0 or more, or None for no bound": (lead or 0) < 0,
        f"{cap} must be at least 1: {own}": max_activations is not None and max_activations < 1,
        f"lead=None has no bound, so {cap} cannot be kept; write lead=1": (
            lead is None and max_activations is not None
        ),
    }
    ScheduleError.refuse("R cannot be added", (text for text, wrong in texts.items() if wrong))


def _recompute_of(cell: Cell) -> Action | None:
    """The R that the action of a cell that reads activations may have; None where no
    action does.
    """
    user = next((action for action in parts(cell) if action.kind in _USERS), None)
    return None if user is None else user._replace(kind=Kind.R)


def _with_recompute(
    plain: Schedule, wanted: Collection[Action], costs: Costs, *, lead: int | None
) -> Schedule:
    """The table with the wanted R, each as early as a wait of its device has room for it.

    An R never prolongs the wait that it fills, so no action starts later than with every R right
    before its B or I.
    """
    by_stage = costs.for_stages(plain.num_stages)
    # Per device, the R that are still to be placed, in the order of their use.
    pending = [
        deque(r for cell in row if (r := _recompute_of(cell)) is not None and r in wanted)
        for row in plain.rows
    ]
    insertion = Insertion(plain, by_stage, pending)
    loop, at = insertion.loop, insertion.table.at
    # Per device, the R that are placed and not used yet.
    early: list[set[Action | None]] = [set() for _ in plain.rows]

    def place(device: int) -> int:
        recompute = pending[device].popleft()
        early[device].add(recompute)
        return number_of(recompute)

    def number_of(action: Action) -> int:
        return int(at[action.kind, action.stage, action.microbatch])

    def before(number: int, devices: Sequence[int]) -> Iterator[int]:
        own, begin = _recompute_of(insertion.cells[number]), loop.begin(number)
        for d in devices:
            if pending[d] and pending[d][0] == own:
                yield place(d)
            early[d].discard(own)
            while pending[d] and loop.free[d] < begin and len(early[d]) != lead:
                first = number_of(pending[d][0])
                kept = loop.ends[number_of(pending[d][0]._replace(kind=Kind.F))] <= loop.free[d]
                if loop.free[d] + loop.duration[first] > begin or not kept:
                    break
                yield place(d)

    return insertion.run(insertion.filled(before))


_USES, _RELEASES = (Kind.B, Kind.I), (Kind.B, Kind.W)


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
    kept = {action[::2] for action in again}
    found: list[tuple[int, int]] = []  # stages and microbatches
    for row in schedule.rows:
        cells = [[a for a in parts(cell) if a.kind in (Kind.F, *_USES, Kind.W)] for cell in row]
        used, released = (
            {a[::2]: now for now, cell in enumerate(cells) for a in cell if a.kind in kinds}
            for kinds in (_USES, _RELEASES)
        )
        held: set[tuple[int, int]] = set()
        for now, cell in enumerate(cells):
            # The backward of a recomputed one finds it not held.
            held.update(a[::2] for a in cell if a.kind is not Kind.F or a[::2] not in kept)
            while len(held) > max_activations:
                waiting = [each for each in held if used[each] > now and each[0] in stages]
                if not waiting:
                    break
                latest = max(waiting, key=used.__getitem__)
                held.remove(latest)
                found.append(latest)
            held -= {a[::2] for a in cell if released[a[::2]] == now}
    return frozenset(Action(stage, Kind.R, microbatch) for stage, microbatch in found)
