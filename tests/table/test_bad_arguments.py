"""Anything at all as an argument of anything public: an answer or a JaxpipeError, never an error
from the inside.

`ARGUMENTS=10000 SEED=1 pytest -n 0 -m exhaustive tests/table/test_bad_arguments.py` tries as many
as one likes.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import jaxpipe as jp
from jaxpipe import Costs, Placement, Schedule, megatron, render
from jaxpipe.cli.main import main
from jaxpipe.errors import is_number, quoted
from jaxpipe.layouts import Layout
from jaxpipe.schedules.registry import describe
from tests.odd_values import BROKEN, GOOD, LAYOUT, SPREAD, TIMELINE, draw_value

SECONDS = 10  # of the processor, for one call


def use_schedule(**arguments: Any) -> None:
    """A schedule made as it is, and looked at."""
    schedule = Schedule(**arguments)
    _ = (
        str(schedule),
        repr(schedule),
        hash(schedule),
        schedule.num_chunks,
        schedule.stage_to_device,
        schedule.forward_only,
    )
    _ = (
        Schedule.from_json(schedule.to_json()),
        schedule.to_csv(),
        schedule.violations,
        tuple(schedule.actions()),
    )
    jp.check(schedule)


def use_rows(**arguments: Any) -> None:
    """The same of rows."""
    made = Schedule.from_rows(**arguments)
    use_schedule(
        rows=made.rows,
        placement=made.placement,
        num_microbatches=made.num_microbatches,
        name=made.name,
    )


def use_placement(**arguments: Any) -> None:
    """A placement made as it is, and looked at."""
    placement = Placement(**arguments)
    _ = (
        placement.stage_to_device,
        placement.stages_of,
        placement.num_chunks,
        placement.is_bidirectional,
        hash(placement),
    )
    jp.check(Schedule(GOOD.rows, placement, 2))


def use_costs(**arguments: Any) -> None:
    """Costs made, written, read, and spent: what comes of them is plain."""
    costs = Costs(**arguments)
    assert Costs.from_json(costs.to_json()) == costs
    hash(costs)
    timeline = jp.simulate(GOOD, costs)
    for draw in (render.to_svg, render.to_html, render.to_trace):
        draw(timeline)
    json.dumps([timeline.makespan, timeline.busy, timeline.peak_memory, timeline.idle])


def use_layout(**arguments: Any) -> None:
    """A layout made as it is, and looked at."""
    layout = Layout(**arguments)
    _ = (
        str(layout),
        layout.table(),
        layout.layers,
        layout.placement,
        layout.chunks,
        hash(layout),
    )
    jp.layouts.check_layout(layout)


def read_schedule(**given: Any) -> None:
    """A table as JSON with these fields."""
    if (text := as_json(json.loads(GOOD.to_json()) | given)) is not None:
        Schedule.from_json(text)


def read_costs(**given: Any) -> None:
    """Costs as JSON with these fields."""
    if (text := as_json(given)) is not None:
        Costs.from_json(text)


def as_json(value: object) -> str | None:
    """A value as JSON, where it can be written so."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError, RuntimeError):
        return None


def certified(**arguments: Any) -> None:
    """A certificate, as text."""
    str(jp.table.Certificate(**arguments))


def use_plans(**arguments: Any) -> None:
    """Plans made and written: without a search, which takes the time that it is given, and
    functions, whose errors are their own.
    """
    arguments |= {name: None for name in ("progress", "traced") if callable(arguments[name])}
    arguments |= {"search": 0} if is_number(arguments["search"]) and arguments["search"] > 0 else {}
    plans = jp.plan(**arguments)
    json.dumps([plan.facts() for plan in plans])
    _ = str(plans), repr(plans)


