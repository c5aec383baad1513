"""For all passes over equations: their variables, copies under other names, the parts of scans,
results, and costs; and collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import core as jax_core
from jax._src import flattree
from jax.extend import core
from jax.extend.core.primitives import convert_element_type_p
from jax.typing import ArrayLike

from ..arrays import Leaf, Leaves

T = TypeVar("T")

Atom: TypeAlias = core.Var | core.Literal
NewVar: TypeAlias = "Callable[[jax_core.AbstractValue], core.Var]"
Pairs: TypeAlias = "Sequence[tuple[Atom, core.Var]]"
# A jaxpr with values for its constants.  It is a class of its own in JAX 0.11, which JAX 0.12 does
# not name any more.
ClosedJaxpr: TypeAlias = core.Jaxpr
_NONE = jax.make_jaxpr(lambda: ())()
_CLOSED, NOTHING = type(_NONE), _NONE.jaxpr


def closed_jaxpr(jaxpr: core.Jaxpr, consts: Sequence[ArrayLike] = ()) -> ClosedJaxpr:
    """The jaxpr with these values for its constants."""
    return _CLOSED(jaxpr, list(consts))


def shaped(atom: Atom) -> jax_core.ShapedArray:
    """The shape and dtype of a variable or a literal, which JAX types as any abstract value."""
    return cast("jax_core.ShapedArray", atom.aval)


def variables(atoms: Iterable[object]) -> list[core.Var]:
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
    if isinstance(params, _CLOSED):
        inner = change(params.jaxpr)
        return params if inner is params.jaxpr else closed_jaxpr(inner, params.consts)
    if type(params) not in (tuple, dict):
        return params
    old = params if type(params) is dict else dict(enumerate(params))
    new = {key: with_bodies(value, change) for key, value in old.items()}
    if all(new[key] is old[key] for key in old):
        return params
    return new if type(params) is dict else tuple(new.values())


def with_each(
    jaxpr: core.Jaxpr, change: Callable[[core.JaxprEqn], Iterable[core.JaxprEqn]]
) -> core.Jaxpr:
    """The jaxpr with what `change` puts in the place of each equation; the same object where it
    gives them back, so that calls stay shared.
    """
    eqns = [new for eqn in jaxpr.eqns for new in change(eqn)]
    same = list(map(id, eqns)) == list(map(id, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def with_inner(eqn: core.JaxprEqn, change: Callable[[core.Jaxpr], core.Jaxpr]) -> core.JaxprEqn:
    """The equation with each of its jaxprs changed; the same object where nothing changes."""
    params = with_bodies(eqn.params, change)
    return eqn if params is eqn.params else eqn.replace(params=params)


def renamed(jaxpr: core.Jaxpr, env: Mapping[core.Var, Atom]) -> core.Jaxpr:
    """The jaxpr that reads other values in place of some of its variables.

    Equations that read none of these stay the same objects.
    """

    eqns = [
        eqn
        if env.keys().isdisjoint(variables(eqn.invars))
        else eqn.replace(invars=substituted(eqn.invars, env))
        for eqn in jaxpr.eqns
    ]
    return jaxpr.replace(eqns=eqns, outvars=substituted(jaxpr.outvars, env))


def substituted(atoms: Iterable[Atom], env: Mapping[core.Var, Atom]) -> list[Atom]:
    """The atoms, with other values in place of some variables."""
    return [env.get(a, a) if isinstance(a, core.Var) else a for a in atoms]


def copied(
    eqns: Iterable[core.JaxprEqn], env: Mapping[core.Var, Atom], newvar: NewVar
) -> tuple[list[core.JaxprEqn], dict[core.Var, Atom]]:
    """The equations with new variables for their results, and `env` with these."""
    found, env = [], dict(env)
    for eqn in eqns:
        inputs = substituted(eqn.invars, env)
        outputs = [newvar(v.aval) for v in eqn.outvars]
        env.update(zip(eqn.outvars, outputs, strict=True))
        found.append(eqn.replace(invars=inputs, outvars=outputs))
    return found, env


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
    outvars: Sequence[Atom],
) -> core.Jaxpr:
    """A jaxpr of these equations, with the effects that they have."""
    effects = frozenset().union(*(e.effects for e in eqns))
    return like.replace(
        eqns=list(eqns), invars=list(invars), outvars=list(outvars), effects=effects
    )


def scan_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """The number of constants and of carries of a scan."""
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_params(consts: int, carry: int, xs: int, ys: int) -> dict[str, flattree.FlatTree]:
    """The parameters of a scan that say how its operands and results are grouped.

    JAX has no public name for these trees.
    """

    def grouped(*counts: int) -> flattree.FlatTree:
        return flattree.pack(tuple(map(flattree.nones, counts)))

    return {"ft_in": grouped(consts, carry, xs), "ft_out": grouped(carry, ys)}


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
        counts = map(len, (self.consts, self.carry, self.xs, self.ys))
        closed = {"jaxpr": closed_jaxpr(body)}
        params = self.like.params | closed | scan_params(*counts)
        return self.like.replace(
            invars=[operand for operand, _ in ins],
            outvars=[output for _, output in outs],
            params=params,
            effects=body.effects,
        )


def literal(atom: core.Literal) -> jax.Array:
    """The value of a literal (it may be a plain number) as an array."""
    return jnp.asarray(atom.val, shaped(atom).dtype)


def results_of(code: ClosedJaxpr, *arguments: object) -> Leaves:
    """Evaluate a jaxpr: arrays, also where an output is a literal."""
    found = core.jaxpr_as_fun(code)(*arguments)
    pairs = zip(found, code.jaxpr.outvars, strict=True)
    return [literal(atom) if isinstance(atom, core.Literal) else value for value, atom in pairs]


@dataclass(frozen=True, eq=False)
class TracedFunction[T]:
    """A function of arguments of some shapes as its jaxpr, and the shapes of its result."""

    closed: ClosedJaxpr
    shapes: T

    def __call__(self, *arguments: object) -> T:
        """The result, for arguments of these shapes."""
        tree = jax.tree.structure(self.shapes)
        return jax.tree.unflatten(tree, results_of(self.closed, *jax.tree.leaves(arguments)))


def traced_once(
    function: Callable[..., T],
    *arguments: object,
    change: Callable[[core.Jaxpr], core.Jaxpr] = lambda jaxpr: jaxpr,
) -> TracedFunction[T]:
    """The function by its jaxpr, which is changed: Python runs the given one once."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return TracedFunction(closed_jaxpr(change(closed.jaxpr), closed.consts), shapes)


