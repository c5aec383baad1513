"""nnx modules taken apart and put together: what models by stages and by layers have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..arrays import PyTree
from ..errors import PipelineError
from .common import End, key_of, leaf_paths, no_key, wanted, with_keywords

MODES = {"deterministic": True, "use_running_average": True}  # what `nnx.Module.eval` sets


@dataclass(frozen=True)
class Part:
    """Modules taken apart: graphs for training and evaluation, and the variables' trees."""

    modules: Any
    graph: Any
    graph_eval: Any
    params: Any
    rngs: Any
    rest: Any
    trainable: Any
    stack: bool = False

    @classmethod
    def of(cls, modules: Any, trainable: Any, *, stack: bool = False) -> Part:
        """Take modules apart; with `stack`, their variables have a leading axis of blocks."""
        graph, params, rngs, rest = nnx.split(modules, trainable, nnx.RngState, ...)
        evaluated = nnx.merge(graph, params, rngs, rest)
        for _, module in nnx.iter_graph(evaluated):
            if isinstance(module, nnx.Module):
                for name, value in MODES.items():
                    if hasattr(module, name):
                        setattr(module, name, value)
        return cls(
            modules,
            graph,
            nnx.split(evaluated, trainable, nnx.RngState, ...)[0],
            params,
            rngs,
            rest,
            trainable,
            stack,
        )

    @property
    def random(self) -> bool:
        """Whether it holds streams of random numbers."""
        return bool(jax.tree.leaves(self.rngs))

    def build(self, params: PyTree, rest: PyTree, key: Any, *, training: bool) -> Any:
        """The modules with these variables, given as nested dicts."""
        own = jax.tree.unflatten(jax.tree.structure(self.params), jax.tree.leaves(params))
        other = jax.tree.unflatten(jax.tree.structure(self.rest), jax.tree.leaves(rest))
        return nnx.merge(
            self.graph if training else self.graph_eval, own, self._streams(key), other
        )

    def state_of(self, modules: Any, what: str) -> PyTree:
        """What is neither parameters nor streams; PipelineError where the call made or
        lost some.
        """
        found = pure(nnx.split(modules, self.trainable, nnx.RngState, ...)[3])
        odd = leaf_paths(found) ^ leaf_paths(pure(self.rest))
        if odd:
            raise PipelineError(
                f"{what} makes variables in a call, as sow() does, which a pipeline does not keep: "
                f"{', '.join(sorted(odd))}. Take them where the module is called, x, sown = "
                "nnx.capture(module, nnx.Intermediate)(x), and drop them or make a loss of them: "
                "blocks "
                "return it with stage_loss=True, call=function that returns (x, loss). (Take "
                "what was "
                "sown before out of the modules that are given: nnx.pop(module, nnx.Intermediate))"
            )
        return found

    def write(self, modules: Any, params: PyTree, rest: PyTree) -> None:
        """Set the modules' variables."""
        nnx.update(
            modules, jax.tree.unflatten(jax.tree.structure(self.params), jax.tree.leaves(params))
        )
        if jax.tree.leaves(rest):
            nnx.update(
                modules, jax.tree.unflatten(jax.tree.structure(self.rest), jax.tree.leaves(rest))
            )

    def _streams(self, key: Any) -> Any:
        """Every stream of random numbers begun again from `key`; without one, drawing fails."""

        def leaf(number: int, old: Any) -> Any:
            shape = old.shape[1:] if self.stack else old.shape
            if not jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
                return jnp.zeros(shape, old.dtype)
            own = None if key is None else jax.random.fold_in(key, number)
            return own if own is None or not shape else jax.random.split(own, shape)

        leaves, tree = jax.tree.flatten(self.rngs)
        return jax.tree.unflatten(tree, [leaf(i, old) for i, old in enumerate(leaves)])


def pure(state: Any) -> PyTree:
    """A state as nested dicts of arrays."""
    return nnx.to_pure_dict(state)


def frozen_paths(parts: dict[str, Part], chosen: Any) -> frozenset[str]:
    """The paths, "stages/kernel", of parameters that a filter of nnx takes."""
    if chosen is None:
        return frozenset()
    takes = nnx.filterlib.to_predicate(chosen)
    flat = [
        (key, path, variable)
        for key, part in parts.items()
        for path, variable in nnx.to_flat_state(part.params)
    ]
    return frozenset(
        "/".join([key, *map(str, path)]) for key, path, variable in flat if takes(path, variable)
    )


