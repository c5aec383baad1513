"""Evaluate a jaxpr whose stacked scan outputs go straight into buffer slots, and whose scanned inputs come straight from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
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


def run_in_slots(
    jaxpr: core.Jaxpr,
    arguments: Sequence[Any],
    *,
    reads: Mapping[int, Slot] | None = None,
    writes: Mapping[int, Slot | Total] | None = None,
) -> list[Any]:
    """Evaluate; inputs in `reads` are slots (their arguments are ignored), outputs in `writes` are returned as updated pools.

    A scan would else build its stacked outputs apart and copy them into the slot (or add them to the accumulator), and a slot would be
    copied out to be scanned.  Scans read their other rows by an index that they scan: XLA:GPU makes no CUDA graph of a loop whose
    slices follow its counter.
    """
    reads, writes = reads or {}, writes or {}
    env: dict[core.Var, Any] = {}
    for i, (var, argument) in enumerate(zip(jaxpr.invars, arguments, strict=True)):
        env[var] = reads.get(i, argument)
    targets = {jaxpr.outvars[i]: slot for i, slot in writes.items() if isinstance(jaxpr.outvars[i], core.Var)}
    used = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var)}
    returned = [v for i, v in enumerate(jaxpr.outvars) if i not in writes]
    targets = {v: s for v, s in targets.items() if v not in used and v not in returned and jaxpr.outvars.count(v) == 1}
    written: dict[core.Var, Any] = {}
    zeros = _zeros_of(jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"]:
            _run_scan(eqn, env, targets, written)
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


def _run_scan(eqn: core.JaxprEqn, env: dict[core.Var, Any], targets: Mapping[Any, Slot | Total], written: dict[core.Var, Any]) -> None:
    """A scan with pools among its carries, for what it writes, and among its constants, for what it reads."""
    consts, carries = scan_counts(eqn)
    length = eqn.params["length"]
    body = eqn.params["jaxpr"]
    fixed = [_load(env, v) for v in eqn.invars[:consts]]
    inside = body.jaxpr.invars[consts : consts + carries]
    first = [jnp.asarray(_load(env, v)).astype(b.aval.dtype) for v, b in zip(eqn.invars[consts : consts + carries], inside, strict=True)]
    scanned = [env[v] if isinstance(v, core.Var) else v.val for v in eqn.invars[consts + carries :]]
    outs = eqn.outvars[carries:]
    threaded = [v for v in outs if v in targets]

    def trip(state: tuple[list[Any], list[Any]], row: Any) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
        carry, pools = state
        values = [x.load_row(row) if isinstance(x, Slot) else lax.dynamic_index_in_dim(x, row, 0, keepdims=False) for x in scanned]
        results = core.jaxpr_as_fun(body)(*fixed, *carry, *values)
        ys = dict(zip(outs, results[carries:], strict=True))
        new = []
        for var, pool in zip(threaded, pools, strict=True):
            new.append(targets[var]._replace(pool=pool).store_row(row, ys[var]))
        carry = [r.astype(c.dtype) for r, c in zip(results[:carries], carry, strict=True)]
        return (carry, new), [ys[v] for v in outs if v not in targets]

    rows = lax.iota(jnp.int32, length)
    options = {k: eqn.params[k] for k in ("reverse", "unroll") if k in eqn.params}
    state, stacks = lax.scan(trip, (first, [targets[v].pool for v in threaded]), rows, length=length, **options)
    env.update(zip(eqn.outvars[:carries], state[0], strict=True))
    env.update(zip([v for v in outs if v not in targets], stacks, strict=True))
    written.update(zip(threaded, state[1], strict=True))
