"""A case: everything that is chosen about a model, a table, a mesh, settings and calls; it is drawn
from a number and prints as text.
"""

from __future__ import annotations

import random
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

import jaxpipe as jp
from tests.strategies import random_schedule

from .ops import OPS, OUTER, PASSING, POSITIONED, REPLACED

LETTERS = "abc"
SPREAD = ("vocab", "spread")  # how `first` and `last` may be written for all devices at once
REMATS = (
    "full",
    "dots_saveable",
    "nothing_saveable",
    "everything_saveable",
    "dots_with_no_batch_dims_saveable",
    "save_only_these_names",
    "offload_dot_with_no_batch_dims",
)
ONE_MORE = (
    "grad",
    "evaluate",
    "fewer",
    "losses",
    "outputs",
    "train",
    "checkpoint",
    "jit",
    "lowered",
    "report",
    "nonfinite",
    "place",
)

RULES = {
    "LAST": lambda values: values[-1],
    "MAX": lambda values: np.max(values, axis=0),
    "MEAN": lambda values: np.mean(values, axis=0),
    "SUM": lambda values: np.sum(values, axis=0),
}

# what XLA:CPU cannot do beside axes that are left to the partitioner
BY_ITSELF = ("cond", "fourier", "switch")
# what the eager executor cannot do
TRACED = ("checkpoint", "jit", "lowered", "nonfinite", "report", "train")


@dataclass(frozen=True)
class Case:
    """Defaults are the simplest choice; only what differs from them is printed."""

    seed: int = 0  # of weights and rows
    form: str = "alike"  # or "list", "layers"
    # alike: of all stages; list: of each; layers: of each letter
    ops: tuple[tuple[str, ...], ...] = (("dense",),)
    widths: tuple[int, ...] = ()  # list: what each stage takes
    layout: str = ""
    carrier: str = "array"  # what goes from stage to stage; or "dict", "tuple"
    rank: int = 2
    width: int = 4
    first: str = "none"  # or "linear", "embed", or one of SPREAD
    last: str = "mse"  # or "none", "xent", or one of SPREAD
    first_ops: tuple[str, ...] = ()
    last_ops: tuple[str, ...] = ()
    vocab: int = 6
    tied: bool = False
    loss: str = "MEAN"
    count: str = "mask"  # or "compared": what x determines, without a gradient
    scale: float | None = None  # of the loss, before the backwards
    clipped: float | None = None  # the largest entry of gradients between stages
    whole: bool = False  # stages read leaves of the batch without rows
    metrics: bool = False
    stage_loss: bool = False
    odd: bool = False  # None and empty trees among parameters
    mixed: bool = False  # float32 and bfloat16 parameters
    frozen: tuple[str, ...] = ()  # names of leaves
    replaced: tuple[str, str] = ("MAX", "MAX")  # over microbatches, over data shards
    table: str = "gpipe"  # a name, or a number: a random table
    passes: tuple[str, ...] = ()
    devices: int = 1
    chunks: int | None = None
    microbatches: int = 2
    slices: int = 1  # of a sequence
    rows: int = 1  # of a microbatch on a data shard
    mesh: tuple[tuple[str, int], ...] = (("pipe", 1),)
    explicit: bool = False
    context: bool = False  # calls are made under `jax.set_mesh`
    per_layer: bool = False  # training uses a rule that looks at one array
    fsdp: bool = False
    max_active: int | None = None  # stages of a device that are whole at a time
    outer: bool = False
    remat: str | None = None
    offload: str | None = None
    accumulate: str | None = "float32"
    costs: bool = False
    eager: bool = False
    gpu_form: bool = False  # the blocks that GPUs run
    apart: bool = True  # with slots that are no rows
    calls: tuple[str, ...] = ("step",)

    def __str__(self) -> str:
        given = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default or f.default is MISSING
        ]
        return f"Case({', '.join(given)})"

    @property
    def sequences(self) -> int:
        """Of a step, on each data shard."""
        return self.microbatches // self.slices

    @property
    def data(self) -> int:
        """Data shards."""
        return dict(self.mesh).get("data", 1)

    @property
    def spreads(self) -> bool:
        """Whether an end runs on all devices at once."""
        return self.first in SPREAD or self.last in SPREAD

    @property
    def every_op(self) -> set[str]:
        """The ops of all stages and both ends."""
        return {op for ops in (*self.ops, self.first_ops, self.last_ops) for op in ops}


