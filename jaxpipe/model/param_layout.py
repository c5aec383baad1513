"""Parameters: the model's own (canonical) layout <-> the layout that a schedule's devices hold
(placed), with their placement in the structure; the layers of each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, compress, groupby, pairwise
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import SequenceKey

from ..arrays import PyTree, array_faults, axis_faults, stacked
from ..errors import PipelineError
from ..jaxprs.entry import Entry
from ..layouts.layout import Layout
from ..table.placement import Placement
from .calls import LAYER_KEYWORDS, Function
from .packed import Home, Packed, Places, Storing, TreeForm, alone, chunk_layout, masked

EMBEDDING, LOSS = "E", "L"


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
    that shares its chunk with stages of "tt" has two stacks: one of the two layers that all have,
    and one of the third.  So its parameters, residuals and code have the shapes of theirs, and no
    stage computes a layer that it does not have.
    """

    stages: tuple[str, ...]  # letters of each stage, without E and L
    chunk_of: tuple[int, ...]  # per stage, its number among those that its device holds

    @classmethod
    def of(cls, layout: Layout, placement: Placement) -> LayerMap:
        """Take E off the first stage and L off the last; PipelineError where the layout has them
        elsewhere, or another number of stages.
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
        letters = (stage.replace(EMBEDDING, "").replace(LOSS, "") for stage in layout.stages)
        chunks = {stage: v for row in owned_stages(placement) for v, stage in enumerate(row)}
        return cls(tuple(letters), tuple(chunks[s] for s in range(placement.num_stages)))

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters of layers, in alphabetical order."""
        return tuple(sorted(set("".join(self.stages))))

    def groups(self, stage: int, letter: str) -> tuple[int, ...]:
        """The sizes of a stage's stacks of a letter."""
        own = self.stages[stage].count(letter)
        mates = (v == self.chunk_of[stage] for v in self.chunk_of)
        counts = {mate.count(letter) for mate in compress(self.stages, mates)}
        return tuple(b - a for a, b in pairwise(sorted({0, *counts})) if b <= own)

    def split(self, by_letter: Mapping[str, PyTree]) -> list[dict[str, tuple[PyTree, ...]]]:
        """Leaves [n, ...] of each letter -> the stages' own trees, {letter: stacks}.  Optimizers
        have no state for letters that are frozen.
        """
        start, found = dict.fromkeys(self.letters, 0), []
        for s, stage in enumerate(self.stages):
            own: dict[str, tuple[PyTree, ...]] = {}
            for letter in sorted(set(stage) & by_letter.keys()):
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
        self, layers: Mapping[str, Callable[..., Any]], *, has_loss: bool
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
            losses: list[Any] = []
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
            begin = 0
            for g, size in enumerate(self.groups(stage, letter)):
                start, stop = max(first, begin), min(seen[letter], begin + size)
                if start < stop:
                    yield _LayerRun(
                        letter, g, start - begin, stop - begin, size, place + start - first
                    )
                begin += size
            place += seen[letter] - first


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
            ctx = own["ctx"]
            ledger = None if ctx.ledger is None else ctx.ledger.of_layer(place)
            own["ctx"] = ctx.at_layer(number)._replace(ledger=ledger)
        out = function.run(row, x, keywords=own)
        if not self.has_loss:
            return out, None
        x, loss = function.results({"x": "", "loss": "stage_loss=True"}, out).values()
        return x, None if loss is None else function.loss_of(loss)

    def run_each(
        self, run: _LayerRun, stack: PyTree, x: PyTree, offsets: tuple[int, ...]
    ) -> tuple[PyTree, list[Any]]:
        """Apply some rows of a stack one after the other; returns their losses too, or the sum.
        `offsets[stage]` layers come before a stage.

        Layers that append rows are no scan, since each has buffers of its own.
        """
        count = run.stop - run.start
        number: Any = run.layer
        ctx: Any = self.keywords["ctx"] if "ctx" in self.function.wants else None
        if ctx is not None:
            number = jnp.array(offsets, jnp.int32)[ctx.stage] + run.layer
        if run.size == 1 or (ctx is not None and ctx.ledger is not None):
            losses = []
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


class Chunks(tuple[PyTree, ...]):
    """A tree for each chunk of the devices, leaves [P, ...]: a tuple whose structure holds the
    layout that it is for.

    `jax.tree.map`, optimizers, `jax.jit` and scans keep it, and refuse a tree of another layout as
    a second argument.
    """

    layout: ParamLayout

    def __new__(cls, chunks: Iterable[PyTree], layout: ParamLayout) -> Chunks:
        """Trees by chunk, and the layout that they are for."""
        found = super().__new__(cls, chunks)
        found.layout = layout
        return found

    def __reduce__(self) -> tuple[type[Chunks], tuple[tuple[PyTree, ...], ParamLayout]]:
        return Chunks, (tuple(self), self.layout)

    def like(self, chunks: Iterable[PyTree]) -> Chunks:
        """Other trees in the same places."""
        return Chunks(chunks, self.layout)


