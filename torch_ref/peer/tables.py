"""The tables that torch's own schedule classes make, as compute-only CSV."""

from __future__ import annotations

import csv
import io
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as torchs

from ..errors import PeerError


def _classes() -> dict[str, tuple[type[Any], str]]:
    """Name -> class, and how it places stages."""
    return {
        "GPipe": (torchs.ScheduleGPipe, "one"),
        "1F1B": (torchs.Schedule1F1B, "one"),
        "LoopedBFS": (torchs.ScheduleLoopedBFS, "loop"),
        "Interleaved1F1B": (torchs.ScheduleInterleaved1F1B, "loop"),
        "InterleavedZeroBubble": (torchs.ScheduleInterleavedZeroBubble, "loop"),
        "ZBVZeroBubble": (torchs.ScheduleZBVZeroBubble, "vee"),
        "DualPipeV": (torchs.ScheduleDualPipeV, "vee"),
    }


def own_names() -> tuple[str, ...]:
    """Every name that `own_table` accepts."""
    return tuple(_classes())


def own_table(name: str, *, devices: int, microbatches: int, chunks: int = 1) -> str:
    """The table that a schedule class of torch makes: the text that `Schedule.from_csv` and
    `torch_ref.run` read.

    Args:
        name: one of `own_names()`.
        devices: P.
        microbatches: M.
        chunks: V, stages a device; must be 1 for GPipe and 1F1B, and 2 for ZBVZeroBubble and
            DualPipeV.

    Raises:
        PeerError: torch's class refuses the numbers, or its table breaks on them; the message holds
            its own words.

    >>> print(own_table("GPipe", devices=2, microbatches=2))
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
    <BLANKLINE>
    """
    if name not in _classes():
        raise PeerError(f"torch has no schedule {name!r}; write one of {', '.join(own_names())}")
    kind, placing = _classes()[name]
    needed = {"one": 1, "vee": 2}.get(placing, chunks)
    if chunks != needed:
        raise PeerError(
            f"torch's {name} takes {needed} stages a device, not {chunks}; write chunks={needed}"
        )
    try:
        rows = _rows(kind, placing, devices, microbatches, chunks)
    except (ValueError, AssertionError, RuntimeError, KeyError, IndexError) as error:
        words = str(error).strip().split("\n")[0]
        raise PeerError(
            f"torch's {name} fails for {devices} devices, {microbatches} microbatches, {chunks} "
            f"chunks: {words}"
        ) from error
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        # Only what computes: torch marks the end of a stage's backwards with REDUCE_GRAD.
        writer.writerow(
            "" if action is None else str(action)
            for action in row
            if action is None or action.is_compute_op
        )
    return out.getvalue()


def _rows(
    kind: type[Any], placing: str, devices: int, microbatches: int, chunks: int
) -> list[list[Any]]:
    """A row a device.  The classes ask their stages only for these few attributes, so no process
    group is needed.
    """
    indices = (
        [0, 2 * devices - 1] if placing == "vee" else list(range(0, devices * chunks, devices))
    )
    shared = {
        "num_stages": devices * chunks,
        "group_size": devices,
        "group_rank": 0,
        "has_backward": True,
        "device": "cpu",
        "submod": None,
    }
    stages = [
        SimpleNamespace(stage_index=i, is_first=i == 0, is_last=i == devices * chunks - 1, **shared)
        for i in indices
    ]
    if placing == "one":
        order = kind(stages[0], microbatches, loss_fn=_no_loss)._get_pipeline_order()
    else:
        order = kind(stages, microbatches, loss_fn=_no_loss).pipeline_order
    return [list(order[device]) for device in range(devices)]


def _no_loss(*_: Any) -> None:
    """A schedule without a loss function would be one without backwards."""
