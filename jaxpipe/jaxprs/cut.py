"""Cut a flat jaxpr in two programs: the first runs early, and the values that cross to the second
are the fewest bytes.  Values that are cheap are made again, also in the bodies of scans.

The first part has the equations that some outputs need, or that some inputs determine.  Of outputs
that are computed in the same way one is enough.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from .equations import (
    Atom,
    NewVar,
    Pairs,
    Scan,
    closed_jaxpr,
    copied,
    every_equation,
    is_fp8,
    is_gather,
    is_layout,
    nbytes,
    producers,
    reads,
    renamed,
    scan_counts,
    stacked_aval,
    variables,
    with_equations,
)

# Arithmetic that a consumer's fusion does for less than a load from memory.  Reductions and matmuls
# are not among them: their results are kept, and they run once.
_SUMS = {"add", "add_any", "sub", "mul", "div", "square", "integer_pow", "one_minus_square"}
_SIGNS = {"abs", "neg", "sign"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_CHOICES = {"max", "min", "clamp", "select_n", "and", "or", "not"}
_COPIES = {"copy", "convert_element_type", "iota", "stop_gradient"}
_ARITHMETIC = _SUMS | _SIGNS | _COMPARISONS | _CHOICES | _COPIES
# Transcendental functions are for less only on devices with fast ones.
_POWERS = {"exp", "exp2", "expm1", "log", "log1p", "pow", "sqrt", "rsqrt"}
_FUNCTIONS = _POWERS | {"logistic", "tanh", "erf", "sin", "cos"}


def is_arithmetic(eqn: core.JaxprEqn) -> bool:
    """True for elementwise arithmetic and layout changes."""
    return (
        (is_layout(eqn) or eqn.primitive.name in _ARITHMETIC)
        and not eqn.effects
        and len(eqn.outvars) == 1
    )


def is_elementwise(eqn: core.JaxprEqn) -> bool:
    """True for elementwise arithmetic, layout changes, and transcendental functions."""
    return is_arithmetic(eqn) or eqn.primitive.name in _FUNCTIONS


def is_light(eqn: core.JaxprEqn) -> bool:
    """True for arithmetic, and for sums and maxima, which are smaller than what they are of.

    The greatest cotangent goes into a scale of FP8: from it W needs the cotangent in one byte.
    """
    return is_arithmetic(eqn) or eqn.primitive.name in ("reduce_sum", "reduce_max")


def is_view(eqn: core.JaxprEqn) -> bool:
    """True for layout changes, for arithmetic that makes a value larger, and for arithmetic of
    whole numbers and masks: of results that are computed once a step, all that is made again in
    each microbatch.

    Positions in the trips of a loop would take room for each trip.  A product of FP8 arrays
    wants one order of their dims (`with_fp8_rows`), so a transpose of one is no layout change, but
    a copy.
    """
    result: Any = eqn.outvars[0].aval
    if not is_arithmetic(eqn) or is_layout(eqn):
        return is_layout(eqn) and not (eqn.primitive.name == "transpose" and is_fp8(result))
    is_larger = sum(nbytes(v.aval) for v in variables(eqn.invars)) < nbytes(result)
    return is_larger or not jnp.issubdtype(result.dtype, jnp.inexact)


def numbers_of(eqns: Sequence[core.JaxprEqn]) -> dict[core.Var, core.JaxprEqn]:
    """Values that literals alone determine by elementwise arithmetic, such as masks made of iotas,
    with the equations that make them, in order.
    """
    found: dict[core.Var, core.JaxprEqn] = {}
    for eqn in eqns:
        if is_arithmetic(eqn) and all(v in found for v in variables(eqn.invars)):
            found[eqn.outvars[0]] = eqn
    return found


def cheapest(
    needed: Iterable[core.Var],
    eqns: Sequence[core.JaxprEqn],
    at_hand: Callable[[core.Var], bool],
    *,
    repeat: Callable[[core.JaxprEqn], bool] = is_arithmetic,
    prices: Mapping[core.Var, float] = MappingProxyType({}),
) -> tuple[list[core.Var], list[core.JaxprEqn]]:
    """The values to keep, and the equations that compute the needed values, in order, from these
    and the values at hand: a minimum cut between values that must be computed early and values that
    are needed late.  Every value weighs its bytes, times its price where it has one.

    Values of numbers alone (an iota, a mask of zeros) are computed again, and so are results of
    equations that `repeat` takes.

    Source: min-cut rematerialisation in torch's AOTAutograd
    (`min_cut_rematerialization_partition`) answers the same question.  Of equally small choices
    this takes the one nearest to the needed values, which computes the least again.
    """
    needed = [v for v in dict.fromkeys(needed) if not at_hand(v)]
    maker = {v: e for e in eqns for v in e.outvars}
    numbers = numbers_of(eqns)
    # A value is two nodes, (value, False) and (value, True), with its weight between them.
    capacity: _Graph = defaultdict(lambda: defaultdict(float))
    seen: set[core.Var] = set()
    todo = list(needed)
    for var in needed:
        capacity[var, True][_SINK] = inf
    while todo:
        var = todo.pop()
        if var in seen or at_hand(var):
            continue
        seen.add(var)
        eqn = maker.get(var)
        # Of equal choices an input is the better one: it is in memory, and need not be written.
        capacity[var, False][var, True] = weight(var, eqn) * prices.get(var, 1.0) - (eqn is None)
        if eqn is None or not (repeat(eqn) or var in numbers):
            capacity[_SOURCE][var, False] = inf
            continue
        operands = [v for v in variables(eqn.invars) if not at_hand(v)]
        for operand in operands:
            capacity[operand, True][var, False] = inf
        todo += operands
    late = _sink_side(capacity)
    stored = {v for v in seen if (v, True) in late and (v, False) not in late}
    # Inputs first, in the order in which they are read, then values in that in which they are made:
    # processes that run one program agree on it.
    read = dict.fromkeys([*(v for e in eqns for v in variables(e.invars)), *needed])
    inputs = [v for v in read if v in stored and v not in maker]
    computed = [v for e in eqns for v in e.outvars if v in stored]
    again = producers(needed, eqns, lambda v: v in stored or at_hand(v))
    return [*inputs, *computed], again


def weight(var: core.Var, maker: core.JaxprEqn | None) -> int:
    """The price of keeping a value: its bytes.

    A gathered value has twice the price: a device holds more of it than of the parts that it is
    gathered from, by a factor that is not known here.
    """
    return max(1, nbytes(var.aval)) * (2 if maker is not None and is_gather(maker) else 1)


_FlowNode: TypeAlias = "tuple[core.Var | None, bool]"
_Graph: TypeAlias = "defaultdict[_FlowNode, defaultdict[_FlowNode, float]]"
_SOURCE: _FlowNode = (None, False)
_SINK: _FlowNode = (None, True)


def _sink_side(capacity: _Graph) -> set[_FlowNode]:
    """Nodes that can still reach the sink when the flow is greatest: by shortest augmenting paths
    (Edmonds and Karp 1972).  The capacities become what the flow leaves.
    """
    for a, after in list(capacity.items()):
        for b in after:
            capacity[b][a] += 0.0  # the way back
    while True:
        # For each node that can reach the sink, the next one on a shortest path.
        following, todo = {_SINK: _SINK}, deque([_SINK])
        while todo:
            node = todo.popleft()
            for other in capacity[node]:
                if other not in following and capacity[other][node] > 0:
                    following[other] = node
                    todo.append(other)
        if _SOURCE not in following:
            return set(following)
        path = [_SOURCE]
        while path[-1] != _SINK:
            path.append(following[path[-1]])
        amount = min(capacity[a][b] for a, b in pairwise(path))
        for a, b in pairwise(path):
            capacity[a][b] -= amount
            capacity[b][a] += amount


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


def _needed_in_scan(eqn: core.JaxprEqn, wanted: Sequence[bool]) -> tuple[bool | Split, list[bool]]:
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
    if all(carry) and all(ys) and all(c is True for c in choice):
        return True, [True] * len(eqn.invars)
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
    repeat: Callable[[core.JaxprEqn], bool] = is_arithmetic,
    early: Callable[[core.JaxprEqn], bool] = lambda eqn: False,
    late: Collection[core.Var] = (),
    hidden: Collection[core.Var] = (),
    prices: Mapping[core.Var, float] = MappingProxyType({}),
) -> tuple[core.Jaxpr, core.Jaxpr]:
    """Cut a flat jaxpr (no constants) by `assignment`: `first(*inputs) -> (*first_outputs,
    *crossing)` and `second(*inputs, *crossing) -> second_outputs`.

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
            halves = _scan_halves(eqn, choice, late, newvar, repeat=repeat, early=early)
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
    after = with_equations(jaxpr, [*again, *second], [*jaxpr.invars, *crossing], second_outs)
    return drop_dead(before), drop_dead(after)


