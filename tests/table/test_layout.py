"""Layout strings: Megatron's language read and written, faults pointed at, and automatic splits
against brute force.
"""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, strategies as st

from jaxpipe.errors import ParseError
from jaxpipe.layouts.layout import (
    Layout,
    LayoutError,
    balanced_layout,
    check_layout,
    even_layout,
    parse_layout,
    split_layers,
)


def megatron_expansion(text: str) -> list[str]:
    """What Megatron-Core makes of a string: commas out, parenthesised repeats first, then repeats
    of one character.
    """
    text = text.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    return re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text).split("|")


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("tt(tm|tE|LL)*2,tL", ["tttm", "tE", "LLtm", "tE", "LLtL"]),
        ("(|tt)*2,EL", ["", "tt", "ttEL"]),
        ("E|t*0|t*10|L", ["E", "", "t" * 10, "L"]),
        ("E|*3L", ["E", "", "", "L"]),
        ("", [""]),
        ("|", ["", ""]),
    ],
)
def test_reads_what_megatron_reads(text, stages):
    assert list(parse_layout(text, devices=1).stages) == stages == megatron_expansion(text)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("((t|)*2m|)*2L", ["t", "t", "m", "t", "t", "m", "L"]),
        ("E((t*2|)*2)*2L", ["Ett", "tt", "tt", "tt", "L"]),
        ("(Et)|(tL)", ["Et", "tL"]),
        (" E t,*2 |\n\tL ", ["Ett", "L"]),
    ],
)
def test_reads_what_megatron_does_not(text, stages):
    assert list(parse_layout(text, devices=1).stages) == stages


def test_placement_of_deepseek_v3():
    layout = parse_layout("Et*3|(tt|)*29,m|L", devices=16)
    assert (layout.num_stages, layout.chunks, layout.num_devices) == (32, 2, 16)
    assert layout.placement.stage_to_device == tuple(range(16)) * 2
    assert sum(layout.count("t")) == 61
    assert str(layout) == "Et*3|(tt|)*29,m|L"
    assert check_layout(layout, num_layers=61, mtp_layers=1) is layout
    assert layout.table().splitlines() == [
        "             chunk 0  chunk 1",
        "device 0     Et*3     tt",
        "device 1-13  tt       tt",
        "device 14    tt       m",
        "device 15    tt       L",
    ]


def test_layout_is_frozen_and_hashable():
    layout = parse_layout("E|L", devices=2)
    with pytest.raises(AttributeError):
        layout.stages = ()
    assert {layout: 1}[Layout(("E", "L"), 2)] == 1


@given(
    st.lists(st.text("EtmL", max_size=9), min_size=1, max_size=12),
    st.lists(st.integers(1, 5), min_size=12, max_size=12),
)
def test_canonical_form_round_trips(stages, times):
    stages = tuple(s for s, n in zip(stages, times, strict=False) for _ in range(n))
    layout = Layout(stages, 1)
    assert parse_layout(str(layout), devices=1) == layout
    assert tuple(megatron_expansion(str(layout))) == stages, "Megatron reads our canonical form too"


def nested(children):
    group = st.tuples(st.lists(children, min_size=1, max_size=4).map("".join), st.integers(0, 3))
    return group.map(lambda g: f"({g[0]})*{g[1]}")


@given(
    st.recursive(
        st.sampled_from(["E", "t", "t*4", "m", "L", "|", ",", "|*2"]), nested, max_leaves=12
    )
)
def test_nesting_is_repeated_innermost_first(text):
    expected = text.replace(",", "")
    while "(" in expected:
        expected = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), expected)
    expected = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), expected)
    assert "|".join(parse_layout(text, devices=1).stages) == expected


@pytest.mark.parametrize(
    ("text", "devices", "carets"),
    [
        ("Et*3|(tx|)*29,m|L", 1, {7: "'x' is not a layer; write one of E t m L"}),
        ("Et|y|z|L", 1, {3: "'y'", 5: "'z'"}),
        ("Et|tt)*2|L", 1, {5: "closes no group", 6: "needs a layer or a group before it"}),
        ("E((t|)*3L", 1, {1: "never closed"}),
        ("Et*|L", 1, {2: "needs a number after it"}),
        ("*3E", 1, {0: "needs a layer or a group before it"}),
        ("3t|L", 1, {0: "the number 3 has no '*' before it"}),
        ("t*2,9", 1, {4: "the number 9 has no '*'"}),
        ("t*2*31|L", 1, {3: "needs a layer or a group before it, as in t*3, (tt|)*29 or (t*2)*3"}),
        ("t*9999999999", 1, {0: "100,000"}),
        ("((t*999)*999)*999", 1, {0: "100,000", 1: "100,000"}),
        ("t*99999,t*99999,tx", 1, {8: "100,000", 17: "'x'"}),
        ("t*-3", 1, {1: "needs a number after it", 2: "'-' is not a layer", 3: "the number 3"}),
        ("t*٣", 1, {1: "needs a number after it", 2: "is not a layer"}),
    ],
)
def test_faults_are_pointed_at(text, devices, carets):
    with pytest.raises(LayoutError) as raised:
        parse_layout(text, devices=devices)
    assert isinstance(raised.value, ParseError)
    assert isinstance(raised.value, ValueError)
    assert raised.value.positions == tuple(sorted(carets))
    head, shown, marks, *lines = str(raised.value).splitlines()
    assert head.startswith(f"the layout has {len(carets)} fault")
    for line, (at, why) in zip(lines, sorted(carets.items()), strict=True):
        assert line.startswith(f"  character {at + 1}: ")
        assert why in line
        assert (marks[at + 2] == "^") if len(text) < 100 else "^" in marks
    assert shown == f"  {text}" or len(text) > 100


