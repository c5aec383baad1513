"""nnx modules in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..arrays import PyTree
from ..errors import PipelineError
from .common import (
    End,
    blocks_per_stage,
    check_ends,
    divided,
    is_spec,
    key_of,
    layered,
    mesh_specs,
    no_key,
    period,
    scanned,
    stacked,
    wanted,
    with_keywords,
    without_names,
)

MODES = {"deterministic": True, "use_running_average": True}  # what `nnx.Module.eval` sets


@dataclass(frozen=True)
class NnxStages:
    """A model of nnx modules as a pipeline wants it; `Pipeline(**model.functions, schedule=..., mesh=...)`.

    `params` are canonical, leaves of stages [S, blocks of a stage, ...]; `state` are the blocks' other variables (batch
    statistics), for `Pipeline.place_state`, or {} where there are none.
    """

    stage: Callable[..., Any]
    first: Callable[..., Any] | None
    last: Callable[..., Any] | None
    params: dict[str, PyTree]
    state: PyTree
    specs: dict[str, PyTree]  # what `nnx.with_partitioning` said of parameters
    frozen: frozenset[str]  # paths of parameters that are not trained
    _parts: dict[str, _Part]
    _blocks: tuple[Any, ...]  # one stacked module, or groups of modules

    @property
    def functions(self) -> dict[str, Any]:
        """What `Pipeline` is given: the functions that there are, `specs` where variables have sharding metadata, `frozen`."""
        found: dict[str, Any] = {"stage": self.stage, "first": self.first, "last": self.last}
        found["specs"] = None if without_names(self.specs) else self.specs
        found["frozen"] = (lambda path, _leaf: path in self.frozen) if self.frozen else None
        return {name: function for name, function in found.items() if function is not None}

    def to_nnx(self, params: dict[str, PyTree], state: PyTree = None) -> None:
        """Write canonical parameters, and state, into the variables of the modules that the model was made of."""
        own = layered(params["stages"])
        other = layered({} if state is None else state)
        part = self._parts["stages"]
        if part.stack:
            part.write(self._blocks[0], own, other)
        else:
            for i, block in enumerate(self._blocks):
                part.write(block, *jax.tree.map(lambda leaf, i=i: leaf[i], (own, other)))
        for key in ("first", "last", "shared"):
            if key in self._parts:
                self._parts[key].write(self._parts[key].modules, params[key], {})


@dataclass(frozen=True)
class _Part:
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
    def of(cls, modules: Any, trainable: Any, *, stack: bool = False) -> _Part:
        graph, params, rngs, rest = nnx.split(modules, trainable, nnx.RngState, ...)
        evaluated = nnx.merge(graph, params, rngs, rest)
        for _, module in nnx.iter_graph(evaluated):
            if isinstance(module, nnx.Module):
                for name, value in MODES.items():
                    if hasattr(module, name):
                        setattr(module, name, value)
        return cls(modules, graph, nnx.split(evaluated, trainable, nnx.RngState, ...)[0], params, rngs, rest, trainable, stack)

    @property
    def random(self) -> bool:
        """Whether it holds streams of random numbers."""
        return bool(jax.tree.leaves(self.rngs))

    def build(self, params: PyTree, rest: PyTree, key: Any, *, training: bool) -> Any:
        """The modules with these variables, given as nested dicts."""
        own = jax.tree.unflatten(jax.tree.structure(self.params), jax.tree.leaves(params))
        other = jax.tree.unflatten(jax.tree.structure(self.rest), jax.tree.leaves(rest))
        return nnx.merge(self.graph if training else self.graph_eval, own, self._streams(key), other)

    def state_of(self, modules: Any) -> PyTree:
        """The variables that are neither parameters nor streams, as nested dicts; those made in the call are left out."""
        found = pure(nnx.split(modules, self.trainable, nnx.RngState, ...)[3])

        def now(path: Any, _old: Any) -> Any:
            node = found
            for key in path:
                node = node[key.key]
            return node

        return jax.tree_util.tree_map_with_path(now, pure(self.rest))

    def write(self, modules: Any, params: PyTree, rest: PyTree) -> None:
        """Set the modules' variables."""
        nnx.update(modules, jax.tree.unflatten(jax.tree.structure(self.params), jax.tree.leaves(params)))
        if jax.tree.leaves(rest):
            nnx.update(modules, jax.tree.unflatten(jax.tree.structure(self.rest), jax.tree.leaves(rest)))

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


