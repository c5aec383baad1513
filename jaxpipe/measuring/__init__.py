"""What stages and layers cost, in seconds and bytes: each block of the step compiled alone and
timed, or estimated from its flops.
"""

from .costs import measure as measure
from .costs import measure_layers as measure_layers
from .costs import traced_memory as traced_memory
from .timing import Peak as Peak
