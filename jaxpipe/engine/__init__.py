"""How long a table takes and what it holds: costs, timelines, critical paths, lock-step execution.

May import `table`.
"""

from .simulate import Steps, simulate_steps
from .timeline import Timeline

__all__ = ["Steps", "Timeline", "simulate_steps"]
