"""Transforms: `last` and `first` spread over all devices, as actions L, E and G of all devices."""

from __future__ import annotations

from ..engine.costs import Costs
from ..table.action import Action, Kind
from ..table.kinds import SHARES
from ..table.schedule import Schedule
from ..table.typed import typed
from .place_collectives import place_collectives


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
    return place_collectives(schedule, frozenset({Kind.L}), costs=costs, split=split)


@typed()
def remove_spread(schedule: Schedule) -> Schedule:
    """The table without L, E, G and H, everything else as it is: `last` and `first` run with the F
    of their stages.

    >>> import jaxpipe as jp
    >>> print(remove_spread(jp.Schedule.from_csv("0F0,0L0,0B0")).to_csv(), end="")
    0F0,0B0
    """
    return schedule.with_rows(
        [
            [c for c in row if not isinstance(c, Action) or c.kind not in SHARES]
            for row in schedule.cells
        ]
    )


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
    return place_collectives(schedule, frozenset(kinds), costs=costs, split=split)
