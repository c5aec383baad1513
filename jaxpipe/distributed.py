"""Pipelines that run in several processes: the order of the mesh, the rows that a process feeds,
and a limit for every step.
"""

from __future__ import annotations

import faulthandler
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .arrays import PyTree, by_index
from .errors import JaxpipeError, PipelineError
from .fingerprint import check_same, fingerprint
from .pipeline import Pipeline
from .processes import Causes, ExitMessage, RollCall, client, roll_text, service_address

__all__ = [
    "Watchdog",
    "check_same",
    "crossings",
    "fingerprint",
    "global_batch",
    "local_rows",
    "make_mesh",
]

_AGAIN = "Start the job again, and it goes on from the newest checkpoint"
_LAST = 3.0  # seconds that process 0, which holds what the others ask, stays after it has failed
_NO_SERVICE = "Process 0, which coordinates the job, is gone: its log says why"
FAILED, TIMED_OUT = 1, 75  # exit statuses; 75 is EX_TEMPFAIL of sysexits.h: starting again may help


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
    changes = {name: np.diff(processes, axis=k) for k, name in enumerate(mesh.axis_names)}
    return {
        name: (int(np.count_nonzero(change)), int(change.size)) for name, change in changes.items()
    }


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


class Watchdog:
    """Ends this process, and says why, where a step of a job of several processes fails or takes
    longer than its limit.

    A collective waits for ever for a process that is stuck, and JAX notices only processes that are
    gone (its heartbeats).  Under `with watchdog.step(n):` an overdue step prints which step on
    which process it was and the stack of every thread, and ends the process with status 75; an
    error prints its traceback and ends it with status 1 at once, without waiting for the others at
    JAX's shutdown barrier.  Either is seen by the others, through JAX, as a process that died.  In
    a job of one process errors are raised as usual.  Wait for the step's result inside
    (`float(loss)`): a call that JAX has only dispatched returns at once.

    Args:
        seconds: limit of a step.
        first: limit of the first step, which compiles; `seconds` by default.

    Example:
        >>> watchdog = Watchdog(seconds=60, first=600)
        >>> with watchdog.step(0):
        ...     loss = float(jax.numpy.ones(3).sum())
    """

    def __init__(self, *, seconds: float, first: float | None = None) -> None:
        faults = [
            f"{name}={value!r}"
            for name, value in (("seconds", seconds), ("first", first))
            if value is not None and not value > 0
        ]
        if faults:
            raise PipelineError(
                f"a step's limit must be more than 0 seconds; got {', '.join(faults)}",
                tuple(faults),
            )
        self.seconds = seconds
        self._next = seconds if first is None else first
        self._where = "its beginning"
        self._roll: RollCall | None = None
        self._last: ExitMessage | None = None

    @contextmanager
    def step(self, what: int | str, *, seconds: float | None = None) -> Iterator[None]:
        """Watch one step, or something else that takes its time ("checkpoint 40"), which may have a
        limit of its own.
        """
        name = f"step {what}" if isinstance(what, int) else what
        limit = self._next if seconds is None else seconds
        self._where = name
        if self._roll is None and client() is not None and jax.process_count() > 1:
            self._roll = RollCall(lambda: self._where, self._without_service)
            self._last = ExitMessage(
                Causes.of(jax.process_index(), jax.process_count()), service_address()
            )
        if self._last is not None:
            self._last.say(f"jaxpipe: {_here()}: died in {name}. {{}}. {_AGAIN}")
        timer = threading.Timer(limit, self._overdue, (name, limit))
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            if jax.process_count() == 1:
                raise
            traceback.print_exc()
            why = f"{name} failed, see the error above"
            if not isinstance(error, JaxpipeError):
                why += f". {self._called()}. {_AGAIN}"
            self._leave(why, FAILED)
        finally:
            timer.cancel()
            self._where = f"what comes after {name}"
            if self._last is not None:
                self._last.say(f"jaxpipe: {_here()}: died after {name}. {{}}. {_AGAIN}")
        if seconds is None:
            self._next = self.seconds

    def _overdue(self, name: str, limit: float) -> None:
        faulthandler.dump_traceback(all_threads=True)
        self._leave(
            f"{name} has not ended within its limit of {limit:g} s (the threads are above). "
            f"{self._called()}. Either another process is "
            f"stuck or gone, or the limit is too small. {_AGAIN}",
            TIMED_OUT,
        )

    def _called(self) -> str:
        """Which processes are gone, and where the others are."""
        if self._roll is None:
            return "Another process may have died: see its log"
        try:
            return (
                "Of the other processes: "
                f"{roll_text(self._roll.ask(), jax.process_index(), jax.process_count())}"
            )
        except jax.errors.JaxRuntimeError:
            return _NO_SERVICE

    def _without_service(self) -> None:
        self._leave(f"{self._where} cannot end. {_NO_SERVICE}. {_AGAIN}", FAILED)

    def _leave(self, why: str, status: int) -> None:
        if self._last is not None:
            self._last.close()
        _end(why, status)


def _end(why: str, status: int) -> None:
    """Say why and leave at once: Python's own exit would wait for the other processes."""
    print(
        f"\njaxpipe: {_here()}: {why}. This process ends with status {status}.",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    if client() is not None and jax.process_index() == 0 and jax.process_count() > 1:
        time.sleep(_LAST)  # the others ask process 0 who is gone
    os._exit(status)


def _here() -> str:
    return f"process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}"


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
