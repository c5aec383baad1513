"""What stages and layers cost, in seconds and bytes: each block of the step compiled alone and
timed, or estimated from its flops.
"""

from .measure import measure as measure
from .memory import traced_memory as traced_memory
from .peak import Peak as Peak
from .stages import measure_stages as measure_stages
