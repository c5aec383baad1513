"""One stage's forward, full backward, input gradient and weight gradient as jaxprs, with minimal residuals between them.

    hoist(parameters)                                 -> once       what depends on parameters alone; once a step
    forward(parameters, once, x, extra)               -> y, loss, state, residuals
    backward(parameters, once, x, extra, residuals, dy)       -> dparameters, dx          (B)
    input_grad(parameters, once, x, extra, residuals, dy)     -> dx, stash                (I)
    weight_grad(parameters, once, x, extra, residuals, dy, stash) -> dparameters          (W)

loss (an auxiliary one) and state are there where the stage returns them; dy then ends with the cotangent of the loss.

Residuals hold no parameter, nothing made of parameters alone, no copy of the stage input, nothing twice, and nothing that
a layout change of one of these gives.  Every matmul of B is done in exactly one of I and W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ..jaxprs import Cut, cut, drop_dead, equal_outputs, flatten, keep_first, known_from, needed_for, sink
from ..jaxprs.cut import keep_work
from ..jaxprs.flatten import Atom
from ..model.functions import Returned
from ..program.liveness import LastUse, Liveness

Leaves: TypeAlias = "list[Any]"
PyTree: TypeAlias = Any


@dataclass(frozen=True)
class Inputs:
    """How many leaves each group of inputs of a stage's jaxprs has, in this order."""

    consts: int
    params: int
    x: int
    extra: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.consts + self.params + self.x + self.extra


@dataclass(frozen=True)
class StageCode:
    """The pieces of one stage function.  `consts` are arrays that the function closes over.

    `x_wanted` and `y_wanted` mark the leaves of x and y that have a gradient (the floating ones); dx and dy hold just those.
    """

    consts: tuple[Any, ...]
    hoist: core.Jaxpr
    forward: core.Jaxpr
    evaluate: core.Jaxpr
    backward: core.Jaxpr
    input_grad: core.Jaxpr
    weight_grad: core.Jaxpr
    y_tree: Any
    y_avals: tuple[Any, ...]
    loss: Any  # aval of the auxiliary loss, or None
    state: tuple[Any, ...]  # avals of the state after it
    x_avals: tuple[Any, ...]
    once_avals: tuple[Any, ...]
    residual_input: tuple[Any, ...]  # avals of what only I (and B) needs
    residual_weight: tuple[Any, ...]  # avals of what W needs
    stash: tuple[Any, ...]
    x_wanted: tuple[bool, ...]
    y_wanted: tuple[bool, ...]
    num_params: int
    liveness: Liveness
    uncut: tuple[str, ...] = ()  # primitives whose weight gradients I computes along, since they cannot be cut

    @property
    def dx_avals(self) -> tuple[Any, ...]:
        """Avals of the gradient of x."""
        return tuple(a for a, w in zip(self.x_avals, self.x_wanted, strict=True) if w)

    @property
    def dy_avals(self) -> tuple[Any, ...]:
        """Avals of the cotangent of y."""
        return tuple(a for a, w in zip(self.y_avals, self.y_wanted, strict=True) if w)

    @property
    def num_outputs(self) -> int:
        """Outputs of the forward before its residuals."""
        return len(self.y_avals) + (self.loss is not None) + len(self.state)

    def __str__(self) -> str:
        parts = ("hoist", "forward", "backward", "input_grad", "weight_grad")
        return "\n".join(f"{name} = {getattr(self, name)}" for name in parts)


def run(jaxpr: core.Jaxpr, *arguments: Any) -> Leaves:
    """Evaluate a jaxpr without constants."""
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, []))(*arguments)


