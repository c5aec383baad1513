"""How each parameter is spread over the mesh besides its stage: tensor, fsdp, and outer parameters over the pipe axis."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..arrays import PyTree
from ..errors import PipelineError
from ..jaxprs import Part
from .forms import Buffer, Lie, Sharing
from .mesh import trimmed
from .packed import Packed
from .placed import Chunks
from .spread import Cuts


@dataclass(frozen=True)
class LeafPlan:
    """One parameter: dims split over manual axes (gathered once a step, gradients scattered back), and the partitioner's dims.

    Dims count from the stage's own first one: the leading axis of devices of a placed stage leaf is apart.
    """

    ndim: int
    stage: bool
    gathers: tuple[tuple[str, int], ...]  # (mesh axis, dim)
    auto: tuple[Any, ...]  # per dim, the axes that the partitioner splits it over, or None
    frozen: bool = False  # no gradient, no accumulator
    cut: tuple[str, int] | None = None  # (pipe axis, dim) of a share that a spread function works on: never gathered
    pinned: bool = False  # the partitioner shall not split what `auto` does not say

    def spec(self, axis: str) -> PartitionSpec:
        """The whole sharding of the placed leaf, as JAX writes that of a step's results: else the second step would be compiled again."""
        return trimmed(*self._spec(axis, self.auto))

    def manual(self, axis: str) -> PartitionSpec:
        """The part of it that `shard_map` is told."""
        return self._spec(axis, (None,) * self.ndim)

    def _spec(self, axis: str, auto: Sequence[Any]) -> PartitionSpec:
        entries = list(auto)
        for name, dim in self.gathers:
            entries[dim] = name
        if self.cut is not None:
            entries[self.cut[1]] = self.cut[0]
        return PartitionSpec(*([axis] if self.stage else []), *entries)

    def gather(self, leaf: Any) -> Any:
        """The whole parameter of this device's stage."""
        if not self.gathers:
            return leaf

        def gathered(part: Any) -> Any:
            for name, dim in self.gathers:
                part = lax.all_gather(part, name, axis=dim, tiled=True)
            return part

        return self._on_parts(gathered, leaf)

    def scatter(self, grad: Any, reduced: Sequence[str]) -> Any:
        """Sum a gradient over the mesh axes `reduced`, leaving each device its part along those that the parameter is split over."""
        held = {name: dim for name, dim in self.gathers if name in reduced}
        if not held:
            return grad

        def scattered(part: Any) -> Any:
            for name in [n for n in reduced if n in held]:
                part = lax.psum_scatter(part, name, scatter_dimension=held[name], tiled=True)
            return part

        return self._on_parts(scattered, grad)

    def _on_parts(self, collective: Callable[[Any], Any], leaf: Any) -> Any:
        """Run a collective on each device's part of a leaf that the partitioner splits too.

        Left to itself the partitioner knows no way to split an all-gather or a reduce-scatter: it would bring together the
        whole leaf on every device first, which is as many times the memory and the traffic as the tensor axis is long.
        """
        names = {name for entry in self.auto for name in _names(entry)}
        if not names:
            return collective(leaf)
        spec = PartitionSpec(*self.auto)
        return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False)(leaf)

    def whole_axes(self, reduced: Sequence[str]) -> tuple[str, ...]:
        """Those of the axes over which the gradient is summed without being split."""
        held = {name for name, _ in (*self.gathers, *([] if self.cut is None else [self.cut]))}
        return tuple(n for n in reduced if n not in held)

    def constrain(self, leaf: Any) -> Any:
        """Tell the partitioner how a buffer of the parameter's shape is split."""
        if all(a is None for a in self.auto) and not self.pinned:
            return leaf
        return lax.with_sharding_constraint(leaf, PartitionSpec(*self.auto))


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
            (_path(path), leaf.dtype)
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
        given = _by_path(spec)
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
        unused = [prefix for prefix in given if prefix and not any(_holds(prefix, name) for name in names)]
        faults += [f"{key}: specs name {prefix!r}, but the parameters are {list(dict.fromkeys(names))}" for prefix in unused]
        return found[0] if stages is None else stages.like(found)

    def _leaves(self, key: str, tree: PyTree, given: Mapping[str, Any], faults: list[str]) -> PyTree:
        buffers = {buffer.name: buffer for buffer in tree.buffers} if isinstance(tree, Packed) else {}

        def leaf_plan(path: Any, leaf: Any) -> LeafPlan:
            buffer = buffers.get(_path(path))
            if buffer is not None:
                plan = self._leaf(key, key, leaf, buffer.spec, faults, None)
                return replace(plan, frozen=buffer.group is _Group.FROZEN, pinned=buffer.pinned)
            name = self._name(key, _path(path))
            own, cut = self._spec_of(key, name, given), self.cuts.dim(key, path)
            return self._leaf(key, f"{key}/{name}" if name else key, leaf, own, faults, cut)

        return jax.tree_util.tree_map_with_path(leaf_plan, tree)

    def _spec_of(self, key: str, name: str, given: Mapping[str, Any]) -> Any:
        """The spec that holds for a parameter, of a stage's own dims."""
        own = next((spec for prefix, spec in given.items() if _holds(prefix, name)), None)
        if self.layered and key == "stages" and isinstance(own, PartitionSpec):
            return PartitionSpec(None, *own)  # the layers of a stage are stacked
        return own

    @cached_property
    def sharing(self) -> Sharing:
        """Which parameters of unlike stages may share a buffer: frozen ones with each other, and trained ones, split over the same axes."""
        given = _by_path((self.specs or {}).get("stages"))

        def lie(path: str, leaf: jax.ShapeDtypeStruct) -> Lie | None:
            name = self._name("stages", path)
            spec = self._spec_of("stages", name, given)
            if self._spec_faults(name, leaf.shape, spec):
                return None  # told where the parameter is read by itself
            parts = tuple(
                Part(dim, _names(entry), count)
                for dim, entry in enumerate(() if spec is None else spec)
                if (count := math.prod(self.mesh[axis] for axis in _names(entry))) > 1
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
        """What is wrong with the spec of a parameter, whose shape is meant without the stage axis."""
        if spec is None:
            return []
        if not isinstance(spec, PartitionSpec):
            return [f"{where}: specs must hold PartitionSpecs or None; got {spec!r}"]
        if len(spec) > len(shape):
            return [f"{where}: {spec} has {len(spec)} entries for a parameter of shape {shape} (leave the stage axis out)"]
        odd = [entry for entry in spec if not all(isinstance(name, str) for name in _names(entry))]
        if odd:
            return [f"{where}: {spec} holds {odd[0]!r}; an entry is a mesh axis, a tuple of them, or None"]
        faults = []
        named = [name for entry in spec for name in _names(entry)]
        for name in dict.fromkeys(named):
            head = f"{where}: {spec} names"
            if name not in self.mesh:
                faults.append(f"{head} an axis {name!r} that the mesh does not have; its axes are {dict(self.mesh)}")
            elif name == self.axis:
                faults.append(
                    f"{head} the pipe axis {name!r}, over which stages are spread anyway; shard_outer= splits what is not a stage"
                )
            elif name in self.data_axes:
                faults.append(f"{head} the data axis {name!r}; fsdp={name!r} splits parameters over it")
            if named.count(name) > 1:
                faults.append(f"{head} {name!r} more than once")
        for dim, entry in enumerate(spec):
            size = math.prod(self.mesh.get(name, 1) for name in _names(entry))
            if shape[dim] % size:
                faults.append(f"{where}: dim {dim} of shape {shape} does not divide over {entry!r}, which has {size} devices")
        return faults

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
    names = [_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(chunk)]
    inside = {buffer.name: buffer.paths for buffer in chunk.buffers} if isinstance(chunk, Packed) else {}
    return [path for name in names for path in inside.get(name, (name,))]


def _by_path(specs: PyTree) -> dict[str, Any]:
    """Specs by the paths at which they are given."""
    return {_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec)}


