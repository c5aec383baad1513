"""Read the arguments of `Pipeline`, of its steps and of calls with a cache, refuse them with every
fault named, and cut the model into stages; what an optimizer does with placed arrays.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import count, product
from operator import or_
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ..arrays import (
    PyTree,
    accumulator_dtype,
    array_faults,
    axis_faults,
    by_path,
    is_key,
    without_numpy,
)
from ..engine.costs import Costs
from ..errors import PipelineError, ScheduleError, quoted
from ..jaxprs.equations import ClosedJaxpr
from ..jaxprs.flat import flatten
from ..layouts.layout import LETTERS, Layout, LayoutError, parse_layout, split_layers
from ..table.placement import Placement
from ..table.schedule import Schedule, named
from ..transforms.spread import spread_first, spread_last
from .batch import Positioned
from .calls import Cuts, Function
from .functions import Functions, Ledger
from .model import Model
from .param_layout import (
    EMBEDDING,
    LOSS,
    OUTER,
    Chunks,
    LayerMap,
    ParamLayout,
    owner_faults,
)
from .partition import leaf_plans

_SECONDS = "seconds"  # how the unit of costs begins that `measure` returns


def rematerialised(
    stages: Sequence[Function], remat: str | Callable[..., bool] | None
) -> list[Function]:
    """The stages under `jax.checkpoint`; equal ones stay equal."""
    if remat is None:
        return list(stages)
    policy = None if isinstance(remat, str) else remat
    changed = {f: replace(f, call=_checkpointed(f.call, policy)) for f in stages}
    return [changed[function] for function in stages]


def under_policies(model: Model, policies: Mapping[str, str]) -> Model:
    """The same model whose layers of these letters run under a policy of
    `jax.checkpoint_policies`, by its name.
    """
    if not isinstance(model.stages, Mapping):
        raise PipelineError(
            "policies are of the letters of layers, but the model is not given by letters"
        )
    changed = {
        letter: _checkpointed(model.stages[letter], getattr(jax.checkpoint_policies, name))
        for letter, name in policies.items()
    }
    return model.changed(stages={**model.stages, **changed})


def _checkpointed(
    call: Callable[..., Any], policy: Callable[..., bool] | None
) -> Callable[..., Any]:
    """The call under `jax.checkpoint`; rows that it appends leave it as results."""

    @functools.wraps(call)
    def run(*arguments: PyTree, **keywords: PyTree) -> PyTree:
        ledger: Ledger | None = getattr(keywords.get("ctx"), "ledger", None)
        arguments = without_numpy(arguments)  # what is traced may be an index of them

        def traced() -> tuple[PyTree, ...]:
            if ledger is None:
                return call(*arguments, **keywords), {}, {}
            own = ledger.again()
            ctx = keywords["ctx"]._replace(ledger=own)
            return call(*arguments, **{**keywords, "ctx": ctx}), own.rows, own.buffers

        out, rows, buffers = jax.checkpoint(traced, policy=policy)()
        if ledger is not None:
            ledger.rows |= rows
            ledger.buffers |= buffers
        return out

    return run


def gather_faults(stages: Chunks, plans: PyTree, *, state: bool) -> list[str]:
    """Why the stages of these placed parameters cannot be gathered several times a step."""
    shapes = {
        (jax.tree.structure(chunk), *(leaf.shape for leaf in jax.tree.leaves(chunk)))
        for chunk in stages
    }
    what = {
        "the chunks of a device store unlike parameters": len(shapes) > 1,
        "stages take `state`": state,
        "parameters of stages are replaced": any(plan.replaced for plan in leaf_plans(plans)),
    }
    out = "gather them once a step: jaxpipe.add_gathers without max_active="
    gathers = "the table gathers stages more than once a step"
    return [f"{gathers}, but {why}; {out}" for why, holds in what.items() if holds]


def with_shares(schedule: Schedule, costs: Costs | None, functions: Functions) -> Schedule:
    """The schedule with L exactly where `last` is spread, and E and G where `first` is;
    PipelineError where it cannot be.

    They are placed by `costs` where these say how long a share takes.
    """
    for name, kind, put in (("last", "L", spread_last), ("first", "E", spread_first)):
        there = getattr(schedule.encoded, f"spreads_{name}")
        spreads = functions.spreads(name)
        if there and not spreads:
            raise PipelineError(
                f"{named(schedule)} has {kind}, a share of `{name}` on every device, "
                f"but `{name}` is not spread; give {name}=jaxpipe.spread(...), or take {kind} out "
                "with jaxpipe.transforms.remove_spread"
            )
        try:
            if spreads and not there:
                timed = costs is not None and getattr(costs, name) is not None
                schedule = put(schedule, costs=costs if timed else None)
        except ScheduleError as error:
            raise PipelineError(
                f"`{name}` cannot be spread with {named(schedule)}: {error}"
            ) from error
    return schedule


def check_costs(costs: Costs | None, schedule: Schedule) -> None:
    """PipelineError for costs in anything but seconds, CostError for those of other stages."""
    if costs is None:
        return
    if not costs.unit.startswith(_SECONDS):
        raise PipelineError(
            "costs must be in seconds, since predicates and transfers are, but their unit is "
            f"{costs.unit!r}; take them from jaxpipe.measure, or say so: jaxpipe.Costs(..., "
            'unit="seconds, estimated")'
        )
    costs.for_stages(schedule.num_stages)


def staged(
    model: Model, schedule: Schedule, layout: str | Layout | None, remat: Any = None
) -> tuple[Functions, ParamLayout, Cuts]:
    """Cut a model into the stages of a schedule; PipelineError where they do not fit."""
    placement = schedule.placement
    if model.layers is not None:
        layers = LayerMap.of(_layout(model, placement, layout), placement)
        stages = layers.functions(model.stages, has_loss=model.stage_loss)
        params = ParamLayout(placement, unlike=True, layers=layers)
    elif layout is not None:
        raise PipelineError(
            "layout= says which layers each stage has, but the model is not given by letters; "
            'write jaxpipe.Model({"t": layer, ...}, layers="..."), or leave layout= out'
        )
    else:
        stages = tuple(model.stage_functions(placement.num_stages))
        unlike = not callable(model.stages)
        stacks = getattr(model.stages, "stacks_layers", False)
        params = ParamLayout(placement, unlike=unlike, stacks=stacks)
    _check_copies(stages, params)
    functions = model.functions(rematerialised(stages, remat))
    cuts = Cuts(schedule.num_devices, model.cuts(stages))
    return replace(functions, slices=schedule.slices), params, cuts


def _layout(model: Model, placement: Placement, layout: str | Layout | None) -> Layout:
    """The layers of each stage: as given, or as many on each stage where they divide."""
    assert model.layers is not None
    # Each stage is where the table says: some devices of a user's own table have more than others.
    divides = placement.num_stages % placement.num_devices == 0
    devices = placement.num_devices if divides else 1
    if layout is None:
        costs = [float(letter not in (EMBEDDING, LOSS)) for letter in model.layers]
        try:
            pieces = split_layers(costs, stages=placement.num_stages)
        except LayoutError as error:
            raise PipelineError(
                f"the layers {model.layers!r} cannot be split evenly: {error}; give layout=, the "
                "layers of each stage"
            ) from error
        layout = Layout(tuple(model.layers[r.start : r.stop] for r in pieces), devices)
    elif isinstance(layout, str):
        letters = "".join(sorted({*LETTERS, *model.stages}))
        layout = parse_layout(layout, devices=devices, letters=letters)
    if layout.layers != model.layers:
        raise PipelineError(
            f"the layout {str(layout)!r} has other layers than the model, whose layers are "
            f"{model.layers!r}; give each layer of the model to one stage, in model order"
        )
    return layout


def _check_copies(stages: tuple[Function, ...], layout: ParamLayout) -> None:
    """Refuse what a stage that is on two devices cannot have."""
    if not layout.replicas():
        return
    if layout.unlike and layout.num_owned > 1:
        raise PipelineError(
            "unlike stages that are on two devices need a device to own one stage each, as in "
            "dualpipe"
        )
    if any("state" in function.wants for function in stages):
        raise PipelineError(
            "a stage with `state` cannot be on two devices, which would each change it; use a "
            "schedule that is not bidirectional (dualpipev instead of dualpipe)"
        )


def param_faults(params: Any, layout: ParamLayout, devices: int) -> list[str]:
    """Faults of parameters that must be placed there."""
    keys, odd = {"stages", *OUTER}, array_faults(params, "params")
    if not isinstance(params, Mapping) or "stages" not in params or {*params} - keys:
        what = "parameters must be what `place` returned, a dict with keys of"
        return [f"{what} {sorted(keys)}", *odd]
    stages, axis = params["stages"], f"the {devices} devices (see `place`)"
    faults = owner_faults(stages, layout, "parameters", "place")
    return [*(faults or axis_faults(stages, "stages", devices, axis)), *odd]


def key_faults(rng: Any) -> list[str]:
    """Faults of the step's key."""
    dtype, shape = getattr(rng, "dtype", None), np.shape(rng)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if rng is None or (typed and not shape) or (dtype == np.uint32 and len(shape) == 1):
        return []
    if typed:
        return [f"rng holds {shape} keys, but a step takes one; give one of them"]
    number = rng if isinstance(rng, int) else 0
    return [f"rng={quoted(rng)} is no key; write rng=jax.random.key({number})"]


