"""Read the arguments of `Pipeline`, of its steps and of calls with a cache, refuse them with every
fault named, and cut the model into stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..arrays import Params, PyTree, array_faults, axis_faults
from ..engine.costs import Costs
from ..errors import PipelineError, ScheduleError, quoted
from ..layouts.balance import split_layers
from ..layouts.layout import LETTERS, Layout, LayoutError, parse_layout
from ..table.placement import Placement
from ..table.schedule import Schedule
from ..transforms.spread import spread_first, spread_last
from .calls import Cuts, Function
from .functions import Functions, Ledger, Positioned, positions, time_faults
from .layers import EMBEDDING, LOSS, LayerMap
from .model import Model, Plain
from .param_layout import OUTER, Chunks, ParamLayout, owner_faults, with_outer
from .partition import Partition
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
        "costs": (Costs | None, "take what jaxpipe.measure returns"),
    }
    faults = [
        f"{name} must be a {getattr(kind, '__name__', kind)}, not {quoted(given[name])}; {how}"
        for name, (kind, how) in wanted.items()
        if not isinstance(given[name], kind)
    ]
    PipelineError.refuse("", faults)


def staged(
    model: Model, schedule: Schedule, layout: str | Layout | None, remat: Any = None
) -> tuple[Functions, ParamLayout, Cuts]:
    """Cut a model into the stages of a schedule; PipelineError where they do not fit."""
    placement = schedule.placement
    if model.is_layered:
        layers = LayerMap.of(
            _layout(model, placement, layout), placement, ParamLayout(placement).owned
        )
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
    if bool(state) is wanted:
        return owner_faults(state, layout, "state", "place_state") if state else []
    if wanted:
        return ["a stage takes `state`, but the step got none; give state=pipe.place_state(...)"]
    return ["no stage takes `state` by keyword; leave state= out"]


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
            own, number = {**params, "stages": trees}, jnp.int32(0)
            plain = Plain(functions.for_batch(rows), cuts, own, rows, None, stacked=False)
            nothing = [()] * count
            _, _, after = plain.stages(plain.first(number), number, (nothing, nothing))
            return list(after[1])

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
    shape = np.shape(position)
    if shape not in ((), (cache.sequences,)):
        return [f"position has shape {list(shape)}; give a number, or {cache.sequences} of them"]
    if not jnp.issubdtype(jnp.result_type(position), jnp.integer):
        return [f"position is {jnp.result_type(position)}; give whole numbers"]
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
