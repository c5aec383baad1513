"""The first part of a cut of a flat jaxpr: the equations that some outputs need, or that some
inputs determine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jax.extend import core

from .equations import scan_counts, variables


@dataclass(frozen=True)
class Split:
    """A scan that is cut in two: how its body is cut, and which of its outputs the first part
    makes.
    """

    body: Assignment
    first: tuple[bool, ...]


# One entry an equation: True = first part, False = second part, Split = some of each.
Assignment: TypeAlias = "tuple[bool | Split, ...]"


def needed_for(jaxpr: core.Jaxpr, outputs: Sequence[bool]) -> Assignment:
    """First = what the marked outputs need (a backward slice), through the bodies of scans."""
    return _backward(jaxpr, outputs)[0]


def known_from(jaxpr: core.Jaxpr, inputs: Sequence[bool]) -> Assignment:
    """First = what depends on the marked inputs alone (a forward slice), through the bodies of
    scans.
    """
    return _forward(jaxpr, inputs)[0]


def _backward(jaxpr: core.Jaxpr, outputs: Sequence[bool]) -> tuple[Assignment, list[bool]]:
    """The assignment, and which inputs the first part reads."""
    needed = {*variables(v for v, wanted in zip(jaxpr.outvars, outputs, strict=True) if wanted)}
    found: list[bool | Split] = []
    for eqn in reversed(jaxpr.eqns):
        wanted = [v in needed for v in eqn.outvars]
        choice: bool | Split = any(wanted) or bool(eqn.effects)
        reads = [choice is True] * len(eqn.invars)
        if choice and eqn.primitive.name == "scan":
            choice, reads = _backward_scan(eqn, wanted)
        needed.update(variables(v for v, read in zip(eqn.invars, reads, strict=True) if read))
        found.append(choice)
    return tuple(reversed(found)), [v in needed for v in jaxpr.invars]


def _backward_scan(eqn: core.JaxprEqn, wanted: Sequence[bool]) -> tuple[bool | Split, list[bool]]:
    """Grow the set of needed carries until the body asks for no more."""
    consts, carries = scan_counts(eqn)
    body = eqn.params["jaxpr"].jaxpr
    carry, ys = list(wanted[:carries]), list(wanted[carries:])
    while True:
        choice, reads = _backward(body, [*carry, *ys])
        grown = [a or b for a, b in zip(carry, reads[consts : consts + carries], strict=True)]
        if grown == carry:
            break
        carry = grown
    if all(carry) and all(ys) and all(c is True for c in choice):
        return True, [True] * len(eqn.invars)
    # A carry's initial value is read by the part that owns the carry.
    reads = [*reads[:consts], *carry, *reads[consts + carries :]]
    # What the first part makes in each trip anyway it also stacks: the second would only copy it.
    made = _made_first(body, choice) | {
        v for v, c in zip(body.invars[consts : consts + carries], carry, strict=True) if c
    }
    ys = [
        y or (isinstance(v, core.Var) and v in made)
        for y, v in zip(ys, body.outvars[carries:], strict=True)
    ]
    return Split(choice, (*carry, *ys)), reads


def _made_first(jaxpr: core.Jaxpr, choices: Assignment) -> set[core.Var]:
    """The variables that the first part defines."""
    made: set[core.Var] = set()
    for eqn, choice in zip(jaxpr.eqns, choices, strict=True):
        if isinstance(choice, Split):
            made.update(v for v, f in zip(eqn.outvars, choice.first, strict=True) if f)
        elif choice:
            made.update(eqn.outvars)
    return made


def made_from(jaxpr: core.Jaxpr, inputs: Sequence[bool]) -> set[core.Var]:
    """The values that the marked inputs alone determine, the inputs among them."""
    return _made_first(jaxpr, _forward(jaxpr, inputs)[0]) | {
        v for v, k in zip(jaxpr.invars, inputs, strict=True) if k
    }


def _forward(jaxpr: core.Jaxpr, inputs: Sequence[bool]) -> tuple[Assignment, list[bool]]:
    """The assignment, and which outputs are known."""
    known = {v for v, k in zip(jaxpr.invars, inputs, strict=True) if k}
    found: list[bool | Split] = []
    for eqn in jaxpr.eqns:
        given = [isinstance(v, core.Literal) or v in known for v in eqn.invars]
        choice: bool | Split = all(given) and not eqn.effects
        outs = [choice is True] * len(eqn.outvars)
        if not choice and eqn.primitive.name == "scan" and not eqn.effects:
            choice, outs = _forward_scan(eqn, given)
        known.update(v for v, k in zip(eqn.outvars, outs, strict=True) if k)
        found.append(choice)
    return tuple(found), [isinstance(v, core.Literal) or v in known for v in jaxpr.outvars]


def _forward_scan(eqn: core.JaxprEqn, given: Sequence[bool]) -> tuple[bool | Split, list[bool]]:
    """Shrink the set of known carries until the body keeps them known."""
    consts, carries = scan_counts(eqn)
    body = eqn.params["jaxpr"].jaxpr
    carry = list(given[consts : consts + carries])
    while True:
        choice, outs = _forward(body, [*given[:consts], *carry, *given[consts + carries :]])
        shrunk = [a and b for a, b in zip(carry, outs[:carries], strict=True)]
        if shrunk == carry:
            break
        carry = shrunk
    if not any(c is not False for c in choice):
        return False, [False] * len(eqn.outvars)
    known = [*carry, *outs[carries:]]
    return Split(choice, tuple(known)), known