def inexact(leaf: Any) -> bool:
    """True for arrays that have a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def trace_stage(function: Callable[..., PyTree], params: PyTree, x: PyTree, extra: PyTree) -> StageCode:
    """Cut `function(params, x, extra) -> y`, or `(y, Returned)`, into its pieces; arguments are arrays, tracers or ShapeDtypeStructs.

    Parameters must be floating; leaves of x that are not (segment ids, masks) get no gradient.
    """
    x_leaves, x_tree = jax.tree.flatten(x)
    wanted = tuple(inexact(leaf) for leaf in x_leaves)
    params_tree = jax.tree.structure(params)

    def split(diff: Leaves, params_leaves: Leaves, rest: Leaves, extra: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        def call(p: Leaves, d: Leaves) -> tuple[PyTree, PyTree]:
            floats, others = iter(d), iter(rest)
            merged = [next(floats) if w else next(others) for w in wanted]
            out = function(jax.tree.unflatten(params_tree, p), jax.tree.unflatten(x_tree, merged), extra)
            y, more = out if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Returned) else (out, Returned())
            return (y, more.loss), more.state

        y, vjp, state = jax.vjp(call, params_leaves, diff, has_aux=True)
        return y, state, vjp

    params_leaves = jax.tree.leaves(params)
    diff = [leaf for leaf, w in zip(x_leaves, wanted, strict=True) if w]
    rest = [leaf for leaf, w in zip(x_leaves, wanted, strict=True) if not w]
    forward, shapes = jax.make_jaxpr(split, return_shape=True)(diff, params_leaves, rest, extra)
    y, state, vjp = shapes
    vjp_leaves, vjp_tree = jax.tree.flatten(vjp)
    y_leaves, both_tree = jax.tree.flatten(y)
    state_leaves = jax.tree.leaves(state)
    dy = [leaf for leaf in y_leaves if inexact(leaf)]

    def transposed(residuals: Leaves, dy: Leaves) -> PyTree:
        cotangents = iter(dy)
        full = [next(cotangents) if inexact(leaf) else _no_gradient(leaf) for leaf in y_leaves]
        return jax.tree.unflatten(vjp_tree, residuals)(jax.tree.unflatten(both_tree, full))

    backward = jax.make_jaxpr(transposed)(vjp_leaves, dy)
    outputs = [*y_leaves, *state_leaves]
    joint = _join(flatten(forward), flatten(backward), len(outputs), len(dy))
    # Put the leaves of x back in their own order: the trace had the floating ones first and the others after params.
    consts = len(joint.consts)
    order = _input_order(consts, len(params_leaves), wanted, len(jax.tree.leaves(extra)), len(dy))
    joint = _Joint(joint.jaxpr.replace(invars=[joint.jaxpr.invars[i] for i in order]), joint.consts, joint.split)
    inputs = Inputs(consts, len(params_leaves), len(x_leaves), len(jax.tree.leaves(extra)))
    has_loss = not isinstance(y[1], tuple)
    y_count = len(y_leaves) - has_loss
    returns = _Returns(
        y_tree=jax.tree.structure(y[0]),
        y=tuple(y_leaves[:y_count]),
        loss=y_leaves[-1] if has_loss else None,
        state=tuple(state_leaves),
        x=tuple(jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype) for leaf in x_leaves),
        x_wanted=wanted,
    )
    return _pieces(joint, inputs, returns)


@dataclass(frozen=True)
class _Returns:
    """Avals of what a stage takes and returns."""

    y_tree: Any
    y: tuple[Any, ...]
    loss: Any
    state: tuple[Any, ...]
    x: tuple[Any, ...]
    x_wanted: tuple[bool, ...]

    @property
    def count(self) -> int:
        """Leaves of y, loss and state."""
        return len(self.y) + (self.loss is not None) + len(self.state)


@dataclass(frozen=True)
class _Joint:
    """Forward and backward in one jaxpr: (consts, params, x, extra, dy) -> (y, dparams, dx); `split` forward equations."""

    jaxpr: core.Jaxpr
    consts: tuple[Any, ...]
    split: int


def _no_gradient(leaf: Any) -> Any:
    """The cotangent that JAX wants for a leaf that is not floating."""
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _input_order(consts: int, params: int, wanted: Sequence[bool], extra: int, dy: int) -> list[int]:
    """Positions, in the traced order (consts, diff, params, rest, extra, dy), of (consts, params, x, extra, dy)."""
    diff = consts
    base = diff + sum(wanted)
    rest = base + params
    after = rest + len(wanted) - sum(wanted)
    x = []
    for w in wanted:
        x.append(diff if w else rest)
        diff, rest = diff + w, rest + (not w)
    return [*range(consts), *range(base, base + params), *x, *range(after, after + extra + dy)]


def _join(forward: core.ClosedJaxpr, backward: core.ClosedJaxpr, y_count: int, dy_count: int) -> _Joint:
    """One jaxpr of both, the backward reading the forward's variables."""
    f, b = forward.jaxpr, backward.jaxpr
    residuals = f.outvars[y_count:]
    env: dict[core.Var, Atom] = dict(zip(b.invars[: len(residuals)], residuals, strict=True))

    def read(atom: Atom) -> Atom:
        return env.get(atom, atom) if isinstance(atom, core.Var) else atom

    moved = [e.replace(invars=[read(a) for a in e.invars]) for e in b.eqns]
    dy = b.invars[len(residuals) :]
    assert len(dy) == dy_count
    invars = [*f.constvars, *b.constvars, *f.invars, *dy]
    outvars = [*f.outvars[:y_count], *(read(a) for a in b.outvars)]
    jaxpr = f.replace(constvars=[], invars=invars, outvars=outvars, eqns=[*f.eqns, *moved], effects=f.effects | b.effects)
    return _Joint(jaxpr, (*forward.consts, *backward.consts), len(f.eqns))


