"""Layouts: which layers each stage holds, as Megatron's layout strings (`Et*3|(tt|)*29,m|L`), read
and written, and layouts that are balanced by costs or by counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Annotated, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import MAX_STAGES, Count, Fits, ParseError, is_cost, listed, quoted, set_typed, typed
from ..table.columns import in_columns
from ..table.placement import Placement

LETTERS = "EtmL"
# A typed-in repeat such as ((t*999)*999)*999 must not take the machine's memory; no model has a
# hundred thousand layers.
MAX_SYMBOLS = 100_000  # of the text, and of the layout with every repeat written out
_SYNTAX = "|()*,"

T = TypeVar("T")


class LayoutError(ParseError):
    """A layout that cannot be read or does not fit; `.positions` holds the index of every faulty
    character.
    """

    positions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The layers of every stage, one letter per layer; stage i is chunk i div P of device i mod P
    (Megatron-Core's rule).

    `str(layout)` is a canonical layout string, which Megatron-Core reads too.

    >>> layout = parse_layout("Et|tt|tt|tL", devices=2)
    >>> layout.stages, layout.placement.stage_to_device, layout.chunks
    (('Et', 'tt', 'tt', 'tL'), (0, 1, 0, 1), 2)
    >>> str(layout)
    'Et|tt|tt|tL'
    """

    stages: tuple[str, ...]
    num_devices: int

    def __post_init__(self) -> None:
        """LayoutError where the stages do not divide over the devices."""
        set_typed(self, LayoutError)
        stages, devices = len(self.stages), self.num_devices
        if stages > MAX_STAGES:
            raise LayoutError(f"the layout has {stages:,} stages; {MAX_STAGES:,} are the most")
        if devices < 1 or not stages:
            raise LayoutError(
                "a layout needs at least one stage and devices >= 1; "
                f"got {stages} stages and devices={quoted(devices)}"
            )
        if stages % devices:
            fits = " or ".join(str(d) for d in range(1, stages + 1) if stages % d == 0)
            raise LayoutError(
                f"{stages} stages do not divide over {quoted(devices)} devices: add "
                f"{quoted(-stages % devices)} more (a '|' begins one, which may be empty), or use "
                f"{fits} devices"
            )

    @property
    def num_stages(self) -> int:
        """S, the number of stages."""
        return len(self.stages)

    @property
    def chunks(self) -> int:
        """V, the number of stages on each device."""
        return self.num_stages // self.num_devices

    @property
    def placement(self) -> Placement:
        """The same map as a `Placement`, ready for a schedule."""
        return Placement.loop(devices=self.num_devices, chunks=self.chunks)

    @cached_property
    def layers(self) -> str:
        """All layers in model order, one letter per layer."""
        return "".join(self.stages)

    @typed(LayoutError)
    def count(self, letter: str) -> tuple[int, ...]:
        """Per stage, how many layers of this letter it holds."""
        return tuple(stage.count(letter) for stage in self.stages)

    @typed(LayoutError)
    def stage_costs(self, costs: Mapping[str, float]) -> tuple[float, ...]:
        """Per stage, the sum of its layers' costs, e.g. for `Costs(forward=...)`; LayoutError names
        letters without a cost.
        """
        self.require_costs(costs)
        return tuple(float(sum(costs[letter] for letter in stage)) for stage in self.stages)

    def require_costs(self, costs: Mapping[str, object]) -> None:
        """LayoutError where a letter has no cost."""
        if missing := sorted(set(self.layers) - set(costs)):
            raise LayoutError(
                f"no cost is given for layer {', '.join(missing)}; give every letter of "
                f"{quoted(str(self))} one"
            )

    def table(self) -> str:
        """One line per device and one column per chunk; equal devices that follow each other share
        a line.
        """
        texts = [_stage_text(stage) or "(empty)" for stage in self.stages]
        lines = [("", *(f"chunk {v}" for v in range(self.chunks)))]
        devices = range(self.num_devices)
        for row, group in groupby(devices, key=lambda d: texts[d :: self.num_devices]):
            first, *others = group
            lines.append((f"device {first}" + (f"-{others[-1]}" if others else ""), *row))
        return in_columns(lines)

    def __str__(self) -> str:
        return _canonical(self.stages)


