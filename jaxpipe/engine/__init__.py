"""The time and the memory of a table: one event loop, costs, timelines, critical paths."""

from .simulate import Steps, Timeline, simulate_steps

__all__ = ["Steps", "Timeline", "simulate_steps"]

IMPORTS = ("errors", "table")