def _pieces(joint: _Joint, inputs: Inputs, returns: _Returns) -> StageCode:
    """Cut the joint jaxpr into the pieces."""
    total, outputs = inputs.total, returns.count
    known = [True] * (inputs.consts + inputs.params) + [False] * (inputs.x + inputs.extra)
    dy = joint.jaxpr.invars[total:]
    jaxpr = sink(joint.jaxpr, joint.split, known=[*known, *(False for _ in dy)])
    grads = len(jaxpr.outvars) - outputs

    # Forward | backward, at the border that jax.vjp drew.
    border = tuple(i < joint.split for i in range(len(jaxpr.eqns)))
    halves = cut(jaxpr, border, outputs=[True] * outputs + [False] * grads, recompute=None)
    forward = halves.first.replace(invars=halves.first.invars[:total])
    # Backward inputs: (consts, params, x, extra | residuals | dy).
    base, crossing = halves.second.invars[:total], halves.second.invars[total + len(dy) :]
    backward = halves.second.replace(invars=[*base, *crossing, *halves.second.invars[total : total + len(dy)]])

    # What depends on parameters alone leaves both halves.
    once_f = _hoist(forward, known)
    forward = once_f.second
    aliases = _aliases(forward, total, outputs)
    kept = [i for i, alias in enumerate(aliases) if alias is None]
    forward = forward.replace(outvars=[*forward.outvars[:outputs], *(forward.outvars[outputs + i] for i in kept)])
    backward = _rename_residuals(backward, total, aliases, forward, len(once_f.crossing))
    once_count = len(once_f.crossing)
    tail = len(kept) + len(dy)
    once_b = _hoist(backward, [*known, *[True] * once_count, *[False] * tail])
    hoist = _join_hoists(once_f, once_b, inputs, once_count)
    forward = forward.replace(invars=[*forward.invars, *_fresh(once_b.crossing)])
    late = len(once_b.crossing)
    invars = once_b.second.invars
    head, middle, end = invars[: total + once_count], invars[total + once_count : len(invars) - late], invars[len(invars) - late :]
    backward = once_b.second.replace(invars=[*head, *end, *middle])
    # Under remat the backward makes of parameters again what the forward made.
    same = equal_outputs(hoist)
    hoist, _ = drop_dead(hoist.replace(outvars=[v for i, v in enumerate(hoist.outvars) if same[i] == i]))
    forward, backward = keep_first(forward, total, same), keep_first(backward, total, same)
    once = len(hoist.outvars)

    # Input gradient | weight gradient, by what dx needs.
    mask = [False] * inputs.params + [True] * (grads - inputs.params)
    apart = cut(backward, needed_for(backward, mask), outputs=mask)
    return _classify(inputs, once, hoist, forward, backward, apart, returns, len(kept), len(dy), joint.consts)


