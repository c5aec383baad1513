"""How a pipeline uses its mesh and its memory: `Sharding` and `Memory`, what PartitionSpecs name,
and functions on the pipeline's own mesh, whose axes are automatic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial, wraps
from textwrap import shorten
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from ..arrays import Leaf, PyTree
from ..errors import Count, PipelineError, set_typed
from ..table.kinds import Offload

T = TypeVar("T")
P = ParamSpec("P")
# What a PartitionSpec says of a dim.
SpecEntry: TypeAlias = "str | tuple[str, ...] | None"


def is_spec(value: object) -> bool:
    """A leaf of a tree of specs."""
    return value is None or isinstance(value, PartitionSpec)


def holds(prefix: str, name: str) -> bool:
    """Whether a spec at the path `prefix` applies to the parameter `name`."""
    return prefix in ("", name) or name.startswith(prefix + "/")


def names_of(entry: SpecEntry | Sequence[str]) -> tuple[str, ...]:
    """The mesh axes that an entry of a PartitionSpec names; or any names, of which one may stand by
    itself.
    """
    if entry is None:
        return ()
    if isinstance(entry, Sequence) and not isinstance(entry, str):
        return tuple(entry)
    return (entry,)


def axes_of(specs: PyTree) -> set[str]:
    """The mesh axes that any of these specs names."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    own = [entry for spec in leaves if isinstance(spec, PartitionSpec) for entry in spec]
    return {name for entry in own for name in names_of(entry)}


def automatic(mesh: Mesh) -> Mesh:
    """The same devices and names with automatic axes.

    `jax.make_mesh` makes explicit ones.  Eager JAX cannot add, index or ravel their arrays together
    with arrays of other shardings.
    """
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def on_mesh(mesh: Mesh, function: Callable[..., T], to: PyTree = None) -> Callable[..., T]:
    """The function of trees of arrays, traced on a mesh of automatic axes, whatever mesh its
    arguments or the context have.

    Args:
        mesh: an automatic one.
        function: called with the arguments.
        to: where results are, a tree of shardings, one for a subtree or a leaf: see `in_context`.
    """

    @wraps(function)
    def call(*arguments: object) -> T:
        with own_context(mesh):
            results = function(*jax.tree.map(as_automatic, arguments))
        return in_context(mesh, results, to)

    return call


def in_context(mesh: Mesh, results: T, to: PyTree = None) -> T:
    """Results of `on_mesh` as the caller has them: where `jax.set_mesh` gave the context explicit
    axes they have them too, at the shardings `to`, or nothing could be computed with them.
    """
    if not explicit_context(mesh):
        return results
    context = jax.sharding.get_abstract_mesh()

    def back(sharding: NamedSharding, tree: PyTree) -> PyTree:
        spec = _explicit(context, sharding.spec)
        return jax.tree.map(lambda leaf: jax.reshard(leaf, spec), tree)

    shardings = NamedSharding(mesh, PartitionSpec()) if to is None else to
    returned: T = jax.tree.map(back, shardings, results)
    return returned


