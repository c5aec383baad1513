"""Inline every call in a jaxpr (jit, remat, custom_jvp, custom_vjp), also inside scans, so that it
can be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from .equations import Atom, NewVar, every_equation, with_bodies

# The parameter that holds a call's body.  `custom_*` calls that are still here were not
# differentiated, so the plain body is their meaning.  Inlined remat keeps its purpose: a stage's
# forward and backward are separate computations, so what the backward recomputes cannot be shared
# with the forward by accident.
_CALLS = ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
_BODY_OF = dict.fromkeys(("jit", "remat2", "checkpoint"), "jaxpr") | dict.fromkeys(
    _CALLS, "call_jaxpr"
)

# JAX has no public name for its memory spaces.
_Space: Any = type(jax.typeof(np.float32(0)).memory_space)


def stores_on_host(jaxpr: core.Jaxpr) -> bool:
    """Whether anything in it goes to the host's memory, as policies of `jax.checkpoint` that
    offload write it.
    """
    moves = (eqn for eqn in every_equation(jaxpr) if _is_move(eqn))
    return any(_Space.Host in eqn.params["devices"] for eqn in moves)


def _is_move(eqn: core.JaxprEqn) -> bool:
    """Whether an equation does nothing but move values between the memories of a device and its
    host.
    """
    return eqn.primitive.name == "device_put" and all(
        isinstance(to, _Space) for to in eqn.params["devices"]
    )


def flatten(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same function without calls and moves between memories: all values are on the device.

    The program decides what is kept on the host: it moves all residuals of a forward, and fetches
    them ticks before they are read.  Constants become literals or stay constants of the result.
    """
    moves = any(map(_is_move, every_equation(closed.jaxpr)))
    return _copied(closed, moves=moves, calls=False)


def _copied(closed: core.ClosedJaxpr, *, moves: bool, calls: bool) -> core.ClosedJaxpr:
    """The same function with or without `calls`, and without its moves if it has any."""
    jaxpr = closed.jaxpr
    flat = _Flat(moves, calls)
    constvars, invars = (list(map(flat.fresh, of)) for of in (jaxpr.constvars, jaxpr.invars))
    flat.consts += zip(constvars, closed.consts, strict=True)
    outs = flat.emit(jaxpr, [*constvars, *invars])
    whole = jaxpr.replace(
        constvars=[v for v, _ in flat.consts], invars=invars, outvars=outs, eqns=flat.eqns
    )
    return core.ClosedJaxpr(whole, [c for _, c in flat.consts])


def _without_moves(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The body of a branch, or of a loop other than a scan, with all values on the device."""
    count = len(jaxpr.constvars)
    opened = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    flat = _copied(core.ClosedJaxpr(opened, []), moves=True, calls=True).jaxpr
    return flat.replace(constvars=flat.invars[:count], invars=flat.invars[count:])


class _Flat:
    """The equations so far, and the constants that they read."""

    def __init__(self, moves: bool, calls: bool) -> None:
        """`moves`: there are moves between memories to leave out; `calls` stay."""
        self._moves, self._calls = moves, calls
        self._newvar: NewVar = core.gensym()
        self.eqns: list[core.JaxprEqn] = []
        self.consts: list[tuple[core.Var, Any]] = []

    def fresh(self, var: core.Var) -> core.Var:
        """A new variable for the same value, on the device."""
        aval: Any = var.aval
        on_host = self._moves and getattr(aval, "memory_space", None) is _Space.Host
        return self._newvar(aval.update(memory_space=_Space.Device) if on_host else aval)

    def emit(self, jaxpr: core.Jaxpr, arguments: Sequence[Atom]) -> list[Atom]:
        """Append the flattened equations of a jaxpr applied to `arguments`; return its outputs."""
        env: dict[core.Var, Atom] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True)
        )

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(a) for a in eqn.invars]
            name = "" if self._calls else eqn.primitive.name
            body = eqn.params.get(_BODY_OF.get(name, ""))
            if body is not None or _is_move(eqn):
                outs = inputs if body is None else self._inlined(body, inputs)
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            params = eqn.params
            if name == "scan":
                flat = _copied(params["jaxpr"], moves=self._moves, calls=False)
                # The constants of the body become operands, so that a body never holds constants.
                lifted = self._bound(flat.jaxpr.constvars, flat.consts)
                inputs = [*lifted, *inputs]
                body = flat.jaxpr.replace(
                    constvars=[], invars=[*flat.jaxpr.constvars, *flat.jaxpr.invars]
                )
                params = params | {
                    "jaxpr": core.ClosedJaxpr(body, []),
                    "num_consts": params["num_consts"] + len(lifted),
                }
            elif self._moves:
                params = with_bodies(params, _without_moves)
            fresh = [v if isinstance(v, core.DropVar) else self.fresh(v) for v in eqn.outvars]
            env.update(zip(eqn.outvars, fresh, strict=True))
            self.eqns.append(eqn.replace(invars=inputs, outvars=fresh, params=params))
        return [read(a) for a in jaxpr.outvars]

    def _inlined(self, body: Any, inputs: list[Atom]) -> list[Atom]:
        """Append the equations of a call; return its outputs."""
        closed = body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, [])
        return self.emit(
            closed.jaxpr, [*self._bound(closed.jaxpr.constvars, closed.consts), *inputs]
        )

    def _bound(self, constvars: Sequence[core.Var], consts: Sequence[Any]) -> list[core.Var]:
        """New variables for constants."""
        bound = list(map(self.fresh, constvars))
        self.consts.extend(zip(bound, consts, strict=True))
        return bound
