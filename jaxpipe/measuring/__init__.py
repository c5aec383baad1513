"""The costs of stages and layers, in seconds and bytes: each block of the step compiled alone and
timed, or estimated from its flops.
"""

from .blocks import Peak as Peak
from .costs import (
    measure as measure,
    measure_stages as measure_stages,
    traced_memory as traced_memory,
)

IMPORTS = (
    "arrays",
    "engine",
    "errors",
    "inspect",
    "jaxprs",
    "layouts",
    "lowering",
    "model",
    "pipeline",
    "planner",
    "schedules",
    "spmd",
    "stage",
)
