"""GPipe, 1F1B, and the table of one device with no pipeline at all."""

from __future__ import annotations

from ..action import Action, Cell, Kind
from ..placement import Placement
from ..schedule import Schedule

F, B = Kind.F, Kind.B


def no_pipelining(*, devices: int, microbatches: int) -> Schedule:
    """Forward and backward of one microbatch after the other, as plain gradient accumulation does."""
    placement = Placement.loop(devices=devices)
    rows = [[Action(d, k, m) for m in range(microbatches) for k in (F, B)] for d in range(devices)]
    return Schedule.from_rows(rows, placement=placement, num_microbatches=microbatches, name="no_pipelining")


def gpipe(*, devices: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019, figure 2c).

    Bubble (P - 1) / (M + P - 1) at equal costs; every device holds M microbatches' activations at its peak.
    """
    placement = Placement.loop(devices=devices)
    rows = [[Action(d, k, m) for k in (F, B) for m in range(microbatches)] for d in range(devices)]
    return Schedule.from_rows(rows, placement=placement, num_microbatches=microbatches, name="gpipe")


def one_f_one_b(*, devices: int, microbatches: int) -> Schedule:
    """One forward, one backward in the steady state (PipeDream-flush, Narayanan et al. 2021, figure 4 top).

    Bubble (P - 1) / (M + P - 1) at equal costs; device d holds min(P - d, M) microbatches' activations at its peak.
    """
    rows: list[list[Cell]] = []
    for device in range(devices):
        ahead = min(devices - 1 - device, microbatches)
        warmup = [Action(device, F, m) for m in range(ahead)]
        steady = [Action(device, k, m + (ahead if k is F else 0)) for m in range(microbatches - ahead) for k in (F, B)]
        cooldown = [Action(device, B, m) for m in range(microbatches - ahead, microbatches)]
        rows.append([*warmup, *steady, *cooldown])
    placement = Placement.loop(devices=devices)
    return Schedule.from_rows(rows, placement=placement, num_microbatches=microbatches, name="1f1b")
