"""Transform: computes the gradient of a spread `last`'s parameters in idle time, as actions H."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ..engine.costs import Costs
from ..engine.loop import Insertion
from ..engine.simulate import simulate
from ..errors import ScheduleError, quoted
from ..table.kinds import Action, Kind, Value, readers
from ..table.schedule import Schedule, check
from ..table.typed import typed
from .rewrites import refuse_transfers, without_kinds

_LATE = readers(Value.SHARE_STASH)
# Times whose relative difference is smaller are equal: three thirds of an L are not always an L.
_ROUNDING = 1e-9


@typed()
def defer_last(
    schedule: Schedule, *, max_deferred: int = 1, costs: Costs | None = None
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
    if max_deferred < 1:
        raise ScheduleError(
            f"max_deferred is {quoted(max_deferred)}; it is a whole number of at least 1, of "
            "microbatches"
        )
    plain = without_kinds(schedule, set(_LATE))
    check(plain)
    refuse_transfers(plain, "defer what L does without them")
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
    table = plain.encoded
    by_stage = costs.for_stages(table.num_stages)
    late = by_stage.last_weight_grad
    insertion = Insertion(plain, by_stage.shortened(_LATE))
    loop = insertion.loop
    # Per device, the H that are left to do.
    left: list[deque[int]] = [deque() for _ in plain.rows]
    (kind,) = _LATE

    def before(number: int, devices: Sequence[int]) -> Iterator[int]:
        is_last = table.kind[number] == Kind.L
        for d in devices:
            if is_last and len(left[d]) == most:
                yield left[d].popleft()
        begin = loop.begin(number)
        for d in devices:
            while left[d] and loop.free[d] + (1 - _ROUNDING) * late[d] <= begin:
                yield left[d].popleft()
            if is_last:
                action = Action(d, kind, int(table.microbatch[number]))
                left[d].append(insertion.add(d, action, late[d]))

    def policy() -> Iterator[int]:
        yield from insertion.filled(before)
        for waiting in left:
            yield from waiting

    return insertion.run(policy())
