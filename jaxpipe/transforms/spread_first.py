"""Transform: `first` spread over all devices, as actions E and G that every device does at the same
time.
"""

from __future__ import annotations

from ..engine.costs import Costs
from ..table.action import Kind
from ..table.schedule import Schedule
from ..table.typed import typed
from .place_together import place_together


@typed()
def spread_first(
    schedule: Schedule, *, costs: Costs | None = None, split: bool | None = None
) -> Schedule:
    """Put an E into every row for every microbatch, before the first stage's F, and a G after its
    B: `first` and its gradient.

    Each is a meeting of all devices, as L is (`spread_last`).  Where the table has L, the E of the
    first stage's next F and the G of its last B come right after an L, for which all devices are
    there anyway; so spread `last` first.  Where it has none, an E is due when the first stage's
    device comes to the F, and a G goes with it.  Every row keeps its order.  The first stage's
    device holds the input of one microbatch more at most, and the gradient of two.  A table without
    backwards gets no G.

    Args:
        schedule: a compute-only table that `check` accepts, with at least as many stages as
            devices.
        costs: the costs by which they are placed (`Costs.first`: the time of an E,
            `Costs.first_grad`: of a G); all 1 where it is None.
        split: split backwards B into I and W (`split_backward`): True, False, or where devices
            would else wait for each other (None).

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
    return place_together(schedule, frozenset(kinds), costs=costs, split=split)
