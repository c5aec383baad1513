"""Pipelines that run in several processes: the order of the mesh, the rows that a process feeds,
and a limit for every step.
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike, NDArray

from .arrays import PyTree, axis_faults
from .errors import JaxpipeError, PipelineError
from .fingerprint import by_text, check_same, client, fingerprint, named, texts_of
from .model.batch import map_rows
from .pipeline import Pipeline

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
# Seconds that a process has to answer; it does so from a thread of its own.
_ANSWER = 2.0
_POLL = 0.05
_ASK, _HERE = "jaxpipe/roll/ask", "jaxpipe/roll/here"
_LEAVE = "leave"  # what a process asks itself at its end
_LAST = 3.0  # seconds that process 0, which holds what the others ask, stays after it has failed
_NO_SERVICE = "Process 0, which coordinates the job, is gone: its log says why"
# Exit statuses; 75 is EX_TEMPFAIL of sysexits.h: starting again may help.
FAILED, TIMED_OUT = 1, 75


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
    found, sizes = list(jax.devices() if devices is None else devices), tuple(axes.values())
    if any(size < 1 for size in sizes) or math.prod(sizes) != len(found):
        product = " x ".join(map(str, sizes)) or "no axes"
        raise PipelineError(
            f"a mesh of {dict(axes)} has {product} = {math.prod(sizes)} devices, but there are "
            f"{len(found)}; let the sizes' product be {len(found)}"
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


def local_rows(pipe: Pipeline, rows: int) -> NDArray[np.int64]:
    """The numbers of the batch's rows that this process has to feed, as a sorted int array.

    Each shard along `data_axes` takes its share of the rows, in order; every process with a device
    in that shard feeds them, and none feeds others.  Processes that are stages of the same pipeline
    replica feed the same rows.

    Raises:
        PipelineError: `rows` does not divide over the data shards.
    """
    shards = pipe.partition.data_size
    if rows < 1 or rows % shards:
        raise PipelineError(
            f"{rows} rows do not divide over {shards} data shards; use "
            f"{max(1, round(rows / shards)) * shards} rows"
        )
    index = _rows_sharding(pipe).addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[part] for part in index]))


def global_batch(pipe: Pipeline, local: PyTree, *, rows: int) -> PyTree:
    """A batch of `rows` rows from this process's own: leaves [len(local_rows(pipe, rows)), ...] ->
    global arrays [rows, ...].  Leaves that `Model(whole=)` names stay as they are: every process
    gives the same.

    Raises:
        PipelineError: leaves with another number of rows; every fault is listed.

    Example:
        mine = local_rows(pipe, 256)
        batch = global_batch(pipe, {"tokens": tokens_of(mine)}, rows=256)
        loss, grads = pipe.value_and_grad(params, batch)
    """
    count, whole = len(local_rows(pipe, rows)), pipe.model.whole
    with_rows = map_rows(lambda leaf: leaf, local, whole, lambda _: None)
    length = f"{count}: this process feeds {count} of the {rows} rows (`local_rows`)"
    faults = axis_faults(with_rows, "batch", count, length)
    PipelineError.refuse("the rows of this process do not fit", faults)
    to = _rows_sharding(pipe)

    def join(leaf: ArrayLike) -> Any:
        return jax.make_array_from_process_local_data(
            to, np.asarray(leaf), (rows, *np.shape(leaf)[1:])
        )

    return map_rows(join, local, whole)


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
        grid = np.full(sizes, None)
        for place, device in at.items():
            grid[place] = device
        # Along dims where a box has one device, the next box is one hop away.
        dims = sorted(range(len(sizes)), key=lambda dim: box[dim] > 1)
        counts = [size // own for size, own in zip(sizes, box, strict=True)]
        cut = grid.reshape(np.column_stack([counts, box]).ravel())
        boxes = cut.transpose([2 * dim for dim in dims] + [2 * dim + 1 for dim in sorted(dims)])
        for outer in _snake(boxes.shape[: len(sizes)]):
            ordered += [boxes[outer + place] for place in _snake(box)]
    return ordered if set(ordered) == set(devices) else devices


def _snake(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """All places of a grid, each beside the one before; the first dim changes most often."""
    path: list[tuple[int, ...]] = [()]
    for size in sizes:
        path = [(*p, i) for i in range(size) for p in (path[::-1] if i % 2 else path)]
    return path


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
        limits = {"seconds": seconds, "first": seconds if first is None else first}
        wrong = [f"{name}={limit!r}" for name, limit in limits.items() if not limit > 0]
        PipelineError.refuse("a step's limit must be more than 0 seconds", wrong)
        self.seconds = seconds
        self._next = limits["first"]
        self._where = "its beginning"
        self._last: _ExitMessage | None = None  # in a job of several processes

    @contextmanager
    def step(self, what: int | str, *, seconds: float | None = None) -> Iterator[None]:
        """Watch one step, or something else that takes its time ("checkpoint 40"), which may have a
        limit of its own.
        """
        name = f"step {what}" if isinstance(what, int) else what
        limit = self._next if seconds is None else seconds
        self._where = name
        if self._last is None and client() is not None and jax.process_count() > 1:
            self._join()
        self._say(f"in {name}")
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
            self._say(f"after {name}")
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
        if self._last is None:
            return "Another process may have died: see its log"
        try:
            texts = self._ask()
        except jax.errors.JaxRuntimeError:
            return _NO_SERVICE
        others = _roll_text(texts, jax.process_index(), jax.process_count())
        return f"Of the other processes: {others}"

    def _say(self, when: str) -> None:
        """What is printed where this process ends without a message of its own."""
        if self._last is not None:
            self._last.say(f"jaxpipe: {_here()}: died {when}. {{}}. {_AGAIN}")

    def _join(self) -> None:
        """Answer the other processes from a thread, also while a collective waits.

        The thread waits in one call to the service, which answers when somebody asks: a job that
        runs well sends nothing.
        """
        address = str(distributed.global_state.coordinator_address)
        self._last = _ExitMessage(jax.process_index(), jax.process_count(), address)
        thread = threading.Thread(target=self._answer, name="jaxpipe roll call", daemon=True)
        thread.start()

        def end() -> None:
            """Python ends badly while a thread waits outside of it."""
            with suppress(jax.errors.JaxRuntimeError):
                if (service := client()) is not None:
                    own = f"{_ASK}/{jax.process_index()}"
                    service.key_value_set(own, _LEAVE, allow_overwrite=True)
            thread.join(_ANSWER)

        atexit.register(end)

    def _answer(self) -> None:
        service, me = client(), jax.process_index()
        while client() is service:
            try:
                if service.blocking_key_value_get(f"{_ASK}/{me}", 3_600_000) != _LEAVE:
                    service.key_value_set(f"{_HERE}/{me}", self._where, allow_overwrite=True)
                return
            except jax.errors.JaxRuntimeError as error:
                if client() is service and "DEADLINE_EXCEEDED" not in str(error):
                    self._leave(f"{self._where} cannot end. {_NO_SERVICE}. {_AGAIN}", FAILED)
                    return

    def _ask(self) -> dict[int, str]:
        """Where each process is that answers within two seconds; JaxRuntimeError where the service
        is gone.
        """
        service, end, texts = client(), time.monotonic() + _ANSWER, dict[int, str]()
        for process in range(jax.process_count()):
            service.key_value_set(f"{_ASK}/{process}", "where", allow_overwrite=True)
        while len(texts) < jax.process_count() and time.monotonic() < end:
            time.sleep(_POLL)
            texts = texts_of(service, _HERE)
        return texts

    def _leave(self, why: str, status: int) -> None:
        """Say why and leave at once: Python's own exit would wait for the other processes."""
        if self._last is not None:
            self._last.close()
        text = f"\njaxpipe: {_here()}: {why}. This process ends with status {status}."
        print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()
        if client() is not None and jax.process_index() == 0 and jax.process_count() > 1:
            time.sleep(_LAST)  # the others ask process 0 who is gone
        os._exit(status)