# The stages' own state, or nothing.
ChunkState: TypeAlias = "Chunks | tuple[()]"

jax.tree_util.register_pytree_with_keys(
    Chunks,
    lambda chunks: ([(SequenceKey(v), chunk) for v, chunk in enumerate(chunks)], chunks.layout),
    lambda layout, chunks: Chunks(chunks, layout),
    lambda chunks: (tuple(chunks), chunks.layout),
)


def owner_faults(stages: Any, layout: ParamLayout, what: str, again: str) -> list[str]:
    """Faults of stages that must be placed there; `again` is the method that places them."""
    if not isinstance(stages, Chunks):
        kind = type(stages).__name__
        return [
            f"{what} are not placed (their stages are a {kind}); give what `{again}` returned, "
            "or what was made of it by jax.tree.map"
        ]
    if stages.layout != layout:
        back = "canonical" if again == "place" else "canonical_state"
        return [
            f"{what} are placed for {stages.layout}, but this schedule has {layout}; bring them "
            f"over: new.{again}(old.{back}(...)), with the pipeline that placed them as `old`"
        ]
    return []


class StageLeaves(NamedTuple):
    """A stage's leaves in its chunk."""

    form: TreeForm
    places: Places
    leaves: list[Any]  # those of the chunk in which they are, in the stage's order

    @property
    def avals(self) -> PyTree:
        """The stage's own tree of shapes.  A leaf that is split over data axes has its own part,
        outside of buffers.
        """
        return jax.tree.unflatten(
            self.form.tree,
            [
                jax.ShapeDtypeStruct(place.entry.shape if place.flat else leaf.shape, leaf.dtype)
                for place, leaf in zip(self.places, self.leaves, strict=True)
            ],
        )


OUTER = ("first", "last", "shared")


