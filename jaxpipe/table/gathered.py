"""From which action to which a device has a stage's parameters whole, and its gradient.

Where the devices of an fsdp axis split them, U gathers the parameters of a stage and D drops them.
Between the two is a run of the stage's actions.  B and W add to the whole gradient of the stage
until X reduces it; the next one begins another.  A U, D or X has the number of the microbatch with
which its run begins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .encoded import Encoded, IntArray
from .kinds import BESIDE, KINDS, Sharded, droppers, gatherers, users


class Runs(NamedTuple):
    """The runs of all stages on all devices; per action of the table, the run that it is in.

    Attributes:
        begin: the action from which on the value is whole: a U, or the first that adds to the
            gradient; -1 where there is none.
        end: the D or X after which it is not; -1 where there is none.
        number: the microbatch of the run's first use; -1 where nothing in it uses the value.
    """

    begin: IntArray
    end: IntArray
    number: IntArray


def runs_of(table: Encoded, what: Sharded) -> Runs:
    """The runs between a gather and a drop of parameters, or those between reductions."""
    every = gatherers(what), users(what), droppers(what)
    gathers, uses, drops = map(table.of_kinds, every)
    mine = np.flatnonzero(gathers | uses | drops)
    where = table.device[mine] * (1 + table.stage.max(initial=0)) + table.stage[mine]
    order = np.argsort(where, kind="stable")
    mine, where = mine[order], where[order]
    begins = gathers[mine] | (np.diff(where, prepend=-1) != 0)
    begins[1:] |= drops[mine][:-1]
    run = np.cumsum(begins) - 1
    first, last = mine[begins], mine[np.roll(begins, -1)]
    found = Runs(*np.full((3, table.num_actions), -1))
    opens = gathers if gatherers(what) else uses
    found.begin[mine] = np.where(opens[first], first, -1)[run]
    found.end[mine] = np.where(drops[last], last, -1)[run]
    used = uses[mine]
    own, at = np.unique(run[used], return_index=True)
    number = np.full(len(first), -1)
    number[own] = table.microbatch[mine[used][at]]
    found.number[mine] = number[run]
    return found


def run_numbers(table: Encoded) -> IntArray:
    """Per U, D and X, the number that it has by its run; -1 of other actions."""
    found = np.full(table.num_actions, -1)
    for spec in map(KINDS.__getitem__, BESIDE):
        own = table.kind == spec.kind
        what = spec.gathers or spec.drops
        assert what is not None
        found[own] = runs_of(table, what).number[own]
    return found


def whole_changes(table: Encoded, what: Sharded) -> tuple[IntArray, IntArray]:
    """Per action, 1 where its stage's value is whole from its start on, and 1 where it is no longer
    whole at its end; zeros in a table that does not say so.
    """
    begins, ends = np.zeros((2, table.num_actions), np.int64)
    if not table.kinds.isdisjoint(droppers(what)):
        runs = runs_of(table, what)
        begins[runs.begin[runs.begin >= 0]] = 1
        ends[runs.end[(runs.begin >= 0) & (runs.end >= 0)]] = 1
    return begins, ends
