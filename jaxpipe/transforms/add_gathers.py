"""Puts U, D and X into the rows of a table: a stage's parameters are gathered over the fsdp axis
for the actions that need them, and its gradient is reduced when they have made it.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Sequence

from ..errors import Count, ScheduleError, quoted, typed
from ..table.kinds import BESIDE, KINDS, TRANSFERS, Action, Cell, Kind, Sharded, parts
from ..table.schedule import Schedule, check, numbered
from ..table.text import UNNUMBERED
from .rewrites import refuse

_FAR = float("inf")


class Reduce(enum.Enum):
    """When the whole gradient of a stage is reduced."""

    ONCE = "once"  # after the last B or W of the stage
    # after the last one of each run: several times in a step, and no gradient stays whole for long
    EACH_RUN = "each_run"


@typed()
def add_gathers(
    schedule: Schedule,
    *,
    max_active: Count | None = None,
    ahead: int | None = None,
    reduce: Reduce = Reduce.ONCE,
) -> Schedule:
    """Put U, D and X into the rows: each stage is gathered before an action that needs its
    parameters, dropped when it makes room, and its gradient reduced.

    A stage is dropped where another one needs its room and is needed sooner, right after its last
    use; that is the fewest gathers that `max_active` allows.  Idle cells go.

    With `ahead=None`, U and D are where torch's `_add_unshard_reshard` has them, which gathers
    as early as there is room; and with `Reduce.ONCE`, X is where its `_add_reduce_grad` has it.

    Args:
        schedule: a table without SEND and RECV that `check` accepts.
        max_active: the most stages that a device has whole at once; all of its stages where it is
            None: each is gathered once.
        ahead: a stage is gathered at most so many actions of its device before the one that needs
            it; as early as there is room where it is None.
        reduce: whether a gradient is reduced once or after each run of its stage.

    Raises:
        ScheduleError: the table breaks a rule, has SEND and RECV, or has U, D or X already; a pair
            needs more stages than `max_active`; or `ahead` is negative.

    >>> import jaxpipe as jp
    >>> s = jp.schedules.build("interleaved_1f1b", devices=1, microbatches=1, chunks=2)
    >>> print(*add_gathers(s, max_active=1).rows[0])
    0U0 0F0 0D0 1U0 1F0 1B0 1X0 1D0 0U0 0B0 0X0 0D0
    """
    refuse(schedule, TRANSFERS, BESIDE, how="U, D and X go into a table without them")
    check(schedule)
    rows = [[cell for cell in row if cell is not None] for row in schedule.rows]
    if ahead is not None and ahead < 0:
        raise ScheduleError(f"ahead={quoted(ahead)} must be 0 or more: it is a number of actions")
    needed = max((len(_needs(cell)) for row in rows for cell in row), default=0)
    if max_active is not None and max_active < needed:
        has = "the table has pairs of two stages" if needed > 1 else "an action needs its stage"
        raise ScheduleError(f"max_active={quoted(max_active)} must be {needed} or more: {has}")
    gathered = (_gathered(row, max_active, ahead) for row in rows)
    return numbered(schedule.with_rows([_reduced(row, reduce) for row in gathered]))


def reduce_each_run(schedule: Schedule) -> Schedule:
    """The table with U and D in which each gradient is reduced at the end of each run of its
    stage.

    >>> import jaxpipe as jp
    >>> s = jp.Schedule.from_csv("0UNSHARD,0F0,0B0,0RESHARD,0UNSHARD,0F1,0B1,0REDUCE_GRAD,0RESHARD")
    >>> print(*reduce_each_run(s).rows[0])
    0U0 0F0 0B0 0X0 0D0 0U1 0F1 0B1 0X1 0D1
    """
    rows = [
        [cell for cell in row if all(each.kind is not Kind.X for each in parts(cell))]
        for row in schedule.rows
    ]
    return numbered(schedule.with_rows([_reduced(row, Reduce.EACH_RUN) for row in rows]))


def _needs(cell: Cell | None, whole: Sharded = Sharded.PARAMETERS) -> tuple[int, ...]:
    """The stages of which a cell needs the parameters, or makes the gradient."""
    stages = (action.stage for action in parts(cell) if whole in KINDS[action.kind].uses)
    return tuple(dict.fromkeys(stages))


def _gathered(row: Sequence[Cell], max_active: int | None, ahead: int | None) -> list[Cell]:
    """One row with its U and D."""
    uses: dict[int, deque[int]] = {}
    for place, cell in enumerate(row):
        for stage in _needs(cell):
            uses.setdefault(stage, deque()).append(place)
    room = len(uses) if max_active is None else max_active
    # By the place of a cell, the stages that are gathered, and that are dropped, before it.
    gathers = defaultdict[int, list[int]](list)
    drops = defaultdict[int, list[int]](list)
    held: dict[int, int] = {}  # per stage that is whole, the place after its last use

    def next_use(stage: int) -> float:
        return uses[stage][0] if uses[stage] else _FAR

    def drop(stage: int) -> None:
        drops[held.pop(stage)].append(stage)

    for place, cell in enumerate(row):
        own = _needs(cell)
        # the forward's stage before the backward's, in a pair
        order = sorted(uses, key=lambda s: (next_use(s), own.index(s) if s in own else 0))
        for stage in (stage for stage in order if stage not in held):
            if next_use(stage) - place > (_FAR if ahead is None else ahead) or not uses[stage]:
                break
            if len(held) == room:
                last = max(held, key=next_use)
                if next_use(last) <= next_use(stage):
                    break
                drop(last)
            held[stage] = place
            gathers[place].append(stage)
        for stage in own:
            uses[stage].popleft()
            held[stage] = place + 1
        for stage in [stage for stage in held if not uses[stage]]:
            drop(stage)
    found: list[Cell] = []
    for place, cell in enumerate([*row, None]):
        found += _actions(Kind.D, drops[place])
        found += _actions(Kind.U, gathers[place])
        found += [cell] if cell is not None else []
    return found


def _actions(kind: Kind, stages: Sequence[int]) -> list[Cell]:
    return [Action(stage, kind, UNNUMBERED) for stage in stages]


def _reduced(row: Sequence[Cell | None], reduce: Reduce) -> list[Cell | None]:
    """A row with X: after the last B or W of a stage, or of each of its runs."""
    reductions, made = defaultdict[int, list[int]](list), dict[int, int]()
    for place, cell in enumerate(row):
        dropped = [each.stage for each in parts(cell) if each.kind is Kind.D and each.stage in made]
        for stage in dropped if reduce is Reduce.EACH_RUN else ():
            reductions[made.pop(stage)].append(stage)
        made |= dict.fromkeys(_needs(cell, Sharded.GRADIENT), place)
    for stage, place in made.items():
        reductions[place].append(stage)
    after = (_actions(Kind.X, reductions[place]) for place in range(len(row)))
    return [each for cell, own in zip(row, after, strict=True) for each in (cell, *own)]
