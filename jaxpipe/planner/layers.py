"""Layers to stages: the split with the cheapest slowest stage, then layers moved over stage borders
where that shortens the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..layouts.balance import split_layers
from ..layouts.layout import Layout
from .layer_cost import FIRST, LAST, LayerCost, Remat, spread_letters


def balanced(
    layers: str,
    costs: Mapping[str, LayerCost],
    *,
    devices: int,
    chunks: int,
    remat: Remat,
    most_bytes: float = float("inf"),
) -> Layout:
    """The layout whose slowest stage is as fast as possible, with embedding, head and loss counted;
    exact, by dynamic programming.

    No stage holds more than `most_bytes` of parameters, gradients and optimizer state.  LayoutError
    where that cannot be.
    """
    again = remat is Remat.FULL
    spread = spread_letters(layers, costs)
    seconds = [
        0.0
        if c in spread
        else costs[c].forward * (2 if again and c not in (FIRST, LAST) else 1)
        + costs[c].backward_seconds
        for c in layers
    ]
    # Bytes that every device holds do not limit the split.
    sizes = [0.0 if c in (FIRST, LAST) else costs[c].held_bytes for c in layers]
    pieces = split_layers(seconds, stages=devices * chunks, sizes=sizes, most=most_bytes)
    return Layout(tuple(layers[r.start : r.stop] for r in pieces), devices)


def improved(layout: Layout, makespan: Callable[[Layout], float], *, tries: int) -> Layout:
    """Move single layers over borders between stages as long as the step gets shorter.

    A balanced split does not know that a stage at either end may be lighter or heavier without a
    delay.
    """
    best, shortest = layout, makespan(layout)
    settled = False
    while not settled:
        settled = True
        for moved in _moves(best):
            if tries <= 0:
                return best
            tries -= 1
            span = makespan(moved)
            if span < shortest * (1 - _WORTH):
                best, shortest, settled = moved, span, False
                break
    return best


_WORTH = 1e-6  # relative; less is rounding


def _moves(layout: Layout) -> Iterator[Layout]:
    """Every layout with one layer on the other side of a border and no empty stage."""
    stages = layout.stages
    for border in range(1, len(stages)):
        left, right = stages[border - 1], stages[border]
        changed = [(left[:-1], left[-1] + right)] if len(left) > 1 else []
        changed += [(left + right[0], right[1:])] if len(right) > 1 else []
        for one, other in changed:
            yield Layout(
                (*stages[: border - 1], one, other, *stages[border + 1 :]), layout.num_devices
            )
