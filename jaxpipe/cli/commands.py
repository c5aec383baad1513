"""The commands about schedules; each returns False where a table is invalid.  Their docstrings are
their descriptions in the help.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..engine.bounds import timeline_bound
from ..engine.costs import Costs
from ..engine.simulate import Timeline, simulate
from ..errors import ScheduleError
from ..render import Theme, to_html, to_svg, to_trace
from ..render.chart import DEVICE_COLUMNS, costs_of, device_rows, number, title_of
from ..schedules import names
from ..schedules.registry import describe
from ..table.kinds import KINDS
from ..table.run_order import Transfers
from ..table.schedule import Schedule
from ..transforms.add_transfers import add_transfers
from .arguments import (
    InvalidScheduleError,
    UsageError,
    checked,
    file_path,
    is_file,
    load,
    read,
    read_costs,
    read_options,
)
from .terminal import BEST, complain, counting, print_table, save, write

# Added for a table that was checked for transfers other than the strictest ones.
_WHERE = {
    Transfers.ASYNC: " where SEND and RECV are posted (async)",
    Transfers.BUFFERED: " where a SEND returns at once (buffered)",
    Transfers.RENDEZVOUS: "",
}
_NO_GAP = 1e-9


def list_command(arguments: argparse.Namespace) -> bool:
    """List the schedules that can be built, or describe those that are named."""
    entries = [describe(name) for name in arguments.names or names()]
    if arguments.json:
        facts = [
            {
                "name": e.name,
                "summary": e.summary,
                "chunks": vars(e.chunks),
                "options": [vars(option) for option in e.options],
                "doc": e.doc,
            }
            for e in entries
        ]
        write(json.dumps(facts, indent=2, default=str))
        return True
    if not arguments.names:
        rows = [(e.name, str(e.chunks), e.summary) for e in entries]
        print_table(("schedule", "chunks", "description"), rows, left=3)
        return True
    for e in entries:
        options = [o for o in e.options if o.name != "forward_only"]
        lines = [f"  --option {o.name}={o.default}  {o.summary}" for o in options]
        lines = ["options:", *lines, ""] if lines else []
        write("\n".join([f"{e.name}\n\n{e.doc}\n\nchunks: {e.chunks}", *lines, ""]))
    return True


def show_command(arguments: argparse.Namespace) -> bool:
    """Print or draw a schedule."""
    if arguments.json and arguments.format not in (None, "json"):
        raise UsageError(f"give --json or --format {arguments.format}, not both")
    form = "json" if arguments.json else arguments.format or _format_of(arguments.output)
    costs = read_costs(arguments)
    with counting(f"making {arguments.source}"):
        schedule = load(arguments, costs)
        if arguments.transfers and not schedule.has_transfers:
            schedule = add_transfers(schedule, costs=costs)
        text = _written(schedule, form, arguments, costs)
    if arguments.output in (None, "-"):
        write(text)
    else:
        save(file_path(arguments.output), text)
    return True


def simulate_command(arguments: argparse.Namespace) -> bool:
    """Simulate a schedule with given costs."""
    costs, transfers = read_costs(arguments), Transfers(arguments.transfers)
    with counting(f"simulating {arguments.source}"):
        schedule = load(arguments, costs, transfers=transfers)
        t = simulate(schedule, costs, transfers=transfers)
    if arguments.json:
        bound = {} if t.schedule.forward_only else {"lower_bound": timeline_bound(t)[0]}
        write(json.dumps(_timeline_facts(t) | bound))
        return True
    write(f"{title_of(t)}\ncosts {costs_of(t)}\n")
    head = {"makespan": number(t.makespan), "span": number(t.span), "bubble": f"{t.bubble:.2%}"}
    write("\n".join(f"{name:<9} {value}" for name, value in head.items()) + "\n")
    print_table(DEVICE_COLUMNS, device_rows(t))
    if not t.schedule.forward_only:
        write(_gap_text(t))
    return True


def _gap_text(t: Timeline) -> str:
    """How far from optimal a schedule can be."""
    bound, held = timeline_bound(t)
    gap = t.makespan / bound - 1 if bound else 0.0
    memory = "" if held is None else f" and at most {held} activations a device without R"
    within = (
        "none is shorter" if gap < _NO_GAP else f"it is at most {gap:.2%} longer than the shortest"
    )
    return f"lower bound {number(bound)} for this placement{memory}: {within}"


def check_command(arguments: argparse.Namespace) -> bool:
    """Check a table: completeness, order, placement, deadlock, and a cap on activations."""
    if arguments.max_activations is not None and arguments.max_activations < 0:
        raise UsageError(f"--max-activations must be at least 0, not {arguments.max_activations}")
    transfers = Transfers(arguments.transfers)
    facts: dict[str, Any] = {"file": arguments.file, "ok": True, "transfers": transfers.value}
    try:
        with counting(f"checking {arguments.file}"):
            s = checked(
                read(arguments.file, arguments.slices),
                transfers=transfers,
                max_activations=arguments.max_activations,
            )
    except InvalidScheduleError as error:
        names = ("rule", "message", "device", "position")
        rules = [{name: getattr(v, name) for name in names} for v in error.violations]
        facts |= {"ok": False, "violations": rules, "report": str(error)}
        write(json.dumps(facts) if arguments.json else str(error))
        return False
    if arguments.json:
        write(json.dumps(facts | _schedule_facts(s) | {"violations": []}))
        return True
    write(
        f"{arguments.file} is valid: {s.num_devices} devices, {s.num_stages} stages, "
        f"{s.num_microbatches} microbatches, {s.encoded.num_actions} actions; it cannot "
        f"deadlock{_WHERE[transfers] if s.has_transfers else ''}"
    )
    return True


def compare_command(arguments: argparse.Namespace) -> bool:
    """Simulate several schedules of one model.  Costs are those of 1/P of the model: a stage of
    a schedule with S stages costs P/S of them, and its activations count P/S too, so that
    schedules with different chunks can be compared.  Each schedule uses the nearest number
    of --chunks that it allows, and ignores each --option that it does not take.
    """
    costs = read_costs(arguments)
    by_stage = (value for name, value in vars(costs).items() if name != "slice_factors")
    if any(isinstance(value, tuple) for value in by_stage):
        raise UsageError(
            "compare takes one number for each cost, since the schedules have different stages; "
            "leave the ':' out"
        )
    sources = arguments.sources or names()
    _refuse_unknown_options(arguments, sources)
    results: list[tuple[Timeline, float]] = []
    skipped: list[str] = []
    with counting("simulating") as progress:
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
        raise UsageError("\n".join(["no schedule can be built with these arguments:", *skipped]))
    if arguments.json:
        schedules = [_schedule_facts(t.schedule) | _sums(t, share) for t, share in results]
        facts = {"costs": _cost_facts(costs), "schedules": schedules, "left_out": skipped}
        write(json.dumps(facts))
        return True
    _print_comparison(results, costs)
    if skipped:
        complain("\n".join(skipped))
    return True


def _one_of_many(
    source: str, arguments: argparse.Namespace, costs: Costs
) -> tuple[Timeline, float]:
    """A schedule's timeline with its share of the costs, and that share: a stage holds P / S of a
    device's part of the model.
    """
    if is_file(source):
        schedule = checked(read(source, arguments.slices))
    else:
        entry = describe(source)
        chunks = entry.chunks.natural
        if arguments.chunks is not None:
            chunks = entry.chunks.nearest(arguments.chunks)
        known = {option.name for option in entry.options}
        options = [pair for pair in arguments.option if pair.partition("=")[0] in known]
        own = vars(arguments) | {"source": source, "chunks": chunks, "option": options}
        schedule = load(argparse.Namespace(**own), _shared(costs, 1 / chunks))
    share = schedule.num_devices / schedule.num_stages
    return simulate(schedule, _shared(costs, share)), share


def _refuse_unknown_options(arguments: argparse.Namespace, sources: Sequence[str]) -> None:
    """UsageError for an option that none of the schedules takes (each gets the options that it
    takes).
    """
    known = {
        option.name
        for source in sources
        if not is_file(source)
        for option in describe(source).options
    }
    unknown = sorted(set(read_options(arguments.option)) - known)
    if unknown:
        raise UsageError(
            f"no schedule of these takes --option {', '.join(unknown)}; they take "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def _print_comparison(results: list[tuple[Timeline, float]], costs: Costs) -> None:
    best = min(t.makespan for t, _ in results)
    columns = "schedule,devices,microbatches,chunks,makespan,vs best,bubble,peak activations"
    rows: list[tuple[str, ...]] = []
    best_rows: dict[int, str] = {}
    for i, (t, share) in enumerate(results):
        s = t.schedule
        shape = map(str, (s.num_devices, s.num_microbatches, s.num_chunks))
        ratio = f"{t.makespan / best:.3f}" if best else "-"
        peak = number(max(t.peak_memory) * share)
        rows.append((s.name, *shape, number(t.makespan), ratio, f"{t.bubble:.2%}", peak))
        best_rows |= {i: BEST} if t.makespan == best else {}
    print_table(columns.split(","), rows, styles=best_rows)
    write(f"costs and activations of a P-th of the model: {_cost_text(costs)}")


def _sums(t: Timeline, share: float) -> dict[str, Any]:
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
    times: dict[str, Any] = {name: getattr(costs, name) for name in names}
    return replace(costs, **{name: t * share for name, t in times.items() if t is not None})


def _written(schedule: Schedule, form: str, arguments: argparse.Namespace, costs: Costs) -> str:
    """A schedule in a format."""
    if form == "grid":
        return str(schedule)
    if form in ("csv", "json"):
        return schedule.to_csv() if form == "csv" else schedule.to_json()
    timeline = simulate(schedule, costs)
    if form == "trace":
        return to_trace(timeline)
    look = {"title": arguments.title, "width": arguments.width}
    if form == "html":
        return to_html(timeline, **look)
    return to_svg(
        timeline,
        **look,
        theme=Theme(arguments.theme),
        memory=arguments.memory,
        critical_path=arguments.critical_path,
    )


def _format_of(output: str | None) -> str:
    """The format of a file's suffix; the grid where there is none."""
    suffix = Path(output or "-").suffix.lower().removeprefix(".")
    if suffix in ("", "txt"):
        return "grid"
    if str(output).lower().endswith(".trace.json"):
        return "trace"
    if suffix not in ("csv", "svg", "html", "htm", "json"):
        raise UsageError(
            f"no format is known for {output}; give --format, or a file that ends in .trace.json, "
            ".csv, .svg, .html, .htm, .json or .txt"
        )
    return "html" if suffix == "htm" else suffix


def _schedule_facts(schedule: Schedule) -> dict[str, Any]:
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


def _timeline_facts(t: Timeline) -> dict[str, Any]:
    return {
        **_schedule_facts(t.schedule),
        "costs": _cost_facts(t.costs),
        **_sums(t, 1),
        "busy": t.busy,
        "idle": [idle._asdict() for idle in t.idle],
        "critical_path": t.critical_path,
        "start": dict(t.start),
        "end": dict(t.end),
    }


def _cost_facts(costs: Costs) -> dict[str, Any]:
    return vars(costs) | {"release": costs.release.value}


def _cost_text(costs: Costs) -> str:
    numbers = ((name, v) for name, v in vars(costs).items() if isinstance(v, int | float))
    return ", ".join(f"{name.replace('_', ' ')} {number(v)}" for name, v in numbers)