@contextmanager
def own_context(mesh: Mesh) -> Iterator[None]:
    """A block that is traced on this mesh; PipelineError where JAX cannot change to it from the one
    that `jax.set_mesh` gave the caller.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and context.size != mesh.size:
        raise PipelineError(
            f"`jax.set_mesh` gave the context a mesh of {dict(context.shape)}, but this pipeline's "
            f"is {dict(mesh.shape)}, and JAX computes on one of them at a time: call this outside "
            "of that context, or under jax.set_mesh(pipe.mesh)"
        )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


def trimmed(*entries: SpecEntry) -> PartitionSpec:
    """A spec without its last Nones, as JAX writes results': it compiles again for an equal
    sharding that is written otherwise.
    """
    count = max((i + 1 for i, entry in enumerate(entries) if entry is not None), default=0)
    return PartitionSpec(*entries[:count])


def explicit_context(mesh: Mesh) -> bool:
    """Whether `jax.set_mesh` made the axes of this mesh explicit around the caller."""
    context = jax.sharding.get_abstract_mesh()
    return AxisType.Explicit in context.axis_types and context.axis_names == mesh.axis_names


def outside_contexts(function: Callable[P, T]) -> Callable[P, T]:
    """A function of a pipeline and of its arguments, run as outside of `jax.set_mesh`: arrays and
    shapes are on the pipeline's own mesh there.
    """

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        pipe: Any = arguments[0]
        own = partial(on_own_mesh, pipe.mesh)
        with jax.set_mesh(Mesh(np.empty((), dtype=object), ())):
            moved, named = jax.tree.map(own, (arguments, keywords))
            return function(*moved, **named)

    return call


def on_own_mesh(mesh: Mesh, leaf: Leaf) -> Leaf:
    """The same array or shape, spread as it is, on a mesh of automatic axes."""
    is_tracer = isinstance(leaf, jax.core.Tracer)
    sharding = None if is_tracer else getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not is_same(sharding.mesh, mesh):
        return leaf
    to = NamedSharding(mesh, sharding.spec)
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return with_sharding(leaf, to) if is_shape else jax.device_put(leaf, to)


def is_same(mesh: jax.sharding.AbstractMesh | Mesh, own: Mesh) -> bool:
    """Whether a mesh has the devices and the axes of this one, of whatever types."""
    return mesh.shape == own.shape and (
        not isinstance(mesh, Mesh) or list(mesh.devices.flat) == list(own.devices.flat)
    )


def with_sharding(leaf: Leaf, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """The shape of the leaf, spread like this."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def jit_on_mesh(mesh: Mesh, function: Callable[..., T], to: PyTree = None) -> Callable[..., T]:
    """`on_mesh`, compiled; results are at the shardings `to`, or anywhere where it is None."""
    shardings = None if explicit_context(mesh) else to
    return jax.jit(on_mesh(mesh, function, to), out_shardings=shardings)


def on_mesh_of(like: jax.Array, leaf: jax.Array) -> jax.Array:
    """The same array with the type of another one, whose mesh may have axes of other types."""
    to = jax.typeof(like).sharding
    if jax.typeof(leaf).sharding != to:
        with jax.sharding.use_abstract_mesh(to.mesh):
            leaf = jax.reshard(leaf, to.spec)
    return leaf


def as_automatic(leaf: jax.Array) -> jax.Array:
    """The same array, of which the types of mesh axes say no longer how it is spread; the
    partitioner still knows.
    """
    return jax.reshard(leaf, PartitionSpec()) if is_explicit(leaf) else leaf


def is_explicit(leaf: ArrayLike) -> bool:
    """Whether the type of an array names mesh axes that are explicit."""
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _explicit(context: jax.sharding.AbstractMesh, spec: PartitionSpec) -> PartitionSpec:
    """The spec as the context's explicit axes want it: automatic ones are not named."""
    kinds = dict(zip(context.axis_names, context.axis_types, strict=True))

    def kept(entry: SpecEntry) -> SpecEntry:
        names = tuple(n for n in names_of(entry) if kinds.get(n) is AxisType.Explicit)
        return names[0] if len(names) == 1 else names or None

    return PartitionSpec(*map(kept, spec))


def has(tree: object, kind: type) -> bool:
    """Whether a leaf is of this type."""
    return any(isinstance(leaf, kind) for leaf in jax.tree.leaves(tree))


@dataclass(frozen=True)
class Patterns:
    """A filter of parameters that regular expressions of paths make."""

    of: tuple[re.Pattern[str], ...]
    argument: str = "frozen"  # of `Model`, in errors

    def __call__(self, path: str, _leaf: Leaf) -> bool:
        """Whether one of them is found in a path."""
        return any(pattern.search(path) for pattern in self.of)

    def faults(self, paths: Sequence[str]) -> list[str]:
        """Expressions that are found in none of these paths."""
        known, found = shorten(", ".join(paths), 500), []
        for unused in (one.pattern for one in self.of if not any(map(one.search, paths))):
            close = get_close_matches(re.sub(r"[\\^$]", "", unused), paths, n=2)
            hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
            found.append(
                f"{self.argument}: {unused!r} is found in the path of no parameter; {hint}the "
                f"paths are {known}"
            )
        return found


