"""The times of the actions of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from ..arrays import Params, PyTree
from ..engine.costs import Costs
from ..engine.simulate import Timeline
from ..errors import Count, PipelineError, typed
from ..model.settings import outside_contexts
from ..pipeline import Pipeline
from ..spmd.emit import CANNOT_BE_TIMED
from ..table.encoded import Transfers
from ..table.kinds import KINDS, SHARES
from ..table.schedule import Schedule
from . import programs

# The time of the begin (phase 0) or the end (1) of a block, and its place along axes of the
# partitioner, phase, data shard, device, kind, stage and microbatch.
Event: TypeAlias = tuple[float, ...]


@typed(PipelineError)
@outside_contexts
def profile(
    pipe: Pipeline,
    params: Params,
    batch: PyTree,
    *,
    rng: Any = None,
    state: PyTree = (),
    repeats: Count = 3,
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
    events: list[Event] = []

    def note(numbers: jax.Array, _wrote: object) -> np.int32:
        events.append((time.perf_counter(), *np.asarray(numbers).tolist()))
        return np.int32(0)

    traced = pipe.trace(params, batch, rng=rng, state=state, clock=note)
    compiled = traced.function.lower().compile()
    if pipe._target.on_cpus and any(
        each.is_permute and programs.differs(each.place.frames)
        for each in programs.CompiledProgram(compiled).collectives
    ):
        # All devices would then run every block at once, and no block has a time of its own.
        raise PipelineError(CANNOT_BE_TIMED)
    optional = ({} if rng is None else {"rng": rng}) | ({"state": state} if state else {})
    runs = []
    for _ in range(repeats + 1):
        events.clear()
        jax.block_until_ready(compiled(params, batch, **optional))
        # Callbacks may still be on their way when the results are there.
        jax.effects_barrier()
        runs.append(list(events))
    kind = pipe.mesh.devices.flat[0].device_kind
    schedule = traced.setup.schedule
    timelines = [timeline_of(schedule, run, kind) for run in runs[1:]]  # the first warms up
    return sorted(timelines, key=lambda timeline: timeline.makespan)[repeats // 2]


def timeline_of(schedule: Schedule, events: Sequence[Event], device_kind: str) -> Timeline:
    """The timeline of data shard 0; its first block begins at 0."""
    table, found = schedule.encoded, np.array(events).reshape(-1, 8)
    partner, phase, shard, _, *action = found[:, 1:].astype(int).T
    number = table.at[tuple(action)]
    own = (shard == 0) & (number >= 0)
    # Devices that share a block along axes of the partitioner each record their own times.
    times = np.full((2, 1 + partner.max(initial=0), table.num_actions), np.nan)
    times[phase[own], partner[own], number[own]] = found[own, 0]
    # A block begins when the last of them has reached it.  Until then the others wait in its
    # collectives.
    starts, ends = times.max(axis=1)
    untimed = (np.isnan(starts) | np.isnan(ends)) & table.is_compute
    if missing := list(map(table.text, np.flatnonzero(untimed).tolist())):
        raise PipelineError(
            f"the run has no times of {', '.join(missing[:8])}{', ...' * (len(missing) > 8)}; this "
            "program runs them otherwise"
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


def _costs(schedule: Schedule, times: np.ndarray, unit: str) -> Costs:
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
