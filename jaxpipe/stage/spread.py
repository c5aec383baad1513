"""What the code of functions that are spread over the pipe axis has in common."""

from __future__ import annotations

from typing import Any

from jax.extend import core


def without_axes(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The equations without the mark that they use a mesh axis: it orders nothing, and would keep
    collectives that no output needs.
    """

    def plain(effects: Any) -> Any:
        return frozenset(effect for effect in effects if type(effect).__name__ != "NamedAxisEffect")

    eqns = [eqn.replace(effects=plain(eqn.effects)) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns, effects=plain(jaxpr.effects))
