"""Choose the values to keep: the fewest bytes from which elementwise arithmetic gives the rest."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TypeAlias

from jax.extend import core

from .equations import grows, is_gather, is_inexact, is_layout, nbytes, producers, variables

# Arithmetic that a consumer's fusion does for less than a load from memory.  Transcendental
# functions, reductions and matmuls are not among them: their results are kept, and they run once.
_SUMS = {"add", "add_any", "sub", "mul", "div", "square", "integer_pow"}
_SIGNS = {"abs", "neg", "sign"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_CHOICES = {"max", "min", "clamp", "select_n", "and", "or", "not"}
_COPIES = {"copy", "convert_element_type", "iota", "stop_gradient"}
_ARITHMETIC = _SUMS | _SIGNS | _COMPARISONS | _CHOICES | _COPIES


def is_arithmetic(eqn: core.JaxprEqn) -> bool:
    """True for elementwise arithmetic and layout changes."""
    return (
        (is_layout(eqn) or eqn.primitive.name in _ARITHMETIC)
        and not eqn.effects
        and len(eqn.outvars) == 1
    )


def is_view(eqn: core.JaxprEqn) -> bool:
    """True for layout changes, for arithmetic that makes a value larger, and for arithmetic of
    whole numbers and masks: of results that are computed once a step, all that is made again in
    each microbatch.

    Positions in the trips of a loop would take room for each trip.
    """
    return is_layout(eqn) or (is_arithmetic(eqn) and (grows(eqn) or not is_inexact(eqn)))


def numbers_of(eqns: Sequence[core.JaxprEqn]) -> dict[core.Var, core.JaxprEqn]:
    """Values that literals alone determine by elementwise arithmetic, such as masks made of iotas,
    with the equations that make them, in order.
    """
    found: dict[core.Var, core.JaxprEqn] = {}
    for eqn in eqns:
        if is_arithmetic(eqn) and all(v in found for v in variables(eqn.invars)):
            found[eqn.outvars[0]] = eqn
    return found


@dataclass(frozen=True)
class Keep:
    """`stored` values are kept; `again` are the equations, in order, that make the needed values
    from them and what is at hand.
    """

    stored: tuple[core.Var, ...]
    again: tuple[core.JaxprEqn, ...]


def cheapest(
    needed: Iterable[core.Var],
    eqns: Sequence[core.JaxprEqn],
    at_hand: Callable[[core.Var], bool],
    *,
    repeat: Callable[[core.JaxprEqn], bool] = is_arithmetic,
) -> Keep:
    """A minimum cut between what must be computed early and what is needed late; every value weighs
    its bytes.

    What is made of numbers alone (an iota, a mask of zeros) is made again, and so are equations
    that `repeat` takes.

    Source: min-cut rematerialisation in torch's AOTAutograd
    (`min_cut_rematerialization_partition`) answers the same question.  Of equally small choices
    this takes the one nearest to the needed values, which computes the least again.
    """
    needed = [v for v in dict.fromkeys(needed) if not at_hand(v)]
    maker = {v: e for e in eqns for v in e.outvars}
    numbers = numbers_of(eqns)
    capacity: _Graph = defaultdict(lambda: defaultdict(float))
    seen: set[core.Var] = set()
    todo = list(needed)
    for var in needed:
        capacity[_out(var)][_SINK] = inf
    while todo:
        var = todo.pop()
        if var in seen or at_hand(var):
            continue
        seen.add(var)
        eqn = maker.get(var)
        # Of equal choices an input is the better one: it is in memory, and need not be written.
        capacity[_in(var)][_out(var)] = weight(var, eqn) - (eqn is None)
        if eqn is None or not (repeat(eqn) or var in numbers):
            capacity[_SOURCE][_in(var)] = inf
            continue
        operands = [v for v in variables(eqn.invars) if not at_hand(v)]
        for operand in operands:
            capacity[_out(operand)][_in(var)] = inf
        todo += operands
    late = _sink_side(capacity)
    stored = {v for v in seen if _out(v) in late and _in(v) not in late}
    # Inputs first, then values in the order in which they are made.
    computed = [v for e in eqns for v in e.outvars if v in stored]
    return Keep(
        (*sorted(stored - set(computed), key=str), *computed),
        tuple(producers(needed, eqns, lambda v: v in stored or at_hand(v))),
    )


def weight(var: core.Var, maker: core.JaxprEqn | None) -> int:
    """The price of keeping a value: its bytes.

    A gathered value has twice the price: a device holds more of it than of the parts that it is
    gathered from, by a factor that is not known here.
    """
    return max(1, nbytes(var.aval)) * (2 if maker is not None and is_gather(maker) else 1)


_Node: TypeAlias = "tuple[str, core.Var | None]"
_Graph: TypeAlias = "defaultdict[_Node, defaultdict[_Node, float]]"
_SOURCE: _Node = ("source", None)
_SINK: _Node = ("sink", None)


def _in(var: core.Var) -> _Node:
    return "in", var


def _out(var: core.Var) -> _Node:
    return "out", var


def _sink_side(capacity: _Graph) -> set[_Node]:
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
