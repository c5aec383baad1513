"""Times of compiled code: calls in turn, blocks alone, transfers between devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import Avals, Leaves, is_key


def timed(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds until each has its results, run in turn, so that other work of the machine
    delays all alike; the first round warms up.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, call in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def call_of(compiled: jax.stages.Compiled, changes: Sequence[int]) -> Callable[[], Any]:
    """Run a block that is compiled alone (`compile_blocks`) on arguments of its shapes.

    Each run changes the pools and accumulators of the run before it.
    """
    (shardings, _), (arguments, _) = compiled.input_shardings, compiled.args_info
    values = jax.tree.map(_value, arguments)
    flags, inputs, changed = jax.tree.map(jax.device_put, values, shardings)
    flags[0] = flags[0] | True  # it runs

    def call() -> None:
        nonlocal changed
        outputs = jax.block_until_ready(compiled(flags, inputs, changed))
        changed = [outputs[i] for i in changes]

    return call


def _value(aval: jax.ShapeDtypeStruct) -> jax.Array:
    """Ordinary numbers (zeros and denormals can be faster or slower than those of a model); zeros
    for other types.
    """
    if is_key(aval):
        return jnp.broadcast_to(jax.random.key(0, impl=str(aval.dtype._impl.name)), aval.shape)
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.zeros(aval.shape, aval.dtype)
    numbers = np.random.default_rng(0).standard_normal(aval.shape, np.float32) * 0.1
    return jnp.asarray(numbers, aval.dtype)


def exchange(
    mesh: Mesh,
    axis: str,
    pairs: Sequence[tuple[int, int]],
    avals: Avals,
    specs: Sequence[PartitionSpec] | None = None,
) -> Callable[[], object]:
    """A call that sends arrays of these shapes between pairs of devices of an axis.

    Without pairs it sends nothing.

    Args:
        mesh: the devices.
        axis: of the mesh.
        pairs: (source, target).
        avals: shapes and dtypes of what each device sends.
        specs: where the arrays [size of the axis, ...] are; cut over the axis where it is None.
    """
    specs = [PartitionSpec(axis)] * len(avals) if specs is None else list(specs)

    def body(values: Leaves) -> Leaves:
        return [lax.ppermute(value, axis, pairs) if pairs else value + 0 for value in values]

    mapped = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    )
    values = [
        jnp.zeros((mesh.shape[axis], *aval.shape), aval.dtype, device=NamedSharding(mesh, spec))
        for aval, spec in zip(avals, specs, strict=True)
    ]
    return partial(mapped, values)
