"""What the blocks that run a stage's code have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from ..arrays import Scalar
from ..program.records import Backward, Forward
from ..program.segments import BlockUse
from ..stage.code import StageCode
from .block import Block
from .operands import StageOperand
from .shared_code import SharedCode

Half = TypeVar("Half", Forward[Scalar], Backward[Scalar])


@dataclass(frozen=True)
class StageBlock(Block, Generic[Half]):
    """The code of one kind of stage on one chunk, with the half of the tick's record that it reads."""

    shared: SharedCode
    use: BlockUse
    kind: int  # of stage
    row: Half

    @property
    def code(self) -> StageCode:
        """The stage's."""
        return self.shared.kinds[self.kind]

    @property
    def operand(self) -> StageOperand:
        """The stage's."""
        return self.shared.operands.stages[self.use.block.chunk, self.kind]
