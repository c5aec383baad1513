"""Units: flax modules that run together.  A unit becomes a function of a pipeline's model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from ..arrays import PyTree, by_path, summable
from ..errors import PipelineError
from ..model.calls import Function

OFFERED = ("ctx", "microbatch", "shared", "training")
# Arguments of `first` and `last` besides parameters or modules.
TAKES = {"first": ("microbatch",), "last": ("x", "microbatch"), "shared": ()}


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


def plain_call(block: Any, *arguments: Any) -> Any:
    """The call of a block where the user says nothing else."""
    return block(*arguments)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A block, the modules of an `End`, shared ones, or a part of a whole model.

    Attributes:
        name: in messages, "a block" or "`first`".
        modules: one, or a tuple or dict of them.
        call: the user's function of the modules and the arguments.
        takes: the arguments of `call` by position.
        params: parameters as nested dicts of arrays (or shapes).
        state: other variables likewise.
        specs: the PartitionSpec of each parameter by flax's metadata.
        random: whether a call draws random numbers.
        constant: the unit is no block, and no call changes its variables.
        frozen: the paths of parameters that are not trained.
        advice: about sown values, for a message.
    """

    name: str
    modules: Any
    call: Callable[..., Any]
    takes: tuple[str, ...] = ("block", "x")
    params: PyTree
    state: PyTree
    specs: PyTree
    random: bool = False
    constant: bool = False
    frozen: frozenset[str] = frozenset()
    advice: str = ""

    def kind(self, ignore: Sequence[str]) -> Any:
        """Two blocks with equal kinds run the same code: class, settings and shapes of variables.

        Args:
            ignore: names of attributes in which they may differ.
        """
        return {name: text for name, text in self.settings().items() if name not in ignore}

    def settings(self) -> Mapping[str, str]:
        """The class, settings and shapes of a block, as text by name."""
        raise NotImplementedError

    def build(self, params: PyTree, state: PyTree, key: Any, *, training: bool) -> Any:
        """The modules with these variables in them; they draw from `key`."""
        raise NotImplementedError

    def variables(self, modules: Any, state: PyTree) -> PyTree:
        """The variables of modules that are no parameters, after a call; before it they were
        `state`.
        """
        raise NotImplementedError

    def run(self, params: PyTree, state: PyTree, call: Call) -> tuple[Any, PyTree]:
        """The result of a call, and the state after it.

        Raises:
            PipelineError: the call draws without a key, or writes variables that are not kept.
        """
        modules = self.build(params, state, call.key, training=call.training)
        try:
            out = self.call(modules, *call.arguments, **call.keywords)
        except (InvalidRngError, TypeError) as error:
            # nnx folds numbers into the key, which is None.
            drew = isinstance(error, InvalidRngError) or "NoneType" in str(error)
            if not drew or not self.random or call.key is not None:
                raise
            raise PipelineError(
                f"{self.name} draws random numbers, but the step got no key; pass "
                f"rng=jax.random.key(...) ({error})"
            ) from error
        return out, self._kept(state, self.variables(modules, state))

    def _kept(self, before: PyTree, after: PyTree) -> PyTree:
        """The state after a call; PipelineError where the call wrote other variables."""
        old, new = by_path(before), by_path(after)
        if odd := sorted(set(old) ^ set(new)):
            raise PipelineError(
                f"{self.name} writes variables in a call, as sow() does, which a pipeline does not "
                f"keep: {', '.join(odd)}. {self.advice}"
            )
        changed = [path for path in old if old[path] is not new[path]]
        if self.constant and changed:
            raise PipelineError(
                f"{self.name} changes its variables {changed}; only blocks may keep state (batch "
                "statistics): put it into a block"
            )
        return after

    def difference(self, other: Unit) -> str:
        """The first attribute, shape or dtype in which two blocks differ."""
        left, right = self.settings(), other.settings()
        for name in (*left, *right):
            if left.get(name) != right.get(name):
                one, two = (settings.get(name, "not there") for settings in (left, right))
                return f"{name} is {one} in one and {two} in the other"
        return "their graphs differ (modules or variables are shared within one of them)"

    @cached_property
    def wants(self) -> frozenset[str]:
        """The keywords of a pipeline that the user's function takes."""
        return Function.of(self.call, self.name, OFFERED, takes=self.takes).wants

    @property
    def keywords(self) -> frozenset[str]:
        """The keywords of a pipeline that a function of the unit takes."""
        return self.wants | {"training"} | ({"ctx"} if self.random else set())


