"""From what layers cost to the fastest pipeline that fits: layers to stages, schedules, memory of
the lowered program.
"""

from .result import PipelinePlan, Plans

__all__ = ["PipelinePlan", "Plans"]

IMPORTS = ("engine", "errors", "layouts", "lowering", "program", "schedules", "table", "transforms")