def _scan_halves(
    eqn: core.JaxprEqn,
    choice: Split,
    late: Collection[core.Var],
    newvar: NewVar,
    **rules: Any,
) -> tuple[list[core.JaxprEqn], list[core.JaxprEqn]]:
    """Cut a scan: the first one stacks what crosses in each trip, the second one scans over that.

    Each is a list of one scan, or of none that has no outputs.
    """
    scan, others = Scan.of(eqn), tuple(not f for f in choice.first)
    carry = [v for _, v in scan.carry]
    body = eqn.params["jaxpr"].jaxpr
    operands = zip(eqn.invars, body.invars, strict=True)
    before, after = cut(
        body,
        choice.body,
        outputs=choice.first,
        late=[v for a, v in operands if isinstance(a, core.Var) and a in late]
        + _marked(carry, others[: len(carry)]),
        hidden=_marked(carry, choice.first[: len(carry)]),
        **rules,
    )
    # A value that crosses in each trip and is an output of the scan too is stacked only once.
    stacked = {
        v: o
        for v, o in _marked(scan.ys, choice.first[len(carry) :])
        if isinstance(v, core.Var) and not isinstance(o, core.DropVar)
    }
    crossing = variables(before.outvars[sum(choice.first) :])
    new = [v for v in crossing if v not in stacked]
    stacked |= {v: newvar(stacked_aval(v.aval, eqn.params["length"])) for v in new}
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