def scale_faults(scale: Any) -> list[str]:
    """Faults of the factor of the loss."""
    dtype: Any = getattr(scale, "dtype", None)
    if dtype is None:
        is_real = scale is None or isinstance(scale, int | float)
    else:
        kinds = (jnp.floating, jnp.integer)
        is_real = not np.shape(scale) and any(jnp.issubdtype(dtype, kind) for kind in kinds)
    if is_real:
        return []
    what = quoted(scale) if dtype is None else f"{dtype}{list(np.shape(scale))}"
    return [f"scale must be a number or a scalar array, a factor of the loss, not {what}"]


def donated_faults(params: Any, batch: Any, rng: Any, state: Any, scale: Any = None) -> list[str]:
    """Arguments whose arrays are gone: XLA may end the process where they are read."""
    cached = isinstance(batch, Positioned)
    named = {"params": params, "batch": batch, "rng": rng, "cache" if cached else "state": state}
    named["scale"] = scale
    gone = {
        name: sum(map(_is_deleted, jax.tree.leaves(tree)))
        for name, tree in named.items()
        if any(map(_is_deleted, jax.tree.leaves(tree)))
    }
    return [
        f"{count} arrays of {name} are deleted: a call that donates them (donate_argnums=) was "
        "given them before; go on with what that call returned, or do not donate them"
        for name, count in gone.items()
    ]


