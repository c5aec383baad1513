"""What a step is and does: its program, its memory, and when its actions ran.

Nothing that trains imports it.  `hlo`, `moves`, `collectives`, `waits`, `gpu_program` and
`tpu_program` read programs that XLA compiled for GPUs and TPUs; such a program can be compiled
where there is neither.
"""

from .step_memory import memory as memory
from .step_profile import profile as profile
from .step_report import report as report

__all__ = ["memory", "profile", "report"]

IMPORTS = (
    "arrays",
    "engine",
    "errors",
    "jaxprs",
    "lowering",
    "model",
    "pipeline",
    "planner",
    "program",
    "schedules",
    "spmd",
    "stage",
    "table",
)
