"""What the blocks that run a stage's code have in common."""

from __future__ import annotations

import abc
from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from ..arrays import Leaves, Scalar
from ..jaxprs import InSlots, run_in_slots
from ..program.records import Backward, Forward
from ..program.templates import BlockUse
from ..stage.code import StageCode
from .operands import StageOperand
from .shared_code import CodeBlock
from .state import State

Half = TypeVar("Half", Forward[Scalar], Backward[Scalar])


# Hands out the stage's code to run, with the state before it; is given what it returns, with the
# state by then; returns the state.
Steps: TypeAlias = Generator[tuple[InSlots, State], tuple[Leaves, State], State]


def last_step(steps: Steps, outs: Leaves, state: State) -> State:
    """The state after a block whose code has returned these."""
    try:
        steps.send((outs, state))
    except StopIteration as done:
        after: State = done.value
        return after
    raise AssertionError("a block runs its stage's code once")


@dataclass(frozen=True)
class StageBlock(CodeBlock, Generic[Half]):
    """The code of one kind of stage on one chunk, with the half of the tick's record that
    it reads.
    """

    use: BlockUse
    kind: int  # of stage
    row: Half

    @property
    def code(self) -> StageCode:
        """The stage's."""
        return self.shared.kinds[self.kind]

    @abc.abstractmethod
    def steps(self, state: State) -> Steps:
        """`run`, up to the stage's code and on from it."""

    def run(self, state: State) -> State:
        """Run it."""
        steps = self.steps(state)
        code, state = next(steps)
        return last_step(
            steps,
            run_in_slots(code.jaxpr, code.arguments, reads=code.reads, writes=code.writes),
            state,
        )

    @property
    def operand(self) -> StageOperand:
        """The stage's."""
        return self.shared.operands.stages[self.use.block.chunk, self.kind]
