"""A model given layer by layer: a function for each letter of a layout, and the stages that the
layout makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import PyTree, axis_faults
from ..errors import PipelineError
from ..layouts.layout import Layout
from ..table.placement import Placement
from .calls import Context, Function

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
        for letter, where, right in (
            (EMBEDDING, "the first layer", layout.layers[:1]),
            (LOSS, "the last layer", layout.layers[-1:]),
        ):
            if layout.layers.count(letter) > (right == letter):
                faults.append(f"{letter} can only be {where} of layout {str(layout)!r}")
        if layout.stages[0][:1] != EMBEDDING and EMBEDDING in layout.layers:
            faults.append(f"{EMBEDDING} must be on the first stage of layout {str(layout)!r}")
        if layout.stages[-1][-1:] != LOSS and LOSS in layout.layers:
            faults.append(f"{LOSS} must be on the last stage of layout {str(layout)!r}")
        PipelineError.refuse("the layout does not fit", faults)
        chunks = max(map(len, owned))
        mates = [tuple(row[v] for row in owned if v < len(row)) for v in range(chunks)]
        found = {stage: group for group in mates for stage in group}
        return cls(
            tuple(stage.replace(EMBEDDING, "").replace(LOSS, "") for stage in layout.stages),
            tuple(found[s] for s in range(placement.num_stages)),
        )

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters of layers, in alphabetical order."""
        return tuple(sorted(set("".join(self.stages))))

    def count(self, letter: str) -> int:
        """Layers of a letter in the whole model."""
        return sum(stage.count(letter) for stage in self.stages)

    @cached_property
    def _starts(self) -> tuple[dict[str, int], ...]:
        """Per stage and letter, the number of the stage's first layer among all of that letter."""
        seen = dict.fromkeys(self.letters, 0)
        found = []
        for stage in self.stages:
            found.append(dict(seen))
            for letter in stage:
                seen[letter] += 1
        return tuple(found)

    def groups(self, stage: int, letter: str) -> tuple[int, ...]:
        """The sizes of a stage's stacks of a letter."""
        counts = sorted({self.stages[mate].count(letter) for mate in self.chunk_mates[stage]} - {0})
        steps = [b - a for a, b in zip([0, *counts], counts, strict=False)]
        return tuple(
            step
            for step, upto in zip(steps, counts, strict=True)
            if upto <= self.stages[stage].count(letter)
        )

    def split(self, by_letter: Mapping[str, PyTree]) -> list[dict[str, tuple[PyTree, ...]]]:
        """Leaves [n, ...] of each letter -> the stages' own trees, {letter: stacks}."""
        found = []
        for s, stage in enumerate(self.stages):
            own: dict[str, tuple[PyTree, ...]] = {}
            for letter in sorted(set(stage)):
                ends = self._starts[s][letter] + np.cumsum([0, *self.groups(s, letter)])
                own[letter] = tuple(
                    jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], by_letter[letter])
                    for a, b in pairwise(ends)
                )
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
            count = self.count(letter)
            axis = f"the {count} layers {letter} of the layout"
            faults += axis_faults(by_letter[letter], f"stages[{letter!r}]", count, axis)
        return faults

    def functions(
        self, layers: Mapping[str, Callable[..., Any]], *, has_loss: bool
    ) -> tuple[Function, ...]:
        """A stage function for each stage; stages of equal letters and stacks, and so of equal
        code, share one.
        """
        given = {
            letter: Function.of(layers[letter], f"layers[{letter!r}]") for letter in self.letters
        }
        for keyword in ("state", "carry"):
            takers = [letter for letter, function in given.items() if keyword in function.wants]
            if takers:
                raise PipelineError(
                    f"layers {takers} take `{keyword}`, which only whole stages can; give Pipeline "
                    "a stage function instead"
                )
        made: dict[tuple[Any, ...], Function] = {}
        found = []
        for s, letters in enumerate(self.stages):
            key = (letters, *(self.groups(s, letter) for letter in sorted(set(letters))))
            if key not in made:
                made[key] = _stage_function(
                    letters, tuple(self._runs(s)), given, self._offsets, has_loss=has_loss
                )
            found.append(made[key])
        return tuple(found)

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

    @property
    def _offsets(self) -> tuple[int, ...]:
        """Per stage, how many layers come before it."""
        return tuple(np.cumsum([0, *map(len, self.stages)])[:-1].tolist())


