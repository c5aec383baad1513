"""Cut a flat jaxpr in two programs: the first runs early, and the values that cross to the second
are the fewest bytes.

The first part has the equations that some outputs need, or that some inputs determine.  Of outputs
that are computed in the same way one is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import jax
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from .equations import (
    Atom,
    NewVar,
    Pairs,
    Scan,
    every_equation,
    reads,
    renamed,
    scan_counts,
    stacked_aval,
    variables,
    with_equations,
)
from .min_cut import cheapest


@dataclass(frozen=True)
class Split:
    """A scan that is cut in two: how its body is cut, and which of its outputs the first part
    makes.
    """

    body: Assignment
    first: tuple[bool, ...]


# One entry an equation: True = first part, False = second part, Split = some of each.
Assignment: TypeAlias = "tuple[bool | Split, ...]"
# With the variables that the first part has.
Slice: TypeAlias = "tuple[Assignment, set[core.Var]]"


def needed_for(jaxpr: core.Jaxpr, outputs: Sequence[bool]) -> Slice:
    """First = the equations that the marked outputs need (a backward slice), through the bodies of
    scans; and the variables that the first part has.
    """
    needed = set(variables(_marked(jaxpr.outvars, outputs)))
    choices: list[bool | Split] = []
    for eqn in reversed(jaxpr.eqns):
        wanted = [v in needed for v in eqn.outvars]
        choice: bool | Split = any(wanted) or bool(eqn.effects)
        reads = [choice is True] * len(eqn.invars)
        if choice and eqn.primitive.name == "scan":
            choice, reads = _needed_in_scan(eqn, wanted)
        needed.update(variables(_marked(eqn.invars, reads)), _made(eqn, choice))
        choices.append(choice)
    return tuple(reversed(choices)), needed


def _needed_in_scan(eqn: core.JaxprEqn, wanted: Sequence[bool]) -> tuple[Split, list[bool]]:
    """Grow the set of needed carries until the body asks for no more; and which operands the first
    part reads.
    """
    consts, carries = scan_counts(eqn)
    body, head = eqn.params["jaxpr"].jaxpr, consts + carries
    carry, ys = list(wanted[:carries]), list(wanted[carries:])
    while True:
        choice, needed = needed_for(body, [*carry, *ys])
        reads = [v in needed for v in body.invars]
        grown = [a or b for a, b in zip(carry, reads[consts:head], strict=True)]
        if grown == carry:
            break
        carry = grown
    # A carry's initial value is read by the part that owns the carry.
    reads = [*reads[:consts], *carry, *reads[head:]]
    # The first part also stacks the outputs that it computes in each trip anyway: the second part
    # would only copy them.
    first = {*needed.difference(body.invars), *_marked(body.invars[consts:head], carry)}
    stacked = zip(ys, body.outvars[carries:], strict=True)
    ys = [y or (isinstance(v, core.Var) and v in first) for y, v in stacked]
    return Split(choice, (*carry, *ys)), reads


def _made(eqn: core.JaxprEqn, choice: bool | Split) -> list[core.Var]:
    """The results of an equation that the first part makes."""
    firsts = choice.first if isinstance(choice, Split) else [choice] * len(eqn.outvars)
    return _marked(eqn.outvars, firsts)


def known_from(jaxpr: core.Jaxpr, inputs: Sequence[bool]) -> Slice:
    """First = the equations that read the marked inputs alone (a forward slice), through the bodies
    of scans; and the values that these inputs determine, the inputs among them.
    """
    known = set(_marked(jaxpr.invars, inputs))
    choices: list[bool | Split] = []
    for eqn in jaxpr.eqns:
        arguments = _known(eqn.invars, known)
        choice: bool | Split = all(arguments) and not eqn.effects
        if not choice and eqn.primitive.name == "scan" and not eqn.effects:
            choice = _known_in_scan(eqn, arguments)
        known.update(_made(eqn, choice))
        choices.append(choice)
    return tuple(choices), known


def _known(atoms: Sequence[Atom], known: Collection[core.Var]) -> list[bool]:
    return [isinstance(v, core.Literal) or v in known for v in atoms]


def _known_in_scan(eqn: core.JaxprEqn, inputs: Sequence[bool]) -> bool | Split:
    """Shrink the set of known carries until the body keeps them known."""
    consts, carries = scan_counts(eqn)
    body, head = eqn.params["jaxpr"].jaxpr, consts + carries
    carry = inputs[consts:head]
    while True:
        choice, known = known_from(body, [*inputs[:consts], *carry, *inputs[head:]])
        outs = _known(body.outvars, known)
        shrunk = [a and b for a, b in zip(carry, outs[:carries], strict=True)]
        if shrunk == carry:
            break
        carry = shrunk
    is_cut = any(c is not False for c in choice)
    return is_cut and Split(choice, (*carry, *outs[carries:]))


def cut(
    jaxpr: core.Jaxpr,
    assignment: Assignment,
    *,
    outputs: Sequence[bool],
    repeat: Callable[[core.JaxprEqn], bool],
    early: Callable[[core.JaxprEqn], bool] = lambda eqn: False,
    late: Collection[core.Var] = (),
    hidden: Collection[core.Var] = (),
    prices: Mapping[core.Var, float] = MappingProxyType({}),
    at: int | None = None,
) -> tuple[core.Jaxpr, core.Jaxpr]:
    """Cut a flat jaxpr (no constants) by `assignment`: `first(*inputs) -> (*first_outputs,
    *crossing)` and `second(*inputs, *crossing) -> second_outputs`; with `at`, the crossing comes
    after so many inputs.

    `outputs` marks what the first part returns, the rest the second does.  The crossing is the
    smallest from which equations that may be repeated give the rest (`cheapest`).  `early` marks
    equations of the second part that the first may do too, if it has what they read.  Of the
    inputs, only the second part has those in `late`, and only the first part those in `hidden`.
    Inputs with a price weigh that times their bytes where the second part reads them; others weigh
    nothing.
    """
    assert not jaxpr.constvars, "constants must be inputs"
    first: list[core.JaxprEqn] = []
    second: list[core.JaxprEqn] = []
    newvar, late = core.gensym(), set(late)
    for eqn, choice in zip(jaxpr.eqns, assignment, strict=True):
        if isinstance(choice, Split):
            halve = partial(cut, repeat=repeat, early=early)
            halves = _scan_halves(eqn, choice, late, newvar, halve)
            first += halves[0]
            second += halves[1]
            late.update(_marked(eqn.outvars, [not f for f in choice.first]))
        elif choice or (early(eqn) and late.isdisjoint(variables(eqn.invars))):
            first.append(eqn)
        else:
            second.append(eqn)
            late.update(eqn.outvars)
    first_outs = _marked(jaxpr.outvars, outputs)
    second_outs = _marked(jaxpr.outvars, [not f for f in outputs])
    from_first = {*hidden, *(v for e in first for v in e.outvars)}
    kept = {*from_first, *prices}
    used = variables([*(v for e in second for v in e.invars), *second_outs])
    needed = [v for v in used if v in kept]
    stored, again = cheapest(needed, first, lambda v: v not in kept, repeat=repeat, prices=prices)
    crossing = [v for v in stored if v in from_first]
    # Recomputing can leave equations in the first part that nothing needs any more.
    before = with_equations(jaxpr, first, jaxpr.invars, [*first_outs, *crossing])
    at = len(jaxpr.invars) if at is None else at
    inputs = [*jaxpr.invars[:at], *crossing, *jaxpr.invars[at:]]
    after = with_equations(jaxpr, [*again, *second], inputs, second_outs)
    return drop_dead(before), drop_dead(after)


def _scan_halves(
    eqn: core.JaxprEqn,
    choice: Split,
    late: Collection[core.Var],
    newvar: NewVar,
    halve: Callable[..., tuple[core.Jaxpr, core.Jaxpr]],
) -> tuple[list[core.JaxprEqn], list[core.JaxprEqn]]:
    """Cut a scan: the first one stacks what crosses in each trip, the second one scans over that.

    Each is a list of one scan, or of none that has no outputs.
    """
    scan, others = Scan.of(eqn), tuple(not f for f in choice.first)
    carry = [v for _, v in scan.carry]
    body = eqn.params["jaxpr"].jaxpr
    operands = zip(eqn.invars, body.invars, strict=True)
    before, after = halve(
        body,
        choice.body,
        outputs=choice.first,
        late=[v for a, v in operands if isinstance(a, core.Var) and a in late]
        + _marked(carry, others[: len(carry)]),
        hidden=_marked(carry, choice.first[: len(carry)]),
    )
    # A value that crosses in each trip and is an output of the scan too is stacked only once.
    stacked = {
        v: o
        for v, o in _marked(scan.ys, choice.first[len(carry) :])
        if isinstance(v, core.Var) and not isinstance(o, core.DropVar)
    }
    crossing = variables(before.outvars[sum(choice.first) :])
    new = [v for v in crossing if v not in stacked]
    stacked |= {v: newvar(stacked_aval(v, eqn)) for v in new}
    first, second = [], []
    if any(choice.first) or new:
        ys = [(v, stacked[v]) for v in new]
        first = [_part(scan, before.eqns, choice.first, ys=ys)]
    if any(others):
        inner = after.invars[len(body.invars) :]
        xs = [(stacked[v], x) for v, x in zip(crossing, inner, strict=True)]
        second = [_part(scan, after.eqns, others, xs=xs)]
    return first, second


def drop_dead(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The jaxpr without equations that no output needs, also in scans."""
    return dce_jaxpr(jaxpr, True, instantiate=True)[0]


