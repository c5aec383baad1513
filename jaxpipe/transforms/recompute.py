"""Transform: R before the backwards of a table, a stage's forward computed again where its device
would idle.

Recomputation (Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost) keeps a stage's
input instead of its activations. As an action of its own, a recomputation needs nothing from the
next stage, so it can fill the wait for a gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from ..engine.costs import Costs
from ..engine.loop import Insertion
from ..engine.simulate import Timeline, simulate
from ..errors import ScheduleError, quoted
from ..table.kinds import Action, Cell, Kind, Value, parts, readers
from ..table.schedule import Schedule, check
from ..table.typed import typed
from .rewrites import refuse_transfers, remove_recompute

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
    table = plain.encoded
    by_stage = costs.for_stages(table.num_stages)
    insertion = Insertion(plain, by_stage)
    loop = insertion.loop
    cells = [plain.rows[d][p] for d, p in map(table.cell_of, range(table.num_actions))]
    # Per device, the R that are still to be placed, in the order of their use.
    pending = [
        deque(r for cell in row if (r := _recompute_of(cell)) is not None and r in wanted)
        for row in plain.rows
    ]
    # Per device, the R that are placed and not used yet.
    early: list[set[Action | None]] = [set() for _ in plain.rows]

    def place(device: int) -> int:
        recompute = pending[device].popleft()
        early[device].add(recompute)
        return insertion.add(device, recompute, by_stage.recompute[recompute.stage])

    def before(number: int, devices: Sequence[int]) -> Iterator[int]:
        own, begin = _recompute_of(cells[number]), loop.begin(number)
        for d in devices:
            if pending[d] and pending[d][0] == own:
                yield place(d)
            early[d].discard(own)
            while pending[d] and loop.free[d] < begin and len(early[d]) != lead:
                stage, _, microbatch = pending[d][0]
                kept = loop.ends[int(table.at[Kind.F, stage, microbatch])] <= loop.free[d]
                if loop.free[d] + by_stage.recompute[stage] > begin or not kept:
                    break
                yield place(d)

    return insertion.run(insertion.filled(before))


_USES, _RELEASES = (Kind.B, Kind.I), (Kind.B, Kind.W)
_Pass: TypeAlias = tuple[int, int]  # (stage, microbatch)


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
    found = (
        number
        for row in schedule.rows
        for number in _of_row(row, set(stages), max_activations, kept)
    )
    return frozenset(Action(stage, Kind.R, microbatch) for stage, microbatch in found)


def _of_row(
    row: Sequence[Cell], stages: Collection[int], most: int, kept: Collection[_Pass]
) -> Iterator[_Pass]:
    used, released = _last(row, _USES), _last(row, _RELEASES)
    held: set[_Pass] = set()
    for now, cell in enumerate(row):
        acts = [action for action in parts(cell) if action.kind in (Kind.F, *_USES, Kind.W)]
        # The backward of a recomputed one finds it not held.
        held.update(a[::2] for a in acts if a.kind is not Kind.F or a[::2] not in kept)
        while len(held) > most:
            waiting = [each for each in held if used[each] > now and each[0] in stages]
            if not waiting:
                break
            latest = max(waiting, key=lambda each: used[each])
            held.remove(latest)
            yield latest
        held -= {a[::2] for a in acts if released[a[::2]] == now}


def _last(row: Sequence[Cell], kinds: Collection[Kind]) -> dict[_Pass, int]:
    """The last cell of a row that has one of these kinds of a stage and microbatch."""
    return {
        action[::2]: at
        for at, cell in enumerate(row)
        for action in parts(cell)
        if action.kind in kinds
    }
