"""In the program for GPUs, residuals that wait on the host leave and come back while blocks run, and take no room on the device."""

from __future__ import annotations

import re

import jaxpipe as jp
from tests.gpu.programs import compile_step, large_copies, needs_gpu_compiler

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


@needs_gpu_compiler
def test_copies_run_beside_blocks_and_the_device_has_fewer_slots():
    schedule = jp.schedules.build("1f1b", devices=8, microbatches=16)
    plain, away = compile_step(schedule), compile_step(schedule, offload="residuals")
    text, before, after = away.as_text(), plain.memory_analysis(), away.memory_analysis()
    # In every piece of code: two ticks a trip, of which each fetches beside its backward and stores beside its forward.
    moves = beside(text)
    assert len(moves) >= 4
    assert set(moves) == {("dynamic-slice", True), ("dynamic-update-slice", True)}
    slot = 2 * 2 * 40 * (352 + 352 + 96) * 2  # layers, rows, time; GELU's two arrays and the normal input, bfloat16
    assert before.host_temp_size_in_bytes == 0
    assert after.host_temp_size_in_bytes == 8 * slot  # seven wait, and one slot is for what nobody needs
    saved = before.temp_size_in_bytes - after.temp_size_in_bytes
    assert 0.9 * 4 * slot < saved  # eight slots, or two and what is under way
    assert not large_copies(text, [(8, slot // 2)])  # the host's pool is never copied
