"""torch.distributed.pipelining as a peer: its runtime on our tables and models, and its own tables
as CSV.
"""

from .processes import spawn
from .rank import Split
from .runner import Job, PeerResult, run, run_many
from .tables import own_names, own_table

__all__ = ["Job", "PeerResult", "Split", "own_names", "own_table", "run", "run_many", "spawn"]