def patterns_of(argument: str, expressions: Sequence[str]) -> Patterns:
    """The filter that these regular expressions make; PipelineError for one that is none."""
    try:
        return Patterns(tuple(map(re.compile, expressions)), argument)
    except re.error as error:
        raise PipelineError(
            f"{argument}: {error.pattern!r} is no regular expression ({error}); `re.escape(path)` "
            "makes one of a path"
        ) from None


@dataclass(frozen=True)
class Sharding:
    """Which axes of the mesh a pipeline uses, and for what.

    Args:
        pipe: the name of the pipe axis.
        data: mesh axes over which the batch's rows are spread.  Gradients are reduced over them
            once a step.
        fsdp: a mesh axis, one of `data`, over which parameters, gradients and optimizer state are
            split too.
        max_active: the most stages of which a device has the whole parameters, and the whole
            gradient, at a time: a stage is gathered for each run of its actions, and its gradient
            reduced after it (`jaxpipe.add_gathers`).  None, or at least as many as a device has:
            parameters are gathered once, at the begin of a step, and gradients reduced at its end.
            A table that has U, D and X of its own keeps them.
        specs: PartitionSpecs of tensor parallelism, for axes left to the partitioner, without the
            axis of stages (or layers): a tree like the canonical parameters (or one for all of a
            list of stages).  One spec may stand for a subtree; a leaf without a spec is whole.
        local: axes of `data` that specs may name.  A parameter that is split over such an axis is
            never gathered: functions are given the device's own part and exchange what they need
            by themselves, as inside `shard_map` (experts, with an all-to-all).  Its gradient is
            summed over the other data axes alone.
        replicated: mesh axes along which parameters and rows are whole, as for a function that
            uses such an axis by itself (a sharding constraint, a `shard_map` inside a stage).  An
            axis of several devices that is in no argument is an error: they would all do the same
            work.
        outer: split the parameters of first and last, and the shared ones, over the pipe axis, as
            fsdp does over its axis.

    Example:
        >>> import jaxpipe as jp
        >>> jp.Sharding(data="data", fsdp="data").data
        ('data',)
    """

    pipe: str = "pipe"
    data: str | Sequence[str] = ()
    fsdp: str | None = None
    specs: Mapping[str, PyTree] | None = None
    replicated: str | Sequence[str] = ()
    outer: bool = False
    local: str | Sequence[str] = ()
    max_active: Count | None = None

    def __post_init__(self) -> None:
        set_typed(self, PipelineError)
        for name in ("data", "replicated", "local"):
            object.__setattr__(self, name, names_of(getattr(self, name)))

    @property
    def independent(self) -> tuple[str, ...]:
        """The axes over which blocks do not communicate."""
        axes = (self.pipe, *self.data)
        return tuple(name for name in axes if name not in self.local)

    def check(self, mesh: Mesh, *, schedule: str, devices: int) -> None:
        """PipelineError lists every fault of the mesh for the schedule, as errors name it."""
        sizes, pipe, data = dict(mesh.shape), self.pipe, tuple(self.data)
        axes = {"pipe": [pipe], "data": data, "replicated": self.replicated}
        named = axes_of(self.specs)
        faults = [
            f"the mesh has no {argument} axis {name!r}; its axes are {sizes}: write "
            f"Sharding({argument}=) one of them, or name a mesh axis {name!r}"
            for argument, names in axes.items()
            for name in names
            if name not in sizes
        ]
        if sizes.get(pipe, devices) != devices:
            faults.append(
                f"{schedule} is for {devices} devices but mesh axis {pipe!r} has "
                f"{sizes[pipe]}; build the schedule with devices={sizes[pipe]}, or a mesh with "
                f"{devices} along {pipe!r}"
            )
        if pipe in data:
            faults.append(f"{pipe!r} is the pipe axis and cannot be a data axis too")
        faults += [
            f"{argument}={name!r} must be one of data={data}: its devices see different rows of "
            "the batch"
            for argument, names in (("fsdp", [self.fsdp]), ("local", self.local))
            for name in names
            if name not in (None, *data)
        ]
        if self.max_active is not None and self.fsdp is None:
            faults.append(
                "max_active= needs fsdp=, the axis over which parameters are gathered; give it, or "
                "leave max_active out"
            )
        faults += [
            f"local={name!r}, but no spec splits a parameter over {name!r}; name it in specs=, or "
            "take it out of local="
            for name in self.local
            if name not in named and sizes.get(name, 1) > 1
        ]
        used = {pipe, *data, *self.replicated, *named}
        faults += [
            f"mesh axis {name!r} is in no argument, so its {size} devices would all do the same "
            f"work; write Sharding(data={name!r}) to spread the rows of the batch over it, specs= "
            f"to split parameters over it, or replicated={name!r} if that is meant"
            for name, size in sizes.items()
            if size > 1 and name not in used
        ]
        PipelineError.refuse("the mesh does not fit", faults)

    def spec_faults(
        self, where: str, shape: tuple[int, ...], spec: object, mesh: Mapping[str, int]
    ) -> list[str]:
        """Faults of the spec of a parameter, whose shape has no stage axis; `mesh`: axes and their
        sizes.
        """
        if spec is None:
            return []
        if not isinstance(spec, PartitionSpec):
            return [f"{where}: specs must hold PartitionSpecs or None; got {spec!r}"]
        if len(spec) > len(shape):
            return [
                f"{where}: {spec} has {len(spec)} entries for a parameter of shape {shape} (leave "
                "the stage axis out)"
            ]
        faults, named = [], [name for entry in spec for name in names_of(entry)]
        for name in dict.fromkeys(named):
            if name not in mesh:
                why = f"an axis {name!r} that the mesh does not have; its axes are {mesh}"
            elif name == self.pipe:
                why = (
                    f"the pipe axis {name!r}, over which stages are spread anyway; "
                    "Sharding(outer=True) splits what is not a stage"
                )
            elif name in self.data and name not in self.local:
                why = (
                    f"the data axis {name!r}; fsdp={name!r} splits parameters over it, and "
                    f"local={name!r} gives each device's functions their own part"
                )
            elif named.count(name) > 1:
                why = f"{name!r} more than once"
            else:
                continue
            faults.append(f"{where}: {spec} names {why}")
        for dim, entry in enumerate(spec):
            names = names_of(entry)
            if len(names) > 1 and not set(names).isdisjoint(self.local):
                faults.append(
                    f"{where}: {spec} splits dim {dim} over {entry!r}, and functions are given "
                    "local parts along some of these; name one axis of local= by itself"
                )
            size = math.prod(mesh.get(name, 1) for name in names)
            if shape[dim] % size:
                faults.append(
                    f"{where}: dim {dim} of shape {shape} does not divide over {entry!r}, which "
                    f"has {size} devices; choose a number of devices that divides {shape[dim]}"
                )
        return faults


