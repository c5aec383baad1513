"""One stage's forward, full backward, input gradient and weight gradient as jaxprs, with minimal
residuals between them.

    hoist(parameters)                                 -> once       what depends on parameters
    alone; once a step forward(parameters, once, x, extra)               -> y, loss, state,
    residuals              (F) evaluate(parameters, once, x, extra)              -> y, loss, state
    (F that keeps nothing) recompute(parameters, once, x, extra)             -> residuals
    (R) backward(parameters, once, x, extra, residuals, dy)       -> dparameters, dx          (B)
    input_grad(parameters, once, x, extra, residuals, dy)     -> dx, stash                (I)
    weight_grad(parameters, once, x, extra, residuals, dy, stash) -> dparameters          (W)

loss (an auxiliary one) and state are there where the stage returns them; dy then ends with the
cotangent of the loss.

Residuals hold no parameter, nothing made of parameters alone, no copy of the stage input, nothing
twice, and nothing that a layout change of one of these gives.  Every matmul of B is done in exactly
one of I and W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from ..arrays import Leaves
from ..jaxprs import results_of
from ..table.effects import Liveness, Place
from ..table.kinds import Kind


@dataclass(frozen=True)
class StageCode:
    """The pieces of one stage function.  `consts` are arrays that the function closes over.

    `x_wanted` and `y_wanted` mark the leaves of x and y that have a gradient (the floating ones);
    dx and dy hold just those.
    """

    consts: tuple[Any, ...]
    hoist: core.Jaxpr
    forward: core.Jaxpr
    evaluate: core.Jaxpr
    recompute: core.Jaxpr
    backward: core.Jaxpr
    input_grad: core.Jaxpr
    weight_grad: core.Jaxpr
    y_tree: Any
    y_avals: tuple[Any, ...]
    loss: Any  # aval of the auxiliary loss, or None
    state: tuple[Any, ...]  # avals of the state after it
    x_avals: tuple[Any, ...]
    once_avals: tuple[Any, ...]
    residual_input: tuple[Any, ...]  # avals of what only I (and B) needs
    residual_weight: tuple[Any, ...]  # avals of what W needs
    stash: tuple[Any, ...]
    x_wanted: tuple[bool, ...]
    y_wanted: tuple[bool, ...]
    trained: tuple[bool, ...]  # which parameters have a gradient
    liveness: Liveness
    # avals of what passes between slices of a sequence; in the jaxprs carries come after x and y,
    # buffers after the carries
    carry: tuple[Any, ...] = ()
    buffers: tuple[Any, ...] = ()
    offloads: bool = False  # a policy of `jax.checkpoint` in it asks for the host's memory

    @property
    def residual_avals(self) -> tuple[Any, ...]:
        """Avals of all that a backward reads of its forward."""
        return (*self.residual_input, *self.residual_weight)

    @property
    def dx_avals(self) -> tuple[Any, ...]:
        """Avals of the gradient of x."""
        return tuple(a for a, w in zip(self.x_avals, self.x_wanted, strict=True) if w)

    @property
    def dy_avals(self) -> tuple[Any, ...]:
        """Avals of the cotangent of y."""
        return tuple(a for a, w in zip(self.y_avals, self.y_wanted, strict=True) if w)

    @property
    def passed(self) -> tuple[Any, ...]:
        """Avals of carry and buffers."""
        return (*self.carry, *self.buffers)

    @property
    def carry_gradients(self) -> tuple[Any, ...]:
        """Avals of the gradients of the carry."""
        return tuple(filter(inexact, self.carry))

    @property
    def buffer_gradients(self) -> tuple[Any, ...]:
        """Avals of the gradients of appended rows."""
        return tuple(filter(inexact, self.buffers))

    @property
    def num_dx(self) -> int:
        """Outputs of the input gradient before its stash."""
        return sum(self.x_wanted) + len(self.carry_gradients) + len(self.buffer_gradients)

    @property
    def num_params(self) -> int:
        """Parameters, frozen ones too."""
        return len(self.trained)

    @property
    def num_trained(self) -> int:
        """Parameters that have a gradient."""
        return sum(self.trained)

    @property
    def num_outputs(self) -> int:
        """Outputs of the forward before its residuals."""
        return len(self.y_avals) + len(self.passed) + (self.loss is not None) + len(self.state)

    def __str__(self) -> str:
        parts = ("hoist", "forward", "backward", "input_grad", "weight_grad")
        return "\n".join(f"{name} = {getattr(self, name)}" for name in parts)


class ParamUse(NamedTuple):
    """What is done with a parameter: whether it has a gradient, and whether what depends on it
    alone is made once a step.
    """

    trained: bool = True
    once: bool = True

    @classmethod
    def of(cls, leaf: Any, *, frozen: bool) -> ParamUse:
        """Frozen ones of fewer than 16 bits are kept small: what they stand for is made where it is
        needed.
        """
        small = not jnp.issubdtype(leaf.dtype, jnp.inexact) or leaf.dtype.itemsize < 2
        return cls(not frozen, not (frozen and small))


@dataclass(frozen=True)
class LastCode:
    """The loss of one microbatch with its gradients: `train(params, once, y, extra, seed) -> loss,
    aux, dparams, dy`.

    `evaluate(params, once, y, extra) -> loss, aux`.
    """

    consts: tuple[Any, ...]
    hoist: core.Jaxpr
    train: core.Jaxpr
    evaluate: core.Jaxpr
    once_avals: tuple[Any, ...]
    aux_tree: Any
    aux_avals: tuple[Any, ...]
    loss_dtype: Any
    num_trained: int
    # the code of collective actions that do a part of `train`
    parts: Mapping[Kind, core.Jaxpr] = field(default_factory=dict)
    # what one of them leaves in a pool for another
    left: Mapping[Place, tuple[Any, ...]] = field(default_factory=dict)


def run(jaxpr: core.Jaxpr, *arguments: Any) -> Leaves:
    """Evaluate a jaxpr without constants."""
    return results_of(core.ClosedJaxpr(jaxpr, []), *arguments)


def inexact(leaf: Any) -> bool:
    """True for arrays that have a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
