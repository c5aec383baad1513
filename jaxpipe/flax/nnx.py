"""nnx modules in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..arrays import Params, PyTree, by_path
from ..errors import PipelineError
from ..layouts.layout import Layout
from .adapter import FlaxModel, Form, adapt
from .common import End, Unit, end_units

MODES = {"deterministic": True, "use_running_average": True}  # what `nnx.Module.eval` sets


@dataclass(frozen=True)
class NnxModel(FlaxModel):
    """A model of nnx modules as a pipeline takes it (see `FlaxModel`)."""

    def to_nnx(self, params: Params, state: PyTree = None) -> None:
        """Write canonical parameters, and state, into the variables of the modules that the model
        was made of.
        """
        trees = (params["stages"], {} if state is None else state)
        if len(self._blocks) < len(self._places):
            rows = [tuple(map(self._stacks, trees))]
        else:
            rows = list(zip(*map(self._by_block, trees), strict=True))
        for block, row in zip(self._blocks, rows, strict=True):
            block.write(*row)  # type: ignore[attr-defined]
        for key, unit in self._units.items():
            unit.write(params[key], {})  # type: ignore[attr-defined]


@dataclass(frozen=True)
class NnxUnit(Unit):
    """Modules as graphs for training and for evaluation, and their variables."""

    trainable: Any
    not_trained: Any = None
    stack: bool = False  # variables have a leading axis of blocks
    constant: bool = False  # a call may not change variables

    @cached_property
    def _split(self) -> tuple[Any, Any, Any, Any]:
        """The graph, and the variables: parameters, streams of random numbers, others."""
        found: tuple[Any, Any, Any, Any] = self._splitting(self.modules)
        return found

    def _splitting(self, modules: Any) -> Any:
        return nnx.split(modules, self.trainable, nnx.RngState, ...)

    @cached_property
    def _evaluated(self) -> Any:
        """The graph for evaluation."""
        modules = nnx.merge(*self._split)
        for _, module in nnx.iter_graph(modules):
            if isinstance(module, nnx.Module):
                for name, value in MODES.items():
                    if hasattr(module, name):
                        setattr(module, name, value)
        return self._splitting(modules)[0]

    @property
    def params(self) -> PyTree:
        """The variables that `trainable` takes."""
        return nnx.to_pure_dict(self._split[1])

    @property
    def state(self) -> PyTree:
        """Variables that are neither parameters nor streams of random numbers."""
        return nnx.to_pure_dict(self._split[3])

    @property
    def specs(self) -> PyTree:
        """The metadata of `nnx.with_partitioning`."""
        return nnx.to_pure_dict(nnx.get_partition_spec(self._split[1]))

    @property
    def frozen(self) -> frozenset[str]:
        """The paths of parameters that the filter takes."""
        if self.not_trained is None:
            return frozenset()
        takes = nnx.filterlib.to_predicate(self.not_trained)
        flat = nnx.to_flat_state(self._split[1])
        return frozenset("/".join(map(str, path)) for path, leaf in flat if takes(path, leaf))

    @cached_property
    def random(self) -> bool:
        """Whether the modules hold streams of random numbers."""
        return bool(jax.tree.leaves(self._split[2]))

    def build(self, params: PyTree, state: PyTree, key: Any, *, training: bool) -> Any:
        """The modules; every stream of random numbers begins again from the key, and without one
        drawing fails.
        """
        graph, own, streams, rest = self._split
        numbered = enumerate(jax.tree.leaves(streams))
        return nnx.merge(
            graph if training else self._evaluated,
            _like(own, jax.tree.leaves(params)),
            _like(streams, [self._stream(number, old, key) for number, old in numbered]),
            _like(rest, jax.tree.leaves(state)),
        )

    def _stream(self, number: int, old: Any, key: Any) -> Any:
        shape = old.shape[1:] if self.stack else old.shape
        if not jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            return jnp.zeros(shape, old.dtype)
        own = None if key is None else jax.random.fold_in(key, number)
        return own if own is None or not shape else jax.random.split(own, shape)

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
        """A call on the modules with these variables."""
        modules = self.build(params, state, key, training=training)
        try:
            out = self.called(modules, arguments, keywords)
        except TypeError as error:
            if self.random and key is None and "NoneType" in str(error):
                raise self.no_key(error) from error
            raise
        return out, self._after(modules, state)

    def _after(self, modules: Any, before: PyTree) -> PyTree:
        """The state after a call."""
        after = nnx.to_pure_dict(self._splitting(modules)[3])
        old, new = by_path(before), by_path(after)
        if odd := sorted(set(old) ^ set(new)):
            raise PipelineError(
                f"{self.name} makes variables in a call, as sow() does, which a pipeline does not "
                f"keep: {', '.join(odd)}. Take them where the module is called, x, sown = "
                "nnx.capture(module, nnx.Intermediate)(x), and drop them or make a loss of them: "
                "blocks return it with stage_loss=True, call=function that returns (x, loss). "
                "(Take what was sown before out of the modules: nnx.pop(module, "
                "nnx.Intermediate))"
            )
        changed = [path for path in old if old[path] is not new[path]]
        if self.constant and changed:
            raise PipelineError(
                f"{self.name} changes its variables {changed}; only blocks may keep state (batch "
                "statistics): put it into a block"
            )
        return after

    def kind(self, ignore: Sequence[str] = ()) -> Any:
        """The graph with static attributes, shapes and dtypes."""
        graph, state = nnx.split(self.modules)
        if ignore:
            modules = nnx.merge(graph, state)
            for _, module in nnx.iter_graph(modules):
                for name in ignore if isinstance(module, nnx.Module) else ():
                    if hasattr(module, name):
                        setattr(module, name, None)
            graph = nnx.graphdef(modules)
        return graph, [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]

    def difference(self, other: Unit) -> str:
        """The first attribute, shape or dtype in which two blocks differ."""
        left, right = (
            {
                path: _text(value)
                for path, value in nnx.iter_graph(unit.modules)
                if "_pytree__" not in str(path[-1:])
            }
            for unit in (self, other)
        )
        for path in sorted({*left, *right}, key=str):
            if left.get(path) != right.get(path):
                name = ".".join(map(str, path)) or "the block"
                return (
                    f"{name} is {left.get(path, 'not there')} in one and "
                    f"{right.get(path, 'not there')} in the other"
                )
        return "their graphs differ (modules or variables are shared within one of them)"

    def write(self, params: PyTree, state: PyTree) -> None:
        """Set the modules' variables."""
        for like, tree in ((self._split[1], params), (self._split[3], state)):
            if leaves := jax.tree.leaves(tree):
                nnx.update(self.modules, _like(like, leaves))


