"""jaxpipe: pipeline parallelism for JAX in which the schedule is data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import megatron, render, schedules
from .engine.bounds import lower_bound
from .engine.costs import Costs
from .engine.simulate import Steps, simulate, simulate_steps
from .engine.timeline import Timeline
from .errors import (
    CheckpointError,
    CostError,
    JaxpipeError,
    ParseError,
    PipelineError,
    PlanError,
    ProgramError,
    ScheduleError,
    Violation,
)
from .layouts.balance import balanced_layout, even_layout, split_layers
from .layouts.layout import Layout, LayoutError, check_layout, parse_layout
from .lowering.offload import Offload
from .planner.layer_cost import LayerCost
from .planner.plan import plan
from .planner.result import PipelinePlan, Plans
from .table.action import Action, Cell, Kind, Overlap, parse_action, parse_cell
from .table.activations import Release
from .table.certificate import Certificate, Objective, Proof
from .table.check import check
from .table.placement import Placement
from .table.run_order import Transfers
from .table.schedule import Schedule
from .transforms.add_recompute import add_recompute, remove_recompute
from .transforms.add_transfers import add_transfers, remove_transfers
from .transforms.defer_last import defer_last
from .transforms.merge_backward import merge_backward
from .transforms.split_backward import split_backward
from .transforms.spread_first import spread_first
from .transforms.spread_last import remove_spread, spread_last
from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import inspect
    from .debug import Nonfinite, find_nonfinite
    from .measuring import Peak, measure, traced_memory
    from .model.functions import Context, Loss
    from .model.model import Model
    from .model.settings import Memory, Sharding
    from .model.spread import spread
    from .model.vocabulary import VocabEmbedding, VocabHead
    from .optimizers import per_layer
    from .pipeline import Pipeline

__all__ = [
    "Action",
    "Cell",
    "Certificate",
    "CheckpointError",
    "Context",
    "CostError",
    "Costs",
    "JaxpipeError",
    "Kind",
    "LayerCost",
    "Layout",
    "LayoutError",
    "Loss",
    "Memory",
    "Model",
    "Nonfinite",
    "Objective",
    "Offload",
    "Overlap",
    "ParseError",
    "Peak",
    "Pipeline",
    "PipelineError",
    "PipelinePlan",
    "Placement",
    "PlanError",
    "Plans",
    "ProgramError",
    "Proof",
    "Release",
    "Schedule",
    "ScheduleError",
    "Sharding",
    "Steps",
    "Timeline",
    "Transfers",
    "Violation",
    "VocabEmbedding",
    "VocabHead",
    "add_recompute",
    "add_transfers",
    "balanced_layout",
    "check",
    "check_layout",
    "defer_last",
    "even_layout",
    "find_nonfinite",
    "inspect",
    "lower_bound",
    "measure",
    "megatron",
    "merge_backward",
    "parse_action",
    "parse_cell",
    "parse_layout",
    "per_layer",
    "plan",
    "remove_recompute",
    "remove_spread",
    "remove_transfers",
    "render",
    "schedules",
    "simulate",
    "simulate_steps",
    "split_backward",
    "split_layers",
    "spread",
    "spread_first",
    "spread_last",
    "traced_memory",
]

# What needs JAX is imported on first use, so that tables can be designed and checked where JAX is
# not installed.
_NEEDS_JAX = {
    "Context": ".model.functions",
    "VocabEmbedding": ".model.vocabulary",
    "VocabHead": ".model.vocabulary",
    "spread": ".model.spread",
    "Loss": ".model.functions",
    "Memory": ".model.settings",
    "Model": ".model.model",
    "Sharding": ".model.settings",
    "Nonfinite": ".debug",
    "Peak": ".measuring",
    "Pipeline": ".pipeline",
    "find_nonfinite": ".debug",
    "measure": ".measuring",
    "traced_memory": ".measuring",
    "per_layer": ".optimizers",
}


def __dir__() -> list[str]:
    """The public names: what completion shows."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import the parts that need JAX when they are first asked for."""
    if name == "inspect":
        return import_module(".inspect", __name__)
    if name not in _NEEDS_JAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEEDS_JAX[name], __name__), name)
