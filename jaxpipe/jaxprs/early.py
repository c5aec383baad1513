"""Rows that a scan stores before a trip makes its largest arrays, where they are known by then.

XLA:GPU orders a loop's operations from the last to the first, and puts a write that nothing reads at the end: what an MLP keeps would
lie in memory apart from its slot while attention's scores are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from .evaluate import bind, literal, never
from .sizes import nbytes
from .stagger import LARGE, large_arrays
from .work import is_light


class Early(NamedTuple):
    """Rows, by position, that are stored before an equation; one of its operands waits for that."""

    equation: int
    operand: int
    rows: tuple[int, ...]


def find_early(body: core.Jaxpr, rows: Mapping[int, core.Var], *, carried: Sequence[core.Var]) -> tuple[Early, ...]:
    """Where a trip begins to make large arrays, and the rows to store before.

    Rows that need a matmul that comes later are stored at the end, and so are rows that together are smaller than what is carried.

    Args:
        body: a scan's body.
        rows: what it makes for slots, by position.
        carried: the inputs that a layer hands on to the next.
    """
    handed = sum(nbytes(v.aval) for v in carried)
    large = large_arrays(body, LARGE * handed)
    made = {v for eqn in body.eqns for v in eqn.outvars}
    found: list[Early] = []
    left = {k: v for k, v in rows.items() if v in made}
    for i, eqn in enumerate(body.eqns):
        operands = [(nbytes(v.aval), k) for k, v in enumerate(eqn.invars) if isinstance(v, core.Var) and v in made and _is_number(v)]
        begins = any(v in large for v in eqn.outvars) and not any(isinstance(v, core.Var) and v in large for v in eqn.invars)
        if not begins or not operands:
            continue
        known = _known_before(body, i)
        now = tuple(k for k, v in left.items() if v in known)
        if now and sum(nbytes(rows[k].aval) for k in now) >= handed:
            found.append(Early(i, min(operands)[1], now))
            left = {k: v for k, v in left.items() if k not in now}
    return tuple(found)


def evaluate_early(
    body: core.ClosedJaxpr,
    arguments: Sequence[Any],
    early: Sequence[Early],
    rows: Mapping[int, core.Var],
    store: Callable[[Mapping[int, Any]], Sequence[Any]],
    *,
    row: Any,
) -> list[Any]:
    """What a scan's body returns; on the way `store` is handed early rows, and says of each pool that it wrote whether a number is there.

    An operand of the equation that follows depends on these (`never`).
    """
    jaxpr = body.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, body.consts, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))
    due = {each.equation: each for each in early}

    def value_of(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, core.Literal) else env[atom]

    for i in _in_order(jaxpr, due, rows):
        eqn = jaxpr.eqns[i]
        inputs = [value_of(v) for v in eqn.invars]
        if i in due:
            late = never(row, store({k: env[rows[k]] for k in due[i].rows}))
            waits = eqn.invars[due[i].operand]
            inputs = [jnp.where(late, jnp.zeros_like(x), x) if v is waits else x for v, x in zip(eqn.invars, inputs, strict=True)]
        env.update(zip(eqn.outvars, bind(jaxpr, eqn, inputs), strict=True))
    return [value_of(v) for v in jaxpr.outvars]


def _is_number(v: core.Var) -> bool:
    """Whether its dtype has a zero."""
    aval: Any = v.aval
    return bool(jnp.issubdtype(aval.dtype, jnp.number))


def _known_before(body: core.Jaxpr, equation: int) -> set[core.Var]:
    """What is made before an equation, and what light equations make of that."""
    known: set[Any] = {*body.invars, *body.constvars}
    for i, eqn in enumerate(body.eqns):
        if i < equation or (i > equation and is_light(eqn) and all(v in known for v in eqn.invars if isinstance(v, core.Var))):
            known.update(eqn.outvars)
    return known


def _in_order(body: core.Jaxpr, due: Mapping[int, Early], rows: Mapping[int, core.Var]) -> list[int]:
    """The equations, those that an early row needs before the equation that waits for it."""
    maker = {v: i for i, eqn in enumerate(body.eqns) for v in eqn.outvars}
    order: dict[int, None] = {}

    def place(equation: int) -> None:
        if equation in order:
            return
        for v in body.eqns[equation].invars:
            if isinstance(v, core.Var) and v in maker:
                place(maker[v])
        order[equation] = None

    for i in range(len(body.eqns)):
        for k in due[i].rows if i in due else ():
            place(maker[rows[k]])
        place(i)
    return list(order)
