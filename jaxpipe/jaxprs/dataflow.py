"""What depends on what in a function: for each value the inputs that it is made of, and the results
to which it matters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import count
from operator import or_

from jax.extend import core

from .equations import Atom, ClosedJaxpr
from .flat import flatten

# parameters of equations that say where numbers are
_LAYOUT = frozenset({"shape", "sharding", "broadcast_dimensions"})
DRAWS = "random_bits"  # the equation that makes random numbers of a key


def inputs_of(closed: ClosedJaxpr) -> list[int]:
    """For each result of a function, the inputs on which it depends: a bit each."""
    graph = Dataflow(closed)
    made_of = graph.made_of(graph.inputs)
    return [made_of[out] for out in graph.outs]


def any_of(bits: Mapping[int, int], values: Sequence[int]) -> int:
    """The bits of any of these values."""
    return reduce(or_, (bits[value] for value in values), 0)


class Dataflow:
    """The equations of a function, with those of both branches of conditions: what each does, the
    numbers of the values that it reads, and of those that it makes.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.nodes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self._new = count().__next__
        self.inputs = [self._new() for _ in closed.jaxpr.invars]
        self.outs = self._add(closed, self.inputs)

    def _add(self, closed: ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
        """Append the equations of a jaxpr; the numbers of its results."""
        flat = flatten(closed).jaxpr
        known: dict[core.Var, int] = defaultdict(self._new, zip(flat.invars, inputs, strict=True))

        def numbers(atoms: Sequence[Atom]) -> tuple[int, ...]:
            return tuple(self._new() if isinstance(a, core.Literal) else known[a] for a in atoms)

        for eqn in flat.eqns:
            reads, writes = numbers(eqn.invars), numbers(eqn.outvars)
            if eqn.primitive.name != "cond":
                self.nodes.append((_text(eqn), reads, writes))
                continue
            branches = [self._add(branch, reads[1:]) for branch in eqn.params["branches"]]
            for out, *values in zip(writes, *branches, strict=True):
                self.nodes.append(("cond", (reads[0], *values), (out,)))
        return [*numbers(flat.outvars)]

    def made_of(self, *inputs: Sequence[int]) -> dict[int, int]:
        """By value, those of the inputs on which it depends: a bit each, by their places."""
        found = defaultdict(int, {value: 1 << i for each in inputs for i, value in enumerate(each)})
        for _, reads, writes in self.nodes:
            found.update(dict.fromkeys(writes, any_of(found, reads)))
        return found

    def matters_to(self, count: int) -> dict[int, int]:
        """By value, those of the first `count` results that depend on it, in this call or in a
        later one, which is given the other results in place of the inputs of these numbers.
        """
        found: dict[int, int] = defaultdict(int)
        before: dict[int, int] | None = None
        while found != before:
            before = dict(found)
            for i, out in enumerate(self.outs):
                found[out] |= 1 << i if i < count else found[self.inputs[i]]
            for _, reads, writes in reversed(self.nodes):
                for value in reads:
                    found[value] |= any_of(found, writes)
        return found


def _text(eqn: core.JaxprEqn) -> str:
    """The text of an equation, with shapes where it does not act on each number by itself; "" where
    it only repeats numbers.
    """
    if eqn.primitive.name == "broadcast_in_dim":
        return ""
    literals = [str(atom.val) for atom in eqn.invars if isinstance(atom, core.Literal)]
    shapes = [getattr(atom.aval, "shape", ()) for atom in (*eqn.invars, *eqn.outvars)]
    shapes = [shape for shape in shapes if shape]
    params = [(key, str(value)) for key, value in sorted(eqn.params.items()) if key not in _LAYOUT]
    acts = eqn.primitive.name == DRAWS or any("ax" in key or "dim" in key for key, _ in params)
    by_number = len(set(shapes)) < 2 and not acts
    return f"{eqn.primitive.name} {literals} {params} {'' if by_number else shapes}"
