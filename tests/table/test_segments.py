"""Segments: each transfer in one permute of its tick."""

from __future__ import annotations

import random

from hypothesis import given

from jaxpipe.program.segments import room_of
from tests.passes import cuts, every_ticks, exchanges, inputs, places, random_segments
from tests.strategies import few, schedules


@few
@given(schedules())
def test_each_transfer_leaves_in_one_permute_of_its_tick_and_is_there_in_time(schedule):
    rng = random.Random(schedule.to_csv())
    for _, ticks in every_ticks(schedule):
        for segments in (rng.choice(cuts(ticks)), random_segments(rng, ticks)):
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
                    carriers = [
                        p
                        for p in made_in[made]
                        if p.payload is payload and (source, device) in p.pairs
                    ]
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
                    assert permute.delay <= room_of(segment.period, j)