# A function or method, and arguments with which it works, where it has no defaults for them.
TABLE, SIZE, DRAWN = (
    {"schedule": GOOD},
    {"devices": 2, "microbatches": 2},
    {"timeline": TIMELINE, "over": TIMELINE},
)
FIELDS = {
    "num_devices": 2,
    "num_microbatches": 2,
    "stage_to_device": [0, 1],
    "rows": [["0F0"], []],
    "name": "",
}
COST = jp.LayerCost(forward=1e-3, input_grad=1e-3, weight_grad=1e-3, parameters=1e6)
PLANNED: dict[str, Any] = {
    name: parameter.default for name, parameter in inspect.signature(jp.plan).parameters.items()
}
PLANNED |= SIZE | {
    "model": "t*4",
    "costs": {"t": COST},
    "chunks": (1, 2),
    "schedules": ("1f1b", "zb_h1", "dualpipe"),
}
TARGETS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    *(
        (call, TABLE)
        for call in (
            jp.check,
            jp.simulate,
            jp.engine.simulate_steps,
            jp.add_transfers,
            jp.transforms.remove_transfers,
            jp.add_recompute,
        )
    ),
    *(
        (call, TABLE)
        for call in (
            jp.transforms.remove_recompute,
            jp.transforms.remove_spread,
            jp.merge_backward,
            jp.split_backward,
        )
    ),
    *((call, TABLE) for call in (jp.spread_first, jp.spread_last)),
    (jp.defer_last, {"schedule": SPREAD}),
    (
        use_schedule,
        {
            "rows": GOOD.rows,
            "placement": GOOD.placement,
            "num_microbatches": 2,
            "name": "",
            "certificate": None,
        },
    ),
    (use_rows, {"rows": GOOD.rows, "placement": None, "num_microbatches": None, "name": ""}),
    (Schedule.from_csv, {"text": GOOD.to_csv()}),
    (Schedule.from_json, {"text": GOOD.to_json()}),
    (read_schedule, FIELDS),
    (GOOD.with_rows, {"rows": GOOD.rows}),
    (GOOD.violations_under, {"transfers": jp.Transfers.ASYNC}),
    (GOOD.run_order, {"transfers": jp.Transfers.ASYNC}),
    (use_placement, {"devices_of": ((0,), (1,)), "num_devices": 2}),
    *((call, {"devices": 2}) for call in (Placement.loop, Placement.vee, Placement.bidirectional)),
    (Placement.explicit, {"stage_to_device": [0, 1]}),
    (GOOD.placement.chunk_of, {"stage": 0, "device": 0}),
    (jp.table.parse_action, {"text": "0F0"}),
    (jp.table.parse_cell, {"text": "0F0"}),
    (
        use_costs,
        {
            name: parameter.default
            for name, parameter in inspect.signature(Costs).parameters.items()
        },
    ),
    (Costs.from_json, {"text": Costs().to_json()}),
    (read_costs, {"forward": 1, "release": "weight_grad", "unit": "", "last": None}),
    (Costs().for_stages, {"num_stages": 2}),
    (use_plans, PLANNED),
    (jp.LayerCost, {"forward": 1, "input_grad": 1, "weight_grad": 1}),
    (TIMELINE.memory, {"device": 0}),
    (TIMELINE.over, {"planned": TIMELINE}),
    (TIMELINE.start.get, {"key": "0F0"}),
    (render.to_svg, {"timeline": TIMELINE}),
    (render.to_html, DRAWN),
    (render.to_trace, DRAWN),
    (jp.parse_layout, {"text": "Et|tL", "devices": 2}),
    (use_layout, {"stages": ("Et", "tL"), "num_devices": 2}),
    (jp.layouts.check_layout, {"layout": LAYOUT}),
    (
        jp.layouts.balanced_layout,
        {"layers": "Et*4,L", "costs": {"E": 1, "t": 2, "L": 1}, "devices": 2},
    ),
    (jp.layouts.even_layout, {"num_layers": 4, "devices": 2}),
    (jp.layouts.split_layers, {"costs": [1, 2, 3], "stages": 2}),
    (LAYOUT.count, {"letter": "t"}),
    (LAYOUT.stage_costs, {"costs": {"E": 1, "t": 1, "L": 1}}),
    (describe, {"name": "1f1b"}),
    (jp.lower_bound, SIZE),
    (
        certified,
        {
            "objective": jp.table.Objective.PERIOD,
            "value": 2.0,
            "bound": 1,
            "proof": jp.table.Proof.RELAXATION,
            "max_activations": None,
        },
    ),
    (megatron.schedule_table, {"microbatches": 2, "chunks": 2, "group_size": 1}),
    (megatron.warmup_counts, {"microbatches": 4, "devices": 2, "device": 0, "chunks": 2}),
    (megatron.execution_order, {"table": ((0, 0), (1, 0)), "chunks": 1, "warmup": 1}),
    (megatron.order_to_actions, {"order": (1, -1), "devices": 2, "device": 0}),
]
# Each schedule with its options; a search takes the time that it is given.
OPTIONS = {
    name: [o.name for o in describe(name).options if o.name not in ("search", "seed")]
    for name in jp.schedules.names()
}
TARGETS += [
    (jp.schedules.build, SIZE | {"name": name, "chunks": None} | dict.fromkeys(options))
    for name, options in OPTIONS.items()
]