def _is_deleted(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and leaf.is_deleted()


def state_faults(state: Any, layout: ParamLayout, what: str, data_shards: int) -> list[str]:
    """Faults of the stages' own state; `what` it is, "" where no stage takes it."""
    if not what:
        return ["no stage takes `state` by keyword; leave state= out"] if state else []
    if not state:
        return ["a stage takes `state`, but the step got none; give state=pipe.place_state(...)"]
    faults = owner_faults(state, layout, what, "place_state")
    keys = sorted(name for name, leaf in by_path(state).items() if is_key(leaf))
    if faults or data_shards == 1 or not keys:
        return faults
    return [
        f"the state has keys of random numbers ({', '.join(keys)}): each of the {data_shards} data "
        "shards would draw the same numbers, and nothing is the mean of their keys at the end of "
        "the step. Draw from ctx.rng, which differs by data shard, stage and microbatch: give the "
        "step rng="
    ]


# The texts of the equations that matter to one parameter alone, by path.
Rules: TypeAlias = "dict[str, list[str]]"

# parameters of equations that say where numbers are
_LAYOUT = frozenset({"shape", "sharding", "broadcast_dimensions"})
# A parameter that is there only while an optimizer is traced to find its rules.  A wrapper that
# gives it the model's own arrays need not act then.
PROBE = "~"


def check_rules(
    optimizer: Any, placed: Mapping[str, PyTree], own: Mapping[str, PyTree], plans: PyTree
) -> None:
    """PipelineError for parameters of which the optimizer makes something else where they are
    placed; all are shapes, with the plans of the placed ones.

    A rule for each number does the same whatever the shape of an array is.  A rule for all
    parameters (clipping by the global norm) reads every number once.  So equations that matter to
    one parameter alone must be the same.
    """
    rules = rules_of(optimizer, placed, own)
    if rules is None:
        return
    leaves = zip(by_path(dict(placed)).items(), leaf_plans(plans), strict=True)
    faults = {
        parameter.path: f"{parameter.path!r} of shape {parameter.shape} is stored in {path!r} of "
        f"shape {leaf.shape}, with which the optimizer does something else"
        for (path, leaf), plan in leaves
        for parameter, _ in plan.parameters
        if rules[0][path] != rules[1][parameter.path]
    }
    PipelineError.refuse(
        "this optimizer has rules for paths, ranks, shapes or norms of single arrays, and "
        "placed arrays have others than the model's "
        "own; wrap such rules, with their masks and labels, as jaxpipe.per_layer(pipe, "
        "optimizer), or write "
        "pipe.init(..., as_placed=True) where they are meant for placed arrays",
        faults.values(),
    )


def rules_of(optimizer: Any, *trees: Mapping[str, PyTree]) -> list[Rules] | None:
    """The rules for each tree of shapes; None where the optimizer does not take these trees, as one
    whose mask is a tree of another form.
    """
    # With one parameter alone, a rule for all would look like a rule for it.
    second = {PROBE: jax.ShapeDtypeStruct((), jnp.float32)}
    for more, extra in product((second, {}), ({}, {"value": 0.0})):
        try:
            return [_rules_of(optimizer, {**tree, **more}, extra) for tree in trees]
        except Exception:
            # of the optimizer, which is the user's own: where it cannot be used at all, `init` says
            # so
            continue
    return None


def _rules_of(optimizer: Any, tree: PyTree, extra: dict[str, Any]) -> Rules:
    paths = list(by_path(tree))
    state = jax.eval_shape(optimizer.init, tree)
    closed, shapes = jax.make_jaxpr(
        lambda g, s, p: optimizer.update(g, s, p, **extra), return_shape=True
    )(tree, state, tree)
    if len(jax.tree.leaves(shapes[0])) != len(paths):
        raise ValueError("not an update for each parameter")
    graph = _Dataflow(closed)
    gradients, parameters = graph.inputs[: len(paths)], graph.inputs[-len(paths) :]
    made_of = graph.made_of(gradients, parameters)
    matters_to = graph.matters_to(len(paths))
    found: dict[str, list[str]] = {path: [] for path in paths}
    for text, reads, writes in graph.nodes:
        alone = _any(matters_to, writes)
        if text and alone.bit_count() == 1 and alone & _any(made_of, reads):
            found[paths[alone.bit_length() - 1]].append(text)
    return found


def init_as_updated(optimizer: Any, accumulate: Any) -> Callable[[PyTree], PyTree]:
    """`optimizer.init`, with the dtypes that an update leaves: moments of bfloat16 parameters have
    those of the gradients, for instance.

    `accumulate` is the least dtype of gradients; None: they have the parameters' own.
    """

    def gradient(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = accumulator_dtype(leaf.dtype, accumulate)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    def init(params: PyTree) -> PyTree:
        state = optimizer.init(params)
        gradients = jax.tree.map(gradient, params)
        try:
            after: PyTree = jax.eval_shape(optimizer.update, gradients, state, params)[1]
        except TypeError:  # it wants more than gradients (the loss, for instance)
            return state
        if len({jax.tree.structure(state), jax.tree.structure(after)}) > 1:
            return state
        return jax.tree.map(
            lambda leaf, new: leaf if leaf.dtype == new.dtype else leaf.astype(new.dtype),
            state,
            after,
        )

    return init


def inputs_of(closed: ClosedJaxpr) -> list[int]:
    """For each result of a function, the inputs on which it depends: a bit each."""
    graph = _Dataflow(closed)
    made_of = graph.made_of(graph.inputs)
    return [made_of[out] for out in graph.outs]


def _any(bits: Mapping[int, int], values: Sequence[int]) -> int:
    return reduce(or_, (bits[value] for value in values), 0)


class _Dataflow:
    """The equations of a function, with those of both branches of conditions: what each does, the
    numbers of the values that it reads, and of those that it makes.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.nodes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self._new = count().__next__
        self.inputs = [self._new() for _ in closed.jaxpr.invars]
        self.outs = self._add(closed, self.inputs)

    def _add(self, closed: ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
        """Append the equations of a jaxpr; the numbers of its results."""
        flat = flatten(closed).jaxpr
        known: dict[Any, int] = defaultdict(self._new, zip(flat.invars, inputs, strict=True))

        def numbers(atoms: Sequence[Any]) -> tuple[int, ...]:
            return tuple(self._new() if isinstance(a, core.Literal) else known[a] for a in atoms)

        for eqn in flat.eqns:
            reads, writes = numbers(eqn.invars), numbers(eqn.outvars)
            if eqn.primitive.name != "cond":
                self.nodes.append((_text(eqn), reads, writes))
                continue
            branches = [self._add(branch, reads[1:]) for branch in eqn.params["branches"]]
            for out, *values in zip(writes, *branches, strict=True):
                self.nodes.append(("cond", (reads[0], *values), (out,)))
        return [*numbers(flat.outvars)]

    def made_of(self, *inputs: Sequence[int]) -> dict[int, int]:
        """By value, those of the inputs on which it depends: a bit each, by their places."""
        found = defaultdict(int, {value: 1 << i for each in inputs for i, value in enumerate(each)})
        for _, reads, writes in self.nodes:
            found.update(dict.fromkeys(writes, _any(found, reads)))
        return found

    def matters_to(self, count: int) -> dict[int, int]:
        """By value, those of the first `count` results that depend on it, in this call or in a
        later one, which is given the other results in place of the inputs of these numbers.
        """
        found: dict[int, int] = defaultdict(int)
        before: dict[int, int] | None = None
        while found != before:
            before = dict(found)
            for i, out in enumerate(self.outs):
                found[out] |= 1 << i if i < count else found[self.inputs[i]]
            for _, reads, writes in reversed(self.nodes):
                for value in reads:
                    found[value] |= _any(found, writes)
        return found


def _text(eqn: core.JaxprEqn) -> str:
    """The text of an equation, with shapes where it does not act on each number by itself; "" where
    it only repeats numbers.
    """
    if eqn.primitive.name == "broadcast_in_dim":
        return ""
    literals = [str(atom.val) for atom in eqn.invars if isinstance(atom, core.Literal)]
    shapes = [getattr(atom.aval, "shape", ()) for atom in (*eqn.invars, *eqn.outvars)]
    shapes = [shape for shape in shapes if shape]
    params = [(key, str(value)) for key, value in sorted(eqn.params.items()) if key not in _LAYOUT]
    by_number = len(set(shapes)) < 2 and not any("ax" in key or "dim" in key for key, _ in params)
    return f"{eqn.primitive.name} {literals} {params} {'' if by_number else shapes}"
