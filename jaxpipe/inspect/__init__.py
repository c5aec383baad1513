"""Reports of a step: its program, its memory, and the times of its actions.

Nothing that trains imports it.  `hlo` and `programs` read programs that XLA compiled
for GPUs and TPUs; such a program can be compiled on a machine without them.
"""

from .profiling import profile as profile
from .programs import check_collectives as check_collectives
from .step_report import memory as memory, report as report

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
    "storage",
    "table",
)
