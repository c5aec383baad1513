"""Every transform and every lowering pass keeps its declared promise, and each promise can be
broken.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

import jaxpipe as jp
from jaxpipe.lowering.ticks import W_THEN_F, followed
from jaxpipe.table.kinds import RECOMPUTE
from tests.lowering_contracts import SEGMENTS, SLOTS, TICKS, Cut
from tests.strategies import random_schedule
from tests.transform_contracts import CONTRACTS

SEEDS = st.integers(0, 10_000)


def table_for(name, rng):
    """A random table that the transform takes."""
    schedule = random_schedule(rng, recompute=name == "remove_recompute")
    if "spread" in name or name == "defer_last":
        while schedule.num_stages < schedule.num_devices:
            schedule = random_schedule(rng)
        if name == "defer_last":
            return jp.spread_last(schedule, split=False)
        return jp.spread_first(jp.spread_last(schedule)) if name == "remove_spread" else schedule
    if name == "add_recompute" and schedule.forward_only:
        return jp.schedules.build("1f1b", devices=2, microbatches=3)
    made = {"remove_transfers": jp.add_transfers, "remove_gathers": jp.add_gathers}
    return made[name](schedule) if name in made else schedule


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
@given(seed=SEEDS)
def test_transforms_keep_their_promise(contract, seed):
    contract.checked(table_for(contract.name, random.Random(seed)))


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_a_transform_that_drops_or_swaps_an_action_is_found(contract):
    before = jp.schedules.build("zb_h1", devices=3, microbatches=4)
    made = {"remove_transfers": jp.add_transfers, "remove_recompute": jp.add_recompute}
    made |= {
        "remove_gathers": jp.add_gathers,
        "remove_spread": jp.spread_last,
        "spread_first": jp.spread_last,
        "defer_last": jp.spread_last,
    }
    before = made.get(contract.name, lambda s: s)(before)
    after = contract.checked(before)
    first, *rest = after.rows
    dropped = after.with_rows([first[1:], *rest])
    swapped = after.with_rows([(first[1], first[0], *first[2:]), *rest])
    assert contract.faults(before, dropped)
    assert contract.faults(before, swapped)
    assert contract.faults(before, after.with_rows([*reversed(after.rows)]))


def test_a_kind_that_must_not_be_left_is_found():
    split = next(c for c in CONTRACTS if c.name == "split_backward")
    whole = jp.schedules.build("1f1b", devices=2, microbatches=3)
    assert any("other kinds" in fault for fault in split.faults(whole, whole))
    again = next(c for c in CONTRACTS if c.name == "remove_recompute")
    table = jp.add_recompute(whole)
    assert any(RECOMPUTE[0].name in row for row in [table.to_csv()])
    assert any("other kinds" in fault for fault in again.faults(table, table))


@pytest.mark.parametrize("contract", TICKS, ids=str)
@given(seed=SEEDS)
def test_passes_keep_their_promises_one_after_the_other(contract, seed):
    schedule = random_schedule(random.Random(seed), recompute=bool(seed % 2))
    SLOTS.checked(SEGMENTS.checked(contract.checked(schedule)))


def lowered():
    schedule = jp.schedules.build("zbv", devices=2, microbatches=4)
    ticks = TICKS[0].run(schedule)
    return schedule, ticks, SEGMENTS.run(ticks)


def test_wrong_ticks_are_found():
    schedule, ticks, _ = lowered()
    late = ticks.when.copy()
    late[0] = late[1] + 1
    assert any(
        "of one row" in fault for fault in TICKS[0].faults(schedule, replace(ticks, when=late))
    )
    weight = int(np.flatnonzero(followed(schedule, W_THEN_F))[0])
    at_once = ticks.when.copy()
    at_once[weight] = at_once[weight + 1]
    assert not TICKS[0].faults(schedule, replace(ticks, when=at_once)), "W, then F"
    early = np.zeros_like(ticks.when)
    assert any(
        "what it needs of another device" in fault
        for fault in TICKS[0].faults(schedule, replace(ticks, when=early))
    )
    assert any("multiple" in fault for fault in TICKS[0].faults(schedule, _odd(ticks)))


def _odd(ticks):
    changed = replace(ticks, period=ticks.num_ticks + 1)
    changed.__dict__["num_ticks"] = ticks.num_ticks
    return changed


def test_wrong_segments_are_found():
    _, ticks, cut = lowered()
    first, *rest = cut.segments
    assert SEGMENTS.faults(ticks, Cut(ticks, tuple(rest)))
    blocks, *others = first.templates
    fewer = replace(first, templates=(replace(blocks, blocks=blocks.blocks[1:]), *others))
    assert any("no code" in fault for fault in SEGMENTS.faults(ticks, Cut(ticks, (fewer, *rest))))
    silent = tuple(
        replace(s, templates=tuple(replace(template, permutes=()) for template in s.templates))
        for s in cut.segments
    )
    assert any("not carried" in fault for fault in SEGMENTS.faults(ticks, Cut(ticks, silent)))


def test_a_program_of_other_segments_is_found():
    _, _, cut = lowered()
    program = SLOTS.run(cut)
    assert SLOTS.faults(cut, program) == ()
    assert any(
        "other segments" in fault
        for fault in SLOTS.faults(Cut(cut.ticks, cut.segments[:-1]), program)
    )
    table = program.ticks.forward.x.copy()
    table[program.ticks.forward.chunk >= 0] += 1
    wrong = replace(
        program, ticks=replace(program.ticks, forward=program.ticks.forward.changed(x=table))
    )
    assert SLOTS.faults(cut, wrong)