def _part(
    scan: Scan,
    eqns: Sequence[core.JaxprEqn],
    mine: Sequence[bool],
    *,
    xs: Pairs = (),
    ys: Pairs = (),
) -> core.JaxprEqn:
    """A scan of these equations that makes the marked outputs, and more `ys`.

    It has those operands that it reads, its own carries, and more `xs`.
    """
    carries = len(scan.carry)
    carry_out = _marked(scan.carry_out, mine[:carries])
    ys = [*_marked(scan.ys, mine[carries:]), *ys]
    used = set(variables([v for e in eqns for v in e.invars] + [v for v, _ in [*carry_out, *ys]]))
    return replace(
        scan,
        eqns=eqns,
        consts=[(a, v) for a, v in scan.consts if v in used],
        carry=_marked(scan.carry, mine[:carries]),
        xs=[*((a, v) for a, v in scan.xs if v in used), *xs],
        carry_out=carry_out,
        ys=ys,
    ).equation()


def _marked[T](values: Iterable[T], marks: Sequence[bool]) -> list[T]:
    return [value for value, marked in zip(values, marks, strict=True) if marked]


def equal_outputs(jaxpr: core.Jaxpr) -> tuple[int, ...]:
    """For each output, the first output that is equal to it, itself or an earlier one.

    Outputs are equal whose equations have the same text.  A cast of stacked weights in a scan over
    layers, and the same cast in the reversed scan over them, are equal: without a carry each trip
    is by itself, in whichever order they come.
    """
    texts = [_text(jaxpr, atom) for atom in jaxpr.outvars]
    return tuple(i if text is None else texts.index(text) for i, text in enumerate(texts))


