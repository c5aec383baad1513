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

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
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


# Values that a forward keeps for its backward.
RESIDUALS = (Place.RESIDUAL_INPUT, Place.RESIDUAL_WEIGHT)
_RETURNED = (Place.SENT_X, Place.CARRY, Place.BUFFER, Place.LOSSES, Place.STAGE_STATE)
_PASSED_BACK = (Place.SENT_DX, Place.CARRY_GRADIENT, Place.BUFFER_GRADIENT)
# The results of a stage's code, in order.  A forward that keeps nothing ends before the residuals.
RESULTS = {
    Kind.F: (*_RETURNED, *RESIDUALS),
    Kind.R: RESIDUALS,
    Kind.B: (Place.STAGE_GRADIENTS, *_PASSED_BACK),
    Kind.I: (*_PASSED_BACK, Place.STASH),
    Kind.W: (Place.STAGE_GRADIENTS,),
}
# The inputs of a stage's code between its parameters and `extra`, and those of backwards after
# `once`.
INPUTS = (Place.X, Place.CARRY, Place.BUFFER)
COTANGENTS = (Place.COTANGENT, Place.CARRY_GRADIENT, Place.BUFFER_GRADIENT)


_NOTHING = jax.make_jaxpr(lambda: ())().jaxpr


@dataclass(frozen=True, kw_only=True)
class StageCode:
    """The pieces of one stage function, and their inputs and results by leaf.

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
    residual_input: tuple[Any, ...] = ()  # avals of what only I (and B) needs
    residual_weight: tuple[Any, ...] = ()  # avals of what W needs
    stash: tuple[Any, ...] = ()
    hoist: core.Jaxpr = _NOTHING
    forward: core.Jaxpr = _NOTHING
    evaluate: core.Jaxpr = _NOTHING
    recompute: core.Jaxpr = _NOTHING
    backward: core.Jaxpr = _NOTHING
    input_grad: core.Jaxpr = _NOTHING
    weight_grad: core.Jaxpr = _NOTHING
    liveness: Liveness = field(default_factory=Liveness)
    offloads: bool = False  # a policy of `jax.checkpoint` in it uses the host's memory

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
    def y_wanted(self) -> tuple[bool, ...]:
        """Which leaves of y have a gradient."""
        return tuple(map(inexact, self.y_avals))

    @property
    def stored(self) -> dict[Place, tuple[Any, ...]]:
        """Avals of what pools keep of a microbatch, or of a slice."""
        return {
            Place.X: self.x_avals,
            Place.COTANGENT: tuple(filter(inexact, self.y_avals)),
            Place.RESIDUAL_INPUT: self.residual_input,
            Place.RESIDUAL_WEIGHT: self.residual_weight,
            Place.STASH: self.stash,
            Place.CARRY: self.carry,
            Place.CARRY_GRADIENT: tuple(filter(inexact, self.carry)),
            Place.BUFFER: self.buffers,
            Place.BUFFER_GRADIENT: tuple(filter(inexact, self.buffers)),
        }

    @property
    def dx_avals(self) -> tuple[Any, ...]:
        """Avals of the gradient of x."""
        return tuple(filter(inexact, self.x_avals))

    @property
    def dy_avals(self) -> tuple[Any, ...]:
        """Avals of the cotangent of y."""
        return self.stored[Place.COTANGENT]

    @property
    def num_trained(self) -> int:
        """The number of parameters that have a gradient."""
        return sum(self.trained)

    @property
    def num_inputs(self) -> int:
        """The number of inputs: constants, parameters, x, carry and buffers, and `extra`."""
        return self.spans(INPUTS, len(self.known))[Place.BUFFER].stop + self.num_extra

    @property
    def num_outputs(self) -> int:
        """Outputs of the forward before its residuals."""
        return self.spans(_RETURNED)[Place.STAGE_STATE].stop

    def spans(self, places: Sequence[Place], start: int = 0) -> dict[Place, range]:
        """The numbers of the inputs or results for consecutive places, from a number on."""
        counts = {place: len(avals) for place, avals in self.stored.items()} | {
            Place.SENT_X: len(self.y_avals),
            Place.SENT_DX: len(self.dx_avals),
            Place.LOSSES: int(self.loss is not None),
            Place.STAGE_STATE: len(self.state),
            Place.STAGE_GRADIENTS: self.num_trained,
        }
        ends = accumulate((counts[place] for place in places), initial=start)
        return {place: range(*ends) for place, ends in zip(places, pairwise(ends), strict=True)}

    def of(self, kind: Kind, *, keeps: bool = True) -> core.Jaxpr:
        """The code of a kind of action; `keeps`: the forward's residuals."""
        return {
            Kind.F: self.forward if keeps else self.evaluate,
            Kind.R: self.recompute,
            Kind.B: self.backward,
            Kind.I: self.input_grad,
            Kind.W: self.weight_grad,
        }[kind]


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
    # `train` in two, where H computes the gradient of the parameters: L, then H from its stash
    input_grad: core.Jaxpr | None = None
    weight_grad: core.Jaxpr | None = None
    stash: tuple[Any, ...] = ()


def run(jaxpr: core.Jaxpr, *arguments: Any) -> Leaves:
    """Evaluate a jaxpr without constants."""
    return results_of(core.ClosedJaxpr(jaxpr, []), *arguments)


def inexact(leaf: Any) -> bool:
    """True for arrays that have a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
