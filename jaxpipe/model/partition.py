"""How each parameter is spread over the mesh besides its stage (tensor, fsdp, and outer parameters
over the pipe axis): the plan of each placed leaf, and how its gradient is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from textwrap import shorten
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import PyTree, by_path, path_text
from ..errors import PipelineError
from ..jaxprs.entry import Part
from .calls import Cuts, is_padded, own_shape, unpadded
from .packed import Buffer, Group, InBuffer, Packed, Parameter
from .param_layout import Chunks, ParamLayout
from .replaced import NOTHING_REPLACED, Replacement, Replacements
from .settings import Patterns, Sharding, holds, is_spec, names_of, trimmed


@dataclass(frozen=True)
class LeafPlan:
    """How one placed leaf is stored.

    Dims that are split over manual axes are gathered once a step, and gradients are scattered back.
    Other dims may be split by the partitioner.  Dims count from the stage's own first one, without
    the leading axis of devices.
    """

    stage: bool
    gathers: tuple[tuple[str, int], ...]  # (mesh axis, dim)
    auto: tuple[Any, ...]  # per dim, the axes that the partitioner splits it over, or None
    frozen: bool = False  # no gradient, no accumulator
    replaced: Replacement | None = None  # its gradient is its next value, by this rule
    # (mesh axis, dim) of a share that functions work on, never gathered: the pipe axis for spread
    # functions, and data axes that specs name
    held: tuple[tuple[str, int], ...] = ()
    pinned: bool = False  # the partitioner shall not split what `auto` does not say
    # the parameters that are in the leaf, and how, where it is a buffer
    parameters: tuple[tuple[Parameter, InBuffer | None], ...] = ()

    @property
    def trained(self) -> bool:
        """Whether an optimizer is for it."""
        return not self.frozen and self.replaced is None

    def spec(self, axis: str, *, manual: bool = False) -> PartitionSpec:
        """The whole sharding of the placed leaf, as JAX writes that of a step's results: else the
        second step would be compiled again.  `manual`: the part of it that `shard_map` is given.
        """
        entries = [None] * len(self.auto) if manual else list(self.auto)
        for name, dim in (*self.gathers, *self.held):
            entries[dim] = name
        return trimmed(*([axis] if self.stage else []), *entries)

    def local(self, axes: Sequence[str]) -> PartitionSpec:
        """How the whole parameter is split over those of the axes along which functions work on
        their share.
        """
        found = {dim: name for name, dim in self.held if name in axes}
        return trimmed(*(found.get(dim) for dim in range(len(self.auto))))

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
        """Sum a gradient over the mesh axes `reduced`, leaving each device its part along those
        that the parameter is split over.
        """
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

        Left to itself the partitioner knows no way to split an all-gather or a reduce-scatter: it
        would bring together the whole leaf on every device first, which is as many times the memory
        and the traffic as the tensor axis is long.
        """
        names = {name for entry in self.auto for name in names_of(entry)}
        if not names:
            return collective(leaf)
        spec = PartitionSpec(*self.auto)
        return jax.shard_map(
            collective, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False
        )(leaf)

    def whole_axes(self, reduced: Sequence[str]) -> tuple[str, ...]:
        """Those of the axes over which the gradient is summed without being split."""
        held = {name for name, _ in (*self.gathers, *self.held)}
        return tuple(n for n in reduced if n not in held)

    def constrain(self, leaf: Any) -> Any:
        """Tell the partitioner how a buffer of the parameter's shape is split."""
        if all(a is None for a in self.auto) and not self.pinned:
            return leaf
        return lax.with_sharding_constraint(leaf, PartitionSpec(*self.auto))


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
    return jax.tree.leaves(plans)


