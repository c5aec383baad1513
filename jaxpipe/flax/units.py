"""flax modules that run together, and the user's function of them, as a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from flax import linen as nn, nnx

from ..arrays import Leaves, PyTree, Rng, by_path
from ..errors import PipelineError
from ..model.calls import Function, UserFunction
from ..model.functions import Extra

# What runs together: a module, or a tuple or dict of them.
Modules: TypeAlias = "nnx.Module | nn.Module | tuple[Modules, ...] | dict[str, Modules]"
# Variables of a module in nested dicts.
Vars: TypeAlias = Mapping[str, PyTree]

# flax's collection of leaves whose gradient is their next value: the scales of FP8.  Here it is one
# of the parameters.
REPLACED = "_overwrite_with_gradient"
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

    modules: Modules | None
    call: UserFunction
    variables: Vars | tuple[Vars, ...] | None = None


class UnitCall(NamedTuple):
    """A call of a unit, besides its variables."""

    arguments: tuple[PyTree, ...]
    key: Rng
    keywords: Extra
    training: bool


_ADVICE = (
    "Take the sow() out, or what was sown out of the variables: with nnx.capture where an nnx "
    "module is called.  A block may return a loss of it: stage_loss=True, call=function that "
    "returns (x, loss); linen's reads block.variables[...].  Leave out likewise what was sown "
    "before (nnx.pop(module, nnx.Intermediate)), or what init() sowed into the variables"
)


def plain_call(block: UserFunction, *arguments: object) -> object:
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
        frozen: the paths of parameters that are not trained.
        replaced: the paths of those whose gradient is their next value.
    """

    name: str
    modules: Modules | None
    call: UserFunction
    takes: tuple[str, ...] = ("block", "x")
    params: Vars
    state: Vars
    specs: PyTree
    random: bool = False
    frozen: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()

    def settings(self) -> Mapping[str, str]:
        """The class, attributes and shapes of variables, as text by name.  Blocks in which they are
        equal run the same code.
        """
        raise NotImplementedError

    def build(self, params: Vars, state: Vars, key: Rng, *, training: bool) -> Modules:
        """The modules with these variables in them; they draw from `key`."""
        raise NotImplementedError

    def variables(self, modules: Modules, state: Vars) -> Vars:
        """The variables of modules that are no parameters, after a call; before it they were
        `state`.
        """
        raise NotImplementedError

    def run(self, params: Vars, state: Vars, call: UnitCall) -> tuple[PyTree, Vars]:
        """The result of a call, and the state after it; PipelineError where the call wrote
        variables that are not kept.
        """
        modules = self.build(params, state, call.key, training=call.training)
        out = self.call(modules, *call.arguments, **call.keywords)
        after = self.variables(modules, state)
        old, new = by_path(state), by_path(after)
        if odd := sorted(set(old) ^ set(new)):
            raise PipelineError(
                f"{self.name} writes variables in a call, as sow() does, which a pipeline does not "
                f"keep: {', '.join(odd)}. {_ADVICE}"
            )
        changed = [path for path in old if old[path] is not new[path]]
        if self.constant and changed:
            raise PipelineError(
                f"{self.name} changes its variables {changed}; only blocks may keep state (batch "
                "statistics): put it into a block"
            )
        return out, after

    @property
    def constant(self) -> bool:
        """Whether the unit is no block: then no call changes its variables."""
        return self.takes[0] != "block"

    @cached_property
    def function(self) -> Function:
        """The user's function, with the keywords of a pipeline that it takes."""
        return Function.of(self.call, self.name, OFFERED, takes=self.takes)

    @property
    def keywords(self) -> frozenset[str]:
        """The keywords of a pipeline that a function of the unit takes."""
        return self.function.wants | {"training"} | ({"ctx"} if self.random else set())


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
        if not isinstance(end, End):
            kind, takes = type(end).__name__, ", ".join(("module", *TAKES[name]))
            module = "None" if kind == "function" else "module"
            faults.append(
                f"{name}= is a {kind}; write {name}=End({module}, lambda {takes}: ...), the module "
                "and how it is called"
            )
    PipelineError.refuse("", faults)
    units = {name: unit(f"`{name}`", end) for name, end in ends.items()}
    return {n: replace(own, takes=("modules", *TAKES[n])) for n, own in units.items()}


def listed(blocks: Iterable[object], module: type, kind: str) -> Leaves:
    """The blocks; PipelineError unless they are modules."""
    modules = list(blocks)
    if not modules:
        raise PipelineError(
            f"there are no blocks; give a list of {kind} modules, or one whose variables have a "
            "leading axis of blocks"
        )
    odd = [i for i, block in enumerate(modules) if not isinstance(block, module)]
    if odd:
        found = ", ".join(f"block {i} is {type(modules[i]).__name__}" for i in odd)
        raise PipelineError(
            f"blocks must be {kind} modules, but {found}; a plain function goes into call=, or "
            "into a module"
        )
    return modules
