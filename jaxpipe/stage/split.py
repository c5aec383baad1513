"""Cut the joint jaxpr of a stage's forward and backward into hoist, forward, backward, input
gradient and weight gradient, with the fewest bytes between the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from jax.extend import core

from ..jaxprs.cut import (
    Assignment,
    Cut,
    Split,
    cut,
    drop_dead,
    equal_outputs,
    is_view,
    keep_first,
    known_from,
    needed_for,
)
from ..jaxprs.cut import weight as cut_weight
from ..jaxprs.equations import is_light, reads
from ..jaxprs.scan_residuals import into_scans, keep_fewer_residuals
from ..table.effects import LastUse, Liveness
from .code import Signature, StageCode


def cut_weights(
    backward: core.Jaxpr,
    *,
    params: int,
    priced: Sequence[int],
    fits: Callable[[Cut], bool] | None = None,
) -> Cut | None:
    """Cut a backward, whose first `params` outputs are gradients of parameters, into I and W; None
    where no cut `fits`.

    Every matmul that the input's gradient needs is in I.  Every other matmul is in W.  Light
    equations may be in either.  For example, the gradient of a norm's scale is a sum over values
    that I has, so I computes it where the result is smaller than those values.  An input whose
    number is in `priced` stays in memory until W if W reads it.
    """
    mask = [False] * params + [True] * (len(backward.outvars) - params)
    held = [backward.invars[i] for i in priced]
    found = [
        cut(backward, needed_for(backward, mask), outputs=mask, priced=held),
        cut(
            backward,
            needed_for(backward, _with_light(backward, mask, params)),
            outputs=mask,
            early=is_light,
            priced=held,
        ),
    ]

    def weight(halves: Cut) -> int:
        """Bytes in memory between I and W."""
        return halves.weight + sum(
            cut_weight(backward.invars[i], None) for i in priced if halves.second_reads[i]
        )

    return min(filter(fits, found), key=weight, default=None)


def _with_light(backward: core.Jaxpr, mask: Sequence[bool], params: int) -> list[bool]:
    """The mask, with the parameters added whose gradients need no more matmuls."""
    least = _heavy_in(backward, needed_for(backward, mask))
    alone = [
        _heavy_in(backward, needed_for(backward, [m or j == i for j, m in enumerate(mask)]))
        for i in range(params)
    ]
    return [count == least for count in alone] + list(mask[params:])


def _heavy_in(jaxpr: core.Jaxpr, assignment: Assignment) -> int:
    """The number of heavy equations in the first part."""
    found = 0
    for eqn, choice in zip(jaxpr.eqns, assignment, strict=True):
        if choice is False:
            continue
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            found += _heavy_in(
                body, choice.body if isinstance(choice, Split) else (True,) * len(body.eqns)
            )
        else:
            found += not is_light(eqn)
    return found


@dataclass(frozen=True)
class Hoisted:
    """A jaxpr in two parts.  The first is computed once a step, from constants and parameters
    alone.
    """

    hoist: core.Jaxpr  # (consts, params) -> once
    rest: core.Jaxpr  # (inputs, with once among them)

    @classmethod
    def of(cls, jaxpr: core.Jaxpr, known: Sequence[bool], *, at: int) -> Hoisted:
        """Cut a jaxpr whose first inputs are constants and parameters.

        `known` says for each of these whether values that depend on it alone are computed once.
        Such values are inputs of the rest, after its first `at` inputs.  Equal values are computed
        once only: under remat the backward repeats the forward's.
        """
        head, count = len(known), len(jaxpr.invars)
        parts = cut(
            jaxpr,
            known_from(jaxpr, [*known, *(False for _ in range(count - head))]),
            outputs=[False] * len(jaxpr.outvars),
            repeat=is_view,
        )
        hoist = parts.first.replace(invars=parts.first.invars[:head])
        same = equal_outputs(hoist)
        own = [v for i, v in enumerate(hoist.outvars) if same[i] == i]
        rest = keep_first(parts.second, count, same)
        ins = rest.invars
        return cls(
            drop_dead(hoist.replace(outvars=own))[0],
            rest.replace(invars=[*ins[:at], *ins[count:], *ins[at:count]]),
        )


def pieces(joint: core.Jaxpr, split: int, signature: Signature, *, appended: int = 0) -> StageCode:
    """Cut forward and backward in one jaxpr, (consts, params, x, extra, dy) -> (y, dparams, dx),
    into the pieces; the first `split` equations are the forward's.

    The forward's last `appended` results are the rows for buffers, then the slice's number.
    """
    total, outputs = signature.num_inputs, signature.num_outputs + appended
    dy = len(joint.invars) - total
    known = signature.known
    others = [False] * (len(joint.invars) - len(known))
    jaxpr = keep_fewer_residuals(into_scans(joint), split, known=[*known, *others])
    before = jaxpr.eqns[:split]
    whole, computed = {id(eqn) for eqn in before}, {v for eqn in before for v in eqn.outvars}
    hoisted = Hoisted.of(jaxpr, known, at=total)
    start = total + len(hoisted.hoist.outvars)

    # Forward | backward, at the border that jax.vjp drew.  A print has no results.  A scan that is
    # cut becomes other equations with the same results.
    border = tuple(
        id(eqn) in whole or any(v in computed for v in eqn.outvars) for eqn in hoisted.rest.eqns
    )
    grads = len(jaxpr.outvars) - outputs
    halves = cut(hoisted.rest, border, outputs=[True] * outputs + [False] * grads)
    forward = halves.first.replace(invars=halves.first.invars[:start])
    # (consts, params, x, extra | once | residuals | dy)
    ins, end = halves.second.invars, start + dy
    backward = halves.second.replace(invars=[*ins[:start], *ins[end:], *ins[start:end]])
    residuals = range(start, start + len(halves.crossing))

    # Input gradient | weight gradient, by what dx needs.
    x, carry, buffers = _ranges(len(known), signature.x_avals, signature.carry, signature.buffers)
    dys = range(residuals.stop, len(backward.invars))
    dy_own, dcarry, dbuffers = _ranges(
        dys.start, signature.dy_avals, signature.carry_gradients, signature.buffer_gradients
    )
    priced = [*x, *carry, *buffers, *residuals, *dys]
    gradients = cut_weights(backward, params=signature.num_trained, priced=priced)
    assert gradients is not None, "any cut fits"

    # Residuals that only I needs come before those that W needs.
    late = [i for i in residuals if gradients.second_reads[i]]
    early = [i for i in residuals if not gradients.second_reads[i]]
    order = [*range(start), *early, *late, *dys]

    def reorder(jaxpr: core.Jaxpr) -> core.Jaxpr:
        rest = jaxpr.invars[len(order) :]
        return jaxpr.replace(invars=[*(jaxpr.invars[i] for i in order), *rest])

    def last_use(inputs: Sequence[int], otherwise: LastUse) -> LastUse:
        read = reads(backward)
        if any(gradients.second_reads[i] for i in inputs):
            return LastUse.WEIGHT_GRAD
        return LastUse.INPUT_GRAD if any(read[i] for i in inputs) else otherwise

    if dbuffers:
        late_rows = last_use(dbuffers, LastUse.NONE) is LastUse.WEIGHT_GRAD
        assert not late_rows, "other slices change the gradients of rows before W"
    returned = forward.outvars[:outputs]
    kept = [forward.outvars[outputs + i - start] for i in (*early, *late)]
    return StageCode(
        **vars(signature),
        hoist=hoisted.hoist,
        forward=forward.replace(outvars=[*returned, *kept]),
        evaluate=drop_dead(forward.replace(outvars=returned))[0],
        recompute=drop_dead(forward.replace(outvars=kept))[0],
        backward=reorder(backward),
        input_grad=reorder(gradients.first),
        weight_grad=reorder(gradients.second),
        residual_input=tuple(v.aval for v in kept[: len(early)]),
        residual_weight=tuple(v.aval for v in kept[len(early) :]),
        stash=gradients.crossing,
        liveness=Liveness(
            x=last_use(x, LastUse.FORWARD),
            cotangent=last_use(dy_own if signature.passed else dys, LastUse.INPUT_GRAD),
            carry=last_use(carry, LastUse.FORWARD) if carry else LastUse.NONE,
            carry_gradient=last_use(dcarry, LastUse.INPUT_GRAD) if dcarry else LastUse.NONE,
            buffer=last_use(buffers, LastUse.FORWARD) if buffers else LastUse.NONE,
            buffer_gradient=LastUse.INPUT_GRAD if dbuffers else LastUse.NONE,
        ),
    )


def _ranges(start: int, *groups: Sequence[Any]) -> list[range]:
    """The ranges of consecutive groups of inputs."""
    ends = list(accumulate(map(len, groups), initial=start))
    return [range(a, b) for a, b in pairwise(ends)]