def reduce_gradients(
    grads: Sequence[Any],
    plans: Sequence[LeafPlan],
    axes: Sequence[str],
    *,
    by_parts: bool = False,
    scattered: bool = False,
) -> list[Any]:
    """Sum gradients over mesh axes, once: all that are whole over the same axes in one collective.
    Those of leaves that are replaced stay as they are, and what is `scattered` already.

    With `by_parts` large gradients are summed in place, part by part.  XLA for TPUs gives the
    result of a collective room of its own.
    """
    pairs = zip(grads, plans, strict=True)
    found = list(grads) if scattered else [plan.scatter(grad, axes) for grad, plan in pairs]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, plan in enumerate(plans):
        names = () if plan.replaced else plan.whole_axes(axes)
        if names and by_parts and found[i].nbytes > PART:
            found[i] = _summed_by_parts(found[i], plan, names)
        elif names:
            groups.setdefault(names, []).append(i)
    for names, members in groups.items():
        sums = lax.psum([found[i] for i in members], names)
        for i, value in zip(members, sums, strict=True):
            found[i] = value
    return found


PART = 2**22  # bytes that are summed at a time


def _summed_by_parts(total: Any, plan: LeafPlan, names: tuple[str, ...]) -> Any:
    """The sum over mesh axes, in place: a loop over each dim that the partitioner does not split,
    until the rest of the array is one part.
    """

    def rest(total: Any, starts: tuple[Any, ...], sizes: tuple[int, ...]) -> Any:
        """The sum of all that has these first indices."""
        if (dim := len(starts)) == total.ndim:
            part = lax.psum(lax.dynamic_slice(total, starts, sizes), names)
            return plan.constrain(lax.dynamic_update_slice(total, part, starts))
        length, row = total.shape[dim], math.prod((*sizes, *total.shape[dim + 1 :]))
        count = PART // (row * total.dtype.itemsize)
        if plan.auto[dim] is not None or count >= length:
            return rest(total, (*starts, jnp.int32(0)), (*sizes, length))
        # whole tiles of a TPU's memory
        count = max(1, count - count % 8 if count > 8 else count)
        trips, left = divmod(length, count)

        def trip(k: Any, total: Any) -> Any:
            return rest(total, (*starts, k * count), (*sizes, count))

        total = lax.fori_loop(jnp.int32(0), jnp.int32(trips), trip, total)
        if not left:
            return total
        return rest(total, (*starts, jnp.int32(trips * count)), (*sizes, left))

    return rest(total, (), ())


