"""A timeline of what ran beside the one that was planned: where the step lost time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from ..errors import ScheduleError
from ..table.kinds import Kind, Value, makers
from ..table.run_order import Transfers
from ..table.schedule import Schedule
from .costs import Costs
from .critical_path import critical_chain

_DGRAD, _WGRAD = makers(Value.INPUT_GRAD), makers(Value.WEIGHT_GRAD)
_NOTHING = 0.005  # of the planned makespan: less is not worth a word in the sentence


class Run(Protocol):
    """What is compared: a `Timeline`."""

    @property
    def schedule(self) -> Schedule:
        """The table."""

    @property
    def costs(self) -> Costs:
        """Times of its actions."""

    @property
    def transfers(self) -> Transfers:
        """How SEND and RECV behave."""

    @property
    def starts(self) -> tuple[float, ...]:
        """Per action, its start."""

    @property
    def ends(self) -> tuple[float, ...]:
        """Per action, its end."""

    @property
    def makespan(self) -> float:
        """End of the last action."""

    @property
    def busy(self) -> tuple[float, ...]:
        """Per device, the time in compute actions."""

    @property
    def idle(self) -> tuple[tuple[float, float, float], ...]:
        """Per device, idle time by cause."""


class Loss(NamedTuple):
    """Time that the run's critical path spent beyond the plan, and on what."""

    cause: str
    time: float


@dataclass(frozen=True)
class Comparison:
    """What ran against what was planned; `str()` is a sentence and tables.

    Attributes:
        ran: the timeline of a run (`Pipeline.profile`).
        planned: the same table simulated.
    """

    ran: Run
    planned: Run

    def __post_init__(self) -> None:
        ran, planned = self.ran.schedule, self.planned.schedule
        if (ran.placement, ran.num_microbatches) != (planned.placement, planned.num_microbatches):
            raise ScheduleError(
                f"a run of {ran.num_stages} stages and {ran.num_microbatches} microbatches "
                "cannot be compared with a plan of "
                f"{planned.num_stages} stages and {planned.num_microbatches} microbatches, or of "
                "another placement; "
                "simulate the run's table"
            )

    @property
    def error(self) -> float:
        """How far the plan's makespan is from the run's, as a share of the run's; below 0 where the
        run took longer.
        """
        return self.planned.makespan / self.ran.makespan - 1 if self.ran.makespan else 0.0

    @cached_property
    def losses(self) -> tuple[Loss, ...]:
        """Along the run's critical path, what took longer than planned: largest first.  They add up
        to the whole difference.

        Actions by stage; transfers (a device waited for a message after it was sent); the host, or
        the device's own overhead (nothing was waited for); and what the plan spends on its own
        critical path beyond the planned times along the run's.
        """
        table = self.ran.schedule.encoded
        at_once = Costs(transfer=0).for_stages(table.num_stages)
        chain = critical_chain(table, self.ran.transfers, self.ran.ends, at_once)
        transfer = self.planned.costs.for_stages(table.num_stages).transfer
        found: dict[str, float] = {}
        planned_path = 0.0
        last_end, last_device, last_stage = 0.0, -1, 0
        for number in chain:
            begin, end = self.ran.starts[number], self.ran.ends[number]
            stage, device = int(table.stage[number]), int(table.device[number])
            crossed = last_device not in (-1, device)
            wait = transfer[last_stage] if crossed else 0.0
            cause = "transfers" if crossed else "gaps between actions of a device"
            found[cause] = found.get(cause, 0.0) + (begin - last_end) - wait
            length = self._planned_length(number)
            slower = f"stage {stage}"
            found[slower] = found.get(slower, 0.0) + (end - begin) - length
            planned_path += wait + length
            last_end, last_device, last_stage = end, device, stage
        found["another critical path than planned"] = planned_path - self.planned.makespan
        return tuple(
            sorted(
                (Loss(cause, time) for cause, time in found.items()),
                key=lambda loss: -abs(loss.time),
            )
        )

    def _planned_length(self, number: int) -> float:
        """The planned time of an action of the run (of a pair: of both halves); a whole backward
        may be planned as two halves.
        """
        table = self.ran.schedule.encoded
        halves = {number, int(table.last_half[number])}
        if len(halves) > 1:
            plan = [self._of(n) for n in halves]
            begin, end = min(b for b, _ in plan), max(e for _, e in plan)
            return end - begin
        begin, end = self._of(number)
        return end - begin

    def _of(self, number: int) -> tuple[float, float]:
        """Planned start and end of an action of the run."""
        ran, plan = self.ran.schedule.encoded, self.planned.schedule.encoded
        kind, stage, microbatch = (
            Kind(int(ran.kind[number])),
            int(ran.stage[number]),
            int(ran.microbatch[number]),
        )
        at = int(plan.at[kind, stage, microbatch])
        if at >= 0:
            return self.planned.starts[at], self.planned.ends[at]
        if kind in _DGRAD and kind in _WGRAD:  # a whole backward, which the plan may have in halves
            one, other = (
                int(plan.at[half, stage, microbatch])
                for kinds in (_DGRAD, _WGRAD)
                for half in kinds
                if half is not kind
            )
            if one >= 0 and other >= 0:
                took = sum(self.planned.ends[n] - self.planned.starts[n] for n in (one, other))
                return self.planned.starts[one], self.planned.starts[one] + took
        raise ScheduleError(
            f"the plan has no {ran.text(number)}, which ran; simulate the run's table"
        )

    @property
    def sentence(self) -> str:
        """Where the time went, in a sentence."""
        ran, planned = self.ran.makespan, self.planned.makespan
        more = ran - planned
        worth = [loss for loss in self.losses if abs(loss.time) > _NOTHING * planned]
        share = f"{abs(more) / planned if planned else 0:.1%} {'more' if more >= 0 else 'less'}"
        words = f"the step took {ran:.4g}, {share} than the {planned:.4g} planned"
        if not worth:
            return words
        return f"{words}: " + ", ".join(f"{loss.time:+.3g} in {loss.cause}" for loss in worth[:4])

    def rows(self) -> list[tuple[str, ...]]:
        """Per device: busy and idle time, run and planned; below `COLUMNS`."""
        found: list[tuple[str, ...]] = []
        for device in range(self.ran.schedule.num_devices):
            busy, plan = self.ran.busy[device], self.planned.busy[device]
            idle, plan_idle = sum(self.ran.idle[device]), sum(self.planned.idle[device])
            ratio = f"{busy / plan:.3f}" if plan else "-"
            found.append(
                (
                    str(device),
                    f"{busy:.4g}",
                    f"{plan:.4g}",
                    ratio,
                    f"{idle:.4g}",
                    f"{plan_idle:.4g}",
                )
            )
        return found

    def __str__(self) -> str:
        lines = [COLUMNS, *self.rows()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
        table = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        ]
        return "\n".join([self.sentence, *table])


COLUMNS = ("device", "busy", "planned", "ratio", "idle", "planned")