def _text(jaxpr: core.Jaxpr, atom: Atom) -> str | None:
    """How a value is made, and from which inputs; None where the text does not have it all."""
    alone = drop_dead(jaxpr.replace(outvars=[atom]))
    used = reads(alone)
    eqns = [_canonical(eqn) if eqn.primitive.name == "scan" else eqn for eqn in alone.eqns]
    inner = list(every_equation(alone))
    values = [value for eqn in inner for value in eqn.params.values()]
    values += [a.val for eqn in inner for a in eqn.invars if isinstance(a, core.Literal)]
    has_arrays = any(isinstance(v, np.ndarray | jax.Array) and v.ndim for v in values)
    bodies = (body for eqn in inner for body in core.jaxprs_in_params(eqn.params))
    if alone.effects or has_arrays or any(body.constvars for body in bodies):
        return None
    read = _marked(range(len(used)), used)
    return f"{read} {alone.replace(eqns=eqns, invars=_marked(jaxpr.invars, used))}"


def _canonical(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """A scan whose parameters do not tell which of its operands were dropped."""
    eqn = Scan.of(eqn).equation()
    order = {} if scan_counts(eqn)[1] else {"reverse": False}
    return eqn.replace(params=eqn.params | order)


def keep_first(jaxpr: core.Jaxpr, start: int, same: tuple[int, ...]) -> core.Jaxpr:
    """The jaxpr whose inputs from `start` on are outputs of another: of equal ones it takes and
    reads only the first.
    """
    mine = jaxpr.invars[start : start + len(same)]
    env = {mine[i]: mine[first] for i, first in enumerate(same) if i != first}
    return renamed(jaxpr.replace(invars=[v for v in jaxpr.invars if v not in env]), env)
