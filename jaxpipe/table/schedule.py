"""The table, for every device the ordered list of actions it performs; and `check`, whose error
lists all rules that a table breaks and marks their cells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import cast

import numpy as np

from ..errors import MAX_COUNT, ScheduleError, Violation, listed, quoted, set_typed, typed
from .clock import EventLoop
from .encoded import Encoded, IntArray, Transfers, encode
from .gathered import run_numbers
from .kinds import SHARES, Action, Cell, Release, Row, parts
from .order import RunOrder, run_order, waiting
from .placement import Placement
from .rules import broken_rules, deadlocks, over_cap
from .text import (
    UNNUMBERED,
    cell_label,
    drawn,
    plain_rows,
    rows_from_csv,
    rows_from_json,
    rows_to_csv,
    table_from_json,
    table_to_json,
)


class Objective(Enum):
    """The time that a schedule makes short: the whole step, or the time of a microbatch in its
    steady state.
    """

    MAKESPAN = "makespan"
    PERIOD = "period"


class Proof(Enum):
    """The source of a bound."""

    RELAXATION = "relaxations, for any schedule"
    SOLVER = "CP-SAT, for any schedule"


@dataclass(frozen=True)
class Certificate:
    """Facts of a result of `build("auto", ...)`: its makespan or period, and a bound that no
    schedule goes below.

    Args:
        objective: what `value` and `bound` are.
        value: of the schedule, in the unit of its costs.
        bound: no schedule for these costs, this placement (a loop and a V, where none was given)
            and this cap is below it, whether its backwards are whole, split or in overlapped pairs.
            Under a cap, tables with R are not meant: they hold less and compute more.
        proof: where the bound comes from.
        max_activations: the cap that it holds for; None for any memory.

    >>> print(Certificate(Objective.MAKESPAN, 57, 54, Proof.RELAXATION, max_activations=3))
    makespan 57, at most 5.56% above the optimum for 3 activations a device without R (bound 54:
    relaxations, for any schedule)
    """

    objective: Objective
    value: float
    bound: float
    proof: Proof
    max_activations: int | None = None

    def __post_init__(self) -> None:
        """ScheduleError for a value of another type."""
        set_typed(self, ScheduleError)

    @property
    def gap(self) -> float:
        """By what fraction of the bound the value is above it, at most."""
        if not self.bound:
            return float(self.value > 0)
        return max(0.0, self.value / self.bound - 1)

    @property
    def is_optimal(self) -> bool:
        """Whether the value is the bound, up to the rounding of sums of floats."""
        return self.gap < 1e-9

    def __str__(self) -> str:
        cap, proof = quoted(self.max_activations), self.proof.value
        memory = f"{cap} activations a device without R"
        if self.max_activations is None:
            memory = "any memory"
        above = "the optimum"
        if not self.is_optimal:
            above = f"at most {self.gap:.2%} above {above}"
        head = f"{self.objective.value} {self.value:g}, {above} for {memory}"
        return f"{head} (bound {self.bound:g}: {proof})"


@dataclass(frozen=True)
class Schedule:
    """A static schedule table: `rows[device]` are that device's actions in order, None for an idle
    step.

    Idle cells are for readers only: no executor waits for them.  A schedule without backward
    actions is `forward_only`. A table may be invalid (a draft, a broken file); `jaxpipe.check`
    raises an error for one that is.

    >>> import jaxpipe as jp
    >>> s = jp.schedules.build("1f1b", devices=2, microbatches=2)
    >>> str(s.rows[1][0]), s.stage_to_device
    ('1F0', (0, 1))
    """

    rows: tuple[Row, ...]
    placement: Placement
    num_microbatches: int
    name: str = field(default="", compare=False)
    # K: microbatch m is slice m % K of sequence m // K
    slices: int = field(default=1, kw_only=True)
    # what `build("auto")` knows of these rows
    certificate: Certificate | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """ScheduleError names everything in the rows that is no cell."""
        set_typed(self, ScheduleError, but=("rows",))
        object.__setattr__(self, "rows", plain_rows(self.rows))
        count, slices = quoted(self.num_microbatches), quoted(self.slices)
        if not 0 <= self.num_microbatches <= MAX_COUNT:
            most = f"{MAX_COUNT:,}"
            raise ScheduleError(f"num_microbatches must be 0 to {most}, not {count}")
        if self.slices < 1 or self.num_microbatches % self.slices:
            must = f"slices={slices} must be at least 1 and divide the {count} microbatches"
            raise ScheduleError(f"{must}: each of them is a slice of a sequence")

    @classmethod
    @typed()
    def from_rows(
        cls,
        rows: Iterable[Iterable[Cell]],
        *,
        placement: Placement | None = None,
        num_microbatches: int | None = None,
        name: str = "",
        slices: int = 1,
    ) -> Schedule:
        """Make a schedule from rows of actions; where placement or M is not given, the actions
        determine it.

        ScheduleError where a stage number is far beyond what the number of actions allows (a typing
        error in a file).
        """
        table = plain_rows(rows)
        if placement is None:
            placement = _placement_of(table)
        if num_microbatches is None:
            numbers = (a.microbatch for row in table for c in row for a in parts(c))
            num_microbatches = 1 + max(numbers, default=-1)
        return cls(table, placement, num_microbatches, name, slices=slices)

    @classmethod
    def from_csv(cls, text: str, *, name: str = "", slices: int = 1) -> Schedule:
        """Read torch's CSV: one line per device, one action per cell, an empty cell where idle; the
        actions give placement and M.

        The CSV is torch's, so it does not hold the number of slices: `slices` gives it.

        Reads compute-only and compute-and-transfer tables.  torch's UNSHARD, RESHARD and
        REDUCE_GRAD, which have no number, are U, D and X with that of their run. ScheduleError
        lists every cell that is not an action, with its line and column.
        """
        return numbered(cls.from_rows(rows_from_csv(text), name=name, slices=slices))

    def to_csv(self) -> str:
        """Write torch's CSV: one line per device, one action per cell, an empty cell where idle.

        A table with R or L is written too, but torch's reader knows neither (`remove_recompute` and
        `remove_spread` take them out).  U, D and X are UNSHARD, RESHARD and REDUCE_GRAD there.
        """
        return rows_to_csv(self.rows)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read what `to_json` writes; ScheduleError lists every field of another type, or every
        cell that is wrong.
        """
        return json_table(**table_from_json(text))

    def to_json(self) -> str:
        """Write one JSON object with the rows, placement, number of microbatches, slices and
        name.
        """
        fields = {
            "name": self.name,
            "num_devices": self.placement.num_devices,
            "num_microbatches": self.num_microbatches,
            "stage_to_device": self.stage_to_device,
        }
        slices = {"slices": self.slices} if self.slices > 1 else {}
        return table_to_json({**fields, **slices}, self.rows)

    @property
    def num_devices(self) -> int:
        """P, the number of devices (rows)."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """S, the number of stages."""
        return self.placement.num_stages

    @property
    def num_chunks(self) -> int:
        """V, the largest number of stages on one device."""
        return self.placement.num_chunks

    @property
    def stage_to_device(self) -> tuple[int | tuple[int, ...], ...]:
        """Per stage, the device that holds it; a tuple of devices in a bidirectional schedule."""
        return self.placement.stage_to_device

    @cached_property
    def encoded(self) -> Encoded:
        """The table as integer arrays (made once; what the checker, the simulator and the passes
        read).
        """
        return encode(self.rows, self.num_stages, self.num_microbatches, self.slices)

    @cached_property
    def chunks(self) -> IntArray:
        """Per action of `encoded`, the chunk that its stage is on its device; 0 for an action that
        belongs to no stage.
        """
        table = self.encoded
        chunk = np.full((table.num_devices, table.num_stages), -1, np.int64)
        for device, stages in enumerate(self.placement.stages_of):
            chunk[device, list(stages)] = np.arange(len(stages))
        return np.where(table.shares, 0, chunk[table.device, table.stage])

    @cached_property
    def forward_only(self) -> bool:
        """True where no action is a backward (B, I or W): a table for evaluation."""
        return self.encoded.forward_only

    @cached_property
    def has_transfers(self) -> bool:
        """True where some action is a SEND or RECV, as after `add_transfers`."""
        return self.encoded.has_transfers

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Every broken rule, where both sides of a transfer wait (`jaxpipe.check` raises them and
        adds the memory cap).
        """
        return self.violations_under(Transfers.RENDEZVOUS)

    @typed()
    def violations_under(self, transfers: Transfers) -> tuple[Violation, ...]:
        """Every broken rule where SEND and RECV behave as `transfers` says; the work is
        done once.
        """
        found = deadlocks(self.encoded, self.run_order, transfers)
        return (*self._broken_rules, *found)

    @cached_property
    def _broken_rules(self) -> tuple[Violation, ...]:
        return broken_rules(self.encoded, self.placement)

    @typed()
    def run_order(self, transfers: Transfers) -> RunOrder:
        """An order in which all actions can run, or the deadlocks.

        An order that is valid where both sides of a transfer wait is valid where they do not, too.
        """
        if transfers is Transfers.RENDEZVOUS or not self._strictest_order.cycles:
            return self._strictest_order
        return run_order(self.encoded, transfers)

    @cached_property
    def _strictest_order(self) -> RunOrder:
        return run_order(self.encoded, Transfers.RENDEZVOUS)

    def actions(self) -> Iterable[tuple[int, int, Action]]:
        """Yield (device, position in its row, action), the halves of an overlapped pair one after
        the other.
        """
        for device, row in enumerate(self.rows):
            for position, cell in enumerate(row):
                for action in parts(cell):
                    yield device, position, action

    def with_rows(self, rows: Sequence[Sequence[Cell]]) -> Schedule:
        """The same placement, microbatches and name with other rows."""
        # What rows are is checked once, where the schedule is made.
        return replace(self, rows=cast("tuple[Row, ...]", rows), certificate=None)

    def __str__(self) -> str:
        return grid(self)


