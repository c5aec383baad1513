"""The commands.  Those that judge something return whether it is good.  Their docstrings are their
descriptions in the help.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from ..engine.bounds import timeline_bound
from ..engine.costs import Costs
from ..engine.simulate import Timeline, simulate
from ..errors import ScheduleError
from ..lowering.target import Target
from ..planner.candidate import COLUMNS, Plans
from ..planner.layer_cost import LayerCost, read_layer_costs
from ..planner.plan import plan
from ..planner.published import command_of, plan_mesh
from ..planner.transformer import Transformer
from ..prices import read_prices, write_prices
from ..render.chart import costs_of, number, title_of
from ..render.html import DEVICE_COLUMNS, device_rows, to_html, to_trace
from ..render.svg import Theme, to_svg
from ..schedules.registry import describe, names
from ..table.encoded import Transfers
from ..table.kinds import KINDS
from ..table.schedule import Certificate, Objective, Proof, Schedule
from ..table.text import json_value
from ..transforms.add_transfers import add_transfers
from . import terminal
from .checks import CHECKS, Findings, Scope, run

# Added for a table that was checked for transfers other than the strictest ones.
_WHERE = {
    Transfers.ASYNC: " where SEND and RECV are posted (async)",
    Transfers.BUFFERED: " where a SEND returns at once (buffered)",
    Transfers.RENDEZVOUS: "",
}


_COMPARED = "schedule,devices,microbatches,chunks,makespan,vs best,bubble,peak activations"


def list_command(arguments: argparse.Namespace) -> None:
    """List the schedules that can be built, or describe those that are named."""
    entries = [describe(name) for name in arguments.names or names()]
    if arguments.json:
        texts = ("name", "summary", "doc")
        facts = [
            {name: getattr(e, name) for name in texts}
            | {"chunks": vars(e.chunks), "options": list(map(vars, e.options))}
            for e in entries
        ]
        terminal.write(json.dumps(facts, indent=2, default=str))
    elif not arguments.names:
        rows = [(e.name, str(e.chunks), e.summary) for e in entries]
        terminal.print_table(("schedule", "chunks", "description"), rows, left=3)
    else:
        for e in entries:
            options = [o for o in e.options if o.name != "forward_only"]
            lines = [f"  --option {o.name}={o.default}  {o.summary}" for o in options] or ["  none"]
            head = f"{e.name}\n\n{e.doc}\n\nchunks: {e.chunks}\noptions:"
            terminal.write("\n".join([head, *lines, ""]))


def show_command(arguments: argparse.Namespace) -> None:
    """Print or draw a schedule."""
    if arguments.json and arguments.format not in (None, "json"):
        raise terminal.UsageError(f"give --json or --format {arguments.format}, not both")
    form = "json" if arguments.json else arguments.format
    if form is None:
        has_suffix = Path(arguments.output or "-").suffix
        form = _format_of(arguments.output) if has_suffix else "grid"
    costs = terminal.read_costs(arguments)
    with terminal.counting(f"making {arguments.source}"):
        schedule = terminal.load(arguments, costs)
        if arguments.transfers and not schedule.has_transfers:
            schedule = add_transfers(schedule, costs=costs)
        text = _written(schedule, form, arguments, costs)
    if arguments.output in (None, "-"):
        terminal.write(text)
    else:
        terminal.save(arguments.output, text)


def simulate_command(arguments: argparse.Namespace) -> None:
    """Simulate a schedule with given costs."""
    costs, transfers = terminal.read_costs(arguments), Transfers(arguments.transfers)
    with terminal.counting(f"simulating {arguments.source}"):
        schedule = terminal.load(arguments, costs, transfers=transfers)
        t = simulate(schedule, costs, transfers=transfers)
    found = None
    if not t.schedule.forward_only:
        bound, cap = timeline_bound(t)
        found = Certificate(Objective.MAKESPAN, t.makespan, bound, Proof.RELAXATION, cap)
    if arguments.json:
        terminal.write_json(
            **_schedule_facts(t.schedule),
            **_sums(t, 1),
            costs=_cost_facts(t.costs),
            lower_bound=found and found.bound,
            busy=t.busy,
            idle=[idle._asdict() for idle in t.idle],
            critical_path=t.critical_path,
            start=dict(t.start),
            end=dict(t.end),
        )
        return
    terminal.write(f"{title_of(t)}\ncosts {costs_of(t)}\n")
    terminal.write(f"makespan  {number(t.makespan)}\nspan      {number(t.span)}")
    terminal.write(f"bubble    {t.bubble:.2%}\n")
    terminal.print_table(DEVICE_COLUMNS, device_rows(t))
    if found is not None:
        terminal.write(f"of this placement: {found}")


def check_command(arguments: argparse.Namespace) -> bool:
    """Check a table: completeness, order, placement, deadlock, and a cap on activations."""
    most, transfers = arguments.max_activations, Transfers(arguments.transfers)
    if most is not None and most < 0:
        raise terminal.UsageError(f"--max-activations must be at least 0, not {most}")
    facts = {"file": arguments.file, "transfers": transfers.value}
    try:
        with terminal.counting(f"checking {arguments.file}"):
            s = terminal.read(arguments.file, arguments.slices)
            s = terminal.checked(s, transfers=transfers, max_activations=most)
    except terminal.InvalidScheduleError as error:
        names = ("rule", "message", "device", "position")
        rules = [{name: getattr(v, name) for name in names} for v in error.violations]
        if arguments.json:
            terminal.write_json(**facts, ok=False, violations=rules, report=str(error))
        else:
            terminal.write(str(error))
        return False
    if arguments.json:
        terminal.write_json(**facts, ok=True, violations=[], **_schedule_facts(s))
    else:
        terminal.write(
            f"{arguments.file} is valid: {s.num_devices} devices, {s.num_stages} stages, "
            f"{s.num_microbatches} microbatches, {s.encoded.num_actions} actions; it cannot "
            f"deadlock{_WHERE[transfers] if s.has_transfers else ''}"
        )
    return True


def compare_command(arguments: argparse.Namespace) -> None:
    """Simulate several schedules of one model.  Costs are those of 1/P of the model: a stage of
    a schedule with S stages costs P/S of them, and its activations count P/S too, so that
    schedules with different chunks can be compared.  Each schedule uses the nearest number
    of --chunks that it allows, and ignores each --option that it does not take.
    """
    costs = terminal.read_costs(arguments)
    by_stage = (value for name, value in vars(costs).items() if name != "slice_factors")
    if any(isinstance(value, tuple) for value in by_stage):
        raise terminal.UsageError(
            "compare takes one number for each cost, since the schedules have different stages; "
            "leave the ':' out"
        )
    sources = arguments.sources or names()
    entries = [describe(source) for source in sources if not terminal.is_file(source)]
    known = sorted({option.name for entry in entries for option in entry.options})
    unknown = sorted({*terminal.read_options(arguments.option)} - {*known})
    if unknown:
        raise terminal.UsageError(
            f"no schedule of these takes --option {', '.join(unknown)}; they take "
            f"{', '.join(known) or 'none'}"
        )
    results: list[tuple[Timeline, float]] = []
    skipped: list[str] = []
    with terminal.counting("simulating") as progress:
        for done, source in enumerate(sources, 1):
            try:
                results.append(_one_of_many(source, arguments, costs))
            except ScheduleError as error:
                # Without names, all schedules that can be built are compared; one that is named
                # must be built.
                if arguments.sources:
                    raise
                skipped.append(f"left out: {error}")
            progress(done, len(sources))
    if not results:
        terminal.UsageError.refuse("no schedule can be built with these arguments", skipped)
    if arguments.json:
        each = [_schedule_facts(t.schedule) | _sums(t, share) for t, share in results]
        terminal.write_json(costs=_cost_facts(costs), schedules=each, left_out=skipped)
        return
    _print_comparison(results, costs)
    for line in skipped:
        terminal.complain(line)


def _one_of_many(
    source: str, arguments: argparse.Namespace, costs: Costs
) -> tuple[Timeline, float]:
    """A schedule's timeline with its share of the costs, and that share: a stage holds P / S of a
    device's part of the model.
    """
    if terminal.is_file(source):
        schedule = terminal.checked(terminal.read(source, arguments.slices))
    else:
        entry = describe(source)
        chunks = entry.chunks.natural
        if arguments.chunks is not None:
            chunks = entry.chunks.nearest(arguments.chunks)
        known = {option.name for option in entry.options}
        options = [pair for pair in arguments.option if pair.partition("=")[0] in known]
        own = vars(arguments) | {"source": source, "chunks": chunks, "option": options}
        schedule = terminal.load(argparse.Namespace(**own), _shared(costs, 1 / chunks))
    share = schedule.num_devices / schedule.num_stages
    return simulate(schedule, _shared(costs, share)), share


def _print_comparison(results: list[tuple[Timeline, float]], costs: Costs) -> None:
    best = min(t.makespan for t, _ in results)
    rows: list[tuple[str, ...]] = []
    for t, share in results:
        s = t.schedule
        shape = map(str, (s.num_devices, s.num_microbatches, s.num_chunks))
        times = number(t.makespan), f"{t.makespan / best:.3f}" if best else "-"
        peak = number(max(t.peak_memory) * share)
        rows.append((s.name, *shape, *times, f"{t.bubble:.2%}", peak))
    styles = {i: terminal.BEST for i, (t, _) in enumerate(results) if t.makespan == best}
    terminal.print_table(_COMPARED.split(","), rows, styles=styles)
    every = ((name, v) for name, v in vars(costs).items() if isinstance(v, int | float))
    texts = ", ".join(f"{name.replace('_', ' ')} {number(v)}" for name, v in every)
    terminal.write(f"costs and activations of a P-th of the model: {texts}")


def _sums(t: Timeline, share: float) -> dict[str, object]:
    names = ("makespan", "span", "bubble", "peak_activations")
    sums = {name: getattr(t, name) for name in names}
    return sums | {"peak_memory": [held * share for held in t.peak_memory]}


def _shared(costs: Costs, share: float) -> Costs:
    """The costs of a stage that is this share of a device's part of the model; transfers and memory
    are not scaled.
    """
    if share == 1:
        return costs
    names = [spec.cost for spec in KINDS if spec.cost is not None] + ["overlap"]
    times = {n: t * share for n in names if (t := getattr(costs, n)) is not None}
    return replace(costs, **times)


def _written(schedule: Schedule, form: str, arguments: argparse.Namespace, costs: Costs) -> str:
    """A schedule in a format."""
    if form == "grid":
        return str(schedule)
    if form in ("csv", "json"):
        return schedule.to_csv() if form == "csv" else schedule.to_json()
    timeline = simulate(schedule, costs)
    if form == "trace":
        return to_trace(timeline)
    look = terminal.given(arguments, "title", "width")
    if form == "html":
        return to_html(timeline, **look)
    look |= terminal.given(arguments, "memory", "critical_path")
    return to_svg(timeline, **look, theme=Theme(arguments.theme))


# The format of a file by the end of its name.
_FORMATS = {".html": "html", ".htm": "html", ".trace.json": "trace", ".txt": "grid"}
_FORMATS |= {f".{form}": form for form in ("csv", "svg", "json")}


def _format_of(output: str, among: Collection[str] = _FORMATS.values()) -> str:
    """The format of a file, one of these."""
    ends = {end: form for end, form in _FORMATS.items() if form in among}
    for end, form in ends.items():
        if output.lower().endswith(end):
            return form
    raise terminal.UsageError(
        f"no format is known for {output}; its name must end in {' or '.join(ends)}"
    )


def _schedule_facts(schedule: Schedule) -> dict[str, object]:
    return {
        "name": schedule.name,
        "devices": schedule.num_devices,
        "stages": schedule.num_stages,
        "chunks": schedule.num_chunks,
        "microbatches": schedule.num_microbatches,
        "slices": schedule.slices,
        "stage_to_device": schedule.stage_to_device,
        "actions": schedule.encoded.num_actions,
        "forward_only": schedule.forward_only,
    }


def _cost_facts(costs: Costs) -> dict[str, object]:
    return vars(costs) | {"release": costs.release.value}


_DRAWN: dict[str, Callable[..., str]] = {"svg": to_svg, "html": to_html}
_CHOICES = ("memory", "schedules", "within", "chunks", "remat")
_PLANS = 5
_SHOWN = 12  # of the rejected plans


def plan_command(arguments: argparse.Namespace) -> None:
    """Find the fastest pipelines of a model that fit into memory.  A plan has layers of stages,
    schedule, chunks and remat, with a step's seconds and a device's memory.  The model is given by
    its sizes (a decoder-only transformer; times are then estimates) or by a file of costs.
    """
    form = arguments.output and _format_of(arguments.output, _DRAWN)
    plans, command = (_of_layers if arguments.model is None else _published)(arguments)
    if form:
        draw, title = _DRAWN[form], f"{plans.best.label}: {plans.best.layout}"
        terminal.save(arguments.output, draw(plans.best.timeline, title=title))
    if arguments.json:
        left = [{"plan": r.what, "why": r.why, "seconds": r.seconds} for r in plans.rejected]
        each = [p.facts() for p in plans]
        terminal.write_json(plans=each, rejected=left, prices=plans.prices, command=command)
        return
    terminal.print_table(COLUMNS, plans.rows(), left=2, styles={0: terminal.BEST})
    lines = [f"best: {plans.best.why}", f"prices: {plans.prices}"]
    if not arguments.costs:
        lines.append(
            "times are estimates from flops at a stated rate; measure with jaxpipe.measure"
        )
    if plans.rejected:
        lines += ["left out:", *(f"  {r}" for r in plans.rejected[:_SHOWN])]
    if len(plans.rejected) > _SHOWN:
        lines.append(f"  ... and {len(plans.rejected) - _SHOWN} more")
    terminal.write("\n".join(lines + ([command] if command else [])))


def _of_layers(arguments: argparse.Namespace) -> tuple[Plans, str | None]:
    """Plans of a model by its sizes, or by a file of costs, and no command."""
    advice = "give {}, or --model NAME --gpus N --batch N --memory SIZE to choose them"
    terminal.require(arguments, "devices", "microbatches", advice=advice)
    layers, costs, transfer = (
        _from_file(arguments.costs) if arguments.costs else _from_sizes(arguments)
    )
    with terminal.counting("planning") as progress:
        plans = plan(
            layers,
            costs,
            **_choices(arguments, "devices", "microbatches", "slices", "search", "fsdp_bandwidth"),
            fsdp=None if arguments.fsdp is None else {"data": arguments.fsdp},
            transfer=transfer,
            offload=(None,) if arguments.no_offload else (None, "residuals"),
            most=_PLANS,
            progress=progress,
            mesh=Target(communicates=(arguments.tensor or 1) > 1),
        )
    return plans, None


def _published(arguments: argparse.Namespace) -> tuple[Plans, str]:
    """Plans of a published model with the mesh chosen, and the command that runs the best."""
    terminal.require(arguments, "gpus", "batch", "memory", advice="--model needs {} too")
    own = {*_CHOICES, "command", "run", "json", "output", "model", "gpus", "batch"}
    own |= {"context", "flops", "tensor", "fp8"}
    excess = [name for name, v in vars(arguments).items() if v and name not in own]
    if excess:
        flags = ", ".join(map(terminal.flag, excess))
        raise terminal.UsageError(
            f"--model {arguments.model} has its own sizes and mesh; leave out {flags}"
        )
    name, context = arguments.model, int(arguments.context or 8192)
    choices = _choices(arguments, "gpus", "batch", "flops", "fp8")
    if arguments.tensor is not None:
        choices["tensor"] = (int(arguments.tensor),)
    with terminal.counting(f"planning {name}") as progress:
        plans = plan_mesh(name, **choices, context=context, progress=progress)
    rows, fp8 = arguments.batch, arguments.fp8
    return plans, command_of(name, plans.best, batch=rows, context=context, fp8=fp8)


def _choices(arguments: argparse.Namespace, *more: str) -> dict[str, Any]:
    """The limits and the choices that the command line gives, and more arguments."""
    found = terminal.given(arguments, *_CHOICES, *more)
    if "remat" in found:
        found["remat"] = [None if name == "none" else name for name in found["remat"]]
    return found


# Letters of layers, their costs, and seconds of a hop.
_LayerCosts: TypeAlias = tuple[str, dict[str, LayerCost], float]


def _from_sizes(arguments: argparse.Namespace) -> _LayerCosts:
    advice = "give {}, or --costs FILE; e.g. --layers 80 --width 8192 --vocab 128256"
    terminal.require(arguments, "layers", "width", "vocab", advice=advice)
    names = (field.name for field in fields(Transformer))
    model = Transformer(**terminal.given(arguments, *names))
    model = model if arguments.bandwidth else model.on(arguments.devices)
    if arguments.layers < 1:
        raise terminal.UsageError(f"--layers must be at least 1, not {arguments.layers}")
    costs = {c: cost.split(max(1, arguments.fsdp or 1)) for c, cost in model.costs().items()}
    return f"Et*{arguments.layers},L", costs, model.transfer


def _from_file(name: str) -> _LayerCosts:
    facts: Any = json_value(terminal.read_text(name))
    match facts:
        case {"layers": str(layers), "costs": dict(costs)}:
            return layers, read_layer_costs(costs), facts.get("transfer", 0.0)
    raise terminal.UsageError(
        f'{name} must hold {{"layers": "Et*80,L", "costs": {{"t": {{"forward": 0.01, ...}}, '
        '...}, "transfer": seconds}'
    )


_STYLES = {"ok": "green", "slow": "yellow", "wrong": "bold red", "not tried": "bright_black"}
_PAGE_WIDTH = 180  # characters


def doctor_command(arguments: argparse.Namespace) -> bool:
    """Check this machine before a long run.  Checks are of versions with known faults, options of
    XLA, numbers of six schedules against the plain function, times of predicates, hops and copies,
    memory and speed.  Each check has a limit of time; a hang is ended and named.  Measured times go
    into a file that Pipeline and plan read (JAXPIPE_PRICES, or the user's folder of
    settings).  Exit status 1 where a line is wrong.
    """
    if find_spec("jax") is None:
        raise terminal.UsageError(
            f"the checks run JAX, which {sys.executable} does not have: install jax, jax[cuda12] "
            "for NVIDIA GPUs, or jax[tpu]"
        )
    _refuse(arguments)
    _format_of(arguments.output or ".html", ["html"])
    wanted = [c for c in CHECKS if (arguments.only or "") in c.item]
    if not wanted:
        raise terminal.UsageError(
            f"no check has {arguments.only!r} in its title; titles are "
            f"{', '.join(c.item for c in CHECKS)}"
        )
    writes = not arguments.no_prices and arguments.process == 0
    if writes:
        read_prices()  # the checks take minutes: a faulty file is refused before them
    names = ("devices", "steps", "coordinator", "processes", "process")
    scope = Scope(**terminal.given(arguments, *names))
    with terminal.counting("checking") as tell:
        report = run(scope, minutes=arguments.minutes, checks=wanted, tell=tell)
    path = None
    if report.prices and writes:
        versions = [line.measured for line in report.lines if line.item == "versions"]
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        measured = ", ".join(filter(None, [day, *versions]))
        path = write_prices(report.kind, report.prices, measured)
        terminal.complain(f"wrote the prices of {report.kind} to {path}")
    if arguments.output is not None:
        picture = Console(record=True, file=io.StringIO(), width=_PAGE_WIDTH, force_terminal=True)
        picture.print(f"jaxpipe doctor: {report.kind or 'no device'}", highlight=False)
        _print(report, picture)
        for name, seconds in report.prices.items():
            picture.print(f"price of {name}: {seconds * 1e6:.3g} us", highlight=False)
        terminal.save(arguments.output, picture.export_html())
    if arguments.json:
        terminal.write_json(**asdict(report), prices_file=path and str(path))
    else:
        _print(report)
    return report.is_good


def _print(report: Findings, console: Console | None = None) -> None:
    header = ("item", "verdict", "measured", "expected", "what to do")
    rows = [[str(text) for text in vars(line).values()] for line in report.lines]
    styles = {i: _STYLES[row[1]] for i, row in enumerate(rows)}
    terminal.print_table(header, rows, left=len(header), styles=styles, console=console)


def _refuse(arguments: argparse.Namespace) -> None:
    """UsageError for numbers that do not fit."""
    devices, processes = arguments.devices, arguments.processes
    least = terminal.given(arguments, "devices", "steps", "processes")
    faults = [f"--{name} must be at least 1" for name, n in least.items() if n < 1]
    if arguments.minutes <= 0:
        faults.append("--minutes must be above 0")
    if not 0 <= arguments.process < processes:
        faults.append("--process must be a number from 0 to --processes less 1")
    if (processes > 1) != (arguments.coordinator is not None):
        faults.append("several processes need --coordinator HOST:PORT, --processes and --process")
    if devices is not None and processes > 0 and devices % processes:
        faults.append("--devices must divide over --processes")
    terminal.UsageError.refuse("", faults)