def _marked(values: Iterable[Any], marks: Sequence[bool]) -> list[Any]:
    return [value for value, marked in zip(values, marks, strict=True) if marked]


def equal_outputs(jaxpr: core.Jaxpr) -> tuple[int, ...]:
    """For each output, the first output that is equal to it, itself or an earlier one.

    Outputs are equal whose equations have the same text.  A cast of stacked weights in a scan over
    layers, and the same cast in the reversed scan over them, are equal: without a carry each trip
    is by itself, in whichever order they come.
    """
    texts = [_text(jaxpr, atom) for atom in jaxpr.outvars]
    return tuple(i if text is None else texts.index(text) for i, text in enumerate(texts))


def _text(jaxpr: core.Jaxpr, atom: Any) -> str | None:
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


def into_scans(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Make values of numbers alone inside the bodies of scans that read them.

    As operands of a scan they would be whole arrays in memory.  JAX moves them out of scans when it
    differentiates.
    """
    numbers = numbers_of(jaxpr.eqns)
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            consts, carries = scan_counts(eqn)
            rows = variables(eqn.invars[consts + carries :])
            whole = {v: v for v in variables(eqn.invars[:consts]) if v in numbers and v not in rows}
            eqn = _remake(eqn, whole, list(numbers.values()), {}, {}, core.gensym())
            body = eqn.params["jaxpr"]
            inner = closed_jaxpr(into_scans(body.jaxpr), body.consts)
            eqn = eqn.replace(params=eqn.params | {"jaxpr": inner})
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def keep_fewer_residuals(
    jaxpr: core.Jaxpr,
    forward: Sequence[bool],
    *,
    repeat: Callable[[core.JaxprEqn], bool] = is_arithmetic,
) -> core.Jaxpr:
    """Rewrite each scan of the forward whose stacked outputs feed scans of the backward: these make
    again what equations give that `repeat` takes.

    The equations stay as many; `forward` marks those of the forward.
    """
    eqns = list(jaxpr.eqns)
    newvar = core.gensym()
    for index in _marked(range(len(eqns)), forward):
        if eqns[index].primitive.name != "scan":
            continue
        # Choose what this scan stacks, and change it and the scans that read its stacks.
        eqn = eqns[index]
        scan = Scan.of(eqn)
        readers = _readers(jaxpr.replace(eqns=eqns), forward, [o for _, o in scan.ys])
        ys = [(v, o) for v, o in scan.ys if isinstance(v, core.Var)]
        moved = {o: v for v, o in ys if readers.get(o)}
        fixed = {v: o for v, o in ys if o not in moved and not isinstance(o, core.DropVar)}
        # Inputs of the whole step, and what another output stacks anyway, cost the backward
        # nothing.
        consts, xs = (
            {v: a for a, v in pairs if isinstance(a, core.Literal) or a in jaxpr.invars}
            for pairs in (scan.consts, scan.xs)
        )
        at_hand = {**fixed, **xs, **consts}
        stored, again = cheapest(moved.values(), scan.eqns, at_hand.__contains__, repeat=repeat)
        if set(stored) == set(moved.values()):
            continue
        names = {v: o for o, v in moved.items() if v in stored}
        for v in stored:
            names.setdefault(v, newvar(stacked_aval(v.aval, eqn.params["length"])))
        kept = [(v, o) for v, o in scan.ys if o not in moved]
        eqns[index] = replace(scan, ys=[*kept, *names.items()]).equation()
        for position in sorted({p for o in moved for p in readers[o]}):
            eqns[position] = _remake(
                eqns[position], moved, again, consts, {**names, **fixed, **xs}, newvar
            )
    return jaxpr.replace(eqns=eqns)


def _readers(
    jaxpr: core.Jaxpr, forward: Sequence[bool], outvars: Sequence[Any]
) -> dict[Any, list[int]]:
    """The positions of the scans of the backward that scan each stacked output, where nothing else
    reads it.
    """
    found: dict[Any, list[int]] = {v: [] for v in outvars if v not in jaxpr.outvars}
    for i, eqn in enumerate(jaxpr.eqns):
        scans = eqn.primitive.name == "scan" and not forward[i]
        whole = sum(scan_counts(eqn)) if scans else len(eqn.invars)
        for v in variables(eqn.invars[:whole]):
            found.pop(v, None)
        for v in variables(eqn.invars[whole:]):
            if v in found:
                found[v].append(i)
    return found


def _remake(
    eqn: core.JaxprEqn,
    moved: Mapping[core.Var, core.Var],
    again: Sequence[core.JaxprEqn],
    consts: Mapping[core.Var, Atom],
    xs: Mapping[core.Var, Atom],
    newvar: NewVar,
) -> core.JaxprEqn:
    """A scan that makes the values of `moved` operands at the head of its body.

    The equations `again` make them from what these `consts` and `xs` of the scan give.
    """
    scan = Scan.of(eqn)
    operands = (*scan.consts, *scan.xs)
    values = {v: moved[a] for a, v in operands if isinstance(a, core.Var) and a in moved}
    if not values:
        return eqn
    head = producers(values.values(), again, lambda v: v in consts or v in xs)
    computed = {v for e in head for v in e.outvars}
    inputs = [v for e in head for v in variables(e.invars)]
    env = {
        v: newvar(v.aval) for v in dict.fromkeys([*inputs, *values.values()]) if v not in computed
    }
    extra_consts = [(consts[v], inner) for v, inner in env.items() if v in consts]
    extra_xs = [(xs[v], inner) for v, inner in env.items() if v not in consts]
    made = copied(head, env, newvar)
    body = renamed(eqn.params["jaxpr"].jaxpr, {v: env[value] for v, value in values.items()})
    scan = Scan.of(eqn.replace(params=eqn.params | {"jaxpr": closed_jaxpr(body)}))
    return replace(
        scan,
        eqns=[*made, *scan.eqns],
        consts=[*extra_consts, *((a, v) for a, v in scan.consts if v not in values)],
        xs=[*((a, v) for a, v in scan.xs if v not in values), *extra_xs],
    ).equation()
