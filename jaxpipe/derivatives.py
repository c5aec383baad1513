"""The derivatives of a pipeline's calls, and the refusal of those that there are none of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from .arrays import ByPart, Params, StepResults, by_path
from .errors import PipelineError
from .model.arguments import StepArguments
from .model.settings import on_mesh_of

# Results and gradients of placed arguments.
RunStep: TypeAlias = Callable[[StepArguments], StepResults]

_NO_GRADIENT = (
    "Pipeline.{} cannot be differentiated; take gradients of `pipe.loss(params, batch)`, which "
    "jax.grad and jax.value_and_grad know, "
    "or put jax.lax.stop_gradient around the arguments where only the numbers are wanted"
)
_BY_PARAMETERS = (
    "Pipeline.loss has a gradient by the parameters alone, but {} depend on what is "
    "differentiated: compute them in `first`, from its parameters, or put jax.lax.stop_gradient "
    "around them"
)
_ONCE = (
    "Pipeline.loss is differentiated twice in reverse, but a step is reversed by its table, once: "
    "write a product with the Hessian as the derivative of the gradient, "
    "jax.jvp(jax.grad(pipe.loss), ...); put a penalty on gradients of x into a stage or `last`, "
    "where jax.grad is plain JAX; or put jax.lax.stop_gradient around the gradients"
)
_NO_FORWARD_MODE = (
    "Pipeline.loss has no derivative in forward mode (jax.jvp, jax.jacfwd, jax.linearize): its "
    "gradient is that of jax.grad, whose product with a direction is the same number; "
    "jax.jvp(jax.grad(pipe.loss), ...) works"
)


def _refuse_reverse(cotangent: jax.Array, _: object) -> NoReturn:
    raise PipelineError(_ONCE)


# The identity, which has a derivative in forward mode and none in reverse.
_once = core.Primitive("reversed_once")
_once.def_impl(lambda x: x)
_once.def_abstract_eval(lambda aval: aval)
ad.deflinear2(_once, _refuse_reverse)
batching.defvectorized(_once)
mlir.register_lowering(_once, lambda _, x: [x])


def _constant(given: StepArguments, text: str) -> StepArguments:
    """The same arguments; PipelineError where JAX differentiates by some of them, with their paths
    in the place of {} in the text.
    """

    @jax.custom_jvp
    def same(given: StepArguments) -> StepArguments:
        return given

    def refuse(given: tuple[StepArguments], tangents: tuple[StepArguments]) -> NoReturn:
        leaves = by_path(tangents[0]).items()
        moving = (path for path, leaf in leaves if not isinstance(leaf, SymbolicZero))
        raise PipelineError(text.format(", ".join(moving)))

    same.defjvp(refuse, symbolic_zeros=True)
    return same(given)


def differentiable_loss(
    value: RunStep, step: RunStep, replaced: Callable[[Params], ByPart]
) -> RunStep:
    """A call whose loss is differentiable by the parameters: the step's gradients, scaled by the
    cotangent; the next values of leaves that are `replaced` (of parameters, a tree of flags) are
    not scaled.

    `value` runs where nothing is differentiated, `step` where something is.  Other results are
    constants, and batch, key, state and scale may not depend on what is differentiated.
    """

    @jax.custom_vjp
    def results(params: Params, others: StepArguments) -> dict[str, Any]:
        return value(others._replace(params=params))[0]

    def forward(
        params: Params, others: StepArguments
    ) -> tuple[dict[str, Any], tuple[Params, Params]]:
        found, grads = step(others._replace(params=params))
        # Under a second reverse, JAX would name a loop of the program.
        grads = jax.tree.map(_once.bind, grads)
        return {**found, "loss": _once.bind(found["loss"])}, (params, grads)

    def backward(kept: tuple[Params, Params], cotangents: dict[str, Any]) -> tuple[Params, None]:
        def scaled(param: jax.Array, grad: jax.Array | None, is_next: bool) -> jax.Array | None:
            if grad is None:
                return None  # zeros
            found = grad if is_next else grad * jnp.asarray(cotangents["loss"], grad.dtype)
            return on_mesh_of(param, found.astype(param.dtype))

        params, grads = kept
        return jax.tree.map(scaled, params, grads, replaced(params)), None

    results.defvjp(forward, backward)

    def run(given: StepArguments) -> StepResults:
        others = _constant(given._replace(params={}), _BY_PARAMETERS)
        try:
            found = results(given.params, others)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise PipelineError(_NO_FORWARD_MODE) from error
        return {**jax.lax.stop_gradient(found), "loss": found["loss"]}, {}

    return run


def without_gradient(given: StepArguments, call: str) -> StepArguments:
    """The arguments of a call; PipelineError where JAX differentiates by some of them."""
    return _constant(given, _NO_GRADIENT.format(call))
