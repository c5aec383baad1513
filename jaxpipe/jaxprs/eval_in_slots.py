"""Evaluate a jaxpr whose stacked scan outputs go straight into buffer slots, and whose scanned
inputs come straight from them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from .equations import scan_counts
from .evaluate import bind, literal
from .loops import Loop, run_loops
from .slots import InSlots, Piece, Slot, Target, Total, TotalPiece
from .trip import Answer, Trip

_LAZY = (Slot, Piece)


def run_in_slots(
    jaxpr: core.Jaxpr,
    arguments: Sequence[Any],
    *,
    reads: Mapping[int, Slot] | None = None,
    writes: Mapping[int, Target] | None = None,
) -> list[Any]:
    """Evaluate a jaxpr with slots (`InSlots`).

    A scan would else build its stacked outputs apart and copy them into the slot (or add them to
    the accumulator), and a slot would be copied out to be scanned.
    """
    steps = _steps(InSlots(jaxpr, arguments, reads or {}, writes or {}))
    try:
        loop = next(steps)
        while True:
            loop = steps.send(run_loops((loop,))[0])
    except StopIteration as done:
        return done.value


def run_both_in_slots(one: InSlots, other: InSlots) -> tuple[list[Any], list[Any]]:
    """Evaluate two jaxprs that do not depend on each other, their scans of equal length merged into
    one, trip by trip.

    So what one of them awaits in a layer, a collective, may run beside what the other computes.  In
    a trip `one` reads its slots before `other` writes any: `other` may write pools that `one`
    reads, but not the other way round.
    """
    runs = (_steps(one), _steps(other))
    loops: list[Loop | None] = [None, None]
    results: list[list[Any]] = [[], []]

    def advance(k: int, answer: Answer | None) -> None:
        try:
            loops[k] = next(runs[k]) if answer is None else runs[k].send(answer)
        except StopIteration as done:
            loops[k], results[k] = None, done.value

    advance(0, None)
    advance(1, None)
    while loops[0] is not None or loops[1] is not None:
        first, second = loops
        if first is not None and second is not None and first.merges_with(second):
            answers = run_loops((first, second))
            advance(0, answers[0])
            advance(1, answers[1])
        else:
            k = 0 if first is not None else 1
            loop = loops[k]
            assert loop is not None
            advance(k, run_loops((loop,))[0])
    return results[0], results[1]


def _steps(run: InSlots) -> Generator[Loop, Answer, list[Any]]:
    """Evaluate a jaxpr up to each of its scans, which the caller runs."""
    jaxpr, reads, writes = run.jaxpr, run.reads, run.writes
    env: dict[core.Var, Any] = {}
    for i, (var, argument) in enumerate(zip(jaxpr.invars, run.arguments, strict=True)):
        env[var] = reads.get(i, argument)
    targets = {
        jaxpr.outvars[i]: slot
        for i, slot in writes.items()
        if isinstance(jaxpr.outvars[i], core.Var)
    }
    used = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var)}
    returned = [v for i, v in enumerate(jaxpr.outvars) if i not in writes]
    targets = {
        v: s
        for v, s in targets.items()
        if v not in used and v not in returned and jaxpr.outvars.count(v) == 1
    }
    pools = _Pools()
    written: set[core.Var] = set()
    zeros = _zeros_of(jaxpr)
    # What is read whole is read before any pool is written, here or by what runs together with
    # this.
    env.update((v, env[v].load()) for v in _read_whole(jaxpr) if isinstance(env.get(v), _LAZY))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"]:
            _, carries = scan_counts(eqn)
            loop = _loop_of(eqn, env, targets, pools)
            carry, changed, stacks = yield loop
            pools.update(loop.pools, changed)
            outs = eqn.outvars[carries:]
            env.update(zip(eqn.outvars[:carries], carry, strict=True))
            env.update(zip([v for v in outs if v not in targets], stacks, strict=True))
            written.update(v for v in outs if v in targets)
            continue
        inputs = [_load(env, v) for v in eqn.invars]
        target = (
            targets.get(eqn.outvars[0])
            if eqn.primitive.name == "scatter-add" and _is_in(eqn.invars[0], zeros)
            else None
        )
        if isinstance(target, Total | TotalPiece):
            # The gradient of a table of embeddings, which is mostly zeros.
            pools.change(
                target, target._replace(pool=pools.now(target.pool)).scatter(eqn, *inputs[1:])
            )
            written.add(eqn.outvars[0])
            continue
        env.update(zip(eqn.outvars, bind(jaxpr, eqn, inputs), strict=True))
    for i, target in writes.items():
        atom = jaxpr.outvars[i]
        if not (isinstance(atom, core.Var) and atom in written):
            pools.change(
                target, target._replace(pool=pools.now(target.pool)).store(_load(env, atom))
            )
    return [
        pools.now(writes[i].pool) if i in writes else _load(env, atom)
        for i, atom in enumerate(jaxpr.outvars)
    ]


class _Pools:
    """The pools as they are by now, by what they were at first."""

    def __init__(self) -> None:
        self._now: dict[int, Any] = {}
        self._first: dict[int, Any] = {}  # by what each is now

    def now(self, pool: Any) -> Any:
        """The pool that was this one."""
        return self._now.get(id(pool), pool)

    def change(self, target: Target, new: Any) -> None:
        """Replace a target's pool."""
        self.update([self.now(target.pool)], [new])

    def update(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        """Replace pools as they were by now."""
        for before, after in zip(old, new, strict=True):
            first = self._first.pop(id(before), before)
            self._first[id(after)] = first
            self._now[id(first)] = after


def _loop_of(
    eqn: core.JaxprEqn, env: dict[core.Var, Any], targets: Mapping[Any, Target], pools: _Pools
) -> Loop:
    """A scan with pools among its carries, for what it writes, and among its constants, for what it
    reads.
    """
    consts, carries = scan_counts(eqn)
    body = eqn.params["jaxpr"]
    inside = body.jaxpr.invars[consts : consts + carries]
    carry = [
        jnp.asarray(_load(env, v)).astype(b.aval.dtype)
        for v, b in zip(eqn.invars[consts : consts + carries], inside, strict=True)
    ]
    scanned = [env[v] if isinstance(v, core.Var) else v.val for v in eqn.invars[consts + carries :]]
    found = [targets.get(v) for v in eqn.outvars[carries:]]
    trip = Trip(body, [_load(env, v) for v in eqn.invars[:consts]], carries, found)
    return Loop(
        length=eqn.params["length"],
        reverse=eqn.params.get("reverse", False),
        unroll=eqn.params.get("unroll", 1),
        carry=carry,
        pools=list({id(t.pool): pools.now(t.pool) for t in found if t is not None}.values()),
        scanned=scanned,
        trip=trip,
    )


def _read_whole(jaxpr: core.Jaxpr) -> set[core.Var]:
    """Inputs that something reads other than row by row."""
    found: set[core.Var] = set()
    for eqn in jaxpr.eqns:
        scanned = (
            sum(scan_counts(eqn))
            if eqn.primitive.name == "scan" and eqn.params["length"]
            else len(eqn.invars)
        )
        found.update(v for v in eqn.invars[:scanned] if isinstance(v, core.Var))
    return found & set(jaxpr.invars)


def _zeros_of(jaxpr: core.Jaxpr) -> set[Any]:
    """Arrays of zeros."""
    return {
        eqn.outvars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "broadcast_in_dim"
        and isinstance(eqn.invars[0], core.Literal)
        and eqn.invars[0].val == 0
    }


def _is_in(atom: Any, those: set[Any]) -> bool:
    return isinstance(atom, core.Var) and atom in those


def _load(env: dict[core.Var, Any], atom: Any) -> Any:
    if isinstance(atom, core.Literal):
        return literal(atom)
    value = env[atom]
    return value.load() if isinstance(value, _LAZY) else value
