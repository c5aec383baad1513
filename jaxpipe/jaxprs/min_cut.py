"""The values to keep between two parts of a jaxpr: the fewest bytes from which equations that are
cheap give the rest.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf
from types import MappingProxyType
from typing import TypeAlias

import jax.numpy as jnp
from jax.extend import core

from .equations import (
    COMPARISONS,
    is_fp8,
    is_gather,
    is_layout,
    nbytes,
    producers,
    shaped,
    variables,
)

# Arithmetic that a consumer's fusion does for less than a load from memory.  Reductions and matmuls
# are not among them: their results are kept, and they run once.
_SUMS = {"add", "add_any", "sub", "mul", "div", "square", "integer_pow", "one_minus_square"}
_SIGNS = {"abs", "neg", "sign"}
_CHOICES = {"max", "min", "clamp", "select_n", "and", "or", "not"}
_COPIES = {"copy", "convert_element_type", "iota", "stop_gradient"}
_ARITHMETIC = _SUMS | _SIGNS | COMPARISONS | _CHOICES | _COPIES
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
    result = shaped(eqn.outvars[0])
    if not is_arithmetic(eqn) or is_layout(eqn):
        return is_layout(eqn) and not (eqn.primitive.name == "transpose" and is_fp8(result))
    is_larger = sum(nbytes(shaped(v)) for v in variables(eqn.invars)) < nbytes(result)
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
    repeat: Callable[[core.JaxprEqn], bool],
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
    return max(1, nbytes(shaped(var))) * (2 if maker is not None and is_gather(maker) else 1)


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
