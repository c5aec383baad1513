"""What a pass promises: from any valid input, an output in which nothing is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Contract(Generic[In, Out]):
    """A pass and its promise: `faults(before, after)` is empty for every valid `before` and `after
    = run(before)`.

    The promise is checked from the two alone, without the pass.
    """

    name: str
    run: Callable[[In], Out]
    faults: Callable[[In, Out], tuple[str, ...]]

    def checked(self, before: In) -> Out:
        """Run the pass; an assertion where it breaks its promise."""
        after = self.run(before)
        found = self.faults(before, after)
        assert not found, f"{self.name}: " + "; ".join(found)
        return after

    def __str__(self) -> str:
        return self.name
