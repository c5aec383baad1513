"""Read the arguments of `Pipeline`, of its steps and of calls with a cache, refuse them with every
fault named, and cut the model into stages; what an optimizer does with placed arrays.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import count, product
from operator import or_
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from ..arrays import Params, PyTree, array_faults, axis_faults, by_path, described, wider
from ..engine.costs import Costs
from ..errors import PipelineError, ScheduleError, quoted
from ..jaxprs.equations import flatten
from ..layouts.layout import LETTERS, Layout, LayoutError, parse_layout, split_layers
from ..table.kinds import Placement
from ..table.schedule import Schedule
from ..transforms.spread import spread_first, spread_last
from .calls import Cuts, Function
from .functions import Functions, Ledger, Positioned, positions, time_faults
from .model import Model, Plain
from .param_layout import (
    EMBEDDING,
    LOSS,
    OUTER,
    Chunks,
    LayerMap,
    ParamLayout,
    owner_faults,
    with_outer,
)
from .partition import Partition, leaf_plans
from .settings import Memory, Sharding, on_mesh

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
    """The call under `jax.checkpoint` of arrays alone: `training` stays a Python bool."""

    @functools.wraps(call)
    def run(*arguments: PyTree, **keywords: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten((arguments, keywords))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
        ledger: Ledger | None = getattr(keywords.get("ctx"), "ledger", None)

        def on_arrays(arrays: dict[int, Any]) -> tuple[PyTree, ...]:
            values = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            arguments, keywords = jax.tree.unflatten(tree, values)
            if ledger is None:
                return call(*arguments, **keywords), {}, {}
            own = ledger.again()
            keywords["ctx"] = keywords["ctx"]._replace(ledger=own)
            return call(*arguments, **keywords), own.rows, own.buffers

        out, rows, buffers = jax.checkpoint(on_arrays, policy=policy)(arrays)
        if ledger is not None:
            ledger.rows |= rows
            ledger.buffers |= buffers
        return out

    return run


def with_shares(schedule: Schedule, costs: Costs | None, functions: Functions) -> Schedule:
    """The schedule with L exactly where `last` is spread, and E and G where `first` is;
    PipelineError where it cannot be.

    They are placed by `costs` where these say how long a share takes.
    """
    for name, kind, put in (("last", "L", spread_last), ("first", "E", spread_first)):
        there, spreads = (getattr(o, f"spreads_{name}") for o in (schedule.encoded, functions))
        if there and not spreads:
            raise PipelineError(
                f"schedule {schedule.name!r} has {kind}, a share of `{name}` on every device, "
                f"but `{name}` is not spread; give {name}=jaxpipe.spread(...), or take {kind} out "
                "with jaxpipe.transforms.remove_spread"
            )
        if there or not spreads:
            continue
        timed = costs is not None and getattr(costs, name) is not None
        try:
            schedule = put(schedule, costs=costs if timed else None)
        except ScheduleError as error:
            raise PipelineError(
                f"`{name}` cannot be spread with schedule {schedule.name!r}: {error}"
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


def check_kinds(given: Mapping[str, Any]) -> None:
    """PipelineError for arguments of `Pipeline` of another kind, such as a schedule's name instead
    of a schedule; every fault is listed.
    """
    name = given["schedule"] if isinstance(given["schedule"], str) else "1f1b"
    build = f"jaxpipe.schedules.build({name!r}, devices=P, microbatches=M)"
    wanted = {
        "model": (Model, "write jaxpipe.Model(stage, first=..., last=...)"),
        "schedule": (Schedule, f"write {build}"),
        "mesh": (Mesh, 'write jax.make_mesh((P,), ("pipe",))'),
        "sharding": (Sharding, "write jaxpipe.Sharding(...)"),
        "memory": (Memory, "write jaxpipe.Memory(...)"),
        "costs": (Costs, "take what jaxpipe.measure returns"),
    }
    faults = [
        f"{name} must be a {'jax.sharding' if kind is Mesh else 'jaxpipe'}.{kind.__name__}, not "
        f"{quoted(given[name])}; {how}"
        for name, (kind, how) in wanted.items()
        if not (isinstance(given[name], kind) or (name == "costs" and given[name] is None))
    ]
    PipelineError.refuse("", faults)


def staged(
    model: Model, schedule: Schedule, layout: str | Layout | None, remat: Any = None
) -> tuple[Functions, ParamLayout, Cuts]:
    """Cut a model into the stages of a schedule; PipelineError where they do not fit."""
    placement = schedule.placement
    if model.is_layered:
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
    keys = {"stages", *OUTER}
    if not isinstance(params, Mapping) or "stages" not in params or not set(params) <= keys:
        faults = [f"parameters must be what `place` returned, a dict with keys of {sorted(keys)}"]
    else:
        faults = owner_faults(params["stages"], layout, "parameters", "place") or axis_faults(
            params["stages"], "stages", devices, f"the {devices} devices (see `place`)"
        )
    return [*faults, *array_faults(params, "params")]


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


def state_faults(state: Any, layout: ParamLayout, *, wanted: bool) -> list[str]:
    """Faults of the stages' own state; `wanted`: some stage takes it."""
    if not wanted:
        return ["no stage takes `state` by keyword; leave state= out"] if state else []
    if not state:
        return ["a stage takes `state`, but the step got none; give state=pipe.place_state(...)"]
    return owner_faults(state, layout, "state", "place_state")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("stages",),
    meta_fields=("sequences", "length"),
)
@dataclass(frozen=True)
class Cache:
    """What the stages keep of some sequences, on the devices of the stages.

    Attributes:
        stages: for each chunk (carry, appended rows by name), leaves [P, sequences, ...].
        sequences: how many there are; sequence m is microbatch m of a schedule without slices.
        length: positions of a sequence that there is room for.
    """

    stages: Chunks
    sequences: int
    length: int


