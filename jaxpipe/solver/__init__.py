"""What needs OR-tools, the extra `jaxpipe[solver]`: shorter tables, proofs that none is shorter,
and steady states of least period.
"""

from .period import Steady as Steady
from .period import least_period as least_period
from .shorten import Improved as Improved
from .shorten import improve as improve

IMPORTS = ("engine", "table")
