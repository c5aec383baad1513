"""What stages and layers cost, in seconds and bytes: each block of the step compiled alone and
timed, or estimated from its flops.
"""

from .layers import measure_layers as measure_layers
from .memory import traced_memory as traced_memory
from .peak import Peak as Peak
from .stages import measure as measure
