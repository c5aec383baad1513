"""Reductions over mesh axes, as XLA can compile them beside axes left to the partitioner."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.extend.core.primitives import convert_element_type_p

_ALL_REDUCES = ("psum", "psum_invariant", "pmax", "pmin")
_REDUCTIONS = (*_ALL_REDUCES, "reduce_scatter")
_WIDE = jnp.dtype(jnp.float32)


@dataclass(frozen=True)
class Reductions:
    """What is changed of them: none of it changes a number.

    `alone` are the axes of one device, which are left out: the partitioner fails on a reduction
    over these alone ("must be in (partial) manual partitioning mode").  `widen`: reductions of
    bfloat16 are done in float32.  XLA:CPU does that by itself, but it aborts the process ("Invalid
    binary instruction opcode copy") where JAX has put a sharding into the function that reduces.
    """

    alone: Set[str]
    widen: bool

    def within(self, jaxpr: core.Jaxpr) -> core.Jaxpr:
        """The jaxpr with its reductions changed, also in loops, branches and calls.

        It is the same object where there is nothing to change, so that calls stay shared.
        """
        eqns = [new for eqn in jaxpr.eqns for new in self._equations(eqn)]
        same = len(eqns) == len(jaxpr.eqns) and all(
            new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)
        )
        return jaxpr if same else jaxpr.replace(eqns=eqns)

    def _equations(self, eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
        params = {name: self._parameter(value) for name, value in eqn.params.items()}
        if eqn.primitive.name in _ALL_REDUCES:
            params["axes"] = tuple(name for name in params["axes"] if name not in self.alone)
        changed = any(
            params[name] is not value and params[name] != value
            for name, value in eqn.params.items()
        )
        eqn = eqn.replace(params=params) if changed else eqn
        narrow = any(_is_narrow(atom) for atom in eqn.invars)
        if not (self.widen and narrow and eqn.primitive.name in _REDUCTIONS):
            yield eqn
            return
        newvar = core.gensym()
        wide: list[Any] = [
            newvar(a.aval.update(dtype=_WIDE)) if _is_narrow(a) else a
            for a in (*eqn.invars, *eqn.outvars)
        ]
        inputs, outputs = wide[: len(eqn.invars)], wide[len(eqn.invars) :]
        yield from (
            _converted(eqn, old, new)
            for old, new in zip(eqn.invars, inputs, strict=True)
            if new is not old
        )
        yield eqn.replace(invars=inputs, outvars=outputs)
        yield from (
            _converted(eqn, new, old)
            for old, new in zip(eqn.outvars, outputs, strict=True)
            if new is not old
        )

    def _parameter(self, value: Any) -> Any:
        if isinstance(value, core.ClosedJaxpr):
            inner = self.within(value.jaxpr)
            return value if inner is value.jaxpr else value.replace(jaxpr=inner)
        if isinstance(value, core.Jaxpr):
            return self.within(value)
        if isinstance(value, tuple) and any(isinstance(each, core.ClosedJaxpr) for each in value):
            return tuple(map(self._parameter, value))
        return value


def _is_narrow(atom: Any) -> bool:
    return bool(atom.aval.dtype == jnp.bfloat16)


def _converted(eqn: core.JaxprEqn, value: Any, var: Any) -> core.JaxprEqn:
    """The conversion of a value to a variable's dtype, where an equation stands."""
    params = {"new_dtype": var.aval.dtype, "weak_type": False, "sharding": None}
    return eqn.replace(
        primitive=convert_element_type_p,
        invars=[value],
        outvars=[var],
        params=params,
        effects=core.no_effects,
    )
