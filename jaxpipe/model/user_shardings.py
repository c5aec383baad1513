"""Shardings in a user's functions that a pipeline refuses, and what its errors say to remove."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend import core

from ..arrays import PyTree
from ..errors import PipelineError
from ..jaxprs.equations import every_equation
from .settings import axes_of

_OTHER_MESH = "should match the mesh of sharding"
_OTHER_SHARD_MAP = "should match the mesh passed to shard_map"
# How JAX writes the axes over which an array varies.
_VARYING = r"\{V:([^}]*)\}"
_SPLIT = (
    "the pipe axis and the data axes are manual inside a pipeline's functions, and other axes are "
    "the partitioner's"
)
# What to remove from a function, by a part of JAX's message.
_ADVICE = {
    "can only refer to Auto axes": "constrains the sharding of an array by a mesh axis that is "
    "not left to the partitioner: inside a pipeline's functions the pipe axis and data_axes are "
    "manual (each device has its own stage and rows), so a PartitionSpec names others only, by "
    "itself or in a NamedSharding of `pipe.mesh`. Remove the pipe axis and the data axes from it; "
    "without other axes, remove the call",
    _OTHER_MESH: f"constrains the sharding of an array on a mesh of its own: {_SPLIT}. Give "
    "with_sharding_constraint a PartitionSpec without a mesh, and remove the pipe axis and the "
    "data axes from it",
    _OTHER_SHARD_MAP: "calls jax.shard_map with a mesh of its own, or over a manual axis: "
    f"{_SPLIT}. Remove mesh=, name only the partitioner's axes in axis_names= and in the specs, "
    "and call the function without shard_map where it needs the data axes alone",
    "cannot contain axis names that are of type Auto or Manual": "gives an array an explicit "
    f"sharding: {_SPLIT}. Remove jax.reshard and out_sharding=; for an axis of the partitioner "
    "write jax.lax.with_sharding_constraint(x, PartitionSpec(...))",
    "Going from `Manual` AxisType": "changes the types of mesh axes: "
    f"{_SPLIT}. Remove jax.sharding.auto_axes and explicit_axes, and call the function inside "
    "directly",
}


def refusal(name: str, error: Exception) -> PipelineError | None:
    """What to remove from the function of this name, where JAX refused a sharding in it."""
    text = str(error)
    advice = next((advice for part, advice in _ADVICE.items() if part in text), None)
    if advice is None and _manual() & {*re.findall(r"\w+", " ".join(re.findall(_VARYING, text)))}:
        advice = _ADVICE[_OTHER_SHARD_MAP]
    if advice is None:
        return None
    return PipelineError(f"`{name}` {advice} ({text.splitlines()[0]})")


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """JAX's errors about shardings in the function of this name as PipelineErrors."""
    try:
        yield
    except PipelineError:
        raise
    except (TypeError, ValueError) as error:
        if refused := refusal(name, error):
            raise refused from error
        raise


def check_returned(name: str, found: PyTree) -> None:
    """PipelineError where a function returns an array of another mesh, or one that varies over a
    manual axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    for leaf in jax.tree.leaves(found) if mesh.manual_axes else ():
        aval = getattr(leaf, "aval", None)
        own = getattr(aval, "sharding", None)
        if varying := getattr(getattr(aval, "manual_axis_type", None), "varying", ()):
            raise PipelineError(
                f"`{name}` {_ADVICE[_OTHER_SHARD_MAP]} (it returns an array that varies over "
                f"{', '.join(sorted(varying))})"
            )
        if own is not None and not own.mesh.empty and own.mesh != mesh:
            raise PipelineError(
                f"`{name}` {_ADVICE[_OTHER_MESH]} (it returns an array on {own.mesh})"
            )


def check_equations(name: str, jaxprs: Sequence[core.Jaxpr]) -> None:
    """PipelineError where an equation names a manual axis in a sharding or in a shard_map."""
    for primitive, advice in (
        ("sharding_constraint", _OTHER_MESH),
        ("shard_map", _OTHER_SHARD_MAP),
    ):
        equations = (eqn for jaxpr in jaxprs for eqn in every_equation(jaxpr))
        named = {
            axis
            for eqn in equations
            if eqn.primitive.name == primitive
            for axis in _manual_names(eqn.params)
        }
        if named:
            raise PipelineError(
                f"`{name}` {_ADVICE[advice]} (it names {', '.join(map(repr, sorted(named)))})"
            )


def _manual_names(params: dict[str, Any]) -> set[Any]:
    """The manual mesh axes that a constraint or a shard_map names."""
    if "sharding" in params:
        spec = getattr(params["sharding"], "spec", None)
        return axes_of([spec]) & set(params["context_mesh"].manual_axes)
    named = axes_of([*params["in_specs"], *params["out_specs"]])
    return named & set(params["mesh"].manual_axes) - set(params["newly_manual_axes"])


def _manual() -> set[Any]:
    """The axes that are manual here."""
    return set(jax.sharding.get_abstract_mesh().manual_axes)