def _classify(
    inputs: Inputs,
    once: int,
    hoist: core.Jaxpr,
    forward: core.Jaxpr,
    backward: core.Jaxpr,
    apart: Cut,
    returns: _Returns,
    residuals: int,
    dy: int,
    consts: tuple[Any, ...],
) -> StageCode:
    """Order residuals into those that only I needs and those that W needs, and read off how long each input lives."""
    start = inputs.total + once
    by_weight = list(apart.second_reads[start : start + residuals])
    early = [i for i in range(residuals) if not by_weight[i]]
    late = [i for i in range(residuals) if by_weight[i]]
    order = [*range(start), *(start + i for i in early), *(start + i for i in late), *range(start + residuals, start + residuals + dy)]

    def reorder(jaxpr: core.Jaxpr) -> core.Jaxpr:
        rest = jaxpr.invars[len(order) :]
        return jaxpr.replace(invars=[*(jaxpr.invars[i] for i in order), *rest])

    outputs = returns.count
    outs = forward.outvars[outputs:]
    x_slice = slice(inputs.consts + inputs.params, inputs.consts + inputs.params + inputs.x)
    both_reads = reads(backward)
    x_weight, x_any = any(apart.second_reads[x_slice]), any(both_reads[x_slice])
    dy_weight = any(apart.second_reads[start + residuals :])
    evaluate, _ = drop_dead(forward.replace(outvars=forward.outvars[:outputs]))
    x_use = LastUse.WEIGHT_GRAD if x_weight else LastUse.INPUT_GRAD if x_any else LastUse.FORWARD
    return StageCode(
        consts=consts,
        hoist=hoist,
        forward=forward.replace(outvars=[*forward.outvars[:outputs], *(outs[i] for i in early), *(outs[i] for i in late)]),
        evaluate=evaluate,
        backward=reorder(backward),
        input_grad=reorder(apart.first),
        weight_grad=reorder(apart.second),
        y_tree=returns.y_tree,
        y_avals=returns.y,
        loss=returns.loss,
        state=returns.state,
        x_avals=returns.x,
        once_avals=tuple(v.aval for v in hoist.outvars),
        residual_input=tuple(outs[i].aval for i in early),
        residual_weight=tuple(outs[i].aval for i in late),
        stash=apart.crossing,
        x_wanted=returns.x_wanted,
        y_wanted=tuple(inexact(a) for a in returns.y),
        num_params=inputs.params,
        uncut=_uncut(backward, grads_of_x=sum(returns.x_wanted)),
        liveness=Liveness(x=x_use, cotangent=LastUse.WEIGHT_GRAD if dy_weight else LastUse.INPUT_GRAD),
    )


def _uncut(backward: core.Jaxpr, *, grads_of_x: int) -> tuple[str, ...]:
    """Primitives of which dx needs one result and only the weight gradient another: joint for that part.

    A `cond` or `while`, or a kernel, is one equation and cannot be divided; a scan can.
    """
    params = len(backward.outvars) - grads_of_x
    dx, dparams = ([i >= params for i in range(len(backward.outvars))], [i < params for i in range(len(backward.outvars))])
    for_x = needed_for(backward, dx)
    for_params = needed_for(backward, dparams)
    alive_x = {v for e, c in zip(backward.eqns, for_x, strict=True) if c for v in e.invars if isinstance(v, core.Var)}
    alive_x |= {v for v, w in zip(backward.outvars, dx, strict=True) if w and isinstance(v, core.Var)}
    found = []
    for eqn, mine, other in zip(backward.eqns, for_x, for_params, strict=True):
        whole = mine is True and other is not False and len(eqn.outvars) > 1 and eqn.primitive.name != "scan"
        if whole and any(v not in alive_x for v in eqn.outvars if not isinstance(v, core.DropVar)):
            found.append(eqn.primitive.name)
    return tuple(sorted(set(found)))


def _hoist(jaxpr: core.Jaxpr, known: Sequence[bool]) -> Cut:
    """Cut off what the known inputs determine."""
    return cut(jaxpr, known_from(jaxpr, known), outputs=[False] * len(jaxpr.outvars), recompute=keep_work)


def _aliases(forward: core.Jaxpr, total: int, y_count: int) -> list[Atom | None]:
    """For each residual, the input, hoisted value or number that it is, or an earlier equal residual; None if it is itself."""
    inputs = set(forward.invars)
    seen: set[core.Var] = set()
    found: list[Atom | None] = []
    for atom in forward.outvars[y_count:]:
        if isinstance(atom, core.Literal) or atom in inputs or atom in seen:
            found.append(atom)
            continue
        seen.add(atom)
        found.append(None)
    return found


def _rename_residuals(backward: core.Jaxpr, total: int, aliases: Sequence[Atom | None], forward: core.Jaxpr, once: int) -> core.Jaxpr:
    """Feed aliased residuals of the backward from where they really are.

    Inputs become (consts, params, x, extra | hoisted | residuals that are left | dy).
    """
    hoisted = _fresh([v.aval for v in forward.invars[total : total + once]])
    same: dict[core.Var, Atom] = dict(zip(forward.invars, [*backward.invars[:total], *hoisted], strict=True))
    residuals = backward.invars[total : total + len(aliases)]
    env: dict[core.Var, Atom] = {}
    for var, alias in zip(residuals, aliases, strict=True):
        if alias is not None:
            env[var] = alias if isinstance(alias, core.Literal) else same[alias]
    kept = [v for v, alias in zip(residuals, aliases, strict=True) if alias is None]

    def read(atom: Atom) -> Atom:
        return env.get(atom, atom) if isinstance(atom, core.Var) else atom

    eqns = [e.replace(invars=[read(a) for a in e.invars]) for e in backward.eqns]
    invars = [*backward.invars[:total], *hoisted, *kept, *backward.invars[total + len(aliases) :]]
    return backward.replace(invars=invars, outvars=[read(a) for a in backward.outvars], eqns=eqns)


