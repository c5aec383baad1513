"""The time and the memory of a table: one event loop, costs, timelines, critical paths."""

from .lock_step import Steps, simulate_steps
from .simulate import Timeline

__all__ = ["Steps", "Timeline", "simulate_steps"]

IMPORTS = ("errors", "table")
