"""Whatever is given as text or as a number: an answer, or a JaxpipeError (exit status 1 or 2)
within a second, never a traceback.

Few examples by default; `HYPOTHESIS_PROFILE=thorough` tries many more.
"""

from __future__ import annotations

import io
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from frugal import quick
from hypothesis import HealthCheck, example, given, settings, strategies as st
from strategies import few, schedules

import jaxpipe as jp
from jaxpipe import Costs, Schedule, Transfers
from jaxpipe.cli.main import main
from jaxpipe.layouts.layout import (
    balanced_layout,
    check_layout,
    even_layout,
    parse_layout,
    split_layers,
)
from jaxpipe.render import to_html, to_svg, to_trace

HUGE = 10**5000
NASTY = (
    "0F" + "9" * 5000,
    f"0F{2**64}",
    "\uff10F\uff10",
    "(" * 200,
    "0F0\r0",
    "a\0b",
    "\ud800",
    "\ufeff",
    '"',
    "0F-1",
    "0F1_0",
    "0UNSHARD",
)


def survives(call: Callable[[], Any]) -> Any:
    """What a call returns, or None where it raises a JaxpipeError, soon and with a message that can
    be read; no warnings either.
    """
    message = ""

    def attempt() -> Any:
        nonlocal message
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                return call()
            except jp.JaxpipeError as error:
                message = str(error)
        return None

    start = time.thread_time()
    found = attempt()
    spent = time.thread_time() - start
    if not message:
        return found
    assert len(message) < 50_000
    assert quick(attempt, spent=spent)
    return None


def exercise(schedule: Schedule) -> None:
    """Everything that takes a table, whether the table is valid or not."""
    str(schedule)
    assert Schedule.from_json(schedule.to_json()) == schedule
    for transfers in Transfers:
        survives(lambda t=transfers: jp.check(schedule, transfers=t, max_activations=1))
        survives(lambda t=transfers: jp.simulate(schedule, transfers=t).critical_path)
        survives(lambda t=transfers: jp.engine.simulate_steps(schedule, transfers=t))
    for change in (
        jp.add_transfers,
        jp.transforms.remove_transfers,
        jp.merge_backward,
        jp.split_backward,
        jp.add_recompute,
        jp.transforms.remove_recompute,
    ):
        survives(lambda c=change: c(schedule))


# Tables as CSV.

cells = st.one_of(
    st.from_regex(r"[0-3](F|B|I|W|R|SEND_F|RECV_F|SEND_B|RECV_B)[0-3]", fullmatch=True),
    st.from_regex(r"\([0-3]F[0-3];[0-3][BI][0-3]\)OVERLAP_F_B", fullmatch=True),
    st.sampled_from(["", "", " 0F0 ", *NASTY]),
    st.text(max_size=8),
)
lines = st.lists(cells, max_size=8).map(",".join)
texts = st.lists(
    st.tuples(lines, st.sampled_from(["\n", "\n", "\r\n", "\r", ""])).map("".join), max_size=5
).map("".join)


@st.composite
def damaged(draw: st.DrawFn, good: st.SearchStrategy[str]) -> str:
    """A good text with a few pieces taken out, doubled or replaced."""
    text = draw(good)
    for _ in range(draw(st.integers(0, 3))):
        a = draw(st.integers(0, len(text)))
        b = draw(st.integers(a, min(len(text), a + 12)))
        text = (
            text[:a]
            + draw(
                st.one_of(
                    st.just(""), st.just(text[a:b] * 2), st.sampled_from(NASTY), st.text(max_size=4)
                )
            )
            + text[b:]
        )
    return text


@few
@given(
    st.one_of(
        texts,
        damaged(schedules().map(lambda s: s.to_csv())),
        damaged(schedules().map(lambda s: jp.add_transfers(s).to_csv())),
    )
)
@example("0F0,0F9999999999\n")
@example("9999999999F0")
@example("(9999999999F0;0B0)OVERLAP_F_B\n0F9999999999")
def test_csv(text):
    schedule = survives(lambda: Schedule.from_csv(text))
    if schedule is not None:
        exercise(schedule)


