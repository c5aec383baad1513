"""`plan`: the fastest pipelines that fit.  Choices are tried in the order of a bound; those that
could be among the best are simulated, and the shortest are lowered and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

from ..engine.simulate import simulate
from ..errors import Count, Duration, Fits, PlanError, ScheduleError, Seed, typed
from ..layouts.layout import Layout, LayoutError
from ..prices import read_prices
from ..schedules import build
from ..table.effects import Offload
from .candidate import Candidate, PipelinePlan, Plans, Rejected, Traced, gib, stage_seconds
from .memory import MemoryParts
from .request import (
    MAX_ACTIVE,
    Above0,
    Choice,
    Names,
    Policies,
    Request,
    SomeCounts,
    choices,
    requests,
)


@typed(PlanError)
def plan(
    model: Annotated[
        object,  # a text or a Model
        Fits(
            "a text with a letter for each layer, such as 'Et*80,L', or a Model of letters",
            lambda model: isinstance(getattr(model, "layers", model), str),
        ),
    ],
    costs: Annotated[Mapping[Any, object], Fits("a mapping, {'t': jaxpipe.LayerCost(...)}")],
    *,
    devices: Count,
    microbatches: Annotated[
        Count | SomeCounts, Fits("a whole number of at least 1, or a few of them")
    ],
    memory: Above0 | None = None,
    transfer: Annotated[Duration | Mapping[int, Duration], Fits("seconds, 0 or more")] = 0.0,
    fsdp: Annotated[
        Mapping[str, Count] | None,
        Fits(
            "one axis and its devices, such as {'data': 8}", lambda axes: not axes or len(axes) < 2
        ),
    ] = None,
    fsdp_bandwidth: Above0 = 5e10,
    max_active: Annotated[
        Sequence[Count | None], Fits("some of None and whole numbers of at least 1", len)
    ] = MAX_ACTIVE,
    schedules: Names | None = None,
    chunks: SomeCounts = (1, 2, 4),
    slices: SomeCounts = (1,),
    remat: Policies | None = None,
    offload: Annotated[
        Sequence[str | None],
        Fits("(None,) or (None, 'residuals')", lambda names: {*names} <= {None, "residuals"}),
    ] = (None, "residuals"),
    host_bandwidth: Above0 = 2.5e10,
    search: Duration = 0,
    seed: Seed = 0,
    most: Count = 8,
    within: Above0 | None = None,
    progress: Callable[[int, int], None] | None = None,
    traced: Callable[[PipelinePlan], Mapping[str, int]] | None = None,
    mesh: object = None,
    axis: str = "pipe",
    data_axes: Names = (),
) -> Plans:
    """The fastest pipelines of a model on P devices, best first: layout, schedule, chunks and
    remat, with what each device holds.

    Choices are tried in the order of a bound of their seconds, until the rest cannot be among the
    best.  Layers are split over stages so that the slowest stage is as fast as possible (exact
    dynamic programming), then moved one by one where the simulated step gets shorter.  The
    candidates of the shortest simulated steps are lowered as `Pipeline` lowers them for the mesh.
    Duration are those of the lowered program for these costs, and memory is that of its pools,
    accumulators, parameters and optimizer state.  `first` and `last` may be spread where their
    costs allow it (`LayerCost.ends`).

    Args:
        model: the letters of the layers, such as "E" + "t" * 80 + "L" ("E" is `first`, "L" is
            `last`), or a `jaxpipe.Model` that is given by letters.
        costs: the costs of each letter, for one microbatch (see `LayerCost`, `measure`); by
            M, where that may vary.
        devices: P.
        microbatches: M, or some numbers to choose among: a step has the same rows, so each comes
            with costs of its own.
        memory: bytes that a device has; no limit where it is None.
        transfer: seconds of a hop to another device, where M may vary by its number.
        fsdp: the data axis over which parameters, gradients and optimizer state are split, with its
            devices (`Sharding(fsdp=)`); `costs` have the bytes of a device's part.
        fsdp_bandwidth: bytes a second that a device receives, or sends, along that axis.
        max_active: stages that a device has whole at once, to choose among (`add_gathers`); None is
            all of its stages, gathered once a step beside no compute.  Numbers count where the axis
            is given and a device has more stages.
        schedules: names of `schedules.names()` to choose among; where it is None, those that are
            quick to build and keep parameters once, and with `fsdp` looped_bfs.
        chunks: stages per device to choose among.
        slices: slices of a sequence to choose among; a microbatch is then a sequence, and the model
            appends rows (`LayerCost.attention` and `LayerCost.rows` say what that costs).
        remat: what may be computed again, to choose among: None (nothing), "full", "stages" (of
            each stage the fewest microbatches for which the memory is enough, `add_recompute`),
            and the names of policies of which layers have costs (`LayerCost.policies`): each kind
            of layer has one or none.  All of these where it is None.
        offload: whether residuals may wait in the host's memory ("residuals"), where a plan does
            not fit without that, on GPUs.
        host_bandwidth: bytes a second between a device's memory and the host's, in each direction.
        search: seconds of search by OR-tools for a shorter table than the best one (the extra
            `jaxpipe[solver]`).
        seed: of the search.
        most: how many plans to return.
        within: seconds of the search: after half of them no further choice is tried, and of what
            was tried as many programs are lowered as the rest allows, at least one.
        progress: called with (how many choices are simulated, of how many), then with (how many
            candidates are lowered, of how many).
        traced: the memory of a step by what it is for, and its "total", of the traced model
            (`traced_memory` makes it); it takes the place of the sums of layers' sizes for every
            plan that is lowered.
        mesh: the `jax.sharding.Mesh` that the plan will run on; NVIDIA GPUs where it is None.
            Among virtual CPU devices of one process, every transfer waits for all of them.  Where
            it has axes besides those below (tensor parallelism), costs are those of what one device
            has of a layer (`measure(mesh=)`), and on GPUs the host decides each predicate,
            since blocks communicate.
            What predicates and transfers take is read from the file of prices, as `Pipeline` does;
            without a mesh, of the one kind of NVIDIA GPU in the file.
        axis, data_axes: of the mesh, as for `Pipeline`.

    Returns:
        Plans, a sequence with `.rejected`: what was left out, and why.

    Raises:
        PlanError: an argument is of another kind, a letter or a number of microbatches has no cost,
            there are fewer layers than devices, nothing fits (with the nearest plan), the mesh has
            no such axes, or numbers look as if they were in other units.

    >>> import jaxpipe as jp
    >>> t = jp.LayerCost(
    ...     forward=0.010,
    ...     input_grad=0.011,
    ...     weight_grad=0.009,
    ...     parameters=4e8,
    ...     residuals=1e8,
    ...     boundary=1e7,
    ... )
    >>> head = jp.LayerCost(forward=0.006, input_grad=0.006, weight_grad=0.006, parameters=2e8)
    >>> best, *others = jp.plan(
    ...     "t" * 15 + "L",
    ...     {"t": t, "L": head},
    ...     devices=4,
    ...     microbatches=8,
    ...     memory=16e9,
    ...     chunks=(1,),
    ...     remat=(None,),
    ... )
    >>> best.layout, best.schedule.num_microbatches, max(best.memory) < 16e9
    ('(t*4|)*3,t*3,L', 8, True)
    """
    arguments = {
        "model": getattr(model, "layers", model),
        "costs": costs,
        "devices": devices,
        "microbatches": microbatches,
        "memory": memory,
        "transfer": transfer,
        "fsdp": fsdp,
        "fsdp_bandwidth": fsdp_bandwidth,
        "max_active": max_active,
        "schedules": schedules,
        "chunks": chunks,
        "slices": slices,
        "remat": remat,
        "offload": offload,
        "host_bandwidth": host_bandwidth,
        "mesh": mesh,
        "axis": axis,
        "data_axes": data_axes,
        "prices": read_prices(),
    }
    wanted = requests(arguments)
    found = Search(wanted, most=most, within=within, progress=progress, traced=traced)
    return found.plans(search=search, seed=seed)


_Progress: TypeAlias = "Callable[[int, int], None]"
_MOVES = 60  # layouts that are simulated for each of the best candidates
_REFINED = 4  # candidates whose layout is improved
_MORE = 2  # programs that are lowered beyond the number of plans
_EVEN = 1e-9  # relative: stages that differ by less are equal
_WORTH = 1e-6  # relative: a makespan that is shorter by less is rounded


class Search:
    """The choices of some requests, tried in the order of a bound of their seconds."""

    def __init__(
        self,
        wanted: Sequence[Request],
        *,
        most: int,
        within: float | None = None,
        progress: _Progress | None = None,
        traced: Traced | None = None,
    ) -> None:
        self._begin, self._within = time.monotonic(), within
        self._wanted, self._rejected = wanted, list[Rejected]()
        self._most, self._traced = most, traced
        self._progress = progress or (lambda done, of: None)
        self._fitting: list[Candidate] = []
        self._beyond: list[Candidate] = []
        self._large: list[Choice] = []  # whose tables are not built

    def plans(self, *, search: float, seed: int) -> Plans:
        """The best plans, and the rejected choices."""
        self.candidates()
        found = self._lower_best()
        if not found:
            raise self._nothing_fits()
        if search:
            found += self._solved(min(found, key=lambda c: c.seconds), search, seed)
        found.sort(key=lambda c: (c.seconds, c.needs))
        beyond = [Rejected(c.label, lacks(c.needs, c.request), c.seconds) for c in self._beyond]
        return Plans(
            (c.plan() for c in found[: self._most]),
            (*self._rejected, *beyond),
            str(self._wanted[0].target.overheads),
        )

    def _late(self, share: float = 1) -> bool:
        """Whether a share of the time is over and there is something to return."""
        spent = time.monotonic() - self._begin
        return self._within is not None and spent > share * self._within and bool(self._fitting)

    def _worst(self, found: Sequence[Candidate]) -> float:
        """The seconds that a further candidate must stay below."""
        seconds = sorted(c.seconds for c in found)
        return seconds[self._most - 1] if len(seconds) >= self._most else float("inf")

    def _reject(self, choice: Choice, why: str, seconds: float | None = None) -> None:
        self._rejected.append(Rejected(choice.label, why, seconds))

    def candidates(self) -> list[Candidate]:
        """Those that fit, of every choice that could be among the best, without programs."""
        todo = [choice for request in self._wanted for choice in choices(request)]
        # Of equal bounds, those with spread ends are usually shorter.
        todo.sort(key=lambda c: (c.seconds, -len(c.spread)))
        for done, choice in enumerate(todo):
            if self._late(0.5):
                self._reject(choice, "not tried: the time was over")
            elif self._passes(choice):
                self._build(choice)
            self._progress(done + 1, len(todo))
        return self._fitting

    def _build(self, choice: Choice) -> None:
        """Candidates of a choice: gathered once a step, and more often."""
        try:
            base = Candidate.of(choice, choice.layout())
        except (ScheduleError, LayoutError) as error:
            self._reject(choice, str(error).splitlines()[-1].strip())
            return
        if None in choice.request.max_active:
            self._sort(base)
        for most in choice.rooms:
            try:
                self._sort(base.gathering(most))
            except ScheduleError as error:
                self._reject(choice._replace(max_active=most), str(error).splitlines()[-1].strip())

    def _passes(self, choice: Choice) -> bool:
        """Whether a choice may fit and be among the best; else it is rejected."""
        limit = choice.request.memory
        if limit is not None and choice.bytes > limit:
            self._large.append(choice)
            self._reject(choice, lacks(choice.bytes, choice.request))
        elif choice.seconds >= self._worst(self._fitting):
            why = f"takes {choice.seconds:.4g} s or more, and {self._most} plans take less"
            self._reject(choice, why, choice.seconds)
        else:
            return True
        return False

    def _sort(self, built: Candidate) -> None:
        """Keep a candidate that fits by its sizes, or candidates with less memory."""
        if self._fits(built):
            self._fitting.append(built)
            return
        self._beyond.append(built)
        if built.seconds < self._worst(self._fitting):
            self._fitting += filter(self._fits, built.smaller())

    def _fits(self, candidate: Candidate) -> bool:
        # Sums of layers' sizes are no measure of a traced model.
        return self._traced is not None or candidate.fits

    def _lower_best(self) -> list[Candidate]:
        """Programs of the front-runners."""
        todo = sorted(self._fitting, key=lambda c: c.seconds)
        todo[:_REFINED] = [_refined(c) for c in todo[:_REFINED]]
        found: list[Candidate] = []
        done = 0
        while todo:
            todo.sort(key=lambda c: c.seconds)
            # No program is shorter than its table, so later candidates cannot be among the best.
            if todo[0].seconds >= self._worst(found):
                break
            if found and (self._late() or done >= self._most + _MORE):
                break
            candidate = todo.pop(0)
            lowered = candidate.lowered(self._traced)
            if lowered.fits:
                found.append(lowered)
            else:
                self._beyond.append(lowered)
                todo += filter(self._fits, candidate.smaller())
            done += 1
            self._progress(done, done + len(todo))
        return found

    def _nothing_fits(self) -> PlanError:
        """The error that nothing fits, with the nearest candidate and the missing bytes."""
        if not self._beyond and not self._large:
            return PlanError.listing(
                "no schedule can be built for this model",
                [f"{r.what}: {r.why}" for r in self._rejected] or ["no schedule was named"],
            )
        limit = self._wanted[0].memory
        assert limit is not None
        if self._beyond:
            near = min(self._beyond, key=lambda c: c.needs)
            part, (held, helps) = max(_parts(near.memory).items(), key=lambda item: item[1])
            name = f"{near.label}, layout {near.layout}, which needs at least {gib(near.needs)}"
            lack, most = near.needs - limit, f" (most of it, {gib(held)}, {part})"
        else:  # no table was built
            least, helps = min(choice.bytes for choice in self._large), _HELPS
            name = f"an even split of the layers, which needs {gib(least)} for {_HELD} alone"
            lack, most = least - limit, ""
        return PlanError(
            f"nothing fits into {gib(limit)} a device: the nearest is {name}, "
            f"{gib(lack)} more{most}; what would help most: {helps}; or {_ADVICE}"
        )

    def _solved(self, best: Candidate, seconds: float, seed: int) -> list[Candidate]:
        """A shorter table for the best plan's layout and memory, if the solver finds one."""
        choice, request, placement = best.choice, best.request, best.schedule.placement
        if best.recomputing or choice.spread or placement.is_bidirectional or request.slices > 1:
            return []
        costs, cap = best.timeline.costs, max(best.timeline.peak_activations)
        table = build(
            "auto",
            devices=request.devices,
            microbatches=request.microbatches,
            chunks=choice.chunks,
            placement=placement,
            max_activations=cap,
            costs=costs,
            search=seconds,
            seed=seed,
        )
        found = replace(
            best, choice=choice._replace(name="auto", cap=cap), timeline=simulate(table, costs)
        ).lowered(self._traced)
        return [found] if found.fits and found.seconds < best.seconds else []


