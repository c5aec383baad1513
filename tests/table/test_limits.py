"""Far too much, far too long, far too deep: every text and number is refused by name, within a
second and 100 MB.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from frugal import quick, small

import jaxpipe as jp
from jaxpipe import Kind, Schedule, megatron
from jaxpipe.cli.main import main
from jaxpipe.errors import listed, quoted
from jaxpipe.layouts.balance import balanced_layout, even_layout, split_layers
from jaxpipe.layouts.layout import Layout, check_layout, parse_layout
from jaxpipe.table.action import parts
from jaxpipe.table.limits import MAX_DEVICES, MAX_PAIRS, MAX_TEXT

DIGITS = "9" * 5000
HUGE = 10**5000  # Python refuses to write it out
FULL_WIDTH = "\uff10F\uff10"  # looks like 0F0


def refused(call: Callable[[], object]) -> str:
    """The message of the error that a call raises, having taken little."""
    message = ""

    def attempt() -> None:
        nonlocal message
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(jp.JaxpipeError) as caught:
                call()
        message = str(caught.value)

    assert quick(attempt)
    assert small(attempt)
    assert len(message) < 20_000, "a message is for reading"
    return message


def table(**changes: object) -> str:
    """A JSON table of one action, with changes."""
    return json.dumps(json.loads(Schedule.from_csv("0F0").to_json()) | changes)


SENT = {"num_devices": 2, "stage_to_device": [0, 1], "rows": [["0SEND_F0"], ["1RECV_F0"]]}
CSV = {
    "a microbatch of 5,000 digits": (f"0F{DIGITS}", "the microbatch number has 5,000 digits"),
    "a stage of 5,000 digits": (f"{DIGITS}F0", "the stage number has 5,000 digits"),
    "a microbatch over 2^63": (
        f"0F0,0F{2**64}",
        "line 1, column 2: '0F18446744073709551616' is not an action",
    ),
    "a stage over 2^63": (f"0F0,{2**64}F0", "the stage number has 20 digits"),
    "full-width digits": (FULL_WIDTH, "character 1 must start the stage number"),
    "Arabic digits": ("0F\u0660", "character 3 must start the microbatch number"),
    "a lone carriage return": ("0F0\r0B0", "line 1: a carriage return without a line feed"),
    "a cell of 200 kB": (
        "0F0\n1F0," + "x" * 200_000,
        "line 2: a cell has more than 131,072 characters",
    ),
    "a cell of 100 kB": ("0F0," + "x" * 100_000, "'... (100,000 characters) is not an action"),
    "5,000 bad cells": (",".join(["x"] * 5_000), "read no further after 1,000 faults"),
    "20 bad cells of 100 kB": (",".join(["x" * 100_000] * 20), "line 1, column 20"),
    "100,000 brackets": ("(" * 100_000, "is not an overlapped pair"),
    "a million lines": ("0F0\n" + "\n" * 1_000_000, f"more than {MAX_DEVICES:,} lines"),
    "an open quote": ('0F0,"0B0\n' * 1000, "follows at character 4, where the action ends"),
}
JSON = {
    "a number of 5,000 digits": (
        table().replace('"num_microbatches": 1', f'"num_microbatches": {DIGITS}'),
        "thousands of digits",
    ),
    "a cell of 5,000 digits": (
        table(rows=[[f"0F{DIGITS}"]]),
        "the microbatch number has 5,000 digits",
    ),
    "100,000 brackets": ("[" * 100_000, "nested too deeply"),
    "100,000 braces": ('{"a":' * 100_000, "nested too deeply"),
    "5,000 bad cells": (table(rows=[["x"] * 5_000]), "read no further after 1,000 faults"),
    "a long version": (
        table(version="x" * 1_000_000),
        "(1,000,000 characters); this jaxpipe reads version 1",
    ),
    "a microbatch number over 2^63": (
        table(num_microbatches=2**64),
        '"num_microbatches" must be a whole number',
    ),
    "a device over 2^63": (table(stage_to_device=[2**64]), '"stage_to_device" must be'),
    "a device beyond all": (table(stage_to_device=[10**6]), "a table has at most 4,096 devices"),
    "100,000 stages": (table(stage_to_device=[0] * 100_000), "65,536 are the most"),
    "no microbatches, but transfers": (
        table(**SENT, num_microbatches=0),
        "microbatches from 0 to -1",
    ),
    "no stages, but transfers": (
        table(stage_to_device=[], rows=[["0SEND_F0"]]),
        "stages go from 0 to -1",
    ),
    "no stages": (table(stage_to_device=[]), "stages go from 0 to -1"),
}


@pytest.mark.parametrize(("text", "message"), CSV.values(), ids=CSV)
def test_a_csv_is_refused(text, message):
    assert message in refused(lambda: jp.check(Schedule.from_csv(text)))


@pytest.mark.parametrize(("text", "message"), JSON.values(), ids=JSON)
def test_a_json_table_is_refused(text, message):
    assert message in refused(lambda: jp.check(Schedule.from_json(text)))


@pytest.mark.parametrize("read", [Schedule.from_csv, Schedule.from_json])
def test_text_that_is_longer_than_any_table_is_refused(read):
    text = "," * (MAX_TEXT + 1)
    assert f"a table has at most {MAX_TEXT:,}" in refused(lambda: read(text))


def test_a_sparse_table_is_one_fault_and_not_a_hundred_thousand():
    assert "0F131071 is a possible typo" in refused(
        lambda: jp.check(Schedule.from_csv("0F0,0F131071"))
    )


LAYOUTS = {
    "gigabytes of repeats": (
        lambda: parse_layout("t*999999" * 2000, devices=1),
        "the layout has 2000 faults",
    ),
    "repeats that are just too many together": (
        lambda: parse_layout("t*60000,t*60000", devices=1),
        "more than 100,000",
    ),
    "100,000 brackets": (lambda: parse_layout("(" * 100_000, devices=1), "opens group 101 inside"),
    "10,000 closed brackets": (
        lambda: parse_layout(")" * 10_000, devices=1),
        "the layout has 10000 faults",
    ),
    "more text than a model takes": (
        lambda: parse_layout("t" * 100_001, devices=1),
        "the layout has 100,001 characters",
    ),
    "5,000 faults": (lambda: parse_layout("x" * 5_000, devices=1), "... and 4,902 more"),
    "full-width digits": (lambda: parse_layout("t*\uff13", devices=1), "needs a number after it"),
    "a number of 5,000 digits": (
        lambda: parse_layout(f"t*{DIGITS}", devices=1),
        "more than 100,000",
    ),
    "50,000 digits": (lambda: parse_layout("1" * 50_000, devices=1), "has no '*' before it"),
    "devices of 5,000 digits": (
        lambda: parse_layout("t", devices=HUGE),
        "a number of about 5,001 digits",
    ),
    "devices that are no number": (lambda: parse_layout("t", devices="1"), "devices >= 1; got '1'"),
    "no text": (lambda: parse_layout(None, devices=1), "got None"),
    "many letters": (
        lambda: parse_layout("t", devices=1, letters="tt" * 100_000),
        "(200,000 characters) must be distinct",
    ),
    "many stages": (lambda: parse_layout("|*70000", devices=1), "65,536 are the most"),
    "a long model that is none": (
        lambda: check_layout(parse_layout("mt(mt)*4000", devices=1)),
        "is not a complete model",
    ),
    "stages of 5,000 digits": (lambda: Layout(("t",), HUGE), "a number of about 5,001 digits"),
    "a word for a cost": (lambda: split_layers(["a"], stages=1), "layer 0 costs 'a'"),
    "a word for all costs": (lambda: split_layers("abc", stages=1), "a flat list of numbers"),
    "a cost in a list": (lambda: split_layers([[1], [1, 2]], stages=1), "layer 0 costs [1]"),
    "costs in a square": (
        lambda: split_layers(np.ones((2, 2)), stages=1),
        "a flat list of numbers",
    ),
    "a cost of 400 digits": (
        lambda: split_layers([10**400], stages=1),
        "a number of about 401 digits",
    ),
    "a cost whose square is infinite": (
        lambda: split_layers([1e308] * 4, stages=2),
        "layer 0 costs 1e+308",
    ),
    "20,000 layers": (lambda: split_layers([1] * 20_000, stages=2), "4,096 of each are the most"),
    "a billion stages": (
        lambda: split_layers([1], stages=10**9, allow_empty=True),
        "4,096 of each are the most",
    ),
    "stages that are no number": (
        lambda: split_layers([1], stages="2"),
        "stages must be a whole number",
    ),
    "costs that are no list": (lambda: balanced_layout("tt", 3, devices=2), "costs=3"),
    "a word for a letter's cost": (
        lambda: balanced_layout("tt", {"t": "a"}, devices=2),
        "layer 0 costs 'a'",
    ),
    "a million layers": (
        lambda: balanced_layout("t*999999", {"t": 1}, devices=2),
        "more than 100,000",
    ),
    "a trillion layers": (
        lambda: even_layout(10**12, devices=2),
        "1000000000000 layers are too many",
    ),
    "a trillion devices": (lambda: even_layout(10, devices=10**12), "stages are too many"),
    "layers that are no number": (
        lambda: even_layout("a", devices=2),
        "num_layers must be a whole number",
    ),
}


@pytest.mark.parametrize(("call", "message"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_is_refused(call, message):
    assert message in refused(call)


def test_a_layouts_faults_show_it_once():
    text = "t" * 300 + "x" + "t" * 300 + "y"
    message = refused(lambda: parse_layout(text, devices=1))
    _, shown, marks, *lines = message.splitlines()
    assert shown.startswith("  ...")
    assert shown.endswith("...")
    assert shown[marks.index("^")] == "x"
    assert [line[:15] for line in lines] == ["  character 301", "  character 602"]


COSTS = {
    "400 digits": (lambda: jp.Costs(overlap=10**400), "overlap holds a number of about 401 digits"),
    "400 digits in a list": (
        lambda: jp.Costs(forward=[1, 10**400]),
        "a number of about 401 digits",
    ),
    "5,000 digits": (lambda: jp.Costs(forward=-HUGE), "a number of about 5,001 digits"),
    "too large to add up": (lambda: jp.Costs(forward=1e308), "of 1e+100 at most"),
    "a million entries": (
        lambda: jp.Costs(forward=[-1] * 1_000_000),
        "forward has 1,000,000 entries",
    ),
    "long words": (lambda: jp.Costs(forward=["x" * 100_000] * 20), "(100,000 characters)"),
    "None": (lambda: jp.Costs(forward=None), "forward holds None"),
    "an object": (lambda: jp.Costs(forward=object()), "forward holds <object"),
    "a complex number": (lambda: jp.Costs(forward=1j), "forward holds 1j"),
    "a truth value": (lambda: jp.Costs(forward=True), "forward holds True"),
    "a map": (lambda: jp.Costs(forward={"a": 1}), "forward holds {'a': 1}"),
    "an array without dimensions": (
        lambda: jp.Costs(forward=np.array(1.0)),
        "forward holds array(1.)",
    ),
    "a word for release": (
        lambda: jp.Costs(release="input_grad"),
        "release is 'input_grad'; it is a jaxpipe.table.Release",
    ),
}


@pytest.mark.parametrize(("call", "message"), COSTS.values(), ids=COSTS)
def test_costs_are_refused(call, message):
    assert message in refused(call)


def test_large_whole_costs_are_added_as_floats():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=4)
    assert jp.simulate(schedule, jp.Costs(forward=2**40)).makespan == 5 * 2**40 + 2 * 5
    large = jp.Costs(forward=10**30, input_grad=[0, 2**41])
    assert (large.forward, large.input_grad) == (1e30, (0, 2.0**41))
    jp.add_transfers(schedule, costs=large)


NUMBERS = {
    "int64": np.int64(2),
    "uint8": np.uint8(200),
    "float32": np.float32(1.5),
    "float64": np.float64(1.5),
    "a fraction": Fraction(3, 2),
    "an array": np.array([1, 2]),
    "an array of floats": np.array([0.5, 2], np.float32),
    "fractions": [Fraction(1, 3), np.int8(1)],
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_costs_are_plain_numbers_whatever_they_are_given_as(number):
    """Times that follow from them can be written as JSON, and drawn."""
    names = [field.name for field in fields(jp.Costs) if field.name not in ("release", "unit")]
    costs = jp.Costs(**dict.fromkeys(names, number))
    assert jp.Costs.from_json(costs.to_json()) == costs
    schedule = jp.schedules.build("1f1b_overlap", devices=2, microbatches=2, slices=2)
    for table in (
        schedule,
        jp.add_transfers(schedule),
        jp.add_recompute(schedule),
        jp.defer_last(jp.spread_last(schedule)),
    ):
        timeline = jp.simulate(table, costs, max_memory=Fraction(10**6))
        json.dumps(
            [
                timeline.makespan,
                timeline.busy,
                timeline.idle,
                timeline.peak_memory,
                timeline.starts,
                timeline.bubble,
            ]
        )
        jp.render.to_svg(timeline, width=np.float32(800))
        jp.render.to_html(timeline, over=timeline)
        jp.render.to_trace(timeline, unit_us=np.float32(10))
    assert {
        type(n) for n in (jp.lower_bound(costs, microbatches=np.int8(100), devices=np.uint8(2)),)
    } <= {int, float}


@pytest.mark.parametrize("number", [np.int64(2), np.float32(1.5), Fraction(3, 2)])
def test_layer_costs_are_plain_numbers(number):
    cost = jp.LayerCost(
        forward=number, input_grad=number, weight_grad=1, backward=number, parameters=number
    )
    numbers = {name: v for name, v in vars(cost).items() if name not in ("ends", "policies")}
    assert {type(value) for value in numbers.values()} <= {int, float, type(None)}


def test_tables_of_numpy_numbers_are_plain():
    cells = [
        [jp.Action(np.int8(100), Kind.F, np.uint8(255))],
        [jp.Overlap(jp.Action(0, np.int64(0), 0), jp.Action(0, 1, np.int16(1)))],
    ]
    schedule = Schedule.from_rows(cells, num_microbatches=np.int64(256))
    assert {
        type(value) for row in schedule.rows for cell in row for a in parts(cell) for value in a
    } == {int, Kind}
    assert schedule == Schedule.from_json(schedule.to_json())
    assert Schedule.from_rows(cells).num_microbatches == 256, "and not 0, as a sum of uint8"
    placement = jp.Placement.explicit(np.array([0, 1, 1, 0]), devices=np.int64(2))
    assert placement == jp.Placement.vee(devices=np.int8(2), chunks=np.int8(2))
    json.dumps([placement.devices_of, placement.num_devices])
    json.dumps(jp.parse_layout("t|t", devices=np.int64(2)).num_devices)
    built = jp.schedules.build("zbv", devices=np.int8(2), microbatches=np.int16(3))
    assert built == Schedule.from_json(built.to_json())


def test_a_number_of_a_stage_that_is_no_whole_number_is_no_cell():
    for action in (
        jp.Action(0.5, Kind.F, 0),
        jp.Action(True, Kind.F, 0),
        jp.Action(0, Kind.F, "0"),
        jp.Action(0, 99, 0),
    ):
        assert "are not actions" in refused(lambda a=action: Schedule.from_rows([[a]]))
        drafted = Schedule(((action,),), jp.Placement.loop(devices=1), 1)
        for call in (
            jp.check,
            str,
            Schedule.to_csv,
            Schedule.to_json,
            jp.merge_backward,
            jp.transforms.remove_transfers,
            jp.transforms.remove_spread,
        ):
            assert "are not actions" in refused(lambda c=call, s=drafted: c(s))


def build(**arguments: object) -> Callable[[], object]:
    """A call of build, of 1f1b on two devices where nothing else is said."""
    return lambda: jp.schedules.build(
        **({"name": "1f1b", "devices": 2, "microbatches": 2} | arguments)
    )


BUILDS = {
    "devices of 5,000 digits": (build(devices=HUGE), "at most 4,096 devices"),
    "negative devices of 5,000 digits": (build(devices=-HUGE), "a number of about 5,001 digits"),
    "a hundred billion microbatches": (
        build(microbatches=99_999_999_999),
        f"the nearest that works is microbatches={MAX_PAIRS // 2}",
    ),
    "a hundred billion devices": (
        build(name="gpipe", devices=99_999_999_999),
        "devices=99999999999 is too many",
    ),
    "a hundred billion chunks": (
        build(name="interleaved_1f1b", chunks=99_999_999_999),
        "ask for fewer chunks",
    ),
    "a name of a megabyte": (build(name="x" * 1_000_000), "(1,000,000 characters)"),
    "a name that is a list": (build(name=[]), "there is no schedule []"),
    "a cap of 400 digits": (build(name="auto", max_activations=10**400), "max_activations must be"),
    "a group of 400 digits": (
        build(name="interleaved_1f1b", group_size=10**400),
        "group_size must be",
    ),
    "a truth value of a megabyte": (
        build(forward_only="x" * 1_000_000),
        "forward_only must be True or False",
    ),
    "a placement of 400 digits": (
        lambda: jp.Placement.explicit([10**400]),
        "a number of about 401 digits",
    ),
    "a placement of negative digits": (
        lambda: jp.Placement.explicit([0, -HUGE]),
        "stages [1] have no device",
    ),
    "a placement of words": (lambda: jp.Placement.explicit(["a"]), "stages [0] have no device"),
    "a placement on 5,000 digits": (
        lambda: jp.Placement.explicit([0], devices=HUGE),
        "are too many",
    ),
    "a loop of a hundred billion": (
        lambda: jp.Placement.loop(devices=99_999_999_999),
        "are too many",
    ),
    "a V of a hundred billion": (
        lambda: jp.Placement.vee(devices=2, chunks=99_999_999_999),
        "are too many",
    ),
    "a loop of words": (lambda: jp.Placement.loop(devices="2"), "must be whole numbers"),
    "fewer than no microbatches": (
        lambda: Schedule.from_rows([], num_microbatches=-1),
        "num_microbatches must be 0 to",
    ),
    "microbatches beyond all": (
        lambda: Schedule.from_rows([], num_microbatches=HUGE),
        "num_microbatches must be 0 to",
    ),
    "microbatches that are a word": (
        lambda: Schedule.from_rows([], num_microbatches="2"),
        "a whole number or None, not '2'",
    ),
    "rows that are a number": (lambda: Schedule.from_rows(3), "rows must be a sequence, not 3"),
    "a row that is a number": (lambda: Schedule.from_rows([3]), "[3] are not the rows of a table"),
    "a name that is a number": (
        lambda: Schedule.from_rows([], name=3),
        "name must be a text, not 3",
    ),
    "a placement that is a list": (
        lambda: Schedule.from_rows([], placement=[0]),
        "placement must be a jaxpipe.Placement or None",
    ),
    "a stage that is on no device": (
        lambda: jp.Placement.vee(devices=2).chunk_of(3, 1),
        "stage 3 is not on device 1",
    ),
    "a device that a timeline lacks": (
        lambda: jp.simulate(Schedule.from_csv("0F0")).memory(1),
        "there is no device 1",
    ),
    "a theme that is a word": (
        lambda: jp.render.to_svg(jp.simulate(Schedule.from_csv("0F0")), theme="dark"),
        "theme must be one of",
    ),
    "a cap beyond all": (
        lambda: jp.lower_bound(devices=2, microbatches=0, max_activations=2**63),
        "microbatches must be a whole number",
    ),
    "layers of a number": (
        lambda: parse_layout("t", devices=1).count(3),
        "letter must be a text, not 3",
    ),
    "a row of text": (lambda: Schedule.from_rows(["0F0"]), "is not an Action"),
    "an action over 2^63": (
        lambda: jp.check(Schedule.from_rows([[jp.Action(0, jp.Kind.F, 2**70)]])),
        "must have whole numbers",
    ),
    "CSV that is no text": (lambda: Schedule.from_csv(b"0F0"), "give the CSV as a str"),
    "JSON that is no text": (lambda: Schedule.from_json(None), "give the JSON as a str"),
    "an action that is no text": (lambda: jp.table.parse_action(None), "None is not text"),
    "a cap that is a word": (
        lambda: jp.check(Schedule.from_csv("0F0"), max_activations="x"),
        "max_activations must be a whole number or a sequence or None, not 'x'",
    ),
    "a release that is a word": (
        lambda: jp.check(Schedule.from_csv("0F0"), release="x"),
        "release must be one of",
    ),
    "memory that is a word": (
        lambda: jp.simulate(Schedule.from_csv("0F0"), max_memory="x"),
        "max_memory must be a number",
    ),
    "a trillion virtual microbatches": (
        lambda: megatron.schedule_table(10**9, 1000, group_size=1),
        "virtual microbatches",
    ),
    "virtual microbatches of 5,000 digits": (
        lambda: megatron.schedule_table(HUGE, 1, group_size=1),
        "at most 10,000,000,000",
    ),
    "a picture of a light-year": (
        lambda: jp.render.to_svg(jp.simulate(Schedule.from_csv("0F0")), width=1e300),
        "width=1e+300 is too large; give 320 to 100,000 pixels",
    ),
    "a trace of a light-year": (
        lambda: jp.render.to_trace(jp.simulate(Schedule.from_csv("0F0")), unit_us=1e300),
        "of 1e+100 at most",
    ),
    "a title that XML forbids": (
        lambda: jp.render.to_svg(jp.simulate(Schedule.from_csv("0F0")), title="a\0b"),
        "'a\\x00b' holds",
    ),
    "a name that no page can show": (
        lambda: jp.render.to_html(jp.simulate(Schedule.from_csv("0F0", name="\ud800"))),
        "holds characters",
    ),
}


@pytest.mark.parametrize(("call", "message"), BUILDS.values(), ids=BUILDS)
def test_numbers_beyond_all_are_refused(call, message):
    assert message in refused(call)


TAKES_A_TABLE = [
    *(
        jp.check,
        jp.simulate,
        jp.engine.simulate_steps,
        jp.add_transfers,
        jp.transforms.remove_transfers,
        jp.add_recompute,
        jp.transforms.remove_recompute,
    ),
    *(
        jp.merge_backward,
        jp.split_backward,
        jp.spread_first,
        jp.spread_last,
        jp.transforms.remove_spread,
        jp.defer_last,
    ),
]
TAKES_COSTS = (
    jp.simulate,
    jp.add_transfers,
    jp.add_recompute,
    jp.spread_first,
    jp.spread_last,
    jp.defer_last,
)


@pytest.mark.parametrize("call", TAKES_A_TABLE, ids=lambda call: call.__name__)
@pytest.mark.parametrize(
    "given", [None, 3, "1f1b", (), Schedule, jp.Placement.loop(devices=1)], ids=repr
)
def test_what_is_no_table_is_named(call, given):
    assert f"{call.__name__} cannot take this" in (message := refused(lambda: call(given)))
    assert "schedule must be a jaxpipe.Schedule, not" in message


@pytest.mark.parametrize("call", TAKES_COSTS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("given", [3, "1,1,1", [1, 1], {"forward": 1}], ids=repr)
def test_what_are_no_costs_is_named(call, given):
    assert "costs must be a jaxpipe.Costs or None, not" in refused(
        lambda: call(Schedule.from_csv("0F0"), costs=given)
    )


@pytest.mark.parametrize(
    "draw",
    [jp.render.to_svg, jp.render.to_html, jp.render.to_trace],
    ids=lambda call: call.__name__,
)
def test_what_is_no_timeline_is_named(draw):
    schedule = Schedule.from_csv("0F0")
    assert "timeline must be a jaxpipe.engine.Timeline, not" in refused(lambda: draw(schedule))
    assert "planned must be a jaxpipe.engine.Timeline, not" in refused(
        lambda: jp.simulate(schedule).over(schedule)
    )


def test_what_is_not_in_a_table_has_no_time():
    start = jp.simulate(Schedule.from_csv("0F0")).start
    for key in (
        f"0F{DIGITS}",
        f"0F{2**70}",
        FULL_WIDTH,
        3,
        None,
        jp.Action("x", 0, 0),
        jp.Overlap(1, 2),
    ):
        with pytest.raises(KeyError):
            start[key]


SHAPE = ("-P", "2", "-M", "2")
BAD_USAGE = {
    "microbatches beyond all": (
        "show 1f1b -P 2 -M 99999999999",
        f"the nearest that works is microbatches={MAX_PAIRS // 2}",
    ),
    "devices beyond all": ("show 1f1b -P 99999999999 -M 2", "at most 4,096 devices"),
    "chunks beyond all": ("show interleaved_1f1b -P 2 -M 2 -V 99999999999", "ask for fewer chunks"),
    "auto beyond all": ("show auto -P 2 -M 99999999999", "the nearest that works is"),
    "a placement beyond all": (
        "show auto -P 99999999999 -M 2 --option placement=loop",
        "are too many",
    ),
    "every schedule beyond all": ("compare -P 2 -M 99999999999", "left out: zbv cannot be built"),
    "devices of 5,000 digits": (
        f"show 1f1b -P {DIGITS} -M 2",
        "(5,000 characters) is not a whole number",
    ),
    "full-width devices": ("show 1f1b -P \uff12 -M 2", "is not a whole number"),
    "devices with an underscore": ("show 1f1b -P 1_0 -M 2", "is not a whole number"),
    "forward_only as an option": (
        "show 1f1b -P 2 -M 2 --option forward_only=true",
        "write --forward-only",
    ),
    "devices as an option": ("show 1f1b -P 2 -M 2 --option devices=3", "write --devices"),
    "a name as an option": ("show 1f1b -P 2 -M 2 --option name=gpipe", "is the schedule's name"),
    "a flag as an option, compared": (
        "compare 1f1b -P 2 -M 2 --option forward_only=true",
        "write --forward-only",
    ),
    "an option twice": (
        "show auto -P 2 -M 2 --option max_activations=3 --option max_activations=4",
        "is given twice",
    ),
    "100,000 brackets as an option": (
        f"show auto -P 2 -M 2 --option max_activations={'(' * 100_000}",
        "max_activations must be",
    ),
    "100,000 signs as an option": (
        f"show auto -P 2 -M 2 --option max_activations={'-' * 100_000}1",
        "max_activations must be",
    ),
    "5,000 digits as an option": (
        f"show auto -P 2 -M 2 --option max_activations={DIGITS}",
        "max_activations must be",
    ),
    "a placement with a word": (
        "show auto -P 2 -M 2 --option placement=True,1",
        "must be loop, vee, or the device of each stage",
    ),
    "a placement over 2^63": (
        f"show auto -P 2 -M 2 --option placement=0,{2**64}",
        "must be loop, vee, or the device of each stage",
    ),
    "a cost of 5,000 digits": (
        f"simulate 1f1b -P 2 -M 2 --costs {DIGITS},1,1",
        "forward holds inf",
    ),
    "a full-width cost": ("simulate 1f1b -P 2 -M 2 --costs \uff12,1,1", "is not a number"),
    "a cost that is no number": (
        "simulate 1f1b -P 2 -M 2 --costs nan,1,1",
        "'nan' is not a number",
    ),
    "a cap of 5,000 digits": (f"check t.csv --max-activations {DIGITS}", "is not a whole number"),
    "a picture of a light-year": (
        "show 1f1b -P 2 -M 2 --format svg --width 1e300",
        "give 320 to 100,000 pixels",
    ),
    "a width that is no number": (
        "show 1f1b -P 2 -M 2 --format svg --width nan",
        "'nan' is not a number",
    ),
    "a file without end": ("check /dev/zero", f"/dev/zero: more than {MAX_TEXT:,} characters"),
    "a file name with a zero": ("check a\0b.csv", "is not a file name"),
    "an output name with a zero": ("show 1f1b -P 2 -M 2 -o \0.csv", "is not a file name"),
    "a title that no file can hold": (
        "show 1f1b -P 2 -M 2 --format svg --title \udcff",
        "a picture cannot show",
    ),
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Exit status and what was printed, having taken little."""
    status, printed = 0, io.StringIO()

    def attempt() -> None:
        nonlocal status
        printed.seek(printed.truncate(0))
        monkeypatch.setattr(sys, "stdout", printed)
        monkeypatch.setattr(sys, "stderr", printed)
        try:
            status = main(arguments)
        except SystemExit as stop:  # argparse's own exit
            status = stop.code

    assert quick(attempt)
    assert small(attempt)
    return status, printed.getvalue()


