"""For all passes over equations: their variables, copies under other names, the parts of scans,
results, and costs: bytes, flops, which equations only change layout, and which are light.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import core as jax_core
from jax.extend import core

Atom: TypeAlias = core.Var | core.Literal
NewVar: TypeAlias = Callable[[Any], core.Var]
Pairs: TypeAlias = "Sequence[tuple[Any, Any]]"


def variables(atoms: Iterable[Any]) -> list[core.Var]:
    """The variables among these atoms, without literals."""
    return [v for v in atoms if isinstance(v, core.Var)]


def reads(jaxpr: core.Jaxpr) -> tuple[bool, ...]:
    """Which inputs an equation or an output of a jaxpr reads."""
    used = {v for e in jaxpr.eqns for v in variables(e.invars)} | {*variables(jaxpr.outvars)}
    return tuple(v in used for v in jaxpr.invars)


def every_equation(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations, also in loops, branches and calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in core.jaxprs_in_params(eqn.params):
            yield from every_equation(body)


def with_bodies(params: Any, change: Callable[[core.Jaxpr], core.Jaxpr]) -> Any:
    """Parameters of an equation with each of their jaxprs changed; the same object where nothing
    changes.
    """
    if isinstance(params, core.Jaxpr):
        return change(params)
    if isinstance(params, core.ClosedJaxpr):
        inner = change(params.jaxpr)
        return params if inner is params.jaxpr else core.ClosedJaxpr(inner, params.consts)
    if type(params) not in (tuple, dict):
        return params
    old = params if type(params) is dict else dict(enumerate(params))
    new = {key: with_bodies(value, change) for key, value in old.items()}
    if all(new[key] is old[key] for key in old):
        return params
    return new if type(params) is dict else tuple(new.values())


def renamed(jaxpr: core.Jaxpr, env: dict[core.Var, Any]) -> core.Jaxpr:
    """The jaxpr that reads other values in place of some of its variables.

    Equations that read none of these stay the same objects.
    """

    eqns = [
        eqn
        if env.keys().isdisjoint(variables(eqn.invars))
        else eqn.replace(invars=_values(eqn.invars, env))
        for eqn in jaxpr.eqns
    ]
    return jaxpr.replace(eqns=eqns, outvars=_values(jaxpr.outvars, env))


def _values(atoms: Iterable[Any], env: dict[core.Var, Any]) -> list[Any]:
    """The atoms, with other values in place of some variables."""
    return [env.get(a, a) if isinstance(a, core.Var) else a for a in atoms]


def copied(
    eqns: Iterable[core.JaxprEqn], env: dict[core.Var, Any], newvar: NewVar
) -> list[core.JaxprEqn]:
    """The equations with new variables for their results; `env` has the new ones then."""
    found = []
    for eqn in eqns:
        inputs = _values(eqn.invars, env)
        outputs = [newvar(v.aval) for v in eqn.outvars]
        env.update(zip(eqn.outvars, outputs, strict=True))
        found.append(eqn.replace(invars=inputs, outvars=outputs))
    return found


def producers(
    values: Iterable[core.Var],
    eqns: Sequence[core.JaxprEqn],
    at_hand: Callable[[core.Var], bool] = lambda v: False,
) -> list[core.JaxprEqn]:
    """The equations, in order, that compute the values from those at hand."""
    wanted = {v for v in values if not at_hand(v)}
    found = []
    for eqn in reversed(eqns):
        if any(v in wanted for v in eqn.outvars):
            found.append(eqn)
            wanted.update(v for v in variables(eqn.invars) if not at_hand(v))
    return found[::-1]


def with_equations(
    like: core.Jaxpr,
    eqns: Sequence[core.JaxprEqn],
    invars: Sequence[core.Var],
    outvars: Sequence[Any],
) -> core.Jaxpr:
    """A jaxpr of these equations, with the effects that they have."""
    effects = frozenset().union(*(e.effects for e in eqns))
    return like.replace(
        eqns=list(eqns), invars=list(invars), outvars=list(outvars), effects=effects
    )


def scan_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """The number of constants and of carries of a scan."""
    return eqn.params["num_consts"], eqn.params["num_carry"]


@dataclass(frozen=True)
class Scan:
    """The parts of a scan: operands with their variables in the body, and values of the body with
    the scan's outputs.
    """

    like: core.JaxprEqn
    eqns: Sequence[core.JaxprEqn]
    consts: Pairs
    carry: Pairs
    xs: Pairs
    carry_out: Pairs
    ys: Pairs

    @classmethod
    def of(cls, eqn: core.JaxprEqn) -> Scan:
        """The parts of an equation whose body has no constants."""
        consts, carries = scan_counts(eqn)
        body, head = eqn.params["jaxpr"].jaxpr, sum(scan_counts(eqn))
        ins = list(zip(eqn.invars, body.invars, strict=True))
        outs = list(zip(body.outvars, eqn.outvars, strict=True))
        inputs = (ins[:consts], ins[consts:head], ins[head:])
        return cls(eqn, body.eqns, *inputs, outs[:carries], outs[carries:])

    def equation(self) -> core.JaxprEqn:
        """The parts as an equation."""
        ins = [*self.consts, *self.carry, *self.xs]
        outs = [*self.carry_out, *self.ys]
        like = self.like.params["jaxpr"].jaxpr
        body = with_equations(like, self.eqns, [v for _, v in ins], [v for v, _ in outs])
        params = self.like.params | {
            "jaxpr": core.ClosedJaxpr(body, []),
            "num_consts": len(self.consts),
            "num_carry": len(self.carry),
        }
        return self.like.replace(
            invars=[operand for operand, _ in ins],
            outvars=[output for _, output in outs],
            params=params,
            effects=body.effects,
        )


def literal(atom: core.Literal) -> Any:
    """The value of a literal (it may be a plain number) as an array."""
    aval: Any = atom.aval
    return jnp.asarray(atom.val, aval.dtype)


def results_of(code: core.ClosedJaxpr, *arguments: Any) -> list[Any]:
    """Evaluate a jaxpr: arrays, also where an output is a literal."""
    found = core.jaxpr_as_fun(code)(*arguments)
    pairs = zip(found, code.jaxpr.outvars, strict=True)
    return [literal(atom) if isinstance(atom, core.Literal) else value for value, atom in pairs]


def bind(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Run one equation of a jaxpr."""
    pairs = zip(eqn.invars, inputs, strict=True)
    named = {v: value for v, value in pairs if isinstance(v, core.Var)}
    newvar = core.gensym()
    outs = [newvar(v.aval) if isinstance(v, core.DropVar) else v for v in eqn.outvars]
    opened = jaxpr.replace(constvars=[])
    single = with_equations(opened, [eqn.replace(outvars=outs)], list(named), outs)
    return core.jaxpr_as_fun(core.ClosedJaxpr(single, []))(*named.values())


