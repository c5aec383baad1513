"""A user's function as it is called: the keywords and the context that it may take, its share of
parameters that are cut over the pipe axis, errors from inside that name it, and shardings in it
that a pipeline refuses.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core

from ..arrays import (
    ByPart,
    Leaf,
    LeafPath,
    Number,
    Params,
    PyTree,
    Rng,
    array_faults,
    by_path,
    described,
    path_text,
    summable,
)
from ..errors import PipelineError
from ..jaxprs.equations import every_equation
from .keys import Keys
from .ledger import Ledger
from .settings import axes_of, holds

# What a user gives: a stage, `first`, `last`, or a block of one.
UserFunction: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Spread:
    """A function that runs on all devices of the pipe axis at once (`spread` makes one)."""

    call: UserFunction
    dims: Any = 0
    shared: Any = 0


def spread(function: UserFunction, *, dims: PyTree = 0, shared: PyTree = 0) -> Spread:
    """Run `last`, or `first`, on all devices of the pipe axis at once, each with its share of the
    parameters.

    `function(last_params, x, microbatch, *, ctx) -> loss`, or `function(first_params, microbatch,
    *, ctx) -> x`, is given, on each of P devices, the parameters cut into P parts along one dim
    (padded with zeros to a multiple of P, which have no gradient), the whole x and the whole
    microbatch.  It may use any collective over `ctx.axis`, the name of the pipe axis, and must
    return the same loss (x) on every device; `jax.lax.axis_index(ctx.axis)` says which part a
    device has, and `ctx.sizes`, a tree like the parameters, how long each cut dim is without
    padding (0 for a parameter that is whole).  Its gradient is that of the loss, so nothing of it
    is summed twice.  Parameters, gradients and optimizer state are never gathered.

    Args:
        function: as above; it may also take `shared` and `training`, as any `first` or `last`.
        dims: the dim along which a parameter is cut, or None for one that is whole on every device:
            one for all, or a tree like the parameters, in which one entry may stand for a whole
            subtree (a missing one is cut along dim 0).
        shared: the same for the parameters under "shared", which are cut only where every function
            that takes them is spread; `first` and `last` must be given the same.

    Source: Yeung et al. 2024, Balancing Pipeline Parallelism with Vocabulary Parallelism, arXiv
    2411.05288.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe as jp
        >>> def head(params, x, microbatch, *, ctx):
        ...     part = x @ params["w"].T  # a device's share of the outputs: rows of w
        ...     return jax.lax.psum(jnp.sum(part**2), ctx.axis)
        >>> s = jp.schedules.build("gpipe", devices=1, microbatches=2)
        >>> model = jp.Model(lambda p, x: x @ p, last=jp.spread(head))
        >>> pipe = jp.Pipeline(model, s, jax.make_mesh((1,), ("pipe",)))
        >>> params = pipe.place({"stages": jnp.ones((1, 3, 3)), "last": {"w": jnp.ones((5, 3))}})
        >>> float(pipe.evaluate(params, {"x": jnp.ones((2, 3))}))
        405.0

        A scaled embedding: `jp.spread(lambda p, microbatch, *, ctx: 16.0 * jp.VocabEmbedding()(p,
        microbatch, ctx=ctx))`, as `first`.
    """
    return Spread(function, dims, shared)


@dataclass(frozen=True)
class Cuts:
    """Which parameters are cut into as many parts as there are devices."""

    parts: int
    # "first" and "last" (and "shared") -> what `spread` was given
    dims: ByPart = field(default_factory=dict)

    def dim(self, key: str, path: LeafPath) -> int | None:
        """The dim along which the parameter at a path is cut; None where it is whole."""
        if key not in self.dims:
            return None
        name = path_text(path)
        dims = by_path(self.dims[key], lambda node: node is None)
        return next((dim for prefix, dim in dims.items() if holds(prefix, name)), 0)

    def padded(self, shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
        """The shape with the zeros that this dim needs to be cut."""
        return tuple(n + -n % self.parts * (d == dim) for d, n in enumerate(shape))

    def faults(self, params: Params) -> list[str]:
        """Canonical parameters that cannot be cut."""
        found = []
        for key in self.dims:
            for path, leaf in jax.tree_util.tree_leaves_with_path(params.get(key, {})):
                dim, shape = self.dim(key, path), jnp.shape(leaf)
                is_dim = type(dim) is int and 0 <= dim < len(shape)
                if dim is not None and not is_dim:
                    where = f"{key}{jax.tree_util.keystr(path)}"
                    found.append(
                        f"{where} of shape {shape} has no dim {dim!r} to cut over {self.parts} "
                        "devices; give jaxpipe.spread(..., dims=) the number of a dim for each "
                        "parameter, None for those that are whole on every device"
                    )
        return found

    def sizes(self, params: Params) -> ByPart:
        """For each canonical parameter that may be cut the length of its cut dim; 0 where it is
        whole.
        """

        def size(key: str, path: LeafPath, leaf: Leaf) -> int:
            dim = self.dim(key, path)
            return 0 if dim is None else int(leaf.shape[dim])

        of = jax.tree_util.tree_map_with_path
        return {key: of(partial(size, key), params.get(key, {})) for key in self.dims}


# How JAX writes the axes over which an array varies, and those of a spec that it refuses.
_VARYING = r"\{V:([^}]*)\}"
_REFERS = r"refers? to '([^']*)'"
_SPLIT = (
    "the pipe axis and the data axes are manual inside a pipeline's functions (each device has its "
    "own stage and rows), and other axes are the partitioner's"
)
_CONSTRAINT = (
    "constrains the sharding of an array by a mesh axis that is not left to the partitioner, or on "
    f"a mesh of its own: {_SPLIT}, so a PartitionSpec without a mesh names others only. Remove the "
    "pipe axis and the data axes from it; without other axes, remove the call"
)
_SHARD_MAP = (
    f"calls jax.shard_map with a mesh of its own, or over a manual axis: {_SPLIT}. Remove mesh=, "
    "name only the partitioner's axes in axis_names= and in the specs, and call the function "
    "without shard_map where it needs the data axes alone"
)
# What to remove from a function, by a part of JAX's message.
_ADVICE = {
    "can only refer to Auto axes": _CONSTRAINT,
    "should match the mesh of sharding": _CONSTRAINT,
    "should match the mesh passed to shard_map": _SHARD_MAP,
    "cannot contain axis names that are of type Auto or Manual": "gives an array an explicit "
    f"sharding: {_SPLIT}. Remove jax.reshard and out_sharding=; for an axis of the partitioner "
    "write jax.lax.with_sharding_constraint(x, PartitionSpec(...))",
    "reduce_precision does not accept dtype complex": "computes complex numbers under a policy of "
    "jax.checkpoint that saves them (in Memory(remat=) or jax.checkpoint(policy=): "
    "everything_saveable, for instance), and JAX marks what a policy saves with reduce_precision, "
    'which takes no complex numbers. Write remat="full" or None, or a policy that saves none of '
    "them, such as save_only_these_names",
    "Going from `Manual` AxisType": f"changes the types of mesh axes: {_SPLIT}. Remove "
    "jax.sharding.auto_axes and explicit_axes, and call the function inside directly",
}


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """JAX's errors about shardings in the function of this name as PipelineErrors, which say what
    to remove from it.
    """
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        text, manual = str(error), jax.sharding.get_abstract_mesh().manual_axes
        advice = next((advice for part, advice in _ADVICE.items() if part in text), None)
        varying = re.findall(r"\w+", " ".join(re.findall(_VARYING, text)))
        named = sorted({*manual}.intersection(re.findall(_REFERS, text)))
        if advice is None and not named and set(manual).isdisjoint(varying):
            raise
        why = _naming(named) if named else text.splitlines()[0]
        raise PipelineError(f"`{name}` {advice or _SHARD_MAP} ({why})") from error


def check_equations(name: str, jaxprs: Sequence[core.Jaxpr]) -> None:
    """PipelineError where an equation names a manual axis in a sharding or in a shard_map."""
    advice = {"sharding_constraint": _CONSTRAINT, "shard_map": _SHARD_MAP}
    for equation in (equation for jaxpr in jaxprs for equation in every_equation(jaxpr)):
        primitive = equation.primitive.name
        if primitive in advice and (axes := _manual_names(equation.params)):
            raise PipelineError(f"`{name}` {advice[primitive]} ({_naming(axes)})")


def _naming(axes: Collection[str]) -> str:
    return f"it names {', '.join(map(repr, sorted(axes)))}"


def _manual_names(params: dict[str, Any]) -> set[str]:
    """The manual mesh axes that a constraint or a shard_map names."""
    if "sharding" in params:
        spec = getattr(params["sharding"], "spec", None)
        return axes_of([spec]) & set(params["context_mesh"].manual_axes)
    named = axes_of([*params["in_specs"], *params["out_specs"]])
    return named & set(params["mesh"].manual_axes) - set(params["newly_manual_axes"])


class Context(NamedTuple):
    """The context of a call, for functions that take `ctx` by keyword: stage and microbatch index
    (int32 scalars), and the call's key.

    Every call has a key of its own, `rng`: it depends on the step's key, the function (`first`,
    the stage or layer with its number, or `last`), the microbatch and the data shard, and on
    nothing else. So it is the same for every schedule and layout and in `Model.loss`, and a
    recomputed forward draws the same numbers again. Keys are None where the step got none.
    """

    stage: Array
    microbatch: Array
    rng: Rng = None  # of a spread function the same on all devices: see `share_rng`
    # a key of the step, the microbatch and the data shard alone: equal in all functions
    microbatch_rng: Array | None = None
    # where the model is given by layers: the layer's number, from which `rng` is made instead of
    # the stage
    layer: Number | None = None
    # of a function under `jaxpipe.spread`: the name of the pipe axis, for collectives
    axis: str | None = None
    # and there: for each parameter, the whole length of the dim that is cut, without padding; 0
    # where it is whole
    sizes: PyTree = None
    shared_sizes: PyTree = None  # the same for the shared parameters
    # position in its sequence of the slice's first row of time; 0 where sequences are whole
    offset: Any = None
    ledger: Ledger | None = None  # where `append` writes
    # a key of the step, the sequence and the data shard alone: equal in all functions and slices
    sequence_rng: Array | None = None
    keys: Keys | None = None  # of which `rng`, `share_rng` and `position_keys` are made

    @property
    def share_rng(self) -> Array | None:
        """The key of this device's share of a function under `jaxpipe.spread`: another one on each
        device, None elsewhere.

        Draw with `rng` what must be equal on all devices, as dropout of the x that is returned, and
        with `share_rng` what belongs to the share, as noise on its rows of a table.

        Example:
            noise = jax.random.normal(ctx.share_rng, table.shape)
        """
        if self.keys is None or self.axis is None:
            return None
        return self.keys.share(jax.lax.axis_index(self.axis))

    def append(self, name: str, rows: Array, axis: int = 1) -> Array:
        """Write a slice's rows into the buffer of its sequence in this stage; the whole buffer.

        Rows [..., T / K, ...] are at `offset` along `axis` of the buffer [..., T, ...].  Rows of
        later slices are there too in a backward, so the reader masks what comes after its own
        position.  The gradients of all slices that read a row add up before the slice that made it
        has its backward.

        Raises:
            PipelineError: a name is used twice in a stage.

        Example:
            keys = ctx.append("keys", h @ params["k"])
        """
        return rows if self.ledger is None else self.ledger.append(name, rows, axis)

    def position_keys(self, count: int) -> Array:
        """A key for each of the slice's `count` positions, [count], of the function (as `rng`), the
        sequence and the position: random numbers that do not depend on how a sequence is cut.

        Example:
            keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (width,)))(
                ctx.position_keys(x.shape[1])
            )
        """
        if self.keys is None:
            raise PipelineError(
                "ctx.position_keys needs the step's key; pass rng=jax.random.key(...)"
            )
        return self.keys.at(self.offset + jnp.arange(count, dtype=jnp.int32))

    def at_layer(self, number: Number) -> Context:
        """The context of one of a stage's layers, with the layer's keys; `number` counts the
        model's layers.
        """
        if self.keys is None:
            return self._replace(layer=number)
        keys = self.keys._replace(number=number)
        return self._replace(layer=number, rng=keys.own, keys=keys)


STAGE_KEYWORDS = ("carry", "ctx", "microbatch", "shared", "state", "training")
# of layers, which do not keep what whole stages keep
LAYER_KEYWORDS = ("ctx", "microbatch", "shared", "training")
# of `first` and `last`, which are given the microbatch anyway
OUTER_KEYWORDS = ("ctx", "shared", "training")
# the inputs of both that differ by microbatch
OUTER_WANTS = frozenset({"microbatch", "ctx"})


@dataclass(frozen=True)
class Function:
    """A user function and which of the keywords offered to it it takes."""

    call: UserFunction
    name: str
    wants: frozenset[str]
    spread: Spread | None = None  # how it runs on all devices of the pipe axis at once

    @classmethod
    def of(
        cls,
        call: UserFunction,
        name: str,
        offered: Collection[str] = STAGE_KEYWORDS,
        *,
        takes: Sequence[str] = ("params", "x"),
    ) -> Function:
        """Read the signature for the keywords that are offered; PipelineError if it cannot be
        called so.

        `takes` names what is passed by position.
        """
        if not callable(call):
            raise PipelineError(f"`{name}` must be a function; got {type(call).__name__}")
        try:
            signature = inspect.signature(call)
        except (TypeError, ValueError):
            return cls(call, name, frozenset())
        try:
            # A parameter after those that are passed by position may be given by its name, whether
            # it has a default or not.
            placed = signature.bind_partial(*takes).arguments
            wants = frozenset(offered) & (signature.parameters.keys() - placed.keys())
            signature.bind(*takes, **dict.fromkeys(wants))
        except TypeError as error:
            own = sorted({"carry", "state"} & signature.parameters.keys() - {*offered})
            more = f"; only whole stages may take {' and '.join(own)}" if own else ""
            raise PipelineError(
                f"`{name}` is called as {name}({', '.join(takes)}), and by keyword with those of "
                f"{', '.join(sorted(offered))} that it "
                f"takes, but its parameters are {signature}: {error}{more}"
            ) from None
        return cls(call, name, wants)

    def run(self, *arguments: object, keywords: Mapping[str, PyTree]) -> Any:
        """Call it with those keywords that it takes; an error from inside says which function it
        was and what its arguments were.
        """
        try:
            own = {name: keywords[name] for name in sorted(self.wants)}
            with refusing(self.name):
                out = self.call(*arguments, **own)
            head = f"`{self.name}` returns out, which is no tree of arrays"
            PipelineError.refuse(head, array_faults(out, "out"))
            return out
        except PipelineError:
            raise
        except Exception as error:
            ctx = keywords["ctx"] if "ctx" in self.wants else None
            has_no_key = ctx is not None and ctx.rng is None
            if has_no_key and re.search(r"\b(key|PRNG)", str(error)):
                raise PipelineError(
                    f"`{self.name}` draws random numbers, but the step got no key; pass "
                    "rng=jax.random.key(...), of which ctx.rng is made"
                ) from error
            shapes = "; ".join(described(tree) for tree in arguments)
            error.add_note(
                f"jaxpipe: this was raised by `{self.name}` ({_place(self.call)}) when it was "
                f"traced with ({shapes})"
            )
            raise

    def results(self, names: Mapping[str, str], out: object) -> dict[str, Any]:
        """What the function returned by name; PipelineError where it is not a tuple of as many.
        `names` say why each must be there.
        """
        out = (out,) if len(names) == 1 else out
        if not isinstance(out, tuple) or len(out) != len(names):
            raise PipelineError(
                f"`{self.name}` must return ({', '.join(names)}), since "
                f"{' and '.join(filter(None, names.values()))}; it returns "
                f"{jax.tree.structure(out)}"
            )
        return dict(zip(names, out, strict=True))

    def loss_of(self, loss: object, advice: str = "") -> Array:
        """A loss that the function returned, as a scalar; PipelineError for what is none.  A Python
        number is one.
        """
        found = one_array(loss)
        whole = jnp.issubdtype(found.dtype, jnp.integer)
        number = whole and jax.typeof(found).weak_type
        if found.shape or not (number or jnp.issubdtype(found.dtype, jnp.floating)):
            raise PipelineError(
                f"`{self.name}` must return a floating scalar as its loss; it returns "
                f"{described(loss)}{advice}"
            )
        # Half a precision ends at 65504, and losses are summed.
        return summable(found)


def one_array(value: object) -> Array:
    """What a function returned, as an array; one without elements for a tree."""
    return jnp.asarray(value) if jax.tree_util.all_leaves([value]) else jnp.zeros(0)


def _place(call: UserFunction) -> str:
    """The name, file and line of a function."""
    call = inspect.unwrap(call)
    code = getattr(call, "__code__", None)
    name = getattr(call, "__qualname__", type(call).__name__)
    if code is None:
        return str(name)
    return f"{name}, {code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