def test_letters_extend_the_language():
    assert parse_layout("Ed*3|M|L", devices=3, letters="EdML").stages == ("Eddd", "M", "L")
    with pytest.raises(LayoutError, match="pass letters='EtmLd'"):
        parse_layout("Ed", devices=1)
    for letters in ("Et|", "t*", "t1", "t ", "tt"):
        with pytest.raises(LayoutError, match="distinct characters"):
            parse_layout("t", devices=1, letters=letters)


@pytest.mark.parametrize("devices", [0, -1])
def test_devices_must_be_positive(devices):
    with pytest.raises(LayoutError, match="devices >= 1"):
        parse_layout("E|L", devices=devices)
    with pytest.raises(LayoutError, match="devices >= 1"):
        Layout(("E", "L"), devices)


def test_layout_values_are_checked_too():
    with pytest.raises(LayoutError, match="2 stages do not divide over 4 devices: add 2 more"):
        Layout(("E", "L"), 4)
    with pytest.raises(LayoutError, match=r"add 3 more \(a '\|' begins .* use 1 or 5 devices"):
        parse_layout("Et|t|t|t|L", devices=4)
    with pytest.raises(LayoutError, match="at least one stage"):
        Layout((), 4)


@pytest.mark.parametrize(
    ("text", "sizes", "faults"),
    [
        ("ttL", {}, ["E occurs 0 times"]),
        ("EtLt", {}, ["write E first, then every t, every m, L last"]),
        ("tEt", {}, ["L occurs 0 times", "out of order"]),
        ("EtmtL", {}, ["out of order"]),
        (
            "EtttL",
            {"num_layers": 4, "mtp_layers": 1},
            ["has 3 layers t, but the model has 4", "has 0 layers m, but the model has 1"],
        ),
        ("", {"num_layers": 0}, ["E occurs 0 times", "L occurs 0 times"]),
    ],
)
def test_check_layout_lists_every_fault(text, sizes, faults):
    with pytest.raises(LayoutError) as raised:
        check_layout(parse_layout(text, devices=1), **sizes)
    lines = str(raised.value).splitlines()[1:]
    assert len(lines) == len(faults)
    assert all(fault in line for fault, line in zip(faults, lines, strict=True))


def test_stage_costs():
    layout = parse_layout("Et|tt|mL|", devices=2)
    assert layout.stage_costs({"E": 0.5, "t": 1, "m": 2, "L": 0.25}) == (1.5, 2.0, 2.25, 0.0)
    with pytest.raises(LayoutError, match="no cost is given for layer E, m"):
        layout.stage_costs({"t": 1, "L": 1})


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5), st.booleans())
def test_split_is_the_best_of_all(costs, stages, allow_empty):
    layers = len(costs)
    if stages > layers and not allow_empty:
        with pytest.raises(LayoutError, match=f"{layers} layers cannot fill {stages} stages"):
            split_layers(costs, stages=stages)
        return
    pieces = split_layers(costs, stages=stages, allow_empty=allow_empty)
    assert [i for piece in pieces for i in piece] == list(range(layers))
    assert len(pieces) == stages
    assert allow_empty or all(pieces)
    inner = itertools.combinations_with_replacement(range(layers + 1), stages - 1)
    cuts = [(0, *c, layers) for c in inner]
    sums = [
        [sum(costs[a:b]) for a, b in itertools.pairwise(c)]
        for c in cuts
        if allow_empty or len(set(c)) == stages + 1
    ]
    best = min((max(s), sum(x * x for x in s)) for s in sums)
    got = [sum(costs[i] for i in piece) for piece in pieces]
    assert (max(got), sum(x * x for x in got)) == best


def test_split_refuses_bad_costs_all_at_once():
    with pytest.raises(LayoutError) as raised:
        split_layers([1, -2, float("nan"), 1], stages=0)
    assert str(raised.value).splitlines()[1:] == [
        "  layer 1 costs -2; a cost must be a finite number >= 0",
        "  layer 2 costs nan; a cost must be a finite number >= 0",
        "  stages must be >= 1; got 0",
    ]
    assert [f"  {fault}" for fault in raised.value.faults] == str(raised.value).splitlines()[1:]
    assert raised.value.positions == ()


