"""What each stage of a pipeline costs for one microbatch."""

from __future__ import annotations

from typing import Any

from ..arrays import PyTree
from ..engine.costs import Costs
from ..pipeline import Pipeline
from .measured import measure_blocks
from .peak import Peak


def measure_stages(
    pipe: Pipeline,
    params: dict[str, PyTree],
    batch: PyTree,
    *,
    rng: Any = None,
    state: Any = (),
    repeats: int = 10,
    peak: Peak | None = None,
) -> Costs:
    """What each stage of a pipeline costs for one microbatch, as `measure` says of a model.

    Args:
        pipe: the pipeline, whose schedule does not matter.
        params: placed parameters, or shapes (see `place`); values are not used.
        batch: as for `value_and_grad`; arrays or shapes.
        rng, state: as for `value_and_grad`.
        repeats, peak: as for `measure`.

    Raises:
        PipelineError: as `value_and_grad` does, and for repeats below 1.
    """
    found = measure_blocks(pipe, params, batch, rng, state, repeats, peak)
    code, functions, final = (
        found.step.code,
        found.step.job.functions,
        len(found.step.code.kind_of) - 1,
    )
    # Names of what runs with a stage; of what is spread, none do.
    first, first_gradient = ("", "") if functions.spreads_first else ("first", "first gradient")
    last = "" if functions.spreads_last else "last"

    def times(block: str, at_first: str = "", at_last: str = "") -> tuple[float, ...]:
        more = {0: found.seconds.get(at_first, 0.0)}
        more[final] = more.get(final, 0.0) + found.seconds.get(at_last, 0.0)
        return tuple(
            found.seconds[f"{block} {kind}"] + more.get(s, 0.0)
            for s, kind in enumerate(code.kind_of)
        )

    return Costs(
        forward=times("F", first, last),
        input_grad=times("I", first_gradient),
        weight_grad=times("W"),
        backward=times("B", first_gradient),
        transfer=found.seconds["hop"],
        recompute=times("F"),
        activation=tuple(found.sizes[kind].kept + found.sizes[kind].taken for kind in code.kind_of),
        checkpoint=tuple(found.sizes[kind].taken for kind in code.kind_of),
        first=found.seconds["first"] if functions.spreads_first else None,
        first_grad=found.seconds.get("first gradient", 0.0) if functions.spreads_first else None,
        last=found.seconds["last"] if functions.spreads_last else None,
        unit=found.unit,
    )
