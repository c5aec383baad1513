"""Llama's first weights: every layer of every parameter drawn from a key of its own, so that they
are the same under any layout.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp

from .model import Llama, Tree
from .placed import Leaf, joined, leaves


def canonical(model: Llama, key: jax.Array) -> Tree:
    """The canonical parameters: normal with deviation 0.02, less for what writes to the residual
    stream; scales are 1.
    """
    layers = np.arange(model.sizes.layers)

    def draw(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return _drawn(
            model, key, joined(path), shape, layers if joined(path).startswith("stages/") else None
        )

    return jax.jit(lambda: jax.tree_util.tree_map_with_path(draw, model.shapes()))()


def placed(model: Llama, pipe: jp.Pipeline, key: jax.Array) -> Tree:
    """The same, placed, and made where it belongs: no device ever holds more than its part."""
    wanted = leaves(model, pipe)
    to = [leaf.shape.sharding for leaf in wanted]
    draw = jax.jit(lambda key: [_placed(model, key, leaf) for leaf in wanted], out_shardings=to)
    return jax.tree.unflatten(jax.tree.structure(pipe.place(model.shapes())), draw(key))


def _placed(model: Llama, key: jax.Array, leaf: Leaf) -> jax.Array:
    """One parameter, with zeros where it is longer than the canonical one."""
    if leaf.layers is not None:
        return _drawn(model, key, leaf.name, leaf.shape, leaf.layers)
    found = _drawn(model, key, leaf.name, jax.ShapeDtypeStruct(leaf.size, leaf.shape.dtype), None)
    return jnp.pad(
        found, [(0, there - own) for there, own in zip(leaf.shape.shape, leaf.size, strict=True)]
    )


def _drawn(
    model: Llama, key: jax.Array, name: str, shape: jax.ShapeDtypeStruct, layers: Any
) -> jax.Array:
    """One parameter; `layers` are the numbers of its layers, of the shape of its first axes."""
    if name.endswith("scale"):
        there = (
            1
            if layers is None
            else (layers >= 0).reshape(*layers.shape, *(1 for _ in shape.shape[layers.ndim :]))
        )
        return jnp.broadcast_to(jnp.asarray(there, shape.dtype), shape.shape)
    own = jax.random.fold_in(key, zlib.crc32(name.encode()))
    deviation = (
        0.02 / math.sqrt(2 * model.sizes.layers)
        if name.endswith(("out/kernel", "down/kernel"))
        else 0.02
    )
    if layers is None:
        return deviation * jax.random.normal(own, shape.shape, shape.dtype)

    def layer(number: jax.Array) -> jax.Array:
        drawn = deviation * jax.random.normal(
            jax.random.fold_in(own, number), shape.shape[layers.ndim :], shape.dtype
        )
        return jnp.where(number >= 0, drawn, 0)  # a row that stands for no layer

    for _ in range(layers.ndim):
        layer = jax.vmap(layer)
    return layer(jnp.asarray(layers))
