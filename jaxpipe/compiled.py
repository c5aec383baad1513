"""The steps of a pipeline as they are called: compiled, with their derivatives.  Pipelines of equal
arguments share what JAX has compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

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


def key_of(settings: Mapping[str, Any]) -> Any:
    """Settings as a key: equal for equal settings, functions being equal only to themselves; unique
    where one cannot be compared.
    """
    key = _hashable(settings)
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        pairs = sorted(value.items(), key=lambda pair: str(pair[0]))
        return tuple((name, _hashable(item)) for name, item in pairs)
    if type(value) in (list, tuple):
        return tuple(map(_hashable, value))
    if is_dataclass(value) and not isinstance(value, type):
        try:
            hash(value)
        except TypeError:  # it holds a list or a mapping
            return type(value), _hashable({f.name: getattr(value, f.name) for f in fields(value)})
    return value


class Compiled:
    """The steps of a `StepRunner` as they are called: compiled, with their derivatives."""

    def __init__(self, steps: Any, options: Mapping[str, Any]) -> None:
        functions: list[Callable[..., Any]]
        functions = [steps.step, steps.forwards, steps.evaluate, steps.outputs]
        if steps.executor.compiles:
            functions = [_compiled(function, options) for function in functions]
        step, forwards, evaluate, outputs = functions
        self.step = without_gradient(step, "value_and_grad")
        self.evaluate = without_gradient(evaluate, "evaluate")
        self.outputs = without_gradient(outputs, "outputs")
        # What stages hand from microbatch to microbatch is known after a step alone.
        has_state = steps.functions.has_state
        value = (lambda *arguments: step(*arguments)[0]) if has_state else forwards
        self.loss = differentiable_loss(value, step)

    @classmethod
    def of(cls, key: Any, steps: Any, options: Mapping[str, Any]) -> Compiled:
        """What this returned for earlier steps of an equal key, if somebody holds it."""
        found = _HELD.get(key)
        if found is None:
            found = _HELD[key] = cls(steps, options)
        return found


_HELD: WeakValueDictionary[Any, Compiled] = WeakValueDictionary()


def _compiled(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function compiled; with the options where it is called from outside of any other
    `jax.jit`.
    """
    inner = jax.jit(function)
    if not options:
        return inner
    outermost = jax.jit(function, compiler_options=dict(options))

    def call(*arguments: Any) -> Any:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))
        return (inner if traced else outermost)(*arguments)

    return call


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

        def scaled(param: Any, grad: Any) -> Any:
            if grad is None or isinstance(scale, SymbolicZero):
                return _nothing(param)
            return (grad * scale.astype(grad.dtype)).astype(param.dtype)

        nothing = (None, None, None)  # for batch, rng and state
        return jax.tree.map(scaled, params, grads), *nothing

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
