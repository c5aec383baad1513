"""Residuals and the stash of a microbatch in slots of one number, as on GPUs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.lowering.plan import KEEPS_SLOTS, plan_of
from jaxpipe.program.verify import ProgramRule, faults, verify
from jaxpipe.table.effects import TOGETHER, Place
from jaxpipe.table.kinds import Kind

MOST = 24
# By kind, the pools besides that of residuals for W.
NUMBERED = {
    Kind.F: ["residual_input"],
    Kind.B: ["residual_input"],
    Kind.I: ["residual_input", "stash"],
    Kind.W: ["stash"],
}


def program(name: str, most: int = MOST):
    schedule = jp.schedules.build(name, devices=4, microbatches=8)
    return plan_of(schedule).program(most=most)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
def test_an_action_has_one_slot_number(name):
    found = verify(program(name))
    assert found.together
    backward = found.ticks.backward
    for kind, names in NUMBERED.items():
        record = found.ticks.forward if kind is Kind.F else backward
        runs = record.kind == kind
        for pool in names:
            assert np.array_equal(record.columns[pool][runs], record.residual_weight[runs])
    apart = program(name, most=0)
    sizes = [sum(each.pools[pool] for pool in TOGETHER) for each in (found, apart)]
    assert sizes[0] <= KEEPS_SLOTS * sizes[1]


@pytest.mark.parametrize("name", ["v_half", "dualpipev", "1f1b_overlap"])
def test_programs_that_would_need_more_memory_or_have_pairs_keep_their_numbers(name):
    assert not program(name).together


def test_no_program_has_more_slots_than_are_allowed():
    assert program("zbv", most=8).together
    assert not program("zbv", most=7).together


def test_a_pool_has_no_slot_that_none_of_them_needs():
    found = program("zbv")
    for change, rule in ((-1, ProgramRule.SLOT), (1, ProgramRule.POOL)):
        size = found.pools[Place.RESIDUAL_WEIGHT] + change
        broken = replace(found, pools={**found.pools, Place.RESIDUAL_WEIGHT: size})
        assert rule in {fault.rule for fault in faults(broken)}
