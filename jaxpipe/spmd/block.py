"""The state that a device carries from tick to tick, and blocks: code that changes a declared part
of it, under a predicate that carries only that part.

A predicate is a loop of at most one trip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import batched
from typing import Any, NamedTuple, Never, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..arrays import Avals, Flag, Leaves, Scalar, as_dtype, is_key, with_words
from ..jaxprs.entry import Slot
from ..program.segments import Presence
from ..table.effects import Place


class Key(NamedTuple):
    """What a state has at a place: the number of the chunk, or of the slot where slots are arrays
    of their own, and 0 elsewhere.
    """

    place: Place
    number: int = 0


# Leaves by key ([slots, ...] of pools).  Losses [M] and the token are arrays.  The token is False,
# but XLA cannot know (see `run_where`).  A part of a state has some of its entries.
State: TypeAlias = dict[Key, Any]

TOKEN = Key(Place.ORDER)
# The places of which each chunk has a part.
BY_CHUNK = (Place.STAGE_GRADIENTS, Place.STAGE_STATE, Place.PARAMETERS, Place.REDUCED)


def chunks_of(state: State, place: Place) -> list[Leaves]:
    """The leaves of each chunk in a place."""
    return [state[key] for key in sorted(key for key in state if key.place is place)]


T = TypeVar("T")


def while_once(predicate: Flag, body: Callable[[T], T], carry: T) -> tuple[Flag, T]:
    """A loop of one trip where the predicate holds, and of none elsewhere.  Return a flag that is
    False after the loop, and the carry.

    The condition compares a number of trips.  If it were the predicate itself, XLA's WHILE node of
    a CUDA graph would read it before the body has written it, and run the body again and again.
    """

    def once(state: tuple[Scalar, T]) -> tuple[Scalar, T]:
        trips = lax.platform_dependent(state[0], cuda=_next, rocm=_next, default=jnp.ones_like)
        return trips, body(state[1])

    start = 1 - jnp.asarray(predicate).astype(jnp.int32)
    trips, after = lax.while_loop(lambda state: state[0] < 1, once, (start, carry))
    return trips < 1, after


def _next(trips: Scalar) -> Scalar:
    """The number after a trip, on GPUs: the form that was run there.

    Elsewhere it is the constant 1, from which XLA knows that there is no second trip.  XLA:CPU
    moves what is invariant out of loops of more trips, and so nearly all of a block out of its
    predicate.
    """
    return trips + 1


def read(pool: Sequence[Array], slot: Scalar) -> Leaves:
    """One slot of every leaf of a pool ([slots, ...])."""
    return [lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False) for leaf in pool]


def write(pool: Sequence[Array], slot: Scalar, values: Sequence[Array]) -> Leaves:
    """The pool with one slot replaced."""
    return [
        lax.dynamic_update_index_in_dim(leaf, as_dtype(value, leaf.dtype), slot, 0)
        for leaf, value in zip(pool, values, strict=True)
    ]


def empty(avals: Avals, *leading: int) -> Leaves:
    """Zeroed leaves; those of a pool with its number of slots as the leading dim."""
    return [zeros((*leading, *aval.shape), aval.dtype) for aval in avals]


def without_weak_types(values: Sequence[Array]) -> Leaves:
    """The same values without weak types, which a loop's carry must not change."""
    return [as_dtype(value, value.dtype) for value in values]


