"""Looped BFS: several chunks per device, breadth first."""

from __future__ import annotations

from ..table.action import Kind
from ..table.placement import Placement
from ..table.schedule import Schedule
from ._rows import in_groups


def looped_bfs(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """All microbatches through a chunk before the next chunk (Breadth-First Pipeline Parallelism,
    Lamy-Poirier 2023).

    Any P, V and M.  Makespan (V M + P - 1)(F + B) in costs of a chunk for M >= P, so the bubble is
    (P - 1) / (V M + P - 1); every device holds V M activations at its peak.  The advantage is that
    a chunk's parameters are needed, and its gradients completed, in one contiguous run each, which
    suits sharded data parallelism.
    """
    placement = Placement.loop(devices=devices, chunks=chunks)
    once = (microbatches,)
    rows = [
        in_groups(stages, Kind.F, once) + in_groups(stages[::-1], Kind.B, once)
        for stages in placement.stages_of
    ]
    return Schedule.from_rows(
        rows, placement=placement, num_microbatches=microbatches, name="looped_bfs"
    )
