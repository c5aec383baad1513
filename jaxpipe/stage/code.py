"""One stage's forward, full backward, input gradient and weight gradient as jaxprs, with minimal
residuals between them.

    hoist(parameters) -> once
    forward(parameters, x, extra, once) -> y, loss, state, residuals            F
    evaluate(parameters, x, extra, once) -> y, loss, state                      F without residuals
    recompute(parameters, x, extra, once) -> residuals                          R
    backward(parameters, x, extra, once, residuals, dy) -> dparameters, dx      B
    input_grad(parameters, x, extra, once, residuals, dy) -> dx, stash          I
    weight_grad(parameters, x, extra, once, residuals, dy, stash) -> dparameters    W

`once` are values that depend on parameters alone, computed once a step.  A stage may also return an
auxiliary loss and state.  With a loss, dy ends with its cotangent.

Residuals exclude parameters, values that depend on parameters alone, and copies of the stage input.
No residual is kept twice, or as a layout change of another.  Every matmul of B is in exactly one of
I and W.  They are cut out of one joint jaxpr of forward and backward,
with the fewest bytes between the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from ..arrays import Avals, Leaf, Leaves, PyTree
from ..errors import PipelineError
from ..jaxprs.cut import cut, drop_dead, equal_outputs, keep_first, known_from, needed_for
from ..jaxprs.equations import (
    NOTHING,
    ClosedJaxpr,
    closed_jaxpr,
    collectives,
    every_equation,
    reads,
    results_of,
)
from ..jaxprs.min_cut import is_arithmetic, is_elementwise, is_light, is_view
from ..jaxprs.products import with_fp8_rows, with_wide_products
from ..jaxprs.residuals import into_scans, keep_fewer_residuals
from ..lowering.target import Form
from ..model.calls import OUTER_WANTS
from ..storage.table import Places
from ..table.effects import OF_SLICES, LastUse, Liveness, Place
from ..table.kinds import By, Kind, kinds_where


class ParamUse(NamedTuple):
    """Uses of a parameter: whether it has a gradient, whether values that depend on it alone
    are computed once a step, the dtype in which its gradient is made where it is a product, and
    whether a stack of layers may be taken apart.
    """

    trained: bool = True
    once: bool = True
    total: DTypeLike | None = None  # None: as the product's operands
    in_layers: bool = False

    @classmethod
    def of(
        cls, leaf: Leaf, *, frozen: bool, total: DTypeLike | None = None, in_layers: bool = False
    ) -> ParamUse:
        """The uses of one parameter.  Values of a frozen parameter of fewer than 16 bits are
        computed in each microbatch: one copy for the whole step would be larger than the parameter.
        """
        small = not jnp.issubdtype(leaf.dtype, jnp.inexact) or leaf.dtype.itemsize < 2
        return cls(not frozen, not (frozen and small), total, in_layers)


# Values that a forward keeps for its backward.
RESIDUALS = (Place.RESIDUAL_INPUT, Place.RESIDUAL_WEIGHT)
_RETURNED = (Place.SENT_X, Place.CARRY, Place.BUFFER, Place.LOSSES, Place.STAGE_STATE)
_PASSED_BACK = (Place.SENT_DX, Place.CARRY_GRADIENT, Place.BUFFER_GRADIENT)
# The results of a stage's code, in order.  A forward that keeps nothing ends before the residuals.
RESULTS = {
    Kind.F: (*_RETURNED, *RESIDUALS),
    Kind.R: RESIDUALS,
    Kind.B: (Place.STAGE_GRADIENTS, Place.SHARED_GRADIENTS, *_PASSED_BACK),
    Kind.I: (*_PASSED_BACK, Place.STASH),
    Kind.W: (Place.STAGE_GRADIENTS, Place.SHARED_GRADIENTS),
}
# The inputs of a stage's code between its parameters and `extra`, and those of backwards after
# `once`.
INPUTS = (Place.X, Place.CARRY, Place.BUFFER)
COTANGENTS = (Place.COTANGENT, Place.CARRY_GRADIENT, Place.BUFFER_GRADIENT)
# What a backward of a stage takes after `once`; at LOSSES, the cotangent of a loss.
_TAKES = (*RESIDUALS, *COTANGENTS, Place.LOSSES)
# What pools keep of a microbatch, or of a slice, in a stage.
STORED = (
    *(Place.X, Place.COTANGENT, *RESIDUALS, Place.STASH),
    *(Place.CARRY, Place.CARRY_GRADIENT, Place.BUFFER, Place.BUFFER_GRADIENT),
)
# The places of gradients, and of what they are gradients.
GRADIENT_OF = {
    Place.SENT_DX: Place.X,
    Place.COTANGENT: Place.SENT_X,
    Place.CARRY_GRADIENT: Place.CARRY,
    Place.BUFFER_GRADIENT: Place.BUFFER,
}


def by_place(trees: Mapping[Place, PyTree]) -> dict[Place, Avals]:
    """The leaves of each place, with those of gradients: floating leaves have one."""
    avals = {place: tuple(jax.tree.leaves(trees.get(place, ()))) for place in Place}
    return avals | {place: tuple(filter(inexact, avals[of])) for place, of in GRADIENT_OF.items()}


@dataclass(frozen=True, kw_only=True)
class StageCode:
    """The pieces of the function of a stage, or of `first` or `last`, and their inputs and results
    by leaf.

    In the jaxprs carries follow x and y, and buffers follow the carries.  `last` has its loss and
    its gradient at once: `evaluate` returns its loss and further results, and so do `backward` and
    `input_grad` before gradients.
    """

    consts: tuple[jax.Array, ...]  # arrays that the function closes over
    uses: tuple[ParamUse, ...]  # of each parameter, of one for each layer of a stack that is apart
    layers: tuple[int, ...] = ()  # how many parameters each stored leaf gives, 0: itself
    num_extra: int = 0  # the context, the rows of the microbatch, the state before it
    # of what it returns for the next stage, or besides a loss
    y_tree: PyTreeDef | None = None
    # by place: inputs, SENT_X what a stage returns, LOSSES its loss, STAGE_STATE the state after
    # it, AUX what `last` returns besides its loss, and gradients
    avals: Mapping[Place, Avals]
    hoist: core.Jaxpr = NOTHING
    forward: core.Jaxpr = NOTHING
    evaluate: core.Jaxpr = NOTHING
    recompute: core.Jaxpr = NOTHING
    backward: core.Jaxpr = NOTHING
    input_grad: core.Jaxpr = NOTHING
    weight_grad: core.Jaxpr = NOTHING
    wants: frozenset[str] = OUTER_WANTS  # keywords whose values differ by microbatch or stage
    liveness: Liveness = field(default_factory=Liveness)
    offloads: bool = False  # a policy of `jax.checkpoint` in it uses the host's memory
    # of `last` under `Loss.SUM_OVER_COUNT`: `extra` -> the count of a microbatch, where nothing
    # else determines it
    count: ClosedJaxpr | None = None
    loses_count: bool = False  # the count has a gradient, which the backward does not have

    @property
    def known(self) -> tuple[bool, ...]:
        """For each constant and parameter, whether values that depend on it alone are computed once
        a step.
        """
        return (*(True for _ in self.consts), *(use.once for use in self.uses))

    @cached_property
    def read(self) -> tuple[bool, ...]:
        """For each parameter, whether blocks read it, and not only what is hoisted from it."""
        blocks = (
            *(self.forward, self.evaluate, self.recompute),
            *(self.backward, self.input_grad, self.weight_grad),
        )
        own = slice(len(self.consts), len(self.known))
        return tuple(map(any, zip_longest(*(reads(block)[own] for block in blocks))))

    def totals(self, numbers: range) -> dict[int, DTypeLike | None]:
        """The dtypes of the accumulators of its gradients, by the numbers of the results; in
        training these are the first of `numbers`, and else there are none.
        """
        trained = (use.total for use in self.uses if use.trained)
        return dict(zip(numbers, trained, strict=False))

    def places(self, stored: Places) -> Places:
        """The places of its parameters, from those of the stored leaves."""
        pairs = zip(stored, self.layers, strict=False)  # the shared ones are not among them
        return tuple(place for each, layers in pairs for place in each.layers(layers))

    @cached_property
    def loops(self) -> bool:
        """Whether a forward has a loop whose end depends on its values."""
        return any(eqn.primitive.name == "while" for eqn in every_equation(self.evaluate))

    @property
    def y(self) -> PyTree:
        """Shapes of what it returns for the next stage."""
        return jax.tree.unflatten(self.y_tree, self.avals[Place.SENT_X])

    @property
    def num_inputs(self) -> int:
        """The number of inputs: constants, parameters, x, carry and buffers, and `extra`."""
        return self.spans(INPUTS, len(self.known))[Place.BUFFER].stop + self.num_extra

    @property
    def num_outputs(self) -> int:
        """Outputs of the forward before its residuals."""
        return self.spans(_RETURNED)[Place.STAGE_STATE].stop

    def spans(self, places: Sequence[Place], start: int = 0) -> dict[Place, slice]:
        """The numbers of the inputs or results for consecutive places, from a number on."""
        ends = accumulate((len(self.avals[place]) for place in places), initial=start)
        return {place: slice(*ends) for place, ends in zip(places, pairwise(ends), strict=True)}

    def results(self, places: Sequence[Place], values: Leaves) -> dict[Place, Leaves]:
        """The results for consecutive places, of the first of these values."""
        return {place: list(values[span]) for place, span in self.spans(places).items()}

    def of(self, kind: Kind) -> core.Jaxpr:
        """The code of a kind of action; that of F keeps residuals."""
        return {
            Kind.F: self.forward,
            Kind.R: self.recompute,
            Kind.B: self.backward,
            Kind.I: self.input_grad,
            Kind.W: self.weight_grad,
        }[kind]


@dataclass(frozen=True)
class Signature:
    """The code of a function of the model in an action.

    Attributes:
        jaxpr: the piece of its `StageCode`.
        takes: the values after `once`.
        returns: the results, in order.
    """

    jaxpr: core.Jaxpr
    takes: tuple[Place, ...]
    returns: tuple[Place, ...]


def signature(code: StageCode, by: By, kind: Kind, *, keeps: bool, defers: bool) -> Signature:
    """The code of an action that keeps what a backward needs or not; `defers`: a later action makes
    the gradients of parameters of `last`.

    A `first` returns what its gradient needs at the place FIRST; in G, it has the gradient of its
    result there.
    """
    is_forward = kind in (Kind.F, Kind.E, Kind.L)
    match by, kind:
        case By.STAGE, _:
            returns = RESULTS[kind]
            if is_forward and not keeps:
                return Signature(code.evaluate, (), _RETURNED)
            stash = (Place.STASH,) if kind is Kind.W else ()
            takes = () if kind in (Kind.F, Kind.R) else (*_TAKES, *stash)
            return Signature(code.of(kind), takes, returns)
        case By.FIRST, _ if is_forward:
            late = (Place.FIRST,) if keeps and kind is Kind.F else ()
            return Signature(code.forward if keeps else code.evaluate, (), (Place.SENT_X, *late))
        case By.FIRST, _:
            gradients = Place.FIRST_GRADIENTS, Place.SHARED_GRADIENTS
            return Signature(code.backward, (Place.FIRST, Place.SENT_DX), gradients)
    own = Place.LOSSES, Place.AUX
    gradients = Place.LAST_GRADIENTS, Place.SHARED_GRADIENTS
    if not is_forward:
        return Signature(code.weight_grad, (Place.LOSSES, Place.SHARE), gradients)
    if not keeps:
        return Signature(code.evaluate, (), own)
    if defers:
        return Signature(code.input_grad, (Place.LOSSES,), (*own, Place.SENT_DX, Place.STASH))
    return Signature(code.backward, (Place.LOSSES,), (*own, *gradients, Place.SENT_DX))


def run(jaxpr: core.Jaxpr, *arguments: object) -> Leaves:
    """Evaluate a jaxpr without constants."""
    return results_of(closed_jaxpr(jaxpr), *arguments)


def inexact(leaf: Leaf) -> bool:
    """True for arrays that have a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


