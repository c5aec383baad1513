"""nnx modules as units, and pipelines of their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.filterlib import Filter

from ..arrays import Params, Rng, is_key
from ..errors import PipelineError
from ..layouts.layout import Layout
from ..model.calls import UserFunction
from ..model.settings import SpecEntry
from .adapter import BlockSettings, FlaxModel, adapt
from .units import REPLACED, End, Modules, Unit, Vars, end_units, listed, plain_call


@dataclass(frozen=True)
class NnxModel(FlaxModel):
    """A model of nnx modules as a pipeline takes it (see `FlaxModel`)."""

    def to_nnx(self, params: Params, state: Vars | None = None) -> None:
        """Write canonical parameters, and state, into the variables of the modules that the model
        was made of.
        """
        rows = self._by_block(params["stages"], {} if state is None else state)
        rows += [(params[key],) for key in self._ends]
        for unit, trees in zip((*self._blocks, *self._ends.values()), rows, strict=True):
            variables = nnx.state(unit.modules)
            for tree in trees:
                nnx.replace_by_pure_dict(variables, tree)
            nnx.update(unit.modules, variables)


@dataclass(frozen=True, kw_only=True)
class NnxUnit(Unit):
    """Modules as a graph and their variables: the parameters (those that the filter `trainable`
    takes), the streams of random numbers, and the others.
    """

    trainable: Filter
    graph: nnx.GraphDef
    streams: nnx.State
    stack: bool  # variables have a leading axis of blocks

    def build(self, params: Vars, state: Vars, key: Rng, *, training: bool) -> Modules:
        """The modules; every stream of random numbers begins again from the key, and without one
        drawing fails.
        """
        old, structure = jax.tree.flatten(self.streams)
        new = [self._stream(i, leaf, key) for i, leaf in enumerate(old)]
        streams = jax.tree.unflatten(structure, new)
        modules = nnx.merge(self.graph, params, streams, state)
        if not training:
            for _, module in nnx.iter_modules(modules):
                module.eval()
        return modules

    def _stream(self, number: int, old: jax.Array, key: Rng) -> jax.Array:
        shape = old.shape[1:] if self.stack else old.shape
        if not is_key(old):
            return jnp.zeros(shape, old.dtype)
        if key is None:
            return jnp.zeros((), jnp.uint32)  # JAX refuses to draw from it
        own = jax.random.fold_in(key, number)
        return jax.random.split(own, shape) if shape else own

    def variables(self, modules: Modules, state: Vars) -> Vars:
        """All that are neither parameters nor streams of random numbers."""
        others = nnx.split(modules, self.trainable, nnx.RngState, ...)[3]
        return dict(nnx.to_pure_dict(others))

    def settings(self) -> Mapping[str, str]:
        """Arrays by shape, modules by class, and static attributes as they are.  What is shared
        within the block has one path.
        """
        texts = {}
        for path, value in nnx.iter_graph(self.modules):
            is_node = nnx.graph.is_node(value)
            text = repr(type(value) if is_node else value)
            # A dtype has a shape, a module and a stream may have both, and so have numpy's types.
            is_array = not is_node and hasattr(value, "shape") and hasattr(value, "dtype")
            if is_array and not isinstance(value, type):
                text = f"{type(value).__name__} {value.dtype}{list(value.shape)}"
            if "_pytree__" not in str(path[-1:]):
                texts[".".join(map(str, path)) or "the block"] = text
        return texts


def nnx_unit(
    name: str, end: End, *, trainable: Filter, frozen: Filter, stack: bool = False
) -> NnxUnit:
    """The unit of modules; the filters say which variables are parameters, and which of these are
    not trained.
    """
    trainable = nnx.Any(trainable, _is_replaced)
    graph, own, streams, others = nnx.split(end.modules, trainable, nnx.RngState, ...)
    flat = list(nnx.to_flat_state(own))
    is_frozen = nnx.filterlib.to_predicate(False if frozen is None else frozen)
    return NnxUnit(
        name=name,
        modules=end.modules,
        call=end.call,
        params=nnx.to_pure_dict(own),
        state=nnx.to_pure_dict(others),
        specs=nnx.to_pure_dict(nnx.get_partition_spec(own)),
        random=bool(jax.tree.leaves(streams)),
        frozen=_paths((p, v) for p, v in flat if is_frozen(p, v) and not _is_replaced(p, v)),
        replaced=_paths((p, v) for p, v in flat if _is_replaced(p, v)),
        trainable=trainable,
        graph=graph,
        streams=streams,
        stack=stack,
    )


def _is_replaced(_path: object, variable: object) -> bool:
    """Whether it is a variable of `REPLACED`: `nnx.bridge` names classes after collections."""
    return type(variable).__name__ == REPLACED


def _paths(variables: Iterable[tuple[Iterable[object], object]]) -> frozenset[str]:
    """The paths of these variables."""
    return frozenset("/".join(map(str, path)) for path, _ in variables)


def from_nnx(
    blocks: nnx.Module | Iterable[nnx.Module],
    *,
    num_stages: int | None = None,
    layout: Layout | str | None = None,
    first: End | None = None,
    last: End | None = None,
    shared: Modules | None = None,
    call: UserFunction | None = None,
    trainable: Filter = nnx.Param,
    frozen: Filter = None,
    rules: Mapping[str, SpecEntry] | None = None,
    stage_loss: bool = False,
    ignore: Sequence[str] = (),
    **contract: object,
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
        first, last: the modules before and after the blocks.
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
        contract: `loss`, `has_metrics` and `replaced`, as `jaxpipe.Model` takes them.  Leaves of
            flax's collection `_overwrite_with_gradient` are replaced by `Replaced.MAX`.

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
    form = BlockSettings(num_stages, layout, rules or {}, stage_loss, ignore, contract)
    unit = partial(nnx_unit, trainable=trainable, frozen=frozen)
    common = None if shared is None else End(shared, plain_call)
    ends = end_units(first, last, common, unit)
    if isinstance(blocks, nnx.Sequential):
        blocks = blocks.layers
    stack = isinstance(blocks, nnx.Module) and not isinstance(blocks, nnx.List)
    modules = listed([blocks] if stack else blocks, nnx.Module, "nnx")
    check_distinct(modules, ends)
    every = [End(module, call or plain_call) for module in modules]
    units = [unit("a block", end, stack=stack) for end in every]
    return adapt(NnxModel, units, ends=ends, form=form, stack=stack)


def check_distinct(blocks: Sequence[nnx.Module], ends: Mapping[str, Unit]) -> None:
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
