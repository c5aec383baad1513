"""Values that flow between stages: a tensor, or a dict, tuple or list of values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from .errors import TorchRefError


def leaves(value: Any) -> list[Any]:
    """The leaves of a value, dicts in key order."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, Tensor):
        return [value]
    raise TorchRefError(
        f"a stage's value holds a {type(value).__name__}; use tensors, and dicts, tuples and "
        "lists of them"
    )


def rebuild(like: Any, new: Iterable[Any]) -> Any:
    """A value of the same form with other leaves."""
    return _rebuild(like, iter(new))


def _rebuild(like: Any, new: Iterator[Any]) -> Any:
    if isinstance(like, dict):
        return {key: _rebuild(like[key], new) for key in sorted(like)}
    if isinstance(like, tuple | list):
        return type(like)(_rebuild(item, new) for item in like)
    return next(new)
