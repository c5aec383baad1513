"""A table of F, I and W shortened by beam search over all its actions."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.costs import Costs
from ..engine.job_shop import JobShop
from ..engine.simulate import simulate
from ..table.action import Action
from ..table.schedule import Schedule
from ._beam import Beam

# Starts that a search of this width may compute (some seconds), and starts as which each of its
# steps counts.
_WIDTH, _BUDGET, _STEP = 32, 5_000_000, 1000
_EQUAL = 1e-9  # relative: sums of the same times in another order


def improved(schedule: Schedule, costs: Costs, shop: JobShop, *, at_least: float) -> Schedule:
    """A schedule of F, I and W that is never longer, and shorter where one is found; the same for
    the same arguments.

    Args:
        schedule: rows of F, I and W, every stage on one device.
        costs: what its makespan is counted in.
        shop: the instance, with the cap on activations.
        at_least: a makespan below which there is none.
    """
    makespan = simulate(schedule, costs).makespan
    actions = schedule.encoded.num_actions
    price = actions * (len(shop.nodes) * _WIDTH + _STEP)
    if makespan <= at_least * (1 + _EQUAL) or price > _BUDGET:
        return schedule
    order = Beam(shop).search(makespan * (1 - _EQUAL), width=_WIDTH)
    if order is None:
        return schedule
    better = schedule.with_rows(rows_of(shop, order))
    return better if simulate(better, costs).makespan < makespan * (1 - _EQUAL) else schedule


def rows_of(shop: JobShop, order: Sequence[int]) -> list[list[Action]]:
    """Each device's actions, of an order of all actions by their nodes."""
    rows: list[list[Action]] = [[] for _ in range(shop.devices)]
    done = [0] * len(shop.nodes)
    for n in order:
        node = shop.nodes[n]
        rows[node.device].append(Action(node.stage, node.kind, done[n]))
        done[n] += 1
    return rows
