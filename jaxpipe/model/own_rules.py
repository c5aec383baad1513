"""Optimizers on placed parameters: the state that they begin with, and whether they do with placed
parameters what they do with the model's own, whose paths, ranks and shapes are others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import count, product
from operator import or_
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from ..arrays import Params, PyTree, by_path, wider
from ..errors import PipelineError
from ..jaxprs.equations import flatten
from .partition import leaf_plans

# The texts of the equations that matter to one parameter alone, by path.
Rules: TypeAlias = "dict[str, tuple[str, ...]]"

# parameters of equations that say where numbers are
_LAYOUT = frozenset({"shape", "sharding", "broadcast_dimensions"})
# A parameter that is there only while an optimizer is traced to find its rules.  A wrapper that
# gives it the model's own arrays need not act then.
PROBE = "~"


def check_rules(
    optimizer: Any, placed: Mapping[str, PyTree], own: Mapping[str, PyTree], plans: PyTree
) -> None:
    """PipelineError for parameters of which the optimizer makes something else where they are
    placed; all are shapes, with the plans of the placed ones.

    A rule for each number does the same whatever the shape of an array is.  A rule for all
    parameters (clipping by the global norm) reads every number once.  So equations that matter to
    one parameter alone must be the same.
    """
    rules = rules_of(optimizer, placed, own)
    if rules is None:
        return
    shapes = {path: leaf.shape for path, leaf in by_path(dict(own)).items()}
    leaves = zip(by_path(dict(placed)).items(), leaf_plans(plans), strict=True)
    faults = {
        parameter.path: f"{parameter.path!r} of shape {shapes[parameter.path]} is stored in "
        f"{path!r} of shape {leaf.shape}, with "
        "which the optimizer does something else"
        for (path, leaf), plan in leaves
        for parameter in plan.parameters
        if rules[0][path] != rules[1][parameter.path]
    }
    PipelineError.refuse(
        "this optimizer has rules for paths, ranks, shapes or norms of single arrays, and "
        "placed arrays have others than the model's "
        "own; wrap such rules, with their masks and labels, as jaxpipe.per_layer(pipe, "
        "optimizer), or write "
        "pipe.init(..., as_placed=True) where they are meant for placed arrays",
        faults.values(),
    )


def rules_of(optimizer: Any, *trees: Mapping[str, PyTree]) -> list[Rules] | None:
    """The rules for each tree of shapes; None where the optimizer does not take these trees, as one
    whose mask is a tree of another form.
    """
    # With one parameter alone, a rule for all would look like a rule for it.
    second = {PROBE: jax.ShapeDtypeStruct((), jnp.float32)}
    for more, extra in product((second, {}), ({}, {"value": 0.0})):
        try:
            return [_rules_of(optimizer, {**tree, **more}, extra) for tree in trees]
        except Exception:
            # of the optimizer, which is the user's own: where it cannot be used at all, `init` says
            # so
            continue
    return None


def _rules_of(optimizer: Any, tree: Params, extra: dict[str, Any]) -> Rules:
    paths = list(by_path(tree))
    state = jax.eval_shape(optimizer.init, tree)
    closed, shapes = jax.make_jaxpr(
        lambda g, s, p: optimizer.update(g, s, p, **extra), return_shape=True
    )(tree, state, tree)
    if len(jax.tree.leaves(shapes[0])) != len(paths):
        raise ValueError("not an update for each parameter")
    numbers, nodes = count(), list[_Node]()
    inputs = [next(numbers) for _ in closed.jaxpr.invars]
    ends: dict[int, int] = {}  # by value, the results that it matters to, updates first: a bit each
    for i, out in enumerate(_graph(closed, inputs, nodes, numbers)):
        ends[out] = ends.get(out, 0) | 1 << i
    for node in reversed(nodes):
        for value in node.reads:
            ends[value] = ends.get(value, 0) | _any(ends, node.writes)
    # results that matter to updates, of this step or of a later one
    live = updates = (1 << len(paths)) - 1
    states, before = range(len(paths), len(inputs) - len(paths)), 0
    while live != before:
        before = live
        live |= sum(1 << k for k in states if ends.get(inputs[k], 0) & live)
    # by value, the parameters of which it reads the gradient, or themselves
    made_of: dict[int, int] = {}
    for i in range(len(paths)):
        made_of[inputs[i]] = made_of[inputs[i - len(paths)]] = 1 << i
    found: list[list[str]] = [[] for _ in paths]
    for node in nodes:
        origin, matters = _any(made_of, node.reads), _any(ends, node.writes) & live
        made_of.update(dict.fromkeys(node.writes, origin))
        about = matters & updates or origin
        if node.text and matters and about & origin and about.bit_count() == 1:
            found[about.bit_length() - 1].append(node.text)
    return dict(zip(paths, map(tuple, found), strict=True))


def init_as_updated(optimizer: Any, accumulate: Any) -> Callable[[PyTree], PyTree]:
    """`optimizer.init`, with the dtypes that an update leaves: moments of bfloat16 parameters have
    those of the gradients, for instance.

    `accumulate` is the least dtype of gradients; None: they have the parameters' own.
    """

    def gradient(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if accumulate is None else wider(leaf.dtype, accumulate)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    def init(params: PyTree) -> PyTree:
        state = optimizer.init(params)
        gradients = jax.tree.map(gradient, params)
        try:
            after: PyTree = jax.eval_shape(optimizer.update, gradients, state, params)[1]
        except TypeError:  # it wants more than gradients (the loss, for instance)
            return state
        if len({jax.tree.structure(state), jax.tree.structure(after)}) > 1:
            return state
        return jax.tree.map(
            lambda leaf, new: leaf if leaf.dtype == new.dtype else leaf.astype(new.dtype),
            state,
            after,
        )

    return init


def inputs_of(closed: core.ClosedJaxpr) -> list[int]:
    """For each result of a function, the inputs on which it depends: a bit each."""
    numbers, nodes = count(), list[_Node]()
    made_of = {next(numbers): 1 << i for i in range(len(closed.jaxpr.invars))}
    outs = _graph(closed, list(made_of), nodes, numbers)
    for node in nodes:
        made_of.update(dict.fromkeys(node.writes, _any(made_of, node.reads)))
    return [made_of.get(out, 0) for out in outs]


def _any(bits: Mapping[int, int], values: Sequence[int]) -> int:
    return reduce(or_, (bits.get(value, 0) for value in values), 0)


class _Node(NamedTuple):
    """An equation: what it does, the numbers of the values that it reads, and of those that it
    makes.
    """

    text: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def _graph(
    closed: core.ClosedJaxpr, inputs: Sequence[int], nodes: list[_Node], numbers: Iterator[int]
) -> list[int]:
    """Append the equations of a jaxpr, with those of both branches of a condition; return the
    numbers of its results.
    """
    flat = flatten(closed).jaxpr
    known: dict[Any, int] = defaultdict(numbers.__next__, zip(flat.invars, inputs, strict=True))

    def number(atom: Any) -> int:
        return next(numbers) if isinstance(atom, core.Literal) else known[atom]

    for eqn in flat.eqns:
        reads = tuple(number(atom) for atom in eqn.invars)
        writes = tuple(known[var] for var in eqn.outvars)
        if eqn.primitive.name != "cond":
            nodes.append(_Node(_text(eqn), reads, writes))
            continue
        branches = [_graph(branch, reads[1:], nodes, numbers) for branch in eqn.params["branches"]]
        nodes += [
            _Node("cond", (reads[0], *values), (out,))
            for out, *values in zip(writes, *branches, strict=True)
        ]
    return [number(atom) for atom in flat.outvars]


def _text(eqn: core.JaxprEqn) -> str:
    """The text of an equation, with shapes where it does not act on each number by itself; "" where
    it only repeats numbers.
    """
    if eqn.primitive.name == "broadcast_in_dim":
        return ""
    literals = [str(atom.val) for atom in eqn.invars if isinstance(atom, core.Literal)]
    shapes = [
        shape for atom in (*eqn.invars, *eqn.outvars) if (shape := getattr(atom.aval, "shape", ()))
    ]
    params = [(key, str(value)) for key, value in sorted(eqn.params.items()) if key not in _LAYOUT]
    by_number = len(set(shapes)) < 2 and not any("ax" in key or "dim" in key for key, _ in params)
    return f"{eqn.primitive.name} {literals} {params} {'' if by_number else shapes}"
