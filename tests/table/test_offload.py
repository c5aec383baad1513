"""Residuals that wait in the host's memory: programs with fewer slots on the device, followed value
by value.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

import jaxpipe as jp
from jaxpipe.lowering.plan import plan_of
from jaxpipe.lowering.slots import assign_slots
from jaxpipe.lowering.ticks import assign_ticks
from jaxpipe.program.ir import MOVE, NOBODY, UNDER_WAY
from jaxpipe.program.verify import ProgramRule, faults, verify
from jaxpipe.table.kinds import Offload
from jaxpipe.transforms.rewrites import forward_only
from tests.passes import cut
from tests.strategies import few, schedules


def slots_of(name, *, offload, devices, chunks, microbatches=16):
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches, chunks=chunks)
    return verify(replace(plan_of(schedule), offload=offload).program()).slots


@pytest.mark.parametrize(
    ("name", "devices", "chunks", "held", "kept", "host"),
    # On the device: one that leaves while the next is made, and one that comes while another is
    # read.
    [("1f1b", 8, 1, 8, 2, 7), ("gpipe", 4, 1, 16, 2, 16), ("interleaved_1f1b", 4, 2, 11, 2, 10)],
)
def test_what_lives_long_waits_on_the_host(name, devices, chunks, held, kept, host):
    all_here = slots_of(name, devices=devices, chunks=chunks, offload=Offload.NOTHING)
    some_away = slots_of(name, devices=devices, chunks=chunks, offload=Offload.RESIDUALS)
    assert all_here.residual_weight == held
    assert all_here.host == 0
    assert some_away.residual_weight == some_away.residual_input == kept
    assert some_away.host == host


@pytest.mark.parametrize("name", ["1f1b", "zb_h2"])
def test_nothing_waits_where_that_saves_nothing(name):
    """Four slots on the device, or two and what leaves and what comes; or as many, since W comes
    long after I.
    """
    schedule = jp.schedules.build(name, devices=4, microbatches=16)
    program = replace(plan_of(schedule), offload=Offload.RESIDUALS).program()
    assert program.ticks.moves == ()
    assert program.slots == plan_of(schedule).program().slots


@few
@given(schedules())
def test_any_table_with_values_on_the_host_is_sound(schedule):
    ticks = assign_ticks(schedule)
    segments = cut(ticks)
    plain, program = (
        assign_slots(ticks, segments),
        assign_slots(ticks, segments, offload=Offload.RESIDUALS),
    )
    verify(program)
    # what comes may overlap what leaves
    assert program.slots.residual_weight <= plain.slots.residual_weight + 1


@pytest.mark.parametrize("field", MOVE)
def test_a_wrong_move_is_found(field):
    program = replace(
        plan_of(jp.schedules.build("1f1b", devices=8, microbatches=8)), offload=Offload.RESIDUALS
    ).program()
    (move,) = program.ticks.moves
    table = getattr(move, field).copy()
    tick, device = np.argwhere(table != NOBODY)[3]
    table[tick, device] = (table[tick, device] + 1) % (1 + max(1, table.max()))
    moves = (move.changed(**{field: table}),)
    found = {
        fault.rule for fault in faults(replace(program, ticks=replace(program.ticks, moves=moves)))
    }
    assert found
    assert found <= {ProgramRule.VALUE, ProgramRule.OVERWRITTEN, ProgramRule.POOL}


def test_a_program_says_what_moves():
    program = replace(
        plan_of(jp.schedules.build("1f1b", devices=8, microbatches=8)), offload=Offload.RESIDUALS
    ).program()
    text = str(program)
    assert "pool h host: 7 slots" in text
    assert "i0 w0>h0" in text
    assert "h0>i1 w1" in text


@pytest.mark.parametrize(
    ("name", "devices", "chunks"), [("gpipe", 4, 1), ("1f1b", 8, 1), ("interleaved_1f1b", 4, 2)]
)
def test_the_simulator_counts_both_memories(name, devices, chunks):
    """In actions of a device, where the program counts ticks: on the device what the pools hold and
    what is under way.
    """
    schedule = jp.schedules.build(name, devices=devices, microbatches=16, chunks=chunks)
    here, away = jp.simulate(schedule).peak_offloaded
    slots = slots_of(name, devices=devices, chunks=chunks, offload=Offload.RESIDUALS)
    assert slots.residual_weight <= max(here) <= slots.residual_weight + UNDER_WAY
    # A device that waits has ticks without actions, in which values of short lives by actions go to
    # the host too.
    assert abs(max(away) - slots.host) <= UNDER_WAY
    plain = jp.simulate(schedule).peak_activations
    assert all(h <= p <= h + a for h, p, a in zip(here, plain, away, strict=True))
    forwards = jp.simulate(forward_only(schedule)).peak_offloaded
    assert (set(forwards.device), set(forwards.host)) == ({1}, {0})
