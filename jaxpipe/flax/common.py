"""Common parts of nnx and linen: units that the adapter runs, the keywords of functions, and the
functions of a pipeline's model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..arrays import PyTree, summable
from ..errors import PipelineError
from ..model.mesh import is_spec

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


def tree_at(tree: PyTree, key: str) -> PyTree:
    """The tree of a kind of block: one of several by key, or the only one."""
    return tree.get(key, {}) if key else tree


def _call(
    unit: Unit,
    arguments: tuple[PyTree, ...],
    number: Any,
    shared: Unit | None,
    given: Mapping[str, Any],
) -> Call:
    """The call of the unit with this number in the whole model: its key, which is the same however
    blocks are put into stages, and the user's keywords, with shared parameters as modules.
    """
    ctx, training = given.get("ctx"), given.get("training", True)
    common = ctx.microbatch_rng if unit.random and ctx is not None else None
    keywords = {name: given[name] for name in unit.wants}
    if "shared" in keywords and shared is not None:
        keywords["shared"] = shared.build(keywords["shared"], shared.state, None, training=training)
    key = None if common is None else jax.random.fold_in(common, number)
    return Call(arguments, key, keywords, training)


def _taken(unit: Unit) -> frozenset[str]:
    """The keywords that a function of a unit takes."""
    return unit.wants | {"training"} | ({"ctx"} if unit.random else set())


def end_function(
    unit: Unit, name: str, takes: tuple[str, ...], number: int, shared: Unit | None
) -> Callable[..., Any]:
    """`first` or `last`; its variables that are no parameters are constants."""

    def function(params: PyTree, *arguments: Any, **given: Any) -> Any:
        return unit.run(params, unit.state, _call(unit, arguments, number, shared, given))[0]

    return _with_keywords(function, ("params", *takes), _taken(unit) - {"microbatch"}, name)


def _run_block(
    unit: Unit,
    shared: Unit | None,
    params: PyTree,
    state: PyTree,
    x: PyTree,
    number: Any,
    given: Mapping[str, Any],
    *,
    stage_loss: bool,
) -> tuple[PyTree, Any, PyTree]:
    """x, the loss (None without `stage_loss`) and the state after a block."""
    out, new = unit.run(params, state, _call(unit, (x,), number, shared, given))
    return *_with_loss(unit.name, out, stage_loss=stage_loss), new


def layer_function(
    unit: Unit, letter: str, shared: Unit | None, stage_loss: bool
) -> Callable[..., Any]:
    """The function of a layer."""

    def layer(params: PyTree, x: PyTree, **given: Any) -> PyTree:
        number = given["ctx"].layer if unit.random else 0
        x, loss, _ = _run_block(unit, shared, params, {}, x, number, given, stage_loss=stage_loss)
        return (x, loss) if stage_loss else x

    return _with_keywords(layer, ("params", "x"), _taken(unit), f"layer_{letter}")


def stage_function(
    units: Mapping[str, Unit],
    groups: int,
    shared: Unit | None,
    *,
    stateful: bool,
    stage_loss: bool,
) -> Callable[..., Any]:
    """The function of a stage: a scan over groups of blocks, each of which has one of every unit
    in order.
    """

    def stage(params: PyTree, x: PyTree, **given: Any) -> Any:
        ctx = given.get("ctx")
        start = 0 if ctx is None else ctx.stage * groups

        def group(x: PyTree, row: Any) -> tuple[PyTree, tuple[Any, PyTree]]:
            index, own, state = row
            losses, after = [], {}
            for i, (key, unit) in enumerate(units.items()):
                number = (start + index) * len(units) + i
                own_state = tree_at(state, key)
                x, loss, after[key] = _run_block(
                    unit,
                    shared,
                    tree_at(own, key),
                    own_state,
                    x,
                    number,
                    given,
                    stage_loss=stage_loss,
                )
                losses.append(loss)
            new = after.get("", after) if stateful else {}
            # flax may widen statistics.
            new = jax.tree.map(lambda after, before: after.astype(before.dtype), new, state)
            return x, (sum(losses) if stage_loss else None, new)

        rows = (jnp.arange(groups), params, given["state"] if stateful else {})
        x, (losses, state) = jax.lax.scan(group, x, rows)
        more = [jnp.sum(losses, axis=0)] if stage_loss else []
        more += [state] if stateful else []
        return (x, *more) if more else x

    # `Pipeline` reads this: leaves are [S, layers, ...].
    stage.stacks_layers = True  # type: ignore[attr-defined]
    keywords = frozenset().union(*map(_taken, units.values()), {"state"} if stateful else set())
    return _with_keywords(stage, ("params", "x"), keywords, "stage")


def _with_keywords(
    function: Callable[..., Any], positional: Sequence[str], keywords: frozenset[str], name: str
) -> Callable[..., Any]:
    """The function, with a signature that says which keywords it takes."""
    fixed = [inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in positional]
    named = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in sorted(keywords)]
    function.__signature__ = inspect.Signature([*fixed, *named])  # type: ignore[attr-defined]
    function.__name__ = name
    return function


def _with_loss(what: str, out: Any, *, stage_loss: bool) -> tuple[PyTree, Any]:
    """x and the loss that a block returned (None without `stage_loss`); PipelineError otherwise."""
    if not stage_loss:
        return out, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise PipelineError(
            f"{what} must return (x, loss), since stage_loss=True; it returns "
            f"{jax.tree.structure(out)}"
        )
    return out[0], summable(out[1])