def from_nnx(
    blocks: Any,
    *,
    num_stages: int,
    first: End | None = None,
    last: End | None = None,
    shared: Any = None,
    call: Callable[..., Any] | None = None,
    trainable: Any = nnx.Param,
    frozen: Any = None,
    rules: Mapping[str, Any] | None = None,
) -> NnxStages:
    """Make the functions and canonical parameters of a pipeline from nnx modules, which stay as they are.

    Dropout draws from the step's key (`rng=`), a key for each layer and microbatch, and from no stream of the modules.  Evaluation
    runs the modules as `Module.eval` would.  Blocks need not be alike: a pattern that every stage repeats (local and global
    attention in turn) is enough.

    Args:
        blocks: a list of modules (`nnx.List`, `nnx.Sequential`), or one module whose variables have a leading axis of blocks
            (made by `nnx.vmap`).
        num_stages: S; divides the number of blocks.
        first, last: what comes before and after the blocks.
        shared: modules that several of these functions use (a tied embedding): they are given as `shared` by keyword.
        call: `call(block, x) -> x`, where it is not `block(x)`; it may take microbatch, ctx, shared and training by keyword.
        trainable: which variables are parameters (a filter of nnx); the blocks' others are state.
        frozen: which of them are not trained (a filter of nnx, `lambda path, v: not isinstance(v, nnx.LoRAParam)` say); see `Pipeline`.
        rules: where `nnx.with_partitioning` names logical axes, the mesh axis of each (or None).

    Raises:
        PipelineError: blocks do not divide into stages, are unlike, or share a variable.

    Example:
        >>> blocks = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(6)]
        >>> model = from_nnx(blocks, num_stages=2, last=End(None, lambda _, x, microbatch: jnp.mean((x - microbatch["y"]) ** 2)))
        >>> model.params["stages"]["kernel"].shape
        (2, 3, 4, 4)
    """
    check_ends(first=first, last=last)
    groups, stack = _groups(blocks, num_stages)
    parts = {"stages": _Part.of(groups[0], trainable, stack=stack)}
    ends = {"first": None if first is None else first.modules, "last": None if last is None else last.modules, "shared": shared}
    parts |= {key: _Part.of(modules, trainable) for key, modules in ends.items() if modules is not None}
    _check_apart({**{f"block {i}": b for i, b in enumerate(groups)}, **{k: m for k, m in ends.items() if m is not None}})

    part = parts["stages"]
    if stack:
        own, state = (divided(pure(tree), num_stages) for tree in (part.params, part.rest))
        per_stage = blocks_per_stage(_stack_size(part), num_stages)
    else:
        split = [nnx.split(group, trainable, nnx.RngState, ...) for group in groups]
        own, state = (stacked([pure(s[i]) for s in split], num_stages) for i in (1, 3))
        per_stage = len(groups) // num_stages
    total = per_stage * num_stages
    params = {"stages": own, **{key: pure(parts[key].params) for key in parts if key != "stages"}}
    for key, end in (("first", first), ("last", last)):
        if end is not None:
            params.setdefault(key, {})
    return NnxStages(
        stage=_stage(parts, call, per_stage),
        first=None if first is None else _end(first, "first", parts, ("microbatch",), total),
        last=None if last is None else _end(last, "last", parts, ("x", "microbatch"), total + 1),
        params=params,
        state=state,
        specs=_specs(parts, rules),
        frozen=_frozen_paths(parts, frozen),
        _parts=parts,
        _blocks=tuple(groups),
    )


def _specs(parts: dict[str, _Part], rules: Mapping[str, Any] | None) -> dict[str, PyTree]:
    """Sharding metadata of the variables, as `Pipeline` takes it."""
    found = {}
    for key, part in parts.items():
        tree = pure(nnx.get_partition_spec(part.params))
        if key != "stages":
            found[key] = mesh_specs(tree, rules)
        elif not part.stack:
            found[key] = mesh_specs(tree, rules, lead=1)  # the blocks of a stage
        else:  # metadata may name the axis of blocks, as nnx.vmap adds it, or not
            whole = jax.tree.map(lambda spec, leaf: len(spec) == leaf.ndim, tree, pure(part.params), is_leaf=is_spec)
            found[key] = jax.tree.map(lambda spec, w: mesh_specs(spec, rules, lead=1, drop=int(w)), tree, whole, is_leaf=is_spec)
    return found


def _frozen_paths(parts: dict[str, _Part], chosen: Any) -> frozenset[str]:
    """The paths, "stages/kernel", of parameters that a filter of nnx takes."""
    if chosen is None:
        return frozenset()
    takes = nnx.filterlib.to_predicate(chosen)
    flat = [(key, path, variable) for key, part in parts.items() for path, variable in nnx.to_flat_state(part.params)]
    return frozenset("/".join([key, *map(str, path)]) for key, path, variable in flat if takes(path, variable))


def pure(state: Any) -> PyTree:
    """A state as nested dicts of arrays."""
    return nnx.to_pure_dict(state)


def _stage(parts: dict[str, _Part], call: Callable[..., Any] | None, per_stage: int) -> Callable[..., Any]:
    """The stage function: the blocks of a stage, scanned."""
    part = parts["stages"]
    wants = frozenset() if call is None else wanted(call)
    stateful = bool(jax.tree.leaves(part.rest))

    def run(params: PyTree, state: PyTree, x: PyTree, key: Any, given: dict[str, Any]) -> tuple[PyTree, PyTree]:
        training = given["training"]
        group = part.build(params, state, key, training=training)
        keywords = _keywords(parts, wants, given)
        for block in group if isinstance(group, tuple) else (group,):
            x = _calling("a block", part, key, training, block if call is None else lambda x, **k: call(block, x, **k), (x,), keywords)  # noqa: B023
        return x, part.state_of(group) if stateful else {}

    return scanned(run, groups=per_stage, wants=wants | {"training"}, random=part.random, stateful=stateful)