# Tables as JSON.

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 5),
        st.just(2**64),
        st.floats(),
        st.text(max_size=5),
        cells,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)
FIELDS = ("format", "version", "name", "num_devices", "num_microbatches", "stage_to_device", "rows")


@st.composite
def json_tables(draw: st.DrawFn) -> str:
    """A JSON table of which a few fields are missing or anything at all."""
    data = json.loads(draw(schedules()).to_json())
    for field in draw(st.lists(st.sampled_from(FIELDS), max_size=3)):
        if draw(st.booleans()):
            data.pop(field, None)
        else:
            data[field] = draw(
                st.one_of(
                    values,
                    st.lists(st.lists(cells, max_size=4), max_size=4),
                    st.lists(st.integers(0, 5), max_size=5),
                )
            )
    return json.dumps(data)


@given(
    st.one_of(
        json_tables(),
        damaged(schedules().map(lambda s: s.to_json())),
        values.map(json.dumps),
        st.text(max_size=20),
    )
)
def test_json(text):
    schedule = survives(lambda: Schedule.from_json(text))
    if schedule is not None:
        exercise(schedule)


# Layouts.

numbers = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([10**5, 10**12, 2**64, HUGE, -HUGE, 1.5, float("nan"), "2", None, True]),
)
layouts = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "E",
                "t",
                "m",
                "L",
                "|",
                "(",
                ")",
                "*",
                "*3",
                "*0",
                ",",
                " ",
                "\n",
                "12",
                "*99999",
                "*9999999999",
                "\uff13",
                "x",
            ]
        ),
        st.text(max_size=2),
    ),
    max_size=24,
).map("".join)


@given(layouts, numbers, st.sampled_from(["EtmL", "EtmLx", "", "t*", "tt"]))
@example("(" * 300 + "t" + ")" * 300, 1, "EtmL")
def test_layouts(text, devices, letters):
    layout = survives(lambda: parse_layout(text, devices=devices, letters=letters))
    survives(
        lambda: balanced_layout(
            text,
            {"E": 1, "t": 2, "m": 3, "L": 4},
            devices=devices,
            letters=letters,
            allow_empty=True,
        )
    )
    if layout is None:
        return
    assert parse_layout(str(layout), devices=devices, letters=letters) == layout
    assert layout.table()
    survives(lambda: check_layout(layout))
    survives(lambda: layout.stage_costs({"t": 1}))


entries = st.one_of(
    st.floats(),
    st.integers(-1, 5),
    st.sampled_from([HUGE, 10**400, 1e200, None, "1", True, 1j, [1], (), {}, float("inf"), 1e-320]),
)


@given(st.one_of(st.lists(entries, max_size=8), entries), numbers, st.booleans())
def test_splits(costs, stages, allow_empty):
    pieces = survives(lambda: split_layers(costs, stages=stages, allow_empty=allow_empty))
    assert pieces is None or [i for piece in pieces for i in piece] == list(range(len(costs)))


@given(numbers, numbers, numbers, numbers, st.booleans(), st.one_of(st.none(), numbers))
def test_even_layouts(layers, devices, chunks, mtp_layers, counted, first):
    survives(
        lambda: (
            even_layout(
                layers,
                devices=devices,
                chunks=chunks,
                mtp_layers=mtp_layers,
                count_embedding=counted,
                first_device=first,
            ).layers
        )
    )


# Costs, and what is built and drawn by them.

cost = st.one_of(
    entries, st.lists(entries, max_size=3), st.lists(st.floats(0, 1e100), min_size=2, max_size=2)
)
TIMES = (
    "forward",
    "input_grad",
    "weight_grad",
    "transfer",
    "backward",
    "overlap",
    "activation",
    "recompute",
    "checkpoint",
)


@given(st.dictionaries(st.sampled_from((*TIMES, "release")), cost, max_size=3))
def test_costs(given_costs):
    costs = survives(lambda: Costs(**given_costs))
    if costs is None:
        return
    schedule = jp.schedules.build("1f1b_overlap", devices=2, microbatches=3)
    whole = survives(lambda: jp.add_transfers(schedule, costs=costs))
    for table in (schedule, whole or schedule):
        for transfers in Transfers:
            timeline = survives(lambda s=table, t=transfers: jp.simulate(s, costs, transfers=t))
            if timeline is not None:
                assert 0 <= timeline.makespan < float("inf")
                assert 0 <= timeline.bubble <= 1
                for draw in (to_svg, to_html, to_trace):
                    survives(lambda d=draw, t=timeline: d(t))