@typed()
def json_table(
    *,
    rows: Sequence[Sequence[str | None]] = (),
    stage_to_device: Sequence[int | Sequence[int]] = (),
    num_devices: int = 0,
    num_microbatches: int = 0,
    name: str | None = None,
    slices: int | None = None,
    **_: object,
) -> Schedule:
    """The schedule of a JSON object with these fields."""
    placement = Placement.explicit(stage_to_device, devices=num_devices)
    slices = 1 if slices is None else slices
    cells = plain_rows(rows_from_json(rows))
    return numbered(Schedule(cells, placement, num_microbatches, name or "", slices=slices))


def numbered(schedule: Schedule) -> Schedule:
    """The table with the numbers of their runs for each U, D and X that has none yet (0 for a run
    without an action).
    """
    table = schedule.encoded
    if (table.microbatch != UNNUMBERED).all():
        return schedule
    numbers, rows = run_numbers(table), list(map(list, schedule.rows))
    for i in np.flatnonzero(table.microbatch == UNNUMBERED).tolist():
        device, position = table.cell_of(i)
        number = max(0, int(numbers[i]))
        rows[device][position] = table.action(i)._replace(microbatch=number)
    return schedule.with_rows(rows)


def _placement_of(rows: tuple[Row, ...]) -> Placement:
    """Each stage on the devices whose rows hold it; a stage in no row is put on device 0 (`check`
    reports it).
    """
    found: dict[int, set[int]] = {}
    cells = [(device, cell) for device, row in enumerate(rows) for cell in row]
    actions = [(device, action) for device, cell in cells for action in parts(cell)]
    for device, action in actions:
        if action.kind not in SHARES:  # the number of those is the device's
            found.setdefault(action.stage, set()).add(device)
    stages = 1 + max(found, default=-1)
    if stages > 1000 + len(actions):  # each stage has an F at least
        holds = f"the table holds {len(actions)} actions; possible typo"
        raise ScheduleError(f"stage {stages - 1} asks for {stages} stages, but {holds}")
    # DualPipe's convention: stage s is chunk 0 of device s and chunk 1 of device P - 1 - s.
    homes = []
    for stage in range(stages):
        devices = sorted(found.get(stage, {0}))
        homes.append(tuple(sorted(devices, key=stage.__ne__)))
    return Placement(tuple(homes), len(rows))


