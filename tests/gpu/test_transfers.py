"""In the GPU program transfers are asynchronous, carry what the table moves, and run beside compute
where there is slack.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

import jaxpipe as jp
from benchmarks.gpu_programs import Axes, Case, Remat
from jaxpipe.inspect.hlo import steady
from jaxpipe.inspect.programs import compile_and_read
from jaxpipe.lowering.plan import Plan, plan_of
from jaxpipe.lowering.target import Target
from tests.gpu.programs import compile_step, gpu_marks, gpu_mesh
from tests.tiers import slow

pytestmark = gpu_marks()


def plan_on_h100s(schedule: jp.Schedule) -> Plan:
    """The plan of what `compile_step` compiles: predicates have the prices of an H100."""
    target = Target.of(gpu_mesh((schedule.num_devices,), ("pipe",)), ("pipe",))
    return plan_of(schedule, overheads=target.overheads)


def overlapped_transfers(text: str) -> int:
    """How many transfers have a loop (a block of a stage) between their start and their done, in
    program order.
    """
    found = 0
    open_starts: dict[str, bool] = {}
    for line in text.splitlines():
        if line and not line[0].isspace():
            open_starts = {}
        start = re.match(r"\s+(?:ROOT )?%(collective-permute-start[\w.\-]*) =", line)
        if start:
            open_starts[start[1]] = False
        elif re.search(r" while\(", line):
            open_starts = dict.fromkeys(open_starts, True)
        done = re.search(r"collective-permute-done\(.*%(collective-permute-start[\w.\-]*)\)", line)
        if done and open_starts.pop(done[1], False):
            found += 1
    return found


def pairs_of(text: str) -> list[list[tuple[int, int]]]:
    """The source-target pairs of every transfer."""
    found = []
    for match in re.finditer(
        r"collective-permute-start\(.*?source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text
    ):
        found.append([(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", match[1])])
    return found


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_slack_is_used(name: str) -> None:
    """That between ticks, and that of a W which shares its tick with an F."""
    schedule = jp.schedules.build(name, devices=4, microbatches=16)
    late = sum(
        transit.is_late
        for segment in plan_on_h100s(schedule).segments
        for transit in segment.transits
    )
    assert late > 0
    assert overlapped_transfers(compile_step(schedule).as_text()) >= late


@pytest.mark.slow
def test_slack_is_used_beside_blocks_that_communicate() -> None:
    """Every transfer of ZB-H1's steady state is under way beside a block, though blocks have
    collectives of the tensor axis.
    """
    case = Case("zb_h1", devices=4, microbatches=16, axes=Axes.TENSOR, remat=Remat.LAYER)
    pipe, params, rows = case.arguments(gpu_mesh)
    program = compile_and_read(pipe.lower(params, rows))
    trip = max(pipe._steps.plan.segments, key=lambda segment: segment.repeats)
    assert trip.permutes >= 2  # of activations and of cotangents
    assert [each.overlapped for each in steady(program.collectives)] == [True] * trip.permutes


@pytest.mark.parametrize("name", ["1f1b", slow("zbv")])
def test_transfers_are_those_of_the_plan_and_hold_no_cycle(name: str) -> None:
    """Each by itself: in ZB-V's, activations of one half go the way of the other's cotangents, and
    are awaited later.
    """
    schedule = jp.schedules.build(name, devices=4, microbatches=8)
    segments = plan_on_h100s(schedule).segments
    trips = (p for s in segments for template in s.templates for p in template.permutes)
    # Once more after the last trip.  XLA drops those without a reader: all of the last segment.
    after = (transit.permute for s in segments[:-1] for transit in s.in_flight)
    planned, last = (Counter(tuple(sorted(p.pairs)) for p in each) for each in (trips, after))
    compiled = Counter(tuple(sorted(p)) for p in pairs_of(compile_step(schedule).as_text()))
    assert planned <= compiled <= planned + last
    for pairs in compiled:
        assert all(s < t for s, t in pairs) or all(s > t for s, t in pairs)


def test_steady_state_moves_what_the_table_moves() -> None:
    """Each trip of 1F1B's steady state has just the table's transfers: two a neighbouring pair, one
    up and one down.
    """
    schedule = jp.schedules.build("1f1b", devices=4, microbatches=32)
    steady = max(plan_on_h100s(schedule).segments, key=lambda s: s.repeats)
    moved = sum(len(p.pairs) for position in steady.templates for p in position.permutes)
    assert moved == 2 * (schedule.num_devices - 1)
