"""linen modules in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeAlias

import jax
from flax import core, errors
from flax import linen as nn

from ..arrays import Params, PyTree, by_path
from ..errors import PipelineError
from ..layouts.layout import Layout
from .adapter import FlaxModel, Form, adapt
from .common import End, Unit, end_units

Variables: TypeAlias = Mapping[str, PyTree]  # {"params": ..., "batch_stats": ...}
# Collections that a call never writes: `Module.perturb` adds nothing where it may not.
FIXED = ("params", "perturbations")


@dataclass(frozen=True)
class LinenModel(FlaxModel):
    """A model of linen modules as a pipeline takes it (see `FlaxModel`)."""

    def to_linen(self, params: Params, state: PyTree = None) -> Any:
        """Canonical parameters, and state, as the blocks' variables, in the form in which they were
        given: a list, or stacked.

        Parameters of first, last and shared are those of their modules already.
        """
        trees = (params["stages"], self.state if state is None else state)
        if len(self._blocks) < len(self._places):
            own, other = map(self._stacks, trees)
            return {"params": own, **other}
        rows = zip(*map(self._by_block, trees), strict=True)
        return [{"params": own, **other} for own, other in rows]


@dataclass(frozen=True)
class LinenUnit(Unit):
    """Modules with their variables, as they are: with sharding metadata.

    Modules are one, or a tuple or dict of them, with as many variables.  `constant`: they are no
    block, and no call changes their variables.
    """

    variables: Any
    rngs: tuple[str, ...] = ()
    constant: bool = False
    takes_sown: bool = False  # the call makes a loss of what is sown

    @cached_property
    def _unboxed(self) -> Any:
        return _unbox(self.variables)

    @property
    def params(self) -> PyTree:
        """The collection "params" of each module."""
        return _each(lambda _, own: own.get("params", {}), self.modules, self._unboxed)

    @property
    def state(self) -> PyTree:
        """The other collections of each module."""
        return _each(_without_params, self.modules, self._unboxed)

    @property
    def specs(self) -> PyTree:
        """The metadata of `nn.with_partitioning`."""
        boxed = _each(lambda _, own: own.get("params", {}), self.modules, self.variables)
        return nn.get_partition_spec(boxed)

    @property
    def random(self) -> bool:
        """Whether there are collections of random numbers."""
        return bool(self.rngs)

    def build(self, params: PyTree, state: PyTree, key: Any, *, training: bool) -> Any:
        """The modules bound to variables.

        New collections may be written, so that what is sown is seen: it would be lost.
        """
        names = () if key is None else self.rngs
        keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(names)}

        def bound(module: nn.Module, own: PyTree, other: PyTree) -> nn.Module:
            fixed = other if self.constant or not training else ()
            mutable = core.DenyList([*FIXED, *fixed])
            return module.bind({"params": own, **other}, rngs=keys, mutable=mutable)

        return _each(bound, self.modules, params, state)

    def run(
        self,
        params: PyTree,
        state: PyTree,
        arguments: Sequence[PyTree],
        key: Any,
        *,
        keywords: Mapping[str, Any],
        training: bool,
    ) -> tuple[Any, PyTree]:
        """A call on the bound modules."""
        modules = self.build(params, state, key, training=training)
        try:
            with nn.intercept_methods(_without_metadata):
                out = self.called(modules, arguments, keywords)
        except errors.InvalidRngError as error:
            raise self.no_key(error) from error
        except errors.ModifyScopeVariableError as error:
            if not self.constant:
                raise
            raise PipelineError(
                f"{self.name} changes its variables; only blocks may keep state (batch "
                f"statistics): {error}"
            ) from error
        after = _each(
            lambda module: _without_params(module, core.unfreeze(module.variables)), modules
        )
        return out, self._kept(state, after)

    def kind(self, ignore: Sequence[str] = ()) -> dict[str, str]:
        """The class, settings and shapes of variables, by name."""
        module = self.modules
        settings = {
            f.name: repr(getattr(module, f.name, None))
            for f in fields(module)
            if f.name not in ("parent", "name", *ignore)
        }
        shapes = {
            path: f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in by_path({"params": self.params, **self.state}).items()
        }
        return {"the block": type(module).__name__, **settings, **shapes}

    def difference(self, other: Unit) -> str:
        """The first setting or shape in which two blocks differ."""
        left, right = self.kind(), other.kind()
        name = next(n for n in [*left, *right] if left.get(n) != right.get(n))
        return (
            f"{name} is {left.get(name, 'not there')} in one and {right.get(name, 'not there')} in "
            "the other"
        )

    def _kept(self, before: PyTree, after: PyTree) -> PyTree:
        """The state after a call; PipelineError where the call wrote what is not kept."""
        new = set(by_path(after)) - set(by_path(before))
        if self.constant:
            if new:
                raise PipelineError(
                    f"{self.name} writes variables that a pipeline does not keep, as sow() does: "
                    f"{', '.join(sorted(new))}; return them instead"
                )
            return before
        grown = [path for path in new if path.split("/")[0] in before]
        if grown or (new and not self.takes_sown):
            raise PipelineError(
                f"{self.name} writes variables in a call, as sow() does, which a pipeline does not "
                f"keep: {', '.join(sorted(grown or new))}. Take the sow() out, or return a loss of "
                "them: stage_loss=True, call=function that returns (x, loss made of "
                "block.variables[...]). (Leave out likewise what init() sowed into the variables "
                "that are given)"
            )
        return {name: after[name] for name in before}


def _unbox(tree: PyTree) -> PyTree:
    """A tree without sharding metadata, whose axes no mesh in context needs to have."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return nn.meta.unbox(tree)


