"""The keys of a step's calls: the one place that says how they are made.

Numbers are folded into the step's key, one after the other:

    a call of `first` or `last`     function, microbatch, 0
    its share on a device           function, microbatch, 1 + the device's place on the pipe axis
    a call of a stage or a layer    STAGE, microbatch, number of the stage (of the layer)
    all calls in a microbatch       MICROBATCH, microbatch
    all calls in a sequence         SEQUENCE, sequence
    a position of a call's slice    POSITION, function, sequence, the call's number, position

Before these comes the number of the data shard, where there are several.  No key is made of one
that users get, so what they fold into theirs is never the key of another call.  Nothing here
depends on the schedule, the layout or the number of devices.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..arrays import Number
from ..table.kinds import By

# The keys that all functions share, and that of positions; those of one function have the number
# of its `By`.  The numbers are folded into keys: another number gives another model's random
# numbers.
_MICROBATCH, _SEQUENCE, _POSITION = 3, 4, 5


def folded(key: Array, *numbers: Number) -> Array:
    """The key with the numbers folded in."""
    return reduce(jax.random.fold_in, numbers, key)


def shard_key(step: Array | None, shard: Number, count: int) -> Array | None:
    """The step's key on one of `count` data shards.  Shards have different rows, so they draw
    different numbers.
    """
    return step if step is None or count == 1 else folded(step, shard)


class Keys(NamedTuple):
    """What the keys of a function in a microbatch are made of."""

    calls: Array  # the key of all its calls
    positions: Array  # the key of all positions of all its calls
    number: Number  # of the call: the stage or the layer, 0 of `first` and `last`

    @property
    def own(self) -> Array:
        """The key of the call."""
        return folded(self.calls, self.number)

    def share(self, device: Array) -> Array:
        """The key of a share of `first` or `last`."""
        return folded(self.calls, 1 + device)

    def at(self, places: Array) -> Array:
        """The keys of these positions in the sequence."""
        key = folded(self.positions, self.number)
        return jax.vmap(lambda place: folded(key, place))(places)


def keys_of(
    of: By, step: Array | None, *, stage: Number, microbatch: Number, sequence: Number
) -> dict[str, Any]:
    """The keys of a `Context`, by field; none where the step has no key."""
    if step is None:
        return {}
    number = stage if of is By.STAGE else jnp.zeros_like(stage)
    keys = Keys(folded(step, of, microbatch), folded(step, _POSITION, of, sequence), number)
    return {
        "rng": keys.own,
        "microbatch_rng": folded(step, _MICROBATCH, microbatch),
        "sequence_rng": folded(step, _SEQUENCE, sequence),
        "keys": keys,
    }
