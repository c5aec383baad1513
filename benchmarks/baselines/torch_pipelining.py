"""torch.distributed.pipelining on gloo: its own schedule classes, a process a device, kept alive
between steps.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from torch_ref.batch import split
from torch_ref.models import GPT
from torch_ref.peer.rank import StageModule
from torch_ref.weights import Weights

ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL_STAGES = {"interleaved_1f1b": ScheduleInterleaved1F1B}
MINUTES = 10


@dataclass(frozen=True)
class TorchJob:
    """A model to train by one of torch's schedules; weights by torch_ref's names."""

    schedule: str
    devices: int
    microbatches: int
    model: GPT
    weights: Mapping[str, np.ndarray[Any, Any]]
    batch: Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Cost:
    """What a step took: seconds on the clock, and seconds of processor time in all processes
    together.
    """

    wall: float
    cpu: float


class TorchPipelines:
    """P processes that run steps of any of the jobs on demand.  A context manager; the processes
    end with it.
    """

    def __init__(self, jobs: Sequence[TorchJob]) -> None:
        self._jobs = list(jobs)
        self._folder = tempfile.mkdtemp(prefix="torch_pipelining_")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> TorchPipelines:
        context = mp.get_context("spawn")
        for rank in range(self._jobs[0].devices):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._jobs, self._folder, there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def step(self, job: int) -> Cost:
        """Run one step of a job."""
        costs = self._ask(("step", job))
        return Cost(max(c.wall for c in costs), sum(c.cpu for c in costs))

    def alone(self, job: int) -> Cost:
        """The same forwards and backwards in each process, with nothing sent between them."""
        costs = self._ask(("alone", job))
        return Cost(max(c.wall for c in costs), sum(c.cpu for c in costs))

    def outcome(self, job: int) -> tuple[float, float]:
        """(loss, norm of the gradient) of the last step."""
        parts = self._ask(("outcome", job))
        return sum(loss for loss, _ in parts), float(sum(square for _, square in parts)) ** 0.5

    def _ask(self, request: tuple[str, int]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(request)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(MINUTES * 60):
                raise RuntimeError(
                    f"torch's process {rank} did not answer within {MINUTES} minutes"
                )
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"torch's process {rank} failed; its message is above") from None
        return answers


def _serve(rank: int, jobs: Sequence[TorchJob], folder: str, pipe: Connection) -> None:
    """One process: answer requests until the pipe closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # More threads only make the processes fight for the cores.
    torch.set_num_threads(1)
    limit = timedelta(minutes=MINUTES)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=jobs[0].devices,
        timeout=limit,
    )
    runners = [_Runner(rank, job) for job in jobs]
    while True:
        try:
            what, number = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(runners[number], what)())


class _Runner:
    """A job in one process."""

    def __init__(self, rank: int, job: TorchJob) -> None:
        count, stages = job.microbatches, job.model.num_stages
        parts = split(job.batch, count)
        weights = Weights.of(job.weights, stages)
        mine = range(rank, stages, job.devices)
        self._modules = [StageModule(job.model, weights, s, parts) for s in mine]
        placed = [
            PipelineStage(m, s, stages, torch.device("cpu"))
            for m, s in zip(self._modules, mine, strict=True)
        ]
        final = self._modules[-1]

        def loss_of(output: Any, rows: Any) -> Any:
            return final.loss(output, rows)

        if job.schedule in ONE_STAGE:
            self._runtime: Any = ONE_STAGE[job.schedule](placed[0], count, loss_fn=loss_of)
        else:
            self._runtime = SEVERAL_STAGES[job.schedule](placed, count, loss_fn=loss_of)
        self._rows = torch.arange(sum(parts.rows))
        self._first, self._last = 0 in mine, stages - 1 in mine
        self._parts = parts
        self._losses: list[Any] = []

    def step(self) -> Cost:
        """A step of the schedule."""
        dist.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for module in self._modules:
            module.zero_grad(set_to_none=True)
        self._losses = []
        given = [self._rows] if self._first else []
        target = self._rows if self._last else None
        self._runtime.step(*given, rows=self._rows, target=target, losses=self._losses)
        return Cost(time.perf_counter() - begin, time.process_time() - begin_cpu)

    def alone(self) -> Cost:
        """This process's forwards and backwards, on inputs that nobody sent."""
        count = len(self._parts.parts)
        rows = self._rows.tensor_split(count)
        dist.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for module in self._modules:
            x = torch.ones_like(module.form, requires_grad=True)
            for m in range(count):
                y = module(x, rows=rows[m])
                if module.stage == module.model.num_stages - 1:
                    loss: Any = module.loss(y, rows[m])
                    loss.backward()
                else:
                    y.backward(y.detach())
        return Cost(time.perf_counter() - begin, time.process_time() - begin_cpu)

    def outcome(self) -> tuple[float, float]:
        """This process's part of the loss, and of the gradient's square."""
        loss = sum(part.item() for part in self._losses) / len(self._losses) if self._last else 0.0
        grads = [
            p.grad for module in self._modules for p in module.parameters() if p.grad is not None
        ]
        return loss, float(sum((g.double() ** 2).sum() for g in grads))
