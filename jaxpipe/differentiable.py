"""Functions of a pipeline under `jax.grad`: a loss whose derivative is the table's own backward,
and others that have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from .arrays import PyTree, by_path
from .errors import PipelineError

T = TypeVar("T")

_NO_GRADIENT = (
    "Pipeline.{} cannot be differentiated; take gradients of `pipe.loss(params, batch)`, which "
    "jax.grad and jax.value_and_grad know, "
    "or put jax.lax.stop_gradient around the arguments where only the numbers are wanted"
)


def differentiable_loss(
    value: Callable[..., dict[str, Any]],
    value_and_grad: Callable[..., tuple[dict[str, Any], PyTree]],
) -> Callable[..., dict[str, Any]]:
    """`f(params, *rest) -> {"loss", ...}`, whose loss is differentiable by `params`: the step's
    gradients, scaled by the cotangent.

    `value` is called where nothing is differentiated, `value_and_grad`, which returns (the same,
    gradients), where something is.  Other results are constants, and `rest` may not depend on what
    is differentiated.
    """

    @jax.custom_vjp
    def results(params: PyTree, *rest: PyTree) -> Any:
        return value(params, *rest)

    def forward(params: PyTree, *rest: PyTree) -> tuple[dict[str, Any], PyTree]:
        others = by_path(dict(zip(("batch", "rng", "state"), rest, strict=True)), _is_primal)
        PipelineError.refuse(
            "Pipeline.loss has a gradient by the parameters alone, but these depend on what is "
            "differentiated (compute them in `first`, from its parameters, or put "
            "jax.lax.stop_gradient around them)",
            [path for path, leaf in others.items() if _moves(leaf)],
        )
        params, rest = jax.tree.map(_plain, (params, rest), is_leaf=_is_primal)
        found, grads = value_and_grad(params, *rest)
        return found, (params, grads)

    def backward(kept: tuple[PyTree, PyTree], cotangents: Any) -> tuple[PyTree, ...]:
        params, grads = kept
        scale = cotangents["loss"]
        none = (None, None, None)  # batch, rng, state
        if isinstance(scale, SymbolicZero):
            return jax.tree.map(_nothing, params), *none
        return jax.tree.map(
            lambda p, g: _nothing(p) if g is None else (g * scale.astype(g.dtype)).astype(p.dtype),
            params,
            grads,
        ), *none

    results.defvjp(forward, backward, symbolic_zeros=True)

    def call(*arguments: PyTree) -> dict[str, Any]:
        found = results(*arguments)
        return {
            key: leaf if key == "loss" else jax.lax.stop_gradient(leaf)
            for key, leaf in found.items()
        }

    return call


def without_gradient(function: Callable[..., T], method: str) -> Callable[..., T]:
    """The function of this method, which raises PipelineError where JAX differentiates it."""

    @jax.custom_vjp
    def guarded(*arguments: PyTree) -> T:
        return function(*arguments)

    def forward(*arguments: PyTree) -> tuple[T, None]:
        if any(_moves(leaf) for leaf in jax.tree.leaves(arguments, is_leaf=_is_primal)):
            raise PipelineError(_NO_GRADIENT.format(method))
        return function(*jax.tree.map(_plain, arguments, is_leaf=_is_primal)), None

    def backward(_kept: None, _cotangents: Any) -> Any:
        raise AssertionError("nothing that moves went in")

    guarded.defvjp(forward, backward, symbolic_zeros=True)
    return guarded


def _nothing(leaf: Any) -> Any:
    """The cotangent of a parameter that has no gradient."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _is_primal(node: Any) -> bool:
    return isinstance(node, CustomVJPPrimal)


def _plain(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, CustomVJPPrimal) else leaf


def _moves(leaf: Any) -> bool:
    """Whether a leaf depends on the differentiated values, and can have a gradient."""
    return (
        isinstance(leaf, CustomVJPPrimal)
        and leaf.perturbed
        and bool(jnp.issubdtype(jnp.result_type(leaf.value), jnp.inexact))
    )