# What a stage input or a residual weighs that W reads too, as a share of its bytes.  It takes no
# further memory: in every schedule of the catalogue the pool of residuals that live until I has as
# many slots as that of those that live until W.  A value of the stash has a slot besides, and is
# also written: so W makes the input of a product in FP8 again of two arrays in bfloat16.
_HELD = 0.25


def cut_weights(
    backward: core.Jaxpr, *, params: int, prices: Mapping[int, float], form: Form
) -> tuple[core.Jaxpr, core.Jaxpr]:
    """Cut a backward, whose first `params` outputs are gradients of parameters, into I and W.

    Every matmul that the input's gradient needs is in I.  Every other matmul is in W.  Sums of
    values that I has may be in either.  For example, the gradient of a norm's scale is such a sum,
    so I computes it where the result is smaller than what is summed.  `prices` are those of
    inputs, by number, where W reads them: see `cut`.
    """
    mask = [False] * params + [True] * (len(backward.outvars) - params)
    return cut(
        backward,
        needed_for(backward, mask)[0],
        outputs=mask,
        repeat=_repeated(form),
        early=is_light,
        prices={backward.invars[i]: price for i, price in prices.items()},
    )


def _repeated(form: Form) -> Callable[[core.JaxprEqn], bool]:
    """Whether a later part makes the result of an equation again."""
    return is_elementwise if form.functions else is_arithmetic


