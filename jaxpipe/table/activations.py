"""Activations that a table keeps: how many each device holds, action by action."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .encoded import Encoded, IntArray
from .kinds import RECOMPUTE, Value, kinds_where, makers
from .kinds import Release as Release


class Changes(NamedTuple):
    """Per action, the changes that it makes on its device, each for its own stage and microbatch.

    Attributes:
        begins: 1 where activations are held from its start on.
        ends: 1 where they are released at its end.
        inputs: 1 where only a stage's input is kept from its start on (an F with an R), -1 where
            activations replace it (the R).
    """

    begins: IntArray
    ends: IntArray
    inputs: IntArray


def activation_changes(table: Encoded, release: Release) -> Changes:
    """The activations that each action keeps and releases: they are held from F, or from R where
    there is one, to the end of B (or of I or W).

    An F whose microbatch has an R keeps the stage's input only.  In a forward-only table
    activations are held only while their F runs.
    """
    begins = table.of_kinds(makers(Value.ACTIVATIONS)).astype(np.int64)
    inputs = table.recomputed.astype(np.int64) - table.of_kinds(RECOMPUTE)
    if table.forward_only:
        return Changes(begins, begins, inputs)
    enders = kinds_where(lambda spec: release in spec.releases)
    ends = table.of_kinds(enders).astype(np.int64)
    return Changes(begins - table.recomputed, ends, inputs)


def live_activations(table: Encoded, release: Release) -> IntArray:
    """Per action, how many activations its device holds while it runs, its own included (kept
    inputs are not counted).

    The halves of an overlapped pair run at the same time: the forward's activations are held while
    the backward runs.
    """
    begins, dies, _ = activation_changes(table, release)
    held = np.concatenate([[0], np.cumsum(begins - dies)])
    before_row = held[np.repeat(table.first[:-1], np.diff(table.first))]
    live: IntArray = held[1:] + dies - before_row
    return live


# A value leaves while the action after it runs, and is back when the action before its reader ends:
# nothing is gained by less than this.
LEAST_AWAY = 4


class Split(NamedTuple):
    """Activations in two memories.

    Attributes:
        device: that the device holds.
        host: that wait in the memory of its host.
    """

    device: tuple[int, ...]
    host: tuple[int, ...]


def split_peaks(table: Encoded, release: Release) -> Split:
    """The most activations of each device in either memory, where those that live long wait on the
    host (Wan et al. 2025, "PipeOffload").

    One leaves while the action after it runs, and comes back while the one before its first reader
    does, where that is at least `LEAST_AWAY` actions later.
    """
    begins, dies, _ = activation_changes(table, release)
    changes = np.zeros((2, table.num_actions + 1), np.int64)
    begin = np.flatnonzero(begins)
    if table.forward_only:
        read = end = begin
    else:
        at = (table.stage[begin], table.microbatch[begin])
        read = table.backward_at[at]
        enders = np.flatnonzero(dies)
        end = np.zeros_like(table.backward_at)
        end[table.stage[enders], table.microbatch[enders]] = enders
        end = end[at]
    away = read - begin >= LEAST_AWAY

    def add(memory: int, since: IntArray, until: IntArray) -> None:
        np.add.at(changes[memory], since, 1)
        np.add.at(changes[memory], until + 1, -1)

    add(0, begin[~away], end[~away])
    add(0, begin[away], begin[away] + 1)
    add(0, read[away] - 1, end[away])
    add(1, begin[away] + 1, read[away] - 1)
    live = np.cumsum(changes, axis=1)
    rows = [live[:, a:b].max(axis=1, initial=0) for a, b in pairwise(table.first)]
    device, host = np.array(rows, np.int64).reshape(-1, 2).T.tolist()
    return Split(tuple(device), tuple(host))