def _end(end: End, name: str, parts: dict[str, _Part], positional: Sequence[str], index: int) -> Callable[..., Any]:
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
        out = _calling(f"`{name}`", part, key, training, lambda *a, **k: call(modules, *a, **k), arguments, _keywords(parts, wants, given))
        if part is not None:
            _check_constant(name, part, constants, part.state_of(modules))
        return out

    more = {"training", "ctx"} if random else {"training"}
    return with_keywords(function, ("params", *positional), (wants - {"microbatch"}) | more, name)


def _calling(
    what: str, part: _Part | None, key: Any, training: bool, call: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]
) -> Any:
    try:
        return call(*arguments, **keywords)
    except TypeError as error:
        if part is not None and part.random and key is None and "NoneType" in str(error):
            raise no_key(what, error) from error
        raise


def _keywords(parts: dict[str, _Part], wants: frozenset[str], given: dict[str, Any]) -> dict[str, Any]:
    """What the user's function is given by keyword; shared parameters as modules."""
    found = {name: given[name] for name in wants}
    if "shared" in found and "shared" in parts:
        part = parts["shared"]
        found["shared"] = part.build(found["shared"], pure(part.rest), None, training=given["training"])
    return found


def _check_constant(name: str, part: _Part, before: PyTree, after: PyTree) -> None:
    """PipelineError where a call changed what only blocks may change."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    changed = [jax.tree_util.keystr(path, simple=True, separator="/") for (path, old), new in pairs if old is not new]
    if changed:
        raise PipelineError(f"`{name}` changes its variables {changed}; only blocks may keep state (batch statistics): put it into a block")


def _groups(blocks: Any, num_stages: int) -> tuple[list[Any], bool]:
    """Groups of blocks that all run the same code, or one stacked module; and which of the two."""
    if isinstance(blocks, nnx.Sequential):
        blocks = blocks.layers
    if isinstance(blocks, nnx.Module) and not isinstance(blocks, nnx.List):
        return [blocks], True
    found = list(blocks)
    if not found:
        raise PipelineError("there are no blocks; give a list of nnx modules, or one whose variables have a leading axis of blocks")
    odd = [f"block {i} is {type(b).__name__}" for i, b in enumerate(found) if not isinstance(b, nnx.Module)]
    if odd:
        raise PipelineError(f"blocks must be nnx modules, but {', '.join(odd)}; a plain function goes into call=, or into a module")
    per_stage = blocks_per_stage(len(found), num_stages)
    kinds = [_kind(block) for block in found]
    length = period(kinds, per_stage, lambda i, j: _difference(found[i], found[j]))
    groups = [tuple(found[i : i + length]) for i in range(0, len(found), length)]
    return [group[0] if length == 1 else group for group in groups], False


def _kind(block: Any) -> Any:
    """What must be equal for two blocks to run the same code: the graph, with static attributes, and shapes and dtypes."""
    graph, state = nnx.split(block)
    return graph, [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def _difference(one: Any, other: Any) -> str:
    """The first attribute, shape or dtype in which two blocks differ."""
    left, right = ({path: _text(value) for path, value in nnx.iter_graph(b) if "_pytree__" not in str(path[-1:])} for b in (one, other))
    for path in sorted({*left, *right}, key=str):
        if left.get(path) != right.get(path):
            name = ".".join(map(str, path)) or "the block"
            return f"{name} is {left.get(path, 'not there')} in one and {right.get(path, 'not there')} in the other"
    return "their graphs differ (modules or variables are shared within one of them)"


def _text(value: Any) -> str:
    """A node of a graph as text: a variable by shape and dtype, a module by class, anything else as it is."""
    if isinstance(value, nnx.Variable):
        return f"{type(value).__name__} {value.dtype}{list(value.shape)}"
    return type(value).__name__ if isinstance(value, nnx.Module) else repr(value)


def _stack_size(part: _Part) -> int:
    """How many blocks a stacked module holds; PipelineError where its variables disagree."""
    leaves = jax.tree_util.tree_leaves_with_path((pure(part.params), pure(part.rest)))
    sizes = {jax.tree_util.keystr(path[1:], simple=True, separator="/"): leaf.shape[:1] for path, leaf in leaves}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        shapes = {name: leaf.shape for name, (_, leaf) in zip(sizes, leaves, strict=True)}
        raise PipelineError(
            f"a stacked module's variables must all have a leading axis of blocks, of one length; these have {shapes}: "
            "make it with nnx.vmap, or give a list of modules"
        )
    return int(next(iter(sizes.values()))[0])


def _check_apart(owners: dict[str, Any]) -> None:
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
                faults.append(f"{before[0]} and {owner} hold the same variable, {before[1]} and {name}; give its module as shared=")
    if faults:
        raise PipelineError.listing("parts share variables", faults)