def parts_of(spec: Iterable[Any] | None, mesh: Mesh) -> tuple[Part, ...]:
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
    replaced: Replacements = NOTHING_REPLACED

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

    def plans(
        self, params: Mapping[str, PyTree], canonical: Mapping[str, PyTree] | None = None
    ) -> dict[str, PyTree]:
        """A `LeafPlan` for each leaf of placed parameters (arrays or shapes).

        Raises:
            PipelineError: specs that do not fit, and leaves that cannot be replaced; given the
                canonical parameters, also specs and expressions of frozen= and replaced= that are
                for none of these, and trained ones that cannot have a gradient.  All are listed.
        """
        found = {key: self._tree(key, tree) for key, tree in params.items()}
        leaves = [*zip(by_path(dict(params)).items(), leaf_plans(found), strict=True)]
        faults = [
            f"specs has a key {key!r}; its keys are those of the parameters, {sorted(params)}"
            for key in self._specs
            if key not in params
        ]
        faults += [fault for (_, leaf), plan in leaves for fault in self._faults(plan, leaf.dtype)]
        if canonical is not None:
            faults += [*self._unused_specs(canonical), *self.path_faults(found)]
            faults += [
                f"parameter {path!r} is {leaf.dtype}; parameters that are trained must be "
                "floating: put other arrays in the batch, or name them in frozen="
                for (path, leaf), plan in leaves
                if plan.trained and not jnp.issubdtype(leaf.dtype, jnp.inexact)
            ]
        # chunks whose stages are alike have the same faults
        PipelineError.refuse(
            "these parameters do not fit the pipeline", list(dict.fromkeys(faults))
        )
        return found

    def path_faults(self, plans: PyTree) -> list[str]:
        """Expressions of frozen= and replaced= that are found in the path of none of the
        parameters.
        """
        paths = list(
            dict.fromkeys(own.path for plan in leaf_plans(plans) for own, _ in plan.parameters)
        )
        every = (self.frozen, self.replaced.patterns)
        return [fault for one in every if isinstance(one, Patterns) for fault in one.faults(paths)]

    @cached_property
    def _specs(self) -> dict[str, dict[str, Any]]:
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

    def _spec(self, own: Parameter) -> tuple[tuple[Any, ...], list[str]]:
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

    def _is_frozen(self, own: Parameter, dtype: Any) -> bool:
        shape = jax.ShapeDtypeStruct(own.shape, dtype)
        return self.frozen is not None and bool(self.frozen(own.path, shape))

    def _faults(self, plan: LeafPlan, dtype: Any) -> Iterator[str]:
        """The faults of the parameters in a leaf, as users want them to be stored."""
        for own, _ in plan.parameters:
            yield from self._spec(own)[1]
            spread = own.path.partition("/")[0] in self.cuts.dims
            yield from self.replaced.faults(own.path, dtype, frozen=plan.frozen, spread=spread)
        first, _ = plan.parameters[0]
        spec, cut = self._spec(first)[0], dict(plan.held).get(self.axis)
        if cut is not None and spec[cut : cut + 1] not in ((), (None,)):
            yield (
                f"{first.path}: {PartitionSpec(*spec)} splits dim {cut}, which is cut over the "
                f"pipe axis {self.axis!r}; split another dim"
            )
        alike = self.kept(first, dtype)
        if any(self.kept(own, dtype) != (how or alike) for own, how in plan.parameters):
            paths = ", ".join(dict.fromkeys(repr(own.path) for own, _ in plan.parameters))
            yield (
                f"one array stores {shorten(paths, 300)}, but frozen=, replaced=, specs= or the "
                "mesh axes of this pipeline keep it apart; bring them over with the pipeline that "
                "placed them as `old`: new.place(old.canonical(...))"
            )

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

    def _tree(self, key: str, tree: PyTree) -> PyTree:
        """The plans of a part of the model."""

        def plans(tree: PyTree) -> PyTree:
            of_leaf = partial(self._own_plan, key)
            return jax.tree_util.tree_map_with_path(of_leaf, tree, is_leaf=is_padded)

        if not isinstance(tree, Chunks):
            return plans(tree)
        return tree.like(
            self._packed(chunk, v) if isinstance(chunk, Packed) else plans(chunk)
            for v, chunk in enumerate(tree)
        )

    def _own_plan(self, key: str, path: Any, leaf: Any) -> Any:
        """The plan of a leaf of first, last or shared, or of stages that are alike."""
        shape, stage = own_shape(leaf), key == "stages"
        if shape is None:
            return leaf  # frozen
        own = Parameter("/".join(filter(None, [key, path_text(path)])), shape[int(stage) :])
        cut, (spec, _) = self.cuts.dim(key, path), self._spec(own)
        plan = self._plan(unpadded(leaf), spec, [(own, None)], stage=stage, cut=cut)
        return replace(leaf, array=plan) if is_padded(leaf) else plan

    def _packed(self, chunk: Packed, v: int) -> Packed:
        """The plans of the arrays of chunk `v` of unlike stages."""
        inside = chunk.layout.parameters(self.layout.stage_at(v), layered=self.layout.is_layered)

        def plan(name: str, leaf: Any) -> LeafPlan:
            if (buffer := chunk.layout.of(name)) is None:
                return self._plan(leaf, self._spec(inside[name][0][0])[0], inside[name])
            plan = self._plan(leaf, tuple(buffer.spec), inside[name])
            return replace(plan, pinned=buffer.kept.pinned)

        leaves = chunk.leaves.items()
        plans = {name: None if leaf is None else plan(name, leaf) for name, leaf in leaves}
        return Packed(plans, chunk.layout)

    def kept(self, own: Parameter, dtype: Any) -> InBuffer:
        """Which parameters of unlike stages may share a buffer: frozen ones with each other, and
        trained ones, split over the same axes.
        """
        (spec, faults), frozen = self._spec(own), self._is_frozen(own, dtype)
        # `plans` lists these; and a buffer's shape is the same outside and inside of a step
        if rule := self.replaced.of(own.path):
            return self.in_buffer(Group.ALONE)._replace(replaced=rule)
        if faults or self._held(spec) or not (frozen or jnp.issubdtype(dtype, jnp.inexact)):
            return self.in_buffer(Group.ALONE)
        group = Group.FROZEN if frozen else Group.TRAINED
        return self.in_buffer(group, parts_of(spec, self.mesh))

    def in_buffer(self, group: Group, parts: tuple[Part, ...] = ()) -> InBuffer:
        """The storage of a leaf of this group on this mesh."""
        fsdp = self.sharding.fsdp
        multiple = 1 if fsdp is None else self.mesh.shape[fsdp]
        return InBuffer(group, parts, multiple, bool(self.auto_axes))

    @property
    def auto_axes(self) -> tuple[str, ...]:
        """The axes of more than one device that are left to the partitioner."""
        own = (self.axis, *self.data_axes)
        return tuple(name for name, size in self.mesh.shape.items() if size > 1 and name not in own)

    def _plan(
        self,
        leaf: Any,
        spec: Sequence[Any],
        inside: Sequence[tuple[Parameter, InBuffer | None]] = (),
        *,
        stage: bool = True,
        cut: int | None = None,
    ) -> LeafPlan:
        """The plan of a placed leaf that is split by a spec and holds these parameters; `cut`: its
        dim that is cut over the pipe axis.
        """
        shape = leaf.shape[int(stage) :]
        entries = (*spec, *(None,) * (len(shape) - len(spec)))
        held, fsdp = self._held(entries), self.sharding.fsdp
        rule = next(filter(None, (self.replaced.of(own.path) for own, _ in inside)), None)
        used = {dim for dim, entry in enumerate(entries) if entry is not None}
        local = {dim for _, dim in held}
        auto = tuple(None if dim in local else entry for dim, entry in enumerate(entries))
        gathers: list[tuple[str, int]] = []
        wanted = [self.axis] if self.sharding.outer and not stage and cut is None else []
        wanted += [] if fsdp is None or fsdp in dict(held) else [fsdp]
        for name in wanted if rule is None else ():  # a rule is for whole leaves
            size = self.mesh.shape[name]
            fits = [d for d, n in enumerate(shape) if d not in {cut, *used} and n and n % size == 0]
            if fits and size > 1:
                gathers.append((name, max(fits, key=lambda d: shape[d])))
                used.add(gathers[-1][1])
        held += [] if cut is None else [(self.axis, cut)]
        frozen = any(self._is_frozen(own, leaf.dtype) for own, _ in inside)
        kept = tuple(gathers), auto, frozen, rule, tuple(held)
        return LeafPlan(stage, *kept, parameters=tuple(inside))

    def _held(self, spec: Sequence[Any]) -> list[tuple[str, int]]:
        """(data axis, dim) that a spec names."""
        return [
            (name, dim)
            for dim, entry in enumerate(spec)
            for name in names_of(entry)
            if name in self.sharding.local
        ]

    def buffer_spec(self, buffer: Buffer, leaf: Any) -> PartitionSpec:
        """How a buffer [P, ...] of parameters, or of an optimizer's state, is spread."""
        return self._plan(leaf, tuple(buffer.spec)).spec(self.axis)

    def shardings(self, plans: PyTree) -> dict[str, PyTree]:
        """Shardings of placed parameters."""
        return dict(
            jax.tree.map(lambda plan: NamedSharding(self.mesh, plan.spec(self.axis)), plans)
        )
