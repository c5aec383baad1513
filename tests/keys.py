"""The keys of a step's calls as `jaxpipe.model.keys` promises them, written out."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FIRST, STAGE, LAST, MICROBATCH, SEQUENCE, POSITION = range(6)


def key_of(step: Any, *numbers: Any) -> Any:
    """The step's key with these numbers folded in."""
    for number in numbers:
        step = jax.random.fold_in(step, number)
    return step


class PositionKeys(NamedTuple):
    """The `keys` of a `Context`, for `position_keys`."""

    own: Any

    @classmethod
    def of(cls, step: Any, function: int, sequence: Any, number: Any) -> PositionKeys:
        """Those of a call."""
        return cls(key_of(step, POSITION, function, sequence, number))

    def at(self, places: Any) -> Any:
        """The key of each place."""
        return jnp.stack([key_of(self.own, place) for place in places])
