"""The blocks of collective actions: a device's shares of `first` and `last`, which are spread over
the pipe axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..arrays import Flag, Leaves, Scalar
from ..errors import PipelineError
from ..jaxprs.collectives import collectives
from ..jaxprs.cut import Cut
from ..program.records import Record
from ..stage.code import run
from ..stage.model_code import ModelCode
from ..stage.split import cut_weights
from ..table.effects import Access, Place
from ..table.kinds import COLLECTIVES, Kind
from .block import Block, State, read, write
from .shared_code import (
    SharedCode,
    accumulate,
    first_inputs,
    last_inputs,
    noted,
    run_last,
    with_last_gradients,
)


def collective_block(shared: SharedCode, kind: Kind, row: Record[Scalar]) -> Block:
    """A device's share of an action.  All devices run E, G and L in any case."""
    changes = {e.place.value for e in shared.effects(kind) if e.access is not Access.READ}
    run = _RUNS[kind]
    return Block(
        changes,
        lambda state: run(shared, row, state),
        shared.everywhere and kind not in COLLECTIVES,
    )


def with_cuts(code: ModelCode, axis: str) -> ModelCode:
    """The model's code, with cuts for the kinds in its table."""
    for kind in code.program.schedule.encoded.kinds & _CUTS.keys():
        code = _CUTS[kind](code, axis)
    return code


def _first(shared: SharedCode, row: Record[Scalar], state: State) -> State:
    """E: the first stage's input.  Every device has it whole, and the device of the first stage
    keeps it.
    """
    code, buffer = shared.code.first, shared.buffers[Place.X]
    found = run(code.evaluate, *first_inputs(shared, _ordered(shared, row.microbatch, state)))
    return state | {"x": _kept_on(buffer, code.y_avals, found, row, row.is_source != 0, state["x"])}


def _first_gradient(shared: SharedCode, row: Record[Scalar], state: State) -> State:
    """G: the gradient of a device's share of the parameters of `first`.

    The device of the first stage begins with the gradient of its input, the others begin with
    zeros.  The input is a sum of the devices' shares.  The gradient of that sum reaches all
    devices, so no other transfer is needed.
    """
    dx = [_or_zeros(row.is_source != 0, leaf) for leaf in read(state["first"], row.y)]
    arguments = [*first_inputs(shared, _ordered(shared, row.microbatch, state)), *dx]
    return accumulate("first_gradients", shared.code.first.backward, arguments, state)


def _last(shared: SharedCode, row: Record[Scalar], state: State) -> State:
    """L: the loss of a microbatch, and its gradient.

    The output of the last stage goes to all devices as a sum, to which the other devices add zeros.
    The source differs from microbatch to microbatch where a stage is on two devices.  One sum is
    one collective; a tree of permutes would be log2(P) collectives of the same size.  Every device
    gets the same loss and begins its backward with 1/P of the loss's cotangent.  The backward thus
    differentiates the mean of P equal losses.  Collectives inside it sum cotangents over devices,
    and count none twice.
    """
    code, buffer, avals = (
        shared.last_code,
        shared.buffers[Place.COTANGENT],
        shared.last_stage.dy_avals,
    )
    source = row.is_source != 0
    if shared.blocking:
        source = jnp.logical_and(source, jnp.logical_not(state["token"]))

    def everywhere(leaf: Any) -> Any:
        number = leaf.astype(jnp.int8) if leaf.dtype == bool else leaf
        return lax.psum(_or_zeros(source, number), shared.axis).astype(leaf.dtype)

    def on_source(loss: Any, aux: Leaves, state: State) -> State:
        # Noted on one device: the end of the step sums over devices.
        mine = [_or_zeros(source, leaf) for leaf in aux]
        return noted(_or_zeros(source, loss), mine, row.microbatch, state)

    y = [everywhere(leaf) for leaf in read(state["last"], row.y)]
    arguments = last_inputs(shared, y, row.microbatch)
    if not shared.training:
        loss, aux, _ = run_last(shared, code.evaluate, arguments)
        return on_source(loss, aux, state)
    jaxpr = code.parts.get(Kind.L, code.train)
    seed = shared.operands.seed / lax.axis_size(shared.axis)
    loss, aux, rest = run_last(shared, jaxpr, [*arguments, seed])
    if Kind.L not in code.parts:
        state, dy = with_last_gradients(rest, state)
    else:
        dy, stash = rest[: len(avals)], rest[len(avals) :]
        state = state | {"share": write(state["share"], row.stash, stash)}
    # All leaves take one reduction.  Only the device of the last stage has room for the result; the
    # others keep their slot's contents.
    whole = lax.psum(dy, shared.axis)
    state = on_source(loss, aux, state)
    pool = state["cotangent"]
    return state | {"cotangent": _kept_on(buffer, avals, whole, row, source, pool)}


