"""Messages of a job's processes through JAX's coordination service.  They need no collective, so
none waits for ever.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

# JAX has no public name for the client; orbax takes it from here too
from jax._src import distributed

from .errors import PipelineError

_WAIT = 600.0  # seconds between two processes at a comparison: one may prepare data first
_ANSWER = 2.0  # seconds that a process has to answer; it does so from a thread of its own
_POLL = 0.05
_LEAVE = 10.0  # seconds that a process waits until the others have read why they are refused


def client() -> Any:
    """The client of JAX's coordination service; None where `jax.distributed` was
    not initialized.
    """
    return distributed.global_state.client


def service_address() -> str:
    """Where process 0 answers, "host:port"."""
    return str(distributed.global_state.coordinator_address)


def compare(found: Mapping[str, str], processes: Sequence[int], *, wait: float = _WAIT) -> None:
    """Compare texts by name over processes, all of which call it equally often.

    Raises:
        PipelineError: in every process, with each difference and the processes on its two sides; or
            naming those that did not come.
    """
    service, me, lead = client(), jax.process_index(), min(processes)
    if service is None:
        return
    group = "jaxpipe/compare/" + "-".join(
        map(str, (min(processes), max(processes), len(processes)))
    )
    # The service counts the comparisons of each process, so that the n-th of one is compared with
    # the n-th of the others.
    place = f"{group}/{service.key_value_increment(f'{group}/count/{me}', 1)}"
    service.key_value_set(f"{place}/of/{me}", json.dumps(dict(found)))
    if me == lead:
        service.key_value_set(
            f"{place}/verdict", json.dumps(_judged(service, place, processes, wait))
        )
    try:
        verdict = json.loads(
            service.blocking_key_value_get(f"{place}/verdict", int(1000 * (wait + _LEAVE)))
        )
    except jax.errors.JaxRuntimeError as error:
        raise PipelineError(f"{_missing([lead], wait)} ({error})") from error
    if not verdict:
        return
    with suppress(jax.errors.JaxRuntimeError):  # of a process that never came, or is gone by now
        # Process 0 holds the service: it may leave when all have read.
        service.wait_at_barrier(f"{place}/read", int(1000 * _LEAVE), list(processes))
    raise PipelineError.listing("the processes of this job were not started alike", verdict)


def _judged(service: Any, place: str, processes: Sequence[int], wait: float) -> list[str]:
    """The differences, once all have come."""
    end, pause, found = time.monotonic() + wait, _POLL, dict[int, str]()
    while True:
        found = {
            int(key.rsplit("/", 1)[1]): text
            for key, text in service.key_value_dir_get(f"{place}/of/")
        }
        late = [process for process in processes if process not in found]
        if not late:
            return differences({process: json.loads(found[process]) for process in processes})
        if time.monotonic() > end:
            return [_missing(late, wait)]
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def differences(found: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A sentence for each thing in which processes differ from the first, from what each has.

    >>> differences({0: {"schedule": "1f1b"}, 1: {"schedule": "gpipe"}, 2: {"schedule": "gpipe"}})
    ['schedule: process 0 has 1f1b, but processes 1, 2 have gpipe']
    """
    faults = []
    for name in dict.fromkeys(name for each in found.values() for name in each):
        groups: dict[str, list[int]] = {}
        for process, each in found.items():
            groups.setdefault(each.get(name, "nothing"), []).append(process)
        (first, own), *others = groups.items()
        sides = [f"{_named(members, 'has', 'have')} {text}" for text, members in others]
        if sides:
            faults.append(
                f"{name}: {_named(own, 'has', 'have')} {first}, but {' and '.join(sides)}"
            )
    return faults


def _missing(late: Sequence[int], wait: float) -> str:
    return (
        f"{_named(late, 'has', 'have')} not come to compare with the others within {wait:g} s; "
        "every process has to run the same "
        "steps of the same pipelines in the same order (see its log)"
    )


def _named(members: Sequence[int], one: str, several: str) -> str:
    shown = ", ".join(map(str, members[:4])) + (
        f" and {len(members) - 4} more" if len(members) > 4 else ""
    )
    return f"process {shown} {one}" if len(members) == 1 else f"processes {shown} {several}"