@dataclass(frozen=True)
class _Unboxed:
    """An initializer without sharding metadata."""

    call: Callable[..., Any]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return nn.meta.unbox(self.call(*arguments, **keywords))


def _without_metadata(
    method: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    context: Any,
) -> Any:
    """A method call in which initializers ignore sharding metadata.

    `DenseGeneral` calls its initializers in every call, for shapes alone, and would constrain the
    result by axes that the pipeline's mesh does not have.
    """
    for name in ("kernel_init", "bias_init"):
        init = getattr(context.module, name, None)
        if callable(init) and not isinstance(init, _Unboxed):
            object.__setattr__(context.module, name, _Unboxed(init))
    return method(*arguments, **keywords)


def _without_params(_: nn.Module, variables: Variables) -> dict[str, PyTree]:
    return {name: tree for name, tree in variables.items() if name != "params"}


def _each(function: Callable[..., Any], modules: Any, *trees: Any) -> Any:
    """A function of each of the modules, one or a tuple or dict of them, and its part of trees."""
    if modules is None:
        return {}
    if isinstance(modules, nn.Module):
        return function(modules, *({} if tree is None else tree for tree in trees))
    if isinstance(modules, Mapping):
        return {n: _each(function, m, *(tree[n] for tree in trees)) for n, m in modules.items()}
    return tuple(_each(function, *own) for own in zip(modules, *trees, strict=True))


