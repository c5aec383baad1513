"""Two loop bodies that run as one: which value of one is to be read late, so that both do not hold their largest arrays at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from .sizes import is_layout, nbytes

# Arrays this many times as large as what a layer hands on: attention's scores, which are time / head_dim times as large.  The hidden
# units of an MLP (some 4 times) and what is sent to experts (as often as a token has experts, 8 or so) are left to run side by side.
LARGE = 16


class Stagger(NamedTuple):
    """`value`: the position, among what the second body scans, of the value that waits until `after`, a value of the first, is there."""

    after: core.Var
    value: int


def find_stagger(first: core.Jaxpr, second: core.Jaxpr, *, carried: Sequence[core.Var], scanned: Sequence[bool]) -> Stagger | None:
    """What to read late, so that the first body is done with its large arrays before the second makes its own; None where there is none.

    Args:
        first: a scan's body.
        second: the body of the scan that waits; its inputs end in as many as `scanned`.
        carried: the inputs of the first body that a layer hands on to the next.
        scanned: which of what the second body scans may be read late.
    """
    least = LARGE * sum(nbytes(v.aval) for v in carried)
    mine, its = large_arrays(first, least), large_arrays(second, least)
    last = max((i for i, eqn in enumerate(first.eqns) if any(v in mine for v in _inputs(eqn))), default=None)
    begin = next((i for i, eqn in enumerate(second.eqns) if any(v in its for v in eqn.outvars)), None)
    if last is None or begin is None:
        return None
    value = _read_last(second, begin, scanned)
    return None if value is None else Stagger(_neck(first, last, carried), value)


def large_arrays(body: core.Jaxpr, least: int) -> set[core.Var]:
    """What is made of inputs in the body, has more bytes, and is not returned (that is in its place until the end)."""
    made: set[core.Var] = set(body.invars)
    found: set[core.Var] = set()
    for eqn in body.eqns:
        if not any(v in made for v in _inputs(eqn)):
            continue
        made.update(eqn.outvars)
        if not is_layout(eqn):
            found.update(v for v in eqn.outvars if nbytes(v.aval) > least)
    return found - {v for v in body.outvars if isinstance(v, core.Var)}


def _neck(body: core.Jaxpr, last: int, carried: Sequence[core.Var]) -> Any:
    """What the first equation from `last` on gives, of which alone, besides parameters, all after it is made: attention's sum with x.

    Without it, what `last` gives.
    """
    uses = {v: i for i, eqn in enumerate(body.eqns) for v in _inputs(eqn)}
    alive = {v for v in carried if uses.get(v, -1) > last}
    made: set[Any] = set(carried)
    for i, eqn in enumerate(body.eqns):
        if any(v in made for v in _inputs(eqn)):
            made.update(eqn.outvars)
            alive.update(v for v in eqn.outvars if v in uses)
        alive = {v for v in alive if uses[v] > i}
        if i >= last and len(alive) == 1 and alive <= set(eqn.outvars):
            return alive.pop()
    return body.eqns[last].outvars[0]


def _read_last(body: core.Jaxpr, equation: int, scanned: Sequence[bool]) -> int | None:
    """Of what an equation needs of the scanned values that may be read late, the one whose first use comes last."""
    needed = set(_inputs(body.eqns[equation]))
    uses: dict[core.Var, int] = {}
    for i in range(equation, -1, -1):
        eqn = body.eqns[i]
        if i == equation or any(v in needed for v in eqn.outvars):
            needed.update(_inputs(eqn))
            uses.update(dict.fromkeys(_inputs(eqn), i))
    start = len(body.invars) - len(scanned)
    values = [k for k, may in enumerate(scanned) if may and body.invars[start + k] in uses]
    return max(values, key=lambda k: uses[body.invars[start + k]], default=None)


def _inputs(eqn: core.JaxprEqn) -> Collection[Any]:
    return [v for v in eqn.invars if isinstance(v, core.Var)]