def grid(
    schedule: Schedule,
    *,
    marked: Collection[tuple[int, int]] = (),
    most_columns: int | None = None,
) -> str:
    """Draw rows as text, each action in the first unit time step that its inputs allow.

    `marked` holds (device, position) of cells to point at: they are bracketed and their line ends
    in `<-- ERROR HERE`. A table that cannot run (a deadlock) or that has transfers
    is drawn by position instead of by time. Of more than `most_columns` columns, those from around
    the first mark on are drawn, or the first ones where nothing is marked.

    With several slices a sequence, `2F1.3` is slice 3 of sequence 1.
    """
    columns = _columns(schedule)
    marks = {(d, columns[d][p]) for d, p in marked if p in columns[d]}
    cells = [
        {column: cell_label(row[p], schedule.slices) for p, column in places.items()}
        for row, places in zip(schedule.rows, columns, strict=True)
    ]
    return drawn(cells, marks, most_columns=most_columns)


def _columns(schedule: Schedule) -> list[dict[int, int]]:
    """Per device, the time step to draw at by position, idle ones left out.

    Every cell, idle ones too, takes one step and comes at least one step after what it needs.
    """
    table = schedule.encoded
    places = [{p: p for p, cell in enumerate(row) if cell} for row in schedule.rows]
    if table.too_sparse or not table.is_compute.all():
        return places
    found = schedule.run_order(Transfers.ASYNC)
    if found.cycles:
        return places
    need, together = waiting(table, Transfers.ASYNC)
    # An action lasts until the next of its row, with the idle cells between them.
    duration = np.diff(table.position, append=0)
    free = [int(table.position[a]) if a < b else 0 for a, b in pairwise(table.first)]
    loop = EventLoop((table.device, need, 1 - duration[need], duration), free, groups=together)
    loop.run(found.order)
    for i, half in enumerate(table.last_half.tolist()):
        places[loop.device[i]][int(table.position[i])] = int(loop.starts[half])
    return places


