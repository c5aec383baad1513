"""A broken program is found out, whatever is broken."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.lowering.plan import plan_of
from jaxpipe.lowering.slots import assign_slots
from jaxpipe.lowering.spans import Span, segments_of
from jaxpipe.lowering.ticks import assign_ticks, joined_ticks
from jaxpipe.program.segments import Block, Payload, Presence, Segment, TickTemplate
from jaxpipe.program.verify import ProgramRule, faults, verify
from jaxpipe.table.kinds import Kind
from tests.passes import cut, exchanges, inputs, places
from tests.tiers import slow

SLOTS = {
    "forward": ("x", "residual_input", "residual_weight"),
    "backward": ("x", "residual_input", "residual_weight", "cotangent", "stash"),
}
NUMBERS = {
    "forward": ("chunk", "stage", "microbatch", "kind"),
    "backward": ("chunk", "kind", "stage", "microbatch"),
}
FLAGS = {
    "forward": ("is_first", "is_last", "is_local", "keeps"),
    "backward": ("is_first", "is_local"),
}
ENTRIES = [
    (half, field)
    for group in (SLOTS, NUMBERS, FLAGS)
    for half, fields in group.items()
    for field in fields
]
RULES_OF = {
    field: {ProgramRule.ACTION, ProgramRule.CODE} for fields in NUMBERS.values() for field in fields
} | {field: {ProgramRule.ACTION, ProgramRule.CODE} for fields in FLAGS.values() for field in fields}


@cache
def sound_program():
    """A program with several slots in each pool, chunks, local hand-overs and I and W apart."""
    schedule = jp.schedules.build("zbv", devices=2, microbatches=6)
    ticks = assign_ticks(schedule)
    return assign_slots(ticks, cut(ticks))


def entries(program, half, field):
    """(tick, device) whose entry in this field matters."""
    record = getattr(program.ticks, half)
    active = record.chunk >= 0
    if field == "stash":
        active = active & (record.kind != Kind.B)
    if half == "backward" and field in ("cotangent", "residual_input", "is_local", "is_first"):
        active = active & (record.kind != Kind.W)
    return np.argwhere(active)


def with_entry(program, half, field, tick, device, value):
    """The program with one number of its records replaced."""
    record = getattr(program.ticks, half)
    table = getattr(record, field).copy()
    table[tick, device] = value
    return replace(
        program, ticks=replace(program.ticks, **{half: record.changed(**{field: table})})
    )


def rules_broken(program):
    return {fault.rule for fault in faults(program)}


def test_the_sound_program_has_no_fault():
    assert faults(sound_program()) == ()


@pytest.mark.parametrize("most", [2, slow(12)])
@pytest.mark.parametrize(("half", "field"), ENTRIES, ids=lambda name: name)
def test_a_wrong_entry_is_found(half, field, most):
    program = sound_program()
    rng = random.Random(f"{half}.{field}")
    chosen = entries(program, half, field).tolist()
    record = getattr(getattr(program.ticks, half), field)
    for tick, device in rng.sample(chosen, min(most, len(chosen))):
        size = 2 if field.startswith("is_") or field == "keeps" else 1 + max(1, int(record.max()))
        broken = with_entry(program, half, field, tick, device, (record[tick, device] + 1) % size)
        found = rules_broken(broken)
        assert found
        assert found <= RULES_OF.get(
            field, {ProgramRule.VALUE, ProgramRule.OVERWRITTEN, ProgramRule.SLOT, ProgramRule.POOL}
        ), found


def test_the_error_lists_the_faults():
    program = with_entry(sound_program(), "forward", "x", 2, 0, 99)
    with pytest.raises(
        jp.errors.ProgramError,
        match=r"bug in jaxpipe.*\n.*slot \[tick 2, device 0\]: slot 99 of pool x",
    ) as caught:
        verify(program)
    assert len(caught.value.faults) >= 1


def test_a_pool_that_is_too_large_is_found():
    program = sound_program()
    for pool, slots in program.pools.items():
        pools = {**program.pools, pool: slots + 1}
        assert rules_broken(replace(program, pools=pools)) == {ProgramRule.POOL}


def test_a_value_that_is_overwritten_is_found():
    """Two forwards of one device that write one slot: the first value is gone when its backward
    comes.
    """
    program = sound_program()
    forward = program.ticks.forward
    (first, second), device = np.flatnonzero(forward.chunk[:, 0] >= 0)[:2], 0
    broken = with_entry(
        program,
        "forward",
        "residual_weight",
        second,
        device,
        forward.residual_weight[first, device],
    )
    assert ProgramRule.OVERWRITTEN in rules_broken(broken)


@pytest.mark.slow
def test_a_message_in_the_wrong_slot_is_found():
    program = sound_program()
    made_in = exchanges(program.segments)
    where = places(assign_ticks(program.schedule))
    messages = [
        (m, a, payload)
        for a, makers in inputs(program.schedule).items()
        for m, payload in makers
        if payload is not None
    ]
    sent = [message for message in messages if where[message[0]][0] != where[message[1]][0]]
    # six microbatches, forward and back, over two of three stage boundaries
    assert len(sent) == 6 * 2 * 2
    for maker, action, payload in sent:
        (source, made), (target, _) = where[maker], where[action]
        (lane,) = (
            n
            for n, p in enumerate(made_in[made])
            if p.payload is payload and (source, target) in p.pairs
        )
        size = program.slots.x if payload is Payload.ACTIVATION else program.slots.cotangent
        arrival = program.ticks.arrivals[lane]
        for wrong in (
            arrival.changed(
                slot=changed(arrival.slot, made, target, (arrival.slot[made, target] + 1) % size),
            ),
            arrival.changed(takes=changed(arrival.takes, made, target, 0)),
        ):
            arrivals = (*program.ticks.arrivals[:lane], wrong, *program.ticks.arrivals[lane + 1 :])
            found = rules_broken(replace(program, ticks=replace(program.ticks, arrivals=arrivals)))
            assert found
            assert found <= {ProgramRule.VALUE, ProgramRule.OVERWRITTEN, ProgramRule.POOL}


def changed(table, tick, device, value):
    table = table.copy()
    table[tick, device] = value
    return table


def first_block(change):
    def broken(position):
        first, *rest = position.blocks
        return replace(position, blocks=(*change(first), *rest))

    return broken


def first_permute(change):
    def broken(position):
        if not position.permutes:
            return position
        first, *rest = position.permutes
        return replace(position, permutes=(change(first), *rest))

    return broken


def unwanted_part(part, kinds):
    """Only these kinds of blocks do something more where their stage is the first or last, or hand
    on to this device.
    """

    def without(use):
        return replace(use, **{part: Presence.NEVER}) if use.block.kind in kinds else use

    return lambda position: replace(position, blocks=tuple(map(without, position.blocks)))


def cyclic(permute):
    (source, target), *_ = permute.pairs
    return replace(permute, pairs=((source, target), (target, source)))


LOST = {ProgramRule.VALUE, ProgramRule.OVERWRITTEN, ProgramRule.POOL}
BREAK = {
    "a block is missing": (first_block(lambda use: ()), {ProgramRule.CODE}),
    "a pair is missing": (
        first_permute(lambda permute: replace(permute, pairs=permute.pairs[1:])),
        LOST,
    ),
    "a permute of the other payload": (
        first_permute(lambda permute: replace(permute, payload=Payload(1 - permute.payload))),
        LOST | {ProgramRule.SLOT},
    ),
    "a transfer is late": (
        first_permute(lambda permute: replace(permute, delay=permute.delay + 1)),
        LOST | {ProgramRule.EXCHANGE},
    ),
    "a block runs everywhere": (
        first_block(lambda use: (replace(use, active=Presence.ALWAYS),)),
        {ProgramRule.CODE},
    ),
    "first never runs": (unwanted_part("first", (Kind.F, Kind.B, Kind.I)), {ProgramRule.CODE}),
    "last never runs": (unwanted_part("last", (Kind.F,)), {ProgramRule.CODE}),
    "nothing is handed on": (unwanted_part("local", (Kind.F, Kind.B, Kind.I)), {ProgramRule.CODE}),
    "a block of another chunk": (
        first_block(lambda use: (replace(use, block=Block(use.block.kind, 1 - use.block.chunk)),)),
        {ProgramRule.CODE},
    ),
    "a permute with a cycle": (first_permute(cyclic), {ProgramRule.PERMUTE}),
}


def broken_segments(segments, broken):
    """The segments with one position broken, for each position that the change touches."""
    for i, segment in enumerate(segments):
        for j, position in enumerate(segment.templates):
            if broken(position) != position:
                positions = (*segment.templates[:j], broken(position), *segment.templates[j + 1 :])
                yield (*segments[:i], replace(segment, templates=positions), *segments[i + 1 :])


@pytest.mark.parametrize(("broken", "rules"), BREAK.values(), ids=[*BREAK])
def test_a_wrong_segment_is_found(broken, rules):
    ticks = assign_ticks(jp.schedules.build("zbv", devices=3, microbatches=6))
    program = assign_slots(ticks, segments_of([Span(0, ticks.num_ticks, 6)], ticks))
    assert faults(program) == ()
    changed = list(broken_segments(program.segments, broken))
    assert len(changed) > 1
    for segments in changed:
        found = rules_broken(replace(program, segments=segments))
        assert found
        assert found <= rules, found


def test_a_missing_tick_is_found():
    program = sound_program()
    last = program.segments[-1]
    (fault,) = faults(
        replace(program, segments=(*program.segments[:-1], replace(last, repeats=last.repeats - 1)))
    )
    assert fault.rule is ProgramRule.SEGMENTS


@pytest.mark.parametrize("payload", Payload)
def test_a_transfer_that_is_written_too_late_is_found(monkeypatch, payload):
    """Beside blocks it is written before the first that may need it, and no later."""
    ticks = assign_ticks(jp.schedules.build("zb_h1", devices=4, microbatches=8))
    segments = segments_of([Span(0, ticks.num_ticks, 1)], ticks)
    program = assign_slots(ticks, segments)
    assert any(t.permute.payload is payload and t.from_before for t in segments[0].transits)
    assert not faults(program)
    right = TickTemplate.before_readers
    late = {Payload.ACTIVATION: 3, Payload.COTANGENT: 2}  # after F, after I
    monkeypatch.setattr(
        TickTemplate,
        "before_readers",
        lambda self, of: late[of] if of is payload else right(self, of),
    )
    broken = segments_of([Span(0, ticks.num_ticks, 1)], ticks)
    broken_rules = rules_broken(replace(program, segments=broken))
    assert broken_rules
    assert broken_rules <= {ProgramRule.VALUE, ProgramRule.OVERWRITTEN}


def test_a_transfer_that_is_issued_before_its_value_is_made_is_found(monkeypatch):
    ticks = assign_ticks(jp.schedules.build("1f1b", devices=4, microbatches=8))
    program = assign_slots(ticks, segments_of([Span(0, ticks.num_ticks, 2)], ticks))
    assert not faults(program)
    monkeypatch.setattr(TickTemplate, "after_makers", lambda *_: 0)
    early = segments_of([Span(0, ticks.num_ticks, 2)], ticks)
    assert rules_broken(replace(program, segments=early)) == {ProgramRule.VALUE}


@pytest.mark.parametrize("ticks_early", [1, -1])
def test_slots_for_transfers_that_arrive_at_another_time_are_found(monkeypatch, ticks_early):
    """The allocator takes another time than that at which the code writes."""
    ticks = assign_ticks(jp.schedules.build("zb_h1", devices=4, microbatches=8))
    segments = segments_of([Span(0, ticks.num_ticks, 1)], ticks)
    assert not faults(assign_slots(ticks, segments))
    right = Segment.written

    def other(self, transit):
        tick, block = right(self, transit)
        return np.maximum(tick - ticks_early, 0), block

    monkeypatch.setattr(Segment, "written", other)
    assert rules_broken(assign_slots(ticks, segments))


def test_a_transfer_that_is_written_before_a_w_has_read_its_slot_is_found(monkeypatch):
    """In a tick with W and then F, what arrives for F may take the slot of the input that W is the
    last to read.
    """
    schedule = jp.schedules.build("zb_h1", devices=4, microbatches=8)
    ticks = joined_ticks(schedule)
    program = assign_slots(ticks, segments_of([Span(0, ticks.num_ticks, 1)], ticks))
    assert program.slots.x == plan_of(schedule).program().slots.x
    assert not faults(program)
    monkeypatch.setattr(TickTemplate, "before_readers", lambda *_: 0)
    early = segments_of([Span(0, ticks.num_ticks, 1)], ticks)
    found = faults(replace(program, segments=early))
    assert {fault.rule for fault in found} == {ProgramRule.OVERWRITTEN}
    assert all("pool x " in fault.message for fault in found)


def test_a_forward_that_writes_what_the_w_of_its_block_still_reads_is_found():
    """As one block, a W reads its slots until the F has written; apart, the F may take them."""
    schedule = jp.schedules.build("zb_h1", devices=4, microbatches=8)
    apart, together = joined_ticks(schedule), joined_ticks(schedule, as_one=True)
    spans = [Span(0, apart.num_ticks, 1)]
    sound = assign_slots(together, segments_of(spans, together))
    assert not faults(sound)
    assert all(template.paired for segment in sound.segments for template in segment.templates)
    program = assign_slots(apart, segments_of(spans, apart))
    assert not faults(program)
    found = faults(replace(program, joint=together.joint))
    assert {fault.rule for fault in found} == {ProgramRule.OVERWRITTEN}