def _like(state: Any, leaves: Sequence[Any]) -> Any:
    """A state of nnx with other leaves."""
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def from_nnx(
    blocks: Any,
    *,
    num_stages: int | None = None,
    layout: Layout | str | None = None,
    first: End | None = None,
    last: End | None = None,
    shared: Any = None,
    call: Callable[..., Any] | None = None,
    trainable: Any = nnx.Param,
    frozen: Any = None,
    rules: Mapping[str, Any] | None = None,
    stage_loss: bool = False,
    ignore: Sequence[str] = (),
    **contract: Any,
) -> NnxModel:
    """Make the functions and canonical parameters of a pipeline from nnx modules; the modules stay
    as they are.

    Dropout draws from the step's key (`rng=`), a key for each layer and microbatch, and from no
    stream of the modules.  Evaluation runs the modules as `Module.eval` would.  Blocks need not be
    alike: a pattern that every stage repeats (local and global attention in turn) is enough.

    Args:
        blocks: a list of modules (`nnx.List`, `nnx.Sequential`), or one module whose variables have
            a leading axis of blocks (made by `nnx.vmap`).
        num_stages: S; divides the number of blocks.
        layout: instead of num_stages, the letters of each stage, "Ett|tttL" (see `parse_layout`): E
            is `first`, L is `last`, and every other letter the next block of the list.  Stages may
            have any numbers of blocks, and letters kinds of their own.
        first, last: what comes before and after the blocks.
        shared: modules that several of these functions use (a tied embedding).  The functions take
            them as `shared` by keyword.
        call: `call(block, x) -> x`, where it is not `block(x)`; it may take microbatch, ctx, shared
            and training by keyword.
        trainable: which variables are parameters (a filter of nnx); the blocks' others are state.
        frozen: which of them are not trained (a filter of nnx, `lambda path, v: not isinstance(v,
            nnx.LoRAParam)` say); see `Model`.
        rules: where `nnx.with_partitioning` names logical axes, the mesh axis of each (or None).
        stage_loss: blocks, or `call`, return (x, loss), and the losses are added to that of the
            microbatch.  A loss that blocks sow comes so: `call` takes it with `nnx.capture`.
        ignore: names of attributes in which blocks that run the same code may differ, such as
            `layer_idx`.  Each runs with those of the first such block.
        contract: `loss` and `has_metrics`, as `jaxpipe.Model` takes them.

    Raises:
        PipelineError: blocks do not divide into stages, are unlike, or share a variable.  A step
            raises it for values that blocks sow and nobody takes.

    Example:
        >>> blocks = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(6)]
        >>> model = from_nnx(
        ...     blocks,
        ...     num_stages=2,
        ...     last=End(None, lambda _, x, microbatch: jnp.mean((x - microbatch["y"]) ** 2)),
        ... )
        >>> model.params["stages"]["kernel"].shape
        (2, 3, 4, 4)
    """
    unit = partial(NnxUnit, trainable=trainable, not_trained=frozen)
    ends = end_units(
        first, last, lambda name, end: unit(name, end.modules, end.call, constant=True)
    )
    form = Form(num_stages, layout, rules, stage_loss, ignore, contract)
    form.check("from_nnx")
    found, stack = _listed(blocks)
    if shared is not None:
        ends["shared"] = unit("`shared`", shared, None, constant=True)
    check_distinct(found, ends)
    return adapt(
        NnxModel,
        [unit("a block", block, call, stack=stack) for block in found],
        ends=ends,
        form=form,
        stack=stack,
    )


