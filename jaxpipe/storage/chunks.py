"""Parameters: the model's own (canonical) layout <-> the layout that a schedule's devices hold
(placed), with their placement in the structure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import SequenceKey

from ..arrays import Leaves, PyTree, array_faults, axis_faults, by_path, is_key, stacked
from ..errors import PipelineError
from ..model.calls import Function
from ..model.layers import OUTER, LayerMap, owned_stages
from ..table.placement import Placement
from .packed import ByName, Packed, masked
from .padding import Padding
from .table import ALONE, Places, Storing, TreeForm, chunk_layouts


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

    def __reduce__(self) -> tuple[type[Chunks], tuple[tuple[object, ...], ParamLayout]]:
        return Chunks, (tuple(self), self.layout)

    def like(self, chunks: Iterable[PyTree]) -> Chunks:
        """Other trees in the same places."""
        return Chunks(chunks, self.layout)


def padding_of(params: Mapping[str, object]) -> tuple[Padding, ...]:
    """The padding of placed parameters, as their stages say."""
    stages = params.get("stages")
    return stages.layout.padding if isinstance(stages, Chunks) else ()


# The stages' own state, or nothing.
ChunkState: TypeAlias = "Chunks | tuple[()]"

jax.tree_util.register_pytree_with_keys(
    Chunks,
    lambda chunks: ([(SequenceKey(v), chunk) for v, chunk in enumerate(chunks)], chunks.layout),
    lambda layout, chunks: Chunks(chunks, layout),
    lambda chunks: (tuple(chunks), chunks.layout),
)


def owner_faults(stages: object, layout: ParamLayout, what: str, again: str) -> list[str]:
    """Faults of stages that must be placed there; `again` is the method that places them."""
    if not isinstance(stages, Chunks):
        kind = type(stages).__name__
        return [
            f"{what} are not placed (their stages are a {kind}); give what `{again}` returned, "
            "or what was made of it by jax.tree.map"
        ]
    if replace(stages.layout, padding=()) != layout:
        return [
            f"{what} are placed for {stages.layout}, but this schedule has {layout}; "
            f"{again_by(again)}"
        ]
    return []


def again_by(place: str) -> str:
    """How values that another pipeline placed come to this one."""
    back = "canonical" if place == "place" else "canonical_state"
    return (
        f"bring them over: new.{place}(old.{back}(...)), with the pipeline that placed them as "
        "`old`"
    )


def arrays_of(chunk: object) -> ByName:
    """The arrays of a chunk by name, in the order of its leaves."""
    return chunk.leaves if isinstance(chunk, Packed) else by_path(chunk)


def room_arrays(chunks: Sequence[PyTree]) -> ByName:
    """The arrays of a room that holds the stages of these chunks, or trees of their plans, in turn:
    all that any of them has.
    """
    own = list(map(arrays_of, chunks))
    every = {name: array for arrays in own for name, array in arrays.items()}
    # those of chunks with unlike arrays are in this order too
    alike = all(len(arrays) == len(every) for arrays in own)
    return every if alike else dict(sorted(every.items()))


def arrays_in(chunk: PyTree, room: Iterable[str]) -> Leaves:
    """A chunk's own arrays of a room; None for those that it does not have."""
    return list(map(arrays_of(chunk).get, room))


def room_faults(stages: tuple[PyTree, ...], what: str, place: str) -> list[str]:
    """Why these values, which `place` placed, cannot be in rooms."""
    known: dict[object, object] = {}
    own: list[tuple[object, object]]
    for chunk in stages:
        arrays = arrays_of(chunk).items()
        own = [(name, (leaf.shape, leaf.dtype)) for name, leaf in arrays]
        for form in chunk.layout.forms if isinstance(chunk, Packed) else ():
            stage = form.tree, *((row.path, row.entry.shape, row.kept) for row in form.rows)
            own.append((stage, form.rows))
        if any(known.setdefault(key, value) != value for key, value in own):
            return [
                "the table gathers stages several times a step, so chunks must store them alike, "
                f"and {what} are placed otherwise; {again_by(place)}"
            ]
    return []


