"""Run checks one after the other, each in a process with a limit of time.  A check returns lines
with a verdict, and prices.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

MARK, AT = "doctor-found: ", "doctor-at: "
_LAST = 300  # characters of a failure
_CHILD = "import sys; from jaxpipe.doctor.machine import main; main(sys.argv[1])"


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Settings of a run of the doctor, the same for every check.

    Args:
        devices: of the pipe axis; None takes all that there are.
        steps: of each program whose results are compared.
        repeats: of timed calls.
        coordinator, processes, process: as `jax.distributed.initialize` takes them, where this is
            one of several processes.
    """

    devices: int | None = None
    steps: int = 200
    repeats: int = 5
    coordinator: str | None = None
    processes: int = 1
    process: int = 0


class Verdict(StrEnum):
    """The verdict of a line."""

    OK = "ok"
    SLOW = "slow"
    WRONG = "wrong"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Line:
    """One item: the measured figure, the expected one, and advice."""

    item: str
    verdict: Verdict
    measured: str = ""
    expected: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Findings:
    """The lines of checks, and the prices that they measured, in seconds by name."""

    lines: tuple[Line, ...]
    prices: Mapping[str, float] = field(default_factory=dict)
    kind: str = ""  # of the devices
    is_one_gpu: bool = False  # the check needs several devices, and there is one GPU

    @property
    def is_good(self) -> bool:
        """Whether no line is wrong."""
        return all(line.verdict is not Verdict.WRONG for line in self.lines)


def judged(
    item: str,
    measured: str,
    expected: str,
    advice: str = "",
    *,
    slow: object = False,
    wrong: object = False,
) -> Line:
    """A line with the verdict; advice only where it is not good."""
    verdict = Verdict.WRONG if wrong else Verdict.SLOW if slow else Verdict.OK
    return Line(item, verdict, measured, expected, "" if verdict is Verdict.OK else advice)


def not_tried(item: str, why: str) -> Line:
    """A line about a check that was left out."""
    return Line(item, Verdict.NOT_TRIED, advice=why)


def one_device(item: str, *, on_gpus: bool) -> Findings:
    """Findings of a check that needs several devices."""
    lines = (not_tried(item, "there is one device; give --devices 2 or more"),)
    return Findings(lines, is_one_gpu=on_gpus)


def at(part: str) -> None:
    """Print the begin of a part, so that a hang can be located."""
    print(f"{AT}{part}", file=sys.stderr, flush=True)


_HANG = (
    "see the versions above; run again with NCCL_DEBUG=WARN, with one process for each GPU, and "
    "with fewer --devices to find the link"
)


@dataclass(frozen=True)
class Check:
    """A check: its title, its function as module:function, options of that function, its limit in
    seconds, advice for a hang, and what two processes try in its place where there is one GPU.
    """

    item: str
    function: str
    options: Mapping[str, object] = field(default_factory=dict)
    limit: float = 120.0
    advice: str = _HANG
    on_one_gpu: Check | None = None


_NUMBERS: Mapping[str, Mapping[str, object]] = {
    "one_f_one_b": {"name": "1f1b"},
    "chunks": {"name": "interleaved_1f1b", "chunks": 2},
    "split_backward": {"name": "zb_h1"},
    "vee": {"name": "zbv"},
    "spread_ends": {"name": "1f1b", "spread": True},
    "offload": {"name": "interleaved_1f1b", "chunks": 2, "offload": "residuals"},
}
_SHARED = ", two processes on one GPU"
_HOPS = Check(f"hops{_SHARED}", "machine:arrivals", {"note": _SHARED})
_STEP = Check(f"a step{_SHARED}", "steps:numbers", {"name": "1f1b", "note": _SHARED})
CHECKS = (
    Check("versions", "machine:versions", advice="the driver may be stuck: nvidia-smi"),
    Check("XLA options", "machine:options"),
    *(Check(f"numbers: {title}", "steps:numbers", case) for title, case in _NUMBERS.items()),
    Check("predicates", "machine:predicates"),
    Check("hops", "machine:hops", on_one_gpu=_HOPS),
    Check("host copies", "machine:host_copies", advice="look at pinned memory limits"),
    Check("memory", "steps:memory"),
    Check("speed of one device", "steps:speed"),
    Check("a step against its plan", "steps:plan", on_one_gpu=_STEP),
)


