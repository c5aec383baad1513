"""Cut the joint jaxpr of a stage's forward and backward into hoist, forward, backward, input
gradient and weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from ..errors import PipelineError
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
from ..jaxprs.cut import repeat_layout
from ..jaxprs.equations import Atom
from ..table.effects import LastUse, Liveness
from .code import ParamUse, StageCode, inexact, reads
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


def pieces(joint: Joint, inputs: Inputs, returns: Returns) -> StageCode:
    """Cut the joint jaxpr into the pieces."""
    total, outputs = inputs.total, returns.count
    known = inputs.known + [False] * (inputs.x + inputs.extra)
    dy = joint.jaxpr.invars[total:]
    jaxpr = keep_fewer_residuals(
        into_scans(joint.jaxpr), joint.split, known=[*known, *(False for _ in dy)]
    )
    grads = len(jaxpr.outvars) - outputs

    # Forward | backward, at the border that jax.vjp drew.
    border = tuple(i < joint.split for i in range(len(jaxpr.eqns)))
    halves = cut(jaxpr, border, outputs=[True] * outputs + [False] * grads)
    forward = halves.first.replace(invars=halves.first.invars[:total])
    # Backward inputs: (consts, params, x, extra | residuals | dy).
    base, crossing = halves.second.invars[:total], halves.second.invars[total + len(dy) :]
    backward = halves.second.replace(
        invars=[*base, *crossing, *halves.second.invars[total : total + len(dy)]]
    )

    # What depends on parameters alone leaves both halves.
    once_f = hoist_known(forward, known)
    forward = once_f.second
    aliases = _aliases(forward, total, outputs)
    kept = [i for i, alias in enumerate(aliases) if alias is None]
    forward = forward.replace(
        outvars=[*forward.outvars[:outputs], *(forward.outvars[outputs + i] for i in kept)]
    )
    backward = _rename_residuals(backward, total, aliases, forward, len(once_f.crossing))
    once_count = len(once_f.crossing)
    tail = len(kept) + len(dy)
    once_b = hoist_known(backward, [*known, *[True] * once_count, *[False] * tail])
    hoist = _join_hoists(once_f, once_b, inputs, once_count)
    forward = forward.replace(invars=[*forward.invars, *_fresh(once_b.crossing)])
    late = len(once_b.crossing)
    invars = once_b.second.invars
    head, middle, end = (
        invars[: total + once_count],
        invars[total + once_count : len(invars) - late],
        invars[len(invars) - late :],
    )
    backward = once_b.second.replace(invars=[*head, *end, *middle])
    # Under remat the backward makes of parameters again what the forward made.
    same = equal_outputs(hoist)
    hoist, _ = drop_dead(
        hoist.replace(outvars=[v for i, v in enumerate(hoist.outvars) if same[i] == i])
    )
    forward, backward = keep_first(forward, total, same), keep_first(backward, total, same)
    once = len(hoist.outvars)

    # Input gradient | weight gradient, by what dx needs.
    start = total + once
    apart = cut_weights(backward, params=inputs.trained, residuals=slice(start, start + len(kept)))
    assert apart is not None, "any cut fits"
    return _classify(
        inputs, once, hoist, forward, backward, apart, returns, len(kept), len(dy), joint.consts
    )


def _classify(
    inputs: Inputs,
    once: int,
    hoist: core.Jaxpr,
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
    start = inputs.total + once
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
    late_rows = slice(
        start + residuals + dy_own + carries, start + residuals + dy_own + carries + buffers
    )
    if any(apart.second_reads[late_rows]):
        raise PipelineError(
            "a stage appends rows that do not depend on its input x: W would read gradients that "
            "other slices have changed by then; append rows that are made of x"
        )
    evaluate, _ = drop_dead(forward.replace(outvars=forward.outvars[:outputs]))
    ordered = [*(outs[i] for i in early), *(outs[i] for i in late)]
    recompute, _ = drop_dead(forward.replace(outvars=ordered))
    return StageCode(
        consts=consts,
        hoist=hoist,
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
        once_avals=tuple(v.aval for v in hoist.outvars),
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


def hoist_known(jaxpr: core.Jaxpr, known: Sequence[bool]) -> Cut:
    """Cut off what the known inputs determine."""
    return cut(
        jaxpr,
        known_from(jaxpr, known),
        outputs=[False] * len(jaxpr.outvars),
        recompute=repeat_layout,
    )


def _aliases(forward: core.Jaxpr, total: int, y_count: int) -> list[Atom | None]:
    """For each residual, the input, hoisted value or number that it is, or an earlier equal
    residual; None if it is itself.
    """
    inputs = set(forward.invars)
    seen: set[core.Var] = set()
    found: list[Atom | None] = []
    for atom in forward.outvars[y_count:]:
        if isinstance(atom, core.Literal) or atom in inputs or atom in seen:
            found.append(atom)
            continue
        seen.add(atom)
        found.append(None)
    return found


def _rename_residuals(
    backward: core.Jaxpr, total: int, aliases: Sequence[Atom | None], forward: core.Jaxpr, once: int
) -> core.Jaxpr:
    """Feed aliased residuals of the backward from where they really are.

    Inputs become (consts, params, x, extra | hoisted | residuals that are left | dy).
    """
    hoisted = _fresh([v.aval for v in forward.invars[total : total + once]])
    same: dict[core.Var, Atom] = dict(
        zip(forward.invars, [*backward.invars[:total], *hoisted], strict=True)
    )
    residuals = backward.invars[total : total + len(aliases)]
    env: dict[core.Var, Atom] = {}
    for var, alias in zip(residuals, aliases, strict=True):
        if alias is not None:
            env[var] = alias if isinstance(alias, core.Literal) else same[alias]
    kept = [v for v, alias in zip(residuals, aliases, strict=True) if alias is None]

    def read(atom: Atom) -> Atom:
        return env.get(atom, atom) if isinstance(atom, core.Var) else atom

    eqns = [e.replace(invars=[read(a) for a in e.invars]) for e in backward.eqns]
    invars = [*backward.invars[:total], *hoisted, *kept, *backward.invars[total + len(aliases) :]]
    return backward.replace(invars=invars, outvars=[read(a) for a in backward.outvars], eqns=eqns)


def _join_hoists(early: Cut, late: Cut, inputs: Inputs, once: int) -> core.Jaxpr:
    """One jaxpr (consts, params) -> all hoisted values: the forward's, then the backward's."""
    count = inputs.consts + inputs.params
    heads = early.first.invars[:count]
    env: dict[core.Var, Atom] = dict(zip(late.first.invars[:count], heads, strict=True))
    env.update(
        zip(late.first.invars[inputs.total : inputs.total + once], early.first.outvars, strict=True)
    )

    def read(atom: Atom) -> Atom:
        return env.get(atom, atom) if isinstance(atom, core.Var) else atom

    moved = [e.replace(invars=[read(a) for a in e.invars]) for e in late.first.eqns]
    outs = [*early.first.outvars, *(read(a) for a in late.first.outvars)]
    return early.first.replace(invars=heads, outvars=outs, eqns=[*early.first.eqns, *moved])


def _fresh(avals: Sequence[Any]) -> list[core.Var]:
    newvar = core.gensym()
    return [newvar(a) for a in avals]
