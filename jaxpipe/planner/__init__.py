"""Plan the fastest pipeline that fits from the costs of layers: stages, schedules, and memory of
the lowered program.
"""

from .candidate import PipelinePlan, Plans

__all__ = ["PipelinePlan", "Plans"]

IMPORTS = (
    "engine",
    "errors",
    "layouts",
    "lowering",
    "prices",
    "program",
    "schedules",
    "table",
    "transforms",
)
