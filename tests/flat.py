"""Pipelines from flat keywords, so that a test passes on, or draws, any setting of any part."""

from __future__ import annotations

from typing import Any

import jaxpipe as jp

MODEL = (
    "first",
    "last",
    "loss",
    "has_metrics",
    "stage_loss",
    "frozen",
    "replaced",
    "time",
    "whole",
    "carry",
)
SHARDING = {
    "axis": "pipe",
    "data_axes": "data",
    "fsdp": "fsdp",
    "max_active": "max_active",
    "shard_outer": "outer",
    "specs": "specs",
    "replicated_axes": "replicated",
}
MEMORY = {"remat": "remat", "offload": "offload", "accumulate_dtype": "accumulate"}


def flat_pipeline(stage: Any = None, *, schedule: Any, mesh: Any, **flat: Any) -> jp.Pipeline:
    """`jp.Pipeline` of the model, sharding and memory that the keywords describe."""
    settings = parts(stage, **flat)
    return jp.Pipeline(settings.pop("model"), schedule, mesh, **settings)


def parts(stage: Any = None, **flat: Any) -> dict[str, Any]:
    """Flat keywords -> model, sharding, memory, and the others."""
    model = {name: flat.pop(name) for name in MODEL if name in flat}
    if "layers" in flat:
        stage = flat.pop("layers")
        model["layers"] = flat["layout"]
    sharding = {SHARDING[name]: flat.pop(name) for name in SHARDING if name in flat}
    memory = {MEMORY[name]: flat.pop(name) for name in MEMORY if name in flat}
    return {
        "model": jp.Model(stage, **model),
        "sharding": jp.Sharding(**sharding),
        "memory": jp.Memory(**memory),
        **flat,
    }


def is_defined(name: str, devices: int) -> bool:
    """Whether the schedule has a table for so many devices, with its natural chunks."""
    count = 2 * devices if name == "dualpipe" else 4
    try:
        jp.schedules.build(name, devices=devices, microbatches=count)
    except jp.ScheduleError:
        return False
    return True