def _last_weight_grad(shared: SharedCode, row: Record[Scalar], state: State) -> State:
    """H: the gradient of a device's own part of the parameters of `last`, from the values that its
    L left.  No other device takes part.
    """
    seed = shared.operands.seed / lax.axis_size(shared.axis)
    stash = read(state["share"], row.stash)
    arguments = [*last_inputs(shared, [], row.microbatch), seed, *stash]
    return accumulate("last_gradients", shared.last_code.parts[Kind.H], arguments, state)


def _cut_last(code: ModelCode, axis: str) -> ModelCode:
    """Cut `train(parameters, once, y, extra, seed) -> loss, aux, dparams, dy` into L and H by the
    smallest cut, as B is cut into I and W.  H computes the gradient of parameters.

    One device runs H alone, at any time after its L, so H has no collective over the pipe axis.
    Devices have y only during L, so the leaves of y that H reads are in the stash too.
    """
    last = code.last
    assert last is not None, "a table with L has a loss"
    train, before = last.train, 1 + len(last.aux_avals)
    start = len(last.hoist.invars) + len(last.once_avals)
    inputs = slice(start, start + len(code.kinds[code.kind_of[-1]].y_avals))
    outs = train.outvars
    late = outs[before : before + last.num_trained]
    rest = [*outs[:before], *outs[before + last.num_trained :]]

    def alone(halves: Cut) -> bool:
        return all(axis not in axes for _, axes in collectives(halves.second))

    halves = cut_weights(
        train.replace(outvars=[*late, *rest]),
        params=last.num_trained,
        priced=range(inputs.start, inputs.stop),
        fits=alone,
    )
    if halves is None:
        raise PipelineError(
            "the gradient of a parameter of `last` needs communication over the pipe axis "
            f"{axis!r}, so an H cannot make it while other "
            "devices do something else; use the table without H: jaxpipe.spread_last(schedule)"
        )
    first, second = halves.first, halves.second
    read = [i for i in range(inputs.start, inputs.stop) if halves.second_reads[i]]
    crossing = len(halves.crossing)
    ins = second.invars[: len(second.invars) - crossing]
    kept = [*(second.invars[i] for i in read), *second.invars[len(ins) :]]
    count = len(first.outvars) - crossing
    crossed = [*(first.invars[i] for i in read), *first.outvars[count:]]
    parts = {
        Kind.L: first.replace(outvars=[*first.outvars[:count], *crossed]),
        Kind.H: second.replace(invars=[*ins[: inputs.start], *ins[inputs.stop :], *kept]),
    }
    left = {Place.SHARE: tuple(var.aval for var in kept)}
    return replace(code, last=replace(last, parts=parts, left=left))


# Cuts by the kind that takes a part of another kind's code.
_CUTS: dict[Kind, Callable[[ModelCode, str], ModelCode]] = {Kind.H: _cut_last}
_RUNS: dict[Kind, Callable[[SharedCode, Record[Scalar], State], State]] = {
    Kind.E: _first,
    Kind.G: _first_gradient,
    Kind.L: _last,
    Kind.H: _last_weight_grad,
}


def _ordered(shared: SharedCode, microbatch: Scalar, state: State) -> Scalar:
    """The microbatch.  Where permutes block the device, it depends on the end of earlier blocks of
    the tick (see `exchange.permuted`).
    """
    return jnp.where(state["token"], 0, microbatch) if shared.blocking else microbatch


def _or_zeros(source: Flag, leaf: Any) -> Any:
    return jnp.where(source, leaf, jnp.zeros_like(leaf))


def _kept_on(
    buffer: Any, avals: Any, new: Leaves, row: Record[Scalar], source: Flag, pool: Leaves
) -> Leaves:
    """The pool, in which the device where `source` is True has the new values."""
    held = buffer.read(pool, row.out, avals)
    kept = [jnp.where(source, n, old) for n, old in zip(new, held, strict=True)]
    return buffer.write(pool, row.out, avals, kept)
