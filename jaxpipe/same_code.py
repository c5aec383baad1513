"""Functions that share what JAX has compiled for an equal one: a pipeline built a second time does not compile again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax


@dataclass(frozen=True)
class SameCode:
    """A function, equal to others of an equal key."""

    key: Any
    function: Callable[..., Any] = field(compare=False)


def jit_same(same: SameCode, **options: Any) -> Callable[..., Any]:
    """`jax.jit` of the function, which finds what was traced and compiled for an equal one."""
    return partial(jax.jit(_run, static_argnums=0, **options), same)


def key_of(settings: Mapping[str, Any]) -> Any:
    """Settings as a key: equal for equal settings, functions being equal only to themselves; unique where one cannot be compared."""
    key = tuple((name, _hashable(value)) for name, value in sorted(settings.items()))
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _hashable(item)) for name, item in sorted(value.items(), key=lambda pair: str(pair[0])))
    if type(value) in (list, tuple):
        return tuple(map(_hashable, value))
    return value


def _run(same: SameCode, *arguments: Any) -> Any:
    return same.function(*arguments)