def test_balanced_layout_moves_layers_off_the_heavy_loss():
    even = even_layout(16, devices=4)
    balanced = balanced_layout("Et*16,L", {"E": 0.5, "t": 1, "L": 3}, devices=4)
    costs = {"E": 0.5, "t": 1, "L": 3}
    assert max(even.stage_costs(costs)) == 7
    assert max(balanced.stage_costs(costs)) == 5
    assert balanced.layers == even.layers
    assert balanced_layout("ttt", [1, 1, 5], devices=2).stages == ("tt", "t")
    assert balanced_layout("tt", [1, 1], devices=2, chunks=2, allow_empty=True).num_stages == 4


@pytest.mark.parametrize(
    ("layers", "costs", "message"),
    [
        ("E|t", {"E": 1, "t": 1}, "already holds"),
        ("Et", {"t": 1}, "no cost is given for layer E"),
        ("Et", [1], "1 costs are given for 2 layers"),
    ],
)
def test_balanced_layout_errors(layers, costs, message):
    with pytest.raises(LayoutError, match=message):
        balanced_layout(layers, costs, devices=1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_layers": 8, "devices": 4}, "Ett|tt|tt|ttL"),
        ({"num_layers": 8, "devices": 2, "chunks": 2}, "Ett|tt|tt|ttL"),
        # Megatron: (6 + 1 + 1) / 4 = 2 slots a stage, one of them for the embedding and one for the
        # loss.
        (
            {"num_layers": 6, "devices": 4, "count_embedding": True, "count_loss": True},
            "Et|tt|tt|tL",
        ),
        ({"num_layers": 7, "devices": 4, "count_loss": True}, "Ett|tt|tt|tL"),
        # Megatron: 4 and 6 layers on the first and last device, (26 - 10) / 2 on the others, each
        # halved over two chunks.
        (
            {"num_layers": 26, "devices": 4, "chunks": 2, "first_device": 4, "last_device": 6},
            "Ett|tttt|tttt|ttt|tt|tttt|tttt|tttL",
        ),
        ({"num_layers": 7, "devices": 4, "first_device": 1}, "Et|tt|tt|ttL"),
        # Not divisible: the remainder goes to the last stages before the final one.
        ({"num_layers": 10, "devices": 4}, "Ett|ttt|ttt|ttL"),
        ({"num_layers": 11, "devices": 4, "mtp_layers": 1}, "Ettt|ttt|ttt|ttmL"),
        ({"num_layers": 0, "devices": 2}, "E|L"),
        ({"num_layers": 3, "devices": 1, "first_device": 3}, "EtttL"),
    ],
)
def test_even_layout(arguments, expected):
    layout = even_layout(**arguments)
    assert "|".join(layout.stages) == expected
    check_layout(
        layout, num_layers=arguments["num_layers"], mtp_layers=arguments.get("mtp_layers", 0)
    )


@given(st.integers(2, 200), st.integers(1, 16), st.integers(1, 4), st.booleans(), st.booleans())
def test_even_layout_is_even(num_layers, devices, chunks, embedding, loss):
    if num_layers < devices * chunks:
        num_layers = devices * chunks
    layout = even_layout(
        num_layers, devices=devices, chunks=chunks, count_embedding=embedding, count_loss=loss
    )
    held = list(layout.count("t"))
    assert sum(held) == num_layers
    held[0] += embedding
    held[-1] += loss
    assert max(held) - min(held) <= 1


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        (
            {"num_layers": -1, "devices": 0, "chunks": 0, "mtp_layers": -1},
            [
                "num_layers must be a whole number of at least 0, not -1",
                "devices must be a whole number of at least 1",
                "chunks must be a whole number of at least 1",
                "mtp_layers must be a whole number of at least 0, not -1",
            ],
        ),
        (
            {"num_layers": 3, "devices": 4, "first_device": 4},
            ["are to hold 4 of 3 layers"],
        ),
        (
            {"num_layers": 9, "devices": 2, "first_device": 4, "last_device": 4},
            ["are to hold 4, 4 of 9 layers"],
        ),
        (
            {"num_layers": 9, "devices": 4, "first_device": -1},
            ["are to hold -1 of 9 layers; give numbers >= 0"],
        ),
        (
            {"num_layers": 9, "devices": 4, "first_device": 1, "count_loss": True},
            ["exclude count_embedding"],
        ),
        (
            {"num_layers": 9, "devices": 1, "first_device": 9, "last_device": 9},
            ["each other where devices=1"],
        ),
    ],
)
def test_even_layout_lists_every_fault(arguments, faults):
    with pytest.raises(LayoutError) as raised:
        even_layout(**arguments)
    lines = str(raised.value).splitlines()[1:]
    assert len(lines) == len(faults)
    assert all(fault in line for fault, line in zip(faults, lines, strict=True))


def test_even_layout_needs_room_for_what_is_counted():
    with pytest.raises(LayoutError, match="too few for 4 stages"):
        even_layout(0, devices=4, count_embedding=True)
