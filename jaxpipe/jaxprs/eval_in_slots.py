"""Evaluate a jaxpr whose stacked scan outputs go straight into buffer slots, and whose scanned inputs come straight from them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from .entry import Entry
from .slices import scan_counts


class Slot(NamedTuple):
    """One entry of a pool: `pool[index]`, where the pool has a leading axis of slots and keeps values as `entry` says."""

    pool: Any
    index: Any
    entry: Entry

    def load(self) -> Any:
        """The whole entry."""
        return self.entry.unpack(lax.dynamic_index_in_dim(self.pool, self.index, 0, keepdims=False))

    def store(self, value: Any) -> Any:
        """The pool with the entry replaced."""
        value = jnp.asarray(value).astype(self.pool.dtype)  # a literal of a jaxpr is a number
        return lax.dynamic_update_index_in_dim(self.pool, self.entry.pack(value), self.index, 0)

    def store_flat(self, value: Any) -> Any:
        """The pool with the raveled value at the beginning of the entry, which is one long array."""
        value = jnp.asarray(value).astype(self.pool.dtype).reshape(1, -1)
        return lax.dynamic_update_slice(self.pool, value, (self.index, jnp.int32(0)))

    def load_row(self, row: Any) -> Any:
        """`pool[index, row]`."""
        if not self.entry.by_row:
            return lax.dynamic_index_in_dim(self.load(), row, 0, keepdims=False)
        kept = self.pool.shape[2:]
        start = (self.index, row, *(jnp.int32(0) for _ in kept))
        return self.entry.unpack_row(lax.dynamic_slice(self.pool, start, (1, 1, *kept)).reshape(kept))

    def store_row(self, row: Any, value: Any) -> Any:
        """The pool with `pool[index, row]` replaced."""
        if not self.entry.by_row:
            return self.store(lax.dynamic_update_index_in_dim(self.load(), value.astype(self.pool.dtype), row, 0))
        value = self.entry.pack_row(value.astype(self.pool.dtype))
        start = (self.index, row, *(jnp.int32(0) for _ in value.shape))
        return lax.dynamic_update_slice(self.pool, value[None, None], start)


class Total(NamedTuple):
    """An accumulator: what is stored is added to it, in place; row by row what a scan stacks, and what is scattered where it belongs."""

    pool: Any

    def store(self, value: Any) -> Any:
        """The accumulator with a whole value added."""
        return self.pool + jnp.asarray(value).astype(self.pool.dtype)

    def store_row(self, row: Any, value: Any) -> Any:
        """The accumulator with `[row]` added to."""
        start = (row, *(jnp.int32(0) for _ in value.shape))
        old = lax.dynamic_slice(self.pool, start, (1, *value.shape))
        return lax.dynamic_update_slice(self.pool, old + value.astype(self.pool.dtype)[None], start)

    def scatter(self, eqn: core.JaxprEqn, indices: Any, updates: Any) -> Any:
        """The accumulator with the updates of a scatter-add into zeros added where they belong."""
        options = {key: eqn.params[key] for key in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
        return lax.scatter_add(self.pool, indices, jnp.asarray(updates).astype(self.pool.dtype), **options)


class InSlots(NamedTuple):
    """A jaxpr to evaluate; inputs in `reads` are slots (their arguments are ignored), outputs in `writes` are returned as updated pools."""

    jaxpr: core.Jaxpr
    arguments: Sequence[Any]
    reads: Mapping[int, Slot]
    writes: Mapping[int, Slot | Total]


def run_in_slots(
    jaxpr: core.Jaxpr,
    arguments: Sequence[Any],
    *,
    reads: Mapping[int, Slot] | None = None,
    writes: Mapping[int, Slot | Total] | None = None,
) -> list[Any]:
    """Evaluate a jaxpr with slots (`InSlots`).

    A scan would else build its stacked outputs apart and copy them into the slot (or add them to the accumulator), and a slot would be
    copied out to be scanned.  Scans read their other rows by an index that they scan: XLA:GPU makes no CUDA graph of a loop whose
    slices follow its counter.
    """
    steps = _steps(InSlots(jaxpr, arguments, reads or {}, writes or {}))
    try:
        loop = next(steps)
        while True:
            loop = steps.send(_run_loops((loop,))[0])
    except StopIteration as done:
        return done.value


def run_both_in_slots(one: InSlots, other: InSlots) -> tuple[list[Any], list[Any]]:
    """Evaluate two jaxprs that do not depend on each other, their scans of equal length merged into one, trip by trip.

    So what one of them awaits in a layer, a collective, may run beside what the other computes.  In a trip `one` reads its slots before
    `other` writes any: `other` may write pools that `one` reads, but not the other way round.
    """
    runs = (_steps(one), _steps(other))
    loops: list[_Loop | None] = [None, None]
    results: list[list[Any]] = [[], []]

    def advance(k: int, answer: _Answer | None) -> None:
        try:
            loops[k] = next(runs[k]) if answer is None else runs[k].send(answer)
        except StopIteration as done:
            loops[k], results[k] = None, done.value

    advance(0, None)
    advance(1, None)
    while loops[0] is not None or loops[1] is not None:
        first, second = loops
        if first is not None and second is not None and first.merges_with(second):
            answers = _run_loops((first, second))
            advance(0, answers[0])
            advance(1, answers[1])
        else:
            k = 0 if first is not None else 1
            loop = loops[k]
            assert loop is not None
            advance(k, _run_loops((loop,))[0])
    return results[0], results[1]


@dataclass(frozen=True)
class _Loop:
    """A scan as it is to be run: what it carries, the pools that it writes, and what one trip does with them."""

    length: int
    reverse: bool
    unroll: Any
    carry: list[Any]
    pools: list[Any]
    # (carry, pools as they are by now, row) -> what the trip reads
    read: Callable[[Callable[[Any], Any], Any], list[Any]]
    # (carry, what was read) -> (carry, rows to store, rows to stack)
    compute: Callable[[list[Any], list[Any]], tuple[list[Any], list[Any], list[Any]]]
    store: Callable[[list[Any], Any, list[Any]], list[Any]]

    def merges_with(self, other: _Loop) -> bool:
        """Whether both may be one loop."""
        return self.length == other.length and self.unroll == other.unroll


_Answer: TypeAlias = "tuple[list[Any], list[Any], list[Any]]"  # carry, pools, stacks


def _run_loops(loops: Sequence[_Loop]) -> list[_Answer]:
    """Loops of one length as one: in each trip all read, then compute, then store."""
    length, reverse = loops[0].length, loops[0].reverse

    def trip(state: list[tuple[list[Any], list[Any]]], rows: list[Any]) -> tuple[list[tuple[list[Any], list[Any]]], list[list[Any]]]:
        # What one loop reads of a pool that another writes, it reads as that one carries it.
        now = {id(old): new for loop, (_, pools) in zip(loops, state, strict=True) for old, new in zip(loop.pools, pools, strict=True)}
        read = [loop.read(lambda pool: now.get(id(pool), pool), row) for loop, row in zip(loops, rows, strict=True)]
        found = [loop.compute(carry, values) for loop, (carry, _), values in zip(loops, state, read, strict=True)]
        stored = [loop.store(pools, row, new) for loop, (_, pools), row, (_, new, _) in zip(loops, state, rows, found, strict=True)]
        return [(carry, pools) for (carry, _, _), pools in zip(found, stored, strict=True)], [stack for _, _, stack in found]

    count = np.arange(length, dtype=np.int32)
    rows = [jnp.asarray(count if loop.reverse == reverse else count[::-1]) for loop in loops]
    if len(loops) == 1:
        rows = [lax.iota(jnp.int32, length)]
    start = [(loop.carry, loop.pools) for loop in loops]
    end, stacks = lax.scan(trip, start, rows, length=length, reverse=reverse, unroll=loops[0].unroll)
    return [
        (carry, pools, stack if loop.reverse == reverse else [jnp.flip(leaf, 0) for leaf in stack])
        for loop, (carry, pools), stack in zip(loops, end, stacks, strict=True)
    ]


def _steps(run: InSlots) -> Generator[_Loop, _Answer, list[Any]]:
    """Evaluate a jaxpr up to each of its scans, which the caller runs."""
    jaxpr, reads, writes = run.jaxpr, run.reads, run.writes
    env: dict[core.Var, Any] = {}
    for i, (var, argument) in enumerate(zip(jaxpr.invars, run.arguments, strict=True)):
        env[var] = reads.get(i, argument)
    targets = {jaxpr.outvars[i]: slot for i, slot in writes.items() if isinstance(jaxpr.outvars[i], core.Var)}
    used = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var)}
    returned = [v for i, v in enumerate(jaxpr.outvars) if i not in writes]
    targets = {v: s for v, s in targets.items() if v not in used and v not in returned and jaxpr.outvars.count(v) == 1}
    written: dict[core.Var, Any] = {}
    zeros = _zeros_of(jaxpr)
    # What is read whole is read before any pool is written, here or by what runs together with this.
    env.update((v, env[v].load()) for v in _read_whole(jaxpr) if isinstance(env.get(v), Slot))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"]:
            _, carries = scan_counts(eqn)
            carry, pools, stacks = yield _loop_of(eqn, env, targets)
            outs = eqn.outvars[carries:]
            env.update(zip(eqn.outvars[:carries], carry, strict=True))
            env.update(zip([v for v in outs if v not in targets], stacks, strict=True))
            written.update(zip([v for v in outs if v in targets], pools, strict=True))
            continue
        inputs = [_load(env, v) for v in eqn.invars]
        target = targets.get(eqn.outvars[0]) if eqn.primitive.name == "scatter-add" and _is_in(eqn.invars[0], zeros) else None
        if isinstance(target, Total):
            # The gradient of a table of embeddings, which is mostly zeros.
            written[eqn.outvars[0]] = target.scatter(eqn, *inputs[1:])
            continue
        env.update(zip(eqn.outvars, _bind(jaxpr, eqn, inputs), strict=True))
    outs = []
    for i, atom in enumerate(jaxpr.outvars):
        if i not in writes:
            outs.append(_load(env, atom))
        elif isinstance(atom, core.Var) and atom in written:
            outs.append(written[atom])
        else:
            outs.append(writes[i].store(_load(env, atom)))
    return outs


def _loop_of(eqn: core.JaxprEqn, env: dict[core.Var, Any], targets: Mapping[Any, Slot | Total]) -> _Loop:
    """A scan with pools among its carries, for what it writes, and among its constants, for what it reads."""
    consts, carries = scan_counts(eqn)
    body = eqn.params["jaxpr"]
    fixed = [_load(env, v) for v in eqn.invars[:consts]]
    inside = body.jaxpr.invars[consts : consts + carries]
    first = [jnp.asarray(_load(env, v)).astype(b.aval.dtype) for v, b in zip(eqn.invars[consts : consts + carries], inside, strict=True)]
    scanned = [env[v] if isinstance(v, core.Var) else v.val for v in eqn.invars[consts + carries :]]
    outs = eqn.outvars[carries:]
    threaded = [v for v in outs if v in targets]

    def read(now: Callable[[Any], Any], row: Any) -> list[Any]:
        return [
            x._replace(pool=now(x.pool)).load_row(row) if isinstance(x, Slot) else lax.dynamic_index_in_dim(x, row, 0, keepdims=False)
            for x in scanned
        ]

    def compute(carry: list[Any], values: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        results = core.jaxpr_as_fun(body)(*fixed, *carry, *values)
        ys = list(zip(outs, results[carries:], strict=True))
        carry = [r.astype(c.dtype) for r, c in zip(results[:carries], carry, strict=True)]
        return carry, [y for v, y in ys if v in targets], [y for v, y in ys if v not in targets]

    def store(pools: list[Any], row: Any, values: list[Any]) -> list[Any]:
        return [targets[v]._replace(pool=pool).store_row(row, y) for v, pool, y in zip(threaded, pools, values, strict=True)]

    return _Loop(
        length=eqn.params["length"],
        reverse=eqn.params.get("reverse", False),
        unroll=eqn.params.get("unroll", 1),
        carry=first,
        pools=[targets[v].pool for v in threaded],
        read=read,
        compute=compute,
        store=store,
    )


def _read_whole(jaxpr: core.Jaxpr) -> set[core.Var]:
    """Inputs that something reads other than row by row."""
    found: set[core.Var] = set()
    for eqn in jaxpr.eqns:
        scanned = sum(scan_counts(eqn)) if eqn.primitive.name == "scan" and eqn.params["length"] else len(eqn.invars)
        found.update(v for v in eqn.invars[:scanned] if isinstance(v, core.Var))
    return found & set(jaxpr.invars)


def _zeros_of(jaxpr: core.Jaxpr) -> set[Any]:
    """Arrays of zeros."""
    return {
        eqn.outvars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], core.Literal) and eqn.invars[0].val == 0
    }


def _is_in(atom: Any, those: set[Any]) -> bool:
    return isinstance(atom, core.Var) and atom in those


def _load(env: dict[core.Var, Any], atom: Any) -> Any:
    if isinstance(atom, core.Literal):
        return jnp.asarray(atom.val, literal_dtype(atom))
    value = env[atom]
    return value.load() if isinstance(value, Slot) else value


def literal_dtype(atom: core.Literal) -> Any:
    """The dtype of a literal, whose value may be a plain number."""
    aval: Any = atom.aval
    return aval.dtype


def _bind(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Run one equation of a jaxpr."""
    variables = [v for v in eqn.invars if isinstance(v, core.Var)]
    values = [x for v, x in zip(eqn.invars, inputs, strict=True) if isinstance(v, core.Var)]
    named = dict(zip(variables, values, strict=True))
    newvar = core.gensym()
    outs = [newvar(v.aval) if isinstance(v, core.DropVar) else v for v in eqn.outvars]
    single = jaxpr.replace(constvars=[], invars=list(named), outvars=outs, eqns=[eqn.replace(outvars=outs)], effects=eqn.effects)
    return core.jaxpr_as_fun(core.ClosedJaxpr(single, []))(*named.values())
