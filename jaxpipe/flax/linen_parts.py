"""linen modules and their variables: what models by stages and by layers have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeAlias

import jax
from flax import errors
from flax import linen as nn
from flax.core import DenyList

from ..arrays import PyTree
from ..errors import PipelineError
from .common import End, key_of, leaf_paths, mesh_specs, no_key, wanted, with_keywords, with_loss

Variables: TypeAlias = Mapping[str, PyTree]  # {"params": ..., "batch_stats": ...}
# Collections that a call never writes: `Module.perturb` adds nothing where it may not.
FIXED = ("params", "perturbations")


def unboxed_ends(
    first: End | None,
    last: End | None,
    shared: tuple[Any, Any] | None,
    rules: Mapping[str, Any] | None,
) -> tuple[End | None, End | None, tuple[Any, Any] | None, dict[str, PyTree]]:
    """What comes before and after the blocks without sharding metadata, and that metadata
    as specs.
    """
    specs: dict[str, PyTree] = {}
    for key, end in (("first", first), ("last", last)):
        if end is not None:
            specs[key] = mesh_specs(
                nn.get_partition_spec(params_of(end.modules, end.variables)), rules
            )
    if shared is not None:
        specs["shared"] = mesh_specs(nn.get_partition_spec(params_of(*shared)), rules)
        shared = (shared[0], nn.meta.unbox(shared[1]))
    first, last = (
        end and replace(end, variables=nn.meta.unbox(end.variables)) for end in (first, last)
    )
    return first, last, shared, specs


def applied(
    module: nn.Module,
    params: PyTree,
    rest: Variables,
    x: PyTree,
    *,
    call: Callable[..., Any] | None,
    rngs: dict[str, Any],
    keywords: dict[str, Any],
    training: bool,
    stage_loss: bool,
) -> tuple[PyTree, Any, Variables]:
    """A block's x, its loss (None without `stage_loss`), and its other collections after the call.

    New collections may be written, so that what is sown is seen: it would be lost.
    """
    mutable = DenyList([*FIXED, *([] if training else rest)])
    run = partial(
        module.apply,
        {"params": params, **rest},
        x,
        method=call,
        rngs=rngs,
        mutable=mutable,
        **keywords,
    )
    out, new = drawing("a block", run)
    made = leaf_paths(new) - leaf_paths(rest)
    grown = [path for path in made if path.split("/")[0] in rest]
    if grown or (made and not (stage_loss and call is not None)):
        raise PipelineError(
            "a block writes variables in a call, as sow() does, which a pipeline does not keep: "
            f"{', '.join(sorted(grown or made))}. Take the sow() out, or return a loss of them: "
            "stage_loss=True, call=function that returns (x, loss made of block.variables[...]). "
            "(Leave out likewise what init() sowed into the variables that are given)"
        )
    return *with_loss("a block", out, stage_loss=stage_loss), {
        **rest,
        **{name: new[name] for name in new if name in rest},
    }


def end_function(
    end: End,
    name: str,
    shared: tuple[Any, Any] | None,
    rngs: Sequence[str],
    positional: Sequence[str],
    index: int,
) -> Callable[..., Any]:
    """`first` or `last`; its variables that are no parameters are constants."""
    wants = wanted(end.call)

    def function(params: PyTree, *arguments: Any, **given: Any) -> Any:
        key = key_of(given.get("ctx"), index) if rngs else None
        modules = bound(end.modules, end.variables, params, streams(rngs, key, 0))
        before = leaf_paths([module.variables for module in jax.tree.leaves(modules)])
        try:
            out = drawing(
                f"`{name}`",
                lambda: end.call(modules, *arguments, **given_keywords(shared, wants, given)),
            )
        except errors.ModifyScopeVariableError as error:
            raise PipelineError(
                f"`{name}` changes its variables; only blocks may keep state (batch statistics): "
                f"{error}"
            ) from error
        made = leaf_paths([module.variables for module in jax.tree.leaves(modules)]) - before
        if made:
            names = ", ".join(sorted(path.split("/", 1)[1] for path in made))
            raise PipelineError(
                f"`{name}` writes variables that a pipeline does not keep, as sow() does: "
                f"{names}; return them instead"
            )
        return out

    return with_keywords(
        function,
        ("params", *positional),
        (wants - {"microbatch"}) | ({"ctx"} if rngs else set()),
        name,
    )


def given_keywords(
    shared: tuple[Any, Any] | None, wants: frozenset[str], given: dict[str, Any]
) -> dict[str, Any]:
    """What the user's function is given by keyword; shared parameters as bound modules."""
    found = {name: given[name] for name in wants}
    if "shared" in found and shared is not None:
        found["shared"] = bound(*shared, found["shared"], {})
    return found


def drawing(what: str, call: Callable[[], Any]) -> Any:
    """The call; where it draws without a key, the error says so."""
    try:
        return call()
    except errors.InvalidRngError as error:
        raise no_key(what, error) from error


def streams(names: Sequence[str], key: Any, block: int) -> dict[str, Any]:
    """A key for each collection of random numbers of a block."""
    if key is None:
        return {}
    return {name: jax.random.fold_in(key, block * len(names) + i) for i, name in enumerate(names)}


def bound(modules: Any, variables: Any, params: PyTree, rngs: dict[str, Any]) -> Any:
    """Modules, one or a tuple or dict of them, with parameters in them."""
    if isinstance(modules, nn.Module):
        given = {**(variables or {}), "params": params}
        return modules.bind(given, rngs=rngs, mutable=DenyList([*FIXED, *given]))
    if isinstance(modules, Mapping):
        return {name: bound(m, variables[name], params[name], rngs) for name, m in modules.items()}
    if modules is None:
        return None
    return tuple(bound(m, v, p, rngs) for m, v, p in zip(modules, variables, params, strict=True))


def params_of(modules: Any, variables: Any) -> PyTree:
    """The parameters among the variables of modules."""
    if modules is None:
        return {}
    if isinstance(modules, nn.Module):
        return (variables or {}).get("params", {})
    if isinstance(modules, Mapping):
        return {name: params_of(m, variables[name]) for name, m in modules.items()}
    return tuple(params_of(m, v) for m, v in zip(modules, variables, strict=True))


def apart(variables: Variables) -> tuple[PyTree, PyTree]:
    """Parameters, and the other collections."""
    return variables.get("params", {}), {
        name: tree for name, tree in variables.items() if name != "params"
    }


def kind_of(module: nn.Module, variables: Variables) -> dict[str, str]:
    """What must be equal for two blocks to run the same code: class, settings, and the variables'
    shapes, by name.
    """
    settings = {
        f.name: repr(getattr(module, f.name, None))
        for f in fields(module)
        if f.name not in ("parent", "name")
    }
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }
    return {"the block": type(module).__name__, **settings, **shapes}


def difference(one: dict[str, str], other: dict[str, str]) -> str:
    """The first setting or shape in which two blocks differ."""
    name = next(n for n in [*one, *other] if one.get(n) != other.get(n))
    return (
        f"{name} is {one.get(name, 'not there')} in one and {other.get(name, 'not there')} in "
        "the other"
    )