def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros, or as many keys of zeros."""
    if is_key(jax.ShapeDtypeStruct(shape, dtype)):
        key = jax.random.key(0, impl=str(dtype._impl.name))
        return jnp.broadcast_to(with_words(jnp.zeros_like, key), shape)
    return jnp.zeros(shape, dtype)


def one_of(chunks: Mapping[int, Leaves], number: Scalar) -> Leaves:
    """The leaves of the chunk of this number, or else of the first; None for a leaf that none
    has.  One that this chunk does not have has any value.
    """
    (_, found), *others = chunks.items()

    def either(own: Array | None, other: Array | None, *, is_own: Flag) -> Array | None:
        if own is None or other is None:
            return other if own is None else own
        return jnp.where(is_own, own, other)

    for chunk, leaves in others:
        found = list(map(partial(either, is_own=number == chunk), leaves, found))
    return found


class _Seen(dict[Key, Any]):
    """The part of a state that a block may read."""

    def __missing__(self, key: Key) -> Never:
        raise AssertionError(f"a block reads {key}, which its effects do not name")

    def __or__(self, other: State) -> _Seen:  # type: ignore[override]
        return _Seen({**self, **other})


@dataclass(frozen=True)
class BlockCode:
    """A piece of a tick's code.

    `run` returns the state after it.  It reads the entries `reads` and `changes` of the state, and
    may change `changes`.  With `everywhere`, all devices run the block, and a device whose
    predicate is False drops the result.  Where the block `loops`, in loops of the user's, the token
    changes in its trip (see `held_back`).
    """

    reads: Set[Key]
    changes: Set[Key]
    run: Callable[[State], State]
    everywhere: bool = False
    loops: bool = False

    @classmethod
    def of_all(cls, blocks: Sequence[BlockCode], run: Callable[[State], State]) -> BlockCode:
        """Code that does what all of these blocks do."""
        return cls(
            set().union(*(block.reads for block in blocks)),
            set().union(*(block.changes for block in blocks)),
            run,
            any(block.everywhere for block in blocks),
            any(block.loops for block in blocks),
        )

    def part(self, state: State) -> State:
        """The part of the state that it may change."""
        return {key: state[key] for key in sorted(self.changes)}

    def after(self, state: State) -> State:
        """That part after the block."""
        seen = {key: state[key] for key in (*self.reads, *self.changes, TOKEN)}
        after = self.run(_Seen(seen))
        more = {key for key in after if after[key] is not seen.get(key)} - self.changes
        assert not more, f"a block that changes {sorted(self.changes)} changes {sorted(more)} too"
        return {key: after[key] for key in sorted(self.changes)}


def held_back(values: Leaves, state: State) -> Leaves:
    """The values, which XLA does not know before the end of earlier blocks, or in the trip of a
    predicate's loop before it; slots as they are.

    XLA moves what does not change in a loop out of it, although the loop may have no trip.  A loop
    of the user's would then run on values that mean nothing, and might never end.
    """
    return [
        leaf
        if isinstance(leaf, Slot)
        else jnp.where(state[TOKEN], zeros(leaf.shape, leaf.dtype), leaf)
        for leaf in values
    ]


def run_where(
    presence: Presence, predicate: Flag, block: BlockCode, state: State, *, ordered: bool = False
) -> State:
    """Run a block where the predicate holds.

    A conditional would make XLA:GPU copy every buffer that passes through it.  A `while_loop` of at
    most one trip updates them in place, and carries only the entries that the block writes.  Where
    the predicate is known, nothing is tested.

    With `ordered`, the block runs after earlier blocks and before later ones.  The state's token is
    False after every block, but XLA cannot know.  A block that reads pools must end before the next
    one writes them.  Without this dependency XLA:GPU may run the writer first, on a copy of every
    pool.
    """
    # True once the block may start
    start = jnp.logical_not(state[TOKEN]) if ordered else None
    token, part = _run(presence, predicate, start, block, state)
    return state | part | ({TOKEN: token} if ordered else {})


def run_one_of(number: Scalar, blocks: Mapping[int, BlockCode], state: State) -> State:
    """Run the block of this number, which is one of theirs.

    A false predicate takes as long as a true one.  So where there are many, groups of blocks are
    under predicates too: of 16 blocks 8 predicates are evaluated.
    """
    numbers = sorted(blocks)
    size = math.isqrt(len(numbers) - 1) + 1 if len(numbers) > _FEW else 1
    for own in batched(numbers, size):
        block = blocks[own[0]]
        if size > 1:
            inside = {each: blocks[each] for each in own}
            block = BlockCode.of_all([*inside.values()], partial(run_one_of, number, inside))
        presence = Presence.SOMETIMES if len(numbers) > 1 else Presence.ALWAYS
        flag = jnp.logical_and(own[0] <= number, number <= own[-1])
        state = run_where(presence, flag, block, state)
    return state


_FEW = 5  # predicates, of which groups save none


def _run(
    presence: Presence, predicate: Flag, start: Flag | None, block: BlockCode, state: State
) -> tuple[Flag, State]:
    """A flag that is False once the block is over, and what it has changed of the state."""
    if presence is Presence.NEVER:
        return false(), {}
    if presence is Presence.ALWAYS and not block.everywhere:
        return false(), block.after(state)
    old = block.part(state)
    if not block.everywhere:
        predicate = predicate if start is None else jnp.logical_and(predicate, start)
        if not block.loops:
            return while_once(predicate, lambda part: block.after(state | part), old)

        def trip(carried: tuple[Flag, State]) -> tuple[Flag, State]:
            token, part = carried
            return jnp.ones((), bool), block.after(state | part | {TOKEN: token})

        # It is False in the trip.  XLA sees that it changes.
        over, (_, part) = while_once(predicate, trip, (false(), old))
        return over, part

    def once(part: State) -> State:
        after = block.after(state | part)
        return jax.tree.map(lambda new, old: jnp.where(predicate, new, old), after, part)

    # The loop has one trip on each device: it keeps blocks in order.
    return (false(), once(old)) if start is None else while_once(start, once, old)


def false() -> Flag:
    """The token of a block that has ended."""
    return jnp.zeros((), bool)


def settled(leaves: Leaves, state: State) -> State:
    """The state, whose token depends on these values: those of a permute that has ended, say."""
    token = state[TOKEN]
    for leaf in leaves:
        if leaf.size and not is_key(leaf):
            token = jnp.logical_and(token, leaf.ravel()[0] == 0)
    return state | {TOKEN: token}
