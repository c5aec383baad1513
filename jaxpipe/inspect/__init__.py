"""Reports of a step: its program, its memory, and the times of its actions.

Nothing that trains imports it.  `hlo` and `programs` read programs that XLA compiled
for GPUs and TPUs; such a program can be compiled on a machine without them.
"""

from .programs import check_collectives as check_collectives
from .step_memory import memory as memory
from .step_report import profile as profile, report as report

__all__ = ["check_collectives", "memory", "profile", "report"]

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
    "steps",
    "storage",
    "table",
)
