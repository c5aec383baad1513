"""Evaluate a jaxpr whose stacked scan outputs go straight into buffer slots, and whose scanned
inputs come straight from them.  Scans are run one by one, or several of one length as one loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import get_abstract_mesh

from .equations import Scan, bind, literal, nbytes, results_of, scan_counts, variables
from .slots import InSlots, Piece, Slot, Target, Total, TotalPiece


class State(NamedTuple):
    """The values that pass from trip to trip."""

    carry: list[Any]
    pools: list[Any]
    stacks: list[Any]


@dataclass(frozen=True)
class Loop:
    """A scan as it is to be run: its body, what it carries, the pools that it writes, and for each
    output after the carry its target; None: it is stacked.
    """

    params: Mapping[str, Any]  # of the scan
    fixed: list[Any]  # what is the same in all trips
    carry: list[Any]
    pools: list[Any]
    scanned: list[Any]  # what a trip reads a row of: slots, pieces, arrays
    targets: Sequence[Target | None]

    @property
    def length(self) -> int:
        """How many trips it has."""
        return int(self.params["length"])

    def merges_with(self, other: Loop) -> bool:
        """Whether both may be one loop."""
        return all(self.params[name] == other.params[name] for name in ("length", "unroll"))

    def empty_stacks(self) -> list[Any]:
        """Room for what it stacks; every row is written before any is read, so that nothing fills
        it.
        """
        outs = self.params["jaxpr"].jaxpr.outvars[len(self.carry) :]
        return [
            lax.empty((self.length, *out.aval.shape), out.aval.dtype)
            for out, target in zip(outs, self.targets, strict=True)
            if target is None
        ]

    def compute(self, carry: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        """The next carry and the other results of a trip, from the carry and what was read."""
        results = results_of(self.params["jaxpr"], *self.fixed, *carry, *values)
        count = len(carry)
        after = [r.astype(c.dtype) for r, c in zip(results[:count], carry, strict=True)]
        return after, results[count:]

    def store(self, pools: list[Any], row: Any, results: list[Any]) -> list[Any]:
        """The pools with the rows of a trip that have a target."""
        found = list(pools)
        targets = [target for target in self.targets if target is not None]
        numbers = {first: k for k, first in enumerate(dict.fromkeys(id(t.pool) for t in targets))}
        for value, target in zip(results, self.targets, strict=True):
            if target is not None:
                number = numbers[id(target.pool)]
                found[number] = target._replace(pool=found[number]).store_row(row, value)
        return found

    def stacked(self, results: list[Any]) -> list[Any]:
        """Those results of a trip that have no target."""
        return [y for y, target in zip(results, self.targets, strict=True) if target is None]


def run_loops(loops: Sequence[Loop]) -> list[State]:
    """Loops of one length as one: in each trip all read, then compute, then store, one after the
    other.

    Rows are read, stored and stacked by an index that is scanned: XLA:GPU makes no CUDA graph of a
    loop whose slices follow its counter. Where the partitioner splits values, scan stacks them
    itself: collectives keep such a loop out of graphs, and XLA reads its own stacks without a copy.
    """
    length, reverse = loops[0].length, loops[0].params["reverse"]
    by_scan = _is_split_further()

    def trip(states: list[State], rows: list[Any]) -> tuple[list[State], list[list[Any]]]:
        # A pool that one loop writes and another reads is carried by the one that writes it.
        now = {
            id(old): new
            for loop, state in zip(loops, states, strict=True)
            for old, new in zip(loop.pools, state.pools, strict=True)
        }
        read = [
            [_row_of(x, now, row) for x in loop.scanned]
            for loop, row in zip(loops, rows, strict=True)
        ]
        if by_scan and len(loops) > 1:
            states, read = _read_before_writing(loops, states, read)
        found = [
            loop.compute(state.carry, values)
            for loop, state, values in zip(loops, states, read, strict=True)
        ]
        after: list[State] = []
        ys: list[list[Any]] = []
        for loop, before, row, (carry, results) in zip(loops, states, rows, found, strict=True):
            if after and not by_scan:
                row = _row_after(row, [leaf for state in after for kept in state for leaf in kept])
            pools, new = loop.store(before.pools, row, results), loop.stacked(results)
            stacks = [] if by_scan else _with_rows(before.stacks, row, new)
            after.append(State(carry, pools, stacks))
            ys.append(new if by_scan else [])
        return after, ys

    count = np.arange(length, dtype=np.int32)
    flipped = [loop.params["reverse"] != reverse for loop in loops]
    rows = [jnp.asarray(count[::-1] if flip else count) for flip in flipped]
    if len(loops) == 1:
        rows = [lax.iota(jnp.int32, length)]
    start = [
        State(loop.carry, loop.pools, [] if by_scan else loop.empty_stacks()) for loop in loops
    ]
    unroll = loops[0].params["unroll"]
    end, ys = lax.scan(trip, start, rows, length=length, reverse=reverse, unroll=unroll)
    if not by_scan:
        return end
    return [
        state._replace(stacks=[jnp.flip(leaf, 0) for leaf in stacks] if flip else stacks)
        for state, stacks, flip in zip(end, ys, flipped, strict=True)
    ]


def _row_after(row: Any, values: Sequence[Any]) -> Any:
    """The row, with a dependence on these values: XLA stores there after all reads that the values
    are computed from.

    Otherwise it may run a late read of a pool after the write, and copy the whole pool for that.
    The flags are False, also for values that are not finite, but XLA cannot know.
    """
    starts = [
        jnp.real(lax.slice(leaf, [0] * leaf.ndim, [1] * leaf.ndim)).reshape(())
        for leaf in values
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.number)
    ]
    for start in starts:
        row = row + jnp.logical_and(start < 0, start > 0).astype(row.dtype)
    return row


def _read_before_writing(
    loops: Sequence[Loop], states: list[State], read: list[list[Any]]
) -> tuple[list[State], list[list[Any]]]:
    """Order reads of pools that a loop writes before the writes.  XLA would slice the pool again
    after the write, and copy the pool for that.  Where the partitioner splits values, an element of
    them (see `_row_after`) would have to be sent to the other devices.

    Other reads have no such order: a row of parameters is best sliced where it is used, not kept
    from the beginning of the trip.
    """
    written = {id(pool) for loop in loops for pool in loop.pools}
    tied = [
        {k: values[k] for k, x in enumerate(loop.scanned) if _is_in(x, written)}
        for loop, values in zip(loops, read, strict=True)
    ]
    tied, pools = lax.optimization_barrier((tied, [state.pools for state in states]))
    return [state._replace(pools=now) for state, now in zip(states, pools, strict=True)], [
        [own.get(k, value) for k, value in enumerate(values)]
        for own, values in zip(tied, read, strict=True)
    ]


def _is_in(scanned: Any, pools: set[int]) -> bool:
    return isinstance(scanned, Slot) and id(scanned.pool) in pools


def _row_of(scanned: Any, now: Mapping[int, Any], row: Any) -> Any:
    """A row of what is scanned; of a slot, in its pool as it is by now."""
    if isinstance(scanned, Slot):
        return scanned._replace(pool=now.get(id(scanned.pool), scanned.pool)).load_row(row)
    return (
        scanned.load_row(row)
        if isinstance(scanned, Piece)
        else lax.dynamic_index_in_dim(scanned, row, 0, keepdims=False)
    )


def _is_split_further() -> bool:
    """Whether the mesh has axes that are left to the partitioner."""
    mesh = get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)


def _with_rows(stacks: Sequence[Any], row: Any, values: Sequence[Any]) -> list[Any]:
    """Each stack with one row written."""
    return [
        lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), row, 0)
        for stack, value in zip(stacks, values, strict=True)
    ]


_LAZY = (Slot, Piece)


def run_in_slots(*runs: InSlots) -> list[list[Any]]:
    """Evaluate jaxprs with slots: the results of each.

    Without slots a scan would build its stacked outputs elsewhere and copy them into the slot (or
    add them to the accumulator).  A slot would be copied before it is scanned.

    Two jaxprs must not depend on each other.  Their scans of equal length are merged into one, trip
    by trip, so that a collective of one runs at the same time as compute of the other.  In a trip
    the first reads its slots before the second writes any: the second may write pools that the
    first reads, but not the other way round.
    """
    results: list[list[Any]] = [[] for _ in runs]
    steps = [_steps(run, alone=len(runs) == 1) for run in runs]
    waiting: dict[int, Loop] = {}  # the loop that each run needs next

    def advance(k: int, answer: State | None) -> None:
        try:
            waiting[k] = next(steps[k]) if answer is None else steps[k].send(answer)
        except StopIteration as done:
            waiting.pop(k, None)
            results[k] = done.value

    for k in range(len(runs)):
        advance(k, None)
    while waiting:
        first = min(waiting)
        chosen = [k for k in sorted(waiting) if waiting[first].merges_with(waiting[k])]
        for k, answer in zip(chosen, run_loops([waiting[k] for k in chosen]), strict=True):
            advance(k, answer)
    return results


def _steps(run: InSlots, *, alone: bool) -> Generator[Loop, State, list[Any]]:
    """Evaluate a jaxpr up to each of its scans; the caller runs these."""
    jaxpr, writes = run.jaxpr, run.writes
    env: dict[core.Var, Any] = dict(zip(jaxpr.invars, run.arguments, strict=True))
    env.update((jaxpr.invars[i], slot) for i, slot in run.reads.items())
    # A scan writes into its target what nothing else reads.
    used = {v for e in jaxpr.eqns for v in variables(e.invars)}
    targets = {
        v: target
        for v, target in _written(run).items()
        if v not in used and jaxpr.outvars.count(v) == 1
    }
    appended, added = _appended(run), _added(run)
    pools = _Pools()
    written: set[core.Var] = set()
    zeros = _zeros_of(jaxpr)
    # What is read whole is read before any pool is written, here or by what runs together with
    # this; but for large slots that nothing writes.
    rows_only = {eqn.invars[0] for eqn in jaxpr.eqns if _made(eqn) in appended}
    whole = _read_whole(jaxpr) - rows_only - {each.held for each in added.values()}
    late = _read_late(run, whole) if alone else set()
    first = [v for v in jaxpr.invars if v in whole and v not in late]
    env.update((v, env[v].load()) for v in first if isinstance(env[v], _LAZY))
    newest: Any = None  # the last large array that was computed from one of these
    after: set[core.Var] = set(late)  # what depends on one of these
    for eqn in jaxpr.eqns:
        for v in [v for v in dict.fromkeys(variables(eqn.invars)) if v in late]:
            late.discard(v)
            slot = env[v]
            if newest is not None:
                slot = slot._replace(index=_row_after(slot.index, [newest]))
            env[v] = slot.load()
        if (buffer := _made(eqn)) in appended:
            slot = pools.current(appended[buffer])
            rows, *starts = (_load(env, v) for v in eqn.invars[1:])
            pools.change(slot, slot.store_rows(rows, starts))
            env[buffer] = pools.current(appended[buffer]).load()
            written.add(buffer)
            continue
        if (total := _made(eqn)) in added:
            found = added[total]
            slot = pools.current(env[found.held])
            pools.change(slot, slot.add(_load(env, found.other)))
            env[total] = pools.current(found.target)
            written.add(total)
            continue
        if _is_loop(eqn):
            _, carries = scan_counts(eqn)
            loop = _loop_of(eqn, env, targets, pools)
            state = yield loop
            pools.update(loop.pools, state.pools)
            outs = eqn.outvars[carries:]
            env.update(zip(eqn.outvars[:carries], state.carry, strict=True))
            env.update(zip([v for v in outs if v not in targets], state.stacks, strict=True))
            written.update(v for v in outs if v in targets)
            if not after.isdisjoint(variables(eqn.invars)):
                after.update(eqn.outvars)
                newest = next(filter(_is_large, [*state.carry, *state.stacks]), newest)
            continue
        inputs = [_load(env, v) for v in eqn.invars]
        target = targets.get(eqn.outvars[0]) if eqn.primitive.name == "scatter-add" else None
        if isinstance(target, Total | TotalPiece) and eqn.invars[0] in zeros:
            # The gradient of a table of embeddings, which is mostly zeros.
            pools.change(target, pools.current(target).scatter(eqn, *inputs[1:]))
            written.add(eqn.outvars[0])
            continue
        env.update(zip(eqn.outvars, bind(jaxpr, eqn, inputs), strict=True))
        if not after.isdisjoint(variables(eqn.invars)):
            after.update(eqn.outvars)
            if eqn.primitive.name == "dot_general":
                newest = next(filter(_is_large, (env[v] for v in eqn.outvars)), newest)
    for i, target in writes.items():
        atom = jaxpr.outvars[i]
        if not (isinstance(atom, core.Var) and atom in written):
            pools.change(target, pools.current(target).store(_load(env, atom)))
    return [
        pools.now(writes[i].pool) if i in writes else _load(env, atom)
        for i, atom in enumerate(jaxpr.outvars)
    ]


def _read_late(run: InSlots, whole: set[core.Var]) -> set[core.Var]:
    """Inputs that are read from their slots when the first equation needs them, after what was
    computed before.

    XLA:GPU would otherwise read all of them first, and start what the backward computes again of
    each layer: at 512k tokens in slices that is 8 % of a device's memory.
    """
    if _is_split_further():
        return set()
    written = {id(target.pool) for target in run.writes.values()}
    return {
        v
        for v in whole
        for slot in (run.reads.get(run.jaxpr.invars.index(v)),)
        if isinstance(slot, Slot) and id(slot.pool) not in written and _is_large(v.aval)
    }


def _is_large(array: Any) -> bool:
    """Whether an array is worth an order: a mebibyte of floating numbers."""
    return jnp.issubdtype(array.dtype, jnp.floating) and nbytes(array) >= 2**20


def _made(eqn: core.JaxprEqn) -> Any:
    """The first result of an equation; None where it has none."""
    return eqn.outvars[0] if eqn.outvars else None


def _written(run: InSlots) -> dict[core.Var, Any]:
    """The targets of results, but for results that are constants."""
    found = ((run.jaxpr.outvars[i], target) for i, target in run.writes.items())
    return {v: target for v, target in found if isinstance(v, core.Var)}


def _appended(run: InSlots) -> dict[Any, Slot]:
    """What is a slot with some rows replaced, and goes back to that slot: only rows are written."""
    jaxpr = run.jaxpr
    held: dict[Any, Slot] = {jaxpr.invars[i]: slot for i, slot in run.reads.items()}
    left = {v: target for v, target in _written(run).items() if isinstance(target, Slot)}
    found: dict[Any, Slot] = {}
    for eqn in jaxpr.eqns if held else ():
        if eqn.primitive.name == "dynamic_update_slice" and _made(eqn) in left:
            before, after = held.get(eqn.invars[0]), left[_made(eqn)]
            if before is not None and before.pool is after.pool:
                found[_made(eqn)] = after
    return found


class _Sum(NamedTuple):
    """A sum of a slot and something else that goes back to the same slot."""

    target: Slot
    held: core.Var  # the input that is the slot
    other: Any


def _added(run: InSlots) -> dict[Any, _Sum]:
    """Sums that are added to in place, by their result."""
    jaxpr = run.jaxpr
    held = {jaxpr.invars[i]: slot for i, slot in run.reads.items()}
    left = _written(run)
    uses = Counter(v for eqn in jaxpr.eqns for v in variables(eqn.invars))
    found: dict[Any, _Sum] = {}
    for eqn in jaxpr.eqns if held else ():
        target = left.get(_made(eqn)) if eqn.primitive.name in ("add", "add_any") else None
        if not isinstance(target, Slot):
            continue
        for own, other in (eqn.invars, eqn.invars[::-1]):
            if not isinstance(own, core.Var) or uses[own] > 1 or own not in held:
                continue
            if held[own].pool is target.pool:
                found[_made(eqn)] = _Sum(target, own, other)
                break
    return found


class _Pools:
    """The pools as they are by now, by what they were at first."""

    def __init__(self) -> None:
        self._now: dict[int, Any] = {}
        self._first: dict[int, Any] = {}  # by what each is now

    def now(self, pool: Any) -> Any:
        """The pool that was this one."""
        return self._now.get(id(pool), pool)

    def current(self, target: Any) -> Any:
        """The target in its pool as it is by now."""
        return target._replace(pool=self.now(target.pool))

    def change(self, target: Target, new: Any) -> None:
        """Replace a target's pool."""
        self.update([self.now(target.pool)], [new])

    def update(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        """Replace pools as they were by now."""
        for before, after in zip(old, new, strict=True):
            first = self._first.pop(id(before), before)
            self._first[id(after)] = first
            self._now[id(first)] = after


def _loop_of(
    eqn: core.JaxprEqn, env: dict[core.Var, Any], targets: Mapping[Any, Target], pools: _Pools
) -> Loop:
    """A scan with pools among its carries, for what it writes, and among its constants, for what it
    reads.
    """
    scan = Scan.of(eqn)
    found = [targets.get(v) for _, v in scan.ys]
    return Loop(
        eqn.params,
        fixed=[_load(env, a) for a, _ in scan.consts],
        carry=[jnp.asarray(_load(env, a)).astype(v.aval.dtype) for a, v in scan.carry],
        pools=list({id(t.pool): pools.now(t.pool) for t in found if t is not None}.values()),
        scanned=[env[a] if isinstance(a, core.Var) else a.val for a, _ in scan.xs],
        targets=found,
    )


def _is_loop(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and bool(eqn.params["length"])


def _read_whole(jaxpr: core.Jaxpr) -> set[core.Var]:
    """Inputs that something reads other than row by row."""
    found: set[core.Var] = set()
    for eqn in jaxpr.eqns:
        whole = sum(scan_counts(eqn)) if _is_loop(eqn) else len(eqn.invars)
        found.update(variables(eqn.invars[:whole]))
    return found & set(jaxpr.invars)


def _zeros_of(jaxpr: core.Jaxpr) -> list[Any]:
    """Arrays of zeros."""
    return [
        eqn.outvars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "broadcast_in_dim"
        and isinstance(eqn.invars[0], core.Literal)
        and eqn.invars[0].val == 0
    ]


def _load(env: dict[core.Var, Any], atom: Any) -> Any:
    if isinstance(atom, core.Literal):
        return literal(atom)
    value = env[atom]
    return value.load() if isinstance(value, _LAZY) else value