def _stage_function(
    letters: str,
    runs: tuple[_Run, ...],
    given: Mapping[str, Function],
    offsets: tuple[int, ...],
    *,
    has_loss: bool,
) -> Function:
    """The function of a stage that is made of these runs of layers; `offsets[stage]` layers come
    before it.
    """
    wants = frozenset(keyword for run in runs for keyword in given[run.letter].wants)

    def stage(params: PyTree, x: PyTree, **keywords: Any) -> PyTree:
        losses = []
        for run in runs:
            function = given[run.letter]
            own = {k: keywords[k] for k in function.wants}
            before = jnp.array(offsets, jnp.int32)[own["ctx"].stage] if "ctx" in own else 0
            appends = "ctx" in own and own["ctx"].ledger is not None

            def layer(
                x: PyTree,
                row: PyTree,
                number: Any,
                function: Function = function,
                own: dict[str, Any] = own,
                place: int | None = None,
            ) -> tuple[PyTree, Any]:
                ctx = {"ctx": _context(own["ctx"], number, place)} if "ctx" in own else {}
                out = function.run(row, x, keywords={**own, **ctx})
                return _pair(function, out, has_loss=has_loss)

            stack = params[run.letter][run.group]
            x, more = _run_layers(layer, run, stack, x, before + run.layer, apart=appends)
            losses += [] if more is None else [more]
        return (x, sum(losses[1:], losses[0]) if losses else None) if has_loss else x

    return Function(stage, f"stage of layers {letters!r}", wants)


def _pair(function: Function, out: Any, *, has_loss: bool) -> tuple[PyTree, Any]:
    """x and the loss that a layer returned."""
    if not has_loss:
        return out, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise PipelineError(
            f"`{function.name}` must return (x, loss), since stage_loss=True; it returns "
            f"{jax.tree.structure(out)}"
        )
    x, loss = out
    return x, None if loss is None else function.loss_of(loss)


def _run_layers(
    layer: Callable[..., tuple[PyTree, Any]],
    run: _Run,
    stack: PyTree,
    x: PyTree,
    number: Any,
    *,
    apart: bool,
) -> tuple[PyTree, Any]:
    """Apply some rows of a stack one after the other; returns the sum of their losses too.

    `apart`: no scan, since each layer appends rows to a buffer of its own.
    """
    if apart:
        found: list[Any] = []
        for i in range(run.stop - run.start):
            row = jax.tree.map(lambda leaf, at=run.start + i: leaf[at], stack)
            x, loss = layer(x, row, number + i, place=run.layer + i)
            found += [] if loss is None else [loss]
        return x, jnp.stack(found).sum() if found else None
    if run.size == 1:
        return layer(x, jax.tree.map(lambda leaf: leaf[0], stack), number)
    whole = run.start == 0 and run.stop == run.size
    rows = stack if whole else jax.tree.map(lambda leaf: leaf[run.start : run.stop], stack)
    numbers = number + jnp.arange(run.stop - run.start, dtype=jnp.int32)
    x, losses = jax.lax.scan(lambda x, row: layer(x, *row), x, (rows, numbers))
    return x, None if losses is None else jnp.sum(losses)


def _context(ctx: Context, number: Any, place: int | None) -> Context:
    """The context of a layer: its key depends on the layer and the microbatch, not on the stage.

    Layers that are at a `place` of a stage append rows to buffers of their own.
    """
    if place is not None:
        ctx = ctx._replace(ledger=ctx.ledger.of_layer(place))
    return ctx._replace(
        layer=number,
        rng=None if ctx.microbatch_rng is None else jax.random.fold_in(ctx.microbatch_rng, number),
    )
