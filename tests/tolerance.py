"""How far two valid computations of the same numbers may lie apart.

Bits are the claim only where one compiled program runs on both sides (a run and its resumption, two
runs of one executable), where data only moves, or where every operation is exact.  Programs that
XLA compiled apart fuse and vectorise in other ways, and those ways differ from one instruction set
to the next, so they are compared within a bound.

float64: `FLOAT64`, 1e-12 of an array's largest entry.  That is the claim of the project, and 10 to
100 times what `rounding` below gives for the sizes of these tests.

Everything else, and what must be tighter: each rounding multiplies a value by 1 + d with |d| <= u,
the unit roundoff (2^-53, 2^-24 and 2^-8 for float64, float32 and bfloat16).  A chain of n roundings
whose d are independent with mean zero ends within a factor 1 +- lambda sqrt(n) u with probability
at least 1 - 2 exp(-lambda^2 / 2) (Higham and Mary 2019, "A new approach to probabilistic rounding
error analysis", theorem 2.4).  lambda = 5 leaves 7e-6.  n is the number of roundings on the longest
path from an input to an output; `longest_chain` reads it from the jaxpr of a function, its
gradients' too.  Sums of terms of random sign lose nothing by cancellation here, since errors are
relative to the largest entry of an array: what cancels in the values cancels in their independent
errors too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOAT64 = 1e-12
LAMBDA = 5.0
# Units in the last place that XLA's transcendental functions may be off, counted as so many
# roundings.
TRANSCENDENTAL = 4
# A kernel that JAX cannot look into: a product with a matrix of the tests' size, and an activation
# function.
OPAQUE = 20


def unit_roundoff(dtype: Any) -> float:
    """u: half the distance from 1 to the next number."""
    return float(jnp.finfo(dtype).eps) / 2


def rounding(count: int, dtype: Any = np.float64) -> float:
    """lambda sqrt(n) u: how far a chain of `count` roundings ends from the exact answer, relative
    to the largest entry.
    """
    return LAMBDA * math.sqrt(count) * unit_roundoff(dtype)


def apart(count: int, dtype: Any = np.float64) -> float:
    """How far two such chains end from each other."""
    return 2 * rounding(count, dtype)


def same(found: Any, wanted: Any) -> bool:
    """Whether the leaves of two trees are equal, bit by bit."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(np.array_equal(f, w) for f, w in pairs)


def relative(found: Any, wanted: Any) -> float:
    """The largest difference of any two leaves, relative to the largest entry of the wanted one;
    zeros must be zeros, and what is not finite is infinitely far.
    """
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max((_relative(np.asarray(f), np.asarray(w)) for f, w in pairs), default=0.0)


def _relative(found: Any, wanted: Any) -> float:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    difference = float(np.max(np.abs(found - wanted), initial=0.0))
    size = float(np.max(np.abs(wanted), initial=0.0))
    if not math.isfinite(difference) or (difference and not size):
        return math.inf
    return difference / size if size else 0.0


def longest_chain(function: Callable[..., Any], *arguments: Any) -> int:
    """Roundings on the longest path from an argument to a result of the function."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return max(_chain(jaxpr, [0] * len(jaxpr.invars)), default=0)


ONCE = (
    "add",
    "add_any",
    "convert_element_type",
    "div",
    "integer_pow",
    "mul",
    "rem",
    "sqrt",
    "square",
    "sub",
)
FUNCTIONS = (
    "cos",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "logistic",
    "pow",
    "rsqrt",
    "sin",
    "tan",
    "tanh",
)
SUMMED = {"reduce_sum": "axes", "cumsum": "axis", "cumprod": "axis", "reduce_prod": "axes"}


def _cost(eqn: Any) -> int:
    """Roundings that one equation without a body adds to each entry of its results."""
    name, first = eqn.primitive.name, eqn.invars[0].aval if eqn.invars else None
    if name in ONCE or name in FUNCTIONS:
        return 1 if name in ONCE else TRANSCENDENTAL
    if name == "dot_general":
        ((contracted, _), _) = eqn.params["dimension_numbers"]
        return max(math.prod(first.shape[d] for d in contracted), 1)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    if name in SUMMED:
        axes = eqn.params[SUMMED[name]]
        return math.prod(first.shape[d] for d in ((axes,) if isinstance(axes, int) else axes))
    if name == "scatter-add":
        return int(eqn.invars[2].aval.size)  # at the most all updates meet in one entry
    return OPAQUE if name == "pure_callback" else 0  # what is left moves, picks or compares


def _bodies(eqn: Any) -> list[Any]:
    """The jaxprs that an equation runs."""
    values = [
        v
        for value in eqn.params.values()
        for v in (value if isinstance(value, tuple | list) else (value,))
    ]
    return [inner for inner in (getattr(v, "jaxpr", v) for v in values) if hasattr(inner, "eqns")]


def _chain(jaxpr: Any, given: Sequence[int]) -> list[int]:
    """For each result of the jaxpr, the longest path to it; `given` are those to its arguments."""
    known = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        longest = max((known.get(v, 0) for v in eqn.invars if not hasattr(v, "val")), default=0)
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        bodies = [] if eqn.primitive.name == "scatter-add" else _bodies(eqn)
        inside = max(
            (max(_chain(body, [0] * len(body.invars)), default=0) for body in bodies), default=0
        )
        # What a body adds, it adds in every trip: an upper bound where only some of its results are
        # carried.
        known.update(
            dict.fromkeys(eqn.outvars, longest + (trips * inside if bodies else _cost(eqn)))
        )
    return [known.get(v, 0) if not hasattr(v, "val") else 0 for v in jaxpr.outvars]
