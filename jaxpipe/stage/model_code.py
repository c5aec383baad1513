"""The trace of the whole model, which is the code of every kind of stage, of first and last; and
its program.

Stages whose state would need a gradient to an earlier microbatch are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from ..arrays import Avals, Leaves, PyTree, Rng, accumulator_dtype, by_index, shapes_of, whole
from ..errors import PipelineError
from ..jaxprs.cut import drop_dead
from ..jaxprs.equations import (
    AXIS_INDEX,
    by_leaves,
    every_equation,
    nbytes,
    reads,
    traced_once,
    uses_of_axes,
    with_inputs,
)
from ..jaxprs.flat import flatten
from ..lowering.plan import Plan
from ..model.calls import OUTER_WANTS, check_equations, refusing
from ..model.functions import Extra, Functions, StageOutput, check_forms
from ..program.ir import Program
from ..program.verify import verify
from ..storage.plan import LeafPlan, leaf_plans
from ..storage.table import Home, Places
from ..table.effects import TOGETHER, Place, longest
from ..table.kinds import By, Kind, Offload
from ..table.schedule import named
from .code import RESIDUALS, ParamUse, StageCode, cut_last, inexact
from .codes import ModelCode
from .counts import check_count
from .setup import Inputs, Setup
from .trace import trace_last, trace_stage

# The parameters (a stage's own and the shared ones), x, and the further arguments.
_Arguments: TypeAlias = "tuple[PyTree, PyTree, Extra]"
_Stage: TypeAlias = "Callable[[PyTree, PyTree, Extra], tuple[PyTree, StageOutput]]"


def check_state_gradient(
    name: str, call: _Stage, inputs: _Arguments, trained: Sequence[bool]
) -> None:
    """PipelineError where `call(params, x, extra)` depends on state that parameters or x determined
    in an earlier microbatch.

    Only dependences with a gradient count.  `trained` says whether each parameter has one.
    """
    state = by_index(inputs[2]["state"], "state")
    names = [name for name, leaf in state.items() if inexact(leaf)]
    if not names:
        return
    jaxpr, moved = _tangents(call, inputs, trained)
    count = len(names)
    # Whether each result depends on parameters and x, and on the state, which comes last.
    depends = [reads(drop_dead(jaxpr.replace(outvars=[v])))[-moved:] for v in jaxpr.outvars]
    results, after = depends[:-count], depends[-count:]
    read = {i for row in results for i in range(count) if row[i - count]}
    for _ in after:
        read |= {i for own in read for i in range(count) if after[own][i - count]}
    lost = [names[i] for i in sorted(read) if any(after[i][:-count])]
    if lost:
        raise PipelineError(
            f"`{name}` would lose a gradient: it makes {', '.join(lost)} of its parameters or of "
            "x, and what it returns for later microbatches depends on that, but no gradient goes "
            "through the state back to an earlier microbatch. Where that gradient is not wanted, "
            "write state = jax.lax.stop_gradient(state) at the top of the stage; for running "
            "statistics, let x depend on the state only where training=False"
        )


def _tangents(call: _Stage, inputs: _Arguments, trained: Sequence[bool]) -> tuple[core.Jaxpr, int]:
    """The derivative, and how many tangents of trained parameters, x and state are its last inputs.

    Its outputs are the tangents of the stage's results.  The tangents of the new state are last.
    """
    params, x, extra = inputs
    arguments = params, x, extra["state"]
    moves = [*trained, *map(inexact, jax.tree.leaves(arguments[1:]))]

    def tangents(arguments: tuple[PyTree, ...], extra: Extra, directions: Leaves) -> Leaves:
        def returned(params: PyTree, x: PyTree, state: PyTree) -> Leaves:
            y, more = call(params, x, {**extra, "state": state})
            return list(filter(inexact, jax.tree.leaves((y, more.loss, more.state))))

        derivative: Callable[[Leaves], Leaves]
        _, derivative = jax.linearize(*by_leaves(returned, arguments, moves))
        return derivative(directions)

    _, moving = by_leaves(call, arguments, moves)
    flat = flatten(jax.make_jaxpr(tangents)(arguments, extra, moving))
    return with_inputs(flat), len(moving)


def trace(setup: Setup, inputs: Inputs) -> ModelCode:
    """Trace the user's functions, and check that their shapes chain; `inputs` are what a device
    starts from, as shapes.
    """
    return setup.on_device(partial(_trace, setup, inputs))


def _trace(setup: Setup, inputs: Inputs) -> ModelCode:
    functions = replace(setup.functions, in_place=not setup.functions.room)
    layout, shared = setup.layout, inputs.shared
    shared_uses = uses_of(setup, shared, leaf_plans(setup.plans["shared"]))

    def extra_of(wants: frozenset[str]) -> Extra:
        def extra(batch: PyTree, rng: Rng, index: jax.Array) -> Extra:
            return functions.extra(batch, rng, index, index, wants, of=By.STAGE)

        index = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.eval_shape(extra, inputs.batch, inputs.rng, index)

    def outer(key: str, x: PyTree) -> StageCode:
        """`first` or `last`."""
        is_share = functions.spreads(key)
        make: Callable[..., StageCode] = (
            partial(trace_stage, form=setup.form) if key == "first" else trace_last
        )
        own, run = getattr(inputs, key), getattr(functions, f"run_{key}")
        uses = uses_of(setup, own, leaf_plans(setup.plans[key])) + shared_uses
        if is_share:
            # The gradient of a lookup needs no residuals; another `first` is run again for it.
            run = jax.checkpoint(run) if key == "first" else partial(_of_whole, run, setup.axis)
        with refusing(key):
            extra = extra_of(OUTER_WANTS)
            code = make(run, (own, shared), x, extra, uses, training=setup.training)
        if not is_share:
            _check_collectives(key, code, setup.axis)
        return code

    first = outer("first", ())
    x = first.y
    kinds: dict[object, StageCode] = {}
    kind_of: list[int] = []
    for stage, function in enumerate(functions.stages):
        own = layout.held(stage, inputs.owned)
        params, plans = own.avals, layout.held(stage, setup.plans["stages"]).leaves
        state = layout.held(stage, inputs.kept).avals if inputs.kept else ()
        uses = uses_of(setup, params, plans, own.places) + shared_uses
        leaves, tree = jax.tree.flatten(shapes_of((params, state, x)))
        key = (function, tree, *leaves, *uses, own.form)
        if key not in kinds:
            extra = extra_of(functions.wants(stage))
            extra |= {"state": state} if "state" in functions.wants(stage) else {}
            arguments = (params, shared), x, extra
            kinds[key] = _trace_one(setup, functions, stage, arguments, uses)
        kind_of.append(list(kinds).index(key))
        x = kinds[key].y
    last = None if functions.last is None else outer("last", x)
    if functions.last is not None and last is not None and setup.training:
        check_count(functions.last.name, last)
    found = ModelCode(tuple(kinds.values()), tuple(kind_of), first, last, setup.schedule)
    if last is not None and found.defers_last:
        last = cut_last(last, setup.axis, setup.form)
    shared_gradients = sum(use.trained for use in shared_uses) if setup.training else 0

    def of_model(code: StageCode, own: Place, more: Mapping[Place, Avals]) -> StageCode:
        """The code, with the gradients of its own and of the shared parameters apart."""
        every = code.avals[Place.STAGE_GRADIENTS]
        at = len(every) - shared_gradients
        gradients = {Place.STAGE_GRADIENTS: (), own: every[:at], Place.SHARED_GRADIENTS: every[at:]}
        return replace(code, avals={**code.avals, **gradients, **more})

    # what the gradient of `first` needs: what it keeps, or of all devices that of its result
    kept: Avals = tuple(leaf for place in RESIDUALS for leaf in first.avals[place])
    kept = first.avals[Place.COTANGENT] if found.schedule.encoded.spreads_first else kept
    return replace(
        found,
        kinds=tuple(of_model(code, Place.STAGE_GRADIENTS, {}) for code in found.kinds),
        first=of_model(first, Place.FIRST_GRADIENTS, {Place.FIRST: kept}),
        last=last and of_model(last, Place.LAST_GRADIENTS, {Place.SHARE: last.avals[Place.STASH]}),
    )


def _of_whole[P, T](
    run: Callable[[P, PyTree, Extra], T], axis: str, params: P, y: PyTree, extra: Extra
) -> T:
    """`last` of the output of the last stage, which one device has and the others have as zeros.

    The source differs from microbatch to microbatch where a stage is on two devices.  One sum is
    one collective; a tree of permutes would be log2(P) collectives of the same size.  Every device
    gets the same loss and begins its backward with 1/P of the loss's cotangent.  The backward thus
    differentiates the mean of P equal losses.  Collectives inside it sum cotangents over devices,
    and count none twice.
    """
    return run(params, jax.tree.map(lambda leaf: whole(leaf, axis), y), extra)


def lower(setup: Setup, code: ModelCode) -> Program:
    """The program of the step, verified; a warning where an offload moves nothing."""
    offloads = setup.training and any(kind.offloads for kind in code.kinds)
    offload = Offload.RESIDUALS if offloads else setup.offload
    plan = Plan(setup.ticks, setup.segments, offload)
    live, most = longest([kind.liveness for kind in code.kinds]), _slots_apart(setup, code)
    program = verify(plan.program(live, most=most))
    if setup.training and offload is not Offload.NOTHING and not program.slots.host:
        schedule = setup.schedule
        warnings.warn(
            f"offload moves nothing to the host: {named(schedule)} over {schedule.num_devices} "
            "devices has no more slots of residuals than the moves need; drop offload, or take a "
            "schedule whose residuals wait longer (`jaxpipe.simulate(schedule).peak_offloaded`)",
            stacklevel=3,
        )
    return program


def _slots_apart(setup: Setup, code: ModelCode) -> int:
    """How many slots at most may be buffers of their own: none where predicates between slots cost
    more than copies of rows.

    The host decides on predicates of blocks that are in no CUDA graph: they communicate, or have
    scans, whose rows XLA copies from places that the host knows.
    """
    most = setup.form.slots
    if not most or setup.target.communicates:
        return 0
    held = TOGETHER if Kind.W in setup.schedule.encoded.kinds else RESIDUALS
    kept = (sum(nbytes(aval) for p in held for aval in kind.avals[p]) for kind in code.kinds)
    small = max(kept) < setup.form.slot_bytes
    loops = any(
        eqn.primitive.name == "scan" for kind in code.kinds for eqn in every_equation(kind.forward)
    )
    return 0 if small or loops else most


def uses_of(
    setup: Setup, tree: PyTree, plans: Sequence[LeafPlan], places: Places = ()
) -> list[ParamUse]:
    """The uses of each of these parameters, those of a stage with their places.

    Layers along a dim that the partitioner splits stay together, and leaves that are replaced.
    """

    def apart(place: Home | None, plan: LeafPlan) -> bool:
        if place is None or not place.flat:
            return place is not None and bool(plan.auto) and plan.auto[0] is None
        return all(part.dim for part in place.entry.parts)

    return [
        ParamUse.of(
            leaf,
            frozen=plan.frozen,
            total=accumulator_dtype(leaf.dtype, setup.accumulate) if setup.form.products else None,
            in_layers=plan.replaced is None and apart(place, plan),
        )
        for leaf, plan, place in zip_longest(jax.tree.leaves(tree), plans, places)
    ]


def _trace_one(
    setup: Setup, functions: Functions, stage: int, inputs: _Arguments, uses: Sequence[ParamUse]
) -> StageCode:
    """Trace one stage and check what it takes and returns."""
    function = functions.stages[stage]
    name, run = function.name, partial(functions.run_stage, stage)
    keeps_state = setup.training and "state" in inputs[2]
    try:
        with refusing(name):
            passed = functions.carried(stage, *inputs)
            params, x, extra = inputs
            whole = params, x, extra | ({"carried": passed} if passed else {})
            call = traced_once(run, *whole)
            # before a derivative, which JAX refuses in words of its own
            check_equations(name, [call.closed.jaxpr])
            if keeps_state:
                check_state_gradient(name, call, whole, [use.trained for use in uses])
            code = trace_stage(
                call, *inputs, uses, passed, training=setup.training, form=setup.form
            )
    except (TypeError, ValueError) as error:
        if not setup.layout.unlike or isinstance(error, PipelineError):
            raise
        before = f"stage {stage - 1}" if stage else "`first`, or the batch,"
        x = by_index(inputs[1], "x").items()
        shapes = ", ".join(f"{path} {a.dtype}{list(a.shape)}" for path, a in x)
        raise PipelineError(
            f"stage {stage} cannot take what {before} returns ({shapes}): {error}"
        ) from error
    _check_collectives(name, code, setup.axis)
    if not setup.layout.unlike:
        check_forms(name, "x", inputs[1], code.y)
    if keeps_state:
        recomputes = setup.schedule.encoded.recomputes
        _check_reads_of_state(name, code, inputs[2], recomputes=recomputes)
    return replace(code, wants=functions.wants(stage))


def _check_collectives(name: str, code: StageCode, axis: str) -> None:
    """PipelineError for communication over the pipe axis, for a place along it, and for constraints
    by manual axes.

    Devices run different stages at the same time, so such communication would wait for ever.
    """
    jaxprs = code.hoist, code.forward, code.backward
    found = sorted({use for jaxpr in jaxprs for use, axes in uses_of_axes(jaxpr) if axis in axes})
    if found == [AXIS_INDEX]:
        raise PipelineError(
            f"`{name}` asks for its place along the pipe axis {axis!r} (jax.lax.axis_index); which "
            "device runs a stage is up to the table, so another schedule would give another loss. "
            "ctx.stage is the number of the stage, and ctx.layer that of a layer"
        )
    if found:
        raise PipelineError(
            f"`{name}` calls {', '.join(found)} over the pipe axis {axis!r}; devices along it "
            "run different stages at a time, so it would wait for ever. What all stages share "
            'belongs under "shared"; a sum over microbatches is a metric, or made of gradients; '
            "a `first` or `last` under jaxpipe.spread runs on all devices at once, and may use "
            "the axis"
        )
    check_equations(name, jaxprs)


def _check_reads_of_state(name: str, code: StageCode, extra: Extra, *, recomputes: bool) -> None:
    """PipelineError where a backward or R reads the state: later forwards have changed it."""
    count = len(jax.tree.leaves(extra["state"]))
    before = code.num_inputs

    def read_by(*jaxprs: core.Jaxpr) -> bool:
        return any(any(reads(jaxpr)[before - count : before]) for jaxpr in jaxprs)

    if read_by(code.backward, code.input_grad, code.weight_grad):
        raise PipelineError(
            f"the gradient of `{name}` depends on its state, which later microbatches have "
            "changed by the time of the backward; let x depend on the state only where "
            "training=False, or put jax.lax.stop_gradient around all that it is multiplied with. "
            "(With remat= the backward runs the stage again, so x must not depend on the state at "
            "all)"
        )
    if recomputes and read_by(code.recompute):
        raise PipelineError(
            f"R in the table recomputes what the gradient of `{name}` needs, and that depends on "
            "the state, which later microbatches have changed by then; let x depend on the state "
            "only where training=False, or take R out with jaxpipe.transforms.remove_recompute"
        )
