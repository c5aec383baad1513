"""Every number that the search for segments and exchanges is steered by, with its unit and what it was measured with."""

from __future__ import annotations

from typing import NamedTuple


class Prices(NamedTuple):
    """What candidates are compared by, besides the makespan with F = I = W = 1 and B = 2.

    Times are in units of a stage's forward.  The measure of all of them is `benchmarks.flatness` (code at M = 512 over M = 8, and what
    is sent over what the table sends) together with `benchmarks.program_makespan` (program over table), for every schedule with
    P = 4 and 8 and V up to 4.
    """

    predicate: float  # time of a predicate
    transfer: float  # time of a permute, for each device in it, while it waits
    traffic: float  # time of what a device sends, whether it waits or not
    block: float  # share of the makespan that one compiled block of stage code is worth
    permute: float = 5e-5  # the same for a compiled permute
    # Time of a predicate around what all devices do together: its collectives cannot be in a CUDA graph, so the host waits, each tick.
    meeting: float = 0.02


# Little code: no transfer is made for nothing, but a ramp of a few ticks must not cost a second of compile time.
LITTLE_CODE = Prices(predicate=0.003, transfer=0.01, traffic=0.035, block=4e-3)
# Early transfers: code for each kind of tick in the steady state, so that what has slack moves while blocks run.
EARLY_TRANSFERS = Prices(predicate=0.003, transfer=0.1, traffic=0.03, block=2e-3)


class SearchLimits(NamedTuple):
    """How far the search for segments and exchanges goes; each is the least with which the measure of `Prices` is reached."""

    keeps_makespan: float = 1.005  # program over table: a candidate this good ends the search for ticks
    longest_period: int = 12  # ticks in a trip: the lcm of the 2, 3, 4 and 6 cells of a steady state's turn
    longest_cycle: int = 512  # ticks that may repeat without being the same code: interleaved tables come back after P V microbatches
    starts: int = 4  # first guesses that are improved on
    most_work: int = 400_000  # ticks simulated: tables without any rhythm would take minutes (`benchmarks.table_speed`)
    saves_enough: float = 0.01  # two exchanges become one where no larger share of all transfers is made for nothing by that
    most_exchanges: int = 12  # exchanges among which a tick chooses


LIMITS = SearchLimits()
