"""Random valid tables, for every test that wants to be right about any schedule and not about the
famous ones.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import product

from hypothesis import settings, strategies as st

from jaxpipe.table.encoded import Transfers
from jaxpipe.table.kinds import COMPUTE, SHARES, Action, Cell, Kind, Overlap
from jaxpipe.table.placement import Placement
from jaxpipe.table.schedule import Schedule


def random_schedule(rng: random.Random, *, recompute: bool = False) -> Schedule:
    """A valid table: a random order that respects all needs, over a random placement, with B and I
    + W mixed, idles and pairs.

    With `recompute`, none, some or all forwards have an R.
    """
    placement = _random_placement(rng)
    return _random_table(rng, placement, microbatches=rng.randint(1, 5), recompute=recompute)


def schedules(*, recompute: bool = False) -> st.SearchStrategy[Schedule]:
    """Hypothesis strategy of `random_schedule`; with `HYPOTHESIS_PROFILE=slow` a failure shrinks to
    a small table.
    """
    return randoms().map(lambda rng: random_schedule(rng, recompute=recompute))


QUICK = os.environ.get("HYPOTHESIS_PROFILE", "quick") == "quick"
# For tests whose single example takes long: fewer in the quick profile.
few = settings(max_examples=3) if QUICK else settings()


@st.composite
def randoms(draw: st.DrawFn) -> random.Random:
    """A random generator: from a seed, which is ten times as fast, or, but in the quick profile,
    one whose every choice can shrink.
    """
    if QUICK:
        return random.Random(draw(st.integers(0, 2**32 - 1)))
    return draw(st.randoms(use_true_random=False))


def _random_placement(rng: random.Random) -> Placement:
    devices = rng.randint(1, 4)
    shape = rng.choice(("loop", "vee", "explicit", "bidirectional"))
    if shape == "loop":
        return Placement.loop(devices=devices, chunks=rng.randint(1, 3))
    if shape == "vee":
        return Placement.vee(devices=devices, chunks=rng.randint(1, 3))
    if shape == "bidirectional":
        return Placement.bidirectional(devices=devices)
    return Placement.explicit(
        [rng.randrange(devices) for _ in range(rng.randint(1, 6))], devices=devices
    )


def _random_table(
    rng: random.Random, placement: Placement, microbatches: int, *, recompute: bool
) -> Schedule:
    """Draw the actions one by one from those whose needs are met, each onto its device's row: such
    rows cannot deadlock.
    """
    needs = _needs(rng, placement.num_stages, microbatches, recompute=recompute)
    # In a bidirectional placement each microbatch goes one way: the r-th device of every stage.
    way = [rng.randrange(min(map(len, placement.devices_of))) for _ in range(microbatches)]
    rows: list[list[Cell]] = [[] for _ in range(placement.num_devices)]
    every = [kind for kind in COMPUTE if kind not in SHARES and (recompute or kind is not Kind.R)]
    # a taste: breadth first, depth first, late W...
    kinds = rng.choice((None, *(rng.sample(every, len(every)) for _ in range(3))))
    idle, pair = rng.choice((0.0, 0.2)), rng.choice((0.0, 0.5, 1.0))
    done: set[Action] = set()
    waiting = sorted(needs)
    while waiting:
        ready = [a for a in waiting if needs[a] <= done]
        action = (
            rng.choice(ready)
            if kinds is None
            else min(ready, key=lambda a: (kinds.index(a.kind), rng.random()))
        )
        device = placement.devices_of[action.stage][way[action.microbatch]]
        partners = [
            a
            for a in ready
            if _may_overlap(action, a)
            and placement.devices_of[a.stage][way[a.microbatch]] == device
        ]
        cell: Cell = action
        if partners and rng.random() < pair:
            cell = Overlap(*sorted((action, rng.choice(partners)), key=lambda a: a.kind))
        if rng.random() < idle:
            rows[device].append(None)
        rows[device].append(cell)
        for half in cell if isinstance(cell, Overlap) else (action,):
            done.add(half)
            waiting.remove(half)
    return Schedule.from_rows(
        rows, placement=placement, num_microbatches=microbatches, name="random"
    )


def _needs(
    rng: random.Random, stages: int, microbatches: int, *, recompute: bool
) -> dict[Action, set[Action]]:
    """Every action of a table and what must be done before it; each backward is whole or split at
    random.
    """
    forward_only, split = rng.random() < 0.1, rng.choice((0.0, 0.5, 1.0))
    recomputed = rng.choice((0.0, 0.5, 1.0)) if recompute else 0.0
    needs: dict[Action, set[Action]] = {}
    for m in range(microbatches):
        for s in range(stages):
            needs[Action(s, Kind.F, m)] = {Action(s - 1, Kind.F, m)} if s else set()
        incoming: set[Action] = set()
        for s in reversed(range(0 if forward_only else stages)):
            kind = Kind.I if rng.random() < split else Kind.B
            needs[Action(s, kind, m)] = {Action(s, Kind.F, m)} | incoming
            if kind is Kind.I:
                needs[Action(s, Kind.W, m)] = {Action(s, Kind.I, m)}
            if recomputed and rng.random() < recomputed:
                needs[Action(s, Kind.R, m)] = {Action(s, Kind.F, m)}
                needs[Action(s, kind, m)].add(Action(s, Kind.R, m))
            incoming = {Action(s, kind, m)}
    return needs


def _may_overlap(one: Action, other: Action) -> bool:
    """True for an F and a B or I (both ready, so neither needs the other)."""
    return (one.kind is Kind.F) != (other.kind is Kind.F) and not {Kind.W, Kind.R} & {
        one.kind,
        other.kind,
    }


def every_table(devices: int, microbatches: int) -> Iterator[Schedule]:
    """Every valid table of one stage a device without idle cells, pairs or R: each backward is B,
    or I and W.
    """
    placement = Placement.loop(devices=devices)
    rows = [list(_rows(stage, microbatches)) for stage in range(devices)]
    for chosen in product(*rows):
        table = Schedule.from_rows(chosen, placement=placement, num_microbatches=microbatches)
        if not table.violations_under(Transfers.RENDEZVOUS):
            yield table


def _rows(stage: int, microbatches: int) -> Iterator[tuple[Action, ...]]:
    """Every order of a stage's actions in which F of a microbatch comes before its B, or its I and
    W.
    """
    for kinds in product(((Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)), repeat=microbatches):
        left = {m: tuple(Action(stage, kind, m) for kind in each) for m, each in enumerate(kinds)}
        yield from _merges(left)


def _merges(left: dict[int, tuple[Action, ...]]) -> Iterator[tuple[Action, ...]]:
    """Every order that keeps that of each microbatch."""
    if not any(left.values()):
        yield ()
    for m, (action, *rest) in ((m, each) for m, each in left.items() if each):
        yield from ((action, *later) for later in _merges(left | {m: tuple(rest)}))
