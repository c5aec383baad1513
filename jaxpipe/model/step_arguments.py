"""Faults of the arguments of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import PyTree, array_faults, axis_faults, by_index
from .param_layout import OUTER
from .placed import StageOwners, owner_faults


def param_faults(params: Any, owners: StageOwners, devices: int) -> list[str]:
    """Faults of parameters that must be placed there."""
    wanted = {"stages", *OUTER}
    if not isinstance(params, Mapping) or "stages" not in params or not set(params) <= wanted:
        faults = [f"parameters must be what `place` returned, a dict with keys of {sorted(wanted)}"]
    else:
        faults = owner_faults(params["stages"], owners, "parameters", "place") or axis_faults(
            params["stages"], "stages", devices, f"the {devices} devices (see `place`)"
        )
    return [*faults, *array_faults(params, "params")]


def batch_faults(batch: PyTree, count: int, *, data_shards: int) -> list[str]:
    """Faults of a batch whose rows are cut into `count` microbatches on each data shard."""
    leaves = by_index(batch, "batch")
    if not leaves:
        return ["the batch has no leaves; give a tree of arrays with a leading axis of rows"]
    faults = array_faults(batch, "batch")
    scalars = [name for name, leaf in leaves.items() if not np.shape(leaf)]
    if faults:
        return faults
    if len(scalars) > 3:
        return [
            f"{len(scalars)} leaves of the batch are plain numbers, {scalars[0]} the first "
            "of them: lists are trees to JAX; make "
            "arrays of them, jax.numpy.asarray([...]), with a leading axis of rows"
        ]
    lengths = {}
    for name, leaf in leaves.items():
        shape = np.shape(leaf)
        if not shape:
            faults.append(
                f"{name} is a scalar; every leaf needs a leading axis "
                "of rows "
                '(close over values that all rows share, or put them under "shared")'
            )
            continue
        rows = lengths[name] = shape[0]
        if rows == 0 or rows % (count * data_shards):
            shards = f" x {data_shards} data shards" if data_shards > 1 else ""
            near = max(1, round(rows / (count * data_shards))) * count * data_shards
            faults.append(
                f"{name} has {rows} rows, which do not divide into "
                f"{count} microbatches{shards}; use {near} rows"
            )
    if len(set(lengths.values())) > 1:
        faults.append(
            "leaves of the batch have different lengths: "
            + ", ".join(f"{k} has {n} rows" for k, n in lengths.items())
        )
    return faults


def key_faults(rng: Any) -> list[str]:
    """Faults of the step's key."""
    if rng is None:
        return []
    dtype, shape = getattr(rng, "dtype", None), np.shape(rng)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if (typed and shape == ()) or (dtype == np.uint32 and len(shape) == 1):
        return []
    if typed:
        return [f"rng holds {shape} keys, but a step takes one; give one of them"]
    what = f"rng={rng}" if isinstance(rng, int) else f"rng is {type(rng).__name__}, and"
    return [f"{what} is no key; write rng=jax.random.key({rng if isinstance(rng, int) else 0})"]


def state_faults(state: Any, owners: StageOwners, *, wanted: bool) -> list[str]:
    """Faults of the stages' own state; `wanted`: some stage takes it."""
    if bool(state) is not wanted:
        takes = "takes `state`, but the step got none; give state=pipe.place_state(...)"
        return [
            f"a stage {takes}" if wanted else "no stage takes `state` by keyword; leave state= out"
        ]
    return owner_faults(state, owners, "state", "place_state") if state else []
