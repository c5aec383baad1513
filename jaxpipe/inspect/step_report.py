"""The numbers of a compiled step: `jaxpipe.inspect.report`.

The table and its program:

    schedule, devices, stages, microbatches
    table_makespan      the table's own, with F = I = W = 1, B = 2 and transfers that take no time
    makespan            the program's, where a transfer holds up only its two ends
    seconds             of a step, simulated from the plan and the pipeline's `costs` (without any,
                        a forward of 5 ms); None on CPUs
    predicate_seconds   of those, what predicates take; None on CPUs
    loses_to_1f1b       whether predicates take so long that 1F1B with the same layers would be
                        faster; None on CPUs
    prices              of predicates and transfers, by which the program was chosen, and whether
                        they were measured, given or guessed
    ticks               lock-step ticks of the program
    num_segments, segments   pieces of code that are compiled once, and their text: which blocks
                        and permutes each tick has
    blocks              pieces of stage code that are compiled, over all segments
    table_transfers     values that cross devices in the table, a step
    late_transfers      (awaited in a later tick than issued, all) of the table's transfers that
                        are needed no sooner than a tick later
    transfers           pairs of devices that the program's permutes send between, a step; more
                        than the table's where ticks share them

Memory of one device:

    slots               entries of each pool: the most that any device holds at one time
    slot_bytes          of one entry of each pool
    pool_bytes          slots times that; "host" is in the host's memory, the others on the device
    residuals           (pool, dtype and shape, bytes) of each array that a forward keeps for the
                        backward, or I for W, before the partitioner splits it
    hoisted_bytes       what is computed from parameters once a step and kept (casts), over all
                        chunks of a device
    parameter_bytes     of stages, first, last and shared, as one device holds them; gradients take
                        as much, in their own dtype
    transfer_bytes      the most that one device sends, a step

What XLA says of the compiled program, for one device:

    temp_bytes, argument_bytes, output_bytes, flops, trace_seconds, compile_seconds
    host_temp_bytes     in the memory of the host (`offload`); of CPU devices, whose memory that
                        is, it is in temp_bytes
    peak_bytes          XLA's peak of arguments, results and temporary arrays; on TPUs
                        temp_bytes has the gaps between temporary arrays twice
    predicted           what `jaxpipe.inspect.memory` returns: from the program's slots and each
                        block compiled alone, without the compiled step

What the text of the step compiled for NVIDIA GPUs or TPUs says; None for CPUs:

    host_waits          how often a device's host waits for it in a step, an upper bound: no CUDA
                        graph holds that predicate; TPUs never wait
    cycles              of a step's loops by what they are for ("matmuls", "writes", "reads",
                        "copies", ...), as XLA estimates them; None but on TPUs
    padding_bytes       what tiles add to the arrays that the loops carry; None but on TPUs
    permutes_with_slack_beside_compute  (with compute issued between start and done, all) of those
                        awaited in a later tick, anywhere
    permutes_beside_compute     (with compute issued between start and done, all) of the segment of
                        most trips; compute is a matmul, a large fusion, or on TPUs what XLA
                        estimates to take as long as the transfer
    collectives_beside_compute  the same of all other collectives

    stage_kinds         different stages (by function, parameters, or what they take); pools hold
                        the largest of each, transfers too
    fallbacks           equations that the cut of the backward into I and W could not cut, and so
                        do W's work in I
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from ..arrays import Params, PyTree
from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..jaxprs.cut import drop_dead
from ..jaxprs.equations import nbytes, scan_counts, variables
from ..lowering.cost_model import cost_parts, program_makespan
from ..lowering.plan import Plan, plan_of
from ..lowering.prices import FORWARD, Overheads
from ..lowering.target import Target
from ..model.mesh import outside_contexts
from ..pipeline import Pipeline
from ..planner.memory import Sizes
from ..program.ir import Program
from ..program.records import POOL_OF
from ..schedules.registry import build
from ..spmd.executor import WITH_SLACK, TracedStep
from ..spmd.pools import shared_buffers
from ..stage.code import RESIDUALS
from ..table.effects import Place
from ..table.kinds import parts
from ..table.schedule import Schedule
from .collectives import steady
from .programs import CompiledProgram, GpuProgram, TpuProgram, compile_and_read, most_waits
from .step_memory import facts, local_bytes, placed_shapes, step_sizes


class StepTime(NamedTuple):
    """Seconds of a step, simulated from the plan."""

    seconds: float  # with all overheads
    predicates: float  # the part of predicates
    one_f_one_b: float  # seconds of 1F1B with the same layers on as many devices

    @property
    def loses(self) -> bool:
        """Whether 1F1B is faster, and would be slower if predicates took no time."""
        return self.seconds - self.predicates <= self.one_f_one_b < self.seconds


def step_time(plan: Plan, overheads: Overheads, costs: Costs | None = None) -> StepTime:
    """Simulate a plan and the plan of 1F1B; `costs` in seconds, without any F = I = W = `FORWARD`.

    >>> import jaxpipe as jp
    >>> overheads = Overheads()
    >>> plan = plan_of(jp.schedules.build("zb_h1", devices=4, microbatches=8))
    >>> step_time(plan, overheads).loses
    False
    """
    schedule = plan.ticks.schedule
    seconds = costs or Costs(forward=FORWARD, input_grad=FORWARD, weight_grad=FORWARD)
    whole = merged(schedule, seconds)
    one_f_one_b = build(
        "1f1b", devices=schedule.num_devices, microbatches=schedule.num_microbatches
    )
    plain = plan_of(one_f_one_b, costs=whole, overheads=overheads)

    def makespan(plan: Plan, overheads: Overheads, costs: Costs) -> float:
        return program_makespan(cost_parts(plan.ticks, costs), plan.segments, overheads)

    mine = makespan(plan, overheads, seconds)
    unpredicated = makespan(plan, replace(overheads, predicate=0.0), seconds)
    return StepTime(mine, mine - unpredicated, makespan(plain, overheads, whole))


def merged(schedule: Schedule, costs: Costs) -> Costs:
    """The costs of one stage a device, with the layers spread evenly."""
    stages = costs.for_stages(schedule.num_stages)
    share = schedule.num_stages / schedule.num_devices
    names = ("forward", "input_grad", "weight_grad", "backward")
    seconds: dict[str, Any] = {
        name: float(np.mean(getattr(stages, name))) * share for name in names
    }
    return Costs(**seconds, unit=costs.unit)


@outside_contexts
def report(
    pipe: Pipeline, params: Params, batch: PyTree, *, rng: Any = None, state: Any = ()
) -> dict[str, Any]:
    """Compile the step and describe it: ticks, segments, slots, transfers, makespans, residuals,
    XLA's memory, compile seconds.

    Takes what `pipe.lower` takes and runs nothing.  `jaxpipe.inspect.step_report` lists the keys;
    "ticks", "segments" (texts), "slots", "transfers", "temp_bytes", "flops" and "compile_seconds"
    are used most.

    Raises:
        PipelineError: as `value_and_grad` does.
    """
    begin = time.perf_counter()
    traced = pipe.trace(params, batch, rng=rng, state=state)
    lowered = traced.function.lower()
    middle = time.perf_counter()
    target = pipe._target
    program = _compiled(lowered, target)
    end = time.perf_counter()
    schedule, code = pipe.schedule, traced.code
    held, sizes = placed_shapes(pipe, params), step_sizes(pipe, traced, params, batch)
    plan = traced.job.plan
    joint = (
        f for kind in code.kinds for f in fallbacks(kind.input_grad, len(kind.avals[Place.SENT_DX]))
    )
    times = step_time(plan, target.overheads, pipe.costs) if target.overlaps else None
    return {
        "schedule": schedule.name,
        "devices": schedule.num_devices,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        **_program(plan, code.program),
        "seconds": times and times.seconds,
        "predicate_seconds": times and times.predicates,
        "loses_to_1f1b": times and times.loses,
        "prices": str(target.overheads),
        **_pools(traced, sizes),
        "parameter_bytes": {
            key: sum(map(local_bytes, jax.tree.leaves(tree))) for key, tree in held.items()
        },
        **_xla(program),
        **_read(program, schedule),
        "stage_kinds": len(code.kinds),
        "fallbacks": list(dict.fromkeys(joint)),
        "predicted": facts(traced, sizes),
        "trace_seconds": middle - begin,
        "compile_seconds": end - middle,
    }


def _program(plan: Plan, program: Program) -> dict[str, Any]:
    """The table and the program."""
    schedule = plan.ticks.schedule
    return {
        "table_makespan": simulate(schedule, Costs()).makespan,
        "makespan": plan.makespan,
        "ticks": program.num_ticks,
        "num_segments": len(plan.segments),
        "segments": [str(segment) for segment in plan.segments],
        "blocks": sum(segment.size for segment in plan.segments),
        "table_transfers": int(np.sum(schedule.encoded.crosses)),
        "late_transfers": plan.late_transfers,
        "transfers": sum(segment.num_sends for segment in plan.segments),
        "slots": program.slots,
    }


def _pools(traced: TracedStep, sizes: Sizes) -> dict[str, Any]:
    """Pools, residuals and transfers."""
    code = traced.code
    program, buffers = code.program, shared_buffers(code.kinds, traced.entries)
    kept = {place.value: buffers[place].avals for place in (*RESIDUALS, Place.STASH)}
    kept |= {"first": code.outer_pools[Place.FIRST]}
    sent: Counter[int] = Counter()
    for segment in program.segments:
        for permute in (permute for template in segment.templates for permute in template.permutes):
            for source, _ in permute.pairs:
                size = sizes.entry[POOL_OF[permute.payload].value]
                sent[source] += segment.repeats * int(size)
    return {
        "slot_bytes": dict(sizes.entry),
        "pool_bytes": {
            pool: size * getattr(program.slots, pool) for pool, size in sizes.entry.items()
        },
        "residuals": [
            (pool, f"{aval.dtype}{list(aval.shape)}", nbytes(aval))
            for pool, avals in kept.items()
            for aval in (avals if sizes.entry[pool] else ())
        ],
        "hoisted_bytes": sizes.hoisted,
        "transfer_bytes": max(sent.values(), default=0),
    }


def _xla(program: CompiledProgram) -> dict[str, Any]:
    """XLA's figures; None where a backend has none."""
    memory, cost = program.memory, program.compiled.cost_analysis() or {}
    sizes = {
        f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes", None)
        for name in ("temp", "host_temp", "argument", "output")
    }
    peak = getattr(memory, "peak_memory_in_bytes", None)
    return {**sizes, "peak_bytes": peak, "flops": cost.get("flops")}


