"""How far from optimal `auto` is, on 40 instances: without and with search, the best known
makespan, and what is proven.

    python -m benchmarks.search --search 60 -o benchmarks/results/search.txt

Instances mix unit, measured and unlike costs, one and two stages a device, loops and V placements,
wide and tight caps. "list" is list scheduling with local search, without OR-tools.  `--search` is
in seconds of OR-tools' deterministic time, so that a result does not depend on the load of the
machine; an instance whose optimum is proven returns at once.  Results of earlier runs are kept in
`benchmarks/results/search_best.json`, so that the best known makespan is that of any run.  `--seed`
takes random shapes instead of the fixed ones; give them a `--best` of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeAlias

import jaxpipe as jp
from benchmarks.output import Command, Result

BEST = Path(__file__).parent / "results" / "search_best.json"
# a GPT stage (benchmarks/results/stage_costs.txt)
MEASURED = jp.Costs(forward=1, input_grad=1.24, weight_grad=1.27, transfer=0.05)
COSTS = {
    "unit": jp.Costs(),
    "measured": MEASURED,
    "attention": jp.Costs(forward=10, input_grad=13, weight_grad=9, transfer=1),
    "cheap W": jp.Costs(forward=2, input_grad=3, weight_grad=1, transfer=0),
    "slow hop": jp.Costs(forward=4, input_grad=4, weight_grad=4, transfer=3),
}
# devices, chunks, microbatches, placement, cap
Shape: TypeAlias = tuple[int, int, int, str, int]
SHAPES: tuple[Shape, ...] = (
    (4, 1, 8, "loop", 4),
    (4, 1, 8, "loop", 3),
    (4, 1, 16, "loop", 3),
    (8, 1, 12, "loop", 6),
    (4, 2, 8, "loop", 6),
    (4, 2, 8, "vee", 6),
    (4, 2, 12, "vee", 8),
    (4, 2, 6, "loop", 8),
)


class Instance(NamedTuple):
    """One line of the table."""

    costs: str
    devices: int
    chunks: int
    microbatches: int
    placement: str
    cap: int

    @property
    def name(self) -> str:
        """As the table shows it."""
        return (
            f"{self.costs}, P {self.devices}, V {self.chunks}, M {self.microbatches}, "
            f"{self.placement}, cap {self.cap}"
        )

    def place(self) -> jp.Placement:
        """Its placement."""
        make = jp.Placement.loop if self.placement == "loop" else jp.Placement.vee
        return make(devices=self.devices, chunks=self.chunks)

    def cost(self) -> jp.Costs:
        """Its costs; the slow hop's last stage is half as long again, as one with a head is."""
        costs = COSTS[self.costs]
        if self.costs != "slow hop":
            return costs
        long = [4] * (self.devices * self.chunks - 1) + [6]
        return jp.Costs(forward=long, input_grad=long, weight_grad=long, transfer=costs.transfer)

    def build(self, search: float) -> jp.Schedule:
        """Its schedule."""
        shape = {"devices": self.devices, "chunks": self.chunks, "microbatches": self.microbatches}
        found = jp.schedules.build(
            "auto",
            **shape,
            placement=self.place(),
            max_activations=self.cap,
            costs=self.cost(),
            search=search,
        )
        return jp.check(found, max_activations=self.cap)


def random_shapes(seed: int) -> tuple[Shape, ...]:
    """As many shapes as there are fixed ones, of like sizes."""
    rng, found = Random(seed), list[Shape]()
    while len(found) < len(SHAPES):
        devices, chunks, microbatches = rng.randint(3, 8), rng.randint(1, 3), rng.randint(6, 16)
        place = rng.choice(("loop", "vee")) if chunks > 1 else "loop"
        cap = rng.randint(chunks + 1, chunks * devices)
        if devices * chunks * microbatches <= 128:
            found.append((devices, chunks, microbatches, place, cap))
    return tuple(found)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.option("--search", 60.0, "SECONDS")
    parser.option("--seed", 0, "SEED", "of random shapes; 0 takes the fixed ones")
    parser.add_argument("--instances", type=int, nargs=2, default=(0, 40), metavar=("FIRST", "END"))
    parser.add_argument(
        "--best",
        type=Path,
        default=BEST,
        metavar="FILE",
        help="best known makespans, read and written",
    )
    args = parser.parse_args(argv)
    best = json.loads(args.best.read_text()) if args.best.exists() else {}
    rows, listed_gaps, searched_gaps, proven = [], [], [], []
    shapes = random_shapes(args.seed) if args.seed else SHAPES
    instances = [Instance(costs, *shape) for shape in shapes for costs in COSTS]
    for instance in instances[slice(*args.instances)]:
        relaxed = jp.lower_bound(
            instance.cost(),
            placement=instance.place(),
            microbatches=instance.microbatches,
            max_activations=instance.cap,
        )
        begin = time.process_time()
        listed = instance.build(0)
        middle = time.process_time()
        found = instance.build(args.search) if args.search else listed
        seconds = (f"{middle - begin:.1f}", f"{time.process_time() - middle:.1f}")
        short, long = (
            jp.simulate(schedule, instance.cost()).makespan for schedule in (found, listed)
        )
        known = best[instance.name] = min(short, best.get(instance.name, short))
        listed_gaps.append(max(0, long / known - 1))
        searched_gaps.append(max(0, short / known - 1))
        certificate = found.certificate
        assert certificate is not None, "auto says what it knows"
        proven.append(certificate)
        by = "relaxation" if certificate.proof is jp.table.Proof.RELAXATION else "CP-SAT"
        numbers = (f"{v:g}" for v in (relaxed, long, short, known, certificate.bound))
        over = (f"{listed_gaps[-1]:.2%}", f"{searched_gaps[-1]:.2%}", f"{certificate.gap:.2%}")
        rows.append((instance.name, *numbers, by, *over, *seconds))
        print("  ".join(rows[-1]), flush=True)
        args.best.write_text(json.dumps(best, indent=0, sort_keys=True) + "\n")
    optimal = [certificate for certificate in proven if certificate.is_optimal]
    relaxations = sum(certificate.proof is jp.table.Proof.RELAXATION for certificate in optimal)
    notes = (
        f"without search: {sum(listed_gaps) / len(rows):.2%} above the best known on average, "
        f"{max(listed_gaps):.2%} at most,"
        f" {sum(gap < 1e-9 for gap in listed_gaps)} of {len(rows)} at it",
        f"with search: {sum(gap > 1e-9 for gap in searched_gaps)} of {len(rows)} above the best "
        f"known; {len(optimal)} proven optimal,"
        f" {relaxations} by relaxations and {len(optimal) - relaxations} by CP-SAT;"
        f" {sum(certificate.gap for certificate in proven) / len(rows):.2%} above what is proven "
        "on average",
        "relaxed: jaxpipe.lower_bound; proven: schedule.certificate.bound; cpu s: of one core, "
        "without and with search",
    )
    columns = (
        "instance  relaxed  list  search  best  proven  by  list/best  search/best  "
        "search/proven  cpu s  cpu s"
    )
    title = f"auto against the best known and what is proven (search = {args.search:g})"
    Result(title, (), columns, rows, notes).write(args.output)


if __name__ == "__main__":
    main()
