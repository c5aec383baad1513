"""Loops whose condition is only a flag: they get a counter, for XLA's CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .equations import (
    COMPARISONS,
    Atom,
    ClosedJaxpr,
    by_leaves,
    closed_jaxpr,
    copied,
    producers,
    shaped,
    substituted,
    traced_once,
    variables,
    with_each,
    with_inner,
)


def counting(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The jaxpr in which the condition of every `while` compares numbers, also in loops, branches
    and calls.

    A WHILE node of a CUDA graph reads a condition that is only a flag of the carry before the body
    has written it (known_faults.json).  Such a loop gets one more number in its carry, the count of
    its trips, and the condition `flag & (trips >= 0)`.
    """
    return with_each(jaxpr, _counting)


def _counting(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    eqn = with_inner(eqn, counting)
    if eqn.primitive.name != "while" or _compares(eqn.params["cond_jaxpr"].jaxpr):
        yield eqn
        return
    newvar = core.gensym()
    cond, body = (eqn.params[name] for name in ("cond_jaxpr", "body_jaxpr"))
    (flag,) = cond.jaxpr.outvars
    # Under `vmap` a loop has a flag for each element, and its whole carry has that axis.
    shape = flag.aval.shape
    start, none = traced(lambda: jnp.zeros(shape, jnp.int32))
    yield from start
    before, after = newvar(none.aval), newvar(none.aval)
    ask, asked = traced(lambda flag, trips: flag & (trips >= 0), flag, before)
    add, added = traced(lambda trips: trips + 1, after)
    more = {
        "cond_jaxpr": _extended(cond, before, ask, [asked]),
        "body_jaxpr": _extended(body, after, add, [*body.jaxpr.outvars, added]),
    }
    outvars = [*eqn.outvars, newvar(none.aval)]
    yield eqn.replace(invars=[*eqn.invars, none], outvars=outvars, params=eqn.params | more)


def _compares(condition: core.Jaxpr) -> bool:
    """Whether the condition depends on a comparison of numbers."""
    needed = producers(variables(condition.outvars), condition.eqns)
    compared = (eqn for eqn in needed if eqn.primitive.name in COMPARISONS)
    return any(shaped(v).dtype != np.bool_ for eqn in compared for v in variables(eqn.invars))


def traced(function: Callable[..., jax.Array], *inputs: Atom) -> tuple[list[core.JaxprEqn], Atom]:
    """Equations that compute a function of these variables, and the variable of its result."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(shaped, inputs)]
    traced = jax.make_jaxpr(function)(*shapes).jaxpr
    named = dict(zip(traced.invars, inputs, strict=True))
    eqns, env = copied(traced.eqns, named, core.gensym())
    return eqns, substituted(traced.outvars, env)[0]


def _extended(
    closed: ClosedJaxpr, trips: core.Var, eqns: Sequence[core.JaxprEqn], outvars: Sequence[Atom]
) -> ClosedJaxpr:
    """The jaxpr with one more input, these equations after its own, and these outputs."""
    jaxpr = closed.jaxpr
    changed = jaxpr.replace(
        invars=[*jaxpr.invars, trips], outvars=list(outvars), eqns=[*jaxpr.eqns, *eqns]
    )
    return closed_jaxpr(changed, closed.consts)


def with_counted_loops[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """The function with `counting` loops, for `jax.jit`: arguments that are no tracers stay as
    they are.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        varies = [isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))]
        of_tracers, tracers = by_leaves(
            lambda args, kwargs: function(*args, **kwargs), (args, kwargs), varies
        )
        return traced_once(of_tracers, tracers, change=counting)(tracers)

    return call
