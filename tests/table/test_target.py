"""What a program runs on is read off the mesh's devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpipe.lowering.target import CHIPS, GUESSED, ON_HOST, TRANSFER, RunsOn, Target


def mesh(platform: str, *kinds: str, tensor: int = 1) -> Any:
    """Two devices a process."""
    devices = [
        SimpleNamespace(platform=platform, device_kind=kind, process_index=i // 2)
        for i, kind in enumerate(kinds)
    ]
    shape = {"pipe": len(kinds) // tensor, "tensor": tensor}
    return SimpleNamespace(devices=np.array(devices, object), shape=shape)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_tpus_of_one_host_are_no_cpu_devices(chip: Any) -> None:
    target = Target.of(mesh("tpu", *[chip.kind] * 4), ("pipe",))
    assert (target.runs_on, target.chip) == (RunsOn.TPUS, chip)
    assert not target.on_cpus
    assert not target.on_gpus
    assert target.tile == (8, 128)
    assert target.overheads.hop == TRANSFER / chip.link
    assert target.overheads.predicate < GUESSED.predicate


def test_collectives_in_blocks_make_no_tpu_wait_for_its_host() -> None:
    apart, within = (
        Target.of(mesh("tpu", *["TPU v5"] * 4, tensor=tensor), ("pipe",)) for tensor in (1, 2)
    )
    assert within.communicates
    assert within.overheads == apart.overheads
    gpus = Target.of(mesh("gpu", *["NVIDIA H100"] * 4, tensor=2), ("pipe",))
    assert gpus.overheads == ON_HOST


def test_an_unknown_tpu_has_guessed_hops() -> None:
    for kinds in (["TPU v99"] * 2, ["TPU v5", "TPU v6 lite"]):
        target = Target.of(mesh("tpu", *kinds), ("pipe",))
        assert (target.runs_on, target.chip) == (RunsOn.TPUS, None)
        assert target.overheads.hop == GUESSED.hop


def test_gpus_and_cpus_keep_rows() -> None:
    for platform, runs_on in (("cuda", RunsOn.GPUS), ("cpu", RunsOn.ONE_CPU_PROCESS)):
        target = Target.of(mesh(platform, "a", "a"), ("pipe",))
        assert (target.runs_on, target.tile) == (runs_on, ())
        assert target.on_cpus == (platform == "cpu")
