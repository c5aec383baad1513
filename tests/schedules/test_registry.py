"""`build` refuses what makes no sense, and says what would; `describe` says what each schedule
takes.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.schedules.registry import describe

EVERY_NAME = (
    *(
        "no_pipelining",
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "1f1b_overlap",
        "interleaved_1f1b_overlap",
    ),
    *(
        "zb_1p",
        "zb_h1",
        "zb_h2",
        "interleaved_zb",
        "zbv",
        "v_half",
        "v_min",
        "dualpipe",
        "dualpipev",
        "auto",
    ),
)


def refusal(name="1f1b", *, devices=4, microbatches=8, **rest):
    with pytest.raises(jp.ScheduleError) as caught:
        jp.schedules.build(name, devices=devices, microbatches=microbatches, **rest)
    return str(caught.value)


def test_names():
    assert set(jp.schedules.names()) == set(EVERY_NAME)
    assert list(jp.schedules.names()) == sorted(EVERY_NAME)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_builds_with_nothing_but_devices_and_microbatches(name):
    schedule = jp.schedules.build(name, devices=4, microbatches=8)
    assert jp.check(schedule).name == name
    assert schedule == jp.schedules.build(
        name, devices=4, microbatches=8, chunks=describe(name).chunks.natural
    )


@pytest.mark.parametrize("name", EVERY_NAME)
def test_docs_state_source_constraints_bubble_and_peak(name):
    entry = describe(name)
    assert entry.summary.endswith(".")
    assert "\n" not in entry.summary
    for word in ("Any P" if name != "dualpipe" else "Even P", "activations"):
        assert word in entry.doc
    assert any(word in entry.doc for word in ("akespan", "ubble", "idle", "busy"))
    taken = set(inspect.signature(entry.generator).parameters) - {
        "devices",
        "microbatches",
        "chunks",
        "slices",
    }
    assert taken | {"forward_only"} == {option.name for option in entry.options}
    assert all(option.summary for option in entry.options)


def test_an_unknown_name_is_answered_with_the_nearest():
    assert "did you mean 'interleaved_1f1b'?" in refusal("ScheduleInterleaved1F1B")
    assert "did you mean 'zbv'?" in refusal("ZB-V")
    assert all(name in refusal("nonsense") for name in EVERY_NAME)


def test_all_faults_are_listed_at_once():
    text = refusal(devices=0, microbatches=2.5, chunks=3, lane=True, forward_only="yes")
    for part in ("devices", "microbatches", "chunks=1", "'lane'", "forward_only"):
        assert part in text
    assert len(text.splitlines()) == 6


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "4", None])
@pytest.mark.parametrize("what", ["devices", "microbatches"])
def test_counts_are_whole_and_positive(what, value):
    assert f"{what} must be a whole number of at least 1, not {value!r}" in refusal(**{what: value})


@pytest.mark.parametrize(
    ("name", "chunks", "nearest"),
    [
        ("1f1b", 2, 1),
        ("gpipe", 0, 1),
        ("zbv", 1, 2),
        ("zbv", 3, 2),
        ("v_min", 7, 2),
        ("dualpipe", 5, 2),
        ("interleaved_1f1b", 0, 1),
    ],
)
def test_chunks_that_make_no_sense_are_refused_with_the_nearest_that_does(name, chunks, nearest):
    assert f"the nearest that works is chunks={nearest}" in refusal(name, chunks=chunks)
    jp.schedules.build(name, devices=4, microbatches=8, chunks=nearest)


def test_numpy_integers_are_counts():
    schedule = jp.schedules.build("zbv", devices=np.int64(4), microbatches=np.int32(8))
    assert schedule == jp.schedules.build("zbv", devices=4, microbatches=8)
    assert type(schedule.num_microbatches) is int


def test_dualpipe_wants_even_devices():
    assert "write 4" in refusal("dualpipe", devices=3)


def test_a_short_group_is_refused_with_the_nearest():
    assert "write group_size=4 or more" in refusal("interleaved_1f1b", group_size=3)
    assert "group_size must be a whole number" in refusal("interleaved_1f1b", group_size="4")
    # Where one group holds all microbatches, it may be short.
    jp.schedules.build("interleaved_1f1b", devices=4, microbatches=3, group_size=3)


def test_options_of_the_wrong_kind():
    assert "costs must be a jaxpipe.Costs" in refusal("zbv", costs=(1, 1, 1))
    assert "max_activations must be a whole number of at least 1" in refusal(
        "auto", max_activations=0
    )
    assert "placement must be a jaxpipe.Placement" in refusal("auto", placement="loop")
    assert "lean must be True or False" in refusal("interleaved_1f1b", lean=1)


def test_none_means_not_given():
    for name, option in (
        ("interleaved_1f1b", "group_size"),
        ("zbv", "costs"),
        ("auto", "max_activations"),
    ):
        given = jp.schedules.build(name, devices=2, microbatches=4, **{option: None})
        assert given == jp.schedules.build(name, devices=2, microbatches=4)


def test_costs_of_the_wrong_length_are_a_value_error():
    with pytest.raises(ValueError, match="8 stages"):
        jp.schedules.build("zbv", devices=4, microbatches=8, costs=jp.Costs(forward=[1, 2, 3]))