@cache
def schedule_of(
    table: str,
    devices: int,
    microbatches: int,
    chunks: int | None,
    passes: tuple[str, ...],
    slices: int = 1,
) -> jp.Schedule:
    """The table, after its transforms."""
    if table.isdigit():
        schedule = random_schedule(random.Random(int(table)), recompute=int(table) % 2 == 0)
    else:
        schedule = jp.schedules.build(
            table, devices=devices, microbatches=microbatches, chunks=chunks, slices=slices
        )
    for name in passes:
        schedule = getattr(jp, name)(schedule)
    return schedule


def draw(seed: int) -> Case:
    """The case of this number."""
    rng = np.random.default_rng(seed)

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    last, first = (
        one("mse", "mse", "xent", "none", *SPREAD),
        one("none", "linear", "embed", *SPREAD),
    )
    table = _draw_table(rng, spreads={"first": first in SPREAD, "last": last in SPREAD})
    schedule = schedule_of(**table)
    stages, copies = schedule.num_stages, schedule.placement.is_bidirectional
    mesh, axes = _draw_mesh(rng, schedule.num_devices)

    def some(
        known: tuple[str, ...], most: int, *, without: tuple[str, ...] = ()
    ) -> tuple[str, ...]:
        found = [
            str(n)
            for n in rng.choice(
                [n for n in known if n not in without], size=rng.integers(0, most + 1)
            )
        ]
        return tuple(n for i, n in enumerate(found) if n != "normalised" or n not in found[:i])

    # XLA:CPU cannot run an FFT whose rows the partitioner has moved, without a pipeline neither.
    # And every permute waits for all devices, so that what the partitioner permutes in a branch
    # waits for ever for those that took another one.
    alone = axes["tensor"] < 2 and axes["other"] < 2
    known = tuple(name for name in OPS if alone or name not in BY_ITSELF)
    form = one("alike", "alike", "list", "layers")
    stateless = ("normalised",) if copies or form == "layers" else ()
    tied = chance(0.6) and (
        (first in SPREAD and last in SPREAD) or (first, last) == ("embed", "xent")
    )
    without = (*stateless, *(("shared", "shared_scale") if tied and first in SPREAD else ()))
    # from stage to stage another width
    changing = form == "list" and axes["tensor"] == 0 and chance(0.7)
    widths = tuple(int(n) for n in rng.integers(2, 7, size=stages)) if changing else ()
    width = one(2, 4, 4, 6)
    # the head has the width of the embedding
    widths = (*widths[:-1], width) if tied and widths else widths
    without = (*without, "shared") if changing else without
    count = {"alike": 1, "list": stages, "layers": int(rng.integers(1, 4))}[form]
    ops = tuple(
        some(known, 3 if form != "layers" else 2, without=without) or ("dense",)
        for _ in range(count)
    )
    carrier = (
        "array"
        if "vocab" in (first, last)
        else one("array", "array", "tuple", "dict" if first != "none" else "tuple")
    )
    eager = chance(0.1)
    calls = (
        *(("step",) if last != "none" and not schedule.forward_only else ()),
        *some(ONE_MORE, 2),
    )
    if schedule.forward_only or last == "none":
        allowed = {"outputs", "place"} | (
            {"evaluate", "fewer", "losses"} if last != "none" else set()
        )
        calls = tuple(call for call in calls if call in allowed) or ("outputs",)
    if eager:
        calls = tuple(call for call in calls if call not in TRACED) or ("place",)
    if first in SPREAD or last in SPREAD or any("normalised" in each for each in ops):
        calls = tuple(call for call in calls if call != "nonfinite") or ("place",)
    remat = one(*REMATS) if chance(0.3) else None
    of_complex = {"complex", "fourier"}
    if remat == "everything_saveable" and any(of_complex & set(each) for each in ops):
        remat = None  # JAX cannot save complex numbers by a policy, without a pipeline neither
    case = Case(
        seed=seed,
        form=form,
        ops=ops,
        widths=widths,
        layout=_draw_layout(rng, stages, count) if form == "layers" else "",
        carrier=carrier,
        rank=one(2, 2, 3),
        width=width,
        first=first,
        last=last,
        first_ops=some(OUTER, 1, without=(*BY_ITSELF, "shared", "shared_scale"))
        if first in ("linear", "embed")
        else (),
        last_ops=some(OUTER, 1, without=(*BY_ITSELF, "shared", "shared_scale"))
        if last in ("mse", "xent")
        else (),
        vocab=one(4, 5, 6, 7),
        tied=tied,
        loss=one("MEAN", "MEAN", "SUM_OVER_COUNT"),
        metrics=chance(0.3),
        stage_loss=chance(0.25),
        odd=chance(0.2),
        mixed=chance(0.2),
        frozen=tuple(
            str(n) for n in rng.choice(["w", "s", "bias", "head", "table"], size=rng.integers(1, 3))
        )
        if chance(0.2)
        else (),
        **table,
        rows=one(1, 2, 3),
        mesh=mesh,
        explicit=chance(0.3),
        fsdp=chance(0.4) and axes["data"] > 0,
        outer=chance(0.2),
        remat=remat,
        offload="residuals" if chance(0.15) else None,
        accumulate=one("float32", "float32", "float64", None),
        costs=chance(0.15),
        eager=eager,
        calls=calls,
    )
    case = _sliced(rng, case) if chance(0.2) else case
    context, per_layer = case.explicit and chance(0.5), chance(0.5)
    case = replace(case, context=context, per_layer=per_layer)
    case = replace(
        case,
        count=one("mask", "mask", "compared"),
        scale=one(None, None, 2.0**10, 0.3),
        clipped=one(None, None, 1e-2, 1e-4),
        whole=chance(0.3),
    )
    return _drawing(rng, case)


