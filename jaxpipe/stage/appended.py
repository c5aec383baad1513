"""Make a traced forward write the rows that its stage appends to buffers.

The forward is traced as if the buffers had the rows already.  Here equations that write the rows
are put before every reader of the buffers.  A buffer is an input of all pieces of a stage, and
never a residual.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ..errors import PipelineError
from ..jaxprs.equations import Atom, renamed
from .code import StageCode


def writing_rows(code: StageCode, count: int) -> StageCode:
    """Return the code with forwards that write the rows.

    In `code`, the last `count` outputs before the residuals are the rows for each buffer, then the
    number of the slice.
    """
    if not count:
        return code
    forward, evaluate = (_writes(each, code, count) for each in (code.forward, code.evaluate))
    return replace(code, forward=forward, evaluate=evaluate)


def _writes(jaxpr: core.Jaxpr, code: StageCode, count: int) -> core.Jaxpr:
    total, buffers = code.num_outputs, len(code.buffers)
    begin = len(code.consts) + code.num_params + len(code.x_avals) + len(code.carry)
    held = jaxpr.invars[begin : begin + buffers]
    *rows, number = jaxpr.outvars[total : total + count]
    newvar = core.gensym()
    filled: dict[core.Var, core.Var] = {buffer: newvar(buffer.aval) for buffer in held}

    writes = [
        eqn
        for buffer, row in zip(held, rows, strict=True)
        for eqn in _write(buffer, filled[buffer], row, number)
    ]
    after = renamed(jaxpr, filled)
    outs = [*after.outvars[:total], *after.outvars[total + count :]]
    return after.replace(outvars=outs, eqns=_in_order([*writes, *after.eqns]))


def _write(buffer: core.Var, filled: core.Var, rows: Atom, number: Atom) -> list[core.JaxprEqn]:
    """Equations that write the rows of slice `number` into the buffer."""
    shape, new = tuple(buffer.aval.shape), tuple(rows.aval.shape)  # type: ignore[attr-defined]
    axis = next(i for i, (whole, own) in enumerate(zip(shape, new, strict=True)) if whole != own)

    def update(buffer: Any, rows: Any, number: Any) -> Any:
        zero, start = jnp.int32(0), number * jnp.int32(new[axis])
        starts = [start if i == axis else zero for i in range(len(shape))]
        return lax.dynamic_update_slice_p.bind(buffer, rows, *starts)

    traced = jax.make_jaxpr(update)(buffer.aval, rows.aval, number.aval).jaxpr
    atoms: dict[Any, Atom] = dict(zip(traced.invars, (buffer, rows, number), strict=True))
    atoms[traced.outvars[0]] = filled

    def named(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else atoms.get(atom, atom)

    return [
        eqn.replace(invars=[named(a) for a in eqn.invars], outvars=[named(v) for v in eqn.outvars])
        for eqn in traced.eqns
    ]


def _in_order(eqns: Sequence[core.JaxprEqn]) -> list[core.JaxprEqn]:
    """Sort the equations so that each follows its inputs; the order is kept where inputs allow."""
    producer = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    needs = [
        {producer[v] for v in eqn.invars if isinstance(v, core.Var) and v in producer}
        for eqn in eqns
    ]
    users: list[list[int]] = [[] for _ in eqns]
    for i, own in enumerate(needs):
        for j in own:
            users[j].append(i)
    left = [len(own) for own in needs]
    ready = [i for i, count in enumerate(left) if not count]
    found = []
    while ready:
        i = heapq.heappop(ready)
        found.append(eqns[i])
        for j in users[i]:
            left[j] -= 1
            if not left[j]:
                heapq.heappush(ready, j)
    if len(found) < len(eqns):
        raise PipelineError(
            "a stage appends rows that depend on their own buffer; append rows that do not depend "
            "on the result of the same ctx.append"
        )
    return found
