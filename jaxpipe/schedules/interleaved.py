"""Interleaved 1F1B: several chunks per device, depth first."""

from __future__ import annotations

from ..table.action import Action, Kind
from ..table.placement import Placement
from ..table.schedule import Schedule
from ._rows import drop_phantoms, groups_of, in_groups, in_turns


def interleaved_1f1b(
    *,
    devices: int,
    microbatches: int,
    chunks: int,
    group_size: int | None = None,
    lean: bool = False,
) -> Schedule:
    """1F1B over V chunks per device (Narayanan et al. 2021, section 2.2 and figure 4 bottom;
    Megatron-Core).

    Any P, V and M.  Microbatches go through the chunks in groups: of `group_size` and a remainder,
    as in Megatron-Core (microbatch_group_size_per_vp_stage), or else in groups of at least P that
    are as equal as M allows.

    Makespan (V M + P - 1)(F + B) in costs of a chunk for M >= P, so the bubble is (P - 1) / (V M +
    P - 1), except where a given `group_size` leaves a remainder shorter than P.  With G the longest
    group, device d holds min(V M, (V - 1) G + 2 (P - 1 - d) + 1) activations at its peak.

    Megatron's warmup of two forwards per hop leaves time for transfers.  Where transfers take no
    time, one per hop is enough: `lean=True` keeps the makespan and holds min(V M, (V - 1) G + P -
    d).
    """
    groups = groups_of(group_size, devices=devices, microbatches=microbatches)
    hop = 1 if lean else 2
    placement = Placement.loop(devices=devices, chunks=chunks)
    rows: list[list[Action]] = []
    for device, stages in enumerate(placement.stages_of):
        forward, backward = (
            in_groups(stages, Kind.F, groups),
            in_groups(stages[::-1], Kind.B, groups),
        )
        rows.append(
            in_turns(forward, backward, (chunks - 1) * max(groups) + hop * (devices - 1 - device))
        )
    kept = drop_phantoms(rows, microbatches) if sum(groups) > microbatches else rows
    return Schedule.from_rows(
        kept, placement=placement, num_microbatches=microbatches, name="interleaved_1f1b"
    )
