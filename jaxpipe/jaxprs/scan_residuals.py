"""Passes: make values again in the bodies of scans, so that no whole array of them is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core

from .cut import cheapest, determined_by, numbers_of
from .equations import Atom, NewVar, Scan, copied, producers, renamed, scan_counts, variables
from .equations import stacked as stacked_aval


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
            inner = core.ClosedJaxpr(into_scans(body.jaxpr), body.consts)
            eqn = eqn.replace(params=eqn.params | {"jaxpr": inner})
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def keep_fewer_residuals(jaxpr: core.Jaxpr, border: int, *, known: Sequence[bool]) -> core.Jaxpr:
    """Rewrite each scan before equation `border` whose stacked outputs feed scans after it: these
    make again what elementwise arithmetic gives.

    The equations stay as many.  `known` marks parameters among the inputs: values that they alone
    determine are computed once a step, and stay as they are.
    """
    eqns = list(jaxpr.eqns)
    newvar = core.gensym()
    parameters = {v for v, k in zip(jaxpr.invars, known, strict=True) if k}
    for index in range(border):
        if eqns[index].primitive.name != "scan":
            continue
        # Choose what this scan stacks, and change it and the scans that read its stacks.
        eqn = eqns[index]
        scan = Scan.of(eqn)
        readers = _readers(eqns, border, [o for _, o in scan.ys], jaxpr)
        fixed_in = [isinstance(a, core.Literal) or a in parameters for a in eqn.invars]
        fixed_in[len(scan.consts) : sum(scan_counts(eqn))] = [False] * len(scan.carry)
        once = determined_by(eqn.params["jaxpr"].jaxpr, fixed_in)
        ys = [(v, o) for v, o in scan.ys if isinstance(v, core.Var)]
        moved = {o: v for v, o in ys if readers.get(o) and v not in once}
        fixed = {v: o for v, o in ys if o not in moved and not isinstance(o, core.DropVar)}
        # Inputs of the whole step, and what another output stacks anyway, cost the backward
        # nothing.
        consts, xs = (
            {v: a for a, v in pairs if isinstance(a, core.Literal) or a in jaxpr.invars}
            for pairs in (scan.consts, scan.xs)
        )
        at_hand = {**fixed, **xs, **consts}
        keep = cheapest(moved.values(), scan.eqns, at_hand.__contains__)
        if set(keep.stored) == set(moved.values()):
            continue
        names = {v: o for o, v in moved.items() if v in keep.stored}
        for v in keep.stored:
            names.setdefault(v, newvar(stacked_aval(v.aval, eqn.params["length"])))
        kept = [(v, o) for v, o in scan.ys if o not in moved]
        eqns[index] = replace(scan, ys=[*kept, *names.items()]).equation()
        for position in sorted({p for o in moved for p in readers[o]}):
            eqns[position] = _remake(
                eqns[position], moved, keep.again, consts, {**names, **fixed, **xs}, newvar
            )
    return jaxpr.replace(eqns=eqns)


def _readers(
    eqns: Sequence[core.JaxprEqn], border: int, outvars: Sequence[Any], jaxpr: core.Jaxpr
) -> dict[Any, list[int]]:
    """For each stacked output that is read only as a scanned operand of later scans: their
    positions.
    """
    found: dict[Any, list[int]] = {
        v: [] for v in outvars if not isinstance(v, core.DropVar) and v not in jaxpr.outvars
    }
    for i, eqn in enumerate(eqns):
        for k, v in enumerate(eqn.invars):
            if not isinstance(v, core.Var) or v not in found:
                continue
            if eqn.primitive.name == "scan" and i >= border and k >= sum(scan_counts(eqn)):
                found[v].append(i)
            else:
                del found[v]
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

    def is_moved(atom: Atom) -> bool:
        return isinstance(atom, core.Var) and atom in moved

    values = {v: moved[a] for a, v in (*scan.consts, *scan.xs) if is_moved(a)}
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
    eqns = copied(head, env, newvar)
    body = renamed(eqn.params["jaxpr"].jaxpr, {v: env[value] for v, value in values.items()})
    outs = list(zip(body.outvars, eqn.outvars, strict=True))
    return Scan(
        eqn,
        [*eqns, *body.eqns],
        consts=[*extra_consts, *(pair for pair in scan.consts if not is_moved(pair[0]))],
        carry=scan.carry,
        xs=[*(pair for pair in scan.xs if not is_moved(pair[0])), *extra_xs],
        carry_out=outs[: len(scan.carry)],
        ys=outs[len(scan.carry) :],
    ).equation()
