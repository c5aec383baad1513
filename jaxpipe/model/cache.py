"""Carries and appended rows of sequences that pass from call to call: the cache of a generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import Params, PyTree
from ..errors import PipelineError
from ..table.schedule import Schedule
from .functions import Functions
from .mesh import on_mesh
from .param_layout import Chunks, with_outer
from .partition import Partition
from .plain import Plain
from .slices import Positioned, positions, time_faults


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
