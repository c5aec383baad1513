"""Pipelines that run in several processes: the order of the mesh, the rows that a process feeds,
and a limit for every step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .arrays import PyTree, by_index
from .errors import PipelineError
from .fingerprint import check_same, fingerprint
from .pipeline import Pipeline
from .watchdog import Watchdog

__all__ = [
    "Watchdog",
    "check_same",
    "crossings",
    "fingerprint",
    "global_batch",
    "local_rows",
    "make_mesh",
]


def make_mesh(axes: Mapping[str, int], *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh whose first axis goes over the slowest network and whose last one stays closest
    together.

    Devices are taken node by node, and within a node process by process, so `{"pipe": 4, "data": 2,
    "tensor": 8}` on nodes of 8 devices keeps "tensor" inside a node.  A pipeline sends one
    activation a microbatch between neighbours, the least of all kinds of parallelism, so "pipe"
    comes first (Narayanan et al. 2021, section 5.4.1).

    TPUs are taken slice by slice.  In a slice, each index of the first axis has a box of the torus,
    and the next index has a box beside it.  `jax.make_mesh` orders many meshes otherwise.

    Args:
        axes: axis names and sizes, slowest first; their product is the number of devices.
        devices: all devices of all processes by default.

    Raises:
        PipelineError: sizes that are not positive, or whose product is not the number of devices.

    Example:
        >>> dict(make_mesh({"pipe": 1}, devices=jax.devices()[:1]).shape)
        {'pipe': 1}
    """
    found = list(jax.devices() if devices is None else devices)
    sizes = tuple(axes.values())
    if any(size < 1 for size in sizes) or np.prod(sizes, dtype=int) != len(found):
        product = " x ".join(map(str, sizes)) or "no axes"
        raise PipelineError(
            f"a mesh of {dict(axes)} has {product} = {np.prod(sizes, dtype=int)} devices, but "
            f"there are {len(found)} "
            f"in {len({d.process_index for d in found})} processes; let the sizes' product be "
            f"{len(found)}"
        )
    ordered = np.empty(len(found), dtype=object)
    ordered[:] = _along_torus(
        sorted(found, key=lambda d: (_node(d), d.process_index, d.id)), math.prod(sizes[1:])
    )
    return Mesh(ordered.reshape(sizes), tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def crossings(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Per axis of a mesh, how many pairs of neighbours along it are in different processes, and how
    many pairs there are.

    What to look at where steps are slow: an axis of tensor parallelism should cross nothing but,
    with one process a GPU, the processes of a node.

    Example:
        >>> crossings(make_mesh({"pipe": 1}, devices=jax.devices()[:1]))
        {'pipe': (0, 0)}
    """
    processes = np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices)
    pairs = {}
    for k, name in enumerate(mesh.axis_names):
        change = np.diff(processes, axis=k)
        pairs[name] = int(np.count_nonzero(change)), int(change.size)
    return pairs


def local_rows(pipe: Pipeline, rows: int) -> Any:
    """The numbers of the batch's rows that this process has to feed, as a sorted int array.

    Each shard along `data_axes` takes its share of the rows, in order; every process with a device
    in that shard feeds them, and none feeds others.  Processes that are stages of the same pipeline
    replica feed the same rows.

    Raises:
        PipelineError: `rows` does not divide over the data shards.
    """
    shards = int(np.prod([pipe.mesh.shape[name] for name in pipe.data_axes], dtype=int))
    if rows < 1 or rows % shards:
        raise PipelineError(
            f"{rows} rows do not divide over {shards} data shards; use "
            f"{max(1, round(rows / shards)) * shards} rows"
        )
    index = _rows_sharding(pipe).addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[part] for part in index]))


def global_batch(pipe: Pipeline, local: PyTree, *, rows: int) -> PyTree:
    """A batch of `rows` rows from this process's own: leaves [len(local_rows(pipe, rows)), ...] ->
    global arrays [rows, ...].

    Raises:
        PipelineError: leaves with another number of rows; every fault is listed.

    Example:
        mine = local_rows(pipe, 256)
        batch = global_batch(pipe, {"tokens": tokens_of(mine)}, rows=256)
        loss, grads = pipe.value_and_grad(params, batch)
    """
    count = len(local_rows(pipe, rows))
    faults = [
        f"{name} has shape {np.shape(leaf)}; this process feeds {count} of the {rows} rows "
        "(`local_rows`)"
        for name, leaf in by_index(local, "batch").items()
        if np.shape(leaf)[:1] != (count,)
    ]
    PipelineError.refuse("the rows of this process do not fit", faults)
    to = _rows_sharding(pipe)

    def join(leaf: Any) -> Any:
        return jax.make_array_from_process_local_data(
            to, np.asarray(leaf), (rows, *np.shape(leaf)[1:])
        )

    return jax.tree.map(join, local)


def _rows_sharding(pipe: Pipeline) -> NamedSharding:
    return NamedSharding(pipe.mesh, PartitionSpec(pipe.data_axes or None))


def _node(device: jax.Device) -> int:
    """The node of a device: JAX numbers those that share one (GPUs and CPUs), or else
    the process.
    """
    node = getattr(device, "partition_index", None)
    return device.process_index if node is None else int(node)


def _along_torus(devices: list[jax.Device], inner: int) -> list[jax.Device]:
    """TPUs in an order of which each `inner` are a box of the torus beside the previous box; other
    devices as they are.
    """
    slices: dict[int, dict[tuple[int, ...], jax.Device]] = {}
    for device in devices:
        coords = getattr(device, "coords", None) if device.platform == "tpu" else None
        if coords is None:
            return devices
        slices.setdefault(getattr(device, "slice_index", None) or 0, {})[tuple(coords)] = device
    ordered = []
    for _, at in sorted(slices.items()):
        sizes = [max(places) + 1 for places in zip(*at, strict=True)]
        box, rest = [], inner
        for size in sizes:
            box.append(math.gcd(rest, size))
            rest //= box[-1]
        if rest > 1:
            box = [1] * len(sizes)
        # Along dims where a box has one device, the next box is one hop away.
        dims = sorted(range(len(sizes)), key=lambda dim: box[dim] > 1)
        for outer in _snake([sizes[dim] // box[dim] for dim in dims]):
            corner = {dim: place * box[dim] for dim, place in zip(dims, outer, strict=True)}
            for place in _snake(box):
                coords = tuple(corner[dim] + place[dim] for dim in range(len(sizes)))
                if coords not in at:
                    return devices
                ordered.append(at[coords])
    return ordered if len(ordered) == len(devices) else devices


def _snake(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """All places of a grid, each beside the one before; the first dim changes most often."""
    path: list[tuple[int, ...]] = [()]
    for size in sizes:
        path = [(*p, i) for i in range(size) for p in (path[::-1] if i % 2 else path)]
    return path
