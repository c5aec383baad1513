"""The collectives of a compiled program: which, over which mesh axes, in a loop or once a step, and
of what shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|called_computations|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


class Collective(NamedTuple):
    """One instruction.  `axes` are the mesh axes along which its groups extend; `shapes` those of
    its results on one device.
    """

    kind: str
    axes: tuple[str, ...]
    in_loop: bool
    shapes: tuple[tuple[int, ...], ...]


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """All collectives of an HLO text; `mesh` holds axis sizes in order, with devices numbered along
    it.
    """
    found: list[tuple[str, str]] = []
    called: dict[str, set[str]] = {}
    bodies: set[str] = set()
    computation = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            match = _COMPUTATION.match(line)
            computation = match[1] if match else computation
            continue
        names = {
            name.strip(" %")
            for match in _CALLED.finditer(line)
            for name in (match[1] or match[2]).split(",")
        }
        called.setdefault(computation, set()).update(names - {""})
        if " while(" in line:
            bodies |= names
        if _COLLECTIVE.search(line):
            found.append((computation, line))
    looped = _closure(bodies, called)
    return [_collective(line, mesh, where in looped) for where, line in found]


def _closure(names: set[str], called: Mapping[str, set[str]]) -> set[str]:
    """These computations and all that they call."""
    reached, todo = set(names), list(names)
    while todo:
        fresh = called.get(todo.pop(), set()) - reached
        reached |= fresh
        todo += fresh
    return reached


def _collective(line: str, mesh: Mapping[str, int], in_loop: bool) -> Collective:
    match = _COLLECTIVE.search(line)
    assert match
    shapes = tuple(tuple(int(n) for n in m[1].split(",") if n) for m in _SHAPE.finditer(match[1]))
    pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
    return Collective(
        match[2], _axes(_lists(pairs[1]) if pairs else _groups(line), mesh), in_loop, shapes
    )


def _groups(line: str) -> list[list[int]]:
    """Replica groups, written out ({{0,2},{1,3}}) or as an iota ([2,2]<=[2,2]T(1,0))."""
    if match := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return _lists(match[1])
    match = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert match, f"no replica groups in {line[:200]}"
    shape, source = (tuple(int(n) for n in match[i].split(",")) for i in (1, 2))
    ids = np.arange(np.prod(source)).reshape(source)
    if match[3]:
        ids = ids.transpose([int(n) for n in match[3].split(",")])
    return [list(map(int, group)) for group in ids.reshape(shape)]


def _lists(text: str) -> list[list[int]]:
    return [[int(n) for n in m[1].split(",")] for m in re.finditer(r"\{([\d,]+)\}", text)]


def _axes(groups: list[list[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes whose coordinate differs within a group."""
    sizes = tuple(mesh.values())
    spread = [np.ptp(np.array(np.unravel_index(group, sizes)), axis=1) > 0 for group in groups]
    varies = np.any(spread, axis=0)
    return tuple(name for name, v in zip(mesh, varies, strict=True) if v)