def _is_spec(value: Any) -> bool:
    """A leaf of a tree of specs."""
    return value is None or isinstance(value, PartitionSpec)


def _holds(prefix: str, name: str) -> bool:
    """Whether a spec at the path `prefix` is meant for the parameter `name`."""
    return prefix in ("", name) or name.startswith(prefix + "/")


def _path(path: Any) -> str:
    """A leaf's path as text, "dense/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _names(entry: Any) -> tuple[Any, ...]:
    """The mesh axes that an entry of a PartitionSpec names."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def frozen_filter(given: Any) -> Callable[[str, Any], bool] | None:
    """The filter of frozen parameters, from a function or from regular expressions of paths."""
    if given is None or callable(given):
        return given
    patterns = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else [given]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise PipelineError(f"frozen must be a function of a path and a shape, or regular expressions of paths; got {given!r}")
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise PipelineError(
            f"frozen: {error.pattern!r} is no regular expression ({error}); `re.escape(path)` makes one of a path"
        ) from None
    return lambda path, _leaf: any(pattern.search(path) for pattern in compiled)


def axes_of(specs: Any) -> set[Any]:
    """The mesh axes that any of these specs names."""
    leaves = jax.tree.leaves(specs, is_leaf=_is_spec)
    return {name for spec in leaves if isinstance(spec, PartitionSpec) for entry in spec for name in _names(entry)}


def is_plan(value: Any) -> bool:
    """True for a `LeafPlan` (a leaf of the trees that `Partition.plans` returns)."""
    return isinstance(value, LeafPlan)


def trained(leaves: Sequence[Any], plans: Sequence[LeafPlan]) -> list[Any]:
    """The leaves that have a gradient."""
    return [leaf for leaf, plan in zip(leaves, plans, strict=True) if not plan.frozen]


def with_frozen(values: Sequence[Any], plans: Sequence[LeafPlan]) -> list[Any]:
    """A leaf for each parameter, None for those that are frozen."""
    own = iter(values)
    return [None if plan.frozen else next(own) for plan in plans]


def gather(tree: PyTree, plans: PyTree) -> PyTree:
    """Whole parameters from their parts."""
    return jax.tree.map(lambda leaf, plan: plan.gather(leaf), tree, plans)


def leaf_plans(plans: PyTree) -> list[LeafPlan]:
    """The plans of a tree, in leaf order."""
    return jax.tree.leaves(plans, is_leaf=is_plan)


def reduce_gradients(grads: Sequence[Any], plans: Sequence[LeafPlan], axes: Sequence[str]) -> list[Any]:
    """Sum gradients over mesh axes, once: all that are whole over the same axes in one collective."""
    scattered = [plan.scatter(g, axes) for g, plan in zip(grads, plans, strict=True)]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, plan in enumerate(plans):
        groups.setdefault(plan.whole_axes(axes), []).append(i)
    for names, members in groups.items():
        if not names:
            continue
        for i, value in zip(members, lax.psum([scattered[i] for i in members], names), strict=True):
            scattered[i] = value
    return scattered