def _compiled(lowered: Any, target: Target) -> CompiledProgram:
    """The compiled step, with a reader of its text where there is one."""
    if target.on_gpus:
        with suppress(ValueError):  # a compilation cache has answered, and answers again
            return compile_and_read(lowered)
    compiled = lowered.compile()
    return TpuProgram(compiled, target.chip) if target.on_tpus else CompiledProgram(compiled)


def _read(program: CompiledProgram, schedule: Schedule) -> dict[str, Any]:
    """Counts in the text of a program; None where there is no reader for it."""
    overlaps = (
        "permutes_with_slack_beside_compute",
        "permutes_beside_compute",
        "collectives_beside_compute",
    )
    found: dict[str, Any] = dict.fromkeys(("host_waits", "cycles", "padding_bytes", *overlaps))
    if isinstance(program, GpuProgram):
        most, by_kind = most_actions(schedule), most_of_each_kind(schedule)
        found["host_waits"] = round(most_waits(program.predicates, most, by_kind=by_kind))
    elif isinstance(program, TpuProgram):
        found["cycles"] = {purpose.value: count for purpose, count in program.cycles.items()}
        found |= {"host_waits": 0, "padding_bytes": program.padding}
    else:
        return found
    collectives = program.collectives
    permutes = [each for each in collectives if each.kind == "collective-permute"]
    with_slack = [each for each in permutes if WITH_SLACK in each.start.attributes]
    others = [each for each in collectives if each.kind != "collective-permute"]
    for key, those in zip(overlaps, (with_slack, steady(collectives), others), strict=True):
        found[key] = (sum(each.overlapped for each in those), len(those))
    return found


