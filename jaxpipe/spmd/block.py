"""A block: code that changes a declared part of the state, run under a predicate that carries just
that part.
"""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp

from ..arrays import Flag
from ..program.templates import Presence
from .pools import while_once
from .state import State, given, part_names


class Block(abc.ABC):
    """A piece of a tick's code.  What it may change of the state is declared in `writes`, beside
    the body that changes it.
    """

    @property
    def together(self) -> bool:
        """Whether all devices run it, and those where the predicate is False drop the result."""
        return False

    @abc.abstractmethod
    def writes(self, state: State) -> State:
        """The part of the state that `run` may change."""

    @abc.abstractmethod
    def run(self, state: State) -> State:
        """The state after it."""


def run_where(presence: Presence, predicate: Flag, block: Block, state: State) -> State:
    """Run a block where the predicate holds."""
    return _run(presence, predicate, None, block, state)[1]


def run_in_order(presence: Presence, predicate: Flag, block: Block, state: State) -> State:
    """Run a block where the predicate holds, after all that ran before; what is run so next starts
    after it.

    The state's token is False after every block, but XLA cannot know: a block that reads pools must
    be done before the next writes them, and without this dependency XLA:GPU may run the writer
    first, on a copy of every pool.
    """
    token, state = _run(presence, predicate, jnp.logical_not(given(state.token)), block, state)
    return state.updated(State(token=token))


def _run(
    presence: Presence, predicate: Flag, start: Flag | None, block: Block, state: State
) -> tuple[Flag, State]:
    """A flag that is False once the block is over, and the state after it.

    `start`: True, once the block may start; None where nothing is awaited.

    A conditional would make XLA:GPU copy every buffer that passes through it; a `while_loop` of at
    most one trip updates them in place, and of it only carries what the block writes.  Where the
    predicate is known, nothing is tested.
    """
    if presence is Presence.NEVER:
        return false(), state
    if block.together:
        return _run_together(predicate, start, block, state)
    if presence is Presence.ALWAYS:
        return false(), state.updated(_checked(block, state))
    if start is not None:
        predicate = jnp.logical_and(predicate, start)
    token, part = while_once(
        predicate, lambda part: _checked(block, state.updated(part)), block.writes(state)
    )
    return token, state.updated(part)


def _run_together(
    predicate: Flag, start: Flag | None, block: Block, state: State
) -> tuple[Flag, State]:
    """The same on all devices.  The loop has one trip on each: it keeps blocks in order."""

    def once(part: State) -> State:
        return jax.tree.map(
            lambda new, old: jnp.where(predicate, new, old),
            _checked(block, state.updated(part)),
            part,
        )

    old = block.writes(state)
    token, part = (false(), once(old)) if start is None else while_once(start, once, old)
    return token, state.updated(part)


def _checked(block: Block, state: State) -> State:
    """The declared part after the block; an assertion where it has changed anything else."""
    declared = block.writes(state)
    after = block.run(state)
    part = after.like(declared)
    rest = jax.tree.leaves(state), jax.tree.leaves(after.updated(declared))
    changed = [i for i, (old, new) in enumerate(zip(*rest, strict=True)) if old is not new]
    assert not changed, (
        f"{type(block).__name__} declares that it writes {part_names(declared)}, but writes more"
    )
    return part


def false() -> Flag:
    """A token of what is over."""
    return jnp.zeros((), bool)
