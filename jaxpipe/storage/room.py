"""A room for the stages of a device, which hold it in turn: it has the arrays that any of them
needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arrays import Leaves, PyTree
from .chunks import again_by, arrays_of
from .packed import Packed


@dataclass(frozen=True)
class RoomLeaves:
    """The arrays of a room by name, and how each is split where it is not whole."""

    arrays: Mapping[str, Any]  # the plan, or an array of a chunk that has it

    @classmethod
    def of(cls, chunks: Sequence[PyTree]) -> RoomLeaves:
        """The arrays of any of these chunks, or trees of their plans."""
        own = list(map(arrays_of, chunks))
        every = {name: array for arrays in own for name, array in arrays.items()}
        # The leaves of chunks with other arrays are in this order too.
        names = list(every) if len(every) == len(own[0]) else sorted(every)
        return cls({name: every[name] for name in names})

    @property
    def names(self) -> list[str]:
        """The arrays, in their order."""
        return list(self.arrays)

    def parts(self, chunk: object) -> Leaves:
        """A chunk's own arrays; None for those that it does not have."""
        return list(map(arrays_of(chunk).get, self.names))


def room_faults(stages: tuple[PyTree, ...], what: str, place: str) -> list[str]:
    """Why these values, which `place` placed, cannot be in rooms."""
    known: dict[object, object] = {}
    own: list[tuple[object, object]]
    for chunk in stages:
        arrays = arrays_of(chunk).items()
        own = [(name, (leaf.shape, leaf.dtype)) for name, leaf in arrays]
        for form in chunk.layout.forms if isinstance(chunk, Packed) else ():
            stage = form.tree, *((row.path, row.entry.shape) for row in form.rows)
            own.append((stage, form.rows))
        if any(known.setdefault(key, value) != value for key, value in own):
            return [
                "the table gathers stages several times a step, so chunks must store them alike, "
                f"and {what} are placed otherwise; {again_by(place)}"
            ]
    return []
