"""Products in the dtype that their results are converted to, and of FP8 weights as GPUs take them.

The gradient of a weight that is used in bfloat16 is a bfloat16 product, which is transposed,
converted to float32 and added.  XLA:GPU fuses the addition into the product only where the product
itself is float32, in the order of the weight.  Such a product is also rounded once less.

On Hopper cuBLASLt multiplies FP8 arrays whose rows are what is summed over.  A forward and its
backward sum over different dims of a weight, so XLA:GPU transposes it before each product of one of
them: it is transposed where it is cast instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from itertools import takewhile
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core
from jax.extend.core.primitives import dot_general_p
from jax.typing import DTypeLike

from .cut import known_from
from .equations import (
    Atom,
    NewVar,
    is_fp8,
    scan_counts,
    shaped,
    substituted,
    variables,
    with_each,
    with_inner,
)
from .loops import traced

_WIDE = jnp.dtype(jnp.float32)
_MOVES = ("transpose", "reshape", "squeeze", "expand_dims")


def with_wide_products(
    jaxpr: core.Jaxpr, totals: Mapping[int, DTypeLike | None], *, start: int = 0
) -> core.Jaxpr:
    """The jaxpr in which those products of 16 bits are float32 that are results, and that nothing
    else reads.  Those in scans stay: a row of a stack that is added to has fewer bytes so.

    Args:
        jaxpr: without calls.
        totals: the dtypes that results are converted to, here or afterwards, by their numbers.
        start: equations before it stay as they are.
    """
    uses = Counter(v for eqn in jaxpr.eqns for v in variables(eqn.invars))
    uses.update(variables(jaxpr.outvars))
    maker = {v: eqn for eqn in jaxpr.eqns[start:] for v in eqn.outvars}
    newvar, env = core.gensym(), dict[core.Var, core.Var]()
    instead: dict[int, Sequence[core.JaxprEqn]] = {}  # by `id`
    ends = (jaxpr.outvars[number] for number, dtype in totals.items() if dtype == _WIDE)
    for end in variables(ends):
        if end not in maker or uses[end] != 1:
            continue
        eqn = maker[end]
        converts = [eqn] if eqn.primitive.name == "convert_element_type" else []
        product = _Product.behind(eqn.invars[0] if converts else end, maker, uses)
        if product is not None:
            env[end] = newvar(end.aval.update(dtype=_WIDE))
            instead |= {id(eqn): () for eqn in (*converts, *product.moves)}
            instead[id(product.eqn)] = product.widened(env[end], newvar)
    eqns = [new for eqn in jaxpr.eqns for new in instead.get(id(eqn), [eqn])]
    return jaxpr.replace(eqns=eqns, outvars=substituted(jaxpr.outvars, env))


def with_fp8_rows(jaxpr: core.Jaxpr, known: Sequence[bool]) -> core.Jaxpr:
    """The jaxpr in which FP8 products sum over the last dims of those operands that the inputs
    `known` determine, also in scans: an equation transposes those that lie otherwise.
    """
    determined = known_from(jaxpr, known)[1]

    def changed(eqn: core.JaxprEqn) -> Sequence[core.JaxprEqn]:
        fixed = [isinstance(v, core.Literal) or v in determined for v in eqn.invars]
        if eqn.primitive.name == "scan":
            consts, carries = scan_counts(eqn)
            fixed[consts : consts + carries] = [False] * carries
            return [with_inner(eqn, lambda body: with_fp8_rows(body, fixed))]
        if eqn.primitive is not dot_general_p or not all(is_fp8(shaped(v)) for v in eqn.invars):
            return [eqn]
        *turns, dot = traced(partial(_of_rows, eqn.params, fixed), *eqn.invars)[0]
        return [*turns, eqn.replace(invars=dot.invars, params=dot.params)] if turns else [eqn]

    return with_each(jaxpr, changed)


def _of_rows(params: dict[str, Any], turned: Sequence[bool], *operands: Array) -> Array:
    """A product whose `turned` operands have the dims of the batch first, and last those that are
    summed over.
    """
    values, dims = [], []
    sides = zip(operands, *params["dimension_numbers"], turned, strict=True)
    for value, summed, batch, turn in sides:
        order = tuple(range(value.ndim))
        if turn:
            free = [dim for dim in order if dim not in (*batch, *summed)]
            value = lax.transpose(value, (*batch, *free, *summed))
            summed, batch = order[len(batch) + len(free) :], order[: len(batch)]
        values.append(value)
        dims.append((summed, batch))
    own = {"dimension_numbers": tuple(zip(*dims, strict=True))}
    return dot_general_p.bind(*values, **params | own)


def _turned(order: tuple[int, ...], transpose: core.JaxprEqn) -> tuple[int, ...]:
    """An order of dims after a transpose."""
    return tuple(order[i] for i in transpose.params["permutation"])


class _Product(NamedTuple):
    """A product of 16 bits that is read once, and the moves of its result, each read once too."""

    eqn: core.JaxprEqn
    moves: list[core.JaxprEqn]

    @classmethod
    def behind(
        cls, end: Atom, maker: Mapping[core.Var, core.JaxprEqn], uses: Mapping[core.Var, int]
    ) -> _Product | None:
        """The product that a value is."""
        moves: list[core.JaxprEqn] = []
        while isinstance(end, core.Var) and end in maker and uses[end] == 1:
            eqn = maker[end]
            if eqn.primitive is dot_general_p:
                is_half = shaped(end).dtype in (jnp.bfloat16, jnp.float16)
                return cls(eqn, moves) if is_half else None
            if eqn.primitive.name not in _MOVES:
                return None
            moves.insert(0, eqn)
            end = eqn.invars[0]
        return None

    def widened(self, result: core.Var, newvar: NewVar) -> list[core.JaxprEqn]:
        """The equations that make the result in float32."""
        inputs, params = self.eqn.invars, self.eqn.params
        # A weight that is used transposed gives two transposes.
        turns = list(takewhile(lambda move: move.primitive.name == "transpose", self.moves))
        order = reduce(_turned, turns, self._dims)
        moves = self.moves
        if order == self._dims:
            moves = moves[len(turns) :]
        elif order == self._swapped:
            (left, right), batch = params["dimension_numbers"]
            params = params | {"dimension_numbers": ((right, left), batch[::-1])}
            moves, inputs = moves[len(turns) :], inputs[::-1]
        between = (move.invars[0].aval.update(dtype=_WIDE) for move in moves)
        values = [*map(newvar, between), result]
        params = params | {"preferred_element_type": _WIDE}
        return [
            self.eqn.replace(invars=inputs, outvars=values[:1], params=params),
            *(
                move.replace(invars=[before], outvars=[after])
                for move, before, after in zip(moves, values, values[1:], strict=False)
            ),
        ]

    @property
    def _dims(self) -> tuple[int, ...]:
        return tuple(range(shaped(self.eqn.outvars[0]).ndim))

    @property
    def _swapped(self) -> tuple[int, ...] | None:
        """The order of the result's dims where the operands change places."""
        (left, _), (batch, _) = self.eqn.params["dimension_numbers"]
        lhs, out = shaped(self.eqn.invars[0]), shaped(self.eqn.outvars[0])
        if self.eqn.params.get("out_sharding") is not None:
            return None
        shared, end = len(batch), lhs.ndim - len(left)
        return *range(shared), *range(end, out.ndim), *range(shared, end)
