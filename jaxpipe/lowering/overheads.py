"""The times of a program besides the stages' work: three numbers that can be measured on the user's
machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

# Assumed seconds of a stage's forward: one layer of a model of some billion parameters.
FORWARD = 5e-3
GUESSES = "guessed; `jaxpipe doctor` measures them"


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Times in seconds, or in the unit of the costs (`in_unit`).

    The defaults are guesses, none of them measured on a GPU.  `jaxpipe doctor` measures them and
    writes them into a file (`lowering.prices`).

    Args:
        predicate: the time of a block's predicate, true or false.  As a node of a
            CUDA graph it takes about as long as some kernel launches; on the host (`ON_HOST`) it
            takes a copy of the flag and a wait.
        hop: the time of a transfer that a device waits for: 32 MiB over one direction of NVLink on
            an H100.
        sent: the compute time that a block loses to a transfer that runs during it: memory
            bandwidth, and processors that copy.
        source: where the times come from.
    """

    predicate: float = 3e-6
    hop: float = 100e-6
    sent: float = 15e-6
    source: str = field(default=GUESSES, compare=False)

    def in_unit(self, seconds: float) -> Overheads:
        """The same times where one unit takes so many seconds."""
        times = {name: getattr(self, name) / seconds for name in ("predicate", "hop", "sent")}
        return replace(self, **times)

    def __str__(self) -> str:
        times = (
            f"{name} {getattr(self, name) * 1e6:.3g} us" for name in ("predicate", "hop", "sent")
        )
        return f"{', '.join(times)} ({self.source})"

    @property
    def collective(self) -> float:
        """Time of a predicate around a collective action.  It is in no CUDA graph, and no block
        runs during it.
        """
        return self.predicate + self.hop


GUESSED = Overheads()
# Blocks that hold collectives (tensor parallelism) are in no CUDA graph, so the host decides: 10 to
# 20 us.
ON_HOST = Overheads(predicate=15e-6)
# A TPU decides by itself, between two operations of its own sequence: a guess.
TPU_PREDICATE = 1e-6
NO_OVERHEADS = Overheads(predicate=0.0, hop=0.0, sent=0.0)
