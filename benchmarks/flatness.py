"""Program size and compile time against the number of microbatches: python -m benchmarks.flatness [NAME ...].

Compiles the small model of tests/gpu for H100s that are only described; counts instructions of the optimised program.
"""

from __future__ import annotations

import sys
import time

import jaxpipe as jp
from jaxpipe.lower import Plan
from tests.gpu.programs import compile_step, gpu_fault, operations

MICROBATCHES = (8, 64, 512)
DEVICES = 4


def main(names: list[str]) -> None:
    fault = gpu_fault()
    if fault is not None:
        sys.exit(f"GPU programs cannot be compiled here: {fault}")
    print(f"P = {DEVICES}; blocks of stage code, HLO instructions, seconds to plan and to compile")
    print(f"{'schedule':26}{'M':>5}{'blocks':>8}{'instructions':>14}{'ratio':>7}{'plan s':>8}{'compile s':>11}{'ratio':>7}")
    for name in names or [n for n in jp.schedules.names() if n != "no_pipelining"]:
        base: tuple[int, float] | None = None
        for microbatches in MICROBATCHES:
            schedule = jp.schedules.build(name, devices=DEVICES, microbatches=microbatches)
            begin = time.perf_counter()
            plan = Plan.of(schedule)
            planned = time.perf_counter() - begin
            begin = time.perf_counter()
            compiled = compile_step(schedule)
            seconds = time.perf_counter() - begin
            count = len(operations(compiled.as_text()))
            base = base or (count, seconds)
            blocks = sum(s.size for s in plan.segments)
            print(
                f"{name:26}{microbatches:5}{blocks:8}{count:14}{count / base[0]:7.2f}{planned:8.2f}{seconds:11.1f}{seconds / base[1]:7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
