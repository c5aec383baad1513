"""Runs tables with torch's own pipeline runtime, in one gloo process a device.

docs/torch_peer.md lists the faults of torch 2.13 that this works round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..batch import Microbatches, split as split_batch
from ..errors import PeerError
from ..gradients import Gradients
from ..models.base import Arrays, StagedModel
from ..result import Array
from ..table import Kind, Table, read_table
from ..weights import Weights
from .processes import spawn
from .rank import RankResult, Split, run_rank


@dataclass(frozen=True)
class Job:
    """A table, a model, its weights and a batch: what `torch_ref.run` takes."""

    table_csv: str
    model: StagedModel
    batch: Mapping[str, Any]
    weights: Mapping[str, Array]
    dtype: torch.dtype | None = None
    split: Split = Split.TORCH


@dataclass(frozen=True)
class PeerResult:
    """What torch's runtime computed; the attributes are those of `torch_ref.Result`."""

    losses: Array
    loss: float
    grads: Arrays
    outputs: tuple[Any, ...]
    counts: Array | None


def run(
    table_csv: str,
    model: StagedModel,
    batch: Mapping[str, Any],
    *,
    weights: Mapping[str, Array],
    dtype: torch.dtype | None = None,
    split: Split = Split.TORCH,
    time_limit: float = 120.0,
) -> PeerResult:
    """Run one table with torch.distributed.pipelining, a process a device; arguments and result as
    `torch_ref.run`.

    `split` says who cuts the backward into I and W; `time_limit` is in seconds, the start of the
    processes included.

    Raises:
        TableError, WeightsError, BatchError: as `torch_ref.run` does.
        PeerError: torch's runtime cannot run such a table (a stage on two devices, no backwards),
            failed, or hung.
    """
    return run_many([Job(table_csv, model, batch, weights, dtype, split)], time_limit=time_limit)[0]


def run_many(jobs: Sequence[Job], *, time_limit: float = 120.0) -> list[PeerResult]:
    """Run several jobs of the same number of devices one after the other in the same processes:
    they start only once.
    """
    tables = [_check(job) for job in jobs]
    worlds = {table.num_devices for table in tables}
    if len(worlds) != 1:
        raise PeerError(
            f"the jobs' tables have {sorted(worlds)} devices; give those of one number of "
            "devices together"
        )
    ranks: list[list[RankResult]] = spawn(
        _all_jobs, worlds.pop(), list(jobs), time_limit=time_limit
    )
    return [
        _merge(job, table, [results[i] for results in ranks])
        for i, (job, table) in enumerate(zip(jobs, tables, strict=True))
    ]


def _all_jobs(rank: int, jobs: list[Job]) -> list[RankResult]:
    """What each process does."""
    return [
        run_rank(rank, job.table_csv, job.model, _cut(job), _weights(job), job.split)
        for job in jobs
    ]


def _cut(job: Job) -> Microbatches:
    return split_batch(job.batch, read_table(job.table_csv).num_microbatches, dtype=job.dtype)


def _weights(job: Job) -> Weights:
    return Weights.of(job.weights, job.model.num_stages, job.dtype)


def _check(job: Job) -> Table:
    """The job's table; errors that are better told before processes start."""
    table = read_table(job.table_csv)
    if table.num_stages != job.model.num_stages:
        raise PeerError(
            f"the table has {table.num_stages} stages, the model {job.model.num_stages}; they "
            "must be equal"
        )
    job.model.check(job.weights)
    _cut(job)
    if table.forward_only:
        raise PeerError(
            "torch's runtime wants a backward for every forward; give it the table of a training "
            "step"
        )
    recomputed = [str(action) for _, action in table.actions() if action.kind is Kind.R]
    if recomputed:
        raise PeerError(
            f"torch's runtime has no recomputation as an action; take {len(recomputed)} R out of "
            f"the table ({recomputed[0]}, ...)"
        )
    if table.spreads_last:
        raise PeerError(
            "torch's runtime has no share of `last` as an action; take the L out of the table"
        )
    devices: dict[int, set[int]] = {}
    for place, action in table.actions():
        devices.setdefault(action.stage, set()).add(place.device)
    doubled = sorted(stage for stage, on in devices.items() if len(on) > 1)
    if doubled:
        raise PeerError(
            f"stages {doubled} are on several devices; torch's runtime puts every stage on one"
        )
    idle = sorted(set(range(table.num_devices)) - {d for on in devices.values() for d in on})
    if idle:
        raise PeerError(f"devices {idle} hold no stage; torch's runtime wants one on each")
    return table


def _merge(job: Job, table: Table, ranks: Sequence[RankResult]) -> PeerResult:
    """Put together what the processes computed; sums are divided here, once."""
    last = next(result for result in ranks if result.losses is not None)
    assert last.losses is not None
    assert last.outputs is not None
    gradients = Gradients(_weights(job))
    for result in ranks:
        for stage, named in result.grads.items():
            gradients.add(stage, [(name, torch.from_numpy(value)) for name, value in named.items()])
    losses = np.array(last.losses)
    if last.counts is None:
        return PeerResult(
            losses,
            float(losses.mean()),
            gradients.arrays(table.num_microbatches),
            tuple(last.outputs),
            None,
        )
    counts = np.array(last.counts)
    return PeerResult(
        losses,
        float(losses.sum() / counts.sum()),
        gradients.arrays(counts.sum()),
        tuple(last.outputs),
        counts,
    )