@dataclass(frozen=True)
class Caching:
    """Calls with a cache, for the functions of a pipeline and its schedule."""

    functions: Functions
    partition: Partition
    schedule: Schedule

    @property
    def sequences(self) -> int:
        """The sequences of a step."""
        return self.schedule.num_microbatches // self.schedule.slices

    def shapes(self, params: Params, batch: PyTree, length: int) -> list[PyTree]:
        """What each stage keeps in a cache with room for `length` positions, leaves [sequences,
        ...].

        Raises:
            PipelineError: the batch or the length does not fit; every fault is listed.
        """
        faults = self._batch_faults(batch)
        if not isinstance(length, int) or length < 1:
            faults.append(f"length must be a whole number of at least 1, not {length!r}")
        PipelineError.refuse("there is no cache for this batch", faults)
        params, cuts = with_outer(params), self.partition.cuts
        layout = self.partition.layout
        functions = replace(self.functions, training=False).with_cache(length)
        functions = functions.over(self.partition.axis, cuts, params, parts=1)
        count = self.schedule.num_stages

        def carried(params: Params, batch: PyTree) -> list[PyTree]:
            rows = functions.split(batch, self.schedule.num_microbatches)
            trees = [layout.of_stage(stage, params["stages"]) for stage in range(count)]
            own = {**params, "stages": trees}
            plain = Plain(functions.for_batch(rows), cuts, own, rows, None, stacked=False)
            return list(plain.begin([()] * count)[1])

        return [
            jax.tree.map(lambda a: jax.ShapeDtypeStruct((self.sequences, *a.shape), a.dtype), tree)
            for tree in jax.eval_shape(on_mesh(self.partition.mesh, carried), params, batch)
        ]

    def positioned(self, cache: Any, batch: PyTree, position: Any) -> Positioned:
        """The batch of a call that goes on at a position of its cache.

        Raises:
            PipelineError: cache, batch and position do not fit; every fault is listed.
        """
        layout, sequences = self.partition.layout, self.sequences
        faults = self._batch_faults(batch)
        if not isinstance(cache, Cache):
            kind = type(cache).__name__
            faults += [f"cache= takes what `empty_cache` or `outputs` returned, not {kind}"]
        elif not faults:
            if cache.stages.layout != layout:
                faults += [
                    f"the cache is for {cache.stages.layout}, but this schedule has {layout}; make "
                    "it by `empty_cache` of this pipeline"
                ]
            if cache.sequences != sequences:
                has = f"the cache has {cache.sequences} sequences"
                faults += [f"{has}, but the schedule has {sequences}"]
            more = positions(batch, self.functions.time)
            faults += _position_faults(cache, position, more)
        PipelineError.refuse("this call with a cache cannot be lowered", faults)
        at = jnp.broadcast_to(jnp.asarray(position, jnp.int32), (sequences,))
        return Positioned(batch, at, cache.length)

    def _batch_faults(self, batch: PyTree) -> list[str]:
        """Why a batch cannot go with a cache."""
        functions = self.functions
        faults = time_faults(batch, functions.slices, functions.time, always=True)
        if axes := self.partition.data_axes:
            faults.append(
                f"a cache does not combine with the data axes {', '.join(axes)}; give each data "
                "shard a pipeline of its own"
            )
        if functions.has_state:
            faults.append("a cache does not combine with stages that take `state`")
        return faults