@typed(LayoutError)
def check_layout(
    layout: Layout, *, num_layers: int | None = None, mtp_layers: int | None = None
) -> Layout:
    """Return the layout if it is a complete language model in order: one E, first; t, then m; one
    L, last.

    With `num_layers` and `mtp_layers` the numbers of t and m must match too.  LayoutError lists
    every fault. Source: Megatron-Core, PipelineParallelLayerLayout.validate_layer_layout.
    """
    layers = layout.layers
    numbers = {letter: layers.count(letter) for letter in LETTERS}
    faults = [
        f"the {name} {letter} occurs {numbers[letter]} times; write it exactly once"
        for letter, name in (("E", "embedding"), ("L", "loss"))
        if numbers[letter] != 1
    ]
    places = ["E", "", "m", "L"]  # other letters are transformer layers, as t is
    order = [places.index(letter if letter in places else "") for letter in layers]
    if order != sorted(order):
        faults.append("the layers are out of order; write E first, then every t, every m, L last")
    faults += [
        f"the layout has {numbers[letter]} layers {letter}, but the model has {quoted(expected)}"
        for letter, expected in (("t", num_layers), ("m", mtp_layers))
        if expected not in (None, numbers[letter])
    ]
    LayoutError.refuse(f"the layout {quoted(str(layout))} is not a complete model", faults)
    return layout


@typed(LayoutError)
def parse_layout(text: str, *, devices: int, letters: str = LETTERS) -> Layout:
    """Read a layout string: one letter per layer, `|` between stages, `x*n` and `(...)*n` repeat,
    commas have no meaning.

    E is the embedding, t a transformer layer, m a multi-token-prediction layer, L the loss;
    `letters` names others.  Stages may be empty and groups may be nested (Megatron-Core's reader
    does not nest).  LayoutError points at every fault. Source: Megatron-Core,
    `--pipeline-model-parallel-layout` (PipelineParallelLayerLayout.parse_str_to_list).

    >>> parse_layout("Et*3|(tt|)*29,m|L", devices=16).stages[:2]
    ('Ettt', 'tt')
    """
    bad = [c for c in letters if c in _SYNTAX or c.isspace() or c.isdigit()]
    if bad or len(set(letters)) != len(letters):
        raise LayoutError(
            f"letters={quoted(letters)} must be distinct characters, none of them a digit, a "
            f"space or one of {_SYNTAX}"
        )
    if len(text) > MAX_SYMBOLS:
        raise LayoutError(
            f"the layout has {len(text):,} characters; {MAX_SYMBOLS:,} are the most (repeats are "
            "written t*3)"
        )
    return Layout(tuple(_written_out(text, letters).split("|")), devices)


def _runs(items: Iterable[T]) -> list[tuple[T, int]]:
    """Each run of equal items as one, with its length."""
    return [(item, len(list(group))) for item, group in groupby(items)]


def _stage_text(stage: str) -> str:
    """`Ettt` -> `Et*3`: runs of three or more as a repeat, with a comma after it unless it ends the
    stage.
    """
    texts = (letter * n if n < 3 else f"{letter}*{n}," for letter, n in _runs(stage))
    return "".join(texts).removesuffix(",")


def _canonical(stages: tuple[str, ...]) -> str:
    """Runs of three or more equal stages as `(tt|)*29,`, or `(|tt)*29` where the run ends the
    layout.
    """
    *before, (last, count) = [(_stage_text(stage), n) for stage, n in _runs(stages)]
    texts = [f"{stage}|" * n if n < 3 else f"({stage}|)*{n}," for stage, n in before]
    # What is before the last run has already begun its first stage.
    rest = f"|{last}" * (count - 1) if count < 3 else f"(|{last})*{count - 1}"
    return "".join((*texts, last, rest))


