"""The timeline of a real step: its blocks timed while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from ..arrays import Params, PyTree
from ..engine.costs import Costs
from ..engine.timeline import Timeline
from ..errors import PipelineError, quoted
from ..model.mesh import outside_contexts
from ..pipeline import Pipeline
from ..spmd.executor import CANNOT_BE_TIMED, TracedStep
from ..table.kinds import KINDS, SHARES
from ..table.run_order import Transfers
from ..table.schedule import Schedule
from .blocks import Step


@outside_contexts
def profile(
    pipe: Pipeline,
    params: Params,
    batch: PyTree,
    *,
    rng: Any = None,
    state: Any = (),
    repeats: int = 3,
) -> Timeline:
    """Run the step and return when each action really began and ended, in seconds: a timeline like
    `simulate`'s.

    Every block calls the host at its begin and its end, so the step is a little slower than without
    (tens of microseconds a block).  The first block begins at 0; of `repeats` runs the median one
    is returned.  `timeline.over(planned)` compares it with a simulated one.  A block that devices
    share along axes of the partitioner begins when the last of them has reached it.  For backends
    where the host can be called from a program.

    Args:
        pipe: the pipeline.
        params, batch, rng, state: as for `value_and_grad`.
        repeats: runs of the step.

    Raises:
        PipelineError: as `value_and_grad` does, and where the step cannot be profiled so.
    """
    if repeats < 1:
        raise PipelineError(f"repeats must be at least 1, not {quoted(repeats)}")
    clock = Clock([])
    traced = pipe.trace(params, batch, rng=rng, state=state, clock=clock)
    _refuse_permutes(pipe, traced)
    compiled = traced.function.lower().compile()
    optional = ({} if rng is None else {"rng": rng}) | ({"state": state} if state else {})
    runs = []
    for _ in range(repeats + 1):
        clock.events.clear()
        jax.block_until_ready(compiled(params, batch, **optional))
        # Callbacks may still be on their way when the results are there.
        jax.effects_barrier()
        runs.append(list(clock.events))
    kind = pipe.mesh.devices.flat[0].device_kind
    schedule = traced.job.plan.ticks.schedule
    timelines = [timeline_of(schedule, events, kind) for events in runs[1:]]  # the first warms up
    return sorted(timelines, key=lambda timeline: timeline.makespan)[repeats // 2]


def _refuse_permutes(pipe: Pipeline, traced: TracedStep) -> None:
    """PipelineError where the partitioner permutes in blocks on CPU devices.  All devices then run
    every block at once, and no block has a time of its own.
    """
    step = Step.of(traced)
    waits = pipe._target.on_cpus and pipe.schedule.num_devices > 1
    if step.is_shared and waits and step.permutes():
        raise PipelineError(CANNOT_BE_TIMED)


class Event(NamedTuple):
    """The begin (phase 0) or the end (1) of a block; `partner`: the place of its device among those
    that share the block.
    """

    now: float
    partner: int
    phase: int
    shard: int
    kind: int
    stage: int
    microbatch: int


@dataclass(frozen=True, eq=False)  # JAX hashes what it calls
class Clock:
    """Records the time of each begin and end of a block."""

    events: list[Event]

    def __call__(self, numbers: Any, _wrote: Any) -> Any:
        """Note one event: `numbers` as the `Clock` of a `Job` gets them."""
        now = time.perf_counter()
        partner, phase, shard, _, kind, stage, microbatch = np.asarray(numbers).tolist()
        self.events.append(Event(now, partner, phase, shard, kind, stage, microbatch))
        return np.int32(0)


def timeline_of(schedule: Schedule, events: Sequence[Event], device_kind: str) -> Timeline:
    """The timeline of data shard 0; its first block begins at 0."""
    table = schedule.encoded
    # Devices that share a block along axes of the partitioner each record their own times.
    times = np.full(
        (2, 1 + max((event.partner for event in events), default=0), table.num_actions), np.nan
    )
    for event in events:
        number = int(table.at[event.kind, event.stage, event.microbatch])
        if event.shard == 0 and number >= 0:
            times[event.phase, event.partner, number] = event.now
    # A block begins when the last of them has reached it.  Until then the others wait in its
    # collectives.
    starts, ends = times.max(axis=1)
    untimed = (np.isnan(starts) | np.isnan(ends)) & table.is_compute
    missing = list(map(table.text, np.flatnonzero(untimed).tolist()))
    if missing:
        raise PipelineError(
            "the run has no times of "
            f"{', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}; this program runs "
            "them otherwise"
        )
    # A collective action begins when the last device has reached it.  Until then the others wait in
    # its collective.
    for collective in set(table.collectives.values()):
        members = list(collective.members)
        starts[members] = starts[members].max()
        ends[members] = np.maximum(ends[members], starts[members])
    for i in table.pairs.tolist():
        starts[i] = starts[i + 1] = min(starts[i], starts[i + 1])
        ends[i] = ends[i + 1] = max(ends[i], ends[i + 1])
    starts, ends = starts - starts.min(), ends - starts.min()
    costs = _costs(schedule, ends - starts, f"seconds, of one run on {device_kind}")
    begin, end = tuple(starts.tolist()), tuple(ends.tolist())
    return Timeline(schedule, costs, Transfers.ASYNC, begin, end)


def _costs(schedule: Schedule, times: Any, unit: str) -> Costs:
    """The median time of each stage's actions in the run, and of each device's shares; transfers
    are in the gaps.
    """
    table = schedule.encoded
    names = {spec.kind: spec.cost for spec in KINDS if spec.cost is not None}
    found: dict[str, Any] = {}
    for kind, name in names.items():
        own = [times[(table.kind == kind) & (table.stage == s)] for s in range(table.num_stages)]
        has = [mine.size > 0 for mine in own]
        if all(has) or (kind in SHARES and any(has)):
            found[name] = tuple(float(np.median(mine)) if mine.size else 0.0 for mine in own)
    for kind in table.kinds:  # the time of an action with its deferred part
        if (whole := KINDS[kind].part_of) is not None:
            name, part = names[whole], names[kind]
            found[name] = tuple(a + b for a, b in zip(found[name], found[part], strict=True))
    return Costs(**found, unit=unit)
