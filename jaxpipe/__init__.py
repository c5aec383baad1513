"""jaxpipe: pipeline parallelism for JAX in which the schedule is data."""

from . import schedules
from .action import Action, Cell, Kind, Overlap, parse_action, parse_cell
from .check import check
from .costs import Costs
from .errors import CostError, JaxpipeError, ParseError, PipelineError, ScheduleError, Violation
from .memory import Release
from .placement import Placement
from .runorder import Transfers
from .schedule import Schedule
from .simulate import simulate
from .steps import Steps, simulate_steps
from .timeline import Timeline

__all__ = [
    "Action",
    "Cell",
    "CostError",
    "Costs",
    "JaxpipeError",
    "Kind",
    "Overlap",
    "ParseError",
    "PipelineError",
    "Placement",
    "Release",
    "Schedule",
    "ScheduleError",
    "Steps",
    "Timeline",
    "Transfers",
    "Violation",
    "check",
    "parse_action",
    "parse_cell",
    "schedules",
    "simulate",
    "simulate_steps",
]