def _position_faults(cache: Cache, position: Any, more: int) -> list[str]:
    whole = jnp.issubdtype(jnp.result_type(position), jnp.integer)
    if not whole or np.shape(position) not in ((), (cache.sequences,)):
        what = described(position)
        return [f"position is {what}; give a whole number, or {cache.sequences} of them"]
    if isinstance(position, jax.core.Tracer):
        return []
    least, most = int(np.min(position)), int(np.max(position))
    if least < 0 or most + more > cache.length:
        return [
            f"{more} rows at position {most if least >= 0 else least} are beyond the buffers of "
            f"the cache, which have room for {cache.length}; make it with length={most + more}"
        ]
    return []


def hide_beyond(outputs: PyTree, batch: Positioned, time: tuple[str, ...]) -> PyTree:
    """NaN in place of floating outputs where rows are beyond the buffers of the cache.

    A position that is traced is known when the program runs, which is too late for an error.
    """
    if not isinstance(batch.position, jax.core.Tracer):
        return outputs
    end = batch.position + positions(batch.batch, time)
    fits = jnp.all(end <= batch.room) & jnp.all(batch.position >= 0)

    def hidden(leaf: Any) -> Any:
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.where(fits, leaf, jnp.nan) if inexact else leaf

    return jax.tree.map(hidden, outputs)


# The texts of the equations that matter to one parameter alone, by path.
Rules: TypeAlias = "dict[str, tuple[str, ...]]"

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


def _rules_of(optimizer: Any, tree: Params, extra: dict[str, Any]) -> Rules:
    paths = list(by_path(tree))
    state = jax.eval_shape(optimizer.init, tree)
    closed, shapes = jax.make_jaxpr(
        lambda g, s, p: optimizer.update(g, s, p, **extra), return_shape=True
    )(tree, state, tree)
    if len(jax.tree.leaves(shapes[0])) != len(paths):
        raise ValueError("not an update for each parameter")
    numbers, nodes = count(), list[_Node]()
    inputs = [next(numbers) for _ in closed.jaxpr.invars]
    ends: dict[int, int] = {}  # by value, the results that it matters to, updates first: a bit each
    for i, out in enumerate(_graph(closed, inputs, nodes, numbers)):
        ends[out] = ends.get(out, 0) | 1 << i
    for node in reversed(nodes):
        for value in node.reads:
            ends[value] = ends.get(value, 0) | _any(ends, node.writes)
    # results that matter to updates, of this step or of a later one
    live = updates = (1 << len(paths)) - 1
    states, before = range(len(paths), len(inputs) - len(paths)), 0
    while live != before:
        before = live
        live |= sum(1 << k for k in states if ends.get(inputs[k], 0) & live)
    # by value, the parameters of which it reads the gradient, or themselves
    made_of: dict[int, int] = {}
    for i in range(len(paths)):
        made_of[inputs[i]] = made_of[inputs[i - len(paths)]] = 1 << i
    found: list[list[str]] = [[] for _ in paths]
    for node in nodes:
        origin, matters = _any(made_of, node.reads), _any(ends, node.writes) & live
        made_of.update(dict.fromkeys(node.writes, origin))
        about = matters & updates or origin
        if node.text and matters and about & origin and about.bit_count() == 1:
            found[about.bit_length() - 1].append(node.text)
    return dict(zip(paths, map(tuple, found), strict=True))