def hoist(
    joint: core.Jaxpr, code: StageCode, *, results: int, start: int
) -> tuple[core.Jaxpr, core.Jaxpr]:
    """Cut a jaxpr of forward and backward, (consts, params, x, extra, dy) -> results, gradients, in
    two: (consts, params) -> once, which is computed once a step, and the rest, which takes `once`
    after `extra`.

    Equal values are computed once only: under remat the backward repeats the forward's.  Numbers
    are made inside scans, and gradients in the dtype of their accumulators, by equations from
    `start` on.
    """
    known, at = code.known, code.num_inputs
    head, totals = len(known), code.totals(range(results, len(joint.outvars)))
    jaxpr = with_wide_products(into_scans(joint), totals, start=start)
    marks = [*known, *(False for _ in joint.invars[head:])]
    jaxpr = with_fp8_rows(jaxpr, marks)
    outputs = [False] * len(jaxpr.outvars)
    first, rest = cut(jaxpr, known_from(jaxpr, marks)[0], outputs=outputs, repeat=is_view, at=at)
    once = first.replace(invars=first.invars[:head])
    same = equal_outputs(once)
    distinct = [v for i, v in enumerate(once.outvars) if same[i] == i]
    return drop_dead(once.replace(outvars=distinct)), keep_first(rest, at, same)