def _drawing(rng: np.random.Generator, case: Case) -> Case:
    """The case with more functions that draw random numbers, and the plain loss of the model."""
    changed: dict[str, Any] = {}
    known = ("dropout", *POSITIONED) if case.slices > 1 else ("dropout",)
    for end in ("first", "last"):
        if getattr(case, end) == "spread" and rng.random() < 0.4:
            changed[f"{end}_ops"] = (str(rng.choice(known)),)
    if case.slices > 1 and rng.random() < 0.4:
        changed["ops"] = tuple((*own, *POSITIONED) for own in case.ops)
    if "step" in case.calls and _is_plain(case) and rng.random() < 0.4:
        changed["calls"] = (*case.calls, "plain")
    changed["gpu_form"] = not case.eager and rng.random() < 0.4
    changed["apart"] = not changed["gpu_form"] or rng.random() < 0.5
    if case.fsdp and rng.random() < 0.6:
        changed["max_active"] = int(rng.choice([1, 1, 2]))
    # The plain model takes the slices of a sequence as one microbatch.
    if case.slices == 1 and rng.random() < 0.3:
        ops = changed.get("ops", case.ops)
        changed["ops"] = tuple((*own, *REPLACED) if rng.random() < 0.7 else own for own in ops)
        changed["replaced"] = tuple(str(rule) for rule in rng.choice(list(RULES), size=2))
    return replace(case, **changed)


def _is_plain(case: Case) -> bool:
    """Whether the model's loss is the same without a pipeline.

    There a model of letters has one stage, there are no data shards, a clipped cotangent begins
    with the count, and stages that are alike are counted by their parameters.
    """
    known = OPS | PASSING | POSITIONED | REPLACED
    counted = case.form != "alike" or any(known[op].shapes(case.width) for op in case.ops[0])
    numbered = case.form == "layers" and "number" in case.every_op
    return case.data == 1 and case.clipped is None and counted and not numbered


