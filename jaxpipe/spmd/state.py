"""The state that a device carries from tick to tick: pools, sent values, gradients and losses.
Predicates carry parts of it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from ..arrays import Leaves
from ..table.effects import Place

# Leaves by the name of their place ([slots, ...] of pools); `of_chunk` names places that each chunk
# has.  "losses" [M] and "token" are arrays.  The token is False, but XLA cannot know (see `block`).
# A part of a state has some of its entries.
State: TypeAlias = dict[str, Any]

_BY_CHUNK = (Place.STAGE_GRADIENTS, Place.STAGE_STATE)


def of_chunk(place: Place, chunk: int) -> str:
    """The name of a place in a state."""
    return f"{place.value}.{chunk}" if place in _BY_CHUNK else place.value


def chunks_of(state: State, place: Place) -> list[Leaves]:
    """The leaves of each chunk in a place."""
    count = sum(name.startswith(f"{place.value}.") for name in state)
    return [state[of_chunk(place, chunk)] for chunk in range(count)]
