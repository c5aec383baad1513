"""A block: code that changes a declared part of the state, under a predicate that carries only that
part.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..arrays import Flag
from ..program.templates import Presence
from .pools import State, while_once


@dataclass(frozen=True)
class Block:
    """A piece of a tick's code.

    `run` returns the state after it, in which it may change the entries `changes`.  With
    `everywhere`, all devices run the block, and a device whose predicate is False drops the result.
    """

    changes: Set[str]
    run: Callable[[State], State]
    everywhere: bool = False

    def part(self, state: State) -> State:
        """The part of the state that it may change."""
        return {name: state[name] for name in sorted(self.changes)}

    def after(self, state: State) -> State:
        """That part after the block."""
        after = self.run(state)
        more = {name for name in state if after[name] is not state[name]} - self.changes
        assert not more, f"a block that changes {sorted(self.changes)} changes {sorted(more)} too"
        return {name: after[name] for name in sorted(self.changes)}


def run_where(presence: Presence, predicate: Flag, block: Block, state: State) -> State:
    """Run a block where the predicate holds."""
    return _run(presence, predicate, None, block, state)[1]


def run_in_order(presence: Presence, predicate: Flag, block: Block, state: State) -> State:
    """Run a block where the predicate holds, after earlier blocks and before later ones.

    The state's token is False after every block, but XLA cannot know.  A block that reads pools
    must end before the next one writes them.  Without this dependency XLA:GPU may run the writer
    first, on a copy of every pool.
    """
    token, state = _run(presence, predicate, jnp.logical_not(state["token"]), block, state)
    return state | {"token": token}


def _run(
    presence: Presence, predicate: Flag, start: Flag | None, block: Block, state: State
) -> tuple[Flag, State]:
    """A flag that is False once the block is over, and the state after it.

    `start` is True once the block may start; None where nothing is awaited.

    A conditional would make XLA:GPU copy every buffer that passes through it.  A `while_loop` of at
    most one trip updates them in place, and carries only the entries that the block writes.  Where
    the predicate is known, nothing is tested.
    """
    if presence is Presence.NEVER:
        return false(), state
    if not block.everywhere:
        if presence is Presence.ALWAYS:
            return false(), state | block.after(state)
        if start is not None:
            predicate = jnp.logical_and(predicate, start)
        token, part = while_once(
            predicate, lambda part: block.after(state | part), block.part(state)
        )
        return token, state | part

    def once(part: State) -> State:
        after = block.after(state | part)
        return jax.tree.map(lambda new, old: jnp.where(predicate, new, old), after, part)

    old = block.part(state)
    # The loop has one trip on each device: it keeps blocks in order.
    token, part = (false(), once(old)) if start is None else while_once(start, once, old)
    return token, state | part


def false() -> Flag:
    """The token of a block that has ended."""
    return jnp.zeros((), bool)