_SHAPES = {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "rev"}
_LAYOUT = _SHAPES | {"copy", "copy_p", "slice", "dynamic_slice"}


def is_layout(eqn: core.JaxprEqn) -> bool:
    """True for operations that compute nothing: XLA turns them into addressing, or gathers parts
    from other devices.
    """
    return eqn.primitive.name in _LAYOUT or is_gather(eqn)


def grows(eqn: core.JaxprEqn) -> bool:
    """True for an equation whose result has more bytes than its inputs: a cast to more bits."""
    return sum(nbytes(v.aval) for v in variables(eqn.invars)) < nbytes(eqn.outvars[0].aval)


def is_inexact(eqn: core.JaxprEqn) -> bool:
    """True for an equation whose result has fractions: no index, and no mask."""
    aval: Any = eqn.outvars[0].aval
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def is_gather(eqn: core.JaxprEqn) -> bool:
    """True for a sharding constraint that leaves nothing split.  Its input may be split over other
    axes, and then has fewer bytes on a device.
    """
    if eqn.primitive.name != "sharding_constraint":
        return False
    spec = getattr(eqn.params["sharding"], "spec", (True,))
    return not any(spec) and not eqn.params.get("unconstrained_dims")


def nbytes(aval: Any) -> int:
    """Bytes of an array with this aval (PRNG keys count as their words)."""
    size = int(np.prod(aval.shape, dtype=np.int64))
    try:
        return size * np.dtype(aval.dtype).itemsize
    except TypeError:
        return size * 8


def tiled_bytes(shape: Sequence[int], itemsize: int, tile: Sequence[int]) -> int:
    """Bytes of an array in memory of such tiles over the last two dims; () for memory of rows.

    A tile has fewer rows where the array has: a power of two.
    """
    if not (tile and shape):
        return math.prod(shape) * itemsize
    *outer, row = shape
    if outer:
        rows = min(tile[0], 2 ** (outer[-1] - 1).bit_length()) if outer[-1] else 1
        outer[-1] = -(-outer[-1] // rows) * rows
    return math.prod(outer) * -(-row // tile[1]) * tile[1] * itemsize


def stacked(aval: Any, length: int) -> Any:
    """The aval of `length` of these, one from each trip of a scan."""
    return jax_core.ShapedArray((length, *aval.shape), aval.dtype)


_MATMULS = {"dot_general", "conv_general_dilated"}
# Primitives that may be most of a backward's work.
_KERNELS = {"pallas_call", "custom_call", "ffi_call"}
_HEAVY = _MATMULS | _KERNELS | {"ragged_dot", "ragged_dot_general", "cumsum", "sort"}


class Work(NamedTuple):
    """Floating point operations, and bytes that matmuls read and write (operations between them are
    taken to be fused).
    """

    flops: float
    bytes: float


def count_work(jaxpr: core.Jaxpr) -> Work:
    """Of a jaxpr: two flops a multiplication of matmuls, one a number that anything else makes;
    loops as often as they run.

    XLA's own count takes the body of a loop once, however often it runs, and so cannot be used for
    stages that scan over layers.
    """
    flops = moved = 0.0
    for eqn in jaxpr.eqns:
        bodies = list(core.jaxprs_in_params(eqn.params))
        if bodies:
            times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            parts = [count_work(body) for body in bodies]
            # Of branches the most expensive one.
            part = (
                max(parts)
                if eqn.primitive.name == "cond"
                else Work(sum(p.flops for p in parts), sum(p.bytes for p in parts))
            )
            flops, moved = flops + times * part.flops, moved + times * part.bytes
        elif eqn.primitive.name in _MATMULS:
            flops += 2 * _multiplications(eqn)
            moved += sum(nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
        else:
            flops += sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))
    return Work(flops, moved)


def is_light(eqn: core.JaxprEqn) -> bool:
    """True for an equation that is no matmul and has none in its bodies."""
    return (
        eqn.primitive.name not in _HEAVY
        and not eqn.effects
        and not list(core.jaxprs_in_params(eqn.params))
    )


def _multiplications(eqn: Any) -> int:
    """Of a matmul or a convolution."""
    size = math.prod(eqn.outvars[0].aval.shape)
    left, right = (v.aval.shape for v in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return int(size * math.prod(left[d] for d in contracted))
    # Each number of the output sums over the kernel of one output feature.
    features = right[eqn.params["dimension_numbers"].rhs_spec[0]]
    return int(size * math.prod(right) // max(1, features))
