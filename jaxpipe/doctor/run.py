"""Run checks one after the other, each in a process with a limit of time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .findings import AT, Found, Line, Scope, Verdict, judged, not_tried

MARK = "doctor-found: "
_LAST = 300  # characters of a failure


class Check(NamedTuple):
    """A check: its title, module:function (a further argument follows another colon), its
    limit in seconds, and advice for a hang.
    """

    item: str
    function: str
    limit: float = 120.0
    advice: str = ""


_HERE = "jaxpipe.doctor."
_HANG = (
    "see the versions above; run again with NCCL_DEBUG=WARN, with one process for each GPU, and "
    "with fewer --devices to find the link"
)
CHECKS = (
    Check("versions", f"{_HERE}versions:versions", advice="the driver may be stuck: nvidia-smi"),
    Check("XLA options", f"{_HERE}options:options", advice=_HANG),
    *(
        Check(f"numbers: {name}", f"{_HERE}numbers:numbers:{name}", advice=_HANG)
        for name in (
            "one_f_one_b",
            "chunks",
            "split_backward",
            "vee",
            "spread_ends",
            "offload",
        )
    ),
    Check("predicates", f"{_HERE}times:predicates", advice=_HANG),
    Check("hops", f"{_HERE}times:hops", advice=_HANG),
    Check("host copies", f"{_HERE}times:host_copies", advice="look at pinned memory limits"),
    Check("memory", f"{_HERE}steps:memory", advice=_HANG),
    Check("speed of one device", f"{_HERE}steps:speed", advice=_HANG),
    Check("a step against its plan", f"{_HERE}steps:plan", advice=_HANG),
)


@dataclass(frozen=True)
class Report(Found):
    """All lines, and the prices that were measured."""

    @property
    def is_good(self) -> bool:
        """Whether no line is wrong."""
        return all(line.verdict is not Verdict.WRONG for line in self.lines)


def run(
    scope: Scope,
    *,
    minutes: float = 3.0,
    checks: Sequence[Check] = CHECKS,
    tell: Callable[[int, int], None] | None = None,
) -> Report:
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
            found = run_one(check, scope, min(check.limit, left))
            lines += found.lines
            # A time of 0 is below the noise, and is no price.
            prices |= {name: each for name, each in found.prices.items() if each > 0}
            kind = found.kind or kind
        if tell is not None:
            tell(number + 1, len(checks))
    return Report(tuple(lines), prices, kind)


def run_one(check: Check, scope: Scope, limit: float) -> Found:
    """Run one check in a process of its own; a hang or a crash becomes a line."""
    command = [sys.executable, "-m", "jaxpipe.doctor.child", check.function]
    command.append(json.dumps(asdict(scope)))
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            status: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(child)
        texts = [_all(file).splitlines() for file in (out, err)]
    found = [line.removeprefix(MARK) for line in texts[0] if line.startswith(MARK)]
    if found and status == 0:
        facts = json.loads(found[-1])
        return Found(**facts | {"lines": tuple(Line(**line) for line in facts["lines"])})
    return Found((_failed(check, status, limit, texts[1]),))


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process and its children."""
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _all(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def _failed(check: Check, status: int | None, limit: float, err: Sequence[str]) -> Line:
    """The line of a check that ended without a result."""
    began = [line.removeprefix(AT) for line in err if line.startswith(AT)]
    where = began[-1] if began else "its start"
    if status is None:
        measured = f"no end after {limit:.0f} s, at {where}: the process was ended"
        return judged(check.item, measured, "an end", check.advice, wrong=True)
    last = next(_reasons(err), "no message")
    measured = f"it failed with status {status} at {where}: {last[:_LAST]}"
    return judged(check.item, measured, "a result", "the message says why", wrong=True)


def _reasons(err: Sequence[str]) -> Iterator[str]:
    """Lines of stderr that may say why, likely ones first."""
    own = [line for line in err if line.strip() and not line.startswith(AT)]
    yield from (line for line in reversed(own) if "Error" in line or "XLA" in line)
    yield from reversed(own)
