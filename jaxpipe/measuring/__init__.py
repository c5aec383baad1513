"""What stages and layers cost, in seconds and bytes: each block of the step compiled alone and
timed, or estimated from its flops.
"""

from .costs import measure as measure
from .costs import measure_stages as measure_stages
from .costs import traced_memory as traced_memory
from .timing import Peak as Peak

IMPORTS = (
    "arrays",
    "engine",
    "errors",
    "inspect",
    "jaxprs",
    "lowering",
    "model",
    "pipeline",
    "planner",
    "schedules",
    "spmd",
    "stage",
    "table",
)