@pytest.mark.parametrize(("line", "message"), BAD_USAGE.values(), ids=BAD_USAGE)
def test_the_command_line_is_refused(monkeypatch, line, message):
    if "/dev/" in line and not Path("/dev/zero").exists():
        pytest.skip("no endless file here")
    status, printed = run(monkeypatch, *line.split(" "))
    assert status == 2
    assert message in printed
    assert len(printed) < 20_000


@pytest.mark.slow
@pytest.mark.parametrize("name", CSV)
def test_the_command_line_refuses_the_same_csv(monkeypatch, tmp_path, name):
    text, message = CSV[name]
    (tmp_path / "t.csv").write_text(text, encoding="utf-8", newline="")
    status, printed = run(monkeypatch, "check", str(tmp_path / "t.csv"))
    # Reading a file turns a lone carriage return into a line's end.
    assert status == 1
    assert message in printed or "carriage" in name
    assert len(printed) < 300_000, "the grid has a line a device"


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON)
def test_the_command_line_refuses_the_same_json(monkeypatch, tmp_path, name):
    text, message = JSON[name]
    (tmp_path / "t.json").write_text(text, encoding="utf-8")
    status, printed = run(monkeypatch, "check", str(tmp_path / "t.json"))
    assert status == 1
    assert message in printed


def test_text_that_the_terminal_cannot_write_is_no_traceback(monkeypatch, tmp_path):
    schedule = Schedule.from_rows(Schedule.from_csv("0F0").rows, name="\ud800")
    (tmp_path / "t.json").write_text(schedule.to_json())
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    )
    complaints = io.StringIO()
    monkeypatch.setattr(sys, "stderr", complaints)
    assert main(["simulate", str(tmp_path / "t.json")]) == 2
    assert "cannot be written as utf-8" in complaints.getvalue()


def test_a_quoted_value_is_short_and_never_fails():
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert (quoted("ab"), quoted(3), quoted(None)) == ("'ab'", "3", "None")
    assert quoted(Bad()).startswith("<Bad")
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (
        "x" * 10**6,
        [HUGE],
        [["y" * 10**6] * 100] * 100,
        deep,
        np.zeros(10**6),
        {"a" * 10**6: 1},
    ):
        assert len(quoted(value)) < 200


def test_a_list_of_faults_says_how_many_there_are_more():
    assert listed("wrong", ["a", "b"]) == "wrong:\n  a\n  b"
    assert listed("wrong", range(103)).splitlines()[-2:] == ["  99", "  ... and 3 more"]
