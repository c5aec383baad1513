"""Carries and appended rows of sequences that pass from call to call: the cache of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import PyTree
from ..errors import PipelineError
from .functions import Functions, make_extra
from .param_layout import ParamLayout
from .placed import Chunks, StageOwners, owner_faults
from .slices import Positioned, has_time, time_faults
from .spread import Cuts

_WANTS = frozenset({"microbatch", "ctx"})


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


def cache_trees(
    functions: Functions,
    layout: ParamLayout,
    cuts: Cuts,
    axis: str,
    params: dict[str, PyTree],
    batch: PyTree,
    count: int,
) -> list[PyTree]:
    """Shapes for each stage, leaves [sequences, ...]; `count` microbatches are cut from the batch,
    and `functions` are those of a cache.
    """
    sequences, zero = count // functions.slices, jnp.int32(0)
    sizes = {key: cuts.sizes(key, params[key], parts=1) for key in cuts.dims}

    def shapes(params: dict[str, PyTree], batch: PyTree) -> list[PyTree]:
        rows, shared, found = functions.split(batch, count), params["shared"], []
        own = replace(functions.for_batch(rows), axis=axis, sizes=sizes)
        extra = make_extra(rows, None, zero, zero, _WANTS, own.slices)
        if own.spreads_first:
            shares = cuts.shares("first", params["first"]), cuts.shares("shared", shared)
            every = jax.vmap(
                lambda own_share, common: own.run_first((own_share, common), (), extra),
                axis_name=axis,
            )(*shares)
            x = jax.tree.map(lambda leaf: leaf[0], every)
        else:
            x = own.run_first((params["first"], shared), (), extra)
        for stage, function in enumerate(own.stages):
            both = layout.of_stage(stage, params["stages"]), shared
            extra = make_extra(rows, None, zero + stage, zero, function.wants_arrays, own.slices)
            x, returned = own.run_stage(stage, both, x, extra)
            found.append(returned.carried)
        return found

    return [
        jax.tree.map(lambda a: jax.ShapeDtypeStruct((sequences, *a.shape), a.dtype), tree)
        for tree in jax.eval_shape(shapes, params, batch)
    ]


def positioned(
    cache: Any,
    batch: PyTree,
    position: Any,
    *,
    sequences: int,
    slices: int,
    time: tuple[str, ...],
    owners: StageOwners,
    axes: Sequence[str],
) -> Positioned:
    """The batch of a call that goes on at a position of its cache.

    Raises:
        PipelineError: cache, batch and position do not fit; every fault is listed.
    """
    if faults := cache_faults(batch, slices, time, axes):
        raise PipelineError.listing("this call with a cache cannot be lowered", faults)
    if not isinstance(cache, Cache):
        faults = [
            f"cache= takes what `empty_cache` or `outputs` returned, not {type(cache).__name__}"
        ]
    else:
        faults = owner_faults(cache.stages, owners, "the cache", "empty_cache")
        if cache.sequences != sequences:
            faults += [
                f"the cache has {cache.sequences} sequences, but the schedule has {sequences}"
            ]
        faults += _position_faults(cache, position, positions(batch, time))
    if faults:
        raise PipelineError.listing("this call with a cache cannot be lowered", faults)
    at = jnp.broadcast_to(jnp.asarray(position, jnp.int32), (sequences,))
    return Positioned(batch, at, cache.length)


def cache_faults(
    batch: PyTree, slices: int, time: tuple[str, ...], axes: Sequence[str]
) -> list[str]:
    """Why a batch cannot go with a cache."""
    faults = time_faults(batch, slices, time, always=True)
    if axes:
        faults.append(
            f"a cache does not combine with the data axes {', '.join(axes)}; give each data shard "
            "a pipeline of its own"
        )
    return faults


def positions(batch: PyTree, time: tuple[str, ...]) -> int:
    """The positions of time of a batch."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return int(next(np.shape(leaf)[1] for path, leaf in leaves if has_time(path, time)))


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


def hide_beyond(outputs: PyTree, batch: Positioned, more: int) -> PyTree:
    """NaN in place of floating outputs where rows are beyond the buffers of the cache.

    A position that is traced is known when the program runs, which is too late for an error.
    """
    if not isinstance(batch.position, jax.core.Tracer):
        return outputs
    fits = jnp.all(batch.position + more <= batch.room) & jnp.all(batch.position >= 0)
    return jax.tree.map(
        lambda leaf: (
            jnp.where(fits, leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
        ),
        outputs,
    )
