"""The PartitionSpecs and filters that a user gives for parameters, by path, and what is wrong with
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..errors import PipelineError

_MOST_PATHS = 20  # that a message lists


def is_spec(value: Any) -> bool:
    """A leaf of a tree of specs."""
    return value is None or isinstance(value, PartitionSpec)


def holds(prefix: str, name: str) -> bool:
    """Whether a spec at the path `prefix` is meant for the parameter `name`."""
    return prefix in ("", name) or name.startswith(prefix + "/")


def names_of(entry: Any) -> tuple[Any, ...]:
    """The mesh axes that an entry of a PartitionSpec names."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def axes_of(specs: Any) -> set[Any]:
    """The mesh axes that any of these specs names."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return {
        name
        for spec in leaves
        if isinstance(spec, PartitionSpec)
        for entry in spec
        for name in names_of(entry)
    }


@dataclass(frozen=True)
class Patterns:
    """The filter of frozen parameters that regular expressions of paths make."""

    of: tuple[re.Pattern[str], ...]

    def __call__(self, path: str, _leaf: Any) -> bool:
        """Whether one of them is found in a path."""
        return any(pattern.search(path) for pattern in self.of)

    def faults(self, paths: Sequence[str]) -> list[str]:
        """Expressions that are found in none of these paths."""
        more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
        known = ", ".join(paths[:_MOST_PATHS]) + more
        found = []
        for pattern in (
            pattern.pattern for pattern in self.of if not any(map(pattern.search, paths))
        ):
            close = get_close_matches(re.sub(r"[\\^$]", "", pattern), paths, n=2)
            hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
            found.append(
                f"frozen: {pattern!r} is found in the path of no parameter; {hint}the paths are "
                f"{known}"
            )
        return found


def frozen_filter(given: Any) -> Callable[[str, Any], bool] | None:
    """The filter of frozen parameters, from a function or from regular expressions of paths."""
    if given is None:
        return None
    if callable(given):
        function: Callable[[str, Any], bool] = given
        return function
    patterns = (
        [given]
        if isinstance(given, str)
        else list(given)
        if isinstance(given, Sequence)
        else [given]
    )
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise PipelineError(
            "frozen must be a function of a path and a shape, or regular expressions of paths; "
            f"got {given!r}"
        )
    try:
        return Patterns(tuple(map(re.compile, patterns)))
    except re.error as error:
        raise PipelineError(
            f"frozen: {error.pattern!r} is no regular expression ({error}); `re.escape(path)` "
            "makes one of a path"
        ) from None


def spec_faults(
    where: str,
    shape: tuple[int, ...],
    spec: Any,
    *,
    mesh: Mapping[str, int],
    axis: str,
    data_axes: Sequence[str],
    local: Sequence[str] = (),
) -> list[str]:
    """Faults of the spec of a parameter; its shape has no stage axis; `mesh`: axes and their sizes;
    `local`: data axes that specs may name.
    """
    if spec is None:
        return []
    if not isinstance(spec, PartitionSpec):
        return [f"{where}: specs must hold PartitionSpecs or None; got {spec!r}"]
    if len(spec) > len(shape):
        return [
            f"{where}: {spec} has {len(spec)} entries for a parameter of shape {shape} (leave "
            "the stage axis out)"
        ]
    odd = [entry for entry in spec if not all(isinstance(name, str) for name in names_of(entry))]
    if odd:
        return [
            f"{where}: {spec} holds {odd[0]!r}; an entry is a mesh axis, a tuple of them, or None"
        ]
    faults = []
    named = [name for entry in spec for name in names_of(entry)]
    for name in dict.fromkeys(named):
        head = f"{where}: {spec} names"
        if name not in mesh:
            faults.append(
                f"{head} an axis {name!r} that the mesh does not have; its axes are {dict(mesh)}"
            )
        elif name == axis:
            faults.append(
                f"{head} the pipe axis {name!r}, over which stages are spread anyway; "
                "Sharding(outer=True) splits what is not a stage"
            )
        elif name in data_axes and name not in local:
            faults.append(
                f"{head} the data axis {name!r}; fsdp={name!r} splits parameters over it, and "
                f"local={name!r} gives each device's functions their own part"
            )
        if named.count(name) > 1:
            faults.append(f"{head} {name!r} more than once")
    for dim, entry in enumerate(spec):
        if len(names_of(entry)) > 1 and any(name in local for name in names_of(entry)):
            faults.append(
                f"{where}: {spec} splits dim {dim} over {entry!r}, and functions are given local "
                "parts along some of these; name one axis of local= by itself"
            )
        size = math.prod(mesh.get(name, 1) for name in names_of(entry))
        if shape[dim] % size:
            faults.append(
                f"{where}: dim {dim} of shape {shape} does not divide over {entry!r}, which has "
                f"{size} devices"
            )
    return faults
