"""Where the state of an optimizer lies: what follows a parameter beside it, the rest on every
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from ..arrays import PyTree, wider
from .mesh import trimmed
from .packed import Buffer, Packed


def init_as_updated(optimizer: Any, accumulate: Any) -> Callable[[PyTree], PyTree]:
    """`optimizer.init`, with the dtypes that an update leaves: moments of bfloat16 parameters have
    those of the gradients, for instance.

    `accumulate` is the least dtype of gradients; None: they have the parameters' own.
    """

    def gradient(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype if accumulate is None else wider(leaf.dtype, accumulate)
        )

    def init(params: PyTree) -> PyTree:
        state = optimizer.init(params)
        try:
            after = jax.eval_shape(optimizer.update, jax.tree.map(gradient, params), state, params)[
                1
            ]
        except TypeError:  # it wants more than gradients (the loss, for instance)
            return state
        found: Any = jax.tree.structure(after)
        if found != jax.tree.structure(state):
            return state
        return jax.tree.map(
            lambda leaf, new: leaf if leaf.dtype == new.dtype else leaf.astype(new.dtype),
            state,
            after,
        )

    return init


def state_shardings(
    mesh: Mesh,
    state: PyTree,
    params: Mapping[str, PyTree],
    shardings: Mapping[str, PyTree],
    *,
    buffer_spec: Callable[[Buffer, tuple[int, ...]], PartitionSpec],
) -> PyTree:
    """A sharding for each leaf of an optimizer's state (shapes), given placed parameters (shapes)
    and where they lie.

    A leaf follows the parameter whose path ends its own where it has its shape; else, under
    "stages", it follows the devices' axis where it has one (a moment that is factored, a count of
    each stage).  A buffer of unlike stages lies as `buffer_spec` says.
    """
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(dict(params)),
        jax.tree.leaves(dict(shardings)),
        strict=True,
    )
    known: dict[tuple[str, ...], tuple[tuple[int, ...], NamedSharding]] = {
        _names(path): (leaf.shape, to) for (path, leaf), to in leaves
    }
    stages = [(shape[0], to.spec[0]) for (key, *_), (shape, to) in known.items() if key == "stages"]

    def lies(path: Any, leaf: Any) -> NamedSharding:
        names = _names(path)
        for at in range(len(names)):
            for tail in range(at + 1, len(names) + 1):
                # Between the part of the model and the leaf's own path there may be more, as with a
                # state for each layer.
                for middle in range(at + 1, min(at + 3, tail) + 1):
                    found = known.get((*names[at:middle], *names[tail:]))
                    if found is not None and found[0] == leaf.shape:
                        return found[1]
        first = (
            stages[0][1]
            if "stages" in names and stages and leaf.shape[:1] == stages[0][:1]
            else None
        )
        return NamedSharding(mesh, trimmed(first))

    def of_node(path: Any, node: Any) -> PyTree:
        if not isinstance(node, Packed):
            return lies(path, node)
        found = {
            name: jax.tree.map(partial(lies, (*path, DictKey(name))), leaf)
            for name, leaf in node.leaves.items()
            if leaf is not None
        }
        for buffer in node.layout.buffers:
            leaf = node.leaves[buffer.name]
            # and no state of another form
            if getattr(leaf, "shape", ())[1:] == buffer.shape:
                found[buffer.name] = NamedSharding(mesh, buffer_spec(buffer, leaf.shape))
        return Packed({name: found.get(name) for name in node.leaves}, node.layout)

    return jax.tree_util.tree_map_with_path(
        of_node, state, is_leaf=lambda node: isinstance(node, Packed)
    )


def _names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
