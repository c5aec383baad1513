"""The numbers of a compiled step, `report`, and the times of the actions of a run, `profile`.

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
from functools import reduce
from operator import or_
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ..arrays import Params, PyTree, Rng
from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..jaxprs.cut import drop_dead
from ..jaxprs.equations import nbytes, variables
from ..lowering.plan import Plan, plan_of
from ..lowering.target import ASSUMED, Overheads, Target
from ..model.settings import outside_contexts
from ..pipeline import Pipeline
from ..planner.memory import Sizes
from ..program.ir import POOL_OF, Program
from ..schedules.registry import build
from ..spmd.segment import WITH_SLACK
from ..spmd.traced import TracedStep
from ..stage.code import RESIDUALS
from ..table.effects import Place
from ..table.kinds import parts
from ..table.schedule import Schedule
from . import programs
from .hlo import steady
from .step_memory import facts, local_bytes, placed_shapes, step_sizes


def step_time(plan: Plan, overheads: Overheads, costs: Costs | None = None) -> dict[str, float]:
    """Simulate a plan and the plan of 1F1B; `costs` in seconds, `ASSUMED` without any.

    It loses to 1F1B where that is faster, and would be slower if predicates took no time.

    >>> import jaxpipe as jp
    >>> overheads = Overheads()
    >>> plan = plan_of(jp.schedules.build("zb_h1", devices=4, microbatches=8))
    >>> step_time(plan, overheads)["loses_to_1f1b"]
    False
    """
    schedule = plan.ticks.schedule
    seconds = costs or ASSUMED
    whole = merged(schedule, seconds)
    one_f_one_b = build(
        "1f1b", devices=schedule.num_devices, microbatches=schedule.num_microbatches
    )
    plain = plan_of(one_f_one_b, costs=whole, overheads=overheads)
    mine, other = plan.makespan_of(seconds, overheads), plain.makespan_of(whole, overheads)
    unpredicated = plan.makespan_of(seconds, replace(overheads, predicate=0.0))
    return {
        "seconds": mine,
        "predicate_seconds": mine - unpredicated,
        "loses_to_1f1b": unpredicated <= other < mine,
    }


def merged(schedule: Schedule, costs: Costs) -> Costs:
    """The costs of one stage a device, with the layers spread evenly."""
    stages = costs.for_stages(schedule.num_stages)
    share = schedule.num_stages / schedule.num_devices
    names = ("forward", "input_grad", "weight_grad", "backward")
    seconds: dict[str, Any] = {
        name: float(np.mean(getattr(stages, name))) * share for name in names
    }
    return Costs(**seconds, transfer=float(np.max(costs.transfer)), unit=costs.unit)


@outside_contexts
def report(
    pipe: Pipeline, params: Params, batch: PyTree, *, rng: Rng = None, state: Any = ()
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
    held = placed_shapes(traced.setup, params)
    sizes = step_sizes(traced, params, batch, state)
    plan = pipe._steps.plan
    joint = (
        f for kind in code.kinds for f in fallbacks(kind.input_grad, len(kind.avals[Place.SENT_DX]))
    )
    times = dict.fromkeys(("seconds", "predicate_seconds", "loses_to_1f1b"))
    if not target.on_cpus:
        times |= step_time(plan, target.overheads, pipe.costs)
    return {
        "schedule": schedule.name,
        "devices": schedule.num_devices,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        **_program(plan, traced.program),
        **times,
        "prices": str(target.overheads),
        **_pools(traced, sizes),
        "parameter_bytes": {
            key: sum(map(local_bytes, jax.tree.leaves(held[key]))) for key in params
        },
        **_xla(program),
        **_read(program, schedule),
        "stage_kinds": len(code.kinds),
        "fallbacks": list(dict.fromkeys(joint)),
        "predicted": facts(traced, sizes),
        "trace_seconds": middle - begin,
        "compile_seconds": end - middle,
    }


@outside_contexts
def memory(
    pipe: Pipeline, params: Params, batch: PyTree, *, rng: Rng = None, state: PyTree = ()
) -> dict[str, int]:
    """Bytes that a step takes on one device by purpose, and their "total".

    Takes what `pipe.lower` takes.  The step is traced, and each block of it compiled alone; the
    step itself is not compiled.

        parameters, batch   what the step is given, and the copy of the batch that is cut into
                            slices
        gradients           what it returns
        state               the stages' own state, as it is given and as it is returned
        pools               the slots that the program has, each as large as a device's part of what
                            it holds
        host                what waits in the host's memory (`offload`); not in the total
        gathered            whole parameters that blocks read, not those that are only cast once a
                            step, and whole accumulators, where only parts are given and
                            returned (fsdp, outer, DualPipe's copies)
        hoisted             what is computed from parameters once a step
        accumulators        of single layers, whose gradients are stacked after the ticks; where
                            stages take turns in being gathered, of the parts of all of them
        sent                what is to be sent next, what of it is under way while the next is made,
                            and what arrives beside a block
        raveled             copies of what a pool that unlike stages share holds raveled
        work                of the block that needs most, its own arrays
        summed              results of sums of gradients over CPU devices, less the values whose
                            room they take, and of small ones on TPUs; all other sums are in place
        reused              less than 0: room of results that are made after the ticks, which values
                            of the ticks have before, on GPUs

    On TPUs all have the padding of tiles.

    Raises:
        PipelineError: as `value_and_grad` does.
    """
    traced = pipe.trace(params, batch, rng=rng, state=state)
    return facts(traced, step_sizes(traced, params, batch, state))


def _program(plan: Plan, program: Program) -> dict[str, object]:
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


def _pools(traced: TracedStep, sizes: Sizes) -> dict[str, object]:
    """Pools, residuals and transfers."""
    code = traced.code
    program, buffers = traced.program, traced.buffers
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


def _xla(program: programs.CompiledProgram) -> dict[str, float | None]:
    """XLA's figures; None where a backend has none."""
    memory, cost = program.memory, program.compiled.cost_analysis() or {}
    sizes = {
        f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes", None)
        for name in ("temp", "host_temp", "argument", "output")
    }
    peak = getattr(memory, "peak_memory_in_bytes", None)
    return {**sizes, "peak_bytes": peak, "flops": cost.get("flops")}


def _compiled(lowered: jax.stages.Lowered, target: Target) -> programs.CompiledProgram:
    """The compiled step, with a reader of its text where there is one."""
    if target.on_gpus:
        with suppress(ValueError):  # a compilation cache has answered, and answers again
            return programs.compile_and_read(lowered)
    return programs.program_of(lowered.compile(), target)


def _read(program: programs.CompiledProgram, schedule: Schedule) -> dict[str, object]:
    """Counts in the text of a program; None where there is no reader for it."""
    found: dict[str, object] = dict.fromkeys(("host_waits", "cycles", "padding_bytes"))
    if isinstance(program, programs.GpuProgram):
        found["host_waits"] = round(host_waits(program, schedule))
    elif isinstance(program, programs.TpuProgram):
        cycles = {purpose.value: count for purpose, count in program.cycles.items()}
        found = {"host_waits": 0, "cycles": cycles, "padding_bytes": program.padding}
    is_read = found["host_waits"] is not None
    collectives = program.collectives if is_read else []
    permutes = [each for each in collectives if each.is_permute]
    groups = {
        "permutes_with_slack": [p for p in permutes if WITH_SLACK in p.start.attributes],
        "permutes": steady(collectives),
        "collectives": [each for each in collectives if not each.is_permute],
    }
    for name, those in groups.items():
        counts = sum(each.overlapped for each in those), len(those)
        found[f"{name}_beside_compute"] = counts if is_read else None
    return found


def host_waits(program: programs.GpuProgram, schedule: Schedule) -> float:
    """The most waits of a device's host in a step; an overlapped pair is two actions."""
    rows = actions_of(schedule)
    most = max(row.total() for row in rows)
    return programs.most_waits(program.predicates, most, by_kind=reduce(or_, rows))


def actions_of(schedule: Schedule) -> list[Counter[str]]:
    """How many actions of each kind each device runs in a step."""
    return [Counter(a.kind.name for cell in row for a in parts(cell)) for row in schedule.rows]


# Several outputs, but no work that could be W's.
_FREE = frozenset(
    {"split", "optimization_barrier", "random_split", "random_unwrap", "threefry2x32"}
)


def fallbacks(input_grad: core.Jaxpr, num_dx: int) -> list[str]:
    """Equations of I with outputs that only W reads.  Only a scan can be cut inside, so I does that
    work too.

    `input_grad` returns `num_dx` gradients, then the stash for W.
    """
    alive = drop_dead(input_grad.replace(outvars=input_grad.outvars[:num_dx]))
    made = {v for eqn in alive.eqns for v in eqn.outvars}
    read = {*variables(v for eqn in alive.eqns for v in eqn.invars), *variables(alive.outvars)}
    found = []
    for eqn in input_grad.eqns:
        name, outs = eqn.primitive.name, eqn.outvars
        if made.isdisjoint(outs):
            continue
        if name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            wanted = [v for v, out in zip(body.outvars, outs, strict=True) if out in made]
            found += fallbacks(body.replace(outvars=wanted), len(wanted))
            continue
        count = sum(v not in read and not isinstance(v, core.DropVar) for v in outs)
        if count and len(outs) > 1 and name not in _FREE:
            found.append(
                f"{name}: {count} of its {len(outs)} results are for W alone, and are computed in I"
            )
    return found
