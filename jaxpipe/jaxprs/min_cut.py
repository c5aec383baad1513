"""Choose what to keep for later: the fewest bytes from which the rest follows by elementwise
arithmetic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from .sizes import is_gather, is_layout, nbytes

# Arithmetic that a consumer's fusion does for less than a load from memory.  Nothing
# transcendental, no reduction, no matmul: what costs real work is kept, never done twice.
_ARITHMETIC = frozenset(
    {
        "abs",
        "add",
        "add_any",
        "and",
        "clamp",
        "convert_element_type",
        "copy",
        "div",
        "eq",
        "ge",
        "gt",
        "integer_pow",
        "iota",
        "le",
        "lt",
    }
    | {
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "or",
        "select_n",
        "sign",
        "square",
        "stop_gradient",
        "sub",
    }
)


def is_arithmetic(eqn: core.JaxprEqn) -> bool:
    """True for elementwise arithmetic and layout changes."""
    return (
        (is_layout(eqn) or eqn.primitive.name in _ARITHMETIC)
        and not eqn.effects
        and len(eqn.outvars) == 1
    )


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
    recompute: Callable[[core.JaxprEqn], bool] = is_arithmetic,
) -> Keep:
    """A minimum cut between what must be computed early and what is needed late; every value weighs
    its bytes.

    The same question as min-cut rematerialisation in torch's AOTAutograd
    (`min_cut_rematerialization_partition`). Of equally small choices it takes the one nearest to
    what is needed, which computes the least again.
    """
    needed = [v for v in dict.fromkeys(needed) if not at_hand(v)]
    maker = {v: e for e in eqns for v in e.outvars}
    graph = _Flow()
    seen: set[core.Var] = set()
    todo = list(needed)
    for var in needed:
        graph.edge(_out(var), _SINK, None)
    while todo:
        var = todo.pop()
        if var in seen or at_hand(var):
            continue
        seen.add(var)
        eqn = maker.get(var)
        graph.edge(_in(var), _out(var), weight(var, eqn))
        if eqn is None or not recompute(eqn):
            graph.edge(_SOURCE, _in(var), None)
            continue
        for operand in eqn.invars:
            if isinstance(operand, core.Var) and not at_hand(operand):
                graph.edge(_out(operand), _in(var), None)
                todo.append(operand)
    late = graph.sink_side()
    stored = {v for v in seen if _out(v) in late and _in(v) not in late}
    again = _needed_again(needed, stored, maker, at_hand)
    return Keep(
        tuple(v for v in dict.fromkeys(_ordered(stored, eqns))),
        tuple(e for e in eqns if id(e) in again),
    )


def weight(var: core.Var, maker: core.JaxprEqn | None) -> int:
    """What keeping a value costs.

    Of a gathered value a device holds more than of what it is gathered from; how much more is not
    known here.
    """
    return max(1, nbytes(var.aval)) * (2 if maker is not None and is_gather(maker) else 1)


def _needed_again(
    needed: Sequence[core.Var],
    stored: set[core.Var],
    maker: dict[core.Var, core.JaxprEqn],
    at_hand: Callable[[core.Var], bool],
) -> set[int]:
    """Identities of the equations to run again."""
    again: set[int] = set()
    todo = [v for v in needed if v not in stored]
    while todo:
        var = todo.pop()
        if var in stored or at_hand(var):
            continue
        eqn = maker[var]
        if id(eqn) in again:
            continue
        again.add(id(eqn))
        todo.extend(v for v in eqn.invars if isinstance(v, core.Var))
    return again


def _ordered(stored: set[core.Var], eqns: Sequence[core.JaxprEqn]) -> list[core.Var]:
    """Inputs first, then values in the order in which they are made."""
    made = [v for e in eqns for v in e.outvars if v in stored]
    return [*sorted(stored - set(made), key=str), *made]


_SOURCE, _SINK = ("source",), ("sink",)


def _in(var: core.Var) -> tuple[Any, ...]:
    return ("in", id(var))


def _out(var: core.Var) -> tuple[Any, ...]:
    return ("out", id(var))


class _Flow:
    """Maximum flow by shortest augmenting paths (Edmonds and Karp 1972); None is an unlimited
    capacity.
    """

    def __init__(self) -> None:
        self._capacity: dict[Any, dict[Any, float]] = {_SOURCE: {}, _SINK: {}}

    def edge(self, a: Any, b: Any, capacity: int | None) -> None:
        self._capacity.setdefault(a, {})[b] = float("inf") if capacity is None else float(capacity)
        self._capacity.setdefault(b, {}).setdefault(a, 0.0)

    def sink_side(self) -> set[Any]:
        """Nodes that can still reach the sink when the flow is greatest."""
        while (path := self._path()) is not None:
            amount = min(self._capacity[a][b] for a, b in path)
            for a, b in path:
                self._capacity[a][b] -= amount
                self._capacity[b][a] += amount
        reached, todo = {_SINK}, deque([_SINK])
        while todo:
            node = todo.popleft()
            for other in self._capacity[node]:
                if other not in reached and self._capacity[other].get(node, 0.0) > 0:
                    reached.add(other)
                    todo.append(other)
        return reached

    def _path(self) -> list[tuple[Any, Any]] | None:
        parent: dict[Any, Any] = {_SOURCE: None}
        todo = deque([_SOURCE])
        while todo:
            node = todo.popleft()
            for other, left in self._capacity[node].items():
                if left > 0 and other not in parent:
                    parent[other] = node
                    todo.append(other)
        if _SINK not in parent:
            return None
        path, node = [], _SINK
        while parent[node] is not None:
            path.append((parent[node], node))
            node = parent[node]
        return path
