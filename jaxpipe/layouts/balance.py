"""Automatic layouts: the layers of a model split into stages, evenly or by the cost of
each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import quoted
from ..table.typed import MAX_STAGES, is_cost, is_flat, is_whole, typed
from .layout import LETTERS, MAX_SYMBOLS, Layout, LayoutError, parse_layout

# Layers and stages; the search keeps the cost of every contiguous run of layers, a matrix of this
# size squared.
MAX_SPLIT = 4096


def split_layers(
    costs: Sequence[float], *, stages: int, allow_empty: bool = False
) -> tuple[range, ...]:
    """Split layers, in order, into stages so that the most expensive stage is as cheap as possible;
    returns the layer numbers per stage.

    Of all such splits, the one with the least sum of squared stage costs, the most even one.
    LayoutError on a negative cost, or on more stages than layers unless `allow_empty`.  Exact, by
    dynamic programming in O(stages * layers^2); at most 4096 layers and stages.

    >>> [len(layers) for layers in split_layers([3, 1, 1, 1, 1, 2], stages=3)]
    [1, 3, 2]
    """
    LayoutError.refuse("cannot split the layers", _cost_faults(costs, stages, allow_empty))
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    # [start, end] -> cost of a stage that holds layers start ... end - 1
    size = total[None, :] - total[:, None]
    layer = np.arange(len(total))
    size[layer[None, :] - layer[:, None] < (0 if allow_empty else 1)] = np.inf
    largest = _cheapest(size, stages, total_of=np.maximum)[1]
    # The bound is itself an entry of `size`, so the comparison is exact and needs no tolerance.
    squares = np.where(size <= largest, size, np.inf) ** 2
    cuts = _cheapest(squares, stages, total_of=np.add)[0]
    return tuple(range(a, b) for a, b in pairwise(cuts))


def balanced_layout(
    layers: str,
    costs: Mapping[str, float] | Sequence[float],
    *,
    devices: int,
    chunks: int = 1,
    letters: str = LETTERS,
    allow_empty: bool = False,
) -> Layout:
    """Lay out a model by the cost of each layer, so that the most expensive stage is as cheap as
    possible.

    `layers` is a layout string without `|`, such as `Et*61,mL`; `costs` gives each letter, or each
    layer, its cost in any unit. LayoutError on a missing cost or on fewer layers than stages
    (unless `allow_empty`).

    >>> str(balanced_layout("Et*8,L", {"E": 0.5, "t": 1, "L": 1.5}, devices=4))
    'Ett|tt|t*3|tL'
    """
    devices, chunks = _require_whole(devices=devices, chunks=chunks)
    model = parse_layout(layers, devices=1, letters=letters)
    if model.num_stages > 1:
        raise LayoutError(
            f"layers={quoted(layers)} already holds '|'; write the layers alone, e.g. "
            "'Et*61,mL', or use parse_layout"
        )
    if isinstance(costs, Mapping):
        model.require_costs(costs)
        costs = [costs[letter] for letter in model.layers]
    if not is_flat(costs):
        raise LayoutError(
            f"costs={quoted(costs)} must be a number for each letter, or for each layer"
        )
    if len(costs) != len(model.layers):
        raise LayoutError(
            f"{len(costs)} costs are given for {len(model.layers)} layers; give each layer, or "
            "each letter, one"
        )
    pieces = split_layers(costs, stages=devices * chunks, allow_empty=allow_empty)
    return Layout(tuple(model.layers[r.start : r.stop] for r in pieces), devices)


@typed(LayoutError)
def even_layout(
    num_layers: int,
    *,
    devices: int,
    chunks: int = 1,
    mtp_layers: int = 0,
    count_embedding: bool = False,
    count_loss: bool = False,
    first_device: int | None = None,
    last_device: int | None = None,
) -> Layout:
    """Spread `num_layers` transformer layers evenly over devices * chunks stages; embedding first,
    MTP layers and loss last.

    `count_embedding` and `count_loss` count the embedding and the loss as a layer (Megatron's
    `--account-for-embedding-in-pipeline-split` and `--account-for-loss-in-pipeline-split`).
    `first_device` and `last_device` fix how many layers these devices hold over all their chunks
    (`--decoder-first-pipeline-num-layers`, `--decoder-last-...`), and the others share the rest.
    Megatron requires that everything divides; here the remainder goes, one layer each, to the last
    stages before the final one, which hold the fewest activations under 1F1B.  LayoutError on
    invalid numbers.

    >>> str(even_layout(6, devices=4, count_embedding=True, count_loss=True))
    'Et|tt|tt|tL'
    """
    fixed = {d: n for d, n in ((0, first_device), (devices - 1, last_device)) if n is not None}
    faults = _even_faults(num_layers, devices, chunks, mtp_layers, fixed)
    if fixed and (count_embedding or count_loss):
        faults.append(
            "first_device and last_device exclude count_embedding and count_loss; give either "
            "the one pair or the other"
        )
    if first_device is not None and last_device is not None and devices == 1:
        faults.append(
            "first_device and last_device are the same device where devices=1; give neither"
        )
    LayoutError.refuse("cannot lay the layers out", faults)
    stages = range(devices * chunks)
    slots = num_layers - sum(fixed.values()) + count_embedding + count_loss
    shares = [([*stages[d::devices]], held) for d, held in fixed.items()]
    shares.append(([s for s in stages if s % devices not in fixed], slots))
    number = {s: n for places, held in shares for s, n in _spread(held, places).items()}
    number[0] -= count_embedding
    number[stages[-1]] -= count_loss
    if min(number.values()) < 0:
        raise LayoutError(
            f"{num_layers} layers are too few for {len(stages)} stages with the embedding and "
            "the loss counted; use fewer stages"
        )
    letters = ["t" * number[s] for s in stages]
    letters[0] = "E" + letters[0]
    letters[-1] += "m" * mtp_layers + "L"
    return Layout(tuple(letters), devices)


def _spread(items: int, places: Sequence[int]) -> dict[int, int]:
    """Items per place: even, with the remainder in the last places before the final one."""
    base, extra = divmod(items, max(1, len(places)))
    favoured = [*places[-2::-1], *places[-1:]][:extra]
    return {place: base + (place in favoured) for place in places}


def _cheapest(
    size: NDArray[np.float64], stages: int, *, total_of: np.ufunc
) -> tuple[list[int], float]:
    """The cheapest cut points that reach the last layer in exactly `stages` steps, and
    their total.
    """
    layers = len(size) - 1
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    came_from = []
    for _ in range(stages):
        reached = total_of(best[:, None], size)
        came_from.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    cuts = [layers]
    for origin in reversed(came_from):
        cuts.append(int(origin[cuts[-1]]))
    return cuts[::-1], float(best[layers])


def _require_whole(**numbers: Any) -> tuple[int, ...]:
    """The numbers as Python's own; LayoutError that lists each that is not a whole one."""
    bad = [
        f"{name} must be a whole number; got {quoted(n)}"
        for name, n in numbers.items()
        if not is_whole(n)
    ]
    LayoutError.refuse("these are not numbers of layers, devices or stages", bad)
    return tuple(map(int, numbers.values()))