def end_units(
    first: Any, last: Any, shared: End | None, unit: Callable[[str, End], Unit]
) -> dict[str, Unit]:
    """The units of `first`, `last` and `shared`, where there are any; PipelineError for one that is
    no `End`.
    """
    every = {"first": first, "last": last, "shared": shared}
    ends = {name: end for name, end in every.items() if end is not None}
    faults = []
    for name, end in ends.items():
        takes = ", ".join(("module", *TAKES[name]))
        is_function = inspect.isfunction(end)
        kind, module = ("function", "None") if is_function else (type(end).__name__, "module")
        if not isinstance(end, End):
            faults.append(
                f"{name}= is a {kind}; write {name}=End({module}, lambda {takes}: ...), the module "
                "and how it is called"
            )
    PipelineError.refuse("", faults)
    return {
        name: replace(unit(f"`{name}`", end), takes=("modules", *TAKES[name]), constant=True)
        for name, end in ends.items()
    }


def listed(blocks: Any, module: type, kind: str) -> list[Any]:
    """The blocks; PipelineError unless they are modules."""
    modules = list(blocks)
    if not modules:
        raise PipelineError(
            f"there are no blocks; give a list of {kind} modules, or one whose variables have a "
            "leading axis of blocks"
        )
    odd = [
        f"block {i} is {type(b).__name__}"
        for i, b in enumerate(modules)
        if not isinstance(b, module)
    ]
    if odd:
        raise PipelineError(
            f"blocks must be {kind} modules, but {', '.join(odd)}; a plain function goes into "
            "call=, or into a module"
        )
    return modules


def tree_at(tree: PyTree, key: str) -> PyTree:
    """The tree of a kind of block: one of several by key, or the only one."""
    return tree.get(key, {}) if key else tree


def _run(
    unit: Unit,
    shared: Unit | None,
    params: PyTree,
    state: PyTree,
    arguments: tuple[PyTree, ...],
    number: Any,
    offered: Mapping[str, Any],
) -> tuple[Any, PyTree]:
    """Run the unit with this number in the whole model.  Its key is the same however blocks are
    put into stages.  The user's function gets shared parameters as modules.
    """
    ctx, training = offered.get("ctx"), offered.get("training", True)
    keywords = {name: offered[name] for name in unit.wants}
    if "shared" in keywords and shared is not None:
        keywords["shared"] = shared.build(keywords["shared"], shared.state, None, training=training)
    key = ctx.microbatch_rng if unit.random and ctx is not None else None
    key = None if key is None else jax.random.fold_in(key, number)
    return unit.run(params, state, Call(arguments, key, keywords, training))


def end_function(unit: Unit, name: str, number: int, shared: Unit | None) -> Callable[..., Any]:
    """`first` or `last`; its variables that are no parameters are constants."""

    def function(params: PyTree, *arguments: Any, **offered: Any) -> Any:
        return _run(unit, shared, params, unit.state, arguments, number, offered)[0]

    return _with_keywords(function, ("params", *TAKES[name]), unit.keywords, name)


def layer_function(
    unit: Unit, letter: str, shared: Unit | None, stage_loss: bool
) -> Callable[..., Any]:
    """The function of a layer."""

    def layer(params: PyTree, x: PyTree, **offered: Any) -> PyTree:
        number = offered["ctx"].layer if unit.random else 0
        out, _ = _run(unit, shared, params, {}, (x,), number, offered)
        return _with_loss(unit.name, out) if stage_loss else out

    return _with_keywords(layer, ("params", "x"), unit.keywords, f"layer_{letter}")


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

    def stage(params: PyTree, x: PyTree, **offered: Any) -> Any:
        ctx = offered.get("ctx")
        start = 0 if ctx is None else ctx.stage * groups

        def group(x: PyTree, row: Any) -> tuple[PyTree, tuple[Any, PyTree]]:
            index, own, state = row
            losses, after = [], {}
            for i, (key, unit) in enumerate(units.items()):
                number = (start + index) * len(units) + i
                x, after[key] = _run(
                    unit, shared, tree_at(own, key), tree_at(state, key), (x,), number, offered
                )
                if stage_loss:
                    x, loss = _with_loss(unit.name, x)
                    losses.append(loss)
            new = after.get("", after) if stateful else {}
            # flax may widen statistics.
            new = jax.tree.map(lambda after, before: after.astype(before.dtype), new, state)
            return x, (sum(losses) if stage_loss else None, new)

        rows = (jnp.arange(groups), params, offered["state"] if stateful else {})
        x, (losses, state) = jax.lax.scan(group, x, rows)
        more = [jnp.sum(losses, axis=0)] if stage_loss else []
        more += [state] if stateful else []
        return (x, *more) if more else x

    # `Pipeline` reads this: leaves are [S, layers, ...].
    stage.stacks_layers = True  # type: ignore[attr-defined]
    keywords = frozenset({"state"} if stateful else ())
    keywords = keywords.union(*(unit.keywords for unit in units.values()))
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


def _with_loss(name: str, out: Any) -> tuple[PyTree, Any]:
    """x and the loss that a block returned; PipelineError where it returned something else."""
    if not isinstance(out, tuple) or len(out) != 2:
        raise PipelineError(
            f"{name} must return (x, loss), since stage_loss=True; it returns "
            f"{jax.tree.structure(out)}"
        )
    return out[0], summable(out[1])