def draw_call(rng: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function, and its arguments, of which one to three are anything."""
    function, needed = rng.choice(TARGETS)
    parameters = inspect.signature(function).parameters.values()
    good = {p.name: p.default for p in parameters if p.default is not p.empty} | needed
    changed = rng.sample(sorted(good), min(len(good), rng.choice((1, 1, 2, 3))))
    return function, good | {name: draw_value(rng) for name in changed}


FLAGS = """-P -M -V -o --costs --backward --overlap --activation --checkpoint --last --first-grad
--width --title --theme --format --release --transfers --max-activations --option --memory
--json --critical-path --forward-only --chunks --schedules --remat --layers --vocab
--search --flops --bogus --devices"""
WORDS = """1 2 4 0 -1 1.5 nan 1e400 1,1,1 1:2,1,1,0.5 x grid html svg trace csv json loop
group_size=2 max_activations=2 placement=0,1 objective=period costs=1 = async rendezvous
none full 80GB - . .. good.csv bad.csv good.json costs.json nowhere.csv out.svg out.csv
a\0b \udcff 999999999999999999999999999999"""
FILES = {
    "good.csv": GOOD.to_csv(),
    "bad.csv": BROKEN.to_csv(),
    "good.json": GOOD.to_json(),
    "broken.json": "{",
    "costs.json": "{}",
}
PLAN = "-P 2 -M 2 --layers 4 --width 64 --vocab 99 --schedules 1f1b -V 1"


def draw_line(rng: random.Random) -> list[str]:
    """A command line."""
    command = rng.choice(
        (
            "list",
            "show",
            "show",
            "simulate",
            "simulate",
            "check",
            "check",
            "compare",
            "compare",
            "plan",
            "bogus",
            "--help",
        )
    )
    line = [command]
    if command in ("show", "simulate", "compare") and rng.random() < 0.8:
        line += [rng.choice(jp.schedules.names()), "-P", rng.choice("124"), "-M", rng.choice("124")]
    elif command == "plan" and rng.random() < 0.5:
        line += PLAN.split()
    elif rng.random() < 0.8:
        line.append(rng.choice((*FILES, "-")))
    for _ in range(rng.randint(0, 3)):
        line += rng.sample(FLAGS.split(), 1) if rng.random() < 0.6 else []
        line += rng.sample([*WORDS.split(), ""], 1) if rng.random() < 0.8 else []
    return line


def run_line(line: list[str]) -> None:
    """A command line ends with 0, 1 or 2 and, where it is 2, with a complaint."""
    before = sys.stdin, sys.stdout, sys.stderr
    said = io.StringIO()
    sys.stdin, sys.stdout, sys.stderr = (
        io.StringIO("0F0,0B0"),
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8"),
        said,
    )
    try:
        status: Any = main(line)
    except SystemExit as stop:  # argparse's own
        status = stop.code
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
    assert status in (0, 1, 2), f"exit status {status}"
    assert status != 2 or said.getvalue(), "nothing is said about what is wrong"


@contextmanager
def limited() -> Iterator[None]:
    """TimeoutError where this takes too long."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def faults(seed: int, count: int) -> Iterator[tuple[str, Exception]]:
    """Of `count` calls and command lines, those that failed on the inside."""
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        function, arguments = (
            (run_line, {"line": draw_line(rng)}) if rng.random() < 0.2 else draw_call(rng)
        )
        with warnings.catch_warnings(), limited():
            warnings.simplefilter("error")
            try:
                function(**arguments)
            except jp.JaxpipeError:
                pass
            except Exception as error:
                shown = ", ".join(f"{name}={quoted(value)}" for name, value in arguments.items())
                yield f"call {number} of seed {seed}: {function.__name__}({shown})", error


def try_calls(folder: Path, seed: int, count: int) -> None:
    """None of so many calls fails on the inside."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    found = [
        f"{what}\n    {type(error).__name__}: {str(error)[:200]}"
        for what, error in faults(seed, count)
    ]
    assert not found, f"{len(found)} of {count} failed on the inside:\n" + "\n".join(found[:20])


def test_some_bad_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try_calls(tmp_path, 1, 1000)


@pytest.mark.exhaustive
def test_many_bad_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try_calls(tmp_path, int(os.environ.get("SEED", "1")), int(os.environ.get("ARGUMENTS", "10000")))