@given(
    st.one_of(st.sampled_from(jp.schedules.names()), st.text(max_size=6), st.none()),
    st.one_of(st.integers(1, 4), numbers),
    st.one_of(st.integers(1, 4), numbers),
    st.one_of(st.none(), st.integers(1, 3), numbers),
    st.dictionaries(
        st.sampled_from(
            ["costs", "max_activations", "group_size", "lean", "placement", "forward_only", "speed"]
        ),
        numbers,
        max_size=2,
    ),
)
def test_builds(name, devices, microbatches, chunks, options):
    survives(
        lambda: jp.schedules.build(
            name, devices=devices, microbatches=microbatches, chunks=chunks, **options
        )
    )


# The command line.

words = st.one_of(
    st.integers(-2, 4).map(str),
    st.sampled_from(
        [
            "99999999999",
            "9" * 5000,
            "\uff12",
            "1_0",
            "nan",
            "1e400",
            "1,1,1",
            "1:2,1,1,0.5",
            "1e-320,1e99,0",
            "grid",
            "loop",
            "x",
            "",
        ]
    ),
    st.text(max_size=4),
)
flags = st.one_of(
    st.tuples(
        st.sampled_from(
            [
                "-P",
                "-M",
                "-V",
                "--costs",
                "--backward",
                "--overlap",
                "--activation",
                "--width",
                "--max-activations",
            ]
        ),
        words,
    ),
    st.tuples(
        st.sampled_from(["--title", "--format", "--theme", "--release", "--transfers", "--bogus"]),
        words,
    ),
    st.tuples(
        st.just("--option"),
        st.tuples(
            st.sampled_from(["group_size", "placement", "devices", "costs", "lean", "x", ""]), words
        ).map("=".join),
    ),
    st.sampled_from(
        [
            ("--json",),
            ("--forward-only",),
            ("--memory",),
            ("--critical-path",),
            ("--format", "svg"),
            ("--format", "html"),
        ]
    ),
)
commands = st.sampled_from(
    ["list", "show", "show", "simulate", "simulate", "check", "compare", "draw"]
)
sources = st.one_of(
    st.sampled_from(jp.schedules.names()),
    st.sampled_from(["t.csv", "t.json", "good.csv", "-", ".", "nowhere.csv"]),
    words,
)
shapes = st.one_of(
    st.just(()),
    st.tuples(st.just("-P"), st.sampled_from("234"), st.just("-M"), st.sampled_from("234")),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    commands,
    st.lists(sources, max_size=2),
    shapes,
    st.lists(flags, max_size=3),
    texts,
    json_tables(),
)
def test_the_command_line(monkeypatch, tmp_path, command, names, shape, options, csv, json_text):
    monkeypatch.chdir(tmp_path)
    for name, text in (("t.csv", csv), ("t.json", json_text), ("good.csv", "0F0,0B0\n1F0,1B0\n")):
        (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    err = io.StringIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setattr(sys, "stderr", err)
    status: object = None

    def attempt() -> None:
        nonlocal status
        monkeypatch.setattr(sys, "stdin", io.StringIO(csv))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                status = main(
                    [command, *names, *shape, *(word for flag in options for word in flag)]
                )
            except SystemExit as stop:  # argparse's own exit
                status = stop.code

    start = time.thread_time()
    attempt()
    spent = time.thread_time() - start
    assert status in (0, 1, 2)
    if status == 2:
        assert err.getvalue()
        assert quick(attempt, spent=spent)


@pytest.mark.parametrize("text", NASTY)
def test_nasty_words_are_nasty(text):
    """What the strategies above sprinkle in is no cell of a table, so that they do
    test refusals.
    """
    with pytest.raises(jp.JaxpipeError):
        jp.check(Schedule.from_csv(text))
