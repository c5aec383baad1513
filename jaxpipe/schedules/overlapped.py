"""1F1B in which the steady state is one forward and one backward at a time, as overlapped pairs."""

from __future__ import annotations

from ..table.action import Cell, Kind, Overlap
from ..table.placement import Placement
from ..table.schedule import Schedule
from ._rows import drop_phantoms, groups_of, in_groups


def one_f_one_b_overlap(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B whose steady state is overlapped pairs (those of DualPipe, DeepSeek-V3, section 3.2.1,
    in one direction).

    Any P and M, one chunk.  A pair's forward result leaves only when its backward is done too, so
    two forwards per hop, and one more microbatch, are needed to keep all devices busy: device d
    warms up with 2 (P - 1 - d) + 1 and holds min(M, 2 (P - d)) activations at its peak.  With X the
    cost of a pair (not less than either half's), the makespan is P (F + B) + (M - 1) X for M >= P.
    """
    return _overlapped("1f1b_overlap", devices, chunks, microbatches, (microbatches,))


def interleaved_1f1b_overlap(
    *, devices: int, microbatches: int, chunks: int, group_size: int | None = None
) -> Schedule:
    """Interleaved 1F1B whose steady state is overlapped pairs (Megatron-Core's overlap of
    expert-parallel communication).

    Any P, V and M; groups of microbatches as in interleaved_1f1b.  The warmup is one microbatch
    longer, so that a pair never holds the forward and the backward of the same microbatch: with G
    the longest group, device d holds min(V M, (V - 1) G + 2 (P - d)) activations at its peak.  With
    X the cost of a pair (not less than either half's), the makespan is (P + (V - 1) G)(F + B) + (V
    M - (V - 1) G - 1) X in costs of a chunk for M >= P.
    """
    groups = groups_of(group_size, devices=devices, microbatches=microbatches)
    return _overlapped("interleaved_1f1b_overlap", devices, chunks, microbatches, groups)


def _overlapped(
    name: str, devices: int, chunks: int, microbatches: int, groups: tuple[int, ...]
) -> Schedule:
    placement = Placement.loop(devices=devices, chunks=chunks)
    rows: list[list[Cell]] = []
    for device, stages in enumerate(placement.stages_of):
        forward, backward = (
            in_groups(stages, Kind.F, groups),
            in_groups(stages[::-1], Kind.B, groups),
        )
        ahead = min(len(forward), (chunks - 1) * max(groups) + 2 * (devices - 1 - device) + 1)
        warmup, cooldown = forward[:ahead], backward[len(backward) - ahead :]
        steady = map(Overlap, forward[ahead:], backward[: len(backward) - ahead])
        rows.append([*warmup, *steady, *cooldown])
    if sum(groups) > microbatches:
        rows = drop_phantoms(rows, microbatches)
    return Schedule.from_rows(rows, placement=placement, num_microbatches=microbatches, name=name)