def _cost_faults(costs: Sequence[float], stages: int, allow_empty: object) -> list[str]:
    """Everything that is wrong with the arguments of `split_layers`."""
    _require_whole(stages=stages)
    if not isinstance(allow_empty, bool):
        return [f"allow_empty must be True or False; got {quoted(allow_empty)}"]
    if not is_flat(costs):
        return [f"costs must be a flat list of numbers, one per layer; got {quoted(costs)}"]
    if len(costs) > MAX_SPLIT or stages > MAX_SPLIT:
        return [
            f"{len(costs):,} layers over {quoted(stages)} stages; {MAX_SPLIT:,} of each are the "
            "most"
        ]
    faults = [
        f"layer {i} costs {quoted(cost)}; a cost must be a finite number >= 0"
        for i, cost in enumerate(costs)
        if not is_cost(cost)
    ]
    if stages < 1:
        faults.append(f"stages must be >= 1; got {quoted(stages)}")
    if not allow_empty and stages > len(costs):
        faults.append(
            f"{len(costs)} layers cannot fill {stages} stages; use at most {len(costs)}, or "
            "allow_empty=True for empty stages"
        )
    return faults


def _even_faults(
    num_layers: int, devices: int, chunks: int, mtp_layers: int, fixed: dict[int, int]
) -> list[str]:
    """Everything that is wrong with the numbers given to `even_layout`."""
    numbers = (
        ("num_layers", num_layers, 0),
        ("devices", devices, 1),
        ("chunks", chunks, 1),
        ("mtp_layers", mtp_layers, 0),
    )
    faults = [
        f"{name} must be >= {least}; got {quoted(n)}" for name, n, least in numbers if n < least
    ]
    for number, what, most in (
        (num_layers + mtp_layers, "layers", MAX_SYMBOLS),
        (devices * chunks, "stages", MAX_STAGES),
    ):
        if number > most:
            faults.append(f"{quoted(number)} {what} are too many; {most:,} are the most")
    faults += [
        f"device {quoted(d)} cannot hold {quoted(n)} layers; give a number >= 0"
        for d, n in fixed.items()
        if n < 0
    ]
    held = sum(fixed.values())
    if held > max(num_layers, 0) or (held < num_layers and len(fixed) == devices):
        faults.append(
            f"first_device and last_device are to hold {quoted(held)} layers, but there are "
            f"{quoted(num_layers)}; leave one number out, or give others"
        )
    return faults
