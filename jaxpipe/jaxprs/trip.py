"""One trip of a scan: what it computes, and where its rows go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from jax.extend import core

from .early import Early, evaluate_early, find_early
from .evaluate import results_of
from .slots import Slot, Target

Answer: TypeAlias = "tuple[list[Any], list[Any], list[Any]]"  # carry, pools, stacks


class Made(NamedTuple):
    """What a trip makes: what is carried on, rows to store by position, and rows to stack."""

    carry: list[Any]
    rows: dict[int, Any]
    stacks: list[Any]


@dataclass(frozen=True)
class Trip:
    """The body of a scan, what is the same in all trips, and for each output after the carry its target; None: it is stacked."""

    body: core.ClosedJaxpr
    fixed: list[Any]
    carries: int
    targets: Sequence[Target | None]
    early: tuple[Early, ...] = ()

    @classmethod
    def of(cls, body: core.ClosedJaxpr, fixed: list[Any], carries: int, targets: Sequence[Target | None], scanned: Sequence[Any]) -> Trip:
        """A trip that stores early what may be: not into a pool that it reads row by row, since it reads where it uses."""
        trip = cls(body, fixed, carries, targets)
        read = {id(x.pool) for x in scanned if isinstance(x, Slot)}
        may = [k for k, t in enumerate(targets) if isinstance(t, Slot) and t.shows_rows and id(t.pool) not in read]
        rows = {k: v for k, v in trip._rows.items() if k in may}
        start = len(fixed)
        return replace(trip, early=find_early(body.jaxpr, rows, carried=body.jaxpr.invars[start : start + carries]))

    @property
    def stacked(self) -> list[Any]:
        """What a trip makes for stacks: shapes and dtypes."""
        outs = self.body.jaxpr.outvars[self.carries :]
        return [out.aval for out, target in zip(outs, self.targets, strict=True) if target is None]

    def compute(self, carry: list[Any], values: list[Any], told: Sequence[core.Var] = ()) -> tuple[Made, list[Any]]:
        """From the carry and what was read: what a trip makes, and the values of the body that are to be told."""
        jaxpr = self.body.jaxpr
        code = core.ClosedJaxpr(jaxpr.replace(outvars=[*jaxpr.outvars, *told]), self.body.consts)
        results = results_of(code, *self.fixed, *carry, *values)
        count = len(jaxpr.outvars)
        return self._apart(carry, results[:count]), results[count:]

    def store(self, pools: list[Any], row: Any, rows: Mapping[int, Any]) -> list[Any]:
        """The pools with rows of a trip, which are given by position."""
        found, numbers = list(pools), self._numbers
        for k, value in rows.items():
            target = self.targets[k]
            assert target is not None
            number = numbers[id(target.pool)]
            found[number] = target._replace(pool=found[number]).store_row(row, value)
        return found

    def alone(self, carry: list[Any], values: list[Any], pools: list[Any], row: Any) -> Answer:
        """Compute and store, some rows as soon as they are known: (carry, pools, rows to stack)."""
        if not self.early:
            made, _ = self.compute(carry, values)
            return made.carry, self.store(pools, row, made.rows), made.stacks
        now, numbers = list(pools), self._numbers

        def store(rows: Mapping[int, Any]) -> list[Any]:
            now[:] = self.store(now, row, rows)
            last = {numbers[id(t.pool)]: t for k, t in enumerate(self.targets) if k in rows and isinstance(t, Slot)}
            return [slot._replace(pool=now[number]).shows(row) for number, slot in last.items()]

        results = evaluate_early(self.body, [*self.fixed, *carry, *values], self.early, self._rows, store, row=row)
        made = self._apart(carry, results)
        done = {k for each in self.early for k in each.rows}
        return made.carry, self.store(now, row, {k: value for k, value in made.rows.items() if k not in done}), made.stacks

    @property
    def _rows(self) -> dict[int, core.Var]:
        """What is made for targets, by position."""
        outs = self.body.jaxpr.outvars[self.carries :]
        return {k: v for k, (v, t) in enumerate(zip(outs, self.targets, strict=True)) if t is not None and isinstance(v, core.Var)}

    @property
    def _numbers(self) -> dict[int, int]:
        """The position of each pool among those that are carried."""
        return {first: k for k, first in enumerate({id(t.pool): None for t in self.targets if t is not None})}

    def _apart(self, carry: list[Any], results: Sequence[Any]) -> Made:
        after = [r.astype(c.dtype) for r, c in zip(results[: self.carries], carry, strict=True)]
        made = list(zip(results[self.carries :], self.targets, strict=True))
        rows = {k: y for k, (y, target) in enumerate(made) if target is not None}
        return Made(after, rows, [y for y, target in made if target is None])