def _here() -> str:
    return f"process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}"


def _roll_text(texts: Mapping[int, str], me: int, count: int) -> str:
    """Which of the other processes do not answer, and where those are that do.

    >>> _roll_text({0: "step 7", 2: "step 6"}, 0, 4)
    'processes 1, 3 are gone or stopped (no answer in 2 s); process 2 is in step 6'
    """
    others = {process: where for process, where in texts.items() if process != me}
    silent = [process for process in range(count) if process not in {*others, me}]
    gone = f"{named(silent, 'is', 'are')} gone or stopped (no answer in {_ANSWER:g} s)"
    elsewhere = [f"{named(they, 'is', 'are')} in {where}" for where, they in by_text(others)]
    return "; ".join([gone, *elsewhere] if silent else elsewhere)


def _causes(me: int, count: int) -> tuple[str, str]:
    """What ended process `me` of `count`, where process 0, which holds the service, still answers,
    and where it does not.

    >>> _causes(1, 2)[0]
    'It was killed (out of memory, perhaps): process 0, the only other one, still answers'
    """
    killed = "It was killed (out of memory, perhaps)"
    other = f"process {1 - me}" if count == 2 else "another process"
    unknown = (
        f"{killed}, or ended by JAX because {other} is gone: see the lines above, and the logs of "
        "the others"
    )
    if me == 0:
        return unknown, unknown
    silent = (
        "Process 0, which coordinates the job, does not answer: it is gone, and JAX ends the "
        "others. Its log says why"
    )
    if count == 2:
        return f"{killed}: process 0, the only other one, still answers", silent
    return f"{unknown}. Process 0 still answers", silent


class _ExitMessage:
    """Prints the last action of a process that dies without a message of its own: killed, or ended
    by JAX or the system.

    Another process reads lines from it through a pipe.  When the pipe ends, that process asks
    whether process 0 still answers.  It then prints the last line, with the cause for its "{}", to
    standard error.
    """

    _READER = """
import signal, socket, sys
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.SIG_IGN)
cause, silent, address, limit = sys.argv[1:]
line = ""
for line in sys.stdin:
    pass
if line.strip():
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), float(limit)).close()
    except OSError:
        cause = silent
    print(line.strip().replace("{}", cause), file=sys.stderr)
"""

    def __init__(self, me: int, count: int, address: str) -> None:
        python = [sys.executable, "-S", "-E", "-c", self._READER]
        command = [*python, *_causes(me, count), address, str(_ANSWER)]
        self._reader = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        atexit.register(self.close)

    def say(self, line: str) -> None:
        """What is printed where nothing else is said before the process ends."""
        pipe = self._reader.stdin
        if pipe is None or pipe.closed:
            return
        with suppress(OSError):  # the reader is gone
            pipe.write(line.replace("\n", " ") + "\n")
            pipe.flush()

    def close(self) -> None:
        """Send an empty line (there is nothing to say) and close the pipe."""
        self.say("")
        if self._reader.stdin is not None:
            self._reader.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._reader.wait(_ANSWER)