class RollCall:
    """Answers from a thread, also while a collective waits, where this process is; and asks where
    the others are.

    The thread waits in one call to the service, which answers when somebody asks: a job that runs
    well sends nothing.

    Args:
        where: what this process is doing, "step 7".
        alone: called where the service is gone, that is process 0, which holds it.
    """

    _ASK, _HERE = "jaxpipe/roll/ask", "jaxpipe/roll/here"
    _LEAVE = "leave"  # what a process asks itself at its end

    def __init__(self, where: Callable[[], str], alone: Callable[[], None]) -> None:
        self._where, self._alone = where, alone
        self._thread = threading.Thread(target=self._answer, name="jaxpipe roll call", daemon=True)
        self._thread.start()
        atexit.register(self._close)

    def _answer(self) -> None:
        service, me = client(), jax.process_index()
        while client() is service:
            try:
                if service.blocking_key_value_get(f"{self._ASK}/{me}", 3_600_000) != self._LEAVE:
                    service.key_value_set(f"{self._HERE}/{me}", self._where(), allow_overwrite=True)
                return
            except jax.errors.JaxRuntimeError as error:
                if client() is service and "DEADLINE_EXCEEDED" not in str(error):
                    self._alone()
                    return

    def _close(self) -> None:
        """Python ends badly while a thread waits outside of it."""
        with suppress(jax.errors.JaxRuntimeError):
            if client() is not None:
                client().key_value_set(
                    f"{self._ASK}/{jax.process_index()}", self._LEAVE, allow_overwrite=True
                )
        self._thread.join(_ANSWER)

    def ask(self) -> dict[int, str]:
        """Where each process is that answers within two seconds.

        Raises:
            JaxRuntimeError: the service is gone.
        """
        service, end, found = client(), time.monotonic() + _ANSWER, dict[int, str]()
        for process in range(jax.process_count()):
            service.key_value_set(f"{self._ASK}/{process}", "where", allow_overwrite=True)
        while len(found) < jax.process_count() and time.monotonic() < end:
            time.sleep(_POLL)
            found = {
                int(key.rsplit("/", 1)[1]): text
                for key, text in service.key_value_dir_get(f"{self._HERE}/")
            }
        return found


def roll_text(found: Mapping[int, str], me: int, count: int) -> str:
    """Which of the other processes do not answer, and where those are that do.

    >>> roll_text({0: "step 7", 2: "step 6"}, 0, 4)
    'processes 1, 3 are gone or stopped (no answer in 2 s); process 2 is in step 6'
    """
    silent = [process for process in range(count) if process not in found and process != me]
    parts = (
        [f"{_named(silent, 'is', 'are')} gone or stopped (no answer in {_ANSWER:g} s)"]
        if silent
        else []
    )
    groups: dict[str, list[int]] = {}
    for process, where in found.items():
        if process != me:
            groups.setdefault(where, []).append(process)
    return "; ".join(
        [
            *parts,
            *(f"{_named(members, 'is', 'are')} in {where}" for where, members in groups.items()),
        ]
    )


@dataclass(frozen=True)
class Causes:
    """What is said of the end of a process, where process 0, which holds the service, still
    answers, and where it does not.
    """

    answers: str
    silent: str

    @classmethod
    def of(cls, me: int, count: int) -> Causes:
        """Those of a process of so many.

        >>> Causes.of(1, 2).answers
        'It was killed (out of memory, perhaps): process 0, the only other one, still answers'
        """
        killed = "It was killed (out of memory, perhaps)"
        other = f"process {1 - me}" if count == 2 else "another process"
        unknown = (
            f"{killed}, or ended by JAX because {other} is gone: see the lines above, and "
            "the logs of the others"
        )
        if me == 0:
            return cls(unknown, unknown)
        here = (
            f"{killed}: process 0, the only other one, still answers"
            if count == 2
            else f"{unknown}. Process 0 still answers"
        )
        return cls(
            here,
            "Process 0, which coordinates the job, does not answer: it is gone, and JAX ends the "
            "others. Its log says why",
        )


class ExitMessage:
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

    def __init__(self, causes: Causes, address: str) -> None:
        command = [
            sys.executable,
            "-S",
            "-E",
            "-c",
            self._READER,
            causes.answers,
            causes.silent,
            address,
            str(_ANSWER),
        ]
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
        """Nothing needs to be said."""
        self.say("")
        if self._reader.stdin is not None:
            self._reader.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._reader.wait(_ANSWER)
