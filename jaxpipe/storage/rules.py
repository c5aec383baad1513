"""What an optimizer does with placed arrays: rules for one array are found in its equations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..arrays import ByPart, Leaf, Params, PyTree, accumulator_dtype, by_path
from ..errors import PipelineError
from ..jaxprs.dataflow import DRAWS, Dataflow, any_of
from .plan import leaf_plans

# The texts of the equations that matter to one parameter alone, by path.
Rules: TypeAlias = "dict[str, list[str]]"


class Optimizer(Protocol):
    """An optimizer by optax's protocol."""

    @property
    def init(self) -> Callable[[Params], PyTree]:
        """Parameters -> its state."""

    @property
    def update(self) -> Callable[..., tuple[Params, PyTree]]:
        """(gradients, state, parameters) -> the updates, and the state after them."""


# A parameter that is there only while an optimizer is traced to find its rules.  A wrapper that
# gives it the model's own arrays need not act then.
PROBE = "~"


def check_rules(optimizer: Optimizer, placed: Params, own: Params, plans: ByPart) -> None:
    """PipelineError for parameters of which the optimizer makes something else where they are
    placed; all are shapes, with the plans of the placed ones.

    A rule for each number does the same whatever the shape of an array is.  A rule for all
    parameters (clipping by the global norm) reads every number once.  So equations that matter to
    one parameter alone must be the same.  Random numbers for one would change its padding too.
    """
    rules = rules_of(optimizer, placed, own)
    if rules is None:
        return
    leaves = zip(by_path(dict(placed)).items(), leaf_plans(plans), strict=True)
    faults = {
        parameter.path: f"{parameter.path!r} of shape {parameter.shape} is stored in {path!r} of "
        f"shape {leaf.shape}, with which the optimizer does something else"
        for (path, leaf), plan in leaves
        for parameter, _ in plan.parameters
        if rules[0][path] != rules[1][parameter.path]
    }
    PipelineError.refuse(
        "this optimizer has rules for paths, ranks, shapes or norms of single arrays, or draws "
        "random numbers for them, and placed arrays have others than the model's "
        "own; wrap such rules, with their masks and labels, as jaxpipe.per_layer(pipe, "
        "optimizer), or write "
        "pipe.init(..., as_placed=True) where they are meant for placed arrays",
        faults.values(),
    )


def rules_of(optimizer: Optimizer, *trees: Params) -> list[Rules] | None:
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


def _rules_of(optimizer: Optimizer, tree: Params, extra: dict[str, float]) -> Rules:
    paths = list(by_path(tree))
    state = jax.eval_shape(optimizer.init, tree)
    closed, shapes = jax.make_jaxpr(
        lambda g, s, p: optimizer.update(g, s, p, **extra), return_shape=True
    )(tree, state, tree)
    if len(jax.tree.leaves(shapes[0])) != len(paths):
        raise ValueError("not an update for each parameter")
    graph = Dataflow(closed)
    gradients, parameters = graph.inputs[: len(paths)], graph.inputs[-len(paths) :]
    made_of = graph.made_of(gradients, parameters)
    matters_to = graph.matters_to(len(paths))
    found: dict[str, list[str]] = {path: [] for path in paths}
    for text, reads, writes in graph.nodes:
        alone = any_of(matters_to, writes)
        is_own = text.startswith(DRAWS) or alone & any_of(made_of, reads)
        if text and alone.bit_count() == 1 and is_own:
            found[paths[alone.bit_length() - 1]].append(text)
    return found


def init_as_updated(
    optimizer: Optimizer, accumulate: DTypeLike | None
) -> Callable[[Params], PyTree]:
    """`optimizer.init`, with the dtypes that an update leaves: moments of bfloat16 parameters have
    those of the gradients, for instance.

    `accumulate` is the least dtype of gradients; None: they have the parameters' own.
    """

    def gradient(leaf: Leaf) -> jax.ShapeDtypeStruct:
        dtype = accumulator_dtype(leaf.dtype, accumulate)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    def init(params: Params) -> PyTree:
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
