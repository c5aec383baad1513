"""Cut a backward into I and W: of two cuts, the one with the fewest bytes between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.extend import core

from ..jaxprs import Cut, cut, cut_weight, is_light, needed_for
from ..jaxprs.slices import Assignment, Split


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
