"""Causal attention of a slice of a sequence by blocks of queries and of keys, in plain JAX.

Scores of one block of queries and one block of keys exist at a time (Dao et al. 2022, algorithm 1;
Dao 2023, section 3.1), and again in the backward.  No fused kernel is needed, so that the memory is
that of one, and the speed is not.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_HIDDEN = -1e30


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(query: Any, keys: Any, values: Any, offset: Any, block: int) -> Any:
    """Values [b, s, k, h] mixed for queries [b, t, k, g, h] at positions `offset` to `offset` + t.

    b rows, t and s time, k key-value heads, g query heads of each, h features of a head.  `block`
    divides t and s.
    """
    return _forward(query, keys, values, offset, block)[0]


def _scores(query: Any, keys: Any, at: Any, j: Any) -> Any:
    """Scores of a block of queries at positions `at` and the j-th block of keys: [b, k, g, t, s] in
    float32 at least.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, keys, preferred_element_type=wide)
    seen = at[:, None] >= j * keys.shape[1] + jnp.arange(keys.shape[1])
    return jnp.where(seen, scores / math.sqrt(query.shape[-1]), _HIDDEN)


def _cut(array: Any, block: int) -> Any:
    """[b, n * block, ...] -> [n, b, block, ...]."""
    return jnp.moveaxis(array.reshape(array.shape[0], -1, block, *array.shape[2:]), 1, 0)


def _joined(blocks: Any) -> Any:
    """The inverse."""
    whole = jnp.moveaxis(blocks, 0, 1)
    return whole.reshape(whole.shape[0], -1, *whole.shape[3:])


def _positions(query: Any, offset: Any, block: int) -> Any:
    return (offset + jnp.arange(query.shape[1])).reshape(-1, block)


def _forward(query: Any, keys: Any, values: Any, offset: Any, block: int) -> tuple[Any, Any]:
    """The result, and for each query the logarithm of its sum of exponentials, in blocks."""
    key_blocks, value_blocks = _cut(keys, block), _cut(values, block)
    numbers = jnp.arange(keys.shape[1] // block)

    def of_queries(part: tuple[Any, Any]) -> tuple[Any, Any]:
        own, at = part

        def of_keys(state: tuple[Any, Any, Any], given: tuple[Any, Any, Any]) -> tuple[Any, None]:
            most, total, mixed = state
            key, value, j = given
            scores = _scores(own, key, at, j)
            new = jnp.maximum(most, scores.max(axis=-1))
            weights, kept = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
            more = jnp.einsum(
                "bkgts,bskh->bkgth",
                weights.astype(value.dtype),
                value,
                preferred_element_type=weights.dtype,
            )
            total = total * kept + weights.sum(axis=-1)
            return (new, total, mixed * kept[..., None] + more), None

        b, t, k, g, h = own.shape
        wide = jnp.promote_types(own.dtype, jnp.float32)
        zeros = jnp.zeros((b, k, g, t), wide)
        begin = (zeros + _HIDDEN, zeros, jnp.zeros((b, k, g, t, h), wide))
        (most, total, mixed), _ = lax.scan(of_keys, begin, (key_blocks, value_blocks, numbers))
        found = jnp.moveaxis(mixed / total[..., None], 3, 1)
        return found.astype(own.dtype), most + jnp.log(total)

    found, sums = lax.map(of_queries, (_cut(query, block), _positions(query, offset, block)))
    return _joined(found), sums


def _kept(query: Any, keys: Any, values: Any, offset: Any, block: int) -> tuple[Any, Any]:
    found, sums = _forward(query, keys, values, offset, block)
    return found, (query, keys, values, offset, found, sums)


def _backward(block: int, kept: Any, gradient: Any) -> tuple[Any, ...]:
    query, keys, values, offset, found, sums = kept
    wide = sums.dtype
    products = jnp.einsum("btkgh,btkgh->btkg", found, gradient, preferred_element_type=wide)
    queries = (
        _cut(query, block),
        _cut(gradient, block),
        _cut(products, block),
        sums,
        _positions(query, offset, block),
        jnp.arange(query.shape[1] // block),
    )

    def of_keys(dquery: Any, given: tuple[Any, Any, Any]) -> tuple[Any, tuple[Any, Any]]:
        key, value, j = given

        def of_queries(state: Any, part: Any) -> tuple[Any, None]:
            dquery, dkey, dvalue = state
            own, dy, product, total, at, i = part
            weights = jnp.exp(_scores(own, key, at, j) - total[..., None])
            back = jnp.einsum("btkgh,bskh->bkgts", dy, value, preferred_element_type=wide)
            change = weights * (back - jnp.moveaxis(product, 1, 3)[..., None])
            change = (change / math.sqrt(own.shape[-1])).astype(own.dtype)
            weights = weights.astype(dy.dtype)
            sums_of = partial(jnp.einsum, preferred_element_type=wide)
            dvalue += sums_of("bkgts,btkgh->bskh", weights, dy)
            dkey += sums_of("bkgts,btkgh->bskh", change, own)
            more = dquery[i] + sums_of("bkgts,bskh->btkgh", change, key)
            return (lax.dynamic_update_index_in_dim(dquery, more, i, 0), dkey, dvalue), None

        zeros = jnp.zeros(key.shape, wide)
        (dquery, dkey, dvalue), _ = lax.scan(of_queries, (dquery, zeros, zeros), queries)
        return dquery, (dkey.astype(key.dtype), dvalue.astype(value.dtype))

    blocks = (_cut(keys, block), _cut(values, block), jnp.arange(keys.shape[1] // block))
    begin = jnp.zeros(queries[0].shape, wide)
    dquery, (dkeys, dvalues) = lax.scan(of_keys, begin, blocks)
    return _joined(dquery).astype(query.dtype), _joined(dkeys), _joined(dvalues), None


attend.defvjp(_kept, _backward)