def _refined(candidate: Candidate) -> Candidate:
    """The candidate with a better layout for its table, and the table adapted to that layout.

    Single layers are moved over borders between stages as long as the step gets shorter: a balanced
    split does not know that a stage at either end may be lighter or heavier without a delay.
    """
    choice, best = candidate.choice, candidate
    # The table's certificate holds only for the costs of its layout.
    table, recomputing = replace(candidate.schedule, certificate=None), bool(candidate.recomputing)
    whole = stage_seconds(candidate.timeline)
    if max(whole) <= min(whole) * (1 + _EVEN):
        return candidate
    tries, moves = 0, _moves(candidate.layout)
    while tries < _MOVES and (layout := next(moves, None)) is not None:
        tries += 1
        costs = choice.stage_costs(layout, recomputing=recomputing)
        moved = replace(candidate, layout=layout, timeline=simulate(table, costs))
        if moved.timeline.makespan < best.timeline.makespan * (1 - _WORTH):
            best, moves = moved, _moves(layout)
    if best is candidate or recomputing or candidate.offload is not Offload.NOTHING:
        return best
    return min((best, Candidate.of(choice, best.layout)), key=lambda c: c.seconds)


def _moves(layout: Layout) -> Iterator[Layout]:
    """Every layout with one layer on the other side of a border and no empty stage."""
    stages = layout.stages
    for border in range(1, len(stages)):
        left, right = stages[border - 1], stages[border]
        changed = [(left[:-1], left[-1] + right)] if len(left) > 1 else []
        changed += [(left + right[0], right[1:])] if len(right) > 1 else []
        for one, other in changed:
            yield Layout(
                (*stages[: border - 1], one, other, *stages[border + 1 :]), layout.num_devices
            )


