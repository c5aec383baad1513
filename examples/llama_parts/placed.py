"""Which layers each device holds: so that weights are drawn, read and written where they lie, and
never whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp

from .model import Llama

Array = np.ndarray[Any, Any]


class Leaf(NamedTuple):
    """A placed parameter."""

    name: str  # of the canonical one, "stages/t/mlp/up/kernel"
    shape: jax.ShapeDtypeStruct  # with its sharding; [P, rows, ...] where it is of layers
    # of one layer, without the zeros after a dim that the pipeline cuts and that does not divide
    size: tuple[int, ...]
    # int [P, rows], -1 for a row that stands for no layer; None where it is of no layer
    layers: Array | None


def leaves(model: Llama, pipe: jp.Pipeline) -> list[Leaf]:
    """The placed parameters, in the order of `jax.tree.leaves(pipe.place(model.shapes()))`.

    `place` of a whole model, under a `jit` too, brings together whole stacks of layers before they
    are cut into stages. So what is placed is a number for each layer of each parameter, and what
    comes back tells which layer lies where.
    """
    paths, form = jax.tree_util.tree_flatten_with_path(model.shapes())
    names, count = [joined(path) for path, _ in paths], model.sizes.layers
    # Numbers are split over the mesh as their parameters are, so they have as many axes, of the
    # least length that divides.
    side = pipe.mesh.shape[model.tensor] if model.tensor else 1

    def numbers(i: int, name: str, shape: jax.ShapeDtypeStruct) -> Array:
        if not name.startswith("stages/"):
            return np.full((side,) * len(shape.shape), 1 + i * count, np.float32)
        own = 1 + i * count + np.arange(count, dtype=np.float32)
        axes = len(shape.shape) - 1
        return np.broadcast_to(
            own.reshape(-1, *(1 for _ in range(axes))), (count, *(side for _ in range(axes)))
        )

    given = jax.tree.unflatten(
        form,
        [
            numbers(i, name, shape)
            for i, (name, (_, shape)) in enumerate(zip(names, paths, strict=True))
        ],
    )
    everywhere = NamedSharding(pipe.mesh, PartitionSpec())
    found = jax.jit(lambda tree: tree, out_shardings=everywhere)(pipe.place(given))
    pairs = zip(jax.tree.leaves(pipe.place(model.shapes())), jax.tree.leaves(found), strict=True)
    sizes = [shape.shape for _, shape in paths]
    return [
        _leaf(names, sizes, count, shape, np.asarray(number).astype(int)) for shape, number in pairs
    ]


def _leaf(
    names: list[str],
    sizes: list[tuple[int, ...]],
    count: int,
    shape: jax.ShapeDtypeStruct,
    number: Array,
) -> Leaf:
    at = (number.max() - 1) // count
    if not names[at].startswith("stages/"):
        return Leaf(names[at], shape, sizes[at], None)
    own = number[(slice(None), slice(None), *(0 for _ in shape.shape[2:]))]
    return Leaf(names[at], shape, sizes[at][1:], np.where(own > 0, (own - 1) % count, -1))


def joined(path: Any) -> str:
    """A leaf's path as text."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
