"""The code of a whole model: of every kind of stage, of first and of last."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import Avals
from ..jaxprs.equations import collectives, every_equation
from ..table.effects import Place
from ..table.kinds import KINDS
from ..table.schedule import Schedule
from .code import StageCode


@dataclass(frozen=True)
class ModelCode:
    """The code of the stages of a table, of first and of last."""

    kinds: tuple[StageCode, ...]  # of stages that differ in function, parameters or what they take
    kind_of: tuple[int, ...]  # per stage
    first: StageCode
    last: StageCode | None
    schedule: Schedule

    @property
    def codes(self) -> tuple[StageCode, ...]:
        """The code of all functions."""
        return (*self.kinds, self.first, *(() if self.last is None else (self.last,)))

    @property
    def partitions(self) -> bool:
        """Whether a function partitions itself (`jax.experimental.custom_partitioning`)."""
        jaxprs = (each for code in self.codes for each in (code.hoist, code.forward, code.backward))
        equations = (equation for jaxpr in jaxprs for equation in every_equation(jaxpr))
        return any(equation.primitive.name == "custom_partitioning" for equation in equations)

    @property
    def outer_pools(self) -> dict[Place, Avals]:
        """The values that pools keep for `first` and `last`."""
        y = self.kinds[self.kind_of[-1]].avals[Place.SENT_X]
        return {
            Place.FIRST: self.first.avals[Place.FIRST],
            Place.LAST: y if self.schedule.encoded.spreads_last else (),
            Place.SHARE: () if self.last is None else self.last.avals[Place.STASH],
        }

    @property
    def defers_last(self) -> bool:
        """Whether a later action computes the gradients of the parameters of `last`."""
        return any(KINDS[kind].part_of for kind in self.schedule.encoded.kinds)

    @property
    def loops(self) -> bool:
        """Whether any function has a loop whose end depends on its values."""
        return any(code.loops for code in self.codes)

    def fits(self, code: StageCode, sent: Place) -> bool:
        """Whether the stage that sends this at an end of the model may be of this kind: SENT_X the
        last one, whose output `last` takes, SENT_DX the first one, which takes that of `first`.
        """
        number, place = (-1, sent) if sent is Place.SENT_X else (0, Place.X)
        return self.kinds[self.kind_of[number]].avals[place] == code.avals[place]

    @property
    def permutes(self) -> bool:
        """Whether a function that not all devices run at once permutes, as ring attention does."""
        codes = [*self.kinds, *([] if self.schedule.encoded.spreads_first else [self.first])]
        jaxprs = [jaxpr for code in codes for jaxpr in (code.forward, code.backward)]
        if self.last is not None and not self.schedule.encoded.spreads_last:
            jaxprs.append(self.last.backward)
        return any("ppermute" in (name for name, _ in collectives(jaxpr)) for jaxpr in jaxprs)
