"""Leaves that a step replaces: scales of FP8, amax histories, biases that balance experts.  The
"gradient" of such a leaf is its next value, and microbatches' are combined by a rule.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ..arrays import Flag, Params, by_path, summable
from ..errors import PipelineError
from .settings import Patterns, patterns_of


class Replaced(enum.Enum):
    """How the values that microbatches, or data shards, give a leaf make its next value.

    A microbatch's value is what `jax.grad` of it gives for the leaf, however the loss is scaled: a
    `jax.custom_vjp` returns it.

    Example:
        >>> import jax.numpy as jnp, jaxpipe as jp
        >>> model = jp.Model(lambda p, x: x * p["w"], replaced={"scale$": jp.Replaced.MAX})
        >>> model.replaced.of("stages/scale").microbatches
        <Replaced.MAX: 'max'>
    """

    LAST = "last"  # that of the last microbatch in the batch's order; of the last data shard
    MAX = "max"  # the greatest, number by number
    MEAN = "mean"
    SUM = "sum"


class Replacement(NamedTuple):
    """The rule of a leaf."""

    microbatches: Replaced
    shards: Replaced  # over data axes

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """An accumulator that no microbatch has added to."""
        return jnp.full(shape, self._least(dtype), dtype)

    def add(self, total: Array, value: Array, is_last: Flag | bool) -> Array:
        """The accumulator with the value of a microbatch; `is_last`: of the last one in the order
        of the batch, whenever it runs.
        """
        value = value.astype(total.dtype)
        if self.microbatches is Replaced.LAST:
            value = jnp.where(is_last, value, jnp.zeros_like(value))
        return self.joined(total, value)

    def joined(self, one: Array, other: Array, where: Flag | bool = True) -> Array:
        """Two accumulators as one; the other is zeros where the flag does not hold."""
        if self.microbatches is Replaced.MAX:
            return jnp.where(where, jnp.maximum(one, other), one)
        return one + other

    def kept(self, where: Flag, total: Array) -> Array:
        """The accumulator where the flag holds, an empty one elsewhere."""
        return jnp.where(where, total, self.empty(total.shape, total.dtype))

    def next_value(
        self, total: Array, count: int, pipe: Sequence[str] = (), data: Sequence[str] = ()
    ) -> Any:
        """The leaf's next value from the accumulators of `count` microbatches on devices along the
        axes `pipe`, each of which has run some of them, and of data shards.

        Numbers that no microbatch wrote, such as the end of a buffer that other stages fill, are 0.
        """
        if self.microbatches is Replaced.MAX:
            total = lax.pmax(total, pipe) if pipe else total
            total = jnp.where(total == self._least(total.dtype), 0, total)
        else:
            total = lax.psum(total, pipe) if pipe else total
            total = total / count if self.microbatches is Replaced.MEAN else total
        if not data:
            return total
        if self.shards is Replaced.MAX:
            return lax.pmax(total, data)
        if self.shards is Replaced.LAST:
            is_last = lax.axis_index(data) == lax.axis_size(data) - 1
            total = jnp.where(is_last, total, jnp.zeros_like(total))
        total = lax.psum(total, data)
        return total / lax.axis_size(data) if self.shards is Replaced.MEAN else total

    def _least(self, dtype: DTypeLike) -> float:
        """What a maximum, or a sum, starts from."""
        return -jnp.inf if self.microbatches is Replaced.MAX else 0


ADDED = Replacement(Replaced.SUM, Replaced.SUM)  # as gradients are


@dataclass(frozen=True)
class Replacements:
    """The rules of a model's leaves by regular expressions of their paths."""

    patterns: Patterns
    rules: tuple[Replacement, ...]

    @classmethod
    def of_rules(cls, rules: Mapping[str, Replaced | tuple[Replaced, Replaced]]) -> Replacements:
        """From what a user writes; PipelineError for no regular expression."""
        pairs = [rule if isinstance(rule, tuple) else (rule, rule) for rule in rules.values()]
        found = tuple(Replacement(*both) for both in pairs)
        return cls(patterns_of("replaced", list(rules)), found)

    def of(self, path: str) -> Replacement | None:
        """The rule of a leaf; None for one that is not replaced."""
        return next(iter(self._all(path)), None)

    def _all(self, path: str) -> list[Replacement]:
        pairs = zip(self.patterns.of, self.rules, strict=True)
        return list(dict.fromkeys(rule for pattern, rule in pairs if pattern.search(path)))

    def faults(self, path: str, dtype: np.dtype, *, frozen: bool, spread: bool) -> list[str]:
        """Why a leaf cannot be replaced; `spread`: its function runs on all devices at once."""
        rules = self._all(path)
        if not rules:
            return []
        is_max = any(rule.microbatches is Replaced.MAX for rule in rules)
        no_gradient = not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2
        whys = {
            "in frozen= too: a frozen leaf keeps its value; take it out of one": frozen,
            "found by several expressions with unlike rules; leave one of them": len(rules) > 1,
            f"is {dtype}, in which there is no gradient to add; keep it in float32": no_gradient,
            "its function is spread over all devices, each of which would have a part of its "
            "value; take jaxpipe.spread off, or the leaf out of the function": spread,
            "it is shared, and JAX adds what its uses in a microbatch give, so that the greatest "
            "of them is lost; give each stage a leaf of its own, or take Replaced.SUM, MEAN or "
            "LAST": is_max and path.partition("/")[0] == "shared",
        }
        return [f"{path} is in replaced=, but {why}" for why, holds in whys.items() if holds]


def in_microbatches(
    params: Params, rules: Replacements, count: int
) -> tuple[dict[str, Array], Callable[[Mapping[str, Array]], Params]]:
    """The leaves that are replaced by path, one for each of `count` microbatches, [count, ...], and
    the function (these, of one microbatch) -> parameters.

    The gradient of such a leaf is what its rule makes of the microbatches' values.  PipelineError
    lists leaves that cannot be replaced.
    """
    leaves, tree = by_path(dict(params)), jax.tree.structure(dict(params))
    faults = rules.patterns.faults(list(leaves))
    for path, leaf in leaves.items():
        faults += rules.faults(path, leaf.dtype, frozen=False, spread=False)
    PipelineError.refuse("", faults)
    found = {path: rules.of(path) for path in leaves}
    rows = {path: _repeated(leaves[path], rule, count) for path, rule in found.items() if rule}

    def with_rows(rows: Mapping[str, Array]) -> Params:
        return dict(jax.tree.unflatten(tree, list({**leaves, **rows}.values())))

    return rows, with_rows


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _repeated(leaf: Array, rule: Replacement, count: int) -> Array:
    """The leaf once for each microbatch."""
    return jnp.broadcast_to(leaf, (count, *jnp.shape(leaf)))


def _repeated_forward(leaf: Array, rule: Replacement, count: int) -> tuple[Array, None]:
    return _repeated(leaf, rule, count), None


def _combined(rule: Replacement, count: int, _: None, values: Array) -> tuple[Array]:
    own = summable(values)

    def add(number: Array, total: Array) -> Array:
        return rule.add(total, own[number], number == count - 1)

    total = lax.fori_loop(0, count, add, rule.empty(own.shape[1:], own.dtype))
    return (rule.next_value(total, count).astype(values.dtype),)


_repeated.defvjp(_repeated_forward, _combined)
