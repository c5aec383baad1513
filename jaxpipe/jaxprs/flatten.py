"""Inline every call in a jaxpr (jit, remat, custom_jvp, custom_vjp), also inside scans, so that it
can be cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from .equations import Atom, NewVar, every_equation, with_bodies

# The parameter that holds a call's body.  `custom_*` calls that are still here were not
# differentiated, so the plain body is their meaning.  Inlined remat keeps what it is for: a stage's
# forward and backward are separate computations, so what the backward recomputes cannot be shared
# with the forward by accident.
_BODY_OF = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


# JAX has no public name for its memory spaces.
_Space: Any = type(jax.typeof(np.float32(0)).memory_space)


def stores_on_host(jaxpr: core.Jaxpr) -> bool:
    """Whether anything in it goes to the host's memory, as policies of `jax.checkpoint` that
    offload write it.
    """
    return _has_move(jaxpr, {_Space.Host})


def _has_move(jaxpr: core.Jaxpr, to: Collection[Any] = tuple(_Space)) -> bool:
    """Whether anything in it, also in bodies, is moved to one of these memories."""
    return any(
        _is_move(eqn) and not set(eqn.params["devices"]).isdisjoint(to)
        for eqn in every_equation(jaxpr)
    )


def _is_move(eqn: core.JaxprEqn) -> bool:
    """Whether an equation does nothing but move values between the memories of a device and its
    host.
    """
    return eqn.primitive.name == "device_put" and all(
        isinstance(to, _Space) for to in eqn.params["devices"]
    )


def _on_device(aval: Any) -> Any:
    return (
        aval.update(memory_space=_Space.Device)
        if getattr(aval, "memory_space", None) is _Space.Host
        else aval
    )


def _without_moves(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The same function with all values on the device, also in the bodies of loops and branches.

    The program decides what is kept on the host: it moves all residuals of a forward, and fetches
    them ticks before they are read.
    """
    newvar = core.gensym()
    env: dict[core.Var, Any] = {}

    def bind(variables: Sequence[core.Var]) -> list[core.Var]:
        for v in variables:
            env[v] = v if isinstance(v, core.DropVar) else newvar(_on_device(v.aval))
        return [env[v] for v in variables]

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, core.Literal) else env[atom]

    constvars, invars = bind(jaxpr.constvars), bind(jaxpr.invars)
    eqns: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        inputs = [read(a) for a in eqn.invars]
        if _is_move(eqn):
            env.update(zip(eqn.outvars, inputs, strict=True))
            continue
        params = with_bodies(eqn.params, _without_moves)
        eqns.append(eqn.replace(invars=inputs, outvars=bind(eqn.outvars), params=params))
    outvars = [read(a) for a in jaxpr.outvars]
    return jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns)


def flatten(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same function without calls and moves between memories.

    Constants become literals or stay constants of the result.
    """
    jaxpr = _without_moves(closed.jaxpr) if _has_move(closed.jaxpr) else closed.jaxpr
    flat = _Flat()
    constvars, invars = (
        [flat.newvar(v.aval) for v in of] for of in (jaxpr.constvars, jaxpr.invars)
    )
    flat.consts += zip(constvars, closed.consts, strict=True)
    outs = flat.emit(jaxpr, [*constvars, *invars])
    whole = jaxpr.replace(
        constvars=[v for v, _ in flat.consts], invars=invars, outvars=outs, eqns=flat.eqns
    )
    return core.ClosedJaxpr(whole, [c for _, c in flat.consts])


class _Flat:
    """The equations so far, and the constants that they read."""

    def __init__(self) -> None:
        self.newvar: NewVar = core.gensym()
        self.eqns: list[core.JaxprEqn] = []
        self.consts: list[tuple[core.Var, Any]] = []

    def emit(self, jaxpr: core.Jaxpr, arguments: Sequence[Atom]) -> list[Atom]:
        """Append the flattened equations of a jaxpr applied to `arguments`; return its outputs."""
        env: dict[core.Var, Atom] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True)
        )

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(a) for a in eqn.invars]
            body = eqn.params.get(_BODY_OF.get(eqn.primitive.name, ""))
            if body is not None:
                inner, inner_consts = (
                    (body.jaxpr, body.consts) if isinstance(body, core.ClosedJaxpr) else (body, [])
                )
                bound = [self.newvar(v.aval) for v in inner.constvars]
                self.consts.extend(zip(bound, inner_consts, strict=True))
                outs = self.emit(inner, [*bound, *inputs])
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            params = eqn.params
            if eqn.primitive.name == "scan":
                flat = flatten(params["jaxpr"])
                inputs, params = self._lift_scan_consts(flat, inputs, params)
            fresh = [v if isinstance(v, core.DropVar) else self.newvar(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, fresh, strict=True))
            self.eqns.append(eqn.replace(invars=inputs, outvars=fresh, params=params))
        return [read(a) for a in jaxpr.outvars]

    def _lift_scan_consts(
        self, body: core.ClosedJaxpr, inputs: list[Atom], params: dict[str, Any]
    ) -> tuple[list[Atom], dict[str, Any]]:
        """Turn the constants of a scan body into operands of the scan, so that a body never holds
        constants.
        """
        lifted = [self.newvar(v.aval) for v in body.jaxpr.constvars]
        self.consts.extend(zip(lifted, body.consts, strict=True))
        jaxpr = body.jaxpr.replace(constvars=[], invars=[*body.jaxpr.constvars, *body.jaxpr.invars])
        changed = dict(
            params, jaxpr=core.ClosedJaxpr(jaxpr, []), num_consts=params["num_consts"] + len(lifted)
        )
        return [*lifted, *inputs], changed
