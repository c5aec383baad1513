"""The layers of each stage: how they are stacked, and the stage functions that they make; the parts
of a model besides its stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, groupby, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..arrays import Number, Params, PyTree, axis_faults
from ..errors import PipelineError
from ..layouts.layout import Layout
from ..table.placement import Placement
from .calls import LAYER_KEYWORDS, Context, Function, UserFunction
from .functions import Extra

EMBEDDING, LOSS = "E", "L"
OUTER = ("first", "last", "shared")


def with_outer(params: Mapping[str, object]) -> Params:
    """The parameters with an empty tree for what has none."""
    return {"stages": params["stages"], **{key: params.get(key, {}) for key in OUTER}}


def owned_stages(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """Per device, the stages whose parameters it holds, in chunk order."""
    table: list[list[int]] = [[] for _ in range(placement.num_devices)]
    for stage, devices in enumerate(placement.devices_of):
        table[devices[0]].append(stage)
    return tuple(map(tuple, table))


class _LayerRun(NamedTuple):
    """Some equal layers that follow each other: rows `start .. stop` of a group's stack; `layer` is
    the place of the first in its stage.
    """

    letter: str
    group: int
    start: int
    stop: int
    size: int  # of the whole group
    layer: int


@dataclass(frozen=True)
class LayerMap:
    """Which layers each stage has, and how they are stacked.

    Canonical parameters of a letter are stacked in model order, leaves [n, ...].  A stage of "ttt"
    that shares its arrays with stages of "tt" has two stacks: one of the two layers that all have,
    and one of the third.  So its parameters, residuals and code have the shapes of theirs, and no
    stage computes a layer that it does not have.
    """

    stages: tuple[str, ...]  # letters of each stage, without E and L
    # per stage, the number of those with which it shares arrays: those of its chunk, or all
    group_of: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, placement: Placement, *, in_turn: bool = False) -> LayerMap:
        """Take E off the first stage and L off the last; PipelineError where the layout has them
        elsewhere, or another number of stages.  `in_turn`: all stages are in the same arrays.
        """
        faults = []
        if layout.num_stages != placement.num_stages:
            faults.append(
                f"layout {str(layout)!r} has {layout.num_stages} stages but the schedule has "
                f"{placement.num_stages}; build the schedule "
                f"with chunks={max(1, layout.num_stages // placement.num_devices)}, or write "
                f"{placement.num_stages - 1} bars"
            )
        for letter, end, right in (
            (EMBEDDING, "first", layout.stages[0][:1]),
            (LOSS, "last", layout.stages[-1][-1:]),
        ):
            if layout.layers.count(letter) > (right == letter):
                faults.append(
                    f"{letter} can only be the {end} layer, and on the {end} stage, of layout "
                    f"{str(layout)!r}"
                )
        PipelineError.refuse("the layout does not fit", faults)
        letters = [stage.replace(EMBEDDING, "").replace(LOSS, "") for stage in layout.stages]
        chunks = {stage: v for row in owned_stages(placement) for v, stage in enumerate(row)}
        if in_turn and len({*letters}) > 1:
            chunks = dict.fromkeys(chunks, 0)
        return cls(tuple(letters), tuple(chunks[s] for s in range(placement.num_stages)))

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters of layers, in alphabetical order."""
        return tuple(sorted(set("".join(self.stages))))

    def bounds(self, stage: int, letter: str) -> list[int]:
        """Where a stage's stacks of a letter begin among its layers of it, and where the last
        ends.
        """
        own = self.stages[stage].count(letter)
        mates = (number == self.group_of[stage] for number in self.group_of)
        counts = {mate.count(letter) for mate in compress(self.stages, mates)}
        return sorted(count for count in {0, *counts} if count <= own)

    def split(self, by_letter: Mapping[str, PyTree]) -> list[dict[str, tuple[PyTree, ...]]]:
        """Leaves [n, ...] of each letter -> the stages' own trees, {letter: stacks}.  Optimizers
        have no state for letters that are frozen.
        """
        start, found = dict.fromkeys(self.letters, 0), []
        for s, stage in enumerate(self.stages):
            own: dict[str, tuple[PyTree, ...]] = {}
            for letter in sorted(set(stage) & by_letter.keys()):
                ends = [start[letter] + bound for bound in self.bounds(s, letter)]
                own[letter] = tuple(
                    jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], by_letter[letter])
                    for a, b in pairwise(ends)
                )
                start[letter] = ends[-1]
            found.append(own)
        return found

    def join(self, stages: Sequence[Mapping[str, Sequence[PyTree]]]) -> dict[str, PyTree]:
        """The inverse of `split`."""
        stacks = {n: [stack for own in stages for stack in own.get(n, ())] for n in self.letters}
        return {
            letter: jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *own)
            for letter, own in stacks.items()
            if own
        }

    def faults(self, by_letter: Any) -> list[str]:
        """Faults of canonical parameters of the stages."""
        keys = sorted(by_letter) if isinstance(by_letter, Mapping) else type(by_letter).__name__
        if keys != list(self.letters):
            return [
                f'"stages" must be a dict with the letters {list(self.letters)}, each a tree of '
                f"leaves [layers, ...]; got {keys}"
            ]
        faults = []
        for letter in self.letters:
            count = sum(stage.count(letter) for stage in self.stages)
            axis = f"the {count} layers {letter} of the layout"
            faults += axis_faults(by_letter[letter], f"stages[{letter!r}]", count, axis)
        return faults

    def functions(
        self, layers: Mapping[str, UserFunction], *, has_loss: bool
    ) -> tuple[Function, ...]:
        """A stage function for each stage; stages of equal letters and stacks, and so of equal
        code, share one.
        """
        known = {
            letter: Function.of(layers[letter], f"layers[{letter!r}]", LAYER_KEYWORDS)
            for letter in self.letters
        }
        runs = [tuple(self._runs(stage)) for stage in range(len(self.stages))]
        functions = {own: self._function(own, known, has_loss=has_loss) for own in {*runs}}
        return tuple(functions[own] for own in runs)

    def _function(
        self, runs: tuple[_LayerRun, ...], layers: Mapping[str, Function], *, has_loss: bool
    ) -> Function:
        """The function of a stage that is made of these runs of layers."""
        offsets = tuple(accumulate(map(len, self.stages), initial=0))[:-1]
        letters = "".join(run.letter * (run.stop - run.start) for run in runs)
        wants = frozenset(keyword for run in runs for keyword in layers[run.letter].wants)

        def stage(params: PyTree, x: PyTree, **keywords: Any) -> PyTree:
            losses: list[Array] = []
            for run in runs:
                layer = _Layer(layers[run.letter], keywords, has_loss)
                x, more = layer.run_each(run, params[run.letter][run.group], x, offsets)
                losses += [loss for loss in more if loss is not None]
            return (x, sum(losses[1:], losses[0]) if losses else None) if has_loss else x

        return Function(stage, f"stage of layers {letters!r}", wants)

    def _runs(self, stage: int) -> Iterator[_LayerRun]:
        """A stage's layers in order, as parts of its stacks; layers count from the stage's first of
        the letter.
        """
        seen = dict.fromkeys(self.letters, 0)
        place = 0
        for letter, equal in groupby(self.stages[stage]):
            first = seen[letter]
            seen[letter] += len(list(equal))
            for g, (begin, end) in enumerate(pairwise(self.bounds(stage, letter))):
                start, stop = max(first, begin), min(seen[letter], end)
                if start < stop:
                    size, at = end - begin, place + start - first
                    yield _LayerRun(letter, g, start - begin, stop - begin, size, at)
            place += seen[letter] - first


