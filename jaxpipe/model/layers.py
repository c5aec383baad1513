"""A model given layer by layer: a function for each letter of a layout, and the stages that the
layout makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import PyTree, axis_faults
from ..errors import PipelineError
from ..layouts.layout import Layout
from ..table.placement import Placement
from .calls import Function

EMBEDDING, LOSS = "E", "L"


class _Run(NamedTuple):
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
    that shares its chunk with stages of "tt" has two stacks: one of the two layers that all have,
    and one of the third.  So its parameters, residuals and code have the shapes of theirs, and no
    stage computes a layer that it does not have.
    """

    stages: tuple[str, ...]  # letters of each stage, without E and L
    # per stage, the stages that share its chunk number, itself too
    chunk_mates: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: Layout, placement: Placement, owned: Sequence[Sequence[int]]) -> LayerMap:
        """Take E off the first stage and L off the last; PipelineError where the layout has them
        elsewhere, or another number of stages.

        `owned[device]` lists the stages whose parameters the device holds, in chunk order.
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
        mates_of = {}
        for chunk in zip_longest(*owned):
            mates = tuple(stage for stage in chunk if stage is not None)
            mates_of.update(dict.fromkeys(mates, mates))
        letters = (stage.replace(EMBEDDING, "").replace(LOSS, "") for stage in layout.stages)
        return cls(tuple(letters), tuple(mates_of[s] for s in range(placement.num_stages)))

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters of layers, in alphabetical order."""
        return tuple(sorted(set("".join(self.stages))))

    def groups(self, stage: int, letter: str) -> tuple[int, ...]:
        """The sizes of a stage's stacks of a letter."""
        own = self.stages[stage].count(letter)
        counts = {self.stages[mate].count(letter) for mate in self.chunk_mates[stage]}
        return tuple(b - a for a, b in pairwise(sorted({0, *counts})) if b <= own)

    def split(self, by_letter: Mapping[str, PyTree]) -> list[dict[str, tuple[PyTree, ...]]]:
        """Leaves [n, ...] of each letter -> the stages' own trees, {letter: stacks}."""
        start, found = dict.fromkeys(self.letters, 0), []
        for s, stage in enumerate(self.stages):
            own: dict[str, tuple[PyTree, ...]] = {}
            for letter in sorted(set(stage)):
                ends = list(accumulate([start[letter], *self.groups(s, letter)]))
                own[letter] = tuple(
                    jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], by_letter[letter])
                    for a, b in pairwise(ends)
                )
                start[letter] = ends[-1]
            found.append(own)
        return found

    def join(self, stages: Sequence[Mapping[str, Sequence[PyTree]]]) -> dict[str, PyTree]:
        """The inverse of `split`."""
        parts = {
            letter: [stack for own in stages for stack in own.get(letter, ())]
            for letter in self.letters
        }
        return {
            letter: jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stacks)
            for letter, stacks in parts.items()
        }

    def faults(self, by_letter: Any) -> list[str]:
        """Faults of canonical parameters of the stages."""
        if not isinstance(by_letter, Mapping) or set(by_letter) != set(self.letters):
            found = (
                sorted(by_letter) if isinstance(by_letter, Mapping) else type(by_letter).__name__
            )
            return [
                f'"stages" must be a dict with the letters {list(self.letters)}, each a tree of '
                f"leaves [layers, ...]; got {found}"
            ]
        faults = []
        for letter in self.letters:
            count = sum(stage.count(letter) for stage in self.stages)
            axis = f"the {count} layers {letter} of the layout"
            faults += axis_faults(by_letter[letter], f"stages[{letter!r}]", count, axis)
        return faults

    def functions(
        self, layers: Mapping[str, Callable[..., Any]], *, has_loss: bool
    ) -> tuple[Function, ...]:
        """A stage function for each stage; stages of equal letters and stacks, and so of equal
        code, share one.
        """
        known = {
            letter: Function.of(layers[letter], f"layers[{letter!r}]") for letter in self.letters
        }
        for keyword in ("state", "carry"):
            takers = [letter for letter, function in known.items() if keyword in function.wants]
            if takers:
                raise PipelineError(
                    f"layers {takers} take `{keyword}`, which only whole stages can; give Pipeline "
                    "a stage function instead"
                )
        offsets = tuple(accumulate(map(len, self.stages), initial=0))[:-1]
        runs = [tuple(self._runs(stage)) for stage in range(len(self.stages))]
        functions = {
            own: _stage_function(letters, own, known, offsets, has_loss=has_loss)
            for letters, own in zip(self.stages, runs, strict=True)
        }
        return tuple(functions[own] for own in runs)

    def _runs(self, stage: int) -> Iterator[_Run]:
        """A stage's layers in order, as parts of its stacks; layers count from the stage's first of
        the letter.
        """
        seen = dict.fromkeys(self.letters, 0)
        place = 0
        for letter, equal in groupby(self.stages[stage]):
            first = seen[letter]
            seen[letter] += len(list(equal))
            begin = 0
            for g, size in enumerate(self.groups(stage, letter)):
                start, stop = max(first, begin), min(seen[letter], begin + size)
                if start < stop:
                    yield _Run(letter, g, start - begin, stop - begin, size, place + start - first)
                begin += size
            place += seen[letter] - first


