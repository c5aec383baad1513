"""jaxpipe: pipeline parallelism for JAX in which the schedule is data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import megatron, render, schedules
from .action import Action, Cell, Kind, Overlap, parse_action, parse_cell
from .check import check
from .costs import Costs
from .errors import CheckpointError, CostError, JaxpipeError, ParseError, PipelineError, ScheduleError, Violation
from .layout import Layout, LayoutError, check_layout, parse_layout
from .memory import Release
from .passes.add_transfers import add_transfers, remove_transfers
from .passes.merge_backward import merge_backward
from .passes.split_backward import split_backward
from .placement import Placement
from .runorder import Transfers
from .schedule import Schedule
from .simulate import simulate
from .splits import balanced_layout, even_layout, split_layers
from .steps import Steps, simulate_steps
from .timeline import Timeline

if TYPE_CHECKING:
    from .debug import Nonfinite, find_nonfinite
    from .functions import Context, Loss, Prefer
    from .pipeline import Pipeline

__all__ = [
    "Action",
    "Cell",
    "CheckpointError",
    "Context",
    "CostError",
    "Costs",
    "JaxpipeError",
    "Kind",
    "Layout",
    "LayoutError",
    "Loss",
    "Nonfinite",
    "Overlap",
    "ParseError",
    "Pipeline",
    "PipelineError",
    "Placement",
    "Prefer",
    "Release",
    "Schedule",
    "ScheduleError",
    "Steps",
    "Timeline",
    "Transfers",
    "Violation",
    "add_transfers",
    "balanced_layout",
    "check",
    "check_layout",
    "even_layout",
    "find_nonfinite",
    "megatron",
    "merge_backward",
    "parse_action",
    "parse_cell",
    "parse_layout",
    "remove_transfers",
    "render",
    "schedules",
    "simulate",
    "simulate_steps",
    "split_backward",
    "split_layers",
]

# What needs JAX is imported on first use, so that tables can be designed and checked where JAX is not installed.
_NEEDS_JAX = {
    "Context": ".functions",
    "Loss": ".functions",
    "Nonfinite": ".debug",
    "Pipeline": ".pipeline",
    "Prefer": ".functions",
    "find_nonfinite": ".debug",
}


def __getattr__(name: str) -> Any:
    """Import the parts that need JAX when they are first asked for."""
    if name not in _NEEDS_JAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEEDS_JAX[name], __name__), name)