def is_in(paths: frozenset[str]) -> Callable[[str, Any], bool] | None:
    """Whether a path is one of these; None where there are none."""
    return (lambda path, _leaf: path in paths) if paths else None


def end_function(
    end: End, name: str, parts: dict[str, Part], positional: Sequence[str], index: int
) -> Callable[..., Any]:
    """`first` or `last`; its variables that are no parameters are constants."""
    part, wants = parts.get(name), wanted(end.call)
    random = part is not None and part.random

    def function(params: PyTree, *arguments: Any, **given: Any) -> Any:
        modules, training = None, given["training"]
        key = key_of(given.get("ctx"), index) if random else None
        if part is not None:
            constants = pure(part.rest)
            modules = part.build(params, constants, key, training=training)
        call = end.call
        out = calling(
            f"`{name}`",
            part,
            key,
            training,
            lambda *a, **k: call(modules, *a, **k),
            arguments,
            given_keywords(parts, wants, given),
        )
        if part is not None:
            _check_constant(name, part, constants, part.state_of(modules, f"`{name}`"))
        return out

    more = {"training", "ctx"} if random else {"training"}
    return with_keywords(function, ("params", *positional), (wants - {"microbatch"}) | more, name)


def calling(
    what: str,
    part: Part | None,
    key: Any,
    training: bool,
    call: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: dict[str, Any],
) -> Any:
    """The call; where it draws without a key, the error says so."""
    try:
        return call(*arguments, **keywords)
    except TypeError as error:
        if part is not None and part.random and key is None and "NoneType" in str(error):
            raise no_key(what, error) from error
        raise


def given_keywords(
    parts: dict[str, Part], wants: frozenset[str], given: dict[str, Any]
) -> dict[str, Any]:
    """What the user's function is given by keyword; shared parameters as modules."""
    found = {name: given[name] for name in wants}
    if "shared" in found and "shared" in parts:
        part = parts["shared"]
        found["shared"] = part.build(
            found["shared"], pure(part.rest), None, training=given["training"]
        )
    return found


def _check_constant(name: str, part: Part, before: PyTree, after: PyTree) -> None:
    """PipelineError where a call changed what only blocks may change."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    changed = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, old), new in pairs
        if old is not new
    ]
    if changed:
        raise PipelineError(
            f"`{name}` changes its variables {changed}; only blocks may keep state (batch "
            "statistics): put it into a block"
        )


def kind_of(block: Any) -> Any:
    """What must be equal for two blocks to run the same code: the graph, with static attributes,
    and shapes and dtypes.
    """
    graph, state = nnx.split(block)
    return graph, [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def difference(one: Any, other: Any) -> str:
    """The first attribute, shape or dtype in which two blocks differ."""
    left, right = (
        {
            path: _text(value)
            for path, value in nnx.iter_graph(b)
            if "_pytree__" not in str(path[-1:])
        }
        for b in (one, other)
    )
    for path in sorted({*left, *right}, key=str):
        if left.get(path) != right.get(path):
            name = ".".join(map(str, path)) or "the block"
            return (
                f"{name} is {left.get(path, 'not there')} in one and "
                f"{right.get(path, 'not there')} in the other"
            )
    return "their graphs differ (modules or variables are shared within one of them)"


def _text(value: Any) -> str:
    """A node of a graph as text: a variable by shape and dtype, a module by class, anything else as
    it is.
    """
    if isinstance(value, nnx.Variable):
        return f"{type(value).__name__} {value.dtype}{list(value.shape)}"
    return type(value).__name__ if isinstance(value, nnx.Module) else repr(value)


def check_apart(owners: dict[str, Any]) -> None:
    """PipelineError where two parts hold the same variable: it would become two parameters."""
    seen: dict[int, tuple[str, str]] = {}
    faults = []
    for owner, modules in owners.items():
        for path, value in nnx.iter_graph(modules):
            if not isinstance(value, nnx.Variable) or isinstance(value, nnx.RngState):
                continue
            name = ".".join(map(str, path))
            before = seen.setdefault(id(value), (owner, name))
            if before[0] != owner:
                faults.append(
                    f"{before[0]} and {owner} hold the same variable, {before[1]} and {name}; "
                    "give its module as shared="
                )
    if faults:
        raise PipelineError.listing("parts share variables", faults)