_SHOWN = 100  # characters of a layout that an error shows


def _point(text: str, faults: list[tuple[int, str]]) -> str:
    """The layout, or the part with the first fault, with a caret under each faulty character; then
    a line for each fault.
    """
    start = max(0, min(faults[0][0] - _SHOWN // 3, len(text) + 1 - _SHOWN))
    before, after = "..." if start else "", "..." if start + _SHOWN < len(text) else ""
    # Tabs and newlines would move the carets; they have no meaning, so they are shown as spaces.
    shown = (
        before + "".join(" " if c.isspace() else c for c in text[start : start + _SHOWN]) + after
    )
    places = {at - start + len(before) for at, _ in faults if start <= at <= start + _SHOWN}
    carets = "".join("^" if place in places else " " for place in range(max(places) + 1))
    head = f"the layout has {len(faults)} fault{'s' if len(faults) > 1 else ''}"
    return listed(head, [shown, carets, *(f"character {at + 1}: {why}" for at, why in faults)])


# A repeat with its number, a number, or any character that has a meaning.
_TOKEN = re.compile(r"\*[\s,]*([0-9]*)|[0-9]+|[^\s,]")


def _written_out(text: str, letters: str) -> str:
    """The text with every repeat written out; LayoutError with all faults."""
    faults: list[tuple[int, str]] = []
    # The groups that are open: where each begins, and the pieces in it.
    groups: list[tuple[int, list[str]]] = [(-1, [])]
    symbols = 0
    # Where the last piece begins, which a repeat may follow; None where it may not.
    begin: int | None = None
    for token in _TOKEN.finditer(text):
        at, char, pieces = token.start(), token[0][0], groups[-1][1]
        if char == "(":
            groups.append((at, []))
            begin = None
        elif char == ")" and len(groups) > 1:
            begin, inner = groups.pop()
            groups[-1][1].append("".join(inner))
        elif char == "|" or char in letters:
            symbols += 1
            begin = at
            pieces.append(char)
        elif char == "*" and begin is not None and token[1]:
            # Python refuses to read numbers of thousands of digits, so look at the length first.
            times = int(token[1]) if len(token[1]) <= 9 else MAX_SYMBOLS + 1
            more = len(pieces[-1]) * (times - 1)
            if symbols + more <= MAX_SYMBOLS:
                symbols += more
                pieces[-1] *= times
            else:
                many = f"there are more than {MAX_SYMBOLS:,} layers and stages"
                faults.append((begin, f"with this repeat {many}; write a smaller number"))
            begin = None
        else:
            faults.append((at, _why_not(token, letters)))
            begin = None
    faults += [(at, "this '(' is never closed; write ')' after its group") for at, _ in groups[1:]]
    if faults:
        faults.sort()
        error = LayoutError(_point(text, faults), tuple(why for _, why in faults))
        error.positions = tuple(at for at, _ in faults)
        raise error
    return "".join(groups[0][1])


def _why_not(token: re.Match[str], letters: str) -> str:
    """Why a token is not allowed where it is."""
    char = token[0][0]
    if char == ")":
        return "this ')' closes no group; remove it, or open one with '('"
    if char == "*" and not token[1]:
        return "'*' needs a number after it, as in t*3"
    if char == "*":
        return "'*' needs a layer or a group before it, as in t*3, (tt|)*29 or (t*2)*3"
    if char in "0123456789":
        return f"the number {token[0][:_SHOWN]} has no '*' before it; write t*3 for ttt"
    return (
        f"{char!r} is not a layer; write one of {' '.join(letters)}, or pass "
        f"letters={quoted(letters + char)} to allow it"
    )


# Layers and stages; the search keeps the cost of every contiguous run of layers, a matrix of this
# size squared.
MAX_SPLIT = 4096


@typed(LayoutError)
def split_layers(
    costs: Sequence[object], *, stages: int, allow_empty: bool = False
) -> tuple[range, ...]:
    """Split layers, in order, into stages so that the most expensive stage is as cheap as possible;
    returns the layer numbers per stage.

    Of all such splits, the one with the least sum of squared stage costs, the most even one.
    LayoutError on a negative cost, or on more stages than layers unless `allow_empty`.  Exact, by
    dynamic programming in O(stages * layers^2); at most 4096 layers and stages.

    >>> [len(layers) for layers in split_layers([3, 1, 1, 1, 1, 2], stages=3)]
    [1, 3, 2]
    """
    layers = len(costs)
    must = "a cost must be a finite number >= 0"
    faults = [f"layer {i} costs {quoted(c)}; {must}" for i, c in enumerate(costs) if not is_cost(c)]
    if stages < 1:
        faults.append(f"stages must be >= 1; got {quoted(stages)}")
    if max(layers, stages) > MAX_SPLIT:
        most = f"{MAX_SPLIT:,} of each are the most"
        faults.append(f"{layers:,} layers over {quoted(stages)} stages; {most}")
    elif stages > layers and not allow_empty:
        faults.append(
            f"{layers} layers cannot fill {stages} stages; use at most {layers}, or "
            "allow_empty=True for empty stages"
        )
    LayoutError.refuse("cannot split the layers", faults)
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


@typed(LayoutError)
def balanced_layout(
    layers: str,
    costs: Mapping[str, object] | Sequence[object],
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
    model = parse_layout(layers, devices=1, letters=letters)
    if model.num_stages > 1:
        raise LayoutError(
            f"layers={quoted(layers)} already holds '|'; write the layers alone, e.g. "
            "'Et*61,mL', or use parse_layout"
        )
    if isinstance(costs, Mapping):
        model.require_costs(costs)
        costs = [costs[letter] for letter in model.layers]
    if len(costs) != len(model.layers):
        raise LayoutError(
            f"{len(costs)} costs are given for {len(model.layers)} layers; give each layer, or "
            "each letter, one"
        )
    pieces = split_layers(costs, stages=devices * chunks, allow_empty=allow_empty)
    return Layout(tuple(model.layers[r.start : r.stop] for r in pieces), devices)


_LayerCount: TypeAlias = Annotated[int, Fits("a whole number of at least 0", lambda n: n >= 0)]


@typed(LayoutError)
def even_layout(
    num_layers: _LayerCount,
    *,
    devices: Count,
    chunks: Count = 1,
    mtp_layers: _LayerCount = 0,
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
    held, counted = sum(fixed.values()), count_embedding + count_loss
    layers, pieces = num_layers + mtp_layers, devices * chunks
    wrong = {
        f"{quoted(layers)} layers and {quoted(pieces)} stages are too many; "
        f"{MAX_SYMBOLS:,} and {MAX_STAGES:,} are the most": (
            layers > MAX_SYMBOLS or pieces > MAX_STAGES
        ),
        f"first_device and last_device are to hold {', '.join(map(quoted, fixed.values()))} of "
        f"{quoted(num_layers)} layers; give numbers >= 0, no more than there are, and leave one "
        "out where no other device could hold the rest": (
            min((0, *fixed.values())) < 0
            or held > num_layers
            or (held < num_layers and len(fixed) == devices)
        ),
        "first_device and last_device exclude count_embedding and count_loss, and each other where "
        "devices=1": bool(fixed and counted)
        or (devices == 1 and None not in (first_device, last_device)),
    }
    LayoutError.refuse(
        "cannot lay the layers out", (text for text, is_so in wrong.items() if is_so)
    )
    stages = range(devices * chunks)
    slots = num_layers - held + counted
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
