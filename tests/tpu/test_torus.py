"""`jaxpipe.distributed.make_mesh` puts neighbours along a pipe axis beside each other on the torus
of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from jaxpipe.distributed import _along_torus, make_mesh
from tests.tpu.programs import needs_tpu_compiler, tpu_mesh


@dataclass(frozen=True)
class Chip:
    """What is read of a device."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    process_index: int = 0
    platform: str = "tpu"


def chips(sizes: tuple[int, int, int], slices: int = 1) -> list[Chip]:
    """Numbered as JAX numbers them: x changes most often."""
    places = [(x, y, z) for z, y, x in product(*map(range, sizes[::-1]))]
    return [
        Chip(k * len(places) + i, place, slice_index=k)
        for k in range(slices)
        for i, place in enumerate(places)
    ]


def hops(a: Chip, b: Chip, sizes: tuple[int, ...]) -> int:
    """Links between two chips of a slice; dims of four have links from end to end."""
    apart = [abs(i - j) for i, j in zip(a.coords, b.coords, strict=True)]
    return sum(min(d, size - d) if size >= 4 else d for d, size in zip(apart, sizes, strict=True))


def rows(devices: list[Chip], pipe: int, inner: int) -> Any:
    return np.array(_along_torus(list(devices), inner), dtype=object).reshape(pipe, inner)


@pytest.mark.parametrize(
    ("sizes", "pipe", "inner", "most"),
    [
        ((2, 2, 1), 4, 1, 1),
        ((2, 2, 2), 8, 1, 1),
        ((2, 2, 2), 4, 2, 1),
        ((2, 2, 2), 2, 4, 1),
        ((4, 4, 1), 16, 1, 1),
        ((4, 4, 1), 8, 2, 2),
        ((4, 4, 4), 64, 1, 1),
        ((4, 4, 4), 16, 4, 1),
        ((4, 4, 4), 8, 8, 2),
        ((4, 4, 4), 4, 16, 1),
    ],
)
def test_neighbours_are_beside_each_other(
    sizes: tuple[int, int, int], pipe: int, inner: int, most: int
) -> None:
    found = rows(chips(sizes), pipe, inner)
    assert sorted(each.id for each in found.flat) == list(range(pipe * inner))
    between = [
        hops(a, b, sizes)
        for here, there in pairwise(found)
        for a, b in zip(here, there, strict=True)
    ]
    assert max(between) == most
    # Each group of the other axes is a path along links, and mostly a ring.
    for group in found:
        assert all(hops(a, b, sizes) == 1 for a, b in pairwise(group))


def test_a_pipe_axis_crosses_slices_once() -> None:
    found = rows(chips((2, 2, 1), slices=2), 4, 2)
    assert [{each.slice_index for each in group} for group in found] == [{0}, {0}, {1}, {1}]


def test_a_part_of_a_slice_keeps_its_order() -> None:
    some = chips((4, 4, 1))[:6]
    assert list(rows(some, 3, 2).flat) == some


@needs_tpu_compiler
def test_described_devices_of_a_slice() -> None:
    described = list(tpu_mesh((8,), ("pipe",), "v5p:2x2x2").devices)
    mesh = make_mesh({"pipe": 4, "tensor": 2}, devices=described)
    between = [
        hops(a, b, (2, 2, 2))
        for here, there in pairwise(mesh.devices)
        for a, b in zip(here, there, strict=True)
    ]
    assert set(between) == {1}
