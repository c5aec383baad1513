"""Flat jaxprs: without calls and without moves between memories, with loops that count."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jax.extend import core

from ..arrays import Leaves
from .equations import (
    Atom,
    ClosedJaxpr,
    bind,
    closed_jaxpr,
    evaluated,
    every_equation,
    scan_counts,
    scan_params,
    substituted,
    with_bodies,
    with_inputs,
)
from .loops import counting

# Their bodies are inlined.  `custom_*` calls that are still here were not
# differentiated, so the plain body is their meaning.  Inlined remat keeps its purpose: a stage's
# forward and backward are separate computations, so what the backward recomputes cannot be shared
# with the forward by accident.
REMAT = ("remat2", "checkpoint")
CALLS = ("jit", "closed_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call", *REMAT)

# JAX has no public name for it.
MemorySpace = type(jax.typeof(np.float32(0)).memory_space)


def stores_on_host(jaxpr: core.Jaxpr) -> bool:
    """Whether anything in it goes to the host's memory, as policies of `jax.checkpoint` that
    offload write it.
    """
    moves = (eqn for eqn in every_equation(jaxpr) if _is_move(eqn))
    return any(MemorySpace.Host in eqn.params["devices"] for eqn in moves)


def _is_move(eqn: core.JaxprEqn) -> bool:
    """Whether an equation does nothing but move values between the memories of a device and its
    host.
    """
    return eqn.primitive.name == "device_put" and all(
        isinstance(to, MemorySpace) for to in eqn.params["devices"]
    )


def flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function without calls and moves between memories: all values are on the device.
    Its loops count (`counting`).

    The program decides what is kept on the host: it moves all residuals of a forward, and fetches
    them ticks before they are read.  Constants become literals or stay constants of the result.
    """
    if any(map(_is_move, every_equation(closed.jaxpr))):
        closed = closed_jaxpr(_without_moves(closed.jaxpr), closed.consts)
    closed = closed_jaxpr(counting(closed.jaxpr), closed.consts)
    return jax.make_jaxpr(partial(_inlined, closed))(*closed.in_avals)


def _without_moves(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The jaxpr with all values on the device, also in loops, branches and calls."""
    newvar, env, eqns = core.gensym(), dict[core.Var, Atom](), list[core.JaxprEqn]()

    def fresh(var: core.Var) -> core.Var:
        on_host = getattr(var.aval, "memory_space", None) is MemorySpace.Host
        return newvar(var.aval.update(memory_space=MemorySpace.Device) if on_host else var.aval)

    constvars, invars = (list(map(fresh, of)) for of in (jaxpr.constvars, jaxpr.invars))
    env.update(zip([*jaxpr.constvars, *jaxpr.invars], [*constvars, *invars], strict=True))
    for eqn in jaxpr.eqns:
        inputs, outputs = substituted(eqn.invars, env), list(map(fresh, eqn.outvars))
        env.update(zip(eqn.outvars, inputs if _is_move(eqn) else outputs, strict=True))
        if not _is_move(eqn):
            params = with_bodies(eqn.params, _without_moves)
            eqns.append(eqn.replace(invars=inputs, outvars=outputs, params=params))
    outvars = substituted(jaxpr.outvars, env)
    return jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns)


def _inlined(closed: ClosedJaxpr, *arguments: jax.Array) -> Leaves:
    """Evaluate a jaxpr without its calls, also in scans, whose bodies then hold no constants."""
    return evaluated(closed, _run, arguments)


def _run(eqn: core.JaxprEqn, inputs: Leaves) -> Leaves:
    params = eqn.params
    if eqn.primitive.name in CALLS:
        body = params.get("call_jaxpr") or params["jaxpr"]
        # That of remat has no constants, and in JAX 0.11 no field for them.
        return _inlined(body if hasattr(body, "consts") else closed_jaxpr(body), *inputs)
    if eqn.primitive.name == "scan":
        flat = flatten(params["jaxpr"])
        inputs = [*flat.consts, *inputs]
        consts, carry = scan_counts(eqn)
        counts = consts + len(flat.consts), carry, len(eqn.invars) - consts - carry
        params = params | {"jaxpr": closed_jaxpr(with_inputs(flat))}
        params = params | scan_params(*counts, len(eqn.outvars) - carry)
        eqn = eqn.replace(invars=[*flat.jaxpr.constvars, *eqn.invars], params=params)
    return bind(eqn, inputs)
