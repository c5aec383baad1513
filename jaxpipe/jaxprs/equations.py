"""For all passes over equations: their variables, copies under other names, the parts of scans, and
results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.extend import core

Atom: TypeAlias = core.Var | core.Literal
NewVar: TypeAlias = Callable[[Any], core.Var]
Pairs: TypeAlias = "Sequence[tuple[Any, Any]]"


def variables(atoms: Iterable[Any]) -> list[core.Var]:
    """Without literals."""
    return [v for v in atoms if isinstance(v, core.Var)]


def reads(jaxpr: core.Jaxpr) -> tuple[bool, ...]:
    """Which inputs an equation or an output of a jaxpr reads."""
    used = {v for e in jaxpr.eqns for v in variables(e.invars)} | {*variables(jaxpr.outvars)}
    return tuple(v in used for v in jaxpr.invars)


def every_equation(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations, also in loops, branches and calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in core.jaxprs_in_params(eqn.params):
            yield from every_equation(body)


def with_bodies(params: Any, change: Callable[[core.Jaxpr], core.Jaxpr]) -> Any:
    """Parameters of an equation with each of their jaxprs changed; the same object where nothing
    changes.
    """
    if isinstance(params, core.Jaxpr):
        return change(params)
    if isinstance(params, core.ClosedJaxpr):
        inner = change(params.jaxpr)
        return params if inner is params.jaxpr else core.ClosedJaxpr(inner, params.consts)
    if type(params) not in (tuple, dict):
        return params
    old = params.values() if type(params) is dict else params
    new = [with_bodies(value, change) for value in old]
    if all(a is b for a, b in zip(old, new, strict=True)):
        return params
    return dict(zip(params, new, strict=True)) if type(params) is dict else tuple(new)


def renamed(jaxpr: core.Jaxpr, env: dict[core.Var, Any]) -> core.Jaxpr:
    """The jaxpr that reads other values in place of some of its variables.

    Equations that read none of these stay the same objects.
    """

    def read(atom: Any) -> Any:
        return env.get(atom, atom) if isinstance(atom, core.Var) else atom

    eqns = [
        eqn.replace(invars=[read(a) for a in eqn.invars])
        if any(v in env for v in variables(eqn.invars))
        else eqn
        for eqn in jaxpr.eqns
    ]
    return jaxpr.replace(eqns=eqns, outvars=[read(a) for a in jaxpr.outvars])


def copied(
    eqns: Iterable[core.JaxprEqn], env: dict[core.Var, Any], newvar: NewVar
) -> list[core.JaxprEqn]:
    """The equations with new variables for their results; `env` has the new ones then."""
    found = []
    for eqn in eqns:
        inputs = [env.get(a, a) if isinstance(a, core.Var) else a for a in eqn.invars]
        outputs = [newvar(v.aval) for v in eqn.outvars]
        env.update(zip(eqn.outvars, outputs, strict=True))
        found.append(eqn.replace(invars=inputs, outvars=outputs))
    return found


def making(
    values: Iterable[core.Var],
    eqns: Sequence[core.JaxprEqn],
    at_hand: Callable[[core.Var], bool] = lambda v: False,
) -> list[core.JaxprEqn]:
    """Those equations, in order, that make the values from what is at hand."""
    wanted = {v for v in values if not at_hand(v)}
    found = []
    for eqn in reversed(eqns):
        if any(v in wanted for v in eqn.outvars):
            found.append(eqn)
            wanted.update(v for v in variables(eqn.invars) if not at_hand(v))
    return found[::-1]


def with_equations(
    like: core.Jaxpr,
    eqns: Sequence[core.JaxprEqn],
    invars: Sequence[core.Var],
    outvars: Sequence[Any],
) -> core.Jaxpr:
    """A jaxpr of these equations, with the effects that they have."""
    effects = frozenset().union(*(e.effects for e in eqns))
    return like.replace(
        eqns=list(eqns), invars=list(invars), outvars=list(outvars), effects=effects
    )


def scan_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """The number of constants and of carries of a scan."""
    return eqn.params["num_consts"], eqn.params["num_carry"]


@dataclass(frozen=True)
class Scan:
    """The parts of a scan: operands with their variables in the body, and values of the body with
    the scan's outputs.
    """

    like: core.JaxprEqn
    eqns: Sequence[core.JaxprEqn]
    consts: Pairs
    carry: Pairs
    xs: Pairs
    carry_out: Pairs
    ys: Pairs

    @classmethod
    def of(cls, eqn: core.JaxprEqn) -> Scan:
        """The parts of an equation whose body has no constants."""
        consts, carries = scan_counts(eqn)
        body = eqn.params["jaxpr"].jaxpr
        ins = list(zip(eqn.invars, body.invars, strict=True))
        outs = list(zip(body.outvars, eqn.outvars, strict=True))
        head = consts + carries
        return cls(
            eqn,
            body.eqns,
            ins[:consts],
            ins[consts:head],
            ins[head:],
            outs[:carries],
            outs[carries:],
        )

    def equation(self) -> core.JaxprEqn:
        """The parts as an equation."""
        ins = [*self.consts, *self.carry, *self.xs]
        outs = [*self.carry_out, *self.ys]
        body = with_equations(
            self.like.params["jaxpr"].jaxpr,
            self.eqns,
            [inner for _, inner in ins],
            [inner for inner, _ in outs],
        )
        params = self.like.params | {
            "jaxpr": core.ClosedJaxpr(body, []),
            "num_consts": len(self.consts),
            "num_carry": len(self.carry),
        }
        if "linear" in params:
            params["linear"] = (False,) * len(ins)
        return self.like.replace(
            invars=[operand for operand, _ in ins],
            outvars=[output for _, output in outs],
            params=params,
            effects=body.effects,
        )


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
