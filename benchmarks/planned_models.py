"""Three models that `benchmarks.plans` plans: layers by letter, parameters as shapes, rows of a
microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

import jaxpipe as jp
from benchmarks.llama import Model, Shape, batch, layered, parameters

PyTree: TypeAlias = Any


@dataclass(frozen=True)
class Planned:
    """A model as `measure` and `plan` take it; `microbatch` and `parameters` are shapes."""

    name: str
    model: jp.Model
    parameters: dict[str, PyTree]
    microbatch: PyTree

    def batch(self, microbatches: int) -> PyTree:
        """The rows of a step, as shapes."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((microbatches * a.shape[0], *a.shape[1:]), a.dtype),
            self.microbatch,
        )


def llama(*, layers: int, width: int, vocab: int, time: int, rows: int = 1) -> Planned:
    """A Llama with grouped heads, in bfloat16; its head weighs the more, the larger
    the vocabulary.
    """
    heads = width // 128
    shape = Shape(
        width=width,
        heads=heads,
        kv_heads=max(1, heads // 4),
        hidden=7 * width // 2,
        vocab=vocab,
        layers=layers,
        time=time,
        rows=rows,
    )
    return Planned(
        f"Llama, {layers} x {width}, vocabulary {vocab}",
        Model(shape, tensor=False).by_letters(f"Et*{layers},L"),
        jax.eval_shape(layered, parameters(shape, 1)),
        batch(shape, 1),
    )


def mixed(*, pairs: int, width: int, rows: int) -> Planned:
    """Wide and narrow layers in turn, in float32: no even cut is balanced."""

    def layer(params: PyTree, x: Any) -> Any:
        return x + jnp.tanh(x @ params["up"]) @ params["down"]

    def own(hidden: int) -> PyTree:
        return {
            "up": jax.ShapeDtypeStruct((pairs, width, hidden), jnp.float32),
            "down": jax.ShapeDtypeStruct((pairs, hidden, width), jnp.float32),
        }

    canonical = {
        "first": jax.ShapeDtypeStruct((width, width), jnp.float32),
        "stages": {"w": own(8 * width), "n": own(2 * width)},
        "last": jax.ShapeDtypeStruct((width, 8 * width), jnp.float32),
    }
    functions = {
        "E": lambda params, microbatch: microbatch["x"] @ params,
        "w": layer,
        "n": layer,
        "L": lambda params, x, microbatch: jnp.mean(jnp.square(jnp.tanh(x @ params))),
    }
    # The wide ones come first.
    letters = "E" + "w" * pairs + "n" * pairs + "L"
    return Planned(
        f"Residual MLP, {pairs} wide and {pairs} narrow x {width}",
        jp.Model(functions, layers=letters),
        canonical,
        {"x": _rows(rows, width)},
    )


def _rows(*dims: int) -> Any:
    return jax.ShapeDtypeStruct(dims, jnp.float32)
