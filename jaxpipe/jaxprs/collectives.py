"""The collectives of a jaxpr, and its reductions in a form that XLA can compile where some axes are
left to the partitioner.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.extend.core.primitives import convert_element_type_p

from .equations import every_equation, with_bodies

_ALL_REDUCES = ("psum", "psum_invariant", "pmax", "pmin")
_REDUCTIONS = (*_ALL_REDUCES, "reduce_scatter")
_WIDE = jnp.dtype(jnp.float32)


def collectives(jaxpr: core.Jaxpr) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(primitive, mesh axes) of every equation that communicates, also in loops, branches and
    calls.
    """
    for eqn in every_equation(jaxpr):
        axes = (*_names(eqn.params.get("axes")), *_names(eqn.params.get("axis_name")))
        if axes and eqn.primitive.name != "axis_index":
            yield eqn.primitive.name, axes


def _names(value: Any) -> tuple[str, ...]:
    """Names of mesh axes; numbers are axes of arrays."""
    return tuple(
        name
        for name in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(name, str)
    )


@dataclass(frozen=True)
class Reductions:
    """Changes of reductions.  None changes a number.

    `alone` are axes of one device.  They are left out: the partitioner fails on a reduction over
    these alone ("must be in (partial) manual partitioning mode").  With `widen`, reductions of
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
        params = with_bodies(eqn.params, self.within)
        if eqn.primitive.name in _ALL_REDUCES and not self.alone.isdisjoint(params["axes"]):
            axes = tuple(name for name in params["axes"] if name not in self.alone)
            params = params | {"axes": axes}
        eqn = eqn if params is eqn.params else eqn.replace(params=params)
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
        before = [(a, w) for a, w in zip(eqn.invars, inputs, strict=True) if w is not a]
        after = [(w, a) for a, w in zip(eqn.outvars, outputs, strict=True) if w is not a]
        yield from (_converted(eqn, value, var) for value, var in before)
        yield eqn.replace(invars=inputs, outvars=outputs)
        yield from (_converted(eqn, value, var) for value, var in after)


def _is_narrow(atom: Any) -> bool:
    return bool(atom.aval.dtype == jnp.bfloat16)


def _converted(eqn: core.JaxprEqn, value: Any, var: Any) -> core.JaxprEqn:
    """The conversion of a value to a variable's dtype, with the context of an equation."""
    params = {"new_dtype": var.aval.dtype, "weak_type": False, "sharding": None}
    return eqn.replace(
        primitive=convert_element_type_p,
        invars=[value],
        outvars=[var],
        params=params,
        effects=core.no_effects,
    )
