"""Cut a flat jaxpr in two programs: the first runs early and leaves what the second, run later,
cannot make cheaply.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.extend import core

from .flatten import Atom, NewVar
from .min_cut import cheapest, weight
from .numbers import numbers_of
from .sizes import is_layout, nbytes
from .sizes import stacked as stacked_aval
from .slices import Assignment, Split, needed_for, scan_counts

# Says whether the second part should compute an equation again rather than be handed its result.
# Called with the equation and whether its inputs are all at hand in the second part anyway.
Recompute: TypeAlias = Callable[[core.JaxprEqn, bool], bool]


@dataclass(frozen=True)
class Cut:
    """`first(*inputs) -> (*first_outputs, *crossing)` and `second(*inputs, *crossing) ->
    second_outputs`.

    Both take all inputs of the jaxpr that was cut; `first_reads` and `second_reads` say which ones
    they use.
    """

    first: core.Jaxpr
    second: core.Jaxpr
    crossing: tuple[Any, ...]  # avals
    weight: int  # of what crosses: see `min_cut.weight`
    first_reads: tuple[bool, ...]
    second_reads: tuple[bool, ...]


_ELEMENTWISE = frozenset(
    {
        "convert_element_type",
        "neg",
        "add",
        "sub",
        "mul",
        "add_any",
        "real",
        "imag",
        "not",
        "stop_gradient",
    }
)


def is_cheap(eqn: core.JaxprEqn) -> bool:
    """True for layout operations and for arithmetic of one array with numbers."""
    arrays = [v for v in eqn.invars if isinstance(v, core.Var)]
    return is_layout(eqn) or (eqn.primitive.name in _ELEMENTWISE and len(arrays) <= 1)


def keep_small(eqn: core.JaxprEqn, at_hand: bool) -> bool:
    """Recompute what is cheap and either has its inputs at hand or would make the crossing no
    larger.
    """
    if not is_cheap(eqn):
        return False
    inputs = [v for v in eqn.invars if isinstance(v, core.Var)]
    return at_hand or sum(nbytes(v.aval) for v in inputs) <= nbytes(eqn.outvars[0].aval)


def keep_work(eqn: core.JaxprEqn, at_hand: bool) -> bool:
    """Recompute only layout changes, slices and what grows (a broadcast bias): for results that are
    computed once a step.
    """
    if is_layout(eqn):
        return True
    inputs = [v for v in eqn.invars if isinstance(v, core.Var)]
    return (
        at_hand
        and is_cheap(eqn)
        and sum(nbytes(v.aval) for v in inputs) < nbytes(eqn.outvars[0].aval)
    )


def cut(
    jaxpr: core.Jaxpr,
    assignment: Assignment,
    *,
    outputs: Sequence[bool],
    recompute: Recompute | None = keep_small,
    early: Callable[[core.JaxprEqn], bool] | None = None,
) -> Cut:
    """Cut a flat jaxpr (no constants) by `assignment`; `outputs` marks what the first part returns,
    the rest the second does.

    Without a `recompute` rule the crossing is the smallest from which elementwise arithmetic gives
    the rest (`cheapest`). `early` marks equations of the second part that the first may do too, if
    it has what they read.
    """
    assert not jaxpr.constvars, "constants must be inputs"
    newvar = core.gensym()
    maker = _Maker(jaxpr, newvar, recompute, early)
    return maker.cut(assignment, outputs, hidden=frozenset())


def drop_dead(jaxpr: core.Jaxpr) -> tuple[core.Jaxpr, tuple[bool, ...]]:
    """The jaxpr without equations that no output needs, also in scans, and which inputs
    it reads.
    """
    kept = _live_equations(jaxpr, needed_for(jaxpr, [True] * len(jaxpr.outvars)))
    alive = _make(jaxpr, kept, jaxpr.invars, jaxpr.outvars)
    return alive, _reads(alive, len(jaxpr.invars))


class _Maker:
    """Builds the two parts of one jaxpr."""

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        newvar: NewVar,
        recompute: Recompute | None,
        early: Callable[[core.JaxprEqn], bool] | None = None,
        late: Collection[core.Var] = (),
    ) -> None:
        """`late` are inputs that only the second part has: what its half of a scan has."""
        self._jaxpr = jaxpr
        self._newvar = newvar
        self._recompute = recompute
        self._early = early
        self._late = set(late)
        self._weights: dict[core.Var, int] = {}  # of the stacks of scans
        self._first: list[core.JaxprEqn] = []
        self._second: list[core.JaxprEqn] = []

    def cut(
        self, assignment: Assignment, outputs: Sequence[bool], *, hidden: frozenset[core.Var]
    ) -> Cut:
        """`hidden` are inputs that the second part does not have (carries that the first part of a
        scan owns).
        """
        jaxpr = self._jaxpr
        for eqn, choice in zip(jaxpr.eqns, assignment, strict=True):
            if isinstance(choice, Split):
                self._split_scan(eqn, choice)
            elif choice or self._may_be_early(eqn):
                self._first.append(eqn)
            else:
                self._second.append(eqn)
                self._late.update(eqn.outvars)
        first_outs = [v for v, f in zip(jaxpr.outvars, outputs, strict=True) if f]
        second_outs = [v for v, f in zip(jaxpr.outvars, outputs, strict=True) if not f]
        crossing, again = self._crossing(second_outs, hidden)
        first = _make(jaxpr, self._first, jaxpr.invars, [*first_outs, *crossing])
        second = _make(jaxpr, [*again, *self._second], [*jaxpr.invars, *crossing], second_outs)
        # Recomputing can leave equations in the first part that nothing needs any more.
        first, first_reads = drop_dead(first)
        second, second_reads = drop_dead(second)
        count = len(jaxpr.invars)
        maker_of = {v: e for e in self._first for v in e.outvars}
        weights = [self._weights.get(v, weight(v, maker_of.get(v))) for v in crossing]
        return Cut(
            first,
            second,
            tuple(v.aval for v in crossing),
            sum(weights),
            first_reads[:count],
            second_reads[:count],
        )

    def _may_be_early(self, eqn: core.JaxprEqn) -> bool:
        """Whether the first part may do an equation of the second too, and has what it reads."""
        if self._early is None or not self._early(eqn):
            return False
        return not any(isinstance(v, core.Var) and v in self._late for v in eqn.invars)

    def _crossing(
        self, second_outs: Sequence[Atom], hidden: frozenset[core.Var]
    ) -> tuple[list[core.Var], list[core.JaxprEqn]]:
        """What the first part hands over, after deciding what the second part computes again."""
        maker_of = {v: e for e in self._first for v in e.outvars}
        if self._recompute is None:
            used = [v for e in self._second for v in e.invars] + list(second_outs)
            needed = [v for v in used if isinstance(v, core.Var) and (v in maker_of or v in hidden)]
            keep = cheapest(needed, self._first, lambda v: v not in maker_of and v not in hidden)
            return list(keep.stored), list(keep.again)
        order = {id(e): i for i, e in enumerate(self._first)}
        used = [v for e in self._second for v in e.invars] + list(second_outs)
        crossing = dict.fromkeys(
            v for v in used if isinstance(v, core.Var) and (v in maker_of or v in hidden)
        )
        again: dict[int, core.JaxprEqn] = {}
        made_again: set[core.Var] = set()
        numbers = numbers_of(self._first)
        changed = True
        while changed:
            changed = False
            for var in list(crossing):
                eqn = maker_of.get(var)
                if eqn is None or len(eqn.outvars) != 1 or eqn.effects:
                    continue
                inputs = [v for v in eqn.invars if isinstance(v, core.Var)]
                missing = [
                    v
                    for v in inputs
                    if (v in maker_of or v in hidden) and v not in crossing and v not in made_again
                ]
                # What is made of numbers alone (an iota, a mask of zeros) is never handed over.
                if inputs and var not in numbers and not self._recompute(eqn, not missing):
                    continue
                if not inputs and eqn.primitive.name.startswith("random"):
                    continue
                del crossing[var]
                crossing.update(dict.fromkeys(missing))
                made_again.add(var)
                again[id(eqn)] = eqn
                changed = True
        return list(crossing), sorted(again.values(), key=lambda e: order[id(e)])

    def _split_scan(self, eqn: core.JaxprEqn, choice: Split) -> None:
        """Cut a scan: the first one stacks what crosses in each trip, the second one scans over
        that.
        """
        consts, carries = scan_counts(eqn)
        body = eqn.params["jaxpr"].jaxpr
        own = [*choice.carry_first, *choice.ys_first]
        body_carry = body.invars[consts : consts + carries]
        hidden = frozenset(v for v, f in zip(body_carry, choice.carry_first, strict=True) if f)
        late = [v for v, f in zip(body_carry, choice.carry_first, strict=True) if not f]
        pairs = zip(body.invars, eqn.invars, strict=True)
        late += [v for v, a in pairs if isinstance(a, core.Var) and a in self._late]
        maker = _Maker(body, core.gensym(), self._recompute, self._early, late)
        made = maker.cut(choice.body, own, hidden=hidden)
        firsts = [v for v, f in zip(eqn.outvars, own, strict=True) if f]
        seconds = [v for v, f in zip(eqn.outvars, own, strict=True) if not f]
        # A value that crosses in each trip and is an output of the scan too is stacked only once.
        inner_outs = made.first.outvars[: len(firsts)]
        ys = zip(
            inner_outs[sum(choice.carry_first) :], firsts[sum(choice.carry_first) :], strict=True
        )
        stacked = {
            v: o for v, o in ys if isinstance(v, core.Var) and not isinstance(o, core.DropVar)
        }
        stacks, outs, outvars = [], list(inner_outs), list(firsts)
        makers = {v: e for e in made.first.eqns for v in e.outvars}
        for var in made.first.outvars[len(firsts) :]:
            assert isinstance(var, core.Var)
            if var not in stacked:
                stacked[var] = self._newvar(stacked_aval(var.aval, eqn.params["length"]))
                self._weights[stacked[var]] = eqn.params["length"] * weight(var, makers.get(var))
                outs.append(var)
                outvars.append(stacked[var])
            stacks.append(stacked[var])
        if outvars:
            body_first = made.first.replace(outvars=outs)
            self._first.append(
                _scan(eqn, body_first, made.first_reads, choice.carry_first, [], outvars)
            )
        self._late.update(seconds)
        if seconds:
            other = tuple(not f for f in choice.carry_first)
            self._second.append(_scan(eqn, made.second, made.second_reads, other, stacks, seconds))


def _live_equations(jaxpr: core.Jaxpr, needed: Assignment) -> list[core.JaxprEqn]:
    """The needed equations; of a scan that is needed in part, the scan of that part."""
    kept = []
    for eqn, choice in zip(jaxpr.eqns, needed, strict=True):
        if not isinstance(choice, Split):
            kept += [eqn] if choice else []
            continue
        own = [*choice.carry_first, *choice.ys_first]
        body = eqn.params["jaxpr"].jaxpr
        outs = [v for v, f in zip(body.outvars, own, strict=True) if f]
        part = _make(body, _live_equations(body, choice.body), body.invars, outs)
        outvars = [v for v, f in zip(eqn.outvars, own, strict=True) if f]
        kept.append(
            _scan(eqn, part, _reads(part, len(part.invars)), choice.carry_first, [], outvars)
        )
    return kept


def _scan(
    eqn: core.JaxprEqn,
    body: core.Jaxpr,
    reads: Sequence[bool],
    carry_mine: Sequence[bool],
    stacks: Sequence[core.Var],
    outvars: Sequence[core.Var],
) -> core.JaxprEqn:
    """A scan with this body, over those operands of `eqn` that it reads, its own carries, and the
    stacks.
    """
    consts, carries = scan_counts(eqn)
    keep = [*reads[:consts], *carry_mine, *reads[consts + carries :]]
    operands = [v for v, k in zip(eqn.invars, keep, strict=True) if k] + list(stacks)
    count = len(eqn.invars)
    invars = [v for v, k in zip(body.invars[:count], keep, strict=True) if k] + list(
        body.invars[count:]
    )
    inner = core.ClosedJaxpr(body.replace(invars=invars), [])
    params = dict(eqn.params, jaxpr=inner, num_consts=sum(keep[:consts]), num_carry=sum(carry_mine))
    if "linear" in params:
        params["linear"] = (False,) * len(operands)
    return eqn.replace(invars=operands, outvars=list(outvars), params=params, effects=inner.effects)


def _make(
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


def _reads(jaxpr: core.Jaxpr, count: int) -> tuple[bool, ...]:
    """Which of the first `count` inputs an equation or an output reads."""
    used = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var)} | {
        v for v in jaxpr.outvars if isinstance(v, core.Var)
    }
    return tuple(v in used for v in jaxpr.invars[:count])
