"""Values that no input determines, such as masks made of iotas: recomputed where they are read, and
never kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core

from .flatten import Atom
from .min_cut import is_arithmetic
from .slices import scan_counts


def numbers_of(eqns: Sequence[core.JaxprEqn]) -> dict[core.Var, core.JaxprEqn]:
    """What literals alone determine by elementwise arithmetic, with what makes it, in order."""
    found: dict[core.Var, core.JaxprEqn] = {}
    for eqn in eqns:
        if is_arithmetic(eqn) and all(
            isinstance(v, core.Literal) or v in found for v in eqn.invars
        ):
            found[eqn.outvars[0]] = eqn
    return found


def into_scans(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Make such values inside the bodies of scans that read them: handed to a scan, each would be a
    whole array in memory.

    JAX itself takes them out of scans when it differentiates.
    """
    made = numbers_of(jaxpr.eqns)
    return jaxpr.replace(
        eqns=[_inside(eqn, made) if eqn.primitive.name == "scan" else eqn for eqn in jaxpr.eqns]
    )


def _inside(eqn: core.JaxprEqn, made: dict[core.Var, core.JaxprEqn]) -> core.JaxprEqn:
    consts, _ = scan_counts(eqn)
    body = eqn.params["jaxpr"].jaxpr
    moved = [isinstance(v, core.Var) and v in made for v in eqn.invars[:consts]] + [False] * (
        len(eqn.invars) - consts
    )
    wanted = {
        v: inner
        for v, inner, move in zip(eqn.invars, body.invars, moved, strict=True)
        if move and isinstance(v, core.Var)
    }
    eqns = _made_again(wanted, made)
    inner = body.replace(
        invars=[v for v, move in zip(body.invars, moved, strict=True) if not move],
        eqns=[*eqns, *body.eqns],
    )
    operands = [v for v, move in zip(eqn.invars, moved, strict=True) if not move]
    params = dict(
        eqn.params, jaxpr=core.ClosedJaxpr(into_scans(inner), []), num_consts=consts - sum(moved)
    )
    if "linear" in params:
        params["linear"] = (False,) * len(operands)
    return eqn.replace(invars=operands, params=params)


def _made_again(
    wanted: dict[core.Var, core.Var], made: dict[core.Var, core.JaxprEqn]
) -> list[core.JaxprEqn]:
    """The equations that make the values, under the names that they have inside."""
    needed: set[core.Var] = set()
    todo = list(wanted)
    while todo:
        var = todo.pop()
        if var not in needed:
            needed.add(var)
            todo += [v for v in made[var].invars if isinstance(v, core.Var)]
    newvar = core.gensym()
    env: dict[core.Var, core.Var] = {}
    found = []
    for var, eqn in made.items():
        if var not in needed:
            continue
        env[var] = wanted.get(var) or newvar(var.aval)
        invars: list[Atom] = [env[v] if isinstance(v, core.Var) else v for v in eqn.invars]
        found.append(eqn.replace(invars=invars, outvars=[env[var]]))
    return found