def most_actions(schedule: Schedule) -> int:
    """The most actions of any device, an overlapped pair counted as two."""
    return max(sum(len(parts(cell)) for cell in row) for row in schedule.rows)


def most_of_each_kind(schedule: Schedule) -> dict[str, int]:
    """The most actions of each kind that any device has."""
    found: Counter[str] = Counter()
    for row in schedule.rows:
        found |= Counter(action.kind.name for cell in row for action in parts(cell))
    return dict(found)


# Several outputs, but no work that could be W's.
_FREE = frozenset(
    {"split", "optimization_barrier", "random_split", "random_unwrap", "threefry2x32"}
)


def fallbacks(input_grad: core.Jaxpr, num_dx: int) -> list[str]:
    """Equations of I with outputs that only W reads.  Only a scan can be cut inside, so I does that
    work too.

    `input_grad` returns `num_dx` gradients, then the stash for W.
    """
    without_stash, _ = drop_dead(input_grad.replace(outvars=input_grad.outvars[:num_dx]))
    eqns = without_stash.eqns
    read = {*variables(v for eqn in eqns for v in eqn.invars), *variables(without_stash.outvars)}
    found = []
    for eqn in eqns:
        name, outs = eqn.primitive.name, eqn.outvars
        if name == "scan":
            body, carries = eqn.params["jaxpr"].jaxpr, scan_counts(eqn)[1]
            pairs = enumerate(zip(body.outvars, outs, strict=True))
            wanted = [v for i, (v, out) in pairs if i < carries or out in read]
            found += fallbacks(body.replace(outvars=wanted), len(wanted))
            continue
        count = sum(v not in read and not isinstance(v, core.DropVar) for v in outs)
        if count and len(outs) > 1 and name not in _FREE:
            found.append(
                f"{name}: {count} of its {len(outs)} results are for W alone, and are computed in I"
            )
    return found
