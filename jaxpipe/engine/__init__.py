"""How long a table takes and what it holds: one event loop, costs, timelines, critical paths."""

from .simulate import Steps, simulate_steps
from .timeline import Timeline

__all__ = ["Steps", "Timeline", "simulate_steps"]

IMPORTS = ("errors", "table")
