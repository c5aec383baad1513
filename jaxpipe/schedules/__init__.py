"""The catalogue of schedules: `build(name, devices=, microbatches=, chunks=)` and `names()`."""

from .registry import build, names

__all__ = ["build", "names"]
