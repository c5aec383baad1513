"""GPipe, 1F1B, and the table without pipelining."""

from __future__ import annotations

from ..table.action import Kind
from ..table.placement import Placement
from ..table.schedule import Schedule
from ._rows import actions, alternate, in_turns

F, B = Kind.F, Kind.B


def no_pipelining(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """Forward and backward of one microbatch after the other, as plain gradient accumulation does.

    Any P, V, M; stages are placed in a loop.  Only one device works at a time: bubble 1 - 1/P at
    equal costs.  A device holds V activations at its peak.
    """
    placement = Placement.loop(devices=devices, chunks=chunks)
    rows = []
    for stages in placement.stages_of:
        columns = [actions(s, F, range(microbatches)) for s in stages] + [
            actions(s, B, range(microbatches)) for s in reversed(stages)
        ]
        rows.append(alternate(*columns))
    return Schedule.from_rows(
        rows, placement=placement, num_microbatches=microbatches, name="no_pipelining"
    )


def gpipe(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019, figure 2c).

    Any P and M, one chunk.  Makespan (M + P - 1)(F + B), so the bubble is (P - 1) / (M + P - 1);
    every device holds M activations at its peak.
    """
    placement = Placement.loop(devices=devices, chunks=chunks)
    rows = [
        actions(d, F, range(microbatches)) + actions(d, B, range(microbatches))
        for d in range(devices)
    ]
    return Schedule.from_rows(
        rows, placement=placement, num_microbatches=microbatches, name="gpipe"
    )


def one_f_one_b(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """One forward, one backward in the steady state (PipeDream-flush, Narayanan et al. 2021, figure
    4 top).

    Any P and M, one chunk.  Makespan (M + P - 1)(F + B), so the bubble is (P - 1) / (M + P - 1);
    device d holds min(P - d, M) activations at its peak.
    """
    placement = Placement.loop(devices=devices, chunks=chunks)
    every = range(microbatches)
    rows = [
        in_turns(actions(d, F, every), actions(d, B, every), devices - 1 - d)
        for d in range(devices)
    ]
    return Schedule.from_rows(rows, placement=placement, num_microbatches=microbatches, name="1f1b")
