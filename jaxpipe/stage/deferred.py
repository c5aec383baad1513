"""Cut what an L does in two: what the backwards wait for, and the gradient of its parameters, which
can wait for an H.
"""

from __future__ import annotations

from jax.extend import core

from ..errors import PipelineError
from ..jaxprs import Cut, collectives
from .code import DeferredCode
from .weight_cut import cut_weights


def defer_weights(
    train: core.Jaxpr, *, y: slice, before: int, params: int, axis: str
) -> DeferredCode:
    """The two parts of `train(parameters, once, y, extra, seed) -> loss, aux, dparams, dy`, by the
    smallest cut, as W is cut from B.

    H is run by one device alone, at any time after its L.  So it has no collective over the pipe
    axis, and what it reads of y, which devices have only while they are in L, is in the stash too.

    Args:
        train: the whole.
        y: which of its inputs are the last stage's output.
        before: outputs before the gradients of the parameters.
        params: parameters that have one.
        axis: the pipe axis.
    """
    outs = train.outvars
    late, rest = outs[before : before + params], [*outs[:before], *outs[before + params :]]

    def alone(made: Cut) -> bool:
        return all(axis not in axes for _, axes in collectives(made.second))

    made = cut_weights(
        train.replace(outvars=[*late, *rest]), params=params, residuals=y, fits=alone
    )
    if made is None:
        raise PipelineError(
            "the gradient of a parameter of `last` needs communication over the pipe axis "
            f"{axis!r}, so an H cannot make it while other "
            "devices do something else; use the table without H: jaxpipe.spread_last(schedule)"
        )
    first, second = made.first, made.second
    read = [i for i in range(y.start, y.stop) if made.second_reads[i]]
    crossing = len(made.crossing)
    inputs = second.invars[: len(second.invars) - crossing]
    kept = [*(second.invars[i] for i in read), *second.invars[len(inputs) :]]
    outputs = first.outvars[: len(first.outvars) - crossing]
    return DeferredCode(
        loss=first.replace(
            outvars=[*outputs, *(first.invars[i] for i in read), *first.outvars[len(outputs) :]]
        ),
        weights=second.replace(invars=[*inputs[: y.start], *inputs[y.stop :], *kept]),
        stash=tuple(var.aval for var in kept),
    )