def by_leaves(
    function: Callable[..., T], arguments: tuple[object, ...], wanted: Sequence[bool]
) -> tuple[Callable[[Leaves], T], Leaves]:
    """The function of the wanted leaves of its arguments alone, and these leaves."""
    leaves, tree = jax.tree.flatten(arguments)

    def call(values: Leaves) -> T:
        new = iter(values)
        whole = [next(new) if w else leaf for leaf, w in zip(leaves, wanted, strict=True)]
        return function(*jax.tree.unflatten(tree, whole))

    return call, [leaf for leaf, w in zip(leaves, wanted, strict=True) if w]


def with_inputs(closed: ClosedJaxpr) -> core.Jaxpr:
    """The jaxpr without constants: they are its first inputs."""
    jaxpr = closed.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def evaluated(
    closed: ClosedJaxpr, run: Callable[[core.JaxprEqn, Leaves], Leaves], arguments: Iterable[object]
) -> Leaves:
    """The results of a jaxpr, each of whose equations `run` evaluates for values of its inputs."""
    jaxpr, inputs = closed.jaxpr, [*closed.consts, *arguments]
    env: dict[Atom, object] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

    def values(atoms: Sequence[Atom]) -> Leaves:
        return [literal(a) if isinstance(a, core.Literal) else env[a] for a in atoms]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, run(eqn, values(eqn.invars)), strict=True))
    return values(jaxpr.outvars)


def bind(eqn: core.JaxprEqn, inputs: Leaves) -> Leaves:
    """Run one equation."""
    pairs = zip(eqn.invars, inputs, strict=True)
    named = {v: value for v, value in pairs if isinstance(v, core.Var)}
    newvar = core.gensym()
    outs = [newvar(v.aval) if isinstance(v, core.DropVar) else v for v in eqn.outvars]
    single = with_equations(NOTHING, [eqn.replace(outvars=outs)], list(named), outs)
    return core.jaxpr_as_fun(closed_jaxpr(single))(*named.values())


COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_SHAPES = {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "rev"}
_LAYOUT = _SHAPES | {"copy", "copy_p", "slice", "dynamic_slice"}


def is_layout(eqn: core.JaxprEqn) -> bool:
    """True for operations that compute nothing: XLA turns them into addressing, or gathers parts
    from other devices.
    """
    return eqn.primitive.name in _LAYOUT or is_gather(eqn)


def is_gather(eqn: core.JaxprEqn) -> bool:
    """True for a sharding constraint that leaves nothing split.  Its input may be split over other
    axes, and then has fewer bytes on a device.
    """
    if eqn.primitive.name != "sharding_constraint":
        return False
    spec = getattr(eqn.params["sharding"], "spec", (True,))
    return not any(spec) and not eqn.params.get("unconstrained_dims")


def is_fp8(aval: Leaf) -> bool:
    """Whether an array is floating with one byte an element."""
    return bool(jnp.issubdtype(aval.dtype, jnp.floating)) and aval.dtype.itemsize == 1


