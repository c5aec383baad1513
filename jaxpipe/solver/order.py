"""A cap on activations as clauses over the order of a device's actions: whether so many W come
before an F.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..table.action import Action


def after(
    model: Any,
    start: Mapping[Action, Any],
    action: Action,
    releases: Sequence[Action],
    count: int,
    length: Callable[[Action], int],
) -> None:
    """An action comes after so many releases, which are in order themselves."""
    if count > 0:
        assert count <= len(releases), "the table breaks the cap"
        last = releases[count - 1]
        model.add(start[action] >= start[last] + length(last))


class Order:
    """Which of two actions of a device comes first, as variables that are made when they are asked
    for.
    """

    def __init__(
        self, model: Any, start: Mapping[Action, Any], length: Callable[[Action], int]
    ) -> None:
        self._model, self._start, self._length = model, start, length
        self._known: dict[tuple[Action, Action], Any] = {}

    def before(self, one: Action, other: Action) -> Any:
        """Whether `one` ends before `other` starts; if not, it starts after its end."""
        found = self._known.get((one, other))
        if found is None:
            found = self._model.new_bool_var("")
            self._model.add(
                self._start[other] >= self._start[one] + self._length(one)
            ).only_enforce_if(found)
            self._model.add(
                self._start[one] >= self._start[other] + self._length(other)
            ).only_enforce_if(~found)
            self._known[one, other], self._known[other, one] = found, ~found
        return found

    def two(
        self,
        action: Action,
        begins: Sequence[Action],
        mine: Sequence[Action],
        theirs: Sequence[Action],
        live: int,
    ) -> None:
        """The cap for an F of one of a device's two stages: if n more F come before it, so must n
        more releases, of either stage.
        """
        for passed in range(len(begins) + 1):
            unless = [~self.before(begins[passed - 1], action)] if passed else []
            for late in range(live + passed):
                # If neither has released more than this, fewer than live + passed are released.
                either = [mine[late]] if late < len(mine) else []
                rest = live + passed - 1 - late
                either += [theirs[rest]] if rest < len(theirs) else []
                self._model.add_bool_or([*unless, *(self.before(a, action) for a in either)])
