"""The choices of a plan, and candidates: choices with a simulated table.  Seconds and bytes come
from sums of sizes, before any program exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from ..engine.bounds import lower_bound
from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..engine.timeline import Timeline
from ..errors import ScheduleError
from ..layouts.layout import Layout
from ..lowering.plan import Plan, plan_of
from ..program.records import UNDER_WAY, Slots
from ..schedules import build
from ..schedules.registry import describe
from ..table.effects import Offload
from ..table.kinds import Kind
from ..table.schedule import Schedule
from ..transforms.defer_last import defer_last
from ..transforms.recompute import add_recompute
from ..transforms.rewrites import split_backward
from ..transforms.spread import spread_first, spread_last
from .layer_cost import FIRST, LAST, Ends, LayerCost, Remat, stage_costs
from .layers import balanced
from .memory import Memory, device_work, layer_sizes, least_bytes, least_slots, memory_of
from .request import Request

# The least gain of a table by H, relative to its makespan.  Its program has more blocks, so it
# gains less.
_WORTH_LATER = 0.02
_PLAINER = {"interleaved_1f1b": "1f1b", "interleaved_zb": "zb_h1"}


class Choice(NamedTuple):
    """A schedule, its chunks, its recomputation and its spread ends."""

    request: Request
    name: str
    chunks: int
    remat: Remat
    policies: tuple[tuple[str, str], ...]  # a letter and its `jax.checkpoint` policy
    spread: str  # the collective ends among "E" and "L"
    costs: Mapping[str, LayerCost]  # of its policies and shares
    cap: int | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Its mesh, ends and remat."""
        return (id(self.request), self.remat, self.policies, self.spread.replace(FIRST, ""))

    @property
    def like(self) -> tuple[object, ...]:
        """Its kind, and its stages."""
        return (*self.kind, self.chunks)

    @property
    def seconds(self) -> float:
        """A lower bound of its tables: a device's work, and the reduction of gradients."""
        work = device_work(
            self.request.layers,
            self.costs,
            self.request.devices,
            again=self.remat is Remat.FULL,
        )
        return self.request.microbatches * work + self.request.reduction

    @property
    def bytes(self) -> float:
        """A lower bound of its programs' memory: parameters, and, without recomputation by stages
        and offload, the residuals of one microbatch.
        """
        request = self.request
        held = least_bytes(request.layers, self.costs, request.devices)
        if self.remat is Remat.FULL or Remat.STAGES in request.remat or request.offloads:
            return held
        inner = [self.costs[c] for c in request.layers if c not in (FIRST, LAST)]
        return held + sum(c.residuals for c in inner) / request.devices

    @property
    def label(self) -> str:
        """Its name in a printed table."""
        parts = [*self.request.label, self.name, f"V {self.chunks}"]
        parts += [f"cap {self.cap}"] if self.cap else []
        parts += [f"M {self.request.microbatches}"] if self.request.one_of_many else []
        parts += [f"K {self.request.slices}"] if self.request.slices > 1 else []
        parts += [f"spread {self.spread}"] if self.spread else []
        parts += ["remat full"] if self.remat is Remat.FULL else []
        names = dict.fromkeys(name for _, name in self.policies)
        parts += [
            f"remat {name}"
            if len(names) == 1
            else f"remat {name} of {''.join(c for c, n in self.policies if n == name)}"
            for name in names
        ]
        return ", ".join(parts)

    def layout(self) -> Layout:
        """Its layers in stages."""
        request = self.request
        return balanced(
            request.layers,
            self.costs,
            devices=request.devices,
            chunks=self.chunks,
            remat=self.remat,
        )

    def stage_costs(self, layout: Layout, *, recomputing: bool = False) -> Costs:
        """The times of a layout's stages."""
        remat = Remat.STAGES if recomputing else self.remat
        request = self.request
        return stage_costs(
            layout, self.costs, remat=remat, transfer=request.transfer, slices=request.slices
        )

    def built(self, layout: Layout) -> Iterator[Candidate]:
        """Its tables.  With a spread `last`, the table with a later gradient of the head is one of
        them if it is shorter.
        """
        request, costs = self.request, self.stage_costs(layout)
        options: dict[str, Any] = {} if self.cap is None else {"max_activations": self.cap}
        takes = [option.name for option in describe(self.name).options]
        if "costs" in takes and not request.by_name:
            options["costs"] = costs
        table = build(
            self.name,
            devices=request.devices,
            microbatches=request.microbatches,
            chunks=self.chunks,
            slices=request.slices,
            **options,
        )
        if table.num_stages != layout.num_stages:
            per = table.num_stages // request.devices
            raise ScheduleError(
                f"{self.name} has {table.num_stages} stages, each on several devices; choose it "
                f"by chunks=({per},)"
            )
        if LAST in self.spread:
            table = spread_last(table, costs=None if request.by_name else costs)
        if FIRST in self.spread:
            table = spread_first(table, costs=costs)
        found = simulate(table, costs)
        yield Candidate(self, layout, found)
        if LAST in self.spread and not request.by_name:
            later = simulate(defer_last(table, costs=costs), costs)
            if later.makespan < (1 - _WORTH_LATER) * found.makespan:
                yield Candidate(self, layout, later)

    def caps(self, layout: Layout) -> tuple[int | None, ...]:
        """Caps for `auto`, rising: 1F1B's memory and as much as it asks for, or as many activations
        as the memory has room for.
        """
        request, enough = self.request, self.chunks * self.request.devices
        if request.memory is None:
            return enough, None
        name = "1f1b" if self.chunks == 1 else "interleaved_1f1b"
        trial = next(self._replace(name=name, spread="").built(layout))
        split = replace(trial.timeline, schedule=split_backward(trial.schedule))
        trial = trial._replace(timeline=split)
        held = trial.memory(Slots(x=0, cotangent=1, stash=1, first=1))
        each = trial.entry("residual_weight") + trial.entry("x")
        fits = int((request.memory - held.total) / each) if each else 2 * enough
        most = (min(enough, fits), min(2 * enough, fits))
        return tuple(dict.fromkeys(max(self.chunks, cap) for cap in most))

    def with_first(self) -> Choice | None:
        """The same choice with a spread `first`, of which a device holds a share; None where it
        cannot be spread.
        """
        end = self.costs.get(FIRST)
        if self.spread != LAST or end is None or self.request.costs[FIRST].ends is not Ends.EITHER:
            return None
        share = self.request.costs[FIRST].share(self.request.devices)
        return self._replace(spread=FIRST + LAST, costs={**self.costs, FIRST: share})

    def bound(self, layout: Layout) -> float:
        """A lower bound of the step's seconds, by `lower_bound`."""
        costs, request = self.stage_costs(layout), self.request
        if request.slices > 1:
            return self.seconds
        found = lower_bound(
            costs,
            microbatches=request.microbatches,
            devices=request.devices,
            chunks=self.chunks,
            max_activations=self.cap,
        )
        return max(found + request.reduction, self.seconds)


