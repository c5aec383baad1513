"""What a device carries from tick to tick: pools, what is sent, gradients, losses; parts of it are
carried through predicates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import jax

from ..arrays import Flag, Leaves

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """Accumulators, as leaves of what they are gradients of."""

    chunks: tuple[Leaves | None, ...] = ()  # by chunk of the device
    first: Leaves | None = None
    last: Leaves | None = None
    shared: Leaves | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """A device's state, or a part of it: what is None is not in the part.  Pools have leaves
    [slots, ...].
    """

    x: Leaves | None = None
    residual_input: Leaves | None = None
    residual_weight: Leaves | None = None
    cotangent: Leaves | None = None
    stash: Leaves | None = None
    first: Leaves | None = None
    last: Leaves | None = None
    share: Leaves | None = None
    host: Leaves | None = None  # in the host's memory, packed
    # the last output of a stage, for the exchange at the end of the tick
    sent_x: Leaves | None = None
    sent_dx: Leaves | None = None
    gradients: Gradients | None = None
    # by chunk: what the stages themselves hand from microbatch to microbatch
    stage_state: tuple[Leaves | None, ...] = ()
    losses: Any = None  # [M]
    aux: Leaves | None = None  # [M, ...]
    token: Flag | None = None  # False, but XLA cannot know: see `tick`

    def updated(self, part: State) -> State:
        """The state with what is in the part replaced."""
        return _updated(self, part)

    def like(self, part: State) -> State:
        """As much of this state as is in the part."""
        return _like(self, part)


def chunk_part(leaves: Leaves, chunk: int, count: int) -> tuple[Leaves | None, ...]:
    """A tuple by chunk in which only one is there."""
    return tuple(leaves if v == chunk else None for v in range(count))


def given(value: T | None) -> T:
    """A part of the state that must be there."""
    assert value is not None
    return value


def part_names(part: Any, before: str = "") -> list[str]:
    """The names of what is in a part, for messages."""
    if part is None:
        return []
    if is_dataclass(part):
        return [
            name
            for f in fields(part)
            for name in part_names(getattr(part, f.name), f"{before}.{f.name}".strip("."))
        ]
    if isinstance(part, tuple):
        return [name for i, item in enumerate(part) for name in part_names(item, f"{before}[{i}]")]
    return [before]


def _updated(old: Any, new: Any) -> Any:
    if new is None:
        return old
    if is_dataclass(new):
        if old is None:
            return new
        return replace(
            old,
            **{f.name: _updated(getattr(old, f.name), getattr(new, f.name)) for f in fields(new)},
        )
    if isinstance(new, tuple):
        return (
            tuple(_updated(o, n) for o, n in zip(old, new, strict=True))
            if old and new
            else new or old
        )
    return new


def _like(whole: Any, part: Any) -> Any:
    if part is None:
        return None
    if is_dataclass(part):
        return replace(
            whole,
            **{f.name: _like(getattr(whole, f.name), getattr(part, f.name)) for f in fields(part)},
        )
    if isinstance(part, tuple):
        return tuple(_like(w, p) for w, p in zip(whole, part, strict=True)) if part else ()
    return whole