class StageLeaves(NamedTuple):
    """A stage's leaves in its chunk."""

    form: TreeForm
    places: Places
    leaves: Leaves  # those of the chunk in which they are, in the stage's order

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
    # an unlike stage is stored alike in every chunk, so that one room takes them all
    alike: bool = field(default=False, compare=False)
    # of what is cut over the pipe axis; of those that are placed, and not of a pipeline's own
    padding: tuple[Padding, ...] = ()
    # per device, the stages whose parameters it holds, in chunk order
    owned: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owned", owned_stages(self.placement))

    @classmethod
    def of(
        cls,
        placement: Placement,
        stages: Sequence[Function],
        layers: LayerMap | None,
        given: object,
        *,
        alike: bool,
    ) -> ParamLayout:
        """The layout of stages with these functions, made of these layers; `given`: as the user
        gave them.

        Raises:
            PipelineError: a stage is on two devices and cannot be.
        """
        unlike, stacks = not callable(given), getattr(given, "stacks_layers", False)
        found = cls(placement, unlike=unlike, layers=layers, stacks=stacks, alike=alike)
        if not found.replicas():
            return found
        if unlike and found.num_owned > 1:
            raise PipelineError(
                "unlike stages that are on two devices need a device to own one stage each, as in "
                "dualpipe"
            )
        if any("state" in function.wants for function in stages):
            raise PipelineError(
                "a stage with `state` cannot be on two devices, which would each change it; use a "
                "schedule that is not bidirectional (dualpipev instead of dualpipe)"
            )
        return found

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

    def place_stages(self, stages: PyTree, how: Storing | Chunks = ALONE) -> Chunks:
        """Leaves [S, ...] -> one tree a chunk with leaves [P, ...].

        Unlike stages are laid out as the rule says, or as these placed ones are.
        """
        if self.unlike:
            return self.place_trees(
                stages if self.layers is None else self.layers.split(stages), how
            )
        own = range(self.num_owned)
        chunks = (jax.tree.map(partial(self.in_chunk, v), stages) for v in own)
        return how.like(chunks) if isinstance(how, Chunks) else Chunks(chunks, self)

    def in_chunk(self, chunk: int, leaf: jax.Array, *, axis: int = 0) -> jax.Array:
        """A leaf [S, ...] -> the leaf [P, ...] of a chunk, with zeros for devices without it; the
        stages are along `axis`.
        """
        stage_of = self.stage_at(chunk)
        if stage_of == tuple(range(np.shape(leaf)[axis])):
            # in order already: under jit, what draws the leaf is split as the leaf is
            return leaf
        own = jnp.take(leaf, np.array([max(s, 0) for s in stage_of]), axis=axis)
        return masked(own, [s >= 0 for s in stage_of], axis)

    def place_trees(self, trees: Sequence[PyTree], how: Storing | Chunks = ALONE) -> Chunks:
        """A tree for each stage -> placed ones (see `place_stages`)."""
        if not self.unlike:
            return self.place_stages(stacked(trees), how)
        numbers = list(map(self.stage_at, range(self.num_owned)))
        chunks = [[None if s < 0 else trees[s] for s in own] for own in numbers]
        if isinstance(how, Chunks):
            return how.like(Packed.of(c, own.layout) for c, own in zip(chunks, how, strict=True))
        layouts = chunk_layouts(chunks, numbers, how, layered=self.is_layered, alike=self.alike)
        return Chunks(map(Packed.of, chunks, layouts), self)

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

    def held(self, stage: int, chunks: Sequence[PyTree], names: Iterable[str] = ()) -> StageLeaves:
        """A stage's leaves in trees like owned chunks, on one device (without the axis of
        devices); their places are among the arrays of these names, if not of the chunk's.
        """
        v, device = self.where(stage)
        chunk, arrays = chunks[v], arrays_of(chunks[v])
        packed = isinstance(chunk, Packed)
        form: TreeForm = chunk.layout.forms[device] if packed else TreeForm.of(chunk)
        places = form.places(names or arrays, pinned=packed and chunk.layout.pinned)
        return StageLeaves(form, places, [arrays[row.array] for row in form.rows])

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
    params: Mapping[str, object], layout: ParamLayout, ends: Collection[str]
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


def param_faults(params: object, layout: ParamLayout, devices: int) -> list[str]:
    """Faults of parameters that must be placed there."""
    keys, odd = {"stages", *OUTER}, array_faults(params, "params")
    if not isinstance(params, Mapping) or "stages" not in params or {*params} - keys:
        what = "parameters must be what `place` returned, a dict with keys of"
        return [f"{what} {sorted(keys)}", *odd]
    stages, axis = params["stages"], f"the {devices} devices (see `place`)"
    faults = owner_faults(stages, layout, "parameters", "place")
    return [*(faults or axis_faults(stages, "stages", devices, axis)), *odd]


def state_faults(state: object, layout: ParamLayout, what: str, data_shards: int) -> list[str]:
    """Faults of the stages' own state; `what` it is, "" where no stage takes it."""
    given = bool(jax.tree.leaves(state))
    if not what:
        return ["no stage takes `state` by keyword; leave state= out"] if given else []
    if not given:
        return ["a stage takes `state`, but the step got none; give state=pipe.place_state(...)"]
    faults = owner_faults(state, layout, what, "place_state")
    keys = sorted(name for name, leaf in by_path(state).items() if is_key(leaf))
    if faults or data_shards == 1 or not keys:
        return faults
    return [
        f"the state has keys of random numbers ({', '.join(keys)}): each of the {data_shards} data "
        "shards would draw the same numbers, and nothing is the mean of their keys at the end of "
        "the step. Draw from ctx.rng, which differs by data shard, stage and microbatch: give the "
        "step rng="
    ]
