"""Read the arguments of `Pipeline`, of its steps and of calls with a cache, refuse them with every
fault named, and cut the model into stages; what an optimizer does with placed arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import LossScale, Params, PyTree, Rng, without_numpy
from ..engine.costs import Costs
from ..errors import PipelineError, quoted
from ..layouts.layout import LETTERS, Layout, LayoutError, parse_layout, split_layers
from ..table.placement import Placement
from ..table.schedule import Schedule
from .batch import Positioned
from .calls import Function, UserFunction
from .functions import Ledger
from .layers import EMBEDDING, LOSS, LayerMap
from .model import Model


class StepArguments(NamedTuple):
    """The arguments of a step: arrays, or their shapes."""

    params: Params  # placed
    batch: PyTree  # leaves [rows, ...]
    rng: Rng = None  # the step's key
    state: PyTree = ()  # the stages' own, placed; or those of a cache
    scale: LossScale = None  # a factor of the loss


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


def _checkpointed(call: UserFunction, policy: Callable[..., bool] | None) -> UserFunction:
    """The call under `jax.checkpoint`; rows that it appends leave it as results."""

    @functools.wraps(call)
    def run(*arguments: object, **keywords: Any) -> PyTree:
        ledger: Ledger | None = getattr(keywords.get("ctx"), "ledger", None)
        arguments = without_numpy(arguments)  # what is traced may be an index of them

        def traced() -> tuple[PyTree, dict[str, jax.Array], dict[str, jax.Array]]:
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
    model: Model, placement: Placement, layout: str | Layout | None, *, in_turn: bool = False
) -> tuple[tuple[Function, ...], LayerMap | None]:
    """The function of each stage, and the layers of each where the model is given by letters;
    PipelineError where they do not fit.  `in_turn`: see `LayerMap.of`.
    """
    if model.layers is not None:
        layers = LayerMap.of(_layout(model, placement, layout), placement, in_turn=in_turn)
        return layers.functions(model.stages, has_loss=model.stage_loss), layers
    if layout is not None:
        raise PipelineError(
            "layout= says which layers each stage has, but the model is not given by letters; "
            'write jaxpipe.Model({"t": layer, ...}, layers="..."), or leave layout= out'
        )
    return tuple(model.stage_functions(placement.num_stages)), None


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


def donated_faults(given: StepArguments) -> list[str]:
    """Arguments whose arrays are gone: XLA may end the process where they are read."""
    names = {"state": "cache"} if isinstance(given.batch, Positioned) else {}
    return [
        f"{count} arrays of {names.get(name, name)} are deleted: a call that donates them "
        "(donate_argnums=) was given them before; go on with what that call returned, or do not "
        "donate them"
        for name, tree in given._asdict().items()
        if (count := sum(map(_is_deleted, jax.tree.leaves(tree))))
    ]


def _is_deleted(leaf: object) -> bool:
    is_traced = isinstance(leaf, jax.core.Tracer)
    return isinstance(leaf, jax.Array) and not is_traced and leaf.is_deleted()
