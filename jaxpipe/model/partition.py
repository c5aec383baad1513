"""How each parameter is spread over the mesh besides its stage: tensor, fsdp, and outer parameters over the pipe axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..arrays import PyTree
from ..errors import PipelineError
from ..jaxprs import Part
from .forms import Buffer, Lie, Sharing
from .leaf_plan import LeafPlan, is_plan
from .packed import Packed
from .placed import Chunks
from .specs import by_path, holds, names_of, path_text, spec_faults
from .spread import Cuts


@dataclass(frozen=True)
class Partition:
    """The rules: which axes, which specs."""

    axis: str
    mesh: Mapping[str, int]  # the mesh's axes and their sizes
    data_axes: tuple[str, ...] = ()
    fsdp: str | None = None  # a data axis: parameters and their gradients are split over it
    outer: bool = False  # first, last and shared are split over the pipe axis
    specs: Mapping[str, PyTree] | None = None  # canonical specs without the axis of stages or layers, of those parameters that are split
    layered: bool = False  # stages are made of layers
    frozen: Callable[[str, Any], bool] | None = None  # of a path, "stages/w", and a shape
    cuts: Cuts = field(default_factory=lambda: Cuts(1))  # which parameters are cut over the pipe axis, for functions that are spread

    def plans(self, params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """A `LeafPlan` for each leaf of placed parameters (arrays or shapes); PipelineError lists every spec that does not fit."""
        specs = self.specs or {}
        faults = [f"specs has a key {key!r}; its keys are those of the parameters, {sorted(params)}" for key in specs if key not in params]
        found = {key: self._tree(key, tree, specs.get(key), faults) for key, tree in params.items()}
        if faults:
            raise PipelineError.listing("these specs do not fit", faults)
        return found

    def dtype_faults(self, params: Mapping[str, PyTree]) -> list[str]:
        """Placed parameters (shapes) that are trained and have no gradient, by their dtype."""
        paths = jax.tree_util.tree_leaves_with_path(dict(params))
        plans = jax.tree.leaves(self.plans(params), is_leaf=is_plan)
        odd = [
            (path_text(path), leaf.dtype)
            for (path, leaf), plan in zip(paths, plans, strict=True)
            if not plan.frozen and not jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        return [
            f"parameter {name!r} is {dtype}; parameters that are trained must be floating: put other arrays in the batch, or name "
            "them in frozen="
            for name, dtype in odd
        ]

    def _tree(self, key: str, tree: PyTree, spec: PyTree, faults: list[str]) -> PyTree:
        """Plans by path: a spec holds for the parameter that it names and for all below it; what no spec names is whole."""
        given = by_path(spec)
        stages = tree if isinstance(tree, Chunks) else None
        chunks = (tree,) if stages is None else stages
        found = []
        for chunk in chunks:
            own: list[str] = []
            found.append(self._leaves(key, chunk, given, own))
            if isinstance(chunk, Packed):
                for buffer in chunk.buffers:
                    leaf = chunk.leaves[buffer.name]
                    own += [] if leaf is None else self.sharing.faults(buffer, chunk.forms, leaf.dtype)
            faults += [fault for fault in own if fault not in faults]  # chunks whose stages are alike have the same ones
        names = [self._name(key, path) for chunk in chunks for path in _paths(chunk)]
        unused = [prefix for prefix in given if prefix and not any(holds(prefix, name) for name in names)]
        faults += [f"{key}: specs name {prefix!r}, but the parameters are {list(dict.fromkeys(names))}" for prefix in unused]
        return found[0] if stages is None else stages.like(found)

    def _leaves(self, key: str, tree: PyTree, given: Mapping[str, Any], faults: list[str]) -> PyTree:
        buffers = {buffer.name: buffer for buffer in tree.buffers} if isinstance(tree, Packed) else {}

        def leaf_plan(path: Any, leaf: Any) -> LeafPlan:
            buffer = buffers.get(path_text(path))
            if buffer is not None:
                plan = self._leaf(key, key, leaf, buffer.spec, faults, None)
                return replace(plan, frozen=buffer.group is _Group.FROZEN, pinned=buffer.pinned)
            name = self._name(key, path_text(path))
            own, cut = self._spec_of(key, name, given), self.cuts.dim(key, path)
            return self._leaf(key, f"{key}/{name}" if name else key, leaf, own, faults, cut)

        return jax.tree_util.tree_map_with_path(leaf_plan, tree)

    def _spec_of(self, key: str, name: str, given: Mapping[str, Any]) -> Any:
        """The spec that holds for a parameter, of a stage's own dims."""
        own = next((spec for prefix, spec in given.items() if holds(prefix, name)), None)
        if self.layered and key == "stages" and isinstance(own, PartitionSpec):
            return PartitionSpec(None, *own)  # the layers of a stage are stacked
        return own

    @cached_property
    def sharing(self) -> Sharing:
        """Which parameters of unlike stages may share a buffer: frozen ones with each other, and trained ones, split over the same axes."""
        given = by_path((self.specs or {}).get("stages"))

        def lie(path: str, leaf: jax.ShapeDtypeStruct) -> Lie | None:
            name = self._name("stages", path)
            spec = self._spec_of("stages", name, given)
            if self._spec_faults(name, leaf.shape, spec):
                return None  # told where the parameter is read by itself
            parts = tuple(
                Part(dim, names_of(entry), count)
                for dim, entry in enumerate(() if spec is None else spec)
                if (count := math.prod(self.mesh[axis] for axis in names_of(entry))) > 1
            )
            if self._is_frozen(f"stages/{name}", leaf.shape, leaf.dtype):
                return Lie(_Group.FROZEN, parts)
            return Lie(_Group.TRAINED, parts) if jnp.issubdtype(leaf.dtype, jnp.inexact) else None

        left = any(size > 1 for name, size in self.mesh.items() if name not in (self.axis, *self.data_axes))
        return Sharing(lie, 1 if self.fsdp is None else self.mesh[self.fsdp], left)

    def _name(self, key: str, name: str) -> str:
        """A parameter's path as the user knows it: a stage's stacks of a letter, "t/0/w" and "t/1/w", are one parameter, "t/w"."""
        if not self.layered or key != "stages":
            return name
        letter, _, *rest = name.split("/")
        return "/".join([letter, *rest])

    def _leaf(self, key: str, where: str, leaf: Any, spec: Any, faults: list[str], cut: int | None) -> LeafPlan:
        stage = key == "stages"
        shape = leaf.shape[1:] if stage else leaf.shape
        own = self._spec_faults(where, shape, spec)
        faults += own
        entries = () if own or spec is None else tuple(spec)
        auto = [*entries, *(None for _ in range(len(shape) - len(entries)))]
        if cut is not None and auto[cut] is not None:
            faults.append(f"{where}: {spec} splits dim {cut}, which is cut over the pipe axis {self.axis!r}; split another dim")
        gathers: list[tuple[str, int]] = []
        wanted = [self.axis] if self.outer and not stage and cut is None else []
        wanted += [self.fsdp] if self.fsdp is not None else []
        for name in wanted:
            size = self.mesh[name]
            free = [d for d in range(len(shape)) if auto[d] is None and d != cut and d not in {used for _, used in gathers}]
            fits = [d for d in free if shape[d] % size == 0 and shape[d] > 0]
            if fits and size > 1:
                gathers.append((name, max(fits, key=lambda d: shape[d])))
        held = None if cut is None else (self.axis, cut)
        return LeafPlan(len(shape), stage, tuple(gathers), tuple(auto), self._is_frozen(where, shape, leaf.dtype), held)

    def _is_frozen(self, where: str, shape: tuple[int, ...], dtype: Any) -> bool:
        """What the user's filter says of a parameter, of which it sees the shape without the stage axis."""
        return self.frozen is not None and bool(self.frozen(where, jax.ShapeDtypeStruct(shape, dtype)))

    def _spec_faults(self, where: str, shape: tuple[int, ...], spec: Any) -> list[str]:
        return spec_faults(where, shape, spec, mesh=self.mesh, axis=self.axis, data_axes=self.data_axes)

    def buffer_spec(self, buffer: Buffer, shape: tuple[int, ...]) -> PartitionSpec:
        """How a buffer [P, ...] lies, of parameters or of an optimizer's state."""
        return self._leaf("stages", "stages", jax.ShapeDtypeStruct(shape, jnp.float32), buffer.spec, [], None).spec(self.axis)

    def shardings(self, mesh: Any, params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Shardings of placed parameters."""
        return jax.tree.map(lambda plan: NamedSharding(mesh, plan.spec(self.axis)), self.plans(params), is_leaf=is_plan)

    def manual_specs(self, params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """What `shard_map` is told of placed parameters, and of their gradients."""
        return jax.tree.map(lambda plan: plan.manual(self.axis), self.plans(params), is_leaf=is_plan)


class _Group(Enum):
    """Parameters of which some share a buffer."""

    TRAINED = "trained"
    FROZEN = "frozen"


def _paths(chunk: PyTree) -> list[str]:
    """The paths of a tree's leaves; of those that lie in buffers, their own."""
    names = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(chunk)]
    inside = {buffer.name: buffer.paths for buffer in chunk.buffers} if isinstance(chunk, Packed) else {}
    return [path for name in names for path in inside.get(name, (name,))]
