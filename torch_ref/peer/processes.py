"""Runs a function in several gloo processes on loopback; a hang becomes an error that shows where
each process stood.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..errors import PeerError

# After the limit, the time in which processes may write down where they stand.
_GRACE = 3.0


def spawn(
    function: Callable[..., Any], world: int, *arguments: Any, time_limit: float = 120.0
) -> list[Any]:
    """Call `function(rank, *arguments)` in `world` processes that form a gloo group; their results,
    in rank order.

    Args:
        function: of a module's top level, so that a new process can import it.
        world: the number of processes.
        arguments: the same for all of them.
        time_limit: seconds for everything, the start of the processes (some seconds) included.

    Raises:
        PeerError: a process failed, or the limit was passed; the message holds its traceback, or
            where each process stood.
    """
    folder = Path(tempfile.mkdtemp(prefix="torch_peer_"))
    deadline = time.time() + time_limit
    try:
        context = mp.spawn(
            _main, (world, str(folder), deadline, function, arguments), nprocs=world, join=False
        )
        try:
            _join(context, deadline, world, folder, time_limit)
        finally:
            _end(context.processes)
        return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(world)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _join(context: Any, deadline: float, world: int, folder: Path, time_limit: float) -> None:
    while time.time() < deadline + _GRACE:
        try:
            if context.join(timeout=0.2):
                return
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise PeerError(f"one of {world} processes failed:\n{error}") from error
    stood = "\n".join(f"process {rank}:\n{_read(folder / f'stood{rank}')}" for rank in range(world))
    raise PeerError(f"{world} processes did not end within {time_limit:g} s:\n{stood}")


def _end(processes: list[Any]) -> None:
    """End what is left of them: SIGTERM, and SIGKILL for a process that does not go."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(timeout=2)
        if process.is_alive():
            process.kill()
            process.join()


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else "(it had not started)"


def _main(
    rank: int,
    world: int,
    folder: str,
    deadline: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """One process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    left = max(deadline - time.time(), 0.1)
    with (Path(folder) / f"stood{rank}").open("w") as stood:
        faulthandler.dump_traceback_later(left, file=stood)
        # A rendezvous through a file needs no free port.
        store = f"file://{folder}/store"
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=left + 60),
        )
        torch.save(function(rank, *arguments), Path(folder) / f"result{rank}")
        # Nobody leaves while another may still wait for a message.
        dist.barrier()
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