def _join_hoists(early: Cut, late: Cut, inputs: Inputs, once: int) -> core.Jaxpr:
    """One jaxpr (consts, params) -> all hoisted values: the forward's, then the backward's."""
    count = inputs.consts + inputs.params
    heads = early.first.invars[:count]
    env: dict[core.Var, Atom] = dict(zip(late.first.invars[:count], heads, strict=True))
    env.update(zip(late.first.invars[inputs.total : inputs.total + once], early.first.outvars, strict=True))

    def read(atom: Atom) -> Atom:
        return env.get(atom, atom) if isinstance(atom, core.Var) else atom

    moved = [e.replace(invars=[read(a) for a in e.invars]) for e in late.first.eqns]
    outs = [*early.first.outvars, *(read(a) for a in late.first.outvars)]
    return early.first.replace(invars=heads, outvars=outs, eqns=[*early.first.eqns, *moved])


def _fresh(avals: Sequence[Any]) -> list[core.Var]:
    newvar = core.gensym()
    return [newvar(a) for a in avals]


def reads(jaxpr: core.Jaxpr) -> tuple[bool, ...]:
    """Which inputs a jaxpr reads."""
    used = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var)}
    used |= {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    return tuple(v in used for v in jaxpr.invars)


@dataclass(frozen=True)
class LastCode:
    """The loss of one microbatch with its gradients: `train(params, once, y, extra, seed) -> loss, aux, dparams, dy`.

    `evaluate(params, once, y, extra) -> loss, aux`.
    """

    consts: tuple[Any, ...]
    hoist: core.Jaxpr
    train: core.Jaxpr
    evaluate: core.Jaxpr
    once_avals: tuple[Any, ...]
    aux_tree: Any
    aux_avals: tuple[Any, ...]
    loss_dtype: Any


def trace_last(function: Callable[..., tuple[Any, PyTree]], params: PyTree, y: PyTree, extra: PyTree) -> LastCode:
    """Trace `function(params, y, extra) -> (scalar, aux)`, its gradients, and what of both depends on parameters alone."""
    y_leaves, y_tree = jax.tree.flatten(y)
    wanted = [inexact(leaf) for leaf in y_leaves]
    tree = jax.tree.structure(params)

    def train(params_leaves: Leaves, y_leaves: Leaves, extra: PyTree, seed: Any) -> PyTree:
        def call(p: Leaves, diff: Leaves) -> tuple[Any, PyTree]:
            floats = iter(diff)
            merged = [next(floats) if w else leaf for leaf, w in zip(y_leaves, wanted, strict=True)]
            return function(jax.tree.unflatten(tree, p), jax.tree.unflatten(y_tree, merged), extra)

        diff = [leaf for leaf, w in zip(y_leaves, wanted, strict=True) if w]
        loss, vjp, aux = jax.vjp(call, params_leaves, diff, has_aux=True)
        dparams, dy = vjp(seed.astype(loss.dtype))
        return loss, aux, dparams, dy

    params_leaves = jax.tree.leaves(params)
    seed = jax.ShapeDtypeStruct((), jnp.float32)
    traced, shapes = jax.make_jaxpr(train, return_shape=True)(params_leaves, y_leaves, extra, seed)
    aux_leaves, aux_tree = jax.tree.flatten(shapes[1])
    flat = flatten(traced)
    jaxpr = flat.jaxpr.replace(constvars=[], invars=[*flat.jaxpr.constvars, *flat.jaxpr.invars])
    head = len(flat.consts) + len(params_leaves)
    apart = _hoist(jaxpr, [True] * head + [False] * (len(jaxpr.invars) - head))
    count = len(jaxpr.invars)
    ins = apart.second.invars
    body = apart.second.replace(invars=[*ins[:head], *ins[count:], *ins[head:count]])
    evaluate, _ = drop_dead(body.replace(outvars=body.outvars[: 1 + len(aux_leaves)]))
    return LastCode(
        consts=tuple(flat.consts),
        hoist=apart.first.replace(invars=apart.first.invars[:head]),
        train=body,
        evaluate=evaluate.replace(invars=evaluate.invars[:-1]),
        once_avals=apart.crossing,
        aux_tree=aux_tree,
        aux_avals=tuple(aux_leaves),
        loss_dtype=shapes[0].dtype,
    )
