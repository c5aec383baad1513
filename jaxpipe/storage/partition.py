"""How users want parameters to be stored: the mesh, the stages of each device, specs, and which are
frozen or replaced; the plan of each placed leaf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from textwrap import shorten

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..arrays import ByPart, Leaf, LeafPath, Params, PyTree, by_path, path_text
from ..errors import PipelineError
from ..jaxprs.entry import Part
from ..model.calls import Cuts
from ..model.replaced import Replacements
from ..model.settings import Patterns, Sharding, SpecEntry, holds, is_spec, names_of
from .chunks import Chunks, ParamLayout, again_by, padding_of
from .packed import Packed
from .padding import Padding
from .plan import LeafPlan, leaf_plans
from .table import Buffer, BufferKey, Group, Parameter, Storing

_UNFIT = "these parameters do not fit the pipeline"


def parts_of(spec: Iterable[SpecEntry] | None, mesh: Mesh) -> tuple[Part, ...]:
    """The dims of a value that a spec splits, over more than one device."""
    return tuple(
        Part(dim, names_of(entry), count)
        for dim, entry in enumerate(spec or ())
        if (count := math.prod(mesh.shape[axis] for axis in names_of(entry))) > 1
    )


@dataclass(frozen=True)
class Partition:
    """How a model's parameters are stored on a mesh of automatic axes: the stages of each device,
    and the axes over which each parameter is split.
    """

    mesh: Mesh
    sharding: Sharding
    layout: ParamLayout
    cuts: Cuts  # parameters that are cut over the pipe axis, for functions that are spread
    frozen: Callable[[str, Leaf], bool] | None  # of a path, "stages/w", and a shape
    replaced: Replacements

    @property
    def axis(self) -> str:
        """The pipe axis."""
        return self.sharding.pipe

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which rows are spread."""
        return tuple(self.sharding.data)

    @property
    def data_size(self) -> int:
        """The number of data shards."""
        return math.prod(self.mesh.shape[name] for name in self.data_axes)

    def plans(self, params: Params, canonical: Params | None = None) -> ByPart:
        """A `LeafPlan` for each leaf of placed parameters (arrays or shapes).

        Raises:
            PipelineError: specs that do not fit, and leaves that cannot be replaced; given the
                canonical parameters, also specs and expressions of frozen= and replaced= that are
                for none of these, and trained ones that cannot have a gradient.  All are listed.
        """
        PipelineError.refuse(_UNFIT, self.cuts.faults(params))
        padding = {own.path: own for own in padding_of(params)}
        found = {key: self._tree(padding, key, tree) for key, tree in params.items()}
        leaves = [*zip(by_path(dict(params)).items(), leaf_plans(found), strict=True)]
        faults = [
            f"specs has a key {key!r}; its keys are those of the parameters, {sorted(params)}"
            for key in self._specs
            if key not in params
        ]
        faults += [fault for (_, leaf), plan in leaves for fault in self._faults(plan, leaf)]
        if canonical is not None:
            faults += [*self._unused_specs(canonical), *self.path_faults(found)]
            faults += [
                f"parameter {path!r} is {leaf.dtype}; parameters that are trained must be "
                "floating: put other arrays in the batch, or name them in frozen="
                for (path, leaf), plan in leaves
                if plan.trained and not jnp.issubdtype(leaf.dtype, jnp.inexact)
            ]
        # chunks whose stages are alike have the same faults
        PipelineError.refuse(_UNFIT, list(dict.fromkeys(faults)))
        return found

    def sizes(self, plans: ByPart) -> ByPart:
        """For each parameter that may be cut the whole length of its cut dim; 0 where it is
        whole.
        """
        trees = {key: plans[key] for key in self.cuts.dims}
        return dict(jax.tree.map(lambda plan: plan.cut[1] if plan.cut else 0, trees))

    def path_faults(self, plans: ByPart) -> list[str]:
        """Expressions of frozen= and replaced= that are found in the path of none of the
        parameters.
        """
        paths = list(
            dict.fromkeys(own.path for plan in leaf_plans(plans) for own, _ in plan.parameters)
        )
        every = (self.frozen, self.replaced.patterns)
        return [fault for one in every if isinstance(one, Patterns) for fault in one.faults(paths)]

    @cached_property
    def _specs(self) -> dict[str, dict[str, PartitionSpec | None]]:
        """Specs by the paths at which they are given, below each key."""
        return {key: by_path(tree, is_spec) for key, tree in (self.sharding.specs or {}).items()}

    def _name(self, path: str) -> str:
        """A parameter's path as specs know it: one tree of specs may be for all stages of a
        list.
        """
        key, _, name = path.partition("/")
        numbered = self.layout.unlike and not self.layout.is_layered
        by_stage = isinstance((self.sharding.specs or {}).get("stages"), list | tuple)
        return name.partition("/")[2] if key == "stages" and numbered and not by_stage else name

    def _spec(self, own: Parameter) -> tuple[tuple[SpecEntry, ...], list[str]]:
        """The spec of a parameter, as its stage has it: one that is given for it, or for all below
        a path; what no spec names is whole.  The faults of the spec, which is () then.
        """
        key = own.path.partition("/")[0]
        specs, name = self._specs.get(key, {}), self._name(own.path)
        spec = next((spec for prefix, spec in specs.items() if holds(prefix, name)), None)
        faults = self.sharding.spec_faults(own.path, own.shape, spec, dict(self.mesh.shape))
        # a stage has a stack of layers
        stack = (None,) if self.layout.is_layered and key == "stages" else ()
        return (*stack, *(() if faults or spec is None else spec)), faults

    def _is_frozen(self, own: Parameter, dtype: DTypeLike) -> bool:
        shape = jax.ShapeDtypeStruct(own.shape, dtype)
        return self.frozen is not None and bool(self.frozen(own.path, shape))

    def _faults(self, plan: LeafPlan, leaf: Leaf) -> Iterator[str]:
        """The faults of the parameters in a leaf, as users want them to be stored."""
        for own, _ in plan.parameters:
            yield from self._spec(own)[1]
            spread = own.path.partition("/")[0] in self.cuts.dims
            yield from self.replaced.faults(own.path, leaf.dtype, frozen=plan.frozen, spread=spread)
        first, _ = plan.parameters[0]
        spec, (dim, _) = self._spec(first)[0], plan.cut or (None, 0)
        if dim is not None and spec[dim : dim + 1] not in ((), (None,)):
            yield (
                f"{first.path}: {PartitionSpec(*spec)} splits dim {dim}, which is cut over the "
                f"pipe axis {self.axis!r}; split another dim"
            )
        wanted = self.cuts.padded(first.shape, dim)
        if not plan.stage and leaf.shape != wanted:
            yield (
                f"{first.path} of {first.shape} is placed as {leaf.shape}, but this pipeline "
                f"stores it as {wanted}: where a function is spread over the devices, zeros follow "
                f"parameters that do not divide, and elsewhere none do; {again_by('place')}"
            )
        alike = self.kept(first, leaf.dtype)
        if any(self.kept(own, leaf.dtype) != (how or alike) for own, how in plan.parameters):
            paths = ", ".join(dict.fromkeys(repr(own.path) for own, _ in plan.parameters))
            yield (
                f"one array stores {shorten(paths, 300)}, but frozen=, replaced=, specs= or the "
                f"mesh axes of this pipeline keep it apart; {again_by('place')}"
            )

    def _unused_specs(self, canonical: Params) -> list[str]:
        """Specs for which there is neither a canonical parameter nor None in its place."""
        faults = []
        for key, tree in canonical.items():
            nodes = by_path(tree, lambda node: node is None)
            known = {self._name(f"{key}/{path}"): node for path, node in nodes.items()}
            names = [name for name, node in known.items() if node is not None]
            faults += [
                f"{key}: specs name {prefix!r}, but the parameters are {names}"
                for prefix in self._specs.get(key, ())
                if prefix and not any(holds(prefix, name) for name in known)
            ]
        return faults

    def _tree(self, padding: Mapping[str, Padding], key: str, tree: PyTree) -> PyTree:
        """The plans of a part of the model, or of a chunk of stages that are alike."""
        if not isinstance(tree, Chunks):
            of_leaf = partial(self._own_plan, padding)
            return jax.tree_util.tree_map_with_path(of_leaf, {key: tree})[key]
        return tree.like(
            self._packed(chunk, v) if isinstance(chunk, Packed) else self._tree(padding, key, chunk)
            for v, chunk in enumerate(tree)
        )

    def _own_plan(self, padding: Mapping[str, Padding], path: LeafPath, leaf: Leaf) -> LeafPlan:
        """The plan of a leaf of first, last or shared, or of stages that are alike."""
        name, key = path_text(path), path[0].key
        stage = key == "stages"
        shape = padding[name].own if name in padding else tuple(leaf.shape[int(stage) :])
        own, dim = Parameter(name, shape), self.cuts.dim(key, path[1:])
        cut = None if dim is None else (dim, shape[dim])
        return self._plan(leaf, self._spec(own)[0], [(own, None)], stage=stage, cut=cut)

    def _packed(self, chunk: Packed, v: int) -> Packed:
        """The plans of the arrays of chunk `v` of unlike stages."""
        inside = chunk.layout.parameters(self.layout.stage_at(v), layered=self.layout.is_layered)

        def plan(name: str, leaf: Leaf) -> LeafPlan:
            if (buffer := chunk.layout.of(name)) is None:
                return self._plan(leaf, self._spec(inside[name][0][0])[0], inside[name])
            plan = self._plan(leaf, tuple(buffer.spec), inside[name])
            return replace(plan, pinned=chunk.layout.pinned)

        leaves = chunk.leaves.items()
        plans = {name: None if leaf is None else plan(name, leaf) for name, leaf in leaves}
        return Packed(plans, chunk.layout)

    def kept(self, own: Parameter, dtype: DTypeLike) -> BufferKey:
        """Which parameters of unlike stages may share a buffer: frozen ones with each other, and
        trained ones, split over the same axes.
        """
        (spec, faults), frozen = self._spec(own), self._is_frozen(own, dtype)
        # `plans` lists these; and a buffer's shape is the same outside and inside of a step
        if rule := self.replaced.of(own.path):
            return BufferKey(replaced=rule)
        if faults or self._held(spec) or not (frozen or jnp.issubdtype(dtype, jnp.inexact)):
            return BufferKey()
        return BufferKey(Group.FROZEN if frozen else Group.TRAINED, parts_of(spec, self.mesh))

    def storing(self, kept: Callable[[Parameter, DTypeLike], BufferKey]) -> Storing:
        """How parameters, or what is like them, may be stored on this mesh."""
        fsdp = self.sharding.fsdp
        multiple = 1 if fsdp is None else self.mesh.shape[fsdp]
        return Storing(kept, multiple, bool(self.auto_axes))

    @property
    def auto_axes(self) -> tuple[str, ...]:
        """The axes of more than one device that are left to the partitioner."""
        own = (self.axis, *self.data_axes)
        return tuple(name for name, size in self.mesh.shape.items() if size > 1 and name not in own)

    def _plan(
        self,
        leaf: Leaf,
        spec: Sequence[SpecEntry],
        inside: Sequence[tuple[Parameter, BufferKey | None]] = (),
        *,
        stage: bool = True,
        cut: tuple[int, int] | None = None,
    ) -> LeafPlan:
        """The plan of a placed leaf that is split by a spec and holds these parameters; `cut`: see
        `LeafPlan`.
        """
        shape, fsdp = leaf.shape[int(stage) :], self.sharding.fsdp
        entries = (*spec, *(None,) * (len(shape) - len(spec)))
        local = self._held(entries)
        by_dim = {dim for _, dim in local}
        auto = tuple(None if d in by_dim else entry for d, entry in enumerate(entries))
        held = (*local, *([] if cut is None else [(self.axis, cut[0])]))
        rule = next(filter(None, (self.replaced.of(own.path) for own, _ in inside)), None)
        outer = [self.axis] if self.sharding.outer and not stage and cut is None else []
        wanted = [*outer, *([] if fsdp is None or fsdp in dict(local) else [fsdp])]
        whole = {d for d, entry in enumerate(auto) if not entry} - {d for _, d in held}
        gathers = []
        for name in wanted if rule is None else ():  # a rule is for whole leaves
            size = self.mesh.shape[name]
            fits = [d for d in sorted(whole) if shape[d] and shape[d] % size == 0]
            if fits and size > 1:
                gathers.append((name, max(fits, key=lambda d: shape[d])))
                whole.remove(gathers[-1][1])
        return LeafPlan(
            stage,
            gathers=tuple(gathers),
            auto=auto,
            frozen=any(self._is_frozen(own, leaf.dtype) for own, _ in inside),
            replaced=rule,
            held=held,
            cut=cut,
            parameters=tuple(inside),
        )

    def _held(self, spec: Sequence[SpecEntry]) -> list[tuple[str, int]]:
        """(data axis, dim) that a spec names."""
        return [
            (name, dim)
            for dim, entry in enumerate(spec)
            for name in names_of(entry)
            if name in self.sharding.local
        ]

    def buffer_spec(self, buffer: Buffer, leaf: Leaf) -> PartitionSpec:
        """How a buffer [P, ...] of parameters, or of an optimizer's state, is spread."""
        return self._plan(leaf, tuple(buffer.spec)).spec(self.axis)

    def shardings(self, plans: ByPart) -> ByPart:
        """Shardings of placed parameters."""
        return dict(
            jax.tree.map(lambda plan: NamedSharding(self.mesh, plan.spec(self.axis)), plans)
        )