_HELD, _HELPS = "parameters, gradients and optimizer state", "more devices, or shares of each"
_ADVICE = (
    "use more devices or smaller microbatches, allow other chunks and remat='full', "
    "or shard parameters and optimizer state over another axis"
)


def lacks(needs: float, request: Request) -> str:
    """The reason to reject what needs so many bytes at least."""
    return f"does not fit by {gib(needs - (request.memory or 0))} or more"


def _parts(memory: MemoryParts) -> dict[str, tuple[float, str]]:
    """Bytes of a device by purpose, and what would help most against them."""
    pools, less = memory.pools, "smaller microbatches"
    boundaries = pools["x"] + pools["cotangent"] + memory.sent
    return {
        _HELD: (memory.held, _HELPS),
        "residuals": (pools["residual_weight"], "remat='full', or offload='residuals'"),
        "stash": (pools["stash"], "whole backwards (1f1b, interleaved_1f1b)"),
        "stage inputs and cotangents": (boundaries, less),
        "whole stages": (
            memory.gathered,
            "more chunks, fewer of them whole at a time (max_active)",
        ),
        "workspace": (memory.work, f"a `last` that is spread, or {less}"),
        "the batch": (memory.batch + memory.hoisted, less),
        "sums of the gradients of first and last": (memory.summed, less),
    }
