"""Find the outputs of a jaxpr that are computed in the same way, also where scans stack them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from .cut import drop_dead
from .equations import Atom, renamed, scan_counts


def equal_outputs(jaxpr: core.Jaxpr) -> tuple[int, ...]:
    """For each output, the first output that is equal to it, itself or an earlier one.

    A cast of stacked weights in a scan over layers, and the same cast in the reversed scan over
    them, are equal.
    """
    numbers: dict[Any, int] = {}
    of: dict[core.Var, int] = {
        var: numbers.setdefault(("input", i), len(numbers)) for i, var in enumerate(jaxpr.invars)
    }

    def number(atom: Atom) -> Any:
        return (
            ("literal", str(atom), str(atom.aval)) if isinstance(atom, core.Literal) else of[atom]
        )

    for eqn in jaxpr.eqns:
        for i, (var, key) in enumerate(zip(eqn.outvars, _keys(eqn), strict=True)):
            how = (
                (key[0], tuple(number(a) for a in key[1]))
                if key is not None
                else ("only", id(eqn), i)
            )
            of[var] = numbers.setdefault(how, len(numbers))
    first: dict[Any, int] = {}
    return tuple(first.setdefault(number(atom), i) for i, atom in enumerate(jaxpr.outvars))


def _keys(eqn: core.JaxprEqn) -> Iterator[tuple[Any, tuple[Atom, ...]] | None]:
    """For each output, what is done and to which values; None where that cannot be compared."""
    if eqn.effects:
        yield from (None for _ in eqn.outvars)
    elif eqn.primitive.name == "scan" and scan_counts(eqn)[1] == 0:
        yield from _stacked_keys(eqn)
    elif any(True for _ in core.jaxprs_in_params(eqn.params)) or any(
        isinstance(v, np.ndarray | jax.Array) for v in eqn.params.values()
    ):
        yield from (None for _ in eqn.outvars)
    else:
        params = str(sorted(eqn.params.items(), key=lambda item: item[0]))
        yield from (
            ((eqn.primitive.name, params, i), tuple(eqn.invars)) for i in range(len(eqn.outvars))
        )


def _stacked_keys(eqn: core.JaxprEqn) -> Iterator[tuple[Any, tuple[Atom, ...]] | None]:
    """Without a carry each trip is by itself: in whichever order they come, equal bodies stack
    equal outputs.
    """
    body = eqn.params["jaxpr"]
    consts, _ = scan_counts(eqn)
    for atom in body.jaxpr.outvars:
        if body.consts or isinstance(atom, core.Literal):
            yield None
            continue
        alone, reads = drop_dead(body.jaxpr.replace(outvars=[atom]))
        used = [i for i, read in enumerate(reads) if read]
        text = str(alone.replace(invars=[alone.invars[i] for i in used]))
        yield (
            ("scan", eqn.params["length"], tuple(i < consts for i in used), text),
            tuple(eqn.invars[i] for i in used),
        )


def keep_first(jaxpr: core.Jaxpr, start: int, same: tuple[int, ...]) -> core.Jaxpr:
    """The jaxpr whose inputs from `start` on are outputs of another: of equal ones it takes and
    reads only the first.
    """
    mine = jaxpr.invars[start : start + len(same)]
    env = {mine[i]: mine[first] for i, first in enumerate(same) if i != first}
    return renamed(jaxpr.replace(invars=[v for v in jaxpr.invars if v not in env]), env)
