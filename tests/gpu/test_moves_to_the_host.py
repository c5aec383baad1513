"""In the program for GPUs, residuals that wait on the host leave and come back while blocks run,
and take no room on the device.
"""

from __future__ import annotations

import re

import pytest

import jaxpipe as jp
from jaxpipe.program.ir import UNDER_WAY
from tests.flat import flat_pipeline
from tests.gpu.programs import (
    compile_step,
    first,
    gpu_mesh,
    large_copies,
    last,
    needs_gpu_compiler,
    stage,
)

MOVE = re.compile(r"%(dynamic-(?:update-)?slice)-(start|done)[\w.]* = .*")


def beside(text):
    """Each copy between the memories, and whether a block begins between its start and its end."""
    found = []
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        under_way = {}
        for line in computation.splitlines():
            if " fusion-start(" in line and "S(5)" in line:
                under_way[line.split("=")[0].strip().removeprefix("%")] = False
            elif " while(" in line:
                under_way = dict.fromkeys(under_way, True)
            elif " fusion-done(" in line:
                name = re.search(r"fusion-done\(%([\w.\-]+)", line)[1]
                if name in under_way:
                    found.append((name.split("-start")[0], under_way.pop(name)))
    return found


def slots_of(schedule, **options):
    """What the program for GPUs has."""
    mesh = gpu_mesh((schedule.num_devices,), ("pipe",))
    return (
        flat_pipeline(stage, schedule=schedule, mesh=mesh, first=first, last=last, **options)
        ._steps.plan.program()
        .slots
    )


@needs_gpu_compiler
@pytest.mark.slow
def test_copies_run_beside_blocks_and_the_device_has_fewer_slots():
    schedule = jp.schedules.build("1f1b", devices=8, microbatches=16)
    plain, away = compile_step(schedule), compile_step(schedule, offload="residuals")
    text, before, after = away.as_text(), plain.memory_analysis(), away.memory_analysis()
    # In every piece of code: two ticks a trip, of which each fetches beside its backward and stores
    # beside its forward.
    moves = beside(text)
    assert len(moves) >= 4
    assert set(moves) == {("dynamic-slice", True), ("dynamic-update-slice", True)}
    # rows, time; GELU's input in both layers, and the second layer's input, in bfloat16: the first
    # layer's is the stage's, which has a slot of its own
    slot = 2 * 40 * (2 * 352 + 96) * 2
    here, there = slots_of(schedule), slots_of(schedule, offload="residuals")
    assert before.host_temp_size_in_bytes == 0
    # one slot is for what nobody needs
    assert after.host_temp_size_in_bytes == (there.host + 1) * slot
    fewer = here.residual_weight - there.residual_weight - UNDER_WAY
    assert fewer >= 4
    assert 0.9 * fewer * slot < before.temp_size_in_bytes - after.temp_size_in_bytes
    assert not large_copies(text, [(there.host + 1, slot // 2)])  # the host's pool is never copied