def run(
    scope: Scope,
    *,
    minutes: float = 3.0,
    checks: Sequence[Check] = CHECKS,
    tell: Callable[[int, int], None] | None = None,
) -> Findings:
    """Run the checks in order; a check without time left is not tried.

    Args:
        scope: the devices, and whether this is one of several processes.
        minutes: the most for all checks.
        checks: which.
        tell: called with (done, of how many).
    """
    end = time.monotonic() + 60 * minutes
    lines: list[Line] = []
    prices: dict[str, float] = {}
    kind = ""
    for number, check in enumerate(checks):
        left = end - time.monotonic()
        if left <= 0:
            lines.append(not_tried(check.item, "no time was left; give more --minutes"))
        else:
            findings = run_one(check, scope, min(check.limit, left))
            lines += findings.lines
            # A time of 0 is below the noise, and is no price.
            prices |= {name: each for name, each in findings.prices.items() if each > 0}
            kind = findings.kind or kind
        if tell is not None:
            tell(number + 1, len(checks))
    return Findings(tuple(lines), prices, kind)


def run_one(check: Check, scope: Scope, limit: float) -> Findings:
    """Run one check in a process of its own; a hang or a crash becomes a line.

    Where there is one GPU, a check that needs two runs in two processes that share it.
    """
    end = time.monotonic() + limit
    found = _run(check, scope, limit, {})
    if found.is_one_gpu and check.on_one_gpu is not None and scope.processes == 1:
        return run_pair(check.on_one_gpu, scope, max(1.0, end - time.monotonic()))
    return found


def run_pair(check: Check, scope: Scope, limit: float) -> Findings:
    """Run one check in two processes with one device each, which may be the same GPU: what is
    not good, of both, or the lines of the first.  No price is measured so.
    """
    address = f"127.0.0.1:{_free_port()}"
    own = replace(scope, devices=2, coordinator=address, processes=2)

    def one(process: int) -> Findings:
        environment = shares_gpu(process, os.environ.get("XLA_FLAGS", ""))
        return _run(check, replace(own, process=process), limit, environment)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, range(2)))
    bad = [line for each in found if not each.is_good for line in each.lines]
    return Findings(tuple(bad) or found[0].lines, kind=found[0].kind)


def shares_gpu(process: int, flags: str) -> dict[str, str]:
    """The environment of a process that shares its GPU with others of a job, with these XLA flags.

    NCCL refuses two processes on one GPU of a host; here it takes each process for a host of its
    own.  XLA would share autotuning among the processes, and the first compilation would wait for
    ever where they do not compile the same.
    """
    nccl = {"P2P_DISABLE": "1", "SHM_DISABLE": "1", "IB_DISABLE": "1", "SOCKET_IFNAME": "lo"}
    return {
        **{f"NCCL_{name}": value for name, value in nccl.items()},
        "NCCL_HOSTID": f"process-{process}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": f"{flags} --xla_gpu_shard_autotuning=false".strip(),
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _run(check: Check, scope: Scope, limit: float, environment: Mapping[str, str]) -> Findings:
    """The findings of a process that runs the check."""
    request = json.dumps([check.function, asdict(scope), dict(check.options)])
    command, status = [sys.executable, "-c", _CHILD, request], None
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit,
            check=False,
            env={**os.environ, **environment},
        )
        status, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        out, err = b"", error.stderr or b""
    said, errors = (text.decode(errors="replace").splitlines() for text in (out, err))
    results = [line.removeprefix(MARK) for line in said if line.startswith(MARK)]
    if status or not results:
        return Findings((_failed(check, status, limit, errors),))
    facts = json.loads(results[-1])
    lines = (Line(**each | {"verdict": Verdict(each["verdict"])}) for each in facts.pop("lines"))
    return Findings(tuple(lines), **facts)


def _failed(check: Check, status: int | None, limit: float, err: Sequence[str]) -> Line:
    """The line of a check that ended without a result."""
    began = [line.removeprefix(AT) for line in err if line.startswith(AT)]
    where = began[-1] if began else "its start"
    if status is None:
        measured = f"no end after {limit:.0f} s, at {where}: the process was ended"
        return judged(check.item, measured, "an end", check.advice, wrong=True)
    own = [line for line in reversed(err) if line.strip() and not line.startswith(AT)]
    likely = [line for line in own if "Error" in line or "XLA" in line]
    last = next(iter(likely + own), "no message")
    measured = f"it failed with status {status} at {where}: {last[:_LAST]}"
    return judged(check.item, measured, "a result", "the message says why", wrong=True)