def choices(request: Request) -> Iterator[Choice]:
    """All choices of a request: schedules, with the chunks that they take and that the layers
    suffice for.
    """
    shapes = [
        (name, chunks)
        for name in request.schedules
        for chunks in request.chunks
        if describe(name).chunks.nearest(chunks) == chunks
        and not (request.slices > 1 and describe(name).one_slice)
        and request.devices * chunks <= len(request.layers)
        # With one stage a device they equal 1F1B with more activations, and ZB-H1.
        and not (chunks == 1 and _PLAINER.get(name) in request.schedules)
    ]
    for spread, (remat, policies) in product(_spreads(request), _ways(request)):
        costs = dict(request.costs)
        for letter, policy in policies:
            costs[letter] = costs[letter].under(policy)
        for letter in (FIRST, LAST):
            if letter in spread:
                costs[letter] = costs[letter].share(request.devices)
            elif letter in costs:
                costs[letter] = replace(costs[letter], ends=Ends.ONE)
        for name, chunks in shapes:
            yield Choice(request, name, chunks, remat, policies, spread, costs)


def _spreads(request: Request) -> list[str]:
    """The ends that may be spread.  Where both may be, `first` is spread only if memory is short
    (`Choice.with_first`).
    """
    ends = {c: request.costs[c].ends if c in request.layers else Ends.ONE for c in (FIRST, LAST)}
    always = "".join(c for c in (FIRST, LAST) if ends[c] is Ends.ALL)
    if ends[LAST] is Ends.EITHER:
        return [always, (FIRST if ends[FIRST] is Ends.WITH_LAST else always) + LAST]
    return [always, always + FIRST] if ends[FIRST] is Ends.EITHER else [always]


def _ways(request: Request) -> Iterator[tuple[Remat, tuple[tuple[str, str], ...]]]:
    """The kinds of recomputation: nothing, a policy for each kind of layer, or everything."""
    wanted = request.remat
    if Remat.NONE in wanted or Remat.STAGES in wanted:
        yield Remat.NONE, ()
    kinds = {
        c: [name for name in request.policies if name in request.costs[c].policies]
        for c in dict.fromkeys(request.layers)
    }
    kinds = {c: names for c, names in kinds.items() if names}
    for named in product(*(("", *names) for names in kinds.values())):
        pairs = tuple((c, name) for c, name in zip(kinds, named, strict=True) if name)
        if pairs:
            yield Remat.NONE, pairs
    if Remat.FULL in wanted:
        yield Remat.FULL, ()


