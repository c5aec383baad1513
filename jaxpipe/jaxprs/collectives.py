"""Which collectives a jaxpr holds, and over which mesh axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core


def collectives(jaxpr: core.Jaxpr) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(primitive, mesh axes) of every equation that communicates, also in loops, branches and
    calls.
    """
    for eqn in jaxpr.eqns:
        axes = (*_names(eqn.params.get("axes")), *_names(eqn.params.get("axis_name")))
        if axes and eqn.primitive.name != "axis_index":
            yield eqn.primitive.name, axes
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
                if isinstance(inner, core.Jaxpr):
                    yield from collectives(inner)


def _names(value: Any) -> tuple[str, ...]:
    """Names of mesh axes; numbers are axes of arrays."""
    return tuple(
        name
        for name in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(name, str)
    )
