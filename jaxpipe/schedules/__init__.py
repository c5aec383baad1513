"""The catalogue of schedules: `build(name, devices=, microbatches=, chunks=)`, `names()`, and
`describe(name)`.
"""

from .registry import Chunks, Entry, Option, build, describe, names

__all__ = ["Chunks", "Entry", "Option", "build", "describe", "names"]

IMPORTS = ("engine", "errors", "solver", "table", "transforms")
