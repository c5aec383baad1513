"""The grid's MLP in float64 on torch.distributed.pipelining: its own runtime, in 2 and in 4 gloo
processes, on our tables.

python -m tests.parity.peers        run what out/ does not have yet
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from .grid import virtual_devices
from .results import PEER, keep, load

if TYPE_CHECKING:
    from .cases import Case

# So many tables share the start of the processes, which is what takes the time.
TOGETHER = 100
SECONDS = 600.0
PROCESSES = (2, 4)


def main() -> int:
    """Run the peer; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--most", type=int, default=None, help="at most so many tables now; the next call goes on"
    )
    options = parser.parse_args()
    virtual_devices()
    have = load(PEER)
    left = [case for case in cases() if str(case) not in have][: options.most]
    for together in _batches(left):
        print(f"{together[0].devices} processes, {len(together)} tables", flush=True)
        _run(together)
    failed = [case for case, entry in load(PEER).items() if not entry["passed"]]
    print("\n".join(f"FAILED {case}" for case in failed))
    return 1 if failed else 0


def cases() -> list[Case]:
    """The grid's tables that torch's runtime can run: one device a stage."""
    from .cases import is_defined, tables

    plain = [c for c in tables() if c.devices in PROCESSES and is_defined(c)]
    return [
        c for c in plain if all(len(devices) == 1 for devices in c.build().placement.devices_of)
    ]


def _batches(left: Sequence[Case]) -> Iterator[list[Case]]:
    for _, same in groupby(sorted(left, key=lambda c: c.devices), key=lambda c: c.devices):
        group = list(same)
        yield from (group[k : k + TOGETHER] for k in range(0, len(group), TOGETHER))


def _run(together: list[Case]) -> None:
    """Run them in one set of processes; where that fails, each in its own, to find the one to
    blame.
    """
    from torch_ref import PeerError
    from torch_ref.peer import run_many

    begin = time.monotonic()
    try:
        found: Sequence[Any] = run_many([_job(case) for case in together], time_limit=SECONDS)
    except PeerError as error:
        if len(together) == 1:
            keep(
                PEER,
                str(together[0]),
                schedule=together[0].schedule,
                passed=False,
                fault=str(error),
            )
            return
        for case in together:
            _run([case])
        return
    seconds = round((time.monotonic() - begin) / len(together), 2)
    for case, result in zip(together, found, strict=True):
        keep(
            PEER,
            str(case),
            schedule=case.schedule,
            devices=case.devices,
            **_errors(case, result),
            fault="",
            seconds=seconds,
        )


def _job(case: Case) -> Any:
    from torch_ref.peer import Job

    from .cases import ROWS
    from .engines import case_data

    weights, batch = case_data(case.twin, case.microbatches, ROWS)
    return Job(case.build().to_csv(), case.twin.reference, batch, weights)


def _errors(case: Case, result: Any) -> dict[str, Any]:
    from .cases import ROWS
    from .engines import Outcome, truth, worst_error
    from .measure import losses_error
    from .tolerance import FLOAT64

    right = truth(case.twin, case.microbatches, ROWS)
    error = max(
        worst_error(Outcome(result.loss, result.grads), right), losses_error(result.losses, right)
    )
    return {"error": error, "passed": error <= FLOAT64}


if __name__ == "__main__":
    raise SystemExit(main())
