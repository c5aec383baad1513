"""`plan`: the fastest pipelines that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from ..errors import Count, Duration, Fits, PlanError, Seed, typed
from ..prices import read_prices
from .candidate import PipelinePlan, Plans
from .request import MAX_ACTIVE, Above0, Names, Policies, SomeCounts, requests
from .search import Search


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