def from_linen(
    blocks: nn.Module | Sequence[nn.Module],
    variables: Variables | Sequence[Variables],
    *,
    num_stages: int | None = None,
    layout: Layout | str | None = None,
    first: End | None = None,
    last: End | None = None,
    shared: tuple[Any, Any] | None = None,
    call: Callable[..., Any] | None = None,
    rngs: Sequence[str] = ("dropout",),
    rules: Mapping[str, Any] | None = None,
    stage_loss: bool = False,
    ignore: Sequence[str] = (),
    **contract: Any,
) -> LinenModel:
    """Make the functions and canonical parameters of a pipeline from linen modules and their
    variables, as they are.

    Random numbers come from the step's key (`rng=`), a key for each layer and microbatch.  Blocks
    need not be alike: a pattern that every stage repeats is enough.

    Args:
        blocks: the module of every block, or a list with each block's own.
        variables: a list with each block's variables (see `submodules`), or variables with a
            leading axis of blocks (as `nn.scan`, `nn.vmap` or a vmapped `init` make them).
        num_stages: S; divides the number of blocks.
        layout: instead of num_stages, the letters of each stage, as `from_nnx` takes them.
        first, last: what comes before and after the blocks; their functions take bound modules.
        shared: (modules, variables) that several of these functions use.  The functions take them,
            bound, as `shared` by keyword.
        call: `call(block, x) -> x`, where it is not `block(x)`; it may take training, microbatch,
            ctx and shared by keyword, as in `lambda block, x, *, training: block(x,
            train=training)`.
        rngs: the collections for which modules draw random numbers.
        rules: where `nn.with_partitioning` names logical axes, the mesh axis of each (or None).
        stage_loss: blocks, or `call`, return (x, loss), and the losses are added to that of the
            microbatch.  A loss that blocks sow comes so: `call` reads it in `block.variables`.
        ignore: names of attributes in which blocks that run the same code may differ, such as
            `layer_idx`.  Each runs with those of the first such block.
        contract: `loss`, `has_metrics` and `frozen`, as `jaxpipe.Model` takes them.

    Raises:
        PipelineError: blocks do not divide into stages, are unlike, or do not fit their variables.
            A step raises it for values that blocks sow and nobody takes.
    """
    names = tuple(rngs)
    ends = end_units(
        first,
        last,
        lambda name, end: LinenUnit(
            name, end.modules, end.call, end.variables, names, constant=True
        ),
    )
    form = Form(num_stages, layout, rules, stage_loss, ignore, contract)
    form.check("from_linen")
    modules, own, stack = _listed(blocks, variables)
    if shared is not None:
        ends["shared"] = LinenUnit("`shared`", shared[0], None, shared[1], constant=True)
    takes_sown = stage_loss and call is not None
    units = [
        LinenUnit("a block", module, call, dict(tree), names, takes_sown=takes_sown)
        for module, tree in zip(modules, own, strict=True)
    ]
    return adapt(LinenModel, units, ends=ends, form=form, stack=stack)


def submodule(variables: Variables, name: str) -> dict[str, PyTree]:
    """The variables of one submodule: {"params": {"embed": tree}} -> {"params": tree};
    PipelineError if there is none.
    """
    found = {collection: tree[name] for collection, tree in variables.items() if name in tree}
    if not found:
        raise PipelineError(
            f"no submodule is called {name!r}; the names are "
            f"{sorted({n for tree in variables.values() for n in tree})}"
        )
    return found


def submodules(variables: Variables, pattern: str) -> list[dict[str, PyTree]]:
    """The variables of submodules with numbered names, in order: "Block_{}" finds Block_0, Block_1,
    ...
    """
    names = {name for tree in variables.values() for name in tree}
    found: list[dict[str, PyTree]] = []
    while pattern.format(len(found)) in names and "{" in pattern:
        found.append(submodule(variables, pattern.format(len(found))))
    if not found:
        raise PipelineError(
            f"no submodule is called {pattern.format(0)!r}; the names are {sorted(names)}"
        )
    return found


def _listed(blocks: Any, variables: Any) -> tuple[list[nn.Module], list[Variables], bool]:
    """Modules, variables, and whether these are of all blocks at once."""
    many = not isinstance(blocks, nn.Module)
    modules = list(blocks) if many else [blocks]
    odd = sorted({type(m).__name__ for m in modules if not isinstance(m, nn.Module)})
    if odd or not modules:
        raise PipelineError(
            f"blocks must be a linen module or a list of them; got {', '.join(odd) or 'none'}"
        )
    if isinstance(variables, Mapping):
        if many:
            raise PipelineError(
                "variables with a leading axis of blocks are of one module; give that module, or "
                "a list of variables"
            )
        return modules, [variables], True
    found = list(variables)
    if many and len(found) != len(modules):
        raise PipelineError(
            f"there are {len(modules)} blocks but variables of {len(found)}; give each block's "
            "own, in order"
        )
    return (modules if many else modules * len(found)), found, False
