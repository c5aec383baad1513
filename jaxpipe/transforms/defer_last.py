"""Transform: the gradient of the parameters of a spread `last` where a device would idle, as
actions H.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ..errors import ScheduleError, quoted
from ..simulation.costs import Costs
from ..simulation.simulate import Meetings, action_durations, simulate
from ..table.action import Action, Cell, Kind
from ..table.check import check
from ..table.contract import Contract
from ..table.kinds import Value, readers
from ..table.run_order import Transfers, senders, waits
from ..table.schedule import Schedule
from ..table.typed import typed
from .contracts import keeps
from .place_together import without

_LATE = readers(Value.SHARE_STASH)
# Times that differ by less, relative to what they are times of, are the same: a third of an L,
# three times, is not always an L.
_ROUNDING = 1e-9


@typed()
def defer_last(
    schedule: Schedule, *, max_deferred: int = 1, costs: Costs | None = None
) -> Schedule:
    """Let L leave the gradient of the parameters of `last` to an H, which a device does where it
    would wait, where that shortens the step.

    All devices meet for an L, so what is not in it is not waited for: an H is done by one device
    alone, for its own part of the parameters.  Here it fills time in which the device waits anyway.
    Where none comes, the device does it before the L that would leave it more than `max_deferred`,
    or at the end of its row.  For each that is left, a device keeps the gradient of its logits and
    the hidden state of a microbatch.  Nothing else changes its place.  1F1B with whole backwards
    has much time to fill; zero-bubble tables, whose W fill it, have none.  The zero-bubble
    schedules (Qi et al. 2023, arXiv 2401.10241) do so with W; Megatron-LM's
    `defer_embedding_wgrad_compute` does it with the head of the last stage, in its cool-down.

    Args:
        schedule: a table with L that `check` accepts, without SEND and RECV.  The H that it has are
            dropped.
        max_deferred: how many microbatches of H a device may have left to do, at least 1.
        costs: by these (`Costs.last`: the time of a whole L, `Costs.last_weight_grad`: of an H)
            waits are found; all 1, H a third, if None.

    Returns:
        The table with an H for every L; the table without any where the step would take as long.

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
    if max_deferred < 1:
        raise ScheduleError(
            f"max_deferred is {quoted(max_deferred)}; it is a whole number of at least 1, of "
            "microbatches"
        )
    plain = without(schedule, set(_LATE))
    check(plain)
    if plain.has_transfers:
        raise ScheduleError(
            "the table has SEND and RECV; defer what L does without them "
            "(jaxpipe.remove_transfers takes them out)"
        )
    if not plain.encoded.spreads_last:
        raise ScheduleError(
            "the table has no L, whose work could be deferred; jaxpipe.spread_last puts L into it"
        )
    costs = costs or Costs()
    if plain.encoded.forward_only:
        return plain
    later = _Run(plain, costs, max_deferred).table()
    return (
        later
        if simulate(later, costs).makespan < (1 - _ROUNDING) * simulate(plain, costs).makespan
        else plain
    )


class _Run:
    """Runs a table as `simulate` does, with L without what H does, and an H wherever one fits
    before an action that has to wait.
    """

    def __init__(self, schedule: Schedule, costs: Costs, most: int) -> None:
        table = schedule.encoded
        by_stage = costs.for_stages(table.num_stages)
        self._schedule, self._table, self._most = schedule, table, most
        self._late = by_stage.last_weight_grad
        self._costs = by_stage.shortened(_LATE)
        self._durations = action_durations(table, self._costs)
        self._free: list[float] = [0] * table.num_devices
        # the microbatches of H that a device has to do
        self._left: list[deque[int]] = [deque() for _ in schedule.rows]
        # by the first action of a cell, the H that come before it
        self._before: dict[int, list[Action]] = {}

    def table(self) -> Schedule:
        """Run it to its end."""
        table, free = self._table, self._free
        wait = waits(table, Transfers.ASYNC)
        latency = np.array(self._costs.transfer)[table.stage[senders(table, wait)]].tolist()
        need, device = wait.tolist(), table.device.tolist()
        starts: list[float] = [0] * table.num_actions
        ends: list[float] = [0] * table.num_actions
        met = Meetings(table, self._durations, self._costs)
        for i in self._schedule.run_order(Transfers.ASYNC).order:
            if i in met.all:
                if i == met.all[i].members[0]:
                    self._meet(i, met, starts, ends)
                continue
            d = device[i]
            start = met.ready(i, ends, free[d])
            if need[i] >= 0:
                start = max(start, ends[need[i]] + latency[i])
            self._fill(d, start, i)
            free[d] = ends[i] = max(start, free[d]) + self._durations[i]
        return self._schedule.with_rows([self._row(d) for d in range(table.num_devices)])

    def _meet(self, number: int, met: Meetings, starts: list[float], ends: list[float]) -> None:
        """All devices do their shares; before an L, a device that has as many H to do as it may
        does one.
        """
        members = met.all[number].members
        is_last = int(self._table.kind[number]) == Kind.L
        for d, i in enumerate(members):
            if is_last and len(self._left[d]) == self._most:
                self._do(d, i)
        begin = met.begin(number, ends, self._free)
        for d, i in enumerate(members):
            self._fill(d, begin, i)
        met.run(number, starts, ends, self._free)
        for left in self._left if is_last else ():
            left.append(int(self._table.microbatch[number]))

    def _fill(self, device: int, start: float, before: int) -> None:
        """As many H as a device can do until it starts this action."""
        while (
            self._left[device]
            and self._free[device] + (1 - _ROUNDING) * self._late[device] <= start
        ):
            self._do(device, before)

    def _do(self, device: int, before: int) -> None:
        """The H that waits longest."""
        self._free[device] += self._late[device]
        (kind,) = _LATE
        self._before.setdefault(before, []).append(
            Action(device, kind, self._left[device].popleft())
        )

    def _row(self, device: int) -> list[Cell]:
        """The device's cells with its H, those that are left at the end."""
        table, (kind,) = self._table, _LATE
        cells: dict[int, list[Action]] = {}
        for i in range(table.first[device], table.first[device + 1]):
            cells.setdefault(int(table.position[i]), []).extend(self._before.get(i, ()))
        row: list[Cell] = []
        for position, cell in enumerate(self._schedule.rows[device]):
            row += [*cells.get(position, ()), cell]
        return [*row, *(Action(device, kind, m) for m in self._left[device])]


CONTRACT = Contract(
    "defer_last", defer_last, keeps([kind for kind in Kind if kind not in _LATE], whole=True)
)
