"""From what layers cost to the fastest pipeline that fits: layers to stages, schedules, memory of
the lowered program.

May import `layouts`, `schedules`, `lowering` and what they may.
"""

from .result import PipelinePlan, Plans

__all__ = ["PipelinePlan", "Plans"]
