"""linen modules as units, and pipelines of their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NoReturn

import jax
from flax import core, linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from ..arrays import Leaves, Params, PyTree, by_path
from ..errors import PipelineError
from ..layouts.layout import Layout
from ..model.calls import UserFunction
from ..model.functions import Extra
from ..model.settings import SpecEntry
from .adapter import BlockSettings, FlaxModel, adapt
from .units import REPLACED, End, Modules, Unit, Vars, end_units, listed, plain_call

# Collections that a call never writes: `Module.perturb` adds nothing where it may not.
FIXED = ("params", "perturbations", REPLACED)


@dataclass(frozen=True)
class LinenModel(FlaxModel):
    """A model of linen modules as a pipeline takes it (see `FlaxModel`)."""

    def to_linen(self, params: Params, state: Vars | None = None) -> Any:
        """Canonical parameters, and state, as the blocks' variables, in the form in which they were
        given: a list, or stacked.

        Parameters of first, last and shared are those of their modules already.
        """
        rows = self._by_block(params["stages"], self.state if state is None else state)
        variables = [variables_of(own, other) for own, other in rows]
        return variables[0] if self._stack else variables


def _unbox(tree: PyTree) -> PyTree:
    """A tree without sharding metadata, whose axes no mesh in context needs to have."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return nn.meta.unbox(tree)


@dataclass(frozen=True)
class _Unboxed:
    """An initializer without sharding metadata."""

    call: UserFunction

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return _unbox(self.call(*arguments, **keywords))


def _without_metadata(
    method: UserFunction, arguments: tuple[object, ...], keywords: Extra, context: Any
) -> object:
    """A method call in which initializers ignore sharding metadata.

    `DenseGeneral` calls its initializers in every call, for shapes alone, and would constrain the
    result by axes that the pipeline's mesh does not have.
    """
    for name in ("kernel_init", "bias_init"):
        init = getattr(context.module, name, None)
        if callable(init) and not isinstance(init, _Unboxed):
            object.__setattr__(context.module, name, _Unboxed(init))
    return method(*arguments, **keywords)


@dataclass(frozen=True, kw_only=True)
class LinenUnit(Unit):
    """Modules with their variables."""

    rngs: tuple[str, ...]
    takes_sown: bool  # the call makes a loss of sown values
    run = nn.intercept_methods(_without_metadata)(Unit.run)  # the call is on bound modules

    def build(self, params: Vars, state: Vars, key: Any, *, training: bool) -> Modules:
        """The modules bound to variables.

        New collections may be written.  The step refuses sown values, which would be lost.
        """
        names = () if key is None else self.rngs
        keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(names)}

        def bound(module: nn.Module, own: Vars, other: Vars) -> nn.Module:
            fixed = () if self.constant or training else other
            mutable = core.DenyList([*FIXED, *fixed])
            return module.bind(variables_of(own, other), rngs=keys, mutable=mutable)

        return _each(bound, self.modules, params, state)

    def variables(self, modules: Modules, state: Vars) -> Vars:
        """All collections but the parameters; those that were there where the call takes sown
        ones.
        """
        after = _each(lambda module: _without_params(module.variables), modules)
        return {name: after[name] for name in state} if self.takes_sown else after

    def settings(self) -> dict[str, str]:
        """The class, attributes and shapes of variables."""
        module = self.modules
        assert isinstance(module, nn.Module)  # of a block
        attributes = {
            f.name: repr(getattr(module, f.name, None))
            for f in fields(module)
            if f.name not in ("parent", "name")
        }
        shapes = {
            path: f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in by_path({"params": self.params, **self.state}).items()
        }
        return {"the block": repr(type(module)), **attributes, **shapes}


def linen_unit(
    name: str, end: End, *, rngs: tuple[str, ...], takes_sown: bool = False
) -> LinenUnit:
    """The unit of modules, one or a tuple or dict of them, with as many variables."""

    def params(_: nn.Module, own: Vars | None) -> Vars:
        found = own or {}
        replaced = {REPLACED: found[REPLACED]} if REPLACED in found else {}
        return {**found.get("params", {}), **replaced}

    modules, variables = end.modules, core.unfreeze(end.variables)
    _check_variables(name, modules, variables)
    plain = _unbox(variables)
    own = _each(params, modules, plain)
    return LinenUnit(
        name=name,
        modules=modules,
        call=end.call,
        params=own,
        state=_each(lambda _, own: _without_params(own or {}), modules, plain),
        specs=nn.get_partition_spec(_each(params, modules, variables)),
        random=bool(rngs),
        replaced=frozenset(path for path in by_path(own) if REPLACED in path.split("/")),
        rngs=rngs,
        takes_sown=takes_sown,
    )


def _check_variables(name: str, modules: Modules | None, variables: PyTree) -> None:
    """PipelineError unless each of the modules, one or a tuple or dict of them, has variables."""
    leaves = jax.tree.leaves(modules)
    tree: Any = jax.tree.structure(modules)
    try:
        own = tree.flatten_up_to(variables)
    except ValueError:
        own = []
    odd = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, nn.Module)]
    fits = len(own) == len(leaves) and all(isinstance(v, Mapping | None) for v in own)
    if odd or not fits:
        raise PipelineError(
            f"{name} has modules {_form(modules)} and variables {_form(variables)}; give a linen "
            "module and its variables, End(module, function, variables), or a tuple or dict of "
            "modules and one like it of variables"
        )


def _form(tree: object) -> str:
    """The classes of a tuple or dict of modules, or of their variables."""
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(_form, tree))})"
    if isinstance(tree, Mapping) and not {"params"} & tree.keys():
        return f"{{{', '.join(f'{key!r}: {_form(each)}' for key, each in tree.items())}}}"
    return "{'params': ...}" if isinstance(tree, Mapping) else type(tree).__name__


