"""What a compiled step is: the numbers of `Pipeline.compile_report`."""

from __future__ import annotations

from typing import Any

from .lower import Plan
from .passes.assign_slots import Liveness
from .passes.program_time import Sync, cost_matrix, program_makespan


def report(plan: Plan, compiled: Any, *, compile_seconds: float) -> dict[str, Any]:
    """Describe a compiled step."""
    program = plan.program(Liveness())
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    costs = cost_matrix(plan.ticks)
    transfers = [len(p.pairs) * s.repeats for s in plan.segments for position in s.positions for p in position.permutes]
    return {
        "ticks": program.num_ticks,
        "segments": [str(s) for s in plan.segments],
        "blocks": sum(s.size for s in plan.segments),
        "slots": program.slots,
        "transfers": sum(transfers),
        "makespan_pairs": program_makespan(costs, plan.segments, sync=Sync.PAIRS),
        "makespan_everybody": program_makespan(costs, plan.segments, sync=Sync.EVERYBODY),
        "temp_bytes": getattr(memory, "temp_size_in_bytes", None),
        "argument_bytes": getattr(memory, "argument_size_in_bytes", None),
        "output_bytes": getattr(memory, "output_size_in_bytes", None),
        "flops": cost.get("flops"),
        "compile_seconds": compile_seconds,
    }
