"""Cut the joint jaxpr of a stage's forward and backward into hoist, forward, backward, input
gradient and weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from ..jaxprs import (
    Cut,
    cut,
    drop_dead,
    equal_outputs,
    into_scans,
    keep_fewer_residuals,
    keep_first,
    known_from,
)
from ..jaxprs.equations import reads
from ..jaxprs.min_cut import is_view
from ..table.effects import LastUse, Liveness
from .code import ParamUse, StageCode, inexact
from .weight_cut import cut_weights


@dataclass(frozen=True)
class Inputs:
    """How many leaves each group of inputs of a stage's jaxprs has, in this order."""

    consts: int
    uses: tuple[ParamUse, ...]
    x: int  # with carry and buffers
    extra: int
    carry: int = 0
    buffers: int = 0

    @property
    def params(self) -> int:
        """Parameters, frozen ones too."""
        return len(self.uses)

    @property
    def trained(self) -> int:
        """Parameters that have a gradient."""
        return sum(use.trained for use in self.uses)

    @property
    def known(self) -> list[bool]:
        """Of constants and parameters, what is there before the step's loop; what depends on it
        alone is made once.
        """
        return [True] * self.consts + [use.once for use in self.uses]

    @property
    def total(self) -> int:
        """All of them."""
        return self.consts + self.params + self.x + self.extra


@dataclass(frozen=True)
class Returns:
    """Avals of what a stage takes and returns."""

    y_tree: Any
    y: tuple[Any, ...]
    loss: Any
    state: tuple[Any, ...]
    x: tuple[Any, ...]
    x_wanted: tuple[bool, ...]
    appended: int = 0  # rows, and where they begin, after the state

    @property
    def count(self) -> int:
        """Leaves of y, loss, state and rows."""
        return len(self.y) + (self.loss is not None) + len(self.state) + self.appended


@dataclass(frozen=True)
class Joint:
    """Forward and backward in one jaxpr: (consts, params, x, extra, dy) -> (y, dparams, dx);
    `split` forward equations.
    """

    jaxpr: core.Jaxpr
    consts: tuple[Any, ...]
    split: int


@dataclass(frozen=True)
class Hoisted:
    """A jaxpr without what constants and parameters alone determine, which is computed once a
    step.
    """

    hoist: core.Jaxpr  # (consts, params) -> once
    rest: core.Jaxpr  # (inputs, with once among them)
    once: tuple[Any, ...]  # avals

    @classmethod
    def of(cls, jaxpr: core.Jaxpr, known: Sequence[bool], *, at: int) -> Hoisted:
        """Cut a jaxpr whose first inputs are constants and parameters.

        `known` says of each of these whether what depends on it alone is computed once.  Values
        that are computed once are inputs of the rest, after its first `at`.  Equal ones (under
        remat the backward makes of parameters again what the forward made) are one.
        """
        head, count = len(known), len(jaxpr.invars)
        apart = cut(
            jaxpr,
            known_from(jaxpr, [*known, *(False for _ in range(count - head))]),
            outputs=[False] * len(jaxpr.outvars),
            repeat=is_view,
        )
        hoist = apart.first.replace(invars=apart.first.invars[:head])
        same = equal_outputs(hoist)
        own = [v for i, v in enumerate(hoist.outvars) if same[i] == i]
        rest = keep_first(apart.second, count, same)
        ins = rest.invars
        return cls(
            drop_dead(hoist.replace(outvars=own))[0],
            rest.replace(invars=[*ins[:at], *ins[count:], *ins[at:count]]),
            tuple(v.aval for v in own),
        )


def pieces(joint: Joint, inputs: Inputs, returns: Returns) -> StageCode:
    """Cut the joint jaxpr into the pieces."""
    total, outputs = inputs.total, returns.count
    dy = len(joint.jaxpr.invars) - total
    others = [False] * (inputs.x + inputs.extra + dy)
    jaxpr = keep_fewer_residuals(
        into_scans(joint.jaxpr), joint.split, known=[*inputs.known, *others]
    )
    forward_makes = {v for eqn in jaxpr.eqns[: joint.split] for v in eqn.outvars}
    hoisted = Hoisted.of(jaxpr, inputs.known, at=total)
    start = total + len(hoisted.once)

    # Forward | backward, at the border that jax.vjp drew.
    border = tuple(any(v in forward_makes for v in eqn.outvars) for eqn in hoisted.rest.eqns)
    grads = len(jaxpr.outvars) - outputs
    halves = cut(hoisted.rest, border, outputs=[True] * outputs + [False] * grads)
    forward = halves.first.replace(invars=halves.first.invars[:start])
    # (consts, params, x, extra | once | residuals | dy)
    ins, end = halves.second.invars, start + dy
    backward = halves.second.replace(invars=[*ins[:start], *ins[end:], *ins[start:end]])
    residuals = len(halves.crossing)

    # Input gradient | weight gradient, by what dx needs.
    x = range(inputs.consts + inputs.params, inputs.consts + inputs.params + inputs.x)
    priced = [*x, *range(start, len(backward.invars))]
    apart = cut_weights(backward, params=inputs.trained, priced=priced)
    assert apart is not None, "any cut fits"
    return _classify(
        inputs, hoisted, forward, backward, apart, returns, residuals, dy, joint.consts
    )