def nbytes(aval: Leaf) -> int:
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


def stacked_aval(value: core.Var, scan: core.JaxprEqn) -> jax_core.ShapedArray:
    """The aval of a value of a scan's body, one from each trip."""
    aval = shaped(value)
    return jax_core.ShapedArray((scan.params["length"], *aval.shape), aval.dtype)


_MATMULS = {"dot_general", "conv_general_dilated"}


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
        parts = [count_work(body) for body in core.jaxprs_in_params(eqn.params)]
        if parts:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            # Of branches the most expensive one.
            taken = [max(parts)] if eqn.primitive.name == "cond" else parts
            flops += times * sum(part.flops for part in taken)
            moved += times * sum(part.bytes for part in taken)
        elif eqn.primitive.name in _MATMULS:
            flops += 2 * _multiplications(eqn)
            moved += sum(nbytes(shaped(v)) for v in (*eqn.invars, *eqn.outvars))
        else:
            flops += sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))
    return Work(flops, moved)


def _multiplications(eqn: core.JaxprEqn) -> int:
    """Of a matmul or a convolution."""
    size = math.prod(shaped(eqn.outvars[0]).shape)
    left, right = (shaped(v).shape for v in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return int(size * math.prod(left[d] for d in contracted))
    # Each number of the output sums over the kernel of one output feature.
    features = right[eqn.params["dimension_numbers"].rhs_spec[0]]
    return int(size * math.prod(right) // max(1, features))


_ALL_REDUCES = ("psum", "psum_invariant", "pmax", "pmin")
_REDUCTIONS = (*_ALL_REDUCES, "reduce_scatter")
_WIDE = jnp.dtype(jnp.float32)


def collectives(jaxpr: core.Jaxpr) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(primitive, mesh axes) of every equation that communicates, also in loops, branches and
    calls.
    """
    return ((name, axes) for name, axes in uses_of_axes(jaxpr) if name != AXIS_INDEX)


AXIS_INDEX = "axis_index"  # the primitive; it asks for an axis and communicates nothing


def uses_of_axes(jaxpr: core.Jaxpr) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The same with every equation that asks which device it runs on."""
    for eqn in every_equation(jaxpr):
        named = jax.tree.leaves([eqn.params.get("axes"), eqn.params.get("axis_name")])
        # numbers are axes of arrays
        axes = tuple(name for name in named if isinstance(name, str))
        if axes:
            yield eqn.primitive.name, axes


@dataclass(frozen=True)
class Reductions:
    """Changes of reductions.  None changes a number.

    `alone` are axes of one device.  They are left out: the partitioner fails on a reduction over
    these alone ("must be in (partial) manual partitioning mode").  With `widen`, reductions of
    bfloat16 are done in float32.  XLA:CPU does that by itself, but it aborts the process ("Invalid
    binary instruction opcode copy") where JAX has put a sharding into the function that reduces.
    """

    alone: Set[str]
    widen: bool

    def within(self, jaxpr: core.Jaxpr) -> core.Jaxpr:
        """The jaxpr with its reductions changed, also in loops, branches and calls."""
        return with_each(jaxpr, self._equations)

    def _equations(self, eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
        eqn = with_inner(eqn, self.within)
        if eqn.primitive.name in _ALL_REDUCES and not self.alone.isdisjoint(eqn.params["axes"]):
            axes = tuple(name for name in eqn.params["axes"] if name not in self.alone)
            eqn = eqn.replace(params=eqn.params | {"axes": axes})
        inputs = {id(a): a for a in eqn.invars if _is_narrow(a)}
        outputs = {id(v): v for v in eqn.outvars if _is_narrow(v)}
        if not (self.widen and inputs and eqn.primitive.name in _REDUCTIONS):
            yield eqn
            return
        newvar, narrow = core.gensym(), inputs | outputs
        wide = {key: newvar(a.aval.update(dtype=_WIDE)) for key, a in narrow.items()}
        yield from (_converted(eqn, a, wide[key]) for key, a in inputs.items())
        yield eqn.replace(
            invars=[wide.get(id(a), a) for a in eqn.invars],
            outvars=[wide.get(id(a), a) for a in eqn.outvars],
        )
        yield from (_converted(eqn, wide[key], a) for key, a in outputs.items())


def _is_narrow(atom: Atom) -> bool:
    return bool(shaped(atom).dtype == jnp.bfloat16)


def _converted(eqn: core.JaxprEqn, value: Atom, var: core.Var) -> core.JaxprEqn:
    """The conversion of a value to a variable's dtype, with the context of an equation."""
    params = {"new_dtype": shaped(var).dtype, "weak_type": False, "sharding": None}
    return eqn.replace(
        primitive=convert_element_type_p,
        invars=[value],
        outvars=[var],
        params=params,
        effects=core.no_effects,
    )
