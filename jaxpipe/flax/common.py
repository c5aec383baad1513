"""Common parts of nnx and linen: units that the adapter runs, and the keywords of functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from ..arrays import PyTree
from ..errors import PipelineError
from ..model.settings import is_spec

OFFERED = ("ctx", "microbatch", "shared", "training")


@dataclass(frozen=True)
class End:
    """Modules before the first block, or after the last one, and a function of them.

    Args:
        modules: a module, or a tuple or dict of them.
        call: `call(modules, microbatch) -> x` before the blocks, `call(modules, x, microbatch) ->
            loss` after them; it may take `shared`, `ctx` and `training` by keyword.
        variables: linen only: the modules' variables, a tuple or dict of them likewise.
    """

    modules: Any
    call: Callable[..., Any]
    variables: Any = None


class Call(NamedTuple):
    """A call of a unit, besides its variables."""

    arguments: tuple[PyTree, ...]
    key: Any  # of random numbers, or None
    keywords: Mapping[str, Any]
    training: bool


@dataclass(frozen=True)
class Unit:
    """Modules that run together: a block, those of an `End`, or the shared ones.

    Attributes:
        name: in messages, "a block" or "`first`".
        call: the user's function of the modules and the arguments; None: modules are called.
    """

    name: str
    modules: Any
    call: Callable[..., Any] | None

    @property
    def params(self) -> PyTree:
        """Parameters as nested dicts of arrays (or shapes)."""
        raise NotImplementedError

    @property
    def state(self) -> PyTree:
        """Other variables."""
        raise NotImplementedError

    @property
    def specs(self) -> PyTree:
        """The PartitionSpec of each parameter by flax's metadata."""
        raise NotImplementedError

    @property
    def frozen(self) -> frozenset[str]:
        """The paths of parameters that are not trained."""
        return frozenset()

    @property
    def random(self) -> bool:
        """Whether a call draws random numbers."""
        raise NotImplementedError

    def kind(self, ignore: Sequence[str] = ()) -> Any:
        """Class, settings and shapes of variables: two blocks with equal ones run the same code.

        Args:
            ignore: names of attributes in which they may differ.
        """
        raise NotImplementedError

    def difference(self, other: Unit) -> str:
        """The first attribute, shape or dtype in which two blocks differ."""
        raise NotImplementedError

    def build(self, params: PyTree, state: PyTree, key: Any, *, training: bool) -> Any:
        """The modules with these variables in them; they draw from `key`."""
        raise NotImplementedError

    def run(self, params: PyTree, state: PyTree, call: Call) -> tuple[Any, PyTree]:
        """The result of a call, and the state after it.

        Raises:
            PipelineError: the call draws without a key, or writes what is not kept.
        """
        raise NotImplementedError

    def called(self, modules: Any, call: Call) -> Any:
        """The call."""
        if self.call is None:
            return modules(*call.arguments, **call.keywords)
        return self.call(modules, *call.arguments, **call.keywords)

    def no_key(self, error: Exception) -> PipelineError:
        """The error for random numbers without a key."""
        return PipelineError(
            f"{self.name} draws random numbers, but the step got no key; pass "
            f"rng=jax.random.key(...) ({error})"
        )

    @property
    def wants(self) -> frozenset[str]:
        """Which of the keywords that a pipeline offers the user's function takes."""
        try:
            parameters = inspect.signature(self.call or (lambda: 0)).parameters.values()
        except (TypeError, ValueError):
            return frozenset()
        named = {
            p.name
            for p in parameters
            if p.kind is p.KEYWORD_ONLY
            or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty)
        }
        return frozenset(named & set(OFFERED))


def end_units(first: Any, last: Any, unit: Callable[[str, End], Unit]) -> dict[str, Unit]:
    """The units of `first` and `last`, where there are any; PipelineError for one that is no
    `End`.
    """
    ends = {name: end for name, end in (("first", first), ("last", last)) if end is not None}
    faults = []
    for name, end in ends.items():
        if isinstance(end, End):
            continue
        takes = "module, microbatch" if name == "first" else "module, x, microbatch"
        given = "a function" if inspect.isfunction(end) else f"a {type(end).__name__}"
        first = "None" if inspect.isfunction(end) else "module"
        faults.append(
            f"{name}= is {given}; write {name}=End({first}, lambda {takes}: ...), the module and "
            "how it is called"
        )
    PipelineError.refuse("", faults)
    return {name: unit(f"`{name}`", end) for name, end in ends.items()}


def names_axes(tree: PyTree) -> bool:
    """Whether a spec of a tree names an axis."""
    specs = [spec for spec in jax.tree.leaves(tree, is_leaf=is_spec) if spec is not None]
    return any(entry is not None for spec in specs for entry in spec)


def mesh_specs(
    tree: PyTree, leaves: PyTree, rules: Mapping[str, Any] | None, *, lead: int, stack: bool
) -> PyTree:
    """Specs of mesh axes from those of flax's metadata.

    Args:
        tree: of PartitionSpecs, or None.
        leaves: the variables.
        rules: logical name -> mesh axis, a tuple of them, or None; names that are not in it are
            mesh axes.
        lead: leading axes that the pipeline adds.
        stack: the variables have a leading axis of blocks.  A spec of full length has an entry for
            it, as `nnx.vmap` and `nn.scan` add it; that entry is left out.
    """
    known = rules or {}

    def entry(names: Any) -> Any:
        if not isinstance(names, tuple):
            return known.get(names, names)
        return tuple(found for n in names if (found := known.get(n, n)) is not None) or None

    def translated(spec: Any, leaf: Any) -> Any:
        if spec is None:
            return None
        drop = int(stack and len(spec) == leaf.ndim)
        return PartitionSpec(*(None,) * lead, *map(entry, tuple(spec)[drop:]))

    return jax.tree.map(translated, tree, leaves, is_leaf=is_spec)
