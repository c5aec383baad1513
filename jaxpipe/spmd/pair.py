"""The block of an overlapped pair: a forward and a backward as one piece of code, so that what one
awaits the other covers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..jaxprs import run_both_in_slots
from .backward import RunBackward
from .block import Block
from .forward import RunForward
from .stage_block import last_step
from .state import State


@dataclass(frozen=True)
class RunPair(Block):
    """F and B of an OVERLAP_F_B cell under one predicate, layer by layer together (DualPipe,
    DeepSeek-V3 section 3.2.1).

    The backward reads its residuals before the forward writes its own: the pools are the same.
    """

    forward: RunForward
    backward: RunBackward

    @property
    def together(self) -> bool:
        """Whether all devices run it at once."""
        return self.forward.together

    def writes(self, state: State) -> State:
        """What either writes."""
        return self.forward.writes(state).updated(self.backward.writes(state))

    def run(self, state: State) -> State:
        """Run both."""
        forward = self.forward.steps(state)
        ahead, state = next(forward)
        backward = self.backward.steps(state)
        back, _ = next(backward)
        back_outs, ahead_outs = run_both_in_slots(back, ahead)
        return last_step(backward, back_outs, last_step(forward, ahead_outs, state))
