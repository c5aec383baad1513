"""The tables of torch.distributed.pipelining's own generators, made without process groups or
stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch.distributed.pipelining.schedules as peer

from jaxpipe import Placement, Schedule
from jaxpipe.table import parse_cell

# Our name -> torch's class, for those whose order a class computes by itself.
CLASSES = {
    "gpipe": peer.ScheduleGPipe,
    "looped_bfs": peer.ScheduleLoopedBFS,
    "interleaved_1f1b": peer.ScheduleInterleaved1F1B,
    "interleaved_zb": peer.ScheduleInterleavedZeroBubble,
    "zbv": peer.ScheduleZBVZeroBubble,
    "dualpipev": peer.ScheduleDualPipeV,
}
# torch's Schedule1F1B is left out: the order that it reports has no forward of microbatch 0 on the
# last rank, so it cannot run; its runtime does not use it, and takes the order of jaxpipe's 1f1b.


def torch_table(name: str, *, devices: int, chunks: int, microbatches: int) -> Schedule | None:
    """torch's table of the schedule that we call `name`; None where torch refuses the setting."""
    if not _accepts(name, devices, chunks, microbatches):
        return None
    rows = (
        _gpipe(devices, microbatches)
        if name == "gpipe"
        else torch_rows(name, devices, chunks, microbatches)
    )
    shape = (
        Placement.vee(devices=devices)
        if name in ("zbv", "dualpipev")
        else Placement.loop(devices=devices, chunks=chunks)
    )
    cells = [
        [parse_cell(str(a)) for a in row if a is not None and "REDUCE_GRAD" not in str(a)]
        for row in rows
    ]
    return Schedule.from_rows(
        cells, placement=shape, num_microbatches=microbatches, name=f"torch {name}"
    )


def _accepts(name: str, devices: int, chunks: int, microbatches: int) -> bool:
    """The conditions that the classes check when they are made (which needs process groups)."""
    if name == "gpipe":
        return chunks == 1
    if name in ("zbv", "dualpipev"):
        return chunks == 2 and (name == "zbv" or microbatches >= 2 * devices)
    return name == "looped_bfs" or microbatches % max(1, microbatches // devices) == 0


def _gpipe(devices: int, microbatches: int) -> Iterable[list[Any]]:
    order = peer.ScheduleGPipe._get_pipeline_order(
        SimpleNamespace(_num_stages=devices, _n_microbatches=microbatches)
    )  # type: ignore[arg-type]
    assert order is not None
    return order.values()


def torch_rows(name: str, devices: int, chunks: int, microbatches: int) -> list[list[Any]]:
    """Call a multi-stage class's own generator on an object that holds only what it reads."""
    schedule: Any = object.__new__(CLASSES[name])
    schedule.pp_group_size, schedule._n_microbatches = devices, microbatches
    schedule._num_stages = schedule.num_stages = devices * chunks
    schedule.n_local_stages, schedule._stages = chunks, [None] * chunks
    schedule.number_of_rounds = max(1, microbatches // devices)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    return [schedule._calculate_single_rank_operations(rank) for rank in range(devices)]