class Candidate(NamedTuple):
    """A choice with its table, simulated."""

    choice: Choice
    layout: Layout
    timeline: Timeline
    recomputing: int = 0  # R in the table
    offload: Offload = Offload.NOTHING

    @property
    def request(self) -> Request:
        """The request of its choice."""
        return self.choice.request

    @property
    def schedule(self) -> Schedule:
        """Its table."""
        return self.timeline.schedule

    @property
    def seconds(self) -> float:
        """Seconds of the step, by the table."""
        return max(self.timeline.makespan, self.moving) + self.request.reduction

    @property
    def like(self) -> tuple[object, ...]:
        """A key that equal tables of different names share."""
        choice, peak = self.choice, max(self.timeline.peak_activations)
        costs = (choice.chunks, choice.remat, choice.policies, choice.spread, self.offload)
        return (id(self.request), *costs, peak, f"{self.seconds:.9g}")

    @property
    def moving(self) -> float:
        """Seconds of the copies of residuals to the host's memory, or back."""
        if self.offload is Offload.NOTHING:
            return 0.0
        moved = self.request.microbatches * self.choice.chunks * self.entry("residual_weight")
        return moved / self.request.host_bandwidth

    @property
    def lowered(self) -> Plan:
        """Its program."""
        costs, overheads = self.timeline.costs, self.request.target.overheads
        plan = plan_of(self.schedule, costs=costs, overheads=overheads)
        return replace(plan, offload=self.offload)

    def entry(self, pool: str) -> float:
        """Bytes of an entry of a pool."""
        slots = Slots(**{pool: 1})
        return self.memory(slots).pools[pool]

    def memory(self, slots: Slots) -> Memory:
        """A device's memory, by sums of layers' sizes."""
        sizes = layer_sizes(
            self.layout,
            self.schedule,
            self.choice.costs,
            remat=self.choice.remat,
            in_place=self.request.target.on_gpus,
            gathered=self.request.gathered,
        )
        return memory_of(slots, sizes)

    @property
    def least(self) -> Memory:
        """The least memory of any program of its table."""
        slots = least_slots(self.timeline)
        if self.offload is not Offload.NOTHING:
            slots.residual_weight = min(slots.residual_weight, UNDER_WAY)
        return self.memory(slots)

    @property
    def label(self) -> str:
        """As a table names it."""
        parts = [self.choice.label]
        share = self.recomputing / (self.schedule.num_stages * self.schedule.num_microbatches)
        parts += ["H"] if self.schedule.encoded.of_kinds((Kind.H,)).any() else []
        parts += [f"recompute {share:.0%}"] if self.recomputing else []
        parts += ["offload"] if self.offload is not Offload.NOTHING else []
        return ", ".join(parts)

    def smaller(self) -> Iterator[Candidate]:
        """Candidates with less memory: with a spread `first`; with residuals in the host's memory;
        with the fewest R for as many activations as fit, and for one less.  There are none for a
        candidate that is itself one of these.
        """
        request, table = self.request, self.schedule
        assert request.memory is not None, "without a limit of memory, nothing makes room"
        if self.recomputing or self.offload is not Offload.NOTHING:
            return
        both = self.choice.with_first()
        if both is not None:
            # The first stage's times without `first` hardly differ, so the table keeps its order.
            costs = both.stage_costs(self.layout)
            table = spread_first(table, costs=costs)
            first = Candidate(both, self.layout, simulate(table, costs))
            yield first
            yield from first.smaller()
        if self.choice.name == "auto":
            return  # a smaller cap makes room in less time
        if request.offloads:
            yield self._replace(offload=Offload.RESIDUALS)
        if Remat.STAGES not in request.remat or self.choice.remat is Remat.FULL:
            return
        costs = self.choice.stage_costs(self.layout, recomputing=True)
        peak, held = max(self.timeline.peak_activations), self.least
        residuals = held.pools["residual_weight"]
        each, free = residuals / peak, request.memory - (held.total - residuals)
        room = min(peak - 1, int(free / each)) if each else 0
        for cap in sorted({max(1, room), max(1, room - 1)}, reverse=True):
            found = add_recompute(table, costs=costs, max_activations=cap)
            count = sum(action.kind is Kind.R for _, _, action in found.actions())
            if count:
                yield self._replace(timeline=simulate(found, costs), recomputing=count)
