"""How each parameter is spread over the mesh besides its stage: tensor, fsdp, and outer parameters
over the pipe axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import PyTree, by_path, path_text
from ..errors import PipelineError
from ..jaxprs.entry import Part
from .leaf_plan import LeafPlan, leaf_plans
from .mesh import holds, is_spec, names_of
from .packed import Buffer, Group, InBuffer, Packed, Packing, Parameter
from .param_layout import Chunks, ParamLayout
from .settings import Patterns, Sharding
from .spread import Cuts, is_padded, own_shape, unpadded


def parts_of(spec: PartitionSpec | None, mesh: Mesh) -> tuple[Part, ...]:
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
    frozen: Callable[[str, Any], bool] | None = None  # of a path, "stages/w", and a shape

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

    @property
    def _layered(self) -> bool:
        return self.layout.layers is not None

    def plans(
        self, params: Mapping[str, PyTree], canonical: Mapping[str, PyTree] | None = None
    ) -> dict[str, PyTree]:
        """A `LeafPlan` for each leaf of placed parameters (arrays or shapes).

        Raises:
            PipelineError: specs that do not fit, or, given the canonical parameters, that are for
                none of these; all are listed.
        """
        faults = [
            f"specs has a key {key!r}; its keys are those of the parameters, {sorted(params)}"
            for key in self._specs
            if key not in params
        ]
        found = {key: self._tree(key, tree, faults) for key, tree in params.items()}
        faults += self._unused_specs(canonical or {})
        # chunks whose stages are alike have the same faults
        PipelineError.refuse("these specs do not fit", list(dict.fromkeys(faults)))
        return found

    def dtype_faults(self, params: Mapping[str, PyTree], plans: PyTree) -> list[str]:
        """Placed parameters (shapes) that are trained and have no gradient, by their dtype."""
        return [
            f"parameter {path!r} is {leaf.dtype}; parameters that are trained must be "
            "floating: put other arrays in the batch, or name them in frozen="
            for (path, leaf), plan in zip(
                by_path(dict(params)).items(), leaf_plans(plans), strict=True
            )
            if not plan.frozen and not jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]

    def frozen_faults(self, plans: PyTree) -> list[str]:
        """Expressions of frozen= that are found in the path of none of the parameters."""
        if not isinstance(self.frozen, Patterns):
            return []
        paths = (own.path for plan in leaf_plans(plans) for own in plan.parameters)
        return self.frozen.faults(list(dict.fromkeys(paths)))

    @cached_property
    def _specs(self) -> dict[str, dict[str, Any]]:
        """Specs by the paths at which they are given, below each key."""
        return {key: by_path(tree, is_spec) for key, tree in (self.sharding.specs or {}).items()}

    def _name(self, path: str) -> str:
        """A parameter's path as specs know it: one tree of specs may be for all stages of a
        list.
        """
        key, _, name = path.partition("/")
        numbered = self.layout.unlike and not self._layered
        by_stage = isinstance((self.sharding.specs or {}).get("stages"), list | tuple)
        return name.partition("/")[2] if key == "stages" and numbered and not by_stage else name

    def _spec(self, own: Parameter) -> Any:
        """The spec that holds for a parameter: one that is given for it, or for all below a path;
        what no spec names is whole.
        """
        specs, name = self._specs.get(own.path.partition("/")[0], {}), self._name(own.path)
        return next((spec for prefix, spec in specs.items() if holds(prefix, name)), None)

    def _spec_of_stack(self, own: Parameter) -> Any:
        """The spec of a parameter as a stage has it: the layers of a stage are stacked."""
        spec = self._spec(own)
        stacked = self._layered and own.path.startswith("stages/")
        return PartitionSpec(None, *spec) if stacked and isinstance(spec, PartitionSpec) else spec

    def _unused_specs(self, canonical: Mapping[str, PyTree]) -> list[str]:
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

    def _tree(self, key: str, tree: PyTree, faults: list[str]) -> PyTree:
        """The plans of a part of the model."""

        def plans(tree: PyTree) -> PyTree:
            of_leaf = partial(self._own_plan, key, faults)
            return jax.tree_util.tree_map_with_path(of_leaf, tree, is_leaf=is_padded)

        if not isinstance(tree, Chunks):
            return plans(tree)
        return tree.like(
            self._packed(chunk, v, faults) if isinstance(chunk, Packed) else plans(chunk)
            for v, chunk in enumerate(tree)
        )

    def _own_plan(self, key: str, faults: list[str], path: Any, leaf: Any) -> Any:
        """The plan of a leaf of first, last or shared, or of stages that are alike."""
        shape, stage = own_shape(leaf), key == "stages"
        if shape is None:
            return leaf  # frozen
        own = [Parameter("/".join(filter(None, [key, path_text(path)])), shape[int(stage) :])]
        cut = self.cuts.dim(key, path)
        plan = self._plan(own, unpadded(leaf), faults, stage=stage, cut=cut)
        return replace(leaf, array=plan) if is_padded(leaf) else plan

    def _packed(self, chunk: Packed, v: int, faults: list[str]) -> Packed:
        """The plans of the arrays of chunk `v` of unlike stages."""
        inside = chunk.layout.parameters(self.layout.stage_at(v), layered=self._layered)

        def plan(name: str, leaf: Any) -> LeafPlan:
            buffer = chunk.layout.of(name)
            faults.extend(self.packing.faults(inside[name], leaf.dtype, buffer))
            return self._plan([own for own, _ in inside[name]], leaf, faults, buffer=buffer)

        leaves = chunk.leaves.items()
        plans = {name: None if leaf is None else plan(name, leaf) for name, leaf in leaves}
        return Packed(plans, chunk.layout)

    def _plan(
        self,
        parameters: Sequence[Parameter],
        leaf: Any,
        faults: list[str],
        *,
        buffer: Buffer | None = None,
        stage: bool = True,
        cut: int | None = None,
    ) -> LeafPlan:
        """The plan of a placed leaf that holds these parameters."""
        own, shape = parameters[0], leaf.shape[1:] if stage else leaf.shape
        if buffer is None:
            spec = self._spec_of_stack(own)
            found = self._split(own.path, shape, spec, faults, stage=stage, cut=cut)
            frozen = self._is_frozen(own, leaf.dtype)
            return replace(found, frozen=frozen, parameters=tuple(parameters))
        for own in parameters:
            faults += self._spec_faults(own.path, own.shape, self._spec(own))
        return replace(
            self._split("stages", shape, buffer.spec, faults),
            frozen=buffer.group is Group.FROZEN,
            pinned=buffer.pinned,
            parameters=tuple(parameters),
        )

    @cached_property
    def packing(self) -> Packing:
        """Which parameters of unlike stages may share a buffer: frozen ones with each other, and
        trained ones, split over the same axes.
        """

        def kept(own: Parameter, dtype: Any) -> InBuffer:
            spec, frozen = self._spec_of_stack(own), self._is_frozen(own, dtype)
            # `plans` lists these; and a buffer's shape is the same outside and inside of a step
            faults = self._spec_faults(own.path, own.shape, self._spec(own))
            if faults or self._held(spec) or not (frozen or jnp.issubdtype(dtype, jnp.inexact)):
                return InBuffer(Group.ALONE)
            group = Group.FROZEN if frozen else Group.TRAINED
            return InBuffer(group, parts_of(spec, self.mesh))

        fsdp = self.sharding.fsdp
        multiple = 1 if fsdp is None else self.mesh.shape[fsdp]
        return Packing(kept, multiple, bool(self.auto_axes), self._layered)

    @property
    def auto_axes(self) -> tuple[str, ...]:
        """The axes of more than one device that are left to the partitioner."""
        own = (self.axis, *self.data_axes)
        return tuple(name for name, size in self.mesh.shape.items() if size > 1 and name not in own)

    def _split(
        self,
        where: str,
        shape: tuple[int, ...],
        spec: Any,
        faults: list[str],
        *,
        stage: bool = True,
        cut: int | None = None,
    ) -> LeafPlan:
        """How a leaf of this shape and spec is split; `cut`: its dim that is cut over the pipe
        axis.
        """
        own = self._spec_faults(where, shape, spec)
        faults += own
        entries = () if own or spec is None else tuple(spec)
        entries += (None,) * (len(shape) - len(entries))
        held, fsdp = self._held(entries), self.sharding.fsdp
        used = {dim for dim, entry in enumerate(entries) if entry is not None}
        auto = tuple(
            None if dim in {dim for _, dim in held} else entry for dim, entry in enumerate(entries)
        )
        if cut in used:
            faults.append(
                f"{where}: {spec} splits dim {cut}, which is cut over the pipe axis "
                f"{self.axis!r}; split another dim"
            )
        gathers: list[tuple[str, int]] = []
        wanted = [self.axis] if self.sharding.outer and not stage and cut is None else []
        wanted += [] if fsdp is None or fsdp in dict(held) else [fsdp]
        for name in wanted:
            size = self.mesh.shape[name]
            free = [d for d in range(len(shape)) if d not in {cut, *used}]
            fits = [d for d in free if shape[d] % size == 0 and shape[d] > 0]
            if fits and size > 1:
                gathers.append((name, max(fits, key=lambda d: shape[d])))
                used.add(gathers[-1][1])
        held += [] if cut is None else [(self.axis, cut)]
        return LeafPlan(stage, tuple(gathers), auto, held=tuple(held))

    def _held(self, spec: Any) -> list[tuple[str, int]]:
        """(data axis, dim) that a spec names."""
        return [
            (name, dim)
            for dim, entry in enumerate(spec or ())
            for name in names_of(entry)
            if name in self.sharding.local
        ]

    def _is_frozen(self, own: Parameter, dtype: Any) -> bool:
        """Whether the user's filter takes a parameter."""
        return self.frozen is not None and bool(
            self.frozen(own.path, jax.ShapeDtypeStruct(own.shape, dtype))
        )

    def _spec_faults(self, where: str, shape: tuple[int, ...], spec: Any) -> list[str]:
        return self.sharding.spec_faults(where, shape, spec, dict(self.mesh.shape))

    def buffer_spec(self, buffer: Buffer, shape: tuple[int, ...]) -> PartitionSpec:
        """How a buffer [P, ...] of parameters, or of an optimizer's state, is spread."""
        return self._split("stages", shape[1:], buffer.spec, []).spec(self.axis)

    def shardings(self, plans: PyTree) -> dict[str, PyTree]:
        """Shardings of placed parameters."""
        return dict(
            jax.tree.map(lambda plan: NamedSharding(self.mesh, plan.spec(self.axis)), plans)
        )
