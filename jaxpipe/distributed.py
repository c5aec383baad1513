"""Pipelines that run in several processes: the order of the mesh, the rows that a process feeds, and a limit for every step."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .arrays import PyTree
from .errors import PipelineError
from .fingerprint import check_same, fingerprint
from .pipeline import Pipeline

__all__ = ["Watchdog", "check_same", "crossings", "fingerprint", "global_batch", "local_rows", "make_mesh"]

FAILED, TIMED_OUT = 1, 75  # exit statuses; 75 is EX_TEMPFAIL of sysexits.h: starting again may help


def make_mesh(axes: Mapping[str, int], *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh whose first axis goes over the slowest network and whose last one stays closest together.

    Devices are taken node by node, and within a node process by process, so `{"pipe": 4, "data": 2, "tensor": 8}` on nodes of 8
    devices keeps "tensor" inside a node.  A pipeline sends one activation a microbatch between neighbours, the least of all
    kinds of parallelism, so "pipe" comes first (Narayanan et al. 2021, section 5.4.1).

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
            f"a mesh of {dict(axes)} has {product} = {np.prod(sizes, dtype=int)} devices, but there are {len(found)} "
            f"in {len({d.process_index for d in found})} processes; let the sizes' product be {len(found)}"
        )
    ordered = np.empty(len(found), dtype=object)
    ordered[:] = sorted(found, key=lambda d: (_node(d), d.process_index, d.id))
    return Mesh(ordered.reshape(sizes), tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def crossings(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Per axis of a mesh, how many pairs of neighbours along it lie in different processes, and how many pairs there are.

    What to look at where steps are slow: an axis of tensor parallelism should cross nothing but, with one process a GPU, the
    processes of a node.

    Example:
        >>> crossings(make_mesh({"pipe": 1}, devices=jax.devices()[:1]))
        {'pipe': (0, 0)}
    """
    processes = np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices)
    changes = {name: np.diff(processes, axis=k) for k, name in enumerate(mesh.axis_names)}
    return {name: (int(np.count_nonzero(change)), int(change.size)) for name, change in changes.items()}


def local_rows(pipe: Pipeline, rows: int) -> Any:
    """The numbers of the batch's rows that this process has to feed, as a sorted int array.

    Each shard along `data_axes` takes its share of the rows, in order; every process with a device in that shard feeds them, and
    none feeds others.  Processes that are stages of the same pipeline replica feed the same rows.

    Raises:
        PipelineError: `rows` does not divide over the data shards.
    """
    shards = int(np.prod([pipe.mesh.shape[name] for name in pipe.data_axes], dtype=int))
    if rows < 1 or rows % shards:
        raise PipelineError(f"{rows} rows do not divide over {shards} data shards; use {max(1, round(rows / shards)) * shards} rows")
    index = _rows_sharding(pipe).addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[part] for part in index]))


def global_batch(pipe: Pipeline, local: PyTree, *, rows: int) -> PyTree:
    """A batch of `rows` rows from this process's own: leaves [len(local_rows(pipe, rows)), ...] -> global arrays [rows, ...].

    Raises:
        PipelineError: leaves with another number of rows; every fault is listed.

    Example:
        mine = local_rows(pipe, 256)
        batch = global_batch(pipe, {"tokens": tokens_of(mine)}, rows=256)
        loss, grads = pipe.value_and_grad(params, batch)
    """
    count = len(local_rows(pipe, rows))
    faults = [
        f"batch{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}; this process feeds {count} of the {rows} rows (`local_rows`)"
        for path, leaf in jax.tree_util.tree_leaves_with_path(local)
        if np.shape(leaf)[:1] != (count,)
    ]
    if faults:
        raise PipelineError.listing("the rows of this process do not fit", faults)
    to = _rows_sharding(pipe)

    def join(leaf: Any) -> Any:
        return jax.make_array_from_process_local_data(to, np.asarray(leaf), (rows, *np.shape(leaf)[1:]))

    return jax.tree.map(join, local)


class Watchdog:
    """Ends this process, and says why, where a step of a job of several processes fails or takes longer than its limit.

    A collective waits for ever for a process that is stuck, and JAX notices only processes that are gone (its heartbeats).  Under
    `with watchdog.step(n):` an overdue step prints which step on which process it was and where every thread stands, and ends the
    process with status 75; an error prints its traceback and ends it with status 1 at once, without waiting for the others at JAX's
    shutdown barrier.  Either is seen by the others, through JAX, as a process that died.  In a job of one process errors are raised
    as usual.  Wait for the step's result inside (`float(loss)`): a call that JAX has only dispatched returns at once.

    Args:
        seconds: limit of a step.
        first: limit of the first step, which compiles; `seconds` by default.

    Example:
        >>> watchdog = Watchdog(seconds=60, first=600)
        >>> with watchdog.step(0):
        ...     loss = float(jax.numpy.ones(3).sum())
    """

    def __init__(self, *, seconds: float, first: float | None = None) -> None:
        faults = [f"{name}={value!r}" for name, value in (("seconds", seconds), ("first", first)) if value is not None and not value > 0]
        if faults:
            raise PipelineError(f"a step's limit must be more than 0 seconds; got {', '.join(faults)}", tuple(faults))
        self.seconds = seconds
        self._next = seconds if first is None else first

    @contextmanager
    def step(self, what: int | str, *, seconds: float | None = None) -> Iterator[None]:
        """Watch one step, or something else that takes its time ("checkpoint 40"), which may have a limit of its own."""
        name = f"step {what}" if isinstance(what, int) else what
        limit = self._next if seconds is None else seconds
        timer = threading.Timer(limit, self._overdue, (name, limit))
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception:
            if jax.process_count() == 1:
                raise
            traceback.print_exc()
            _end(
                f"{name} failed, see the error above (of a connection or a collective: another process died in this step, and its log says "
                "why; start the job again, and it goes on from the newest checkpoint)",
                FAILED,
            )
        finally:
            timer.cancel()
        if seconds is None:
            self._next = self.seconds

    @staticmethod
    def _overdue(name: str, limit: float) -> None:
        faulthandler.dump_traceback(all_threads=True)
        _end(
            f"{name} has not ended within its limit of {limit:g} s (the threads are above). Either another process is stuck or gone, "
            "or the limit is too small. Start the job again, and it goes on from the newest checkpoint",
            TIMED_OUT,
        )


def _end(why: str, status: int) -> None:
    """Say why and leave at once: Python's own exit would wait for the other processes."""
    where = f"process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}"
    print(f"\njaxpipe: {where}: {why}. This process ends with status {status}.", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)


def _rows_sharding(pipe: Pipeline) -> NamedSharding:
    return NamedSharding(pipe.mesh, PartitionSpec(pipe.data_axes or None))


def _node(device: jax.Device) -> int:
    """The node of a device: JAX numbers those that share one (GPUs and CPUs), or else the process."""
    node = getattr(device, "partition_index", None)
    return device.process_index if node is None else int(node)
