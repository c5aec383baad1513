"""`first` and `last`, each with its gradient: inside a stage's block, or as a device's share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..arrays import Leaves, Scalar
from ..jaxprs import InSlots, Total, run_in_slots
from ..stage.code import run
from .pools import State, add, add_at, write
from .shared_code import SharedCode


def first_inputs(shared: SharedCode, microbatch: Scalar) -> Leaves:
    """(consts, parameters, extra, once) of `first`."""
    operands = shared.operands
    extra = shared.outer_extra(jnp.zeros_like(microbatch), microbatch)
    return [*shared.code.first.consts, *operands.first, *extra, *operands.first_once]


def accumulate(name: str, jaxpr: Any, arguments: Leaves, state: State) -> State:
    """Run code that adds gradients of `first` or `last` and of the shared parameters in place."""
    own, common = state[name], state["shared_gradients"]
    totals = {i: Total(leaf) for i, leaf in enumerate([*own, *common])}
    (found,) = run_in_slots(InSlots(jaxpr, arguments, writes=totals))
    return state | {name: found[: len(own)], "shared_gradients": found[len(own) :]}


def last_inputs(shared: SharedCode, y: Leaves, microbatch: Scalar) -> Leaves:
    """(consts, parameters, once, y, extra) of `last`."""
    code, operands = shared.last_code, shared.operands
    stage = jnp.full_like(microbatch, len(shared.code.kind_of) - 1)
    extra = shared.outer_extra(stage, microbatch)
    return [*code.consts, *operands.last, *operands.last_once, *y, *extra]


def run_last(shared: SharedCode, jaxpr: Any, arguments: Leaves) -> tuple[Any, Leaves, Leaves]:
    """The loss, its auxiliary outputs, and all other outputs."""
    loss, *rest = run(jaxpr, *arguments)
    count = len(shared.last_code.aux_avals)
    return loss, rest[:count], rest[count:]


def with_last_gradients(found: Leaves, state: State) -> tuple[State, Leaves]:
    """Add the gradients of the parameters of `last`; return the state and the rest, the gradient of
    y.
    """
    own, common = state["last_gradients"], state["shared_gradients"]
    last, rest = found[: len(own)], found[len(own) :]
    return state | {
        "last_gradients": add(own, last),
        "shared_gradients": add(common, rest[: len(common)]),
    }, rest[len(common) :]


def noted(loss: Any, aux: Leaves, microbatch: Scalar, state: State) -> State:
    """The state with the loss of a microbatch and its auxiliary outputs."""
    return state | {
        "losses": add_at(state["losses"], microbatch, loss),
        "aux": write(state["aux"], microbatch, aux),
    }