MOST_COLUMNS = 60  # of a grid in an error


@typed()
def check(
    schedule: Schedule,
    *,
    transfers: Transfers = Transfers.RENDEZVOUS,
    max_activations: int | Sequence[int] | None = None,
    release: Release = Release.WEIGHT_GRAD,
) -> Schedule:
    """Return the schedule if it is valid, or raise ScheduleError with every broken rule in
    `.violations`.

    The rules are named range, duplicate, completeness, placement, order, slice, reverse, overlap,
    transfer, gather, reduce, deadlock and memory.  The error shows the grid with the cells marked
    `<-- ERROR HERE`; a deadlock is shown as the cycle of devices that wait for each other.

    With several slices a sequence, forwards of a sequence run in the order of its slices on every
    stage (slice), and backwards in reverse order (reverse).

    In a table with U, every F, B, I, W and R runs between a U of its stage and the D of that one
    (gather), and in a table with U or X, an X comes after each B and W of its stage (reduce).

    Args:
        schedule: the table, with or without SEND and RECV.
        transfers: how SEND and RECV behave where it runs.  RENDEZVOUS is the strictest: a table
            that cannot deadlock there cannot deadlock anywhere.  It makes no difference to a table
            without SEND and RECV.
        max_activations: cap on the activations (stage and microbatch pairs between F and B or W)
            that a device may hold at once; one number, or one for each device.
        release: whether activations die at W (the default) or already at I, where the backward is
            split.

    Raises:
        ScheduleError: a rule is broken.

    >>> import jaxpipe as jp
    >>> s = jp.schedules.build("1f1b", devices=4, microbatches=8)
    >>> jp.check(s, max_activations=4) is s
    True
    """
    found = schedule.violations_under(transfers)
    if max_activations is not None and not schedule.encoded.too_sparse:
        found = (*found, *over_cap(schedule.encoded, max_activations, release))
    if not found:
        return schedule
    rules = f"{len(found)} rule{'s' if len(found) > 1 else ''}"
    text = listed(f"{named(schedule)} breaks {rules}", found)
    raise ScheduleError(f"{text}\n{marked_grid(schedule, found)}", found)


def named(schedule: Schedule) -> str:
    """The schedule as errors name it."""
    return f"schedule {schedule.name!r}" if schedule.name else "the schedule"


def marked_grid(schedule: Schedule, found: Sequence[Violation]) -> str:
    """The grid with the cells of violations marked."""
    marked = {cell for v in found for cell in v.others}
    for v in found:
        if v.device is not None and v.position is not None:
            marked.add((v.device, v.position))
    return grid(schedule, marked=marked, most_columns=MOST_COLUMNS)