def _classify(
    inputs: Inputs,
    hoisted: Hoisted,
    forward: core.Jaxpr,
    backward: core.Jaxpr,
    apart: Cut,
    returns: Returns,
    residuals: int,
    dy: int,
    consts: tuple[Any, ...],
) -> StageCode:
    """Order residuals into those that only I needs and those that W needs, and read off how long
    each input lives.
    """
    start = inputs.total + len(hoisted.once)
    by_weight = list(apart.second_reads[start : start + residuals])
    early = [i for i in range(residuals) if not by_weight[i]]
    late = [i for i in range(residuals) if by_weight[i]]
    order = [
        *range(start),
        *(start + i for i in early),
        *(start + i for i in late),
        *range(start + residuals, start + residuals + dy),
    ]

    def reorder(jaxpr: core.Jaxpr) -> core.Jaxpr:
        rest = jaxpr.invars[len(order) :]
        return jaxpr.replace(invars=[*(jaxpr.invars[i] for i in order), *rest])

    outputs = returns.count
    outs = forward.outvars[outputs:]
    both_reads, begin = reads(backward), inputs.consts + inputs.params
    later = inputs.carry + inputs.buffers
    own, middle, end = inputs.x - later, inputs.x - inputs.buffers, inputs.x

    def last_use(first: int, stop: int) -> LastUse:
        which = slice(begin + first, begin + stop)
        if any(apart.second_reads[which]):
            return LastUse.WEIGHT_GRAD
        return LastUse.INPUT_GRAD if any(both_reads[which]) else LastUse.FORWARD

    def gradient_use(first: int, stop: int | None = None) -> LastUse:
        late = any(apart.second_reads[start + residuals :][first:stop])
        return LastUse.WEIGHT_GRAD if late else LastUse.INPUT_GRAD

    passed = [inexact(a) for a in returns.x[own:]]
    carries, buffers = sum(passed[: inputs.carry]), sum(passed[inputs.carry :])
    dy_own = sum(map(inexact, returns.y)) - carries - buffers
    late_rows = apart.second_reads[start + residuals + dy_own + carries :][:buffers]
    assert not any(late_rows), "other slices change the gradients of rows before W"
    evaluate, _ = drop_dead(forward.replace(outvars=forward.outvars[:outputs]))
    ordered = [*(outs[i] for i in early), *(outs[i] for i in late)]
    recompute, _ = drop_dead(forward.replace(outvars=ordered))
    return StageCode(
        consts=consts,
        hoist=hoisted.hoist,
        forward=forward.replace(outvars=[*forward.outvars[:outputs], *ordered]),
        evaluate=evaluate,
        recompute=recompute,
        backward=reorder(backward),
        input_grad=reorder(apart.first),
        weight_grad=reorder(apart.second),
        y_tree=returns.y_tree,
        y_avals=returns.y[: len(returns.y) - later],
        loss=returns.loss,
        state=returns.state,
        x_avals=returns.x[:own],
        once_avals=hoisted.once,
        residual_input=tuple(outs[i].aval for i in early),
        residual_weight=tuple(outs[i].aval for i in late),
        stash=apart.crossing,
        x_wanted=returns.x_wanted[:own],
        y_wanted=tuple(inexact(a) for a in returns.y[: len(returns.y) - later]),
        trained=tuple(use.trained for use in inputs.uses),
        liveness=Liveness(
            x=last_use(0, own),
            cotangent=gradient_use(0, dy_own if later else None),
            carry=last_use(own, middle) if inputs.carry else LastUse.NONE,
            carry_gradient=gradient_use(dy_own, dy_own + carries) if carries else LastUse.NONE,
            buffer=last_use(middle, end) if inputs.buffers else LastUse.NONE,
            buffer_gradient=LastUse.INPUT_GRAD if buffers else LastUse.NONE,
        ),
        carry=returns.x[own:middle],
        buffers=returns.x[middle:end],
    )
