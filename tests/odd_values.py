"""Values of every kind, sensible and odd, for arguments that want some."""

from __future__ import annotations

import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

import jaxpipe as jp
from jaxpipe import Action, Costs, Kind, Overlap, Placement, Schedule, Transfers
from jaxpipe.render import Theme
from jaxpipe.table import Release

GOOD = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
SPREAD = jp.spread_first(jp.spread_last(GOOD))
SENT = jp.add_transfers(GOOD)
BROKEN = Schedule.from_csv("0F0,0B1\n1L0,3F0\n")
EMPTY = Schedule.from_rows([])
TIMELINE = jp.simulate(GOOD)
LONG = jp.simulate(GOOD, Costs(forward=1e12))
SHORT = jp.simulate(GOOD, Costs(forward=1e-12, input_grad=0, weight_grad=0))
LAYOUT = jp.parse_layout("Et|tL", devices=2)
LAYER = jp.LayerCost(forward=0.1, input_grad=0.1, weight_grad=0.1)


class Odd:
    """An object whose every method fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    __hash__ = object.__hash__


NUMBERS = (
    -1,
    0,
    1,
    2,
    3,
    1.5,
    -0.0,
    1e-320,
    1e300,
    float("nan"),
    float("inf"),
    2**31,
    2**63,
    2**64,
    10**400,
    -(10**5000),
)
NUMBERS = (
    *NUMBERS,
    True,
    False,
    1j,
    Fraction(1, 3),
    Decimal(1),
    np.int64(2),
    np.int8(1),
    np.uint64(2**63),
    np.bool_(True),
)
NUMBERS = (
    *NUMBERS,
    np.float32(1.5),
    np.float64(2),
    np.float64("nan"),
    np.array(1.0),
    np.arange(3),
    np.ones((2, 2)),
)
TEXTS = (
    "",
    "x",
    "1f1b",
    "0F0",
    "0F0\n",
    "\ud800",
    "a\0b",
    "x" * 10_000,
    b"0F0",
    "{}",
    "[]",
    '{"forward": null}',
    "Et|tL",
    "t*9",
    "pipe",
)
CONTAINERS = (
    [],
    [1],
    [1, 2],
    (0, 1),
    ["x"],
    [None],
    [[]],
    [[None]],
    {},
    {"t": 1},
    {1: 2},
    {0},
    frozenset(),
    range(3),
    [1.5, "a"],
    [[1], [2]],
)
CELLS = (
    Action(0, Kind.F, 0),
    Action("x", 3, None),
    Action(0, 99, 0),
    Overlap(1, 2),
    Overlap(Action(0, Kind.F, 0), Action(0, Kind.B, 1)),
)
ROWS = (
    [[Action(0, Kind.F, 0)]],
    [["0F0"]],
    [[Action(0, Kind.F, -1)]],
    [[Action(2**70, Kind.F, 0)]],
    [[Action(0.5, 0, 0)]],
    [3],
)
TABLES = (
    GOOD,
    SPREAD,
    SENT,
    BROKEN,
    EMPTY,
    TIMELINE,
    LONG,
    SHORT,
    LAYOUT,
    GOOD.placement,
    Placement.loop(devices=3),
    Costs(),
    LAYER,
)
ENUMS = (Kind.F, *Transfers, *Release, Theme.DARK, jp.table.Objective.PERIOD, "async", "auto")
OBJECTS = (None, object(), Odd(), int, len, Schedule, ...)
POOL = (*NUMBERS, *TEXTS, *CONTAINERS, *CELLS, *ROWS, *TABLES, *ENUMS, *OBJECTS)


def draw_value(rng: random.Random) -> Any:
    """Any value; now and then some of them in a container."""
    if rng.random() < 0.8:
        return rng.choice(POOL)
    inner = [rng.choice(POOL) for _ in range(rng.randint(0, 3))]
    return rng.choice(
        (
            list,
            tuple,
            iter,
            lambda found: dict(enumerate(found)),
            lambda found: dict(zip("tEL", found, strict=False)),
        )
    )(inner)
