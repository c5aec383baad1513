"""Megatron-Core's helper tables, with the numbers of its own comments, and a whole table built from
them.
"""

from __future__ import annotations

import pytest

import jaxpipe as jp
from jaxpipe import Placement, Schedule, ScheduleError
from jaxpipe.megatron import execution_order, order_to_actions, schedule_table, warmup_counts

# The worked example in Megatron-Core's comments: PP 2, VP 2, M 5, group 3.
TABLE = schedule_table(5, 2, group_size=3)


def test_schedule_table_of_megatrons_comment():
    assert [pair.microbatch for pair in TABLE] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [pair.chunk for pair in TABLE] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_order_of_megatrons_comment():
    order = execution_order(TABLE, chunks=2, warmup=5)
    assert " ".join(map(str, order)) == "1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1"


@pytest.mark.parametrize(
    ("warmup", "order"),
    [
        (0, "1 -2 1 -2 1 -2 2 -1 2 -1 2 -1 1 -2 1 -2 2 -1 2 -1"),
        (10, "1 1 1 2 2 2 1 1 2 2 -2 -2 -2 -1 -1 -1 -2 -2 -1 -1"),
    ],
)
def test_order_at_the_ends_of_warmup(warmup, order):
    assert " ".join(map(str, execution_order(TABLE, chunks=2, warmup=warmup))) == order


@pytest.mark.parametrize("device", range(4))
def test_warmup_without_chunks_is_the_distance_to_the_last_device(device):
    assert warmup_counts(8, devices=4, device=device) == (8, 3 - device, 5 + device)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"microbatches": 8, "devices": 4, "device": 0, "chunks": 2}, (16, 2 * 3 + 4, 6)),
        ({"microbatches": 8, "devices": 4, "device": 3, "chunks": 2}, (16, 4, 12)),
        ({"microbatches": 8, "devices": 4, "device": 3, "chunks": 2, "overlap": True}, (16, 5, 11)),
        (
            {"microbatches": 12, "devices": 4, "device": 1, "chunks": 3, "group_size": 6},
            (36, 2 * 2 + 12, 20),
        ),
        ({"microbatches": 4, "devices": 4, "device": 0, "chunks": 2}, (8, 8, 0)),
        ({"microbatches": 2, "devices": 4, "device": 0}, (2, 2, 0)),
        (
            {"microbatches": 8, "devices": 4, "device": 2, "chunks": 2, "forward_only": True},
            (16, 16, 0),
        ),
        ({"microbatches": 8, "devices": 1, "device": 0, "chunks": 2}, (16, 0, 16)),
    ],
)
def test_warmup_counts(arguments, expected):
    counts = warmup_counts(**arguments)
    assert counts == expected
    assert counts.all_in_warmup is (expected[2] == 0)


@pytest.mark.parametrize(
    ("devices", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 8), (3, 2, 9)]
)
def test_orders_make_a_whole_table(devices, chunks, microbatches):
    table = schedule_table(microbatches, chunks, group_size=devices)
    rows = []
    for device in range(devices):
        warmup = warmup_counts(microbatches, devices=devices, device=device, chunks=chunks).warmup
        rows.append(
            order_to_actions(
                execution_order(table, chunks=chunks, warmup=warmup), devices=devices, device=device
            )
        )
    schedule = Schedule.from_rows(rows, placement=Placement.loop(devices=devices, chunks=chunks))
    names = [str(action) for _, _, action in schedule.actions()]
    stages = devices * chunks
    assert sorted(names) == sorted(
        f"{s}{k}{m}" for s in range(stages) for k in "FB" for m in range(microbatches)
    )
    # On each device, a stage's microbatches run in order and each backward comes after its forward.
    for row in rows:
        place = {str(action): i for i, action in enumerate(row)}
        for action in row:
            name = f"{action.stage}{action.kind.name}{action.microbatch}"
            assert (
                action.kind.name == "F"
                or place[f"{action.stage}F{action.microbatch}"] < place[name]
            )
            assert (
                action.microbatch == 0
                or place[f"{action.stage}{action.kind.name}{action.microbatch - 1}"] < place[name]
            )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: schedule_table(0, 0, group_size=0),
            "microbatches must be a whole number of at least 1",
        ),
        (lambda: warmup_counts(4, devices=4, device=4), "device must be 0 ... 3; got 4"),
        (
            lambda: warmup_counts(4, devices=0, device=0, group_size=1),
            "devices must be a whole number of at least 1",
        ),
        (
            lambda: execution_order([3], chunks=1, warmup=1),
            r"table must be pairs of a microbatch and its chunk.*, not \[3\]",
        ),
        (lambda: execution_order(TABLE, chunks=1, warmup=0), r"names chunks \[1\]"),
        (lambda: execution_order(TABLE, chunks=2, warmup=11), "warmup must be 0 ... 10"),
        (lambda: order_to_actions((1, 0), devices=2, device=0), "0 is not a step"),
        (lambda: order_to_actions((1,), devices=2, device=2), "device must be 0 ... 1"),
    ],
)
def test_bad_numbers(call, message):
    with pytest.raises(ScheduleError, match=message):
        call()


@pytest.mark.parametrize(
    ("devices", "chunks", "microbatches", "group_size"),
    [(2, 2, 4, 2), (4, 2, 8, 4), (4, 3, 12, 6), (3, 2, 10, 5), (2, 2, 5, 3)],
)
def test_the_catalogue_agrees_with_megatrons_tables(devices, chunks, microbatches, group_size):
    schedule = jp.schedules.build(
        "interleaved_1f1b",
        devices=devices,
        microbatches=microbatches,
        chunks=chunks,
        group_size=group_size,
    )
    table = schedule_table(microbatches, chunks, group_size=group_size)
    for device, row in enumerate(schedule.rows):
        warmup = warmup_counts(
            microbatches, devices=devices, device=device, chunks=chunks, group_size=group_size
        ).warmup
        order = execution_order(table, chunks=chunks, warmup=warmup)
        assert row == order_to_actions(order, devices=devices, device=device)
