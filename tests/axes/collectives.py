"""The collectives of a compiled program: which, over which mesh axes, in a loop or once a step, and
of what shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.inspect.hlo import Instruction, groups_of

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
    groups = groups_of(Instruction("", (), match[2], (), line, False), math.prod(mesh.values()))
    return Collective(match[2], _axes(groups, mesh), in_loop, shapes)


def _axes(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes whose coordinate differs within a group."""
    sizes = tuple(mesh.values())
    spread = [np.ptp(np.array(np.unravel_index(group, sizes)), axis=1) > 0 for group in groups]
    varies = np.any(spread, axis=0)
    return tuple(name for name, v in zip(mesh, varies, strict=True) if v)
