"""jaxpipe: pipeline parallelism for JAX in which the schedule is data."""

from .action import Action, Cell, Kind, Overlap, parse_action, parse_cell
from .errors import JaxpipeError, ParseError, PipelineError, ScheduleError, Violation
from .placement import Placement
from . import schedules
from .schedule import Schedule

__all__ = [
    "Action",
    "Cell",
    "JaxpipeError",
    "Kind",
    "Overlap",
    "ParseError",
    "PipelineError",
    "Placement",
    "Schedule",
    "ScheduleError",
    "Violation",
    "parse_action",
    "parse_cell",
    "schedules",
]
