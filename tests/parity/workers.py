"""Runs cases in processes of their own, so that a case that hangs or crashes is one failure and not
the end.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# A process that has compiled this many programs is replaced: its caches only grow.
CASES_A_PROCESS = 100


@dataclass(frozen=True)
class Done(Generic[T]):
    """A case with what it gave, or with the text of what went wrong."""

    case: T
    result: Any
    fault: str
    seconds: float


class _Worker(Generic[T]):
    def __init__(self, run: Callable[[T], Any]) -> None:
        # spawn: a forked copy of a process that has used JAX may hang.
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, run), daemon=True)
        self._process.start()
        other.close()
        self.count = 0
        self.case: T | None = None
        self.since = 0.0

    def give(self, case: T) -> None:
        with suppress(OSError):  # of a process that has died meanwhile, as `_collect` will see
            self.pipe.send(case)
        self.case, self.since, self.count = case, time.monotonic(), self.count + 1

    def exit_code(self) -> int | None:
        """Of a process that has closed its pipe and ends: minus the signal where one ended it."""
        self._process.join(timeout=10)
        return self._process.exitcode

    def stop(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join()


def run_all(
    run: Callable[[T], Any], cases: Sequence[T], *, workers: int, seconds: float
) -> Iterator[Done[T]]:
    """Run every case, each at most so many seconds; yields them as they end."""
    waiting = list(reversed(cases))
    crew = [_Worker(run) for _ in range(min(workers, len(cases)))]
    try:
        while waiting or any(w.case is not None for w in crew):
            for k, worker in enumerate(crew):
                if worker.case is None and waiting:
                    if worker.count >= CASES_A_PROCESS:
                        worker.stop()
                        crew[k] = worker = _Worker(run)
                    worker.give(waiting.pop())
            ready = wait([w.pipe for w in crew if w.case is not None], timeout=1.0)
            for k, worker in enumerate(crew):
                done = _collect(worker, worker.pipe in ready, seconds)
                if done is None:
                    continue
                yield done
                worker.case = None
                if done.result is None:
                    worker.stop()
                    crew[k] = _Worker(run)
    finally:
        for worker in crew:
            worker.stop()


def _collect(worker: _Worker[T], ready: bool, seconds: float) -> Done[T] | None:
    """What the worker has to say, if anything."""
    if worker.case is None:
        return None
    spent = time.monotonic() - worker.since
    if ready:
        try:
            result, fault = worker.pipe.recv()
        except (EOFError, OSError) as error:  # OSError where it died before it read the case
            result, fault = (
                None,
                f"the process died ({type(error).__name__}, exit code {worker.exit_code()})",
            )
        return Done(worker.case, result, fault, spent)
    return (
        Done(worker.case, None, f"stuck: no answer in {seconds:.0f} s", spent)
        if spent > seconds
        else None
    )


def _serve(pipe: Connection, run: Callable[[T], Any]) -> None:
    """The loop of a worker's process."""
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((run(case), ""))
        except Exception:
            pipe.send((None, traceback.format_exc(limit=-3)))
