"""Pass: keep fewer residuals of a scan: the backward scan remakes what elementwise arithmetic gives
from the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from .flatten import Atom
from .min_cut import Keep, cheapest
from .sizes import stacked as stacked_aval
from .slices import made_from, scan_counts


def sink(jaxpr: core.Jaxpr, border: int, *, known: Sequence[bool]) -> core.Jaxpr:
    """Rewrite each scan before equation `border` whose stacked outputs feed scans after it; the
    equations stay as many.

    `known` marks parameters among the inputs: what they alone determine is computed once a step,
    and stays as it is.
    """
    eqns = list(jaxpr.eqns)
    newvar = core.gensym()
    parameters = {v for v, k in zip(jaxpr.invars, known, strict=True) if k}
    for index in range(border):
        if eqns[index].primitive.name == "scan":
            _sink_one(eqns, index, border, jaxpr, parameters, newvar)
    return jaxpr.replace(eqns=eqns)


def _sink_one(
    eqns: list[core.JaxprEqn],
    index: int,
    border: int,
    jaxpr: core.Jaxpr,
    parameters: set[core.Var],
    newvar: Any,
) -> None:
    """Choose what this scan stacks, and change it and the scans that read its stacks, in place of
    the list's entries.
    """
    eqn = eqns[index]
    consts, carries = scan_counts(eqn)
    body = eqn.params["jaxpr"].jaxpr
    readers = _readers(eqns, border, eqn.outvars[carries:], jaxpr)
    stacked = list(zip(eqn.outvars[carries:], body.outvars[carries:], strict=True))
    inner_known = [isinstance(a, core.Literal) or a in parameters for a in eqn.invars]
    inner_known[consts : consts + carries] = [False] * carries
    once = made_from(body, inner_known)
    movable = [
        (o, v) for o, v in stacked if readers.get(o) and isinstance(v, core.Var) and v not in once
    ]
    if not movable:
        return
    fixed = {
        v: o
        for o, v in stacked
        if (o, v) not in movable and isinstance(v, core.Var) and not isinstance(o, core.DropVar)
    }
    # What the whole step is given, or another output stacks anyway, is at hand in the backward for
    # nothing.
    given = set(jaxpr.invars)
    outer = dict(zip(body.invars, eqn.invars, strict=True))
    free = {
        v: a
        for i, (v, a) in enumerate(outer.items())
        if not consts <= i < consts + carries and (isinstance(a, core.Literal) or a in given)
    }
    keep = cheapest([v for _, v in movable], body.eqns, lambda v: v in free or v in fixed)
    before = dict.fromkeys(v for _, v in movable)
    if set(keep.stored) == set(before):
        return
    names = {v: o for o, v in movable if v in keep.stored}
    for v in keep.stored:
        names.setdefault(v, newvar(stacked_aval(v.aval, eqn.params["length"])))
    eqns[index] = _restack(eqn, body, carries, {o for o, _ in movable}, names)
    moved = dict(movable)
    xs_free = {
        v: a for i, (v, a) in enumerate(outer.items()) if v in free and i >= consts + carries
    }
    const_free = {v: a for i, (v, a) in enumerate(outer.items()) if v in free and i < consts}
    sources = {**names, **fixed, **xs_free}
    for position in sorted({p for o, _ in movable for p in readers[o]}):
        eqns[position] = _remake(eqns[position], moved, keep, sources, const_free, newvar)


def _readers(
    eqns: Sequence[core.JaxprEqn], border: int, outvars: Sequence[Any], jaxpr: core.Jaxpr
) -> dict[Any, list[int]]:
    """For each stacked output that is read only as a scanned operand of later scans: their
    positions.
    """
    found: dict[Any, list[int]] = {v: [] for v in outvars if not isinstance(v, core.DropVar)}
    for v in jaxpr.outvars:
        found.pop(v, None) if isinstance(v, core.Var) else None
    for i, eqn in enumerate(eqns):
        for k, v in enumerate(eqn.invars):
            if not isinstance(v, core.Var) or v not in found:
                continue
            scanned = eqn.primitive.name == "scan" and i >= border and k >= sum(scan_counts(eqn))
            if scanned:
                found[v].append(i)
            else:
                del found[v]
    return found


def _restack(
    eqn: core.JaxprEqn,
    body: core.Jaxpr,
    carries: int,
    drop: set[Any],
    names: dict[core.Var, core.Var],
) -> core.JaxprEqn:
    """The scan with other stacked outputs."""
    pairs = [(o, v) for o, v in zip(eqn.outvars, body.outvars, strict=True)]
    kept = pairs[:carries] + [(o, v) for o, v in pairs[carries:] if o not in drop]
    outs: list[tuple[Any, Atom]] = [*kept, *((o, v) for v, o in names.items())]
    inner = core.ClosedJaxpr(body.replace(outvars=[v for _, v in outs]), [])
    return eqn.replace(outvars=[o for o, _ in outs], params=dict(eqn.params, jaxpr=inner))


def _remake(
    eqn: core.JaxprEqn,
    moved: dict[Any, core.Var],
    keep: Keep,
    sources: dict[core.Var, Atom],
    consts_from: dict[core.Var, Atom],
    newvar: Any,
) -> core.JaxprEqn:
    """A reading scan that is given the stored stacks instead, and makes the rest of them at the
    head of its body.
    """
    consts, carries = scan_counts(eqn)
    body = eqn.params["jaxpr"].jaxpr
    head = consts + carries
    renamed: dict[core.Var, Atom] = {}
    again = _needed_here([moved[a] for a in eqn.invars[head:] if _is_moved(a, moved)], keep)
    inputs = dict.fromkeys(v for e in again for v in e.invars if isinstance(v, core.Var))
    made = {v for e in again for v in e.outvars}
    direct = dict.fromkeys(moved[a] for a in eqn.invars[head:] if _is_moved(a, moved))
    reads = [v for v in {**inputs, **direct} if v not in made]
    extra_consts = [v for v in reads if v in consts_from]
    extra_xs = [v for v in reads if v not in consts_from]
    fresh = {v: newvar(v.aval) for v in reads}
    renamed.update(fresh)
    eqns = []
    for e in again:
        outs = [newvar(v.aval) for v in e.outvars]
        eqns.append(
            e.replace(
                invars=[renamed.get(a, a) if isinstance(a, core.Var) else a for a in e.invars],
                outvars=outs,
            )
        )
        renamed.update(zip(e.outvars, outs, strict=True))
    pairs = list(zip(eqn.invars, body.invars, strict=True))
    env = {v: renamed[moved[a]] for a, v in pairs[head:] if _is_moved(a, moved)}

    def read(atom: Atom) -> Atom:
        return env.get(atom, atom) if isinstance(atom, core.Var) else atom

    left = [(a, v) for a, v in pairs[head:] if not _is_moved(a, moved)]
    operands = [
        *((consts_from[v], fresh[v]) for v in extra_consts),
        *pairs[:head],
        *left,
        *((sources[v], fresh[v]) for v in extra_xs),
    ]
    inner = body.replace(
        invars=[v for _, v in operands],
        eqns=[*eqns, *(e.replace(invars=[read(a) for a in e.invars]) for e in body.eqns)],
        outvars=[read(a) for a in body.outvars],
    )
    params = dict(
        eqn.params, jaxpr=core.ClosedJaxpr(inner, []), num_consts=consts + len(extra_consts)
    )
    if "linear" in params:
        params["linear"] = (False,) * len(operands)
    return eqn.replace(invars=[a for a, _ in operands], params=params)


def _is_moved(atom: Atom, moved: dict[Any, core.Var]) -> bool:
    return isinstance(atom, core.Var) and atom in moved


def _needed_here(targets: Sequence[core.Var], keep: Keep) -> list[core.JaxprEqn]:
    """Those equations to run again that these targets need."""
    wanted = {v for v in targets if v not in keep.stored}
    found = []
    for eqn in reversed(keep.again):
        if any(v in wanted for v in eqn.outvars):
            found.append(eqn)
            wanted.update(v for v in eqn.invars if isinstance(v, core.Var) and v not in keep.stored)
    return found[::-1]