def with_outer(params: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The parameters with an empty tree for what has none."""
    return {"stages": params["stages"], **{key: params.get(key, {}) for key in OUTER}}


@dataclass(frozen=True)
class ParamLayout:
    """The layout of each stage's parameters: `{"stages": leaves [S, ...]}` <-> `{"stages": V_own
    trees of leaves [P, ...]}`.

    A stage that is on several devices (a bidirectional placement) is held by the first of them
    only; the step copies it to the others.  So optimizers, norms and checkpoints get every
    parameter exactly once.  Layouts are equal where devices own the same stages, made of the same
    layers.
    """

    placement: Placement = field(compare=False)
    # stages have trees of their own: canonical is a list of S trees, placed a `Packed` a chunk
    unlike: bool = field(default=False, compare=False)
    # stages are made of layers: canonical is a dict of stacks by letter
    layers: LayerMap | None = None
    # the function says that its leaves are [S, layers, ...], as those of `jaxpipe.flax` are
    stacks: bool = field(default=False, compare=False)
    # per device, the stages whose parameters it holds, in chunk order
    owned: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owned", owned_stages(self.placement))

    def __str__(self) -> str:
        rows = [f"{d}: {', '.join(map(str, row))}" for d, row in enumerate(self.owned[:4])]
        rows += ["..."] if len(self.owned) > 4 else []
        letters = "" if self.layers is None else "|".join(self.layers.stages)[:60]
        layers = f", with layers {letters}" if letters else ""
        return f"stages by device {{{'; '.join(rows)}}}{layers}"

    @property
    def is_layered(self) -> bool:
        """Whether stages are made of layers."""
        return self.layers is not None

    @property
    def num_owned(self) -> int:
        """The most stages that one device owns: the length of the placed `stages` tuple."""
        return max(len(row) for row in self.owned)

    def stage_at(self, chunk: int) -> tuple[int, ...]:
        """Per device, the stage that its owned chunk `chunk` is, or -1."""
        return tuple(row[chunk] if chunk < len(row) else -1 for row in self.owned)

    def where(self, stage: int) -> tuple[int, int]:
        """The chunk and the device that hold a stage's parameters."""
        device = self.placement.devices_of[stage][0]
        return self.owned[device].index(stage), device

    def replicas(self) -> tuple[tuple[int, int, int, int], ...]:
        """(owner, owner's chunk, holder, holder's chunk) for every further copy of a stage."""
        found = []
        for stage, devices in enumerate(self.placement.devices_of):
            chunk, owner = self.where(stage)
            # The middle stage of an odd bidirectional pipeline lists one device twice.
            for holder in dict.fromkeys(d for d in devices[1:] if d != owner):
                found.append((owner, chunk, holder, self.placement.chunk_of(stage, holder)))
        return tuple(found)

    def place_stages(
        self, stages: PyTree, how: Storing | Sequence[PyTree] = alone, *, axis: int = 0
    ) -> Chunks:
        """Leaves [S, ...] -> one tree a chunk with leaves [P, ...]; entries of devices without that
        chunk are zero.  The stages are along `axis`.

        Unlike stages are laid out as the rule says, or as these placed ones are.
        """
        if self.unlike:
            return self.place_trees(
                stages if self.layers is None else self.layers.split(stages), how
            )

        def placed(leaf: Any, stage_of: tuple[int, ...]) -> Any:
            if stage_of == tuple(range(np.shape(leaf)[axis])):
                # in order already: under jit, what draws the leaf is split as the leaf is
                return leaf
            own = jnp.take(leaf, np.array([max(s, 0) for s in stage_of]), axis=axis)
            return masked(own, [s >= 0 for s in stage_of], axis)

        return Chunks(
            (
                jax.tree.map(partial(placed, stage_of=self.stage_at(v)), stages)
                for v in range(self.num_owned)
            ),
            self,
        )

    def place_trees(
        self, trees: Sequence[PyTree], how: Storing | Sequence[PyTree] = alone
    ) -> Chunks:
        """A tree for each stage -> placed ones (see `place_stages`)."""
        if not self.unlike:
            return self.place_stages(stacked(trees))
        found = []
        for v in range(self.num_owned):
            numbers = self.stage_at(v)
            chunk = [None if s < 0 else trees[s] for s in numbers]
            layout = (
                chunk_layout(chunk, numbers, how, layered=self.is_layered)
                if callable(how)
                else how[v].layout
            )
            found.append(Packed.of(chunk, layout))
        return Chunks(found, self)

    def canonical_stages(self, placed: tuple[PyTree, ...], *, axis: int = 0) -> PyTree:
        """The inverse of `place_stages`."""
        stages = range(self.placement.num_stages)
        if self.unlike:
            trees = [self.of_stage(s, placed) for s in stages]
            return trees if self.layers is None else self.layers.join(trees)
        order = np.array([v * self.placement.num_devices + d for v, d in map(self.where, stages)])
        return jax.tree.map(
            lambda *leaves: jnp.take(jnp.concatenate(leaves, axis), order, axis), *placed
        )

    def of_stage(self, stage: int, placed: Sequence[PyTree]) -> PyTree:
        """One stage's own tree out of placed ones."""
        v, device = self.where(stage)
        if isinstance(placed[v], Packed):
            return placed[v].stage(device)
        return jax.tree.map(lambda leaf: leaf[device], placed[v])

    def held(self, stage: int, chunks: Sequence[PyTree]) -> StageLeaves:
        """A stage's leaves in trees like owned chunks, on one device (without the axis of
        devices).
        """
        v, device = self.where(stage)
        chunk, leaves = chunks[v], jax.tree.leaves(chunks[v])
        if isinstance(chunk, Packed):
            form: TreeForm = chunk.layout.forms[device]
            places = chunk.layout.places(form, pinned=True)
        else:
            form = TreeForm.of(chunk)
            places = tuple(Home(i, Entry(own), flat=False) for i, own in enumerate(form.shapes))
        return StageLeaves(form, places, [leaves[place.at] for place in places])

    def faults(self, stages: PyTree) -> list[str]:
        """Faults of the canonical parameters, or state, of the stages."""
        count = self.placement.num_stages
        if self.layers is not None:
            return self.layers.faults(stages)
        if not self.unlike:
            return axis_faults(stages, "stages", count, f"the number of stages, {count}")
        is_list = isinstance(stages, list | tuple)
        if is_list and len(stages) == count:
            return []
        what = f"{len(stages)} of them" if is_list else type(stages).__name__
        return [
            f'"stages" must be a list with a tree for each of the {count} stages, since each '
            f"has a function of its own; got {what}"
        ]


def check_canonical(
    params: Mapping[str, PyTree], layout: ParamLayout, ends: Collection[str]
) -> None:
    """PipelineError listing every fault of a canonical parameter tree; `ends` are those of `first`
    and `last` that the pipeline has.
    """
    if not isinstance(params, Mapping):
        raise PipelineError(
            "parameters must be a dict with keys first, stages, last (and shared); got "
            f"{type(params).__name__}"
        )
    if isinstance(params.get("stages"), Chunks):
        raise PipelineError(
            "these parameters are placed already; `place` takes canonical ones, which "
            "`pipe.canonical(placed)` gives back (with the "
            "pipeline that placed them)"
        )
    faults = []
    if unknown := sorted(set(params) - {*OUTER, "stages"}):
        faults.append(
            f"parameters have unknown keys {unknown}; the keys are first, stages, last and shared"
        )
    if "stages" not in params:
        faults.append(
            'parameters have no "stages"; give a tree whose leaves have a leading axis of S '
            "stages in model order"
        )
    faults += [
        f'the pipeline has a `{key}` function, but parameters have no "{key}"; give its parameters '
        "({} if none)"
        for key in ends
        if key not in params
    ]
    odd = array_faults(dict(params), "params")
    if "stages" in params and not odd:
        faults += layout.faults(params["stages"])
    PipelineError.refuse("these parameters do not fit the pipeline", [*faults, *odd])