def _listed(blocks: Any) -> tuple[list[Any], bool]:
    """The blocks, and whether it is one module that holds all of them."""
    if isinstance(blocks, nnx.Sequential):
        blocks = blocks.layers
    if isinstance(blocks, nnx.Module) and not isinstance(blocks, nnx.List):
        return [blocks], True
    found = list(blocks)
    if not found:
        raise PipelineError(
            "there are no blocks; give a list of nnx modules, or one whose variables have a "
            "leading axis of blocks"
        )
    odd = [
        f"block {i} is {type(b).__name__}"
        for i, b in enumerate(found)
        if not isinstance(b, nnx.Module)
    ]
    if odd:
        raise PipelineError(
            f"blocks must be nnx modules, but {', '.join(odd)}; a plain function goes into "
            "call=, or into a module"
        )
    return found, False


def _text(value: Any) -> str:
    """A node of a graph as text: a variable by shape and dtype, a module by class, anything else as
    it is.
    """
    if isinstance(value, nnx.Variable):
        return f"{type(value).__name__} {value.dtype}{list(value.shape)}"
    return type(value).__name__ if isinstance(value, nnx.Module) else repr(value)


def check_distinct(blocks: Sequence[Any], ends: Mapping[str, Unit]) -> None:
    """PipelineError where two parts hold the same variable: it would become two parameters."""
    owners = {f"block {i}": block for i, block in enumerate(blocks)}
    owners |= {key: unit.modules for key, unit in ends.items()}
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
    PipelineError.refuse("parts share variables", faults)
