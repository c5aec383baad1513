"""Far too much, far too long, far too deep: every text and number is refused by name, in few steps
and 100 MB.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe import Kind, Schedule, megatron
from jaxpipe.errors import MAX_PAIRS, MAX_TEXT, listed, quoted
from jaxpipe.layouts.layout import (
    Layout,
    balanced_layout,
    check_layout,
    even_layout,
    parse_layout,
    split_layers,
)
from jaxpipe.table.kinds import parts
from tests.excess import CSV, DIGITS, FULL_WIDTH, HUGE, JSON, refused


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
    "100,000 brackets": (lambda: parse_layout("(" * 100_000, devices=1), "is never closed"),
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
    "devices that are no number": (
        lambda: parse_layout("t", devices="1"),
        "devices must be a whole number",
    ),
    "no text": (lambda: parse_layout(None, devices=1), "text must be a text, not None"),
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
    "a word for all costs": (lambda: split_layers("abc", stages=1), "costs must be a sequence"),
    "a cost in a list": (lambda: split_layers([[1], [1, 2]], stages=1), "layer 0 costs [1]"),
    "costs in a square": (
        lambda: split_layers(np.ones((2, 2)), stages=1),
        "layer 0 costs [1.0, 1.0]",
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
    "costs that are no list": (lambda: balanced_layout("tt", 3, devices=2), "not 3"),
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
        "1000000000000 layers and 2 stages are too many",
    ),
    "a trillion devices": (lambda: even_layout(10, devices=10**12), "at most 10,000,000,000"),
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
    "400 digits": (
        lambda: jp.Costs(overlap=10**400),
        "overlap holds inf; a cost is a finite number",
    ),
    "400 digits in a list": (
        lambda: jp.Costs(forward=[1, 10**400]),
        "forward holds inf",
    ),
    "5,000 digits": (lambda: jp.Costs(forward=-HUGE), "forward holds -inf"),
    "too large to add up": (lambda: jp.Costs(forward=1e308), "of 1e+100 at most"),
    "a million entries": (
        lambda: jp.Costs(forward=[-1] * 1_000_000),
        "forward has 1,000,000 entries",
    ),
    "an array of a million": (
        lambda: jp.Costs(forward=np.ones(1_000_000)),
        "forward has 1,000,000 entries",
    ),
    "long words": (lambda: jp.Costs(forward=["x" * 100_000] * 20), "numbers, not ['xxx"),
    "None": (
        lambda: jp.Costs(forward=None),
        "forward must be a number or a sequence of numbers, not None",
    ),
    "an object": (lambda: jp.Costs(forward=object()), "a sequence of numbers, not <object"),
    "a complex number": (lambda: jp.Costs(forward=1j), "a sequence of numbers, not 1j"),
    "a truth value": (lambda: jp.Costs(forward=True), "a sequence of numbers, not True"),
    "a map": (lambda: jp.Costs(forward={"a": 1}), "a sequence of numbers, not {'a': 1}"),
    "an array without dimensions": (
        lambda: jp.Costs(forward=np.array(1.0)),
        "a sequence of numbers, not array(1.)",
    ),
    "a word for release": (
        lambda: jp.Costs(release="input_grad"),
        "release must be one of Release.INPUT_GRAD, Release.WEIGHT_GRAD, not 'input_grad'",
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
    numbers = [v for name, v in vars(cost).items() if name not in ("ends", "policies")]
    assert {type(value) for value in numbers} <= {int, float, type(None)}


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
        loop = jp.Placement.loop(devices=1)
        assert "are not actions" in refused(lambda a=action, p=loop: Schedule(((a,),), p, 1))


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
    "a placement of words": (
        lambda: jp.Placement.explicit(["a"]),
        "stage_to_device must be a sequence, not ['a']",
    ),
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
    "a loop of words": (
        lambda: jp.Placement.loop(devices="2"),
        "devices must be a whole number, not '2'",
    ),
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
        "max_activations must be a whole number or a sequence of whole numbers or None, not 'x'",
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