def pieces(
    joint: core.Jaxpr, split: int, code: StageCode, *, form: Form, appended: int = 0
) -> StageCode:
    """Cut forward and backward in one jaxpr, (consts, params, x, extra, dy) -> (y, dparams, dx),
    into the pieces; the first `split` equations are the forward's.

    The forward's last `appended` results are the rows for buffers, then the slice's number.
    """
    total, outputs = code.num_inputs, code.num_outputs + appended
    dy = len(joint.invars) - total
    known, before = code.known, joint.eqns[:split]
    whole = {id(eqn) for eqn in before}
    computed = {v for eqn in before for v in eqn.outvars}
    once, rest = hoist(joint, code, results=outputs, start=split)
    start = total + len(once.outvars)

    # Forward | backward, at the border that jax.vjp drew.  A print has no results.  A scan that is
    # cut becomes other equations with the same results.
    border = tuple(id(eqn) in whole or any(v in computed for v in eqn.outvars) for eqn in rest.eqns)
    repeat = _repeated(form)
    rest = keep_fewer_residuals(rest, border, repeat=repeat)
    returned = [i < outputs for i in range(len(rest.outvars))]
    # backward(consts, params, x, extra | once | residuals | dy)
    forward, backward = cut(rest, border, outputs=returned, repeat=repeat, at=start)
    forward = forward.replace(invars=forward.invars[:start])
    residuals = range(start, len(backward.invars) - dy)

    # Input gradient | weight gradient, by what dx needs.
    dys = range(residuals.stop, len(backward.invars))
    inputs = code.spans(INPUTS, len(known))
    cotangents = code.spans(COTANGENTS, dys.start)
    held = [*range(len(known), inputs[Place.BUFFER].stop), *residuals]
    prices = dict.fromkeys(held, _HELD) | dict.fromkeys(dys, 1.0)
    num_params = len(code.avals[Place.STAGE_GRADIENTS])
    input_grad, weight_grad = cut_weights(backward, params=num_params, prices=prices, form=form)
    by_second = reads(weight_grad)

    # Residuals that only I needs come before those that W needs.
    late = [i for i in residuals if by_second[i]]
    early = [i for i in residuals if not by_second[i]]
    order = [*range(start), *early, *late, *dys]

    def reorder(jaxpr: core.Jaxpr) -> core.Jaxpr:
        rest = jaxpr.invars[len(order) :]
        return jaxpr.replace(invars=[*(jaxpr.invars[i] for i in order), *rest])

    results = forward.outvars[:outputs]
    kept = [forward.outvars[outputs + i - start] for i in (*early, *late)]
    return replace(
        code,
        hoist=once,
        forward=forward.replace(outvars=[*results, *kept]),
        evaluate=drop_dead(forward.replace(outvars=results)),
        recompute=drop_dead(forward.replace(outvars=kept)),
        backward=reorder(backward),
        input_grad=reorder(input_grad),
        weight_grad=reorder(weight_grad),
        avals={
            **code.avals,
            Place.RESIDUAL_INPUT: tuple(v.aval for v in kept[: len(early)]),
            Place.RESIDUAL_WEIGHT: tuple(v.aval for v in kept[len(early) :]),
            Place.STASH: tuple(v.aval for v in weight_grad.invars[len(order) :]),
        },
        liveness=_liveness(inputs | cotangents, reads(backward), by_second),
    )


