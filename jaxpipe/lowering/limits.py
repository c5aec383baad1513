"""Every number that the search for segments and exchanges is steered by, with its unit and what it was measured with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Prices(NamedTuple):
    """What candidates are compared by, besides the makespan.

    Times are in the unit of the costs; without any, of a stage's forward, with F = I = W = 1 and B = 2.  The measure of all of them is
    `benchmarks.flatness` (code at M = 512 over M = 8, and what is sent over what the table sends) together with
    `benchmarks.program_makespan` (program over table), for every schedule with P = 4 and 8 and V up to 4.
    """

    transfer: float  # time of a permute, for each device in it, while it waits
    traffic: float  # time of what a device sends, whether it waits or not
    block: float  # share of the makespan that one compiled block of stage code is worth
    permute: float = 5e-5  # the same for a compiled permute
    # Time of a permute, whoever is in it: where all devices are threads of one process, each waits until all have come.
    made: float = 0.0
    # Time of a predicate around what all devices do together: its collectives cannot be in a CUDA graph, so the host waits, each tick.
    meeting: float = 0.02
    asked: float = 0.0  # time of a predicate that says no, on every device in every tick
    taken: float = 0.0  # the time more of one that says yes
    gate: float = 0.0  # time of choosing among exchanges, a tick
    arm: float = 0.0  # the same for each of the exchanges: where choosing takes none of the time of a tick, but makes code
    block_predicate: float = 0.0  # time of a block's predicate, where it takes none of the time of a tick
    beside: bool = False  # transfers run beside compute: trips leave some to the next, and the steady state may have code of its own

    def makespan_first(self) -> Prices:
        """Prices by which nothing is worth a longer makespan; of programs with the same, that which chooses least among exchanges."""
        little = 1e-3
        return Prices(
            transfer=0.0,
            traffic=little * self.traffic,
            block=little * self.block,
            permute=little * self.permute,
            arm=little * (self.gate + self.arm),
            block_predicate=little * (self.asked + self.block_predicate),
            made=little * self.made,
            meeting=little * self.meeting,
            beside=self.beside,
        )

    def in_unit(self, unit: float) -> Prices:
        """The same prices where a stage's forward takes `unit`."""
        times = ("transfer", "traffic", "made", "asked", "taken", "gate", "arm", "block_predicate", "meeting")
        return self._replace(**{name: getattr(self, name) * unit for name in times})


# Little code: no transfer is made for nothing, but a ramp of a few ticks must not cost a second of compile time.
LITTLE_CODE = Prices(transfer=0.01, traffic=0.035, block=4e-3, arm=0.003, block_predicate=0.003)
# The same where all devices are threads of one process.  A permute takes them far more (of a stage of 6 ms a tenth, on two cores), but
# this is enough for interleaved tables to choose among exchanges in place of making all permutes in each tick.
LITTLE_CODE_OF_THREADS = LITTLE_CODE._replace(made=0.005)


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """What a program takes on a GPU besides the stages' own work, in seconds, and what its code is worth.

    None of the times has been measured on a GPU yet.  `benchmarks.gpu_single` measures predicates where there is one.

    Args:
        graph_predicate: of a conditional node of a CUDA graph; some kernel launches.
        host_wait: of a copy of a flag to the host and the wait for it: 10 to 20 us, which a conditional or an untaken loop takes once
            and a taken loop twice (XLA's ConditionalThunk and WhileThunk).
        hop: of a transfer that a device waits for: 32 MiB over one direction of NVLink on an H100.
        sent: what a transfer takes from the compute that it runs beside: memory bandwidth and the processors that copy.
        forward: of a stage, where no costs are given.
        block: share of the makespan that one more compiled block of stage code is worth.
        on_host: the predicates of blocks are the host's, since no CUDA graph takes the collectives inside.
        threads: no GPU at all: devices are threads of one process, which all meet in each permute.
    """

    graph_predicate: float = 3e-6
    host_wait: float = 15e-6
    hop: float = 100e-6
    sent: float = 15e-6
    forward: float = 5e-3
    block: float = 1e-3
    on_host: bool = False
    threads: bool = False

    def free_predicates(self) -> Overheads:
        """The same, if predicates took no time."""
        return replace(self, graph_predicate=0.0, host_wait=0.0)

    def prices(self, unit: float) -> Prices:
        """Prices where one unit of the costs takes `unit` seconds."""
        asked = self.host_wait if self.on_host else self.graph_predicate
        return Prices(
            transfer=self.hop / unit,
            traffic=self.sent / unit,
            block=self.block,
            asked=asked / unit,
            taken=asked / unit if self.on_host else 0.0,
            gate=(self.host_wait + self.hop) / unit,  # a wait, and a transfer that nothing can run beside
            meeting=(self.host_wait + self.hop) / unit,
            beside=True,
        )


ON_GPUS = Overheads()


class SearchLimits(NamedTuple):
    """How far the search for segments and exchanges goes; each is the least with which the measure of `Prices` is reached."""

    keeps_makespan: float = 1.005  # program over table: a candidate this good ends the search for ticks
    longest_period: int = 12  # ticks in a trip: the lcm of the 2, 3, 4 and 6 cells of a steady state's turn
    longest_cycle: int = 512  # ticks that may repeat without being the same code: interleaved tables come back after P V microbatches
    turns_seen: int = 16  # so many times a predicate of the steady state counts: the search sees few of its turns
    starts: int = 4  # first guesses that are improved on
    most_pieces: int = 24  # into which ticks are cut that come once, so that what all devices do together has no predicate
    most_work: int = 400_000  # ticks simulated: tables without any rhythm would take minutes (`benchmarks.table_speed`)
    many_trips: int = 64  # of a segment, from which on it pays to look for a cycle of different ones when it is simulated
    most_cut: int = 1024  # ticks that may be cut anywhere: each place is tried in nine ways, and each of those is a program to simulate
    saves_enough: float = 0.01  # two exchanges become one where no larger share of all transfers is made for nothing by that
    many_blocks: int = 48  # of stage code; for short stages all that saves transfers would be worth its size
    times_many: int = 4  # so many times more each block above these counts
    most_exchanges: int = 12  # exchanges among which a tick chooses


LIMITS = SearchLimits()