def _sliced(rng: np.random.Generator, case: Case) -> Case:
    """The case with sequences that are cut; the case where its table or its ops know no slices."""
    slices = int(rng.choice([2, 2, 4]))
    count = slices * min(case.microbatches, 3)
    known = list(PASSING)[case.form == "layers" :]  # a carry is for whole stages
    ops = tuple((*own, *rng.permutation(known)[: rng.integers(3)].tolist()) for own in case.ops)
    if case.table.isdigit() or "normalised" in case.every_op:
        return case
    try:
        schedule_of(case.table, case.devices, count, case.chunks, case.passes, slices)
    except jp.ScheduleError:
        return case
    calls = tuple(name for name in case.calls if name not in ("fewer", "losses", "outputs"))
    changed = {"slices": slices, "microbatches": count, "rank": 3, "ops": ops}
    return replace(case, **changed, calls=calls or ("place",))


def _draw_table(rng: np.random.Generator, *, spreads: dict[str, bool]) -> dict[str, Any]:
    """The arguments of `schedule_of`."""
    if rng.random() < 0.25:
        number = str(rng.integers(10_000))
        schedule = schedule_of(number, 0, 0, None, ())
        return {
            "table": number,
            "devices": schedule.num_devices,
            "microbatches": schedule.num_microbatches,
            "chunks": None,
            "passes": (),
        }
    while True:
        found: dict[str, Any] = {
            "table": str(rng.choice(jp.schedules.names())),
            "devices": int(rng.choice([1, 2, 2, 2, 2, 4])),
            "microbatches": int(rng.choice([1, 2, 2, 3, 3, 4, 5, 7])),
            "chunks": [None, None, 1, 2][rng.integers(4)],
        }
        try:
            schedule = schedule_of(**found, passes=())
        except jp.ScheduleError:
            continue
        if schedule.num_stages > 8:
            continue
        whole = [] if spreads["first"] or spreads["last"] else ["merge_backward"]
        passes = [
            str(n)
            for n in rng.choice(
                ["split_backward", *whole, "add_recompute"], size=rng.integers(0, 2)
            )
        ]
        for end in ("first", "last"):
            passes += [f"spread_{end}"] if spreads[end] and rng.random() < 0.4 else []
        passes += ["defer_last"] if "spread_last" in passes and rng.random() < 0.5 else []
        try:
            schedule_of(**found, passes=tuple(passes))
        except jp.ScheduleError:
            passes = []
        return {**found, "passes": tuple(passes)}


def _draw_mesh(
    rng: np.random.Generator, devices: int
) -> tuple[tuple[tuple[str, int], ...], dict[str, int]]:
    """Axes in any order, of at most 8 devices; sizes of those that may be there, 0 for those that
    are not.
    """
    sizes = {
        "data": int(rng.choice([0, 0, 1, 2])),
        "tensor": int(rng.choice([0, 0, 0, 0, 1, 2])),
        "other": int(rng.choice([0] * 9 + [2])),
    }
    while devices * np.prod([max(size, 1) for size in sizes.values()]) > 8:
        sizes[max(sizes, key=lambda name: sizes[name])] = 0
    axes = [("pipe", devices), *((name, size) for name, size in sizes.items() if size)]
    return tuple(axes[i] for i in rng.permutation(len(axes))), sizes


def _draw_layout(rng: np.random.Generator, stages: int, letters: int) -> str:
    """Each letter at least once, on any of the stages, some of them empty."""
    layers = [
        *LETTERS[:letters],
        *(LETTERS[i] for i in rng.integers(letters, size=rng.integers(0, stages + 3))),
    ]
    if rng.random() < 0.5:
        rng.shuffle(layers)
    else:
        layers.sort()
    bars = sorted(rng.integers(0, len(layers) + 1, size=stages - 1))
    return "|".join(
        "".join(layers[a:b]) for a, b in zip([0, *bars], [*bars, len(layers)], strict=True)
    )
