"""Cut the joint jaxpr of a stage's forward and backward into hoist, forward, backward, input
gradient and weight gradient, with the fewest bytes between the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from jax.extend import core

from ..errors import PipelineError
from ..jaxprs.cut import (
    Assignment,
    Cut,
    Split,
    cut,
    drop_dead,
    equal_outputs,
    into_scans,
    is_view,
    keep_fewer_residuals,
    keep_first,
    known_from,
    needed_for,
)
from ..jaxprs.cut import weight as cut_weight
from ..jaxprs.equations import collectives, is_light, reads
from ..table.effects import OF_SLICES, LastUse, Liveness, Place
from .code import COTANGENTS, INPUTS, LastCode, StageCode


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
        cut(backward, needed_for(backward, mask)[0], outputs=mask, priced=held),
        cut(
            backward,
            needed_for(backward, _with_light(backward, mask, params))[0],
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
    least = _heavy_in(backward, needed_for(backward, mask)[0])
    counts = [
        _heavy_in(backward, needed_for(backward, [m or j == i for j, m in enumerate(mask)])[0])
        for i in range(params)
    ]
    return [count == least for count in counts] + list(mask[params:])


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


def hoist(jaxpr: core.Jaxpr, known: Sequence[bool], *, at: int) -> tuple[core.Jaxpr, core.Jaxpr]:
    """Cut a jaxpr whose first inputs are constants and parameters in two: (consts, params) -> once,
    which is computed once a step, and the rest.

    `known` says for each constant and parameter whether values that depend on it alone are computed
    once.  Such values are inputs of the rest, after its first `at` inputs.  Equal values are
    computed once only: under remat the backward repeats the forward's.
    """
    head, count = len(known), len(jaxpr.invars)
    parts = cut(
        jaxpr,
        known_from(jaxpr, [*known, *(False for _ in range(count - head))])[0],
        outputs=[False] * len(jaxpr.outvars),
        repeat=is_view,
    )
    once = parts.first.replace(invars=parts.first.invars[:head])
    same = equal_outputs(once)
    distinct = [v for i, v in enumerate(once.outvars) if same[i] == i]
    rest = keep_first(parts.second, count, same)
    invars = [*rest.invars[:at], *rest.invars[count:], *rest.invars[at:count]]
    return drop_dead(once.replace(outvars=distinct))[0], rest.replace(invars=invars)


def pieces(joint: core.Jaxpr, split: int, code: StageCode, *, appended: int = 0) -> StageCode:
    """Cut forward and backward in one jaxpr, (consts, params, x, extra, dy) -> (y, dparams, dx),
    into the pieces; the first `split` equations are the forward's.

    The forward's last `appended` results are the rows for buffers, then the slice's number.
    """
    total, outputs = code.num_inputs, code.num_outputs + appended
    dy = len(joint.invars) - total
    known = code.known
    others = [False] * (len(joint.invars) - len(known))
    jaxpr = keep_fewer_residuals(into_scans(joint), split, known=[*known, *others])
    before = jaxpr.eqns[:split]
    whole, computed = {id(eqn) for eqn in before}, {v for eqn in before for v in eqn.outvars}
    once, rest = hoist(jaxpr, known, at=total)
    start = total + len(once.outvars)

    # Forward | backward, at the border that jax.vjp drew.  A print has no results.  A scan that is
    # cut becomes other equations with the same results.
    border = tuple(id(eqn) in whole or any(v in computed for v in eqn.outvars) for eqn in rest.eqns)
    grads = len(jaxpr.outvars) - outputs
    halves = cut(rest, border, outputs=[True] * outputs + [False] * grads)
    forward = halves.first.replace(invars=halves.first.invars[:start])
    # (consts, params, x, extra | once | residuals | dy)
    ins, end = halves.second.invars, start + dy
    backward = halves.second.replace(invars=[*ins[:start], *ins[end:], *ins[start:end]])
    residuals = range(start, start + len(halves.crossing))

    # Input gradient | weight gradient, by what dx needs.
    dys = range(residuals.stop, len(backward.invars))
    inputs = code.spans(INPUTS, len(known))
    cotangents = code.spans(COTANGENTS, dys.start)
    priced = [*range(len(known), inputs[Place.BUFFER].stop), *residuals, *dys]
    gradients = cut_weights(backward, params=code.num_trained, priced=priced)
    assert gradients is not None, "any cut fits"

    # Residuals that only I needs come before those that W needs.
    late = [i for i in residuals if gradients.second_reads[i]]
    early = [i for i in residuals if not gradients.second_reads[i]]
    order = [*range(start), *early, *late, *dys]

    def reorder(jaxpr: core.Jaxpr) -> core.Jaxpr:
        rest = jaxpr.invars[len(order) :]
        return jaxpr.replace(invars=[*(jaxpr.invars[i] for i in order), *rest])

    returned = forward.outvars[:outputs]
    kept = [forward.outvars[outputs + i - start] for i in (*early, *late)]
    return replace(
        code,
        hoist=once,
        forward=forward.replace(outvars=[*returned, *kept]),
        evaluate=drop_dead(forward.replace(outvars=returned))[0],
        recompute=drop_dead(forward.replace(outvars=kept))[0],
        backward=reorder(backward),
        input_grad=reorder(gradients.first),
        weight_grad=reorder(gradients.second),
        residual_input=tuple(v.aval for v in kept[: len(early)]),
        residual_weight=tuple(v.aval for v in kept[len(early) :]),
        stash=gradients.crossing,
        liveness=_liveness(inputs | cotangents, reads(backward), gradients.second_reads),
    )


def _liveness(
    spans: Mapping[Place, range], by_any: Sequence[bool], by_second: Sequence[bool]
) -> Liveness:
    """The last reader of the inputs at each place, from those that I or W reads, and that W
    reads.
    """

    def last_use(place: Place, span: range) -> LastUse:
        if not span and place in OF_SLICES:
            return LastUse.NONE
        if any(by_second[i] for i in span):
            return LastUse.WEIGHT_GRAD
        is_read = place in COTANGENTS or any(by_any[i] for i in span)
        return LastUse.INPUT_GRAD if is_read else LastUse.FORWARD

    found = Liveness(**{place.value: last_use(place, span) for place, span in spans.items()})
    late_rows = found.buffer_gradient is LastUse.WEIGHT_GRAD
    assert not late_rows, "other slices change the gradients of rows before W"
    return found


def cut_last(last: LastCode, num_y: int, axis: str) -> LastCode:
    """Cut `train(parameters, once, y, extra, seed) -> loss, aux, dparams, dy` into L and H by the
    smallest cut, as B is cut into I and W.  H computes the gradient of parameters.

    One device runs H alone, at any time after its L, so H has no collective over the pipe axis.
    Devices have y only during L, so the leaves of y that H reads are in the stash too.
    """
    train, before = last.train, 1 + len(last.aux_avals)
    start = len(last.hoist.invars) + len(last.hoist.outvars)
    y = range(start, start + num_y)
    outs, end = train.outvars, before + last.num_trained
    halves = cut_weights(
        train.replace(outvars=[*outs[before:end], *outs[:before], *outs[end:]]),
        params=last.num_trained,
        priced=y,
        fits=lambda halves: all(axis not in axes for _, axes in collectives(halves.second)),
    )
    if halves is None:
        raise PipelineError(
            "the gradient of a parameter of `last` needs communication over the pipe axis "
            f"{axis!r}, so an H cannot make it while other "
            "devices do something else; use the table without H: jaxpipe.spread_last(schedule)"
        )
    first, second = halves.first, halves.second
    read = [i for i in y if halves.second_reads[i]]
    crossing = len(halves.crossing)
    own, left = second.invars[: len(second.invars) - crossing], len(first.outvars) - crossing
    kept = [*(second.invars[i] for i in read), *second.invars[len(own) :]]
    crossed = [*(first.invars[i] for i in read), *first.outvars[left:]]
    return replace(
        last,
        input_grad=first.replace(outvars=[*first.outvars[:left], *crossed]),
        weight_grad=second.replace(invars=[*own[: y.start], *own[y.stop :], *kept]),
        stash=tuple(var.aval for var in kept),
    )