@dataclass(frozen=True)
class Memory:
    """How a pipeline trades time and precision for memory.

    Args:
        remat: "full", or a `jax.checkpoint` policy: what the backward of a stage recomputes.
        offload: "residuals" keeps in the host's memory what forwards leave for backwards that are
            some ticks later.  It is fetched a tick ahead, at the same time as compute, so that a
            device holds what the next ticks need.
        accumulate: least dtype of gradient accumulators and of the gradients returned; None for
            the parameters' own.

    Raises:
        PipelineError: a value is none of these; every fault is listed.

    Example:
        >>> import jaxpipe as jp
        >>> jp.Memory(remat="full", offload="residuals").offload.value
        'residuals'
    """

    remat: str | Callable[..., bool] | None = None
    offload: Any = None  # an `Offload` afterwards
    accumulate: DTypeLike | None = jnp.float32

    def __post_init__(self) -> None:
        faults = []
        if self.remat not in (None, "full") and not callable(self.remat):
            faults.append(
                f'remat must be None, "full" or a jax.checkpoint policy; got {self.remat!r}'
            )
        try:
            offload = Offload.NOTHING if self.offload is None else Offload(self.offload)
            object.__setattr__(self, "offload", offload)
        except ValueError:
            faults.append(f'offload must be "residuals" or None; got {self.offload!r}')
        try:
            own = self.accumulate
            floating = own is None or jnp.issubdtype(jnp.dtype(own), jnp.floating)
        except TypeError:
            floating = False
        if not floating:
            faults.append(
                "accumulate must be a floating dtype, or None for the parameters' own; got "
                f"{self.accumulate!r}"
            )
        PipelineError.refuse("", faults)
