"""One trip of a scan: what it computes, and where its rows go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from jax.extend import core

from .evaluate import results_of
from .slots import Target

Answer: TypeAlias = "tuple[list[Any], list[Any], list[Any]]"  # carry, pools, stacks


class Made(NamedTuple):
    """What a trip makes: what is carried on, rows to store by position, and rows to stack."""

    carry: list[Any]
    rows: dict[int, Any]
    stacks: list[Any]


@dataclass(frozen=True)
class Trip:
    """The body of a scan, what is the same in all trips, and for each output after the carry its
    target; None: it is stacked.
    """

    body: core.ClosedJaxpr
    fixed: list[Any]
    carries: int
    targets: Sequence[Target | None]

    @property
    def stacked(self) -> list[Any]:
        """What a trip makes for stacks: shapes and dtypes."""
        outs = self.body.jaxpr.outvars[self.carries :]
        return [out.aval for out, target in zip(outs, self.targets, strict=True) if target is None]

    def compute(self, carry: list[Any], values: list[Any]) -> Made:
        """What a trip makes from the carry and what was read."""
        results = results_of(self.body, *self.fixed, *carry, *values)
        after = [r.astype(c.dtype) for r, c in zip(results[: self.carries], carry, strict=True)]
        made = list(zip(results[self.carries :], self.targets, strict=True))
        rows = {k: y for k, (y, target) in enumerate(made) if target is not None}
        return Made(after, rows, [y for y, target in made if target is None])

    def store(self, pools: list[Any], row: Any, rows: Mapping[int, Any]) -> list[Any]:
        """The pools with rows of a trip, which are given by position."""
        found = list(pools)
        numbers = {
            first: k
            for k, first in enumerate({id(t.pool): None for t in self.targets if t is not None})
        }
        for k, value in rows.items():
            target = self.targets[k]
            assert target is not None
            number = numbers[id(target.pool)]
            found[number] = target._replace(pool=found[number]).store_row(row, value)
        return found
