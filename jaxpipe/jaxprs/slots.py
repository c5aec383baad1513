"""Jaxprs that are evaluated with values in pools: slots to read and write, accumulators to add to.

Stacked outputs of scans go straight into slots, and scanned inputs come straight from them.  Scans
are run one by one, or several of one length as one loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core
from jax.sharding import get_abstract_mesh

from ..arrays import Leaf, as_dtype
from .entry import Alone, Destination, Piece, Slot, StackRow, Total
from .equations import Atom, Scan, bind, literal, nbytes, results_of, scan_counts, shaped, variables

Arrays: TypeAlias = "list[Array]"
# A value, or where in a pool, a longer array or a stack it is.
Argument: TypeAlias = "Array | Slot | Alone | Piece | StackRow"


class InSlots(NamedTuple):
    """A jaxpr to evaluate; arguments may be slots and pieces of long arrays.

    Outputs in `writes` are returned as updated pools.  Several may go into one pool.
    """

    jaxpr: core.Jaxpr
    arguments: Sequence[Argument]
    writes: Mapping[int, Destination] = MappingProxyType({})


class TripState(NamedTuple):
    """The values that pass from trip to trip, and at the end the stacks that `lax.scan` made."""

    carry: Arrays
    pools: Arrays
    stacks: Sequence[Array] = ()


@dataclass(frozen=True)
class Loop:
    """A scan as it is to be run: its body, what it carries, the pools that it writes, and for each
    output after the carry its target; None: `lax.scan` stacks it.
    """

    params: Mapping[str, Any]  # of the scan
    fixed: Arrays  # values that are the same in all trips
    carry: Arrays
    homes: list[int]  # by what each pool was at first, see `_steps`
    pools: Arrays
    scanned: list[Argument]  # slots, pieces and arrays, of which a trip reads a row
    targets: Sequence[Destination | None]

    @property
    def form(self) -> tuple[int, int]:
        """The number of trips, and how many are unrolled; loops of equal form may be one loop."""
        return self.params["length"], self.params["unroll"]

    def compute(self, carry: Arrays, values: Arrays) -> tuple[Arrays, Arrays]:
        """The next carry and the other results of a trip, from the carry and the rows."""
        results = results_of(self.params["jaxpr"], *self.fixed, *carry, *values)
        count = len(carry)
        after = [as_dtype(r, c.dtype) for r, c in zip(results[:count], carry, strict=True)]
        return after, results[count:]

    def store(self, pools: Arrays, row: Array, results: Arrays) -> Arrays:
        """The pools with the rows of a trip that have a target."""
        found = list(pools)
        for value, target in zip(results, self.targets, strict=True):
            if target is not None:
                home = self.homes.index(id(target.pool))
                found[home] = target._replace(pool=found[home]).store_row(row, value)
        return found

    def stacked(self, results: Arrays) -> Arrays:
        """Those results of a trip that have no target."""
        return [y for y, target in zip(results, self.targets, strict=True) if target is None]


def run_loops(loops: Sequence[Loop]) -> list[TripState]:
    """Loops of one length as one: in each trip all read, then compute, then store, one after the
    other.
    """
    (length, unroll), reverse = loops[0].form, loops[0].params["reverse"]

    def trip(states: list[TripState], rows: Arrays) -> tuple[list[TripState], list[Arrays]]:
        # A pool that one loop writes and another reads is carried by the one that writes it.
        now = {
            id(old): new
            for loop, state in zip(loops, states, strict=True)
            for old, new in zip(loop.pools, state.pools, strict=True)
        }
        found = [
            loop.compute(state.carry, [_row_of(x, now, row) for x in loop.scanned])
            for loop, state, row in zip(loops, states, rows, strict=True)
        ]
        after: list[TripState] = []
        for loop, before, row, (carry, results) in zip(loops, states, rows, found, strict=True):
            # An element of split values would have to be sent to the other devices.
            if after and not is_split_further():
                row = _row_after(row, [leaf for state in after for kept in state for leaf in kept])
            after.append(TripState(carry, loop.store(before.pools, row, results)))
        stacks = zip(loops, found, strict=True)
        return after, [loop.stacked(results) for loop, (_, results) in stacks]

    count = lax.iota(jnp.int32, length)
    flipped = [loop.params["reverse"] != reverse for loop in loops]
    rows = [jnp.flip(count) if flip else count for flip in flipped]
    start = [TripState(loop.carry, loop.pools) for loop in loops]
    end, ys = lax.scan(trip, start, rows, length=length, reverse=reverse, unroll=unroll)
    return [
        state._replace(stacks=[jnp.flip(leaf, 0) for leaf in stacks] if flip else stacks)
        for state, stacks, flip in zip(end, ys, flipped, strict=True)
    ]


def _row_after(row: Array, values: Sequence[Array]) -> Array:
    """The row, with a dependence on these values: XLA stores there after all reads that the values
    are computed from.

    Otherwise it may run a late read of a pool after the write, and copy the whole pool for that: of
    pairs of layers with experts, kernels would move 17 % more bytes beside matmuls.  The flags are
    False, also for values that are not finite, but XLA cannot know.
    """
    starts = [
        jnp.real(lax.slice(leaf, [0] * leaf.ndim, [1] * leaf.ndim)).reshape(())
        for leaf in values
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.number)
    ]
    for start in starts:
        row = row + jnp.logical_and(start < 0, start > 0).astype(row.dtype)
    return row


def _row_of(scanned: Argument, now: Mapping[int, Array], row: Array) -> Array:
    """A row of a scanned operand; of a slot, in its pool as it is by now."""
    if isinstance(scanned, Slot):
        scanned = scanned._replace(pool=now.get(id(scanned.pool), scanned.pool))
    if isinstance(scanned, Slot | Piece):
        return scanned.load_row(row)
    whole = scanned.load() if isinstance(scanned, _LAZY) else scanned
    return lax.dynamic_index_in_dim(whole, row, 0, keepdims=False)


def is_split_further() -> bool:
    """Whether the mesh has axes that are left to the partitioner."""
    mesh = get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)


_LAZY = (Slot, Alone, Piece, StackRow)


def run_in_slots(*runs: InSlots) -> list[Arrays]:
    """Evaluate jaxprs with slots: the results of each.

    Without slots a scan would build its stacked outputs elsewhere and copy them into the slot (or
    add them to the accumulator).  A slot would be copied before it is scanned.

    Two jaxprs must not depend on each other.  Their scans of equal length are merged into one, trip
    by trip, so that a collective of one runs at the same time as compute of the other.  In a trip
    the first reads its slots before the second writes any: the second may write pools that the
    first reads, but not the other way round.  (Unrolled, with all reads before all writes, as many
    collectives overlap, but a second copy of what a microbatch keeps is in memory: of four layers
    with experts, 308 MiB a step instead of 242.)
    """
    steps = [_steps(run, alone=len(runs) == 1) for run in runs]
    results: list[Arrays] = [[] for _ in runs]
    waiting: dict[int, Loop] = {}  # the loop that each run needs next
    answers: dict[int, Any] = dict.fromkeys(range(len(runs)))
    while answers:
        for k, answer in answers.items():
            try:
                waiting[k] = steps[k].send(answer)
            except StopIteration as done:
                results[k] = done.value
        chosen = [k for k in sorted(waiting) if waiting[k].form == waiting[min(waiting)].form]
        states = run_loops([waiting.pop(k) for k in chosen]) if chosen else []
        answers = dict(zip(chosen, states, strict=True))
    return results


def _steps(run: InSlots, *, alone: bool) -> Generator[Loop, TripState, Arrays]:
    """Evaluate a jaxpr up to each of its scans; the caller runs these."""
    jaxpr, writes = run.jaxpr, run.writes
    env: dict[core.Var, Any] = dict(zip(jaxpr.invars, run.arguments, strict=True))
    slots = {v: value for v, value in env.items() if isinstance(value, Slot)}
    # pools as they are by now, by the `id` of what they were at first
    now: dict[int, Array] = {}

    def current(target: Any) -> Any:
        """The target in its pool as it is by now."""
        return target._replace(pool=now.get(id(target.pool), target.pool))

    uses = Counter(v for eqn in jaxpr.eqns for v in variables(eqn.invars))
    own = ((jaxpr.outvars[i], target) for i, target in writes.items())
    left = {v: target for v, target in own if isinstance(v, core.Var)}
    # A scan or a scatter writes a result into its target where nothing else reads it.
    targets = {v: t for v, t in left.items() if v not in uses and jaxpr.outvars.count(v) == 1}
    updates = _updates(jaxpr, slots, left, targets, uses)
    written: set[core.Var] = set()
    # Inputs that are read whole are read before any pool is written, here or by the jaxpr that runs
    # together with this one; but for large slots that nothing writes.
    whole = _read_whole(jaxpr) - {each.held for each in updates.values()}
    pools = {id(target.pool) for target in writes.values()}
    late = _LateReads(
        v
        for v in (whole & {*slots} if alone else ())
        if id(slots[v].pool) not in pools and _is_large(shaped(v))
    )
    first = [v for v in jaxpr.invars if v in whole and v not in late.waiting]
    env.update((v, _load(env, v)) for v in first)
    for eqn in jaxpr.eqns:
        late.read(eqn, env)
        if eqn.outvars and (update := updates.get(eqn.outvars[0])) is not None:
            (result,) = eqn.outvars
            before = update.target if update.held is None else env[update.held]
            values = [_load(env, v) for v in update.operands]
            now[id(before.pool)] = update.change(current(before), *values)
            target = current(update.target)
            env[result] = target.load() if update.change is Slot.store_rows else target
            written.add(result)
            continue
        if _is_loop(eqn):
            _, carries = scan_counts(eqn)
            loop = _loop_of(eqn, env, targets, current)
            state = yield loop
            outs, stacks = eqn.outvars[carries:], iter(state.stacks)
            env.update(zip(eqn.outvars[:carries], state.carry, strict=True))
            kept = dict(zip(loop.homes, state.pools, strict=True))
            for v, target in zip(outs, loop.targets, strict=True):
                if v in targets:
                    now[id(targets[v].pool)] = kept[id(targets[v].pool)]
                    written.add(v)
                else:
                    env[v] = next(stacks) if target is None else kept[id(target.pool)]
            late.note(eqn, [*state.carry, *(env[v] for v in outs if v not in targets)])
        else:
            arrays = bind(eqn, [_load(env, v) for v in eqn.invars])
            env.update(zip(eqn.outvars, arrays, strict=True))
            stored = [v for v in eqn.outvars if v in targets]
            for v in stored:
                now[id(targets[v].pool)] = current(targets[v]).store(env[v])
            written.update(stored)
            late.note(eqn, [now[id(targets[v].pool)] for v in stored])
    for i, target in writes.items():
        atom = jaxpr.outvars[i]
        if not (isinstance(atom, core.Var) and atom in written):
            now[id(target.pool)] = current(target).store(_load(env, atom))
    return [
        current(writes[i]).pool if i in writes else _load(env, atom)
        for i, atom in enumerate(jaxpr.outvars)
    ]


class _LateReads:
    """Inputs that are read from their slots when the first equation needs them, after all that was
    stored before: loops, and results in their targets.  A product that is only stored has no other
    reader, so XLA adds it inside its matmul.

    XLA:GPU would otherwise read all of them first, start the recomputation of every layer, and make
    the weight gradients of a layer after that of the next one.
    """

    def __init__(self, inputs: Iterable[core.Var]) -> None:
        self.waiting = set(inputs)
        self._after = set(self.waiting)  # values that depend on one of these
        self._stored: Arrays = []  # the large arrays among these values

    def read(self, eqn: core.JaxprEqn, env: dict[core.Var, Any]) -> None:
        """Read the slots that an equation needs first."""
        for v in [v for v in dict.fromkeys(variables(eqn.invars)) if v in self.waiting]:
            self.waiting.discard(v)
            slot = env[v]
            number, *_ = lax.optimization_barrier((slot.number, *self._stored))
            env[v] = slot._replace(number=number).load()

    def note(self, eqn: core.JaxprEqn, arrays: Sequence[Array]) -> None:
        """Note the results of an equation."""
        if not self._after.isdisjoint(variables(eqn.invars)):
            self._after.update(eqn.outvars)
            self._stored += filter(_is_large, arrays)


def _is_large(array: Leaf) -> bool:
    """Whether an array is worth an order: a mebibyte of floating numbers."""
    return jnp.issubdtype(array.dtype, jnp.floating) and nbytes(array) >= 2**20


class _Update(NamedTuple):
    """An equation that is done in the target of its result."""

    target: Destination
    held: core.Var | None  # the input that is the target before
    operands: Sequence[Atom]
    change: Callable[..., Array]  # the new pool, of the target before and the operands


def _updates(
    jaxpr: core.Jaxpr,
    slots: Mapping[core.Var, Slot],
    left: Mapping[core.Var, Destination],
    targets: Mapping[core.Var, Destination],
    uses: Mapping[core.Var, int],
) -> dict[core.Var, _Update]:
    """The equations that are done in the targets of their results, by result: rows that replace
    some of a slot, a sum that goes back to its slot, and scatters into zeros, as is the gradient of
    a table of embeddings.
    """
    found: dict[core.Var, _Update] = {}
    zeros: list[core.Var] = []
    for eqn in (each for each in jaxpr.eqns if each.outvars):
        name, result = eqn.primitive.name, eqn.outvars[0]
        if name == "broadcast_in_dim":
            start = eqn.invars[0]
            zeros += [result] if isinstance(start, core.Literal) and start.val == 0 else []
        target = left.get(result)
        into_zeros = name == "scatter-add" and result in targets and eqn.invars[0] in zeros
        if isinstance(target, Slot):
            from_slots = (v for v in variables(eqn.invars[:2]) if v in slots)
            held = [v for v in from_slots if slots[v].pool is target.pool]
            once = [v for v in held if uses[v] == 1]
            if name == "dynamic_update_slice" and eqn.invars[0] in held:
                found[result] = _Update(target, held[0], eqn.invars[1:], Slot.store_rows)
            elif name in ("add", "add_any") and once:
                others = [v for v in eqn.invars if v is not once[0]]
                found[result] = _Update(target, once[0], others, Slot.add)
        elif into_zeros and isinstance(target, Total):
            change = partial(Total.scatter, eqn=eqn)
            found[result] = _Update(target, None, eqn.invars[1:], change)
    return found


def _loop_of(
    eqn: core.JaxprEqn,
    env: dict[core.Var, Any],
    targets: Mapping[core.Var, Destination],
    current: Callable[[Destination], Destination],
) -> Loop:
    """A scan that carries the pools that it writes; the pools that it reads are constants of it.

    It also carries its stacks, which begin empty, so that it fits into CUDA graphs.  Where the
    partitioner splits values, scan stacks them itself, and XLA splits the stacks: of stages of 20
    layers that are computed again, the step takes 2.2 GiB of temporary memory, and 5.0 otherwise.
    """
    scan, by_scan = Scan.of(eqn), is_split_further()

    def target(inner: Atom, out: core.Var) -> Destination | None:
        if by_scan or out in targets:
            return targets.get(out)
        aval = shaped(inner)  # every row is written before any is read
        return Alone(lax.empty((eqn.params["length"], *aval.shape), aval.dtype))

    found = [target(*pair) for pair in scan.ys]
    pools = {id(t.pool): current(t).pool for t in found if t is not None}
    return Loop(
        eqn.params,
        fixed=[_load(env, a) for a, _ in scan.consts],
        carry=[as_dtype(_load(env, a), shaped(v).dtype) for a, v in scan.carry],
        homes=list(pools),
        pools=list(pools.values()),
        scanned=[env[a] if isinstance(a, core.Var) else literal(a) for a, _ in scan.xs],
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


def _load(env: dict[core.Var, Any], atom: Atom) -> Array:
    if isinstance(atom, core.Literal):
        return literal(atom)
    value = env[atom]
    return value.load() if isinstance(value, _LAZY) else value
