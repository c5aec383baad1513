"""jaxpipe: pipeline parallelism for JAX in which the schedule is data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import (
    engine as engine,
    errors as errors,
    layouts as layouts,
    schedules,
    table as table,
    transforms as transforms,
)
from .engine.bounds import lower_bound
from .engine.costs import Costs
from .engine.simulate import simulate
from .errors import (
    CheckpointError,
    CostError,
    JaxpipeError,
    PipelineError,
    PlanError,
    ScheduleError,
)
from .layouts.layout import parse_layout
from .table.encoded import Transfers
from .table.kinds import Action, Kind, Offload, Overlap
from .table.placement import Placement
from .table.schedule import Schedule, check
from .transforms.add_gathers import add_gathers
from .transforms.add_transfers import add_recompute, add_transfers
from .transforms.rewrites import merge_backward, split_backward
from .transforms.spread import defer_last, spread_first, spread_last
from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import (
        checkpoint as checkpoint,
        debug as debug,
        distributed as distributed,
        doctor as doctor,
        flax as flax,
        inspect,
        measuring as measuring,
        megatron as megatron,
        modules as modules,
        planner as planner,
        render as render,
    )
    from .model.calls import Context as Context, spread as spread
    from .model.functions import Loss as Loss
    from .model.model import Model as Model
    from .model.replaced import Replaced as Replaced
    from .model.settings import Memory as Memory, Sharding as Sharding
    from .optimizers import per_layer as per_layer
    from .pipeline import Pipeline as Pipeline
    from .planner.layer_cost import LayerCost as LayerCost
    from .planner.plan import plan as plan
    from .vocabulary import VocabEmbedding as VocabEmbedding, VocabHead as VocabHead

    measure = measuring.measure

# What needs JAX is imported on first use, so that tables can be designed and checked where JAX is
# not installed.  So is what may be deleted.
_ON_FIRST_USE = {
    "Context": "model.calls",
    "LayerCost": "planner.layer_cost",
    "Loss": "model.functions",
    "Memory": "model.settings",
    "Model": "model.model",
    "Pipeline": "pipeline",
    "Replaced": "model.replaced",
    "Sharding": "model.settings",
    "VocabEmbedding": "vocabulary",
    "VocabHead": "vocabulary",
    "measure": "measuring",
    "per_layer": "optimizers",
    "plan": "planner.plan",
    "spread": "model.calls",
}
__all__ = [
    *_ON_FIRST_USE,
    "Action",
    "CheckpointError",
    "CostError",
    "Costs",
    "JaxpipeError",
    "Kind",
    "Offload",
    "Overlap",
    "PipelineError",
    "Placement",
    "PlanError",
    "Schedule",
    "ScheduleError",
    "Transfers",
    "add_gathers",
    "add_recompute",
    "add_transfers",
    "check",
    "defer_last",
    "inspect",
    "lower_bound",
    "merge_backward",
    "parse_layout",
    "schedules",
    "simulate",
    "split_backward",
    "spread_first",
    "spread_last",
]

_MODULES = (
    *("checkpoint", "debug", "distributed", "doctor", "flax", "inspect", "measuring", "megatron"),
    *("modules", "planner", "render"),
)


def __dir__() -> list[str]:
    """The names that most programs need: what completion shows."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import the parts that need JAX when they are first asked for."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_ON_FIRST_USE[name]}", __name__), name)
