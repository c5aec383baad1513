"""Scans that make values again in their bodies: numbers, and what they would read from the stacks
of an earlier scan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress

from jax.extend import core

from .equations import (
    Atom,
    NewVar,
    Scan,
    closed_jaxpr,
    copied,
    producers,
    renamed,
    scan_counts,
    stacked_aval,
    variables,
)
from .min_cut import cheapest, numbers_of


def into_scans(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Make values of numbers alone inside the bodies of scans that read them.

    As operands of a scan they would be whole arrays in memory.  JAX moves them out of scans when it
    differentiates.
    """
    numbers = numbers_of(jaxpr.eqns)
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            consts, carries = scan_counts(eqn)
            rows = variables(eqn.invars[consts + carries :])
            whole = {v: v for v in variables(eqn.invars[:consts]) if v in numbers and v not in rows}
            eqn = _remake(eqn, whole, list(numbers.values()), {}, {}, core.gensym())
            body = eqn.params["jaxpr"]
            inner = closed_jaxpr(into_scans(body.jaxpr), body.consts)
            eqn = eqn.replace(params=eqn.params | {"jaxpr": inner})
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def keep_fewer_residuals(
    jaxpr: core.Jaxpr,
    forward: Sequence[bool],
    *,
    repeat: Callable[[core.JaxprEqn], bool],
) -> core.Jaxpr:
    """Rewrite each scan of the forward whose stacked outputs feed scans of the backward: these make
    again what equations give that `repeat` takes.

    The equations stay as many; `forward` marks those of the forward.
    """
    eqns = list(jaxpr.eqns)
    newvar = core.gensym()
    for index in compress(range(len(eqns)), forward):
        if eqns[index].primitive.name != "scan":
            continue
        # Choose what this scan stacks, and change it and the scans that read its stacks.
        eqn = eqns[index]
        scan = Scan.of(eqn)
        readers = _readers(jaxpr.replace(eqns=eqns), forward, [o for _, o in scan.ys])
        ys = [(v, o) for v, o in scan.ys if isinstance(v, core.Var)]
        moved = {o: v for v, o in ys if readers.get(o)}
        fixed = {v: o for v, o in ys if o not in moved and not isinstance(o, core.DropVar)}
        # Inputs of the whole step, and what another output stacks anyway, cost the backward
        # nothing.
        consts, xs = (
            {v: a for a, v in pairs if isinstance(a, core.Literal) or a in jaxpr.invars}
            for pairs in (scan.consts, scan.xs)
        )
        at_hand = {**fixed, **xs, **consts}
        stored, again = cheapest(moved.values(), scan.eqns, at_hand.__contains__, repeat=repeat)
        if set(stored) == set(moved.values()):
            continue
        names = {v: o for o, v in moved.items() if v in stored}
        for v in stored:
            names.setdefault(v, newvar(stacked_aval(v, eqn)))
        kept = [(v, o) for v, o in scan.ys if o not in moved]
        eqns[index] = replace(scan, ys=[*kept, *names.items()]).equation()
        for position in sorted({p for o in moved for p in readers[o]}):
            eqns[position] = _remake(
                eqns[position], moved, again, consts, {**names, **fixed, **xs}, newvar
            )
    return jaxpr.replace(eqns=eqns)


def _readers(
    jaxpr: core.Jaxpr, forward: Sequence[bool], outvars: Sequence[core.Var]
) -> dict[core.Var, list[int]]:
    """The positions of the scans of the backward that scan each stacked output, where nothing else
    reads it.
    """
    found: dict[core.Var, list[int]] = {v: [] for v in outvars if v not in jaxpr.outvars}
    for i, eqn in enumerate(jaxpr.eqns):
        scans = eqn.primitive.name == "scan" and not forward[i]
        whole = sum(scan_counts(eqn)) if scans else len(eqn.invars)
        for v in variables(eqn.invars[:whole]):
            found.pop(v, None)
        for v in variables(eqn.invars[whole:]):
            if v in found:
                found[v].append(i)
    return found


def _remake(
    eqn: core.JaxprEqn,
    moved: Mapping[core.Var, core.Var],
    again: Sequence[core.JaxprEqn],
    consts: Mapping[core.Var, Atom],
    xs: Mapping[core.Var, Atom],
    newvar: NewVar,
) -> core.JaxprEqn:
    """A scan that makes the values of `moved` operands at the head of its body.

    The equations `again` make them from what these `consts` and `xs` of the scan give.
    """
    scan = Scan.of(eqn)
    operands = (*scan.consts, *scan.xs)
    values = {v: moved[a] for a, v in operands if isinstance(a, core.Var) and a in moved}
    if not values:
        return eqn
    head = producers(values.values(), again, lambda v: v in consts or v in xs)
    computed = {v for e in head for v in e.outvars}
    inputs = [v for e in head for v in variables(e.invars)]
    env = {
        v: newvar(v.aval) for v in dict.fromkeys([*inputs, *values.values()]) if v not in computed
    }
    extra_consts = [(consts[v], inner) for v, inner in env.items() if v in consts]
    extra_xs = [(xs[v], inner) for v, inner in env.items() if v not in consts]
    made, now = copied(head, env, newvar)
    body = renamed(eqn.params["jaxpr"].jaxpr, {v: now[value] for v, value in values.items()})
    scan = Scan.of(eqn.replace(params=eqn.params | {"jaxpr": closed_jaxpr(body)}))
    return replace(
        scan,
        eqns=[*made, *scan.eqns],
        consts=[*extra_consts, *((a, v) for a, v in scan.consts if v not in values)],
        xs=[*((a, v) for a, v in scan.xs if v not in values), *extra_xs],
    ).equation()