def _without_params(variables: Vars) -> Vars:
    own = core.unfreeze(variables)
    return {name: tree for name, tree in own.items() if name not in ("params", REPLACED)}


def variables_of(params: Vars, state: Vars) -> Vars:
    """The variables of a module."""
    own = {REPLACED: params[REPLACED]} if REPLACED in params else {}
    return {"params": {n: tree for n, tree in params.items() if n != REPLACED}, **own, **state}


def _each(function: UserFunction, modules: Modules | None, *trees: PyTree) -> PyTree:
    """A function of each of the modules, one or a tuple or dict of them, and its part of trees."""
    return {} if modules is None else jax.tree.map(function, modules, *trees)


def from_linen(
    blocks: nn.Module | Sequence[nn.Module],
    variables: Vars | Sequence[Vars],
    *,
    num_stages: int | None = None,
    layout: Layout | str | None = None,
    first: End | None = None,
    last: End | None = None,
    shared: tuple[Modules, Vars | tuple[Vars, ...]] | None = None,
    call: UserFunction | None = None,
    rngs: Sequence[str] = ("dropout",),
    rules: Mapping[str, SpecEntry] | None = None,
    stage_loss: bool = False,
    ignore: Sequence[str] = (),
    **contract: object,
) -> LinenModel:
    """Make the functions and canonical parameters of a pipeline from linen modules and their
    variables, as they are.

    Random numbers come from the step's key (`rng=`), a key for each layer and microbatch.  Blocks
    need not be alike: a pattern that every stage repeats is enough.

    Args:
        blocks: the module of every block, or a list with each block's own.
        variables: a list with each block's variables (see `submodules`), or variables with a
            leading axis of blocks (as `nn.scan`, `nn.vmap` or a vmapped `init` make them).
        num_stages, layout: as `from_nnx` takes them.
        first, last: the modules before and after the blocks; their functions take bound modules.
        shared: (modules, variables) that several of these functions use.  The functions take them,
            bound, as `shared` by keyword.
        call: `call(block, x) -> x`, where it is not `block(x)`; it may take training, microbatch,
            ctx and shared by keyword, as in `lambda block, x, *, training: block(x,
            train=training)`.
        rngs: the collections for which modules draw random numbers.
        rules, stage_loss, ignore: as `from_nnx` takes them; `call` reads a loss that blocks sow in
            `block.variables`.
        contract: `loss`, `has_metrics`, `frozen` and `replaced`, as `jaxpipe.Model` takes them.
            Leaves of flax's collection `_overwrite_with_gradient` are replaced by `Replaced.MAX`.

    Raises:
        PipelineError: blocks do not divide into stages, are unlike, or do not fit their variables.
            A step raises it for values that blocks sow and nobody takes.
    """
    form = BlockSettings(num_stages, layout, rules or {}, stage_loss, ignore, contract)
    unit = partial(linen_unit, rngs=tuple(rngs))
    if shared is not None and (not isinstance(shared, tuple) or len(shared) != 2):
        raise PipelineError(
            f"shared= is (modules, variables) of linen modules, not {type(shared).__name__}"
        )
    common = None if shared is None else End(shared[0], plain_call, shared[1])
    ends = end_units(first, last, common, unit)
    several, stack = not isinstance(blocks, nn.Module), isinstance(variables, Mapping)
    modules = listed(blocks if several else [blocks], nn.Module, "linen")
    if stack and several:
        raise PipelineError(
            "variables with a leading axis of blocks are of one module; give that module, or "
            "a list of variables"
        )
    each: Leaves = [variables] if stack else list(variables)
    if not several:
        modules *= len(each)
    elif len(each) != len(modules):
        raise PipelineError(
            f"there are {len(modules)} blocks but variables of {len(each)}; give each block's "
            "own, in order"
        )
    unit = partial(unit, takes_sown=stage_loss and call is not None)
    units = [
        unit("a block", End(module, call or plain_call, dict(own)))
        for module, own in zip(modules, each, strict=True)
    ]
    return adapt(LinenModel, units, ends=ends, form=form, stack=stack)


def submodule(variables: Vars, name: str) -> Vars:
    """The variables of one submodule: {"params": {"embed": tree}} -> {"params": tree};
    PipelineError if there is none.
    """
    found = {kind: tree[name] for kind, tree in variables.items() if name in tree}
    return found or _refuse(name, variables)


def submodules(variables: Vars, pattern: str) -> list[Vars]:
    """The variables of submodules with numbered names, in order: "Block_{}" finds Block_0, ..."""
    return split_variables(variables, pattern)[0]


def _refuse(name: str, variables: Vars) -> NoReturn:
    names = {name for tree in variables.values() for name in tree}
    raise PipelineError(f"no submodule is called {name!r}; the names are {sorted(names)}")


def names_of(pattern: str, number: int) -> tuple[str, ...]:
    """The path of a block with this number: "decoder/layers_{}"."""
    return tuple(pattern.format(number).split("/"))


def split_variables(variables: Vars, pattern: str) -> tuple[list[Vars], Vars]:
    """The variables of each numbered submodule, and those of the rest, with their metadata;
    PipelineError if there are no such submodules.
    """
    trees = flatten_dict(core.unfreeze(variables))
    own: Leaves = []
    while found := {
        path: leaf
        for path, leaf in trees.items()
        if path[1 : len(names := names_of(pattern, len(own))) + 1] == names
    }:
        cut = {(path[0], *path[len(names) + 1 :]): leaf for path, leaf in found.items()}
        own.append(unflatten_dict(cut))
        trees = {path: leaf for path, leaf in trees.items() if path not in found}
    return own or _refuse(pattern.format(0), variables), unflatten_dict(trees)
