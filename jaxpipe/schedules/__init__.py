"""The catalogue of schedules: `build(name, devices=, microbatches=, chunks=)`, `names()`, and
`describe(name)`.
"""

from .registry import ChunkCounts, NamedSchedule, Option, build, describe, names

__all__ = ["ChunkCounts", "NamedSchedule", "Option", "build", "describe", "names"]

IMPORTS = ("engine", "errors", "solver", "table", "transforms")
