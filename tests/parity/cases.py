"""The grid: which tables are run, on which models and in which precision.

It covers pairs: any two values of schedule, P, V, M, model and precision that one table can have
are together in some case.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations, cycle, islice, product
from typing import Any

import jaxpipe as jp
from tests.models import Twin, twin

DEVICES = (1, 2, 4, 8)
CHUNKS = (1, 2, 3)
# The models beside the MLP; those of `VERSIONS` are the same, written with other libraries.
MODELS = ("conv", "gpt", "moe", "rnn", "mlp_nnx")
VERSIONS = ("gpt_nnx", "gpt_plain", "mlp_linen")
# The precisions beside float64: tolerances for them are derived for the MLP alone.
LOW = ("float32", "bfloat16")
KINDS = (*(product(("mlp", *MODELS, *VERSIONS), ("float64",))), *product(("mlp",), LOW))
# M, of P devices.
MICROBATCHES = ("1", "2", "3", "P", "2P", "4P + 1")
ROWS = 2


@dataclass(frozen=True)
class Case:
    """One cell of the grid; `dtype` is a numpy name, or bfloat16."""

    schedule: str
    devices: int
    chunks: int
    microbatches: int
    model: str = "mlp"
    dtype: str = "float64"

    def build(self) -> jp.Schedule:
        """The table; ScheduleError where there is none for these numbers."""
        return jp.schedules.build(
            self.schedule, devices=self.devices, microbatches=self.microbatches, chunks=self.chunks
        )

    @property
    def twin(self) -> Twin:
        """The model with as many stages as the table."""
        return _twin(self.model, self.build().num_stages)

    def __str__(self) -> str:
        return (
            f"{self.schedule} P={self.devices} V={self.chunks} M={self.microbatches} "
            f"{self.model} {self.dtype}"
        )


@lru_cache(maxsize=64)
def _twin(model: str, stages: int) -> Twin:
    # One twin a model and S, so that the oracle's answers are shared between schedules.
    return twin(model, stages)


@lru_cache
def full_grid() -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """(cases, the MLP's combinations for which there is no such table).

    Each case is the one, of some that are drawn at random with a pair that is still left, which
    covers most pairs.
    """
    drawn = [values for values in _combinations() if is_defined(_case(values))]
    cases = dict.fromkeys(map(_case, covering(drawn)))
    return tuple(cases), tuple(c for c in tables() if not is_defined(c))


def covering(drawn: Sequence[Values]) -> list[Values]:
    """A greedy covering array: of these, a few with every pair of values that one of them has."""
    rng = random.Random(0)
    with_pair: dict[Pair, list[Values]] = defaultdict(list)
    for values in drawn:
        for pair in _pairs(values):
            with_pair[pair].append(values)
    left, found = dict.fromkeys(with_pair), []
    while left:
        some = rng.choices(with_pair[next(iter(left))], k=50)
        found.append(max(some, key=lambda values: sum(pair in left for pair in _pairs(values))))
        for pair in _pairs(found[-1]):
            left.pop(pair, None)
    return found


def tables() -> tuple[Case, ...]:
    """The MLP in float64 with every schedule, P, V and M, those without a table among them."""
    return tuple(dict.fromkeys(_case(v) for v in _combinations() if v[-1] == KINDS[0]))


def is_defined(case: Case) -> bool:
    """Whether `build` gives a table."""
    return _has_table(case.schedule, case.devices, case.chunks, case.microbatches)


@cache
def _has_table(schedule: str, devices: int, chunks: int, microbatches: int) -> bool:
    try:
        Case(schedule, devices, chunks, microbatches).build()
    except jp.ScheduleError:
        return False
    return True


# Schedule, P, V, M as one of `MICROBATCHES`, and one of `KINDS`.
Values = tuple[Any, ...]
Pair = frozenset[tuple[int, object]]


def _combinations() -> Iterator[Values]:
    yield from product(jp.schedules.names(), DEVICES, CHUNKS, MICROBATCHES, KINDS)


def _case(values: Values) -> Case:
    name, devices, chunks, microbatches, (model, dtype) = values
    counts = {"P": devices, "2P": 2 * devices, "4P + 1": 4 * devices + 1}
    count = counts.get(microbatches) or int(microbatches)
    return Case(name, devices, chunks, count, model, dtype)


def _pairs(values: Values) -> list[Pair]:
    return [frozenset(pair) for pair in combinations(enumerate(values), 2)]


def sample(seed: int, count: int) -> tuple[Case, ...]:
    """Small cases of the grid, drawn at random: every schedule in turn, then again, until there are
    `count`.

    Each model and each lower precision is drawn once for the first so many schedules, in an order
    that the seed shuffles; all others are of the MLP in float64, which compiles in a second or two.
    """
    rng = random.Random(seed)
    small = [
        c
        for c in dict.fromkeys(map(_case, _combinations()))
        if c.devices <= 4 and c.microbatches <= 8 and c.devices * c.chunks <= 8
    ]
    special: list[tuple[str, str]] = [
        *((model, "float64") for model in MODELS),
        *(("mlp", dtype) for dtype in LOW),
    ]
    names = list(jp.schedules.names())
    rng.shuffle(names)
    found: list[Case] = []
    for name in islice(cycle(names), count):
        wanted = special[len(found)] if len(found) < len(special) else ("mlp", "float64")
        of_name = [c for c in small if c.schedule == name and c not in found and is_defined(c)]
        own = [c for c in of_name if (c.model, c.dtype) == wanted]
        if wanted != KINDS[0]:  # those that compile soonest
            own = [c for c in own if c.microbatches == 2 * c.devices and c.chunks == _natural(name)]
        found.append(rng.choice(own))
    return tuple(found)


def _natural(name: str) -> int:
    return jp.schedules.describe(name).chunks.natural
