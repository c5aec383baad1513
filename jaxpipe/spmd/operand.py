"""The code of a kind of stage, or of `first` or `last`, with its parameters and the accumulators of
their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec

from ..arrays import Flag, Leaves
from ..jaxprs.entry import Destination, Piece, StackRow, Total
from ..stage.code import StageCode, run
from ..storage.plan import LeafPlan
from ..storage.table import Home, Places
from ..table.effects import Place

# Where the gradients of the parameters of `first`, `last` and of the shared ones are summed.
GRADIENTS_OF = {
    "first": Place.FIRST_GRADIENTS,
    "last": Place.LAST_GRADIENTS,
    "shared": Place.SHARED_GRADIENTS,
}


@dataclass(frozen=True)
class Gradients:
    """The accumulators of the parameters of a function that have a gradient.

    Attributes:
        places: where they are among the leaves of their place in the state.
        plans: of these parameters.
        splits: whether they have the layout of the step's results (see `Total`).
    """

    places: Places
    plans: tuple[LeafPlan, ...]
    splits: bool

    @classmethod
    def of(
        cls, plans: Sequence[LeafPlan], places: Iterable[Home], *, splits: bool = False
    ) -> Gradients:
        """Those of the leaves at these places that are trained."""
        own = tuple(place for place in places if not plans[place.at].frozen)
        return cls(own, tuple(plans[place.at] for place in own), splits)

    def targets(self, held: Leaves) -> list[Destination | None]:
        """The accumulators; None for leaves that are replaced, whose values are not always
        added.
        """

        def target(place: Home, plan: LeafPlan) -> Destination | None:
            if plan.replaced is not None:
                return None
            kept = _in_place(place, held[place.at])
            if isinstance(kept, Piece | StackRow):
                return kept
            own = plan.of_layer if isinstance(held[place.at], tuple) else plan
            return Total(kept, PartitionSpec(*own.auto) if self.splits else None)

        return list(map(target, self.places, self.plans))

    def after(self, held: Leaves, totals: Leaves, *, is_last: Flag) -> Leaves:
        """The leaves with these accumulators in their places; of leaves that are replaced, these
        are the values of a microbatch, `is_last` of the last one.
        """
        after = list(held)
        for place, total, plan in zip(self.places, totals, self.plans, strict=True):
            old = after[place.at]
            if plan.replaced is not None:
                total = place.put(old, plan.rule.add(place.take(old), total, is_last))
            elif isinstance(old, tuple):
                total = tuple((dict(enumerate(old)) | {place.row: total}).values())
            after[place.at] = total
        return after


@dataclass(frozen=True)
class Operand:
    """The code of a kind of stage in a chunk, or of `first` or `last`, with its parameters on this
    device, and the places of its state and gradients.
    """

    code: StageCode
    # its parameters, then the shared ones; those inside a longer array as `Piece`s, and layers of a
    # stack as `StackRow`s, since every device would otherwise hold copies of the parameters
    params: Leaves
    once: Leaves  # what was hoisted
    gradients: Mapping[Place, Gradients]
    state_places: Places = ()
    places: Places = ()  # of its own parameters

    def filled(self, leaves: Leaves, shared: Leaves, once: Leaves | None = None) -> Operand:
        """The operand with its parameters, which are in these leaves, and what was hoisted."""
        params = [_in_place(place, leaves[place.at]) for place in self.places] + shared
        if once is None:
            whole = [p.load() if isinstance(p, Piece | StackRow) else p for p in params]
            once = run(self.code.hoist, *self.code.consts, *whole)
        return replace(self, params=params, once=once)


def _in_place(place: Home, leaf: Any) -> Any:
    """What is in a place of an array: a value, or a part of it that is not read yet.  Layers of a
    stack may be apart.
    """
    if isinstance(leaf, tuple) and place.row is not None:
        return leaf[place.row]
    if place.flat:
        return Piece(leaf, place.start, place.entry)
    return leaf if place.row is None else StackRow(leaf, place.row)