class _Layer(NamedTuple):
    """The function of a layer, and the keywords of its stage."""

    function: Function
    keywords: Extra
    has_loss: bool

    def run[X](self, x: X, row: PyTree, number: Number, place: int = 0) -> tuple[X, Array | None]:
        """x and the loss of one layer; `number` counts the model's layers, `place` those of the
        stage.
        """
        function = self.function
        own = {name: self.keywords[name] for name in function.wants}
        if "ctx" in own:
            ctx = own["ctx"]
            ledger = None if ctx.ledger is None else ctx.ledger.of_layer(place)
            own["ctx"] = ctx.at_layer(number)._replace(ledger=ledger)
        out = function.run(row, x, keywords=own)
        if not self.has_loss:
            return out, None
        x, loss = function.results({"x": "", "loss": "stage_loss=True"}, out).values()
        return x, None if loss is None else function.loss_of(loss)

    def run_each[X](
        self, run: _LayerRun, stack: PyTree, x: X, offsets: tuple[int, ...]
    ) -> tuple[X, list[Array | None]]:
        """Apply some rows of a stack one after the other; returns their losses too, or the sum.
        `offsets[stage]` layers come before a stage.

        Layers that append rows are no scan, since each has buffers of its own.
        """
        count = run.stop - run.start
        number: Number = run.layer
        ctx: Context | None = self.keywords["ctx"] if "ctx" in self.function.wants else None
        if ctx is not None:
            number = jnp.array(offsets, jnp.int32)[ctx.stage] + run.layer
        if run.size == 1 or (ctx is not None and ctx.ledger is not None):
            losses: list[Array | None] = []
            for i in range(count):
                row = jax.tree.map(lambda leaf, at=run.start + i: leaf[at], stack)
                x, loss = self.run(x, row, number + i if i else number, run.layer + i)
                losses.append(loss)
            return x, losses
        if count < run.size:
            stack = jax.tree.map(lambda leaf: leaf[run.start : run.stop], stack)
        rows = stack, number + jnp.arange(count, dtype=jnp.int32)
        x, each = jax.lax.scan(lambda x, row: self.run(x, *row), x, rows)
        return x, [None if each is None else jnp.sum(each)]
