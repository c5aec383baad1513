"""Functions that share what JAX has compiled for one of an equal key: a pipeline built a second
time does not compile again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakValueDictionary

import jax

_HELD: WeakValueDictionary[Any, Callable[..., Any]] = WeakValueDictionary()


def jit_same(key: Any, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` of the function, or what this returned for an earlier one of an equal key and equal
    options, if somebody holds it.
    """
    whole = (key, key_of(options))
    found = _HELD.get(whole)
    if found is None:
        found = _HELD[whole] = jax.jit(function, **options)
    return found


def key_of(settings: Mapping[str, Any]) -> Any:
    """Settings as a key: equal for equal settings, functions being equal only to themselves; unique
    where one cannot be compared.
    """
    key = tuple((name, _hashable(value)) for name, value in sorted(settings.items()))
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(
            (name, _hashable(item))
            for name, item in sorted(value.items(), key=lambda pair: str(pair[0]))
        )
    if type(value) in (list, tuple):
        return tuple(map(_hashable, value))
    if is_dataclass(value) and not isinstance(value, type):
        try:
            hash(value)
        except TypeError:  # it holds a list or a mapping
            return type(value), _hashable({f.name: getattr(value, f.name) for f in fields(value)})
    return value
