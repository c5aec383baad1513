"""One stage's forward, full backward, input gradient and weight gradient as jaxprs, with minimal
residuals between them.

    hoist(parameters) -> once
    forward(parameters, x, extra, once) -> y, loss, state, residuals            F
    evaluate(parameters, x, extra, once) -> y, loss, state                      F without residuals
    recompute(parameters, x, extra, once) -> residuals                          R
    backward(parameters, x, extra, once, residuals, dy) -> dparameters, dx      B
    input_grad(parameters, x, extra, once, residuals, dy) -> dx, stash          I
    weight_grad(parameters, x, extra, once, residuals, dy, stash) -> dparameters    W

`once` are values that depend on parameters alone, computed once a step.  A stage may also return an
auxiliary loss and state.  With a loss, dy ends with its cotangent.

Residuals exclude parameters, values that depend on parameters alone, and copies of the stage input.
No residual is kept twice, or as a layout change of another.  Every matmul of B is in exactly one of
I and W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from ..arrays import Leaves
from ..jaxprs.equations import results_of
from ..table.effects import Liveness, Place
from ..table.kinds import Kind


class ParamUse(NamedTuple):
    """Uses of a parameter: whether it has a gradient, and whether values that depend on it alone
    are computed once a step.
    """

    trained: bool = True
    once: bool = True

    @classmethod
    def of(cls, leaf: Any, *, frozen: bool) -> ParamUse:
        """The uses of one parameter.  Values of a frozen parameter of fewer than 16 bits are
        computed in each microbatch: one copy for the whole step would be larger than the parameter.
        """
        small = not jnp.issubdtype(leaf.dtype, jnp.inexact) or leaf.dtype.itemsize < 2
        return cls(not frozen, not (frozen and small))


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The inputs and results of a stage, by leaf.

    Floating leaves of x and y have a gradient.  dx and dy hold only these.
    """

    consts: tuple[Any, ...]  # arrays that the function closes over
    uses: tuple[ParamUse, ...]  # of each parameter
    x_avals: tuple[Any, ...] = ()
    num_extra: int = 0  # the context, the rows of the microbatch, the state before it
    y_tree: Any
    y_avals: tuple[Any, ...]
    loss: Any = None  # aval of the auxiliary loss
    state: tuple[Any, ...] = ()  # avals of the state after it
    # avals of values that pass between slices of a sequence; in the jaxprs carries follow x and y,
    # and buffers follow the carries
    carry: tuple[Any, ...] = ()
    buffers: tuple[Any, ...] = ()

    @property
    def known(self) -> tuple[bool, ...]:
        """For each constant and parameter, whether values that depend on it alone are computed once
        a step.
        """
        return (*(True for _ in self.consts), *(use.once for use in self.uses))

    @property
    def trained(self) -> tuple[bool, ...]:
        """Which parameters have a gradient."""
        return tuple(use.trained for use in self.uses)

    @property
    def x_wanted(self) -> tuple[bool, ...]:
        """Which leaves of x have a gradient."""
        return tuple(map(inexact, self.x_avals))

    @property
    def y_wanted(self) -> tuple[bool, ...]:
        """Which leaves of y have a gradient."""
        return tuple(map(inexact, self.y_avals))

    @property
    def dx_avals(self) -> tuple[Any, ...]:
        """Avals of the gradient of x."""
        return tuple(filter(inexact, self.x_avals))

    @property
    def dy_avals(self) -> tuple[Any, ...]:
        """Avals of the cotangent of y."""
        return tuple(filter(inexact, self.y_avals))

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
        return len(self.dx_avals) + len(self.carry_gradients) + len(self.buffer_gradients)

    @property
    def num_params(self) -> int:
        """The number of parameters, with frozen ones."""
        return len(self.uses)

    @property
    def num_trained(self) -> int:
        """The number of parameters that have a gradient."""
        return sum(self.trained)

    @property
    def num_inputs(self) -> int:
        """The number of inputs: constants, parameters, x, carry and buffers, and `extra`."""
        return len(self.known) + len(self.x_avals) + len(self.passed) + self.num_extra

    @property
    def num_outputs(self) -> int:
        """Outputs of the forward before its residuals."""
        return len(self.y_avals) + len(self.passed) + (self.loss is not None) + len(self.state)


@dataclass(frozen=True, kw_only=True)
class StageCode(Signature):
    """The pieces of one stage function."""

    hoist: core.Jaxpr
    forward: core.Jaxpr
    evaluate: core.Jaxpr
    recompute: core.Jaxpr
    backward: core.Jaxpr
    input_grad: core.Jaxpr
    weight_grad: core.Jaxpr
    residual_input: tuple[Any, ...] = ()  # avals of what only I (and B) needs
    residual_weight: tuple[Any, ...] = ()  # avals of what W needs
    stash: tuple[Any, ...] = ()
    liveness: Liveness = field(default_factory=Liveness)
    offloads: bool = False  # a policy of `jax.checkpoint` in it uses the host's memory

    @property
    def once_avals(self) -> tuple[Any, ...]:
        """Avals of what is computed once a step."""
        return outputs_of(self.hoist)

    @property
    def stored(self) -> dict[Place, tuple[Any, ...]]:
        """Avals of what pools keep of a microbatch, or of a slice."""
        return {
            Place.X: self.x_avals,
            Place.COTANGENT: self.dy_avals,
            Place.RESIDUAL_INPUT: self.residual_input,
            Place.RESIDUAL_WEIGHT: self.residual_weight,
            Place.STASH: self.stash,
            Place.CARRY: self.carry,
            Place.CARRY_GRADIENT: self.carry_gradients,
            Place.BUFFER: self.buffers,
            Place.BUFFER_GRADIENT: self.buffer_gradients,
        }

    @property
    def residual_avals(self) -> tuple[Any, ...]:
        """Avals of all residuals."""
        return (*self.residual_input, *self.residual_weight)

    def __str__(self) -> str:
        parts = ("hoist", "forward", "backward", "input_grad", "weight_grad")
        return "\n".join(f"{name} = {getattr(self, name)}" for name in parts)


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
    aux_tree: Any
    aux_avals: tuple[Any, ...]
    loss_dtype: Any
    num_trained: int
    # the code of collective actions that do a part of `train`
    parts: Mapping[Kind, core.Jaxpr] = field(default_factory=dict)
    # avals of values that one of them leaves in a pool for another
    left: Mapping[Place, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def once_avals(self) -> tuple[Any, ...]:
        """Avals of what is computed once a step."""
        return outputs_of(self.hoist)


def run(jaxpr: core.Jaxpr, *arguments: Any) -> Leaves:
    """Evaluate a jaxpr without constants."""
    return results_of(core.ClosedJaxpr(jaxpr, []), *arguments)


def outputs_of(jaxpr: core.Jaxpr) -> tuple[Any, ...]:
    """The avals of a jaxpr's results."""
    return tuple(atom.aval for atom in jaxpr.outvars)


def inexact(leaf: Any) -> bool:
    """True for arrays that have a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