def _stage_function(
    letters: str,
    runs: tuple[_Run, ...],
    layers: Mapping[str, Function],
    offsets: tuple[int, ...],
    *,
    has_loss: bool,
) -> Function:
    """The function of a stage that is made of these runs of layers; `offsets[stage]` layers come
    before it.
    """
    wants = frozenset(keyword for run in runs for keyword in layers[run.letter].wants)

    def stage(params: PyTree, x: PyTree, **keywords: Any) -> PyTree:
        losses: list[Any] = []
        for run in runs:
            layer = _Layer(layers[run.letter], keywords, has_loss)
            ctx: Any = keywords.get("ctx")
            takes = "ctx" in layer.function.wants
            before = jnp.array(offsets, jnp.int32)[ctx.stage] if takes else 0
            appends = takes and ctx.ledger is not None
            stack = params[run.letter][run.group]
            x, more = _run_layers(layer, run, stack, x, before + run.layer, appends=appends)
            losses += [loss for loss in more if loss is not None]
        return (x, sum(losses[1:], losses[0]) if losses else None) if has_loss else x

    return Function(stage, f"stage of layers {letters!r}", wants)


class _Layer(NamedTuple):
    """The function of a layer, and the keywords of its stage."""

    function: Function
    keywords: Mapping[str, Any]
    has_loss: bool

    def run(self, x: PyTree, row: PyTree, number: Any, place: int = 0) -> tuple[PyTree, Any]:
        """x and the loss of one layer; `number` counts the model's layers, `place` those of the
        stage.
        """
        function = self.function
        own = {name: self.keywords[name] for name in function.wants}
        if "ctx" in own:
            # its key depends on the layer and the microbatch, not on the stage
            ctx, key = own["ctx"], own["ctx"].microbatch_rng
            own["ctx"] = ctx._replace(
                ledger=None if ctx.ledger is None else ctx.ledger.of_layer(place),
                layer=number,
                rng=None if key is None else jax.random.fold_in(key, number),
            )
        out = function.run(row, x, keywords=own)
        if not self.has_loss:
            return out, None
        x, loss = function.results({"x": "", "loss": "stage_loss=True"}, out).values()
        return x, None if loss is None else function.loss_of(loss)


def _run_layers(
    layer: _Layer, run: _Run, stack: PyTree, x: PyTree, number: Any, *, appends: bool
) -> tuple[PyTree, list[Any]]:
    """Apply some rows of a stack one after the other; returns their losses too, or the sum.

    `appends`: no scan, since each layer appends rows to a buffer of its own.
    """
    count = run.stop - run.start
    if appends or run.size == 1:
        losses = []
        for i in range(count):
            row = jax.tree.map(lambda leaf, at=run.start + i: leaf[at], stack)
            x, loss = layer.run(x, row, number + i if i else number, run.layer + i)
            losses.append(loss)
        return x, losses
    if count < run.size:
        stack = jax.tree.map(lambda leaf: leaf[run.start : run.stop], stack)
    rows = stack, number + jnp.arange(count, dtype=jnp.int32)
    x, each = jax.lax.scan(lambda x, row: layer.run(x, *row), x, rows)
    return x, [None if each is None else jnp.sum(each)]
