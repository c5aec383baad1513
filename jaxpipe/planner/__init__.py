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
    "model",  # and the pipeline: when one is made of a plan
    "pipeline",
    "prices",
    "program",
    "schedules",
    "table",
    "transforms",
)
