"""Parameters: the model's own (canonical) layout <-> the layout that a schedule's devices hold
(placed), with their placement in the structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import SequenceKey

from ..arrays import PyTree, array_faults, axis_faults, stacked
from ..errors import PipelineError
from ..jaxprs.entry import Entry
from ..table.placement import Placement
from .layers import LayerMap
from .packed import Packed, Place, Places, TreeForm
from .sharing import Sharing


@dataclass(frozen=True)
class StageOwners:
    """Which stages each device owns, in chunk order, and the layers of each stage where there are
    any.
    """

    owned: tuple[tuple[int, ...], ...]
    layers: tuple[str, ...] = ()

    def stage_at(self, chunk: int) -> tuple[int, ...]:
        """Per device, the stage that its owned chunk `chunk` is, or -1."""
        return tuple(row[chunk] if chunk < len(row) else -1 for row in self.owned)

    def __str__(self) -> str:
        rows = [f"{d}: {', '.join(map(str, row))}" for d, row in enumerate(self.owned[:4])]
        layers = f", with layers {'|'.join(self.layers)[:60]}" if self.layers else ""
        return (
            "stages by device "
            f"{{{'; '.join(rows)}{'; ...' if len(self.owned) > 4 else ''}}}{layers}"
        )


class Chunks(tuple[PyTree, ...]):
    """A tree for each chunk of the devices, leaves [P, ...]: a tuple whose structure holds the
    placement that it is for.

    `jax.tree.map`, optimizers, `jax.jit` and scans keep it, and refuse a tree of another placement
    as a second argument.
    """

    owners: StageOwners

    def __new__(cls, chunks: Iterable[PyTree], owners: StageOwners) -> Chunks:
        """Trees by chunk, and the placement that they are for."""
        found = super().__new__(cls, chunks)
        found.owners = owners
        return found

    def __reduce__(self) -> tuple[type[Chunks], tuple[tuple[PyTree, ...], StageOwners]]:
        return Chunks, (tuple(self), self.owners)

    def like(self, chunks: Iterable[PyTree]) -> Chunks:
        """Other trees in the same places."""
        return Chunks(chunks, self.owners)

    def numbered(self) -> list[tuple[PyTree, tuple[int, ...]]]:
        """Each chunk, and by device the number of the stage that it is, or -1."""
        return [(chunk, self.owners.stage_at(v)) for v, chunk in enumerate(self)]

    def map(self, function: Callable[[PyTree], PyTree]) -> Chunks:
        """Change the tree of every chunk."""
        return self.like(map(function, self))


# The stages' own state, or nothing.
State: TypeAlias = "Chunks | tuple[()]"

jax.tree_util.register_pytree_with_keys(
    Chunks,
    lambda chunks: ([(SequenceKey(v), chunk) for v, chunk in enumerate(chunks)], chunks.owners),
    lambda owners, chunks: Chunks(chunks, owners),
    lambda chunks: (tuple(chunks), chunks.owners),
)


def owner_faults(stages: Any, owners: StageOwners, what: str, again: str) -> list[str]:
    """Faults of stages that must be placed there; `again` is the method that places them."""
    if not isinstance(stages, Chunks):
        kind = type(stages).__name__
        return [
            f"{what} are not placed (their stages are a {kind}); give what `{again}` returned, "
            "or what was made of it by jax.tree.map"
        ]
    if stages.owners != owners:
        back = "canonical" if again == "place" else "canonical_state"
        return [
            f"{what} are placed for {stages.owners}, but this schedule has {owners}; bring them "
            f"over: new.{again}(old.{back}(...)), with the pipeline that placed them as `old`"
        ]
    return []


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
    parameter exactly once.
    """

    placement: Placement
    # stages have trees of their own: canonical is a list of S trees, placed a `Packed` a chunk
    unlike: bool = False
    # stages are made of layers: canonical is a dict of stacks by letter
    layers: LayerMap | None = None
    # the function says that its leaves are [S, layers, ...], as those of `jaxpipe.flax` are
    stacks: bool = False

    @cached_property
    def owned(self) -> tuple[tuple[int, ...], ...]:
        """Per device, the stages whose parameters it holds, in chunk order."""
        table: list[list[int]] = [[] for _ in range(self.placement.num_devices)]
        for stage, devices in enumerate(self.placement.devices_of):
            table[devices[0]].append(stage)
        return tuple(tuple(row) for row in table)

    @property
    def num_owned(self) -> int:
        """The most stages that one device owns: the length of the placed `stages` tuple."""
        return max(len(row) for row in self.owned)

    @property
    def num_leading(self) -> int:
        """The axes of stages and of layers that canonical leaves have before those of one layer."""
        return int(not self.unlike or self.layers is not None) + self.stacks

    @cached_property
    def owners(self) -> StageOwners:
        """The placement that placed trees carry in their structure."""
        return StageOwners(self.owned, () if self.layers is None else self.layers.stages)

    def stage_at(self, chunk: int) -> tuple[int, ...]:
        """Per device, the stage that its owned chunk `chunk` is, or -1."""
        return self.owners.stage_at(chunk)

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
        self,
        stages: PyTree,
        sharing: Sharing | None = None,
        like: Sequence[PyTree] | None = None,
    ) -> Chunks:
        """Leaves [S, ...] -> one tree a chunk with leaves [P, ...]; entries of devices without that
        chunk are zero.

        Unlike stages are laid out as `sharing` says, or as the placed ones in `like`.
        """
        if self.unlike:
            trees = stages if self.layers is None else self.layers.split(stages)
            return self.place_trees(trees, sharing, like)

        def chunk(leaf: Any, stage_of: tuple[int, ...]) -> Any:
            if stage_of == tuple(range(np.shape(leaf)[0])):
                # in order already: under jit, what draws the leaf is split as the leaf is
                return leaf
            index = np.array([max(s, 0) for s in stage_of])
            taken = jnp.take(leaf, index, axis=0)
            if min(stage_of) >= 0:
                return taken
            there = np.array([s >= 0 for s in stage_of]).reshape((-1,) + (1,) * (leaf.ndim - 1))
            return jnp.where(there, taken, jnp.zeros_like(taken))

        return Chunks(
            (
                jax.tree.map(lambda leaf, at=at: chunk(leaf, at), stages)
                for at in map(self.stage_at, range(self.num_owned))
            ),
            self.owners,
        )

    def place_trees(
        self,
        trees: Sequence[PyTree],
        sharing: Sharing | None = None,
        like: Sequence[PyTree] | None = None,
    ) -> Chunks:
        """A tree for each stage -> placed ones (see `place_stages`)."""
        if not self.unlike:
            return self.place_stages(stacked(trees))
        chunks = self._by_chunk(trees)
        layouts = (
            [
                (sharing or Sharing()).layout(chunk, self.stage_at(v))
                for v, chunk in enumerate(chunks)
            ]
            if like is None
            else [chunk.layout for chunk in like]
        )
        return Chunks(map(Packed.of, chunks, layouts), self.owners)

    def _by_chunk(self, trees: Sequence[PyTree]) -> list[list[PyTree | None]]:
        """The stages' trees by chunk and device."""
        return [
            [None if s < 0 else trees[s] for s in self.stage_at(v)] for v in range(self.num_owned)
        ]

    def canonical_stages(self, placed: tuple[PyTree, ...]) -> PyTree:
        """The inverse of `place_stages`."""
        if self.unlike:
            trees = [self.of_stage(s, placed) for s in range(self.placement.num_stages)]
            return trees if self.layers is None else self.layers.join(trees)
        where = map(self.where, range(self.placement.num_stages))
        order = np.array([v * self.placement.num_devices + d for v, d in where])
        return jax.tree.map(
            lambda *leaves: jnp.take(jnp.concatenate(leaves, axis=0), order, axis=0), *placed
        )

    def where(self, stage: int) -> tuple[int, int]:
        """The chunk and the device that hold a stage's parameters."""
        device = self.placement.devices_of[stage][0]
        return self.owned[device].index(stage), device

    def of_stage(self, stage: int, placed: Sequence[PyTree]) -> PyTree:
        """One stage's own tree out of placed ones."""
        v, device = self.where(stage)
        if isinstance(placed[v], Packed):
            return placed[v].stage(device)
        return jax.tree.map(lambda leaf: leaf[device], placed[v])

    def form_of(self, stage: int, chunks: Sequence[PyTree]) -> TreeForm:
        """A stage's form in its owned chunk, given chunks on one device (leaves without the axis of
        devices).
        """
        v, device = self.where(stage)
        if not isinstance(chunks[v], Packed):
            return TreeForm.of(chunks[v])
        form: TreeForm = chunks[v].layout.forms[device]
        return form

    def places(self, stage: int, chunks: Sequence[PyTree], chunk: int) -> Places:
        """The places of a stage's leaves among those of a chunk."""
        form = self.form_of(stage, chunks)
        if isinstance(chunks[chunk], Packed):
            found: Places = chunks[chunk].layout.places(form, pinned=True)
            return found
        return tuple(Place(i, Entry(shape), flat=False) for i, shape in enumerate(form.shapes))

    def leaves_of(self, stage: int, chunks: Sequence[PyTree]) -> list[Any]:
        """The leaves of one stage in trees like owned chunks, in the stage's order."""
        v, _ = self.where(stage)
        leaves = jax.tree.leaves(chunks[v])
        return [leaves[place.at] for place in self.places(stage, chunks, v)]

    def avals_of(self, stage: int, owned: Sequence[PyTree]) -> PyTree:
        """One stage's own tree of shapes, given each owned chunk on one device."""
        if not owned:
            return ()
        form = self.form_of(stage, owned)
        leaves = zip(form.shapes, self.leaves_of(stage, owned), strict=True)
        return jax.tree.unflatten(
            form.tree, [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in leaves]
        )

    def faults(self, stages: PyTree) -> list[str]:
        """Faults of the canonical parameters, or state, of the stages."""
        count = self.placement.num_stages
        if self.layers is not None:
            return self.layers.faults(stages)
        if self.unlike:
            if isinstance(stages, list | tuple) and len(stages) == count:
                return []
            what = (
                f"{len(stages)} of them"
                if isinstance(stages, list | tuple)
                else type(stages).__name__
            )
            return [
                f'"stages" must be a list with a tree for each of the {count} stages, since each '
                f"has a function of its own; got {what}"
            ]
        return axis_faults(stages, "stages", count, f"the number of stages, {count}")


def check_canonical(
    params: Mapping[str, PyTree], layout: ParamLayout, *, has_first: bool, has_last: bool
) -> None:
    """PipelineError listing every fault of a canonical parameter tree."""
    faults = []
    if not isinstance(params, Mapping):
        raise PipelineError(
            "parameters must be a dict with keys first, stages, last (and shared); got "
            f"{type(params).__name__}"
        )
    unknown = sorted(set(params) - {*OUTER, "stages"})
    if unknown:
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
        for key, has in (("first", has_first), ("last", has_last))
        if has and key not in params
    ]
    if isinstance(params.get("stages"), Chunks):
        raise PipelineError(
            "these parameters are placed already; `place` takes canonical ones, which "
            "`pipe.canonical(placed)` gives back (with the "
            "pipeline that placed them)"
        )
    odd = array_faults(dict(params), "params")
    if odd:
        raise PipelineError.listing("these parameters do not fit the pipeline", [*faults, *odd])
    if "stages" in params:
        faults += layout.faults(params["stages"])
    PipelineError.refuse("these parameters do not fit the pipeline", faults)