def _liveness(
    spans: Mapping[Place, slice], by_any: Sequence[bool], by_second: Sequence[bool]
) -> Liveness:
    """The last reader of the inputs at each place, from those that I or W reads, and that W
    reads.
    """

    def last_use(place: Place, span: slice) -> LastUse:
        if span.start == span.stop and place in OF_SLICES:
            return LastUse.NONE
        if any(by_second[span]):
            return LastUse.WEIGHT_GRAD
        is_read = place in COTANGENTS or any(by_any[span])
        return LastUse.INPUT_GRAD if is_read else LastUse.FORWARD

    found = Liveness(**{place.value: last_use(place, span) for place, span in spans.items()})
    late_rows = found.buffer_gradient is LastUse.WEIGHT_GRAD
    assert not late_rows, "other slices change the gradients of rows before W"
    return found


def cut_last(last: StageCode, axis: str, form: Form) -> StageCode:
    """Cut `backward(parameters, y, extra, once, seed) -> loss, aux, dparams, dy` into L and
    its late part by the smallest cut, as B is cut into I and W.  The late part computes the
    gradient of parameters.

    One device runs it alone, at any time after its L, so it has no collective over the pipe axis.
    The sum that gives y to all devices is one, so y itself is in the stash where it is read.
    """
    whole, places = last.backward, (Place.LOSSES, Place.AUX, Place.STAGE_GRADIENTS)
    own = last.spans(places)[Place.STAGE_GRADIENTS]
    outs, params = whole.outvars, len(last.avals[Place.STAGE_GRADIENTS])
    reordered = whole.replace(outvars=[*outs[own], *outs[: own.start], *outs[own.stop :]])
    first, second = cut_weights(reordered, params=params, prices={}, form=form)
    if any(axis in axes for _, axes in collectives(second)):
        (late,) = kinds_where(lambda spec: spec.part_of)
        raise PipelineError(
            "the gradient of a parameter of `last` needs communication over the pipe axis "
            f"{axis!r}, so {late.name} cannot make it while other devices do something else; "
            f"use the table without {late.name}: jaxpipe.spread_last(schedule)"
        )
    count = len(whole.invars)
    inputs, kept = second.invars[:count], second.invars[count:]
    y = last.spans((Place.X,), len(last.known))[Place.X]
    assert not any(reads(second)[y]), "a gradient of parameters reads y before its sum"
    return replace(
        last,
        input_grad=first,
        weight_grad=second.replace(invars=[*inputs[: y.start], *inputs[y.stop :], *kept]),
        avals={**last.avals, Place.STASH: tuple(var.aval for var in kept)},
    )
