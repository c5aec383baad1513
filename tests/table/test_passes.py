"""The passes from a table to its program: ticks, segments, slots and transfers, proven right without compiling anything."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

import jaxpipe as jp
from jaxpipe.lowering.assign_ticks import assign_ticks, modulo_ticks
from jaxpipe.lowering.balanced_ticks import balanced_ticks
from jaxpipe.lowering.cost_model import cost_matrix, least_makespan, program_makespan
from jaxpipe.lowering.plan import Prefer, choose_candidate
from jaxpipe.lowering.requirements import collect
from jaxpipe.lowering.segments import Span, find_segments, kept_ticks, segments_of
from jaxpipe.lowering.slots import assign_slots
from jaxpipe.program.faults import Rule
from jaxpipe.program.liveness import LastUse, Liveness
from jaxpipe.program.segments import Block, Payload, Presence
from jaxpipe.program.verify import faults, verify
from jaxpipe.table.action import Action, Kind, parts
from tests.golden import check_golden
from tests.strategies import few, random_schedule, schedules
from tests.tiers import exhaustive, slow

MAKERS = {
    "fewest": assign_ticks,
    "turns": modulo_ticks,
    "shifted turns": lambda s: modulo_ticks(s, shift=1),
    "level": balanced_ticks,
}
KEEP_ORDER = ("fewest", "turns", "shifted turns", "level")


def every_ticks(schedule):
    """(name, ticks) of each way to assign ticks that this table has."""
    names = KEEP_ORDER if schedule.forward_only else MAKERS
    made = {name: MAKERS[name](schedule) for name in names}
    return [(name, ticks) for name, ticks in made.items() if ticks is not None]


def random_segments(rng, ticks):
    """Segments cut anywhere, of any period: `assign_slots` must be right for all of them."""
    stop = ticks.num_ticks
    marks = sorted({0, stop, *(rng.randint(0, stop) for _ in range(rng.randint(0, 2)))})
    spans = [Span(a, b, min(b - a, rng.randint(1, 5)), rng.random() < 0.5) for a, b in pairwise(marks)]
    return segments_of(spans, collect(ticks))


def exchanges(segments):
    """The permutes of each tick."""
    return [segment.exchange(tick) for segment in segments for tick in range(segment.start, segment.stop)]


def random_liveness(rng):
    return Liveness(x=rng.choice(list(LastUse)), cotangent=rng.choice([LastUse.INPUT_GRAD, LastUse.WEIGHT_GRAD]))


def places(ticks):
    """Action -> (device, tick), read off the cells."""
    return {a: (d, t) for d, row in enumerate(ticks.cells) for t, cell in enumerate(row) for a in parts(cell)}


def inputs(schedule):
    """Action -> [(what makes an input of it, what carries that between devices, or None)], from the meaning of F, B, I and W."""
    every = {a for _, _, a in schedule.actions()}
    found = {}
    for action in every:
        stage, kind, m = action
        if kind is Kind.F:
            makers = [(Action(stage - 1, Kind.F, m), Payload.ACTIVATION)]
        elif kind is Kind.W:
            makers = [(Action(stage, Kind.I, m), None)]
        else:
            makers = [(Action(stage, Kind.F, m), None), *((Action(stage + 1, k, m), Payload.COTANGENT) for k in (Kind.B, Kind.I))]
        found[action] = [(maker, payload) for maker, payload in makers if maker in every]
    return found


# --- ticks -----------------------------------------------------------------------------------------------------------------------


@given(schedules())
def test_every_action_is_in_one_tick_behind_what_it_needs(schedule):
    wanted = Counter(a for _, _, a in schedule.actions())
    for name, ticks in every_ticks(schedule):
        assert Counter(a for row in ticks.cells for cell in row for a in parts(cell)) == wanted
        where = places(ticks)
        for action, makers in inputs(schedule).items():
            for maker, payload in makers:
                # Where the forward of a tick runs first, its own backward may follow in the same tick.
                at_once = payload is None and maker.kind is Kind.F and ticks.forward_first
                assert where[maker][1] < where[action][1] + at_once, (name, maker, action)


@given(schedules())
def test_rows_keep_their_order(schedule):
    for name, ticks in every_ticks(schedule):
        for row, placed in zip(schedule.rows, ticks.cells, strict=True):
            before, after = ([a for cell in cells for a in parts(cell)] for cells in (row, placed))
            if name in KEEP_ORDER:
                assert after == before
            for forward in (True, False):
                assert [a for a in after if (a.kind is Kind.F) is forward] == [a for a in before if (a.kind is Kind.F) is forward]


@given(schedules())
def test_the_fewest_ticks_are_the_longest_path(schedule):
    makers = inputs(schedule)
    rows = [[parts(cell) for cell in row if cell is not None] for row in schedule.rows]
    depth = {}
    while any(cell[0] not in depth for row in rows for cell in row):
        for row in rows:
            for before, cell in zip(((), *row), row, strict=False):
                needs = [*before, *(maker for a in cell for maker, payload in makers[a] if payload is not None)]
                if cell[0] not in depth and all(a in depth for a in needs):
                    depth |= dict.fromkeys(cell, 1 + max((depth[a] for a in needs), default=0))
    assert assign_ticks(schedule).num_ticks == max(depth.values(), default=0)


def test_a_table_that_waits_for_itself_has_no_ticks():
    broken = jp.Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1")
    with pytest.raises(jp.ScheduleError, match=r"deadlocks: (?=.*0B0 on device 0)(?=.*1F1 on device 1).*run jaxpipe.check"):
        assign_ticks(broken)


def test_turns_keep_kinds_apart():
    ticks = modulo_ticks(jp.schedules.build("interleaved_1f1b", devices=4, microbatches=8, chunks=2))
    kinds = [{a.kind for row in ticks.cells for a in parts(row[t])} for t in range(ticks.num_ticks)]
    assert ticks.period == 2
    assert set().union(*kinds[::2]) == {Kind.F}
    assert set().union(*kinds[1::2]) == {Kind.B}


def test_shifted_turns_put_neighbours_in_opposite_turns():
    ticks = modulo_ticks(jp.schedules.build("1f1b", devices=4, microbatches=8), shift=1)
    for device, row in enumerate(ticks.cells):
        for tick, cell in enumerate(row):
            assert cell is None or cell.kind is (Kind.F, Kind.B)[(tick - device) % 2]


# --- segments --------------------------------------------------------------------------------------------------------------------


@few
@given(schedules())
def test_each_transfer_leaves_in_one_permute_of_its_tick_and_is_there_in_time(schedule):
    rng = random.Random(schedule.to_csv())
    for _, ticks in every_ticks(schedule):
        for segments in (find_segments(ticks), random_segments(rng, ticks)):
            assert [s.start for s in segments] == [0, *(s.stop for s in segments[:-1])]
            assert segments[-1].stop == ticks.num_ticks
            made_in = exchanges(segments)
            where = places(ticks)
            for action, makers in inputs(schedule).items():
                device, tick = where[action]
                for maker, payload in makers:
                    source, made = where[maker]
                    if payload is None or source == device:
                        continue
                    carriers = [p for p in made_in[made] if p.payload is payload and (source, device) in p.pairs]
                    assert len(carriers) == 1
                    assert made + carriers[0].delay < tick


@given(schedules())
def test_permutes_have_distinct_ends_and_no_cycle(schedule):
    rng = random.Random(schedule.to_csv())
    for _, ticks in every_ticks(schedule):
        for segment in random_segments(rng, ticks):
            for j, position in enumerate(segment.templates):
                for permute in position.permutes:
                    sources, targets = zip(*permute.pairs, strict=True)
                    assert len(set(sources)) == len(sources)
                    assert len(set(targets)) == len(targets)
                    # All pairs point one way, so no chain of them comes back to where it began.
                    assert len({source < target for source, target in permute.pairs}) == 1
                    assert j + permute.delay < segment.period
                    assert permute.delay == 0 or len(position.exchanges) == 1


def test_whole_turns_of_a_steady_state_are_left_out():
    ramp, turn, end = [90, 91, 92], [1, 2, 1, 3, 4], [93, 94]
    for count in (4, 40, 400):
        codes = np.array([*ramp, *turn * count, *end])
        short = codes[kept_ticks(codes)].tolist()
        assert (len(codes) - len(short)) % 60 == 0  # whole turns of 5, and of all periods that are tried: 1, 2, 3, 4, 6 and 12
        assert len(short) < 5 + 2 * 60 + 24
        assert short == [*ramp, *turn * ((len(short) - 5) // 5), *end]


def test_every_steady_state_is_found():
    codes = np.array([0] * 500 + [1] * 500 + [2, 3] * 250)
    short = codes[kept_ticks(codes)].tolist()
    assert len(short) < 150
    assert sorted(set(short)) == [0, 1, 2, 3]
    assert short == sorted(short[: short.index(2)]) + [2, 3] * (short.count(2))


# --- how long the program takes --------------------------------------------------------------------------------------------------


def simulated(costs, segments, transfer):
    """`program_makespan` again, from its definition: tick by tick, device by device, no trip left out."""
    time, tick, made_in = [0.0] * costs.shape[1], 0, exchanges(segments)
    for period in (s.period for s in segments for _ in range(s.repeats)):
        due = {}
        for j in range(period):
            exchange = made_in[tick]
            time = [t + took for t, took in zip(time, costs[tick], strict=True)]
            tick += 1
            met = {delay: [p for p in exchange if p.delay == delay] for delay in {p.delay for p in exchange}}
            for delay, permutes in met.items():
                ends = [(pair, p) for p in permutes for pair in p.pairs]
                until = [max([t, *(time[e] for pair, _ in ends if d in pair for e in pair)]) for d, t in enumerate(time)]
                lasts = [transfer * len({id(p) for pair, p in ends if d in pair}) for d in range(len(time))]
                due.setdefault(j + delay, []).append([t + more for t, more in zip(until, lasts, strict=True)])
            for done in due.pop(j, []):
                time = [max(both) for both in zip(time, done, strict=True)]
    return max(time, default=0.0)


@given(schedule=schedules())
def test_the_makespan_of_a_program(schedule):
    rng = random.Random(schedule.to_csv())
    costs = jp.Costs(forward=rng.randint(1, 3), input_grad=2, weight_grad=rng.randint(1, 2))
    for name, ticks in every_ticks(schedule):
        matrix, facts = cost_matrix(ticks, costs), collect(ticks)
        segments = random_segments(rng, ticks)
        assert program_makespan(matrix, segments, transfer=0.25) == simulated(matrix, segments, 0.25)
        # Nothing can be shorter than the ticks unrolled, and what keeps the order of the rows than the table.
        least = least_makespan(facts, matrix)
        assert least == program_makespan(matrix, segments_of([Span(0, ticks.num_ticks, ticks.num_ticks)], facts))
        assert least <= program_makespan(matrix, segments)
        if name in KEEP_ORDER:
            assert least >= jp.simulate(schedule, costs).makespan


def test_equal_trips_are_simulated_once():
    ticks = assign_ticks(jp.schedules.build("1f1b", devices=4, microbatches=100))
    for segments in (find_segments(ticks), segments_of([Span(0, ticks.num_ticks, 1)], collect(ticks))):
        assert program_makespan(cost_matrix(ticks), segments) == simulated(cost_matrix(ticks), segments, 0.0)


# --- the whole program, run with symbols -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "count"), [(3, 6), *(slow(seed, 25) for seed in range(3)), *(exhaustive(seed, 25) for seed in range(100, 140))]
)
def test_random_tables_run_right(seed, count):
    """Every read finds what it should, whatever the table, the ticks, the segments and the liveness; and no pool is too large."""
    rng = random.Random(seed)
    for _ in range(count):
        schedule = random_schedule(rng, recompute=rng.random() < 0.4)
        for _, ticks in every_ticks(schedule):
            liveness = random_liveness(rng)
            program = assign_slots(ticks, random_segments(rng, ticks), liveness=liveness)
            assert faults(program) == ()


@pytest.mark.parametrize(("seed", "count"), [(8, 2), slow(7, 12)])
@pytest.mark.parametrize("prefer", Prefer)
def test_what_is_chosen_for_random_tables_runs_right(prefer, seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        ticks, segments, *_ = choose_candidate(random_schedule(rng), prefer=prefer)
        verify(assign_slots(ticks, segments))


NAMED = [(name, 2, (3,)) for name in ("1f1b", "interleaved_1f1b_overlap", "zb_h2", "zbv", "dualpipe", "auto")]
NAMED += [slow(name, 2, (1, 3, 8)) for name in jp.schedules.names()] + [exhaustive(name, 4, (1, 3, 8)) for name in jp.schedules.names()]


@pytest.mark.parametrize(("name", "devices", "counts"), NAMED)
def test_named_tables_run_right(name, devices, counts):
    for microbatches in counts:
        try:
            schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
        except jp.ScheduleError:
            continue  # not defined for so few microbatches
        for prefer in Prefer:
            ticks, segments, *_ = choose_candidate(schedule, prefer=prefer)
            verify(assign_slots(ticks, segments))


@few
@given(schedules())
def test_residual_slots_are_the_simulated_peak(schedule):
    program = assign_slots(assign_ticks(schedule), find_segments(assign_ticks(schedule)))
    if schedule.forward_only:
        assert program.slots.residual_weight == program.slots.residual_input == 1  # the least that a pool can have
        return
    for found, release in ((program.slots.residual_weight, jp.Release.WEIGHT_GRAD), (program.slots.residual_input, jp.Release.INPUT_GRAD)):
        peak = max(jp.simulate(schedule, jp.Costs(release=release)).peak_activations)
        # The simulator lets both halves of a pair run at once; the program runs the backward first, and may reuse its slot.
        assert found == peak or (schedule.encoded.pairs.size and found == peak - 1)


# --- a broken program is found out -----------------------------------------------------------------------------------------------

SLOTS = {
    "forward": ("x", "residual_input", "residual_weight"),
    "backward": ("x", "residual_input", "residual_weight", "cotangent", "stash"),
}
NUMBERS = {"forward": ("chunk", "stage", "microbatch", "kind"), "backward": ("chunk", "kind", "stage", "microbatch")}
FLAGS = {"forward": ("is_first", "is_last", "is_local", "keeps"), "backward": ("is_first", "is_local")}
ENTRIES = [(half, field) for group in (SLOTS, NUMBERS, FLAGS) for half, fields in group.items() for field in fields]
RULES_OF = {field: {Rule.ACTION, Rule.CODE} for fields in NUMBERS.values() for field in fields} | {
    field: {Rule.ACTION, Rule.CODE} for fields in FLAGS.values() for field in fields
}


@cache
def sound_program():
    """A program with several slots in each pool, chunks, local hand-overs and I and W apart."""
    schedule = jp.schedules.build("zbv", devices=2, microbatches=6)
    ticks = assign_ticks(schedule)
    return assign_slots(ticks, find_segments(ticks))


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
    return replace(program, ticks=replace(program.ticks, **{half: replace(record, **{field: table})}))


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
        assert found <= RULES_OF.get(field, {Rule.VALUE, Rule.OVERWRITTEN, Rule.SLOT, Rule.POOL}), found


def test_the_error_lists_the_faults():
    program = with_entry(sound_program(), "forward", "x", 2, 0, 99)
    with pytest.raises(jp.ProgramError, match=r"bug in jaxpipe.*\n.*slot \[tick 2, device 0\]: slot 99 of pool x") as caught:
        verify(program)
    assert len(caught.value.faults) >= 1


def test_a_pool_that_is_too_large_is_found():
    program = sound_program()
    for i, pool in enumerate(program.pools):
        pools = (*program.pools[:i], replace(pool, slots=pool.slots + 1), *program.pools[i + 1 :])
        assert rules_broken(replace(program, pools=pools)) == {Rule.POOL}


def test_a_value_that_is_overwritten_is_found():
    """Two forwards of one device that write one slot: the first value is gone when its backward comes."""
    program = sound_program()
    forward = program.ticks.forward
    (first, second), device = np.flatnonzero(forward.chunk[:, 0] >= 0)[:2], 0
    broken = with_entry(program, "forward", "residual_weight", second, device, forward.residual_weight[first, device])
    assert Rule.OVERWRITTEN in rules_broken(broken)


def test_devices_that_choose_different_exchanges_are_found():
    program = sound_program()
    exchange = program.ticks.exchange.copy()
    tick = int(np.argmax(exchange[:, 0]))
    exchange[tick, 1] = 0
    assert rules_broken(replace(program, ticks=replace(program.ticks, exchange=exchange))) == {Rule.EXCHANGE}


@pytest.mark.slow
def test_a_message_in_the_wrong_slot_is_found():
    program = sound_program()
    made_in = exchanges(program.segments)
    where = places(assign_ticks(program.schedule))
    messages = [(m, a, payload) for a, makers in inputs(program.schedule).items() for m, payload in makers if payload is not None]
    sent = [message for message in messages if where[message[0]][0] != where[message[1]][0]]
    assert len(sent) == 6 * 2 * 2  # six microbatches, forward and back, over two of three stage boundaries
    for maker, action, payload in sent:
        (source, made), (target, _) = where[maker], where[action]
        segment = next(s for s in program.segments if s.start <= made < s.stop)
        lanes = segment.templates[(made - segment.start) % segment.period].lanes_of(segment.choice(made))
        (lane,) = (n for n, p in zip(lanes, made_in[made], strict=True) if p.payload is payload and (source, target) in p.pairs)
        size = program.slots.x if payload is Payload.ACTIVATION else program.slots.cotangent
        arrival = program.ticks.arrivals[lane]
        for wrong in (
            replace(arrival, slot=changed(arrival.slot, made, target, (arrival.slot[made, target] + 1) % size)),
            replace(arrival, takes=changed(arrival.takes, made, target, 0)),
        ):
            arrivals = (*program.ticks.arrivals[:lane], wrong, *program.ticks.arrivals[lane + 1 :])
            found = rules_broken(replace(program, ticks=replace(program.ticks, arrivals=arrivals)))
            assert found
            assert found <= {Rule.VALUE, Rule.OVERWRITTEN, Rule.POOL}


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
        first_exchange, *others = position.exchanges
        if not first_exchange:
            return position
        first, *rest = first_exchange
        return replace(position, exchanges=((change(first), *rest), *others))

    return broken


def unwanted_part(part, kinds):
    """Only these kinds of blocks do something more where their stage is the first or last, or hand on to this device."""

    def without(use):
        return replace(use, **{part: Presence.NEVER}) if use.block.kind in kinds else use

    return lambda position: replace(position, blocks=tuple(map(without, position.blocks)))


def cyclic(permute):
    (source, target), *_ = permute.pairs
    return replace(permute, pairs=((source, target), (target, source)))


LOST = {Rule.VALUE, Rule.OVERWRITTEN, Rule.POOL}
BREAK = {
    "a block is missing": (first_block(lambda use: ()), {Rule.CODE}),
    "a pair is missing": (first_permute(lambda permute: replace(permute, pairs=permute.pairs[1:])), LOST),
    "a permute of the other payload": (
        first_permute(lambda permute: replace(permute, payload=Payload(1 - permute.payload))),
        LOST | {Rule.SLOT},
    ),
    "a transfer is late": (first_permute(lambda permute: replace(permute, delay=permute.delay + 1)), LOST | {Rule.EXCHANGE}),
    "a block runs everywhere": (first_block(lambda use: (replace(use, active=Presence.ALWAYS),)), {Rule.CODE}),
    "first never runs": (unwanted_part("first", (Kind.F, Kind.B, Kind.I)), {Rule.CODE}),
    "last never runs": (unwanted_part("last", (Kind.F,)), {Rule.CODE}),
    "nothing is handed on": (unwanted_part("local", (Kind.F, Kind.B, Kind.I)), {Rule.CODE}),
    "a block of another chunk": (first_block(lambda use: (replace(use, block=Block(use.block.kind, 1 - use.block.chunk)),)), {Rule.CODE}),
    "a permute with a cycle": (first_permute(cyclic), {Rule.PERMUTE}),
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
    program = assign_slots(ticks, segments_of([Span(0, ticks.num_ticks, 6)], collect(ticks)))
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
    (fault,) = faults(replace(program, segments=(*program.segments[:-1], replace(last, repeats=last.repeats - 1))))
    assert fault.rule is Rule.SEGMENTS


# --- the catalogue: code that does not grow, and the table's own makespan --------------------------------------------------------

FAMILIES = [
    (name, chunks)
    for name in jp.schedules.names()
    for chunks in (1, 2, 3, 4)
    if name != "no_pipelining" and jp.schedules.describe(name).chunks.nearest(chunks) == chunks
]


# One of each sort in the quick tier: a loop, one with chunks, a split backward, a V, pairs both ways.
SAMPLE = (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2), ("dualpipe", 2))


@cache
def emitted(name, chunks, devices, microbatches, **options):
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches, chunks=chunks)
    return choose_candidate(schedule, **options)


def size_of(emission):
    """What compile time is made of: blocks of stage code and permutes, of which a block of even a small stage has ten times the code."""
    return sum(s.size + 0.1 * s.permutes for s in emission.segments)


def natural(name, chunks):
    return jp.schedules.describe(name).chunks.natural == chunks


# By default the most devices, which have the longest ramps, and each table's natural number of chunks.
GROWTH = [
    (slow if natural(name, chunks) and devices == 8 else exhaustive)(name, chunks, devices, microbatches)
    for name, chunks in FAMILIES
    for devices in (4, 8)
    for microbatches in (64, 512)
] + [(*case, 4, 48) for case in SAMPLE[:2]]


@pytest.mark.parametrize(("name", "chunks", "devices", "microbatches"), GROWTH)
def test_code_does_not_grow_with_microbatches(name, chunks, devices, microbatches):
    assert size_of(emitted(name, chunks, devices, microbatches)) <= 1.2 * size_of(emitted(name, chunks, devices, 8))


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize(("name", "chunks"), FAMILIES)
def test_code_for_speed_stops_growing(name, chunks, devices):
    """Code that saves transfers in the steady state is worth more the longer that lasts, up to a bound."""
    sizes = [size_of(emitted(name, chunks, devices, m, prefer=Prefer.SPEED)) for m in (32, 128, 512)]
    assert max(sizes[1:]) <= 1.25 * sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [8, exhaustive(32)])
@pytest.mark.parametrize(("name", "chunks"), FAMILIES)
def test_code_grows_no_faster_than_chunks_and_slower_than_devices(name, chunks, microbatches):
    few, many = (emitted(name, chunks, devices, microbatches) for devices in (4, 8))
    assert size_of(many) < 2 * size_of(few)
    if chunks > 1 and (name, 2 * chunks) in FAMILIES:
        twice = emitted(name, 2 * chunks, 8, microbatches)
        assert sum(s.size for s in twice.segments) <= 2 * sum(s.size for s in many.segments)


# Where it is more than 1.00: in DualPipe's ramps some devices run an overlapped pair while their neighbours run a single action.
MOST = {"dualpipe": 1.011, "dualpipev": 1.02}


# `tests/lowering/test_program_time.py` has 32 microbatches and the natural number of chunks.
CASES = [(4, 8), slow(8, 8), *(exhaustive(d, 32) for d in (4, 8))]


@pytest.mark.parametrize(("devices", "microbatches"), CASES)
@pytest.mark.parametrize(("name", "chunks"), [case if case in SAMPLE else slow(*case) for case in FAMILIES])
def test_the_program_keeps_the_tables_makespan(name, chunks, devices, microbatches):
    emission = emitted(name, chunks, devices, microbatches)
    assert emission.makespan <= MOST.get(name, 1.005) * jp.simulate(emission.ticks.schedule).makespan


@pytest.mark.parametrize(
    ("name", "blocks"), [("gpipe", 2), ("1f1b", 4), slow("zb_h1", 3), slow("interleaved_1f1b", 8), slow("interleaved_zb", 12)]
)
def test_each_kind_of_each_chunk_is_compiled_about_once(name, blocks):
    chunks = 4 if name.startswith("interleaved") else 1
    assert sum(s.size for s in emitted(name, chunks, 8, 64).segments) == blocks


def test_equal_steady_states_move_what_the_table_moves():
    """Where kinds take turns, a trip of the steady state has just the transfers of one F and one B (or I) of each device."""
    for name, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h2", 1)):
        (segment,) = emitted(name, chunks, 4, 32).segments
        moved = sum(len(permute.pairs) for position in segment.templates for permute in position.permutes)
        assert moved == (6 if chunks == 1 else 8)  # without chunks nothing goes from the last device to the first


def moved(emission):
    """What a step sends, and what the table sends."""
    return np.array([sum(s.num_sends for s in emission.segments), np.sum(emission.ticks.schedule.encoded.crosses)])


@pytest.mark.parametrize(
    ("name", "chunks", "devices"),
    [(slow if natural(name, chunks) else exhaustive)(name, chunks, d) for name, chunks in FAMILIES for d in (4, 8)],
)
def test_a_microbatch_more_moves_what_the_table_moves(name, chunks, devices):
    """In the steady state: the ramps, which move up to twice as much as they must, are the same for both."""
    program, table = moved(emitted(name, chunks, devices, 192)) - moved(emitted(name, chunks, devices, 96))
    # Where the last device sends to the first in all but one trip of a cycle of P V, the permute is made in all.
    wraps = devices * chunks / (devices * chunks - 1)
    assert table <= program <= max(1.09, wraps) * table


# --- as text ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "devices", "microbatches", "chunks"), [("1f1b", 4, 8, 1), ("interleaved_1f1b", 2, 4, 2), ("zb_h1", 3, 4, 1)]
)
def test_passes_print(name, devices, microbatches, chunks):
    ticks, segments, *_ = emitted(name, chunks, devices, microbatches)
    program = assign_slots(ticks, segments)
    check_golden(f"passes_{name}_{devices}x{microbatches}.txt", f"{assign_ticks(program.schedule)}\n\n{ticks}\n\n{program}\n")
