"""The grid: which tables are run, on which models and in which precision."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice, product

import jaxpipe as jp
from tests.models import Twin, twin

DEVICES = (1, 2, 4, 8)
CHUNKS = (1, 2, 3)
# The models beside the MLP, and the precisions beside float64: on these, one M and the schedule's
# own V.
MODELS = ("conv", "gpt", "moe", "rnn", "mlp_nnx")
# The same models, written with other libraries: on two devices.
VERSIONS = ("gpt_nnx", "gpt_plain", "mlp_linen")
LOW = ("float32", "bfloat16")
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
    """(cases, those among the combinations for which there is no such table)."""
    cases, undefined = [], []
    for case in _combinations():
        (cases if is_defined(case) else undefined).append(case)
    return tuple(cases), tuple(undefined)


def is_defined(case: Case) -> bool:
    """Whether `build` gives a table."""
    try:
        case.build()
    except jp.ScheduleError:
        return False
    return True


def _combinations() -> Iterator[Case]:
    for name, devices, chunks in product(jp.schedules.names(), DEVICES, CHUNKS):
        for microbatches in sorted({1, 2, 3, devices, 2 * devices, 4 * devices + 1}):
            yield Case(name, devices, chunks, microbatches)
    for model, name, devices in product(MODELS, jp.schedules.names(), (2, 4)):
        yield Case(name, devices, _natural(name), 2 * devices, model)
    for model, name in product(VERSIONS, jp.schedules.names()):
        yield Case(name, 2, _natural(name), 4, model)
    for dtype, name, devices in product(LOW, jp.schedules.names(), DEVICES):
        yield Case(name, devices, _natural(name), 2 * devices, "mlp", dtype)


def _natural(name: str) -> int:
    return jp.schedules.describe(name).chunks.natural


def sample(seed: int, count: int) -> tuple[Case, ...]:
    """Small cases of the grid, drawn at random: every schedule in turn, then again, until there are
    `count`.

    Each model and each lower precision is drawn once for the first so many schedules, in an order
    that the seed shuffles; all others are of the MLP in float64, which compiles in a second or two.
    """
    rng = random.Random(seed)
    small = [
        c
        for c in _combinations()
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
        found.append(rng.choice([c for c in of_name if (c.model, c.dtype) == wanted]))
    return tuple(found)
