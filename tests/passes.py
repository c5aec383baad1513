"""What the tests of passes share: ways to assign ticks, random segments, and what an action needs,
from the meaning of F, B, I and W.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import jaxpipe as jp
from jaxpipe.lowering.plan import plan_of, plans_of
from jaxpipe.lowering.spans import Span, segments_of, span_candidates
from jaxpipe.lowering.target import ASSUMED, GUESSED
from jaxpipe.lowering.ticks import assign_ticks, joined_ticks, modulo_ticks
from jaxpipe.program.segments import Payload, TickPart
from jaxpipe.table.effects import LastUse, Liveness
from jaxpipe.table.kinds import Action, Kind, parts

MAKERS = {
    "fewest": assign_ticks,
    "turns": modulo_ticks,
    "shifted turns": lambda s: modulo_ticks(s, shift=1),
    "joined": joined_ticks,
    "as one": lambda s: joined_ticks(s, as_one=True),
}
KEEP_ORDER = ("fewest", "turns", "shifted turns")


def every_ticks(schedule):
    """(name, ticks) of each way to assign ticks that this table has."""
    names = KEEP_ORDER if schedule.forward_only else MAKERS
    made = {name: MAKERS[name](schedule) for name in names}
    return [(name, ticks) for name, ticks in made.items() if ticks is not None]


def random_segments(rng, ticks):
    """Segments cut anywhere, of any period: `assign_slots` must be right for all of them."""
    stop = ticks.num_ticks
    marks = sorted({0, stop, *(rng.randint(0, stop) for _ in range(rng.randint(0, 2)))})
    spans = [Span(a, b, min(b - a, rng.randint(1, 5))) for a, b in pairwise(marks)]
    return segments_of(spans, ticks)


def cut(ticks):
    """The cheapest segments of these ticks."""
    return min(plans_of(ticks), key=lambda plan: plan.price(ASSUMED, GUESSED)).segments


def cuts(ticks):
    """Every list of segments to choose from."""
    return [segments_of(spans, ticks) for spans in span_candidates(ticks)]


def exchanges(segments):
    """The permutes of each tick."""
    return [
        segment.template(tick).permutes
        for segment in segments
        for tick in range(segment.start, segment.stop)
    ]


def random_liveness(rng):
    return Liveness(
        x=rng.choice([LastUse.FORWARD, LastUse.INPUT_GRAD, LastUse.WEIGHT_GRAD]),
        cotangent=rng.choice([LastUse.INPUT_GRAD, LastUse.WEIGHT_GRAD]),
    )


def places(ticks):
    """Action -> (device, tick), read off the cells."""
    return {
        a: (d, t)
        for d, row in enumerate(ticks.cells)
        for t, cell in enumerate(row)
        for a in parts(cell)
    }


def inputs(schedule):
    """Action -> [(what makes an input of it, what carries that between devices, or None)], from the
    meaning of F, B, I and W.
    """
    every = {a for _, _, a in schedule.actions()}
    found = {}
    for action in every:
        stage, kind, m = action
        if kind is Kind.F:
            makers = [(Action(stage - 1, Kind.F, m), Payload.ACTIVATION)]
        elif kind is Kind.W:
            makers = [(Action(stage, Kind.I, m), None)]
        else:
            makers = [
                (Action(stage, Kind.F, m), None),
                *((Action(stage + 1, k, m), Payload.COTANGENT) for k in (Kind.B, Kind.I)),
            ]
        found[action] = [(maker, payload) for maker, payload in makers if maker in every]
    return found


@cache
def emitted(name, chunks, devices, microbatches, **options):
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches, chunks=chunks)
    return plan_of(schedule, **options)


def simulated(costs, segments, transfer):
    """`program_makespan` again, from its definition: part by part, device by device, no trip left
    out.
    """
    time = [0.0] * costs.shape[-1]
    for segment in segments:
        under_way = {}

        def place(point, segment=segment):
            blocks = segment.templates[point.tick].blocks
            if point.block >= len(blocks):
                return point.tick, len(TickPart)
            return point.tick, int(TickPart.of(blocks[point.block].block.kind))

        together = {}  # permutes that are issued together and awaited together
        for t in segment.transits:
            issued = (0, 0) if t.from_before else place(t.issued)
            together.setdefault((issued, place(t.written), t.from_before), []).append(t.permute)
        for tick in range(segment.start, segment.stop):
            trip, j = divmod(tick - segment.start, segment.period)
            for part in range(len(TickPart) + 1):
                for (issued, written, from_before), permutes in together.items():
                    if issued == (j, part) and (trip or not from_before):
                        under_way.setdefault(written, []).append(over(time, permutes, transfer))
                for done in under_way.pop((j, part), []):
                    time = [max(both) for both in zip(time, done, strict=True)]
                if part < len(TickPart):
                    time = [t + took for t, took in zip(time, costs[tick, part], strict=True)]
        in_flight = [
            over(time, permutes, transfer)
            for (_, _, from_before), permutes in together.items()
            if from_before
        ]
        time = [max(times) for times in zip(time, *in_flight, strict=True)]
    return max(time, default=0.0)


def over(time, permutes, transfer):
    """When permutes are over that devices issue at these times."""
    ends = [(pair, p) for p in permutes for pair in p.pairs]
    until = [
        max([t, *(time[e] for pair, _ in ends if d in pair for e in pair)])
        for d, t in enumerate(time)
    ]
    return [
        t + transfer * len({id(p) for pair, p in ends if d in pair}) for d, t in enumerate(until)
    ]