def init_as_updated(optimizer: Any, accumulate: Any) -> Callable[[PyTree], PyTree]:
    """`optimizer.init`, with the dtypes that an update leaves: moments of bfloat16 parameters have
    those of the gradients, for instance.

    `accumulate` is the least dtype of gradients; None: they have the parameters' own.
    """

    def gradient(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if accumulate is None else wider(leaf.dtype, accumulate)
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


def inputs_of(closed: core.ClosedJaxpr) -> list[int]:
    """For each result of a function, the inputs on which it depends: a bit each."""
    numbers, nodes = count(), list[_Node]()
    made_of = {next(numbers): 1 << i for i in range(len(closed.jaxpr.invars))}
    outs = _graph(closed, list(made_of), nodes, numbers)
    for node in nodes:
        made_of.update(dict.fromkeys(node.writes, _any(made_of, node.reads)))
    return [made_of.get(out, 0) for out in outs]


def _any(bits: Mapping[int, int], values: Sequence[int]) -> int:
    return reduce(or_, (bits.get(value, 0) for value in values), 0)


class _Node(NamedTuple):
    """An equation: what it does, the numbers of the values that it reads, and of those that it
    makes.
    """

    text: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def _graph(
    closed: core.ClosedJaxpr, inputs: Sequence[int], nodes: list[_Node], numbers: Iterator[int]
) -> list[int]:
    """Append the equations of a jaxpr, with those of both branches of a condition; return the
    numbers of its results.
    """
    flat = flatten(closed).jaxpr
    known: dict[Any, int] = defaultdict(numbers.__next__, zip(flat.invars, inputs, strict=True))

    def number(atom: Any) -> int:
        return next(numbers) if isinstance(atom, core.Literal) else known[atom]

    for eqn in flat.eqns:
        reads = tuple(number(atom) for atom in eqn.invars)
        writes = tuple(known[var] for var in eqn.outvars)
        if eqn.primitive.name != "cond":
            nodes.append(_Node(_text(eqn), reads, writes))
            continue
        branches = [_graph(branch, reads[1:], nodes, numbers) for branch in eqn.params["branches"]]
        nodes += [
            _Node("cond", (reads[0], *values), (out,))
            for out, *values in zip(writes, *branches, strict=True)
        ]
    return [number(atom) for atom in flat.outvars]


def _text(eqn: core.JaxprEqn) -> str:
    """The text of an equation, with shapes where it does not act on each number by itself; "" where
    it only repeats numbers.
    """
    if eqn.primitive.name == "broadcast_in_dim":
        return ""
    literals = [str(atom.val) for atom in eqn.invars if isinstance(atom, core.Literal)]
    shapes = [
        shape for atom in (*eqn.invars, *eqn.outvars) if (shape := getattr(atom.aval, "shape", ()))
    ]
    params = [(key, str(value)) for key, value in sorted(eqn.params.items()) if key not in _LAYOUT]
    by_number = len(set(shapes)) < 2 and not any("ax" in key or "dim" in key for key, _ in params)
    return f"{eqn.primitive.name} {literals} {params} {'' if by_number else shapes}"
