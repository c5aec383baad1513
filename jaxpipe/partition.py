"""How each parameter is spread over the mesh besides its stage: tensor, fsdp, and outer parameters over the pipe axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .errors import PipelineError

PyTree: TypeAlias = Any


@dataclass(frozen=True)
class LeafPlan:
    """One parameter: dims split over manual axes (gathered once a step, gradients scattered back), and the partitioner's dims.

    Dims count from the stage's own first one: the leading axis of devices of a placed stage leaf is apart.
    """

    ndim: int
    stage: bool
    gathers: tuple[tuple[str, int], ...]  # (mesh axis, dim)
    auto: tuple[Any, ...]  # per dim, the axes that the partitioner splits it over, or None

    def spec(self, axis: str) -> PartitionSpec:
        """The whole sharding of the placed leaf."""
        return self._spec(axis, self.auto)

    def manual(self, axis: str) -> PartitionSpec:
        """The part of it that `shard_map` is told."""
        return self._spec(axis, (None,) * self.ndim)

    def _spec(self, axis: str, auto: Sequence[Any]) -> PartitionSpec:
        entries = list(auto)
        for name, dim in self.gathers:
            entries[dim] = name
        return PartitionSpec(*([axis] if self.stage else []), *entries)

    def gather(self, leaf: Any) -> Any:
        """The whole parameter of this device's stage."""
        for name, dim in self.gathers:
            leaf = lax.all_gather(leaf, name, axis=dim, tiled=True)
        return leaf

    def scatter(self, grad: Any, reduced: Sequence[str]) -> Any:
        """Sum a gradient over the mesh axes `reduced`, leaving each device its part along those that the parameter is split over."""
        held = dict(self.gathers)
        for name in [n for n in reduced if n in held]:
            grad = lax.psum_scatter(grad, name, scatter_dimension=held[name], tiled=True)
        return grad

    def whole_axes(self, reduced: Sequence[str]) -> tuple[str, ...]:
        """Those of the axes over which the gradient is summed without being split."""
        held = dict(self.gathers)
        return tuple(n for n in reduced if n not in held)

    def constrain(self, leaf: Any) -> Any:
        """Tell the partitioner how a buffer of the parameter's shape is split."""
        if all(a is None for a in self.auto):
            return leaf
        return lax.with_sharding_constraint(leaf, PartitionSpec(*self.auto))


@dataclass(frozen=True)
class Partition:
    """The rules: which axes, which specs."""

    axis: str
    fsdp: tuple[str, int] | None = None  # mesh axis and size: parameters and their gradients are split over it
    outer: int = 0  # size of the pipe axis where first, last and shared are split over it, else 0
    specs: Mapping[str, PyTree] | None = None  # canonical specs without the stage axis, a prefix of the parameter tree

    def plans(self, params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """A `LeafPlan` for each leaf of placed parameters (arrays or shapes)."""
        faults: list[str] = []
        found = {key: self._tree(key, tree, faults) for key, tree in params.items()}
        if faults:
            raise PipelineError("these specs do not fit the parameters:\n" + "\n".join(f"  {f}" for f in faults), tuple(faults))
        return found

    def _tree(self, key: str, tree: PyTree, faults: list[str]) -> PyTree:
        spec = (self.specs or {}).get(key)
        if key == "stages":
            return tuple(self._leaves(key, chunk, spec, faults) for chunk in tree)
        return self._leaves(key, tree, spec, faults)

    def _leaves(self, key: str, tree: PyTree, spec: PyTree, faults: list[str]) -> PyTree:
        if spec is None:
            return jax.tree.map(lambda leaf: self._leaf(key, leaf, PartitionSpec(), faults), tree)
        full = jax.tree.map(
            lambda s, sub: jax.tree.map(lambda _: s, sub), spec, tree, is_leaf=lambda s: s is None or isinstance(s, PartitionSpec)
        )
        return jax.tree.map(lambda leaf, s: self._leaf(key, leaf, s or PartitionSpec(), faults), tree, full)

    def _leaf(self, key: str, leaf: Any, spec: PartitionSpec, faults: list[str]) -> LeafPlan:
        stage = key == "stages"
        shape = leaf.shape[1:] if stage else leaf.shape
        if len(spec) > len(shape):
            faults.append(f"{key}: spec {spec} has {len(spec)} entries for a parameter of shape {shape} (leave the stage axis out)")
            return LeafPlan(len(shape), stage, (), (None,) * len(shape))
        auto = [*spec, *(None for _ in range(len(shape) - len(spec)))]
        gathers: list[tuple[str, int]] = []
        wanted = [(self.axis, self.outer)] if self.outer > 1 and not stage else []
        wanted += [self.fsdp] if self.fsdp is not None and self.fsdp[1] > 1 else []
        for name, size in wanted:
            free = [d for d in range(len(shape)) if auto[d] is None and d not in {used for _, used in gathers}]
            fits = [d for d in free if shape[d] % size == 0 and shape[d] > 0]
            if fits:
                gathers.append((name, max(fits, key=lambda d: shape[d])))
        return LeafPlan(len(shape), stage, tuple(gathers), tuple(auto))

    def shardings(self, mesh: Any, params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Shardings of placed parameters.

        A spec names every axis of its array, as the step's results do: otherwise the second step would be compiled anew.
        """
        return jax.tree.map(lambda plan: NamedSharding(mesh, plan.spec(self.axis)), self.plans(params), is_leaf=is_plan)

    def manual_specs(self, params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """What `shard_map` is told of placed parameters, and of their gradients."""
        return jax.tree.map(lambda plan: plan.manual(self.axis), self.plans(params), is_leaf=is_plan)


def is_plan(value: Any) -> bool:
    """True for a `LeafPlan` (a leaf of the trees that `Partition.plans` returns)."""
    return isinstance(value, LeafPlan)


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
