"""Activations that a table keeps: how many each device holds, action by action."""

from __future__ import annotations

import numpy as np

from .encoded import Encoded, IntArray
from .kinds import Release as Release
from .kinds import Value, kinds_where, makers


def activation_changes(table: Encoded, release: Release) -> tuple[IntArray, IntArray]:
    """Per action, the activations of its stage that begin to live at its start, and those that die at its end (0 or 1).

    In a forward-only table nothing is kept: each F's activations live while it runs.
    """
    begins = table.of_kinds(makers(Value.ACTIVATIONS)).astype(np.int64)
    if table.forward_only:
        return begins, begins
    return begins, table.of_kinds(kinds_where(lambda spec: release in spec.releases)).astype(np.int64)


def live_activations(table: Encoded, release: Release) -> IntArray:
    """Per action, how many activations its device holds while it runs, its own included.

    The halves of an overlapped pair run at the same time: what the forward makes lives while the backward runs.
    """
    begins, dies = activation_changes(table, release)
    running = np.cumsum(begins) - (np.cumsum(dies) - dies)
    before_row = np.concatenate([[0], np.cumsum(begins - dies)])[np.array(table.first[:-1], np.int64)]
    live: IntArray = running - np.repeat(before_row, np.diff(table.first))
    return live
