"""First weights: every layer of every parameter drawn from a key of its own, so that they are the
same under any layout.
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
from .placed import Leaf, Slices, joined, leaves, made


def canonical(model: Llama, key: jax.Array) -> Tree:
    """The canonical parameters: normal with deviation 0.02, less for what writes to the residual
    stream; scales are 1, biases
    and histories 0.
    """

    def draw(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        layers = np.arange(shape.shape[0]) if joined(path).startswith("stages/") else None
        return _drawn(model, key, joined(path), shape, layers)

    return jax.jit(lambda: jax.tree_util.tree_map_with_path(draw, model.shapes()))()


def placed(model: Llama, pipe: jp.Pipeline, key: jax.Array) -> Tree:
    """The same, placed, and made where it belongs: no device ever holds more than its part.

    Where layers that differ share an array, each process draws these on the CPU.
    """
    wanted = leaves(model, pipe)
    if not all(isinstance(leaf, Leaf) for leaf in wanted):
        return made(model, pipe, _Drawn(model, key))
    to = [leaf.shape.sharding for leaf in wanted]
    draw = jax.jit(lambda key: [_placed(model, key, leaf) for leaf in wanted], out_shardings=to)
    return jax.tree.unflatten(jax.tree.structure(pipe.place(model.shapes())), draw(key))


class _Drawn:
    """Parts of canonical parameters, of which the last that was drawn is kept."""

    def __init__(self, model: Llama, key: jax.Array) -> None:
        self._model, self._key = model, np.asarray(jax.random.key_data(key))
        own = jax.tree_util.tree_leaves_with_path(model.shapes())
        self._shapes = {joined(path): leaf for path, leaf in own}
        self._last: tuple[Any, Any] = (None, None)

    def __call__(self, name: str, layer: int | None, own: Slices) -> np.ndarray[Any, Any]:
        if self._last[0] != (name, layer):
            self._last = ((name, layer), self._draw(name, layer))
        return np.asarray(self._last[1][own])

    def _draw(self, name: str, layer: int | None) -> np.ndarray[Any, Any]:
        shape = self._shapes[name]
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            key = jax.random.wrap_key_data(jnp.asarray(self._key))
            if layer is None:
                return np.asarray(_drawn(self._model, key, name, shape, None))
            one = jax.ShapeDtypeStruct((1, *shape.shape[1:]), shape.dtype)
            return np.asarray(_drawn(self._model, key, name, one, np.array([layer])))[0]


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
    if name.endswith(("bias", "history")):
        return jnp.zeros(shape.shape, shape.dtype)
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
