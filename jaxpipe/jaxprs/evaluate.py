"""Evaluate one equation of a jaxpr, or a literal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core


def literal(atom: core.Literal) -> Any:
    """The value of a literal (it may be a plain number) as an array."""
    aval: Any = atom.aval
    return jnp.asarray(atom.val, aval.dtype)


def results_of(code: core.ClosedJaxpr, *arguments: Any) -> list[Any]:
    """Evaluate a jaxpr: arrays, also where an output is a literal."""
    found = core.jaxpr_as_fun(code)(*arguments)
    pairs = zip(found, code.jaxpr.outvars, strict=True)
    return [literal(atom) if isinstance(atom, core.Literal) else value for value, atom in pairs]


def bind(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Run one equation of a jaxpr."""
    variables = [v for v in eqn.invars if isinstance(v, core.Var)]
    values = [x for v, x in zip(eqn.invars, inputs, strict=True) if isinstance(v, core.Var)]
    named = dict(zip(variables, values, strict=True))
    newvar = core.gensym()
    outs = [newvar(v.aval) if isinstance(v, core.DropVar) else v for v in eqn.outvars]
    single = jaxpr.replace(
        constvars=[],
        invars=list(named),
        outvars=outs,
        eqns=[eqn.replace(outvars=outs)],
        effects=eqn.effects,
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(single, []))(*named.values())
