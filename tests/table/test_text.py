"""Text <-> value: a strict parser, CSV and JSON both ways, and the same tables in torch's own
loader.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st
from naive import deferred
from strategies import schedules

import jaxpipe as jp
from jaxpipe import Action, Kind, Overlap, Placement, Schedule, Transfers
from jaxpipe.table import parse_action, parse_cell

COMPUTE = "0F0,0F1,,0B0,0B1\n1F0,1B0,(1F1;1B1)OVERLAP_F_B\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2F0", Action(2, Kind.F, 0)),
        ("10B31", Action(10, Kind.B, 31)),
        ("0I1", Action(0, Kind.I, 1)),
        ("0W1", Action(0, Kind.W, 1)),
        ("3SEND_F4", Action(3, Kind.SEND_F, 4)),
        ("3RECV_F4", Action(3, Kind.RECV_F, 4)),
        ("3SEND_B4", Action(3, Kind.SEND_B, 4)),
        ("3RECV_B4", Action(3, Kind.RECV_B, 4)),
        ("(0F7;7B3)OVERLAP_F_B", Overlap(Action(0, Kind.F, 7), Action(7, Kind.B, 3))),
        ("(0F7;7I3)OVERLAP_F_B", Overlap(Action(0, Kind.F, 7), Action(7, Kind.I, 3))),
    ],
)
def test_cells_read_and_print(text, value):
    assert parse_cell(text) == value
    assert str(value) == text
    assert parse_cell(f"  {text} ") == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1F0junk", "'junk' follows at character 4, where the action ends"),
        ("F0", "character 1 must start the stage number"),
        ("1Q0", "character 2 must start a kind"),
        ("1SEND_0", "character 2 must start a kind"),
        ("1F", "character 3 must start the microbatch number"),
        ("1F-1", "character 3 must start the microbatch number"),
        ("1 F0", "character 2 must start a kind"),
        ("1UNSHARD", "character 3 must start the microbatch number"),
    ],
)
def test_what_is_not_an_action_is_told_where(text, why):
    with pytest.raises(jp.errors.ParseError) as caught:
        parse_action(text)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "(0F1)OVERLAP_F_B",
        "(0B1;1F1)OVERLAP_F_B",
        "(0F1;1W1)OVERLAP_F_B",
        "(0F1;1B1)",
        "(0F1;1B1;0F2)OVERLAP_F_B",
        "(0F1;1Bx)OVERLAP_F_B",
    ],
)
def test_what_is_not_a_pair_is_refused(text):
    with pytest.raises(jp.errors.ParseError, match=r"overlap|character"):
        parse_cell(text)


def test_csv_keeps_idle_cells_and_empty_rows():
    schedule = Schedule.from_csv(COMPUTE)
    assert schedule.to_csv() == COMPUTE
    assert schedule.rows[0][2] is None
    assert Schedule.from_csv("0F0\n\n").num_devices == 2


def test_csv_takes_windows_line_ends_and_a_byte_order_mark():
    assert Schedule.from_csv("\ufeff" + COMPUTE.replace("\n", "\r\n")) == Schedule.from_csv(COMPUTE)


def test_every_bad_cell_of_a_csv_is_named():
    with pytest.raises(jp.ScheduleError) as caught:
        Schedule.from_csv("0F0,1F0junk\n0UNSHARD,x\n")
    assert [(v.rule, v.device, v.position) for v in caught.value.violations] == [
        ("parse", 0, 1),
        ("parse", 1, 1),
    ]
    assert "line 1, column 2: '1F0junk' is not an action" in str(caught.value)
    assert "line 2, column 2: 'x' is not an action" in str(caught.value)
    with pytest.raises(jp.ScheduleError, match="holds no action"):
        Schedule.from_csv("\n")


def test_json_keeps_what_csv_does_not():
    rows = Schedule.from_csv("0F0,1F1\n1F0,0F1\n").rows
    schedule = Schedule(rows, Placement(((1, 0), (0, 1)), 2), 5, "mine")
    again = Schedule.from_json(schedule.to_json())
    assert again == schedule
    assert again.name == "mine"
    assert json.loads(schedule.to_json())["stage_to_device"] == [[1, 0], [0, 1]]
    assert Schedule.from_csv(schedule.to_csv()) != schedule


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({"rows": [["0F0", 3]]}, ["rows must be a sequence, not [['0F0', 3]]"]),
        ({"rows": "0F0"}, ["rows must be a sequence, not '0F0'"]),
        ({"rows": None}, ["rows must be a sequence, not None"]),
        (
            {"rows": [["0F0", "1Q0", "F"]]},
            ["\"rows\"[0][1]: '1Q0' is not an action", "\"rows\"[0][2]: 'F'"],
        ),
        ({"rows": [["0F0"], []]}, ["the placement is for 1 devices, but the table has 2 rows"]),
        (
            {"num_devices": None, "num_microbatches": "4"},
            ["num_devices must be a whole number", "num_microbatches must be a whole number"],
        ),
        ({"num_devices": 0}, ["placed on device 0, but there are only 0 devices"]),
        ({"num_microbatches": True}, ["num_microbatches must be a whole number"]),
        ({"num_microbatches": -1}, ["num_microbatches must be 0 to"]),
        ({"slices": 0}, ["slices=0 must be at least 1"]),
        ({"stage_to_device": 0}, ["stage_to_device must be a sequence"]),
        ({"stage_to_device": [-1]}, ["stages [0] have no device, or a negative one"]),
        ({"stage_to_device": [[]]}, ["stages [0] have no device"]),
        ({"stage_to_device": [3]}, ["placed on device 3"]),
        ({"name": 4}, ["name must be a text"]),
        ({"version": 2}, ["version 2"]),
        ({"format": "torch"}, ['"format"']),
    ],
)
def test_every_fault_of_a_json_is_named(change, faults):
    data = json.loads(Schedule.from_csv("0F0,0B0\n").to_json()) | change
    with pytest.raises(jp.ScheduleError) as caught:
        jp.check(Schedule.from_json(json.dumps(data)))
    for fault in faults:
        assert fault in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
def test_what_is_not_a_json_table_is_refused(text):
    with pytest.raises(jp.ScheduleError):
        Schedule.from_json(text)


@given(schedules(recompute=True))
def test_round_trips(schedule):
    for table in (schedule, jp.add_transfers(schedule)):
        assert Schedule.from_csv(table.to_csv()).rows == table.rows
        again = Schedule.from_json(table.to_json())
        assert (again, again.name) == (table, table.name)


@given(st.text(alphabet="0123FBIWRSENDCV_();OLAP x", max_size=24))
def test_the_parser_accepts_only_what_it_prints(text):
    try:
        cell = parse_cell(text)
    except jp.errors.ParseError:
        return
    if cell is not None:
        assert parse_cell(str(cell)) == cell


# torch.


SEPARATED = [
    "0F0;0B0\n1F0;1B0\n",
    "0F0\t0B0\n",
    ";;0F0\n;0B0;\n",
    "0F0;(0F1;0B0)OVERLAP_F_B\n",
    "a;b\n0F0;0B0\n",
    "0F0 | 0B0\n",
]


@pytest.mark.parametrize("text", SEPARATED)
def test_another_separator_is_named(text):
    with pytest.raises(jp.ScheduleError, match=r"wrong separator .*; write a comma"):
        Schedule.from_csv(text)


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("step 0,step 1\n0F0,0B0\n", True),
        (",0,1\n0F0,0B0\n", True),
        ("0,1,2\n0F0\n1F0\n", True),
        ("x,y\n", False),
        ("0F0,x\n1F0\n", False),
        ("\n1F0,x\n", False),
    ],
)
def test_a_header_row_is_named(text, header):
    with pytest.raises(jp.ScheduleError) as caught:
        Schedule.from_csv(text)
    assert ("remove the header row" in str(caught.value)) == header
    assert "separator" not in str(caught.value)


@pytest.fixture(scope="module")
def torch_schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_runtime(module, schedule: Schedule):
    """torch's table runtime for a schedule, with a stand-in for the model's stages (no process
    group is needed to read tables).
    """
    stage = SimpleNamespace(
        num_stages=schedule.num_stages, group_size=schedule.num_devices, group_rank=0, is_last=False
    )
    return module._PipelineScheduleRuntime([stage], schedule.num_microbatches)


NAMED = {
    "1f1b": Schedule.from_csv("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"),
    "vee": Schedule.from_csv(
        "0F0,0F1,3F0,3B0,3F1,3I1,3W1,,0B0,0B1\n1F0,1F1,2F0,2F1,,2B0,1B0,2I1,1I1,2W1,1W1\n"
    ),
    "pairs": Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMED)
def test_torch_reads_our_compute_only_csv(name, torch_schedules, tmp_path):
    schedule = jp.check(NAMED[name])
    (tmp_path / "ours.csv").write_text(schedule.to_csv())
    runtime = torch_runtime(torch_schedules, schedule)
    runtime._load_csv(str(tmp_path / "ours.csv"))
    assert [[str(a or "") for a in runtime.pipeline_order[d]] for d in range(2)] == [
        [str(c or "") for c in row] for row in schedule.rows
    ]
    assert (
        tuple(runtime.stage_index_to_group_rank[s] for s in range(schedule.num_stages))
        == schedule.stage_to_device
    )


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMED)
def test_torch_reads_our_transfers_and_counts_the_same_steps(name, torch_schedules, tmp_path):
    whole = jp.add_transfers(NAMED[name])
    (tmp_path / "ours.csv").write_text(whole.to_csv())
    runtime = torch_runtime(torch_schedules, whole)
    runtime._load_csv(str(tmp_path / "ours.csv"), format="compute_comms")
    assert [[str(a) for a in runtime.pipeline_order_with_comms[d]] for d in range(2)] == [
        [str(c) for c in row] for row in whole.rows
    ]
    if name != "pairs":  # torch's simulation does not know pairs
        assert max(map(len, runtime._simulate().values())) == len(jp.engine.simulate_steps(whole))


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMED)
def test_we_read_what_torch_writes(name, torch_schedules, tmp_path):
    schedule = NAMED[name]
    (tmp_path / "ours.csv").write_text(schedule.to_csv())
    runtime = torch_runtime(torch_schedules, schedule)
    runtime._load_csv(str(tmp_path / "ours.csv"))
    for kind in ("compute_only", "compute_comms"):
        runtime._dump_csv(str(tmp_path / f"{kind}.csv"), format=kind)
    assert Schedule.from_csv((tmp_path / "compute_only.csv").read_text()) == schedule
    text = (tmp_path / "compute_comms.csv").read_text()
    assert "UNSHARD" in text
    assert "REDUCE_GRAD" in text
    whole = jp.check(Schedule.from_csv(text))
    assert jp.transforms.remove_gathers(jp.transforms.remove_transfers(whole)).rows == tuple(
        tuple(c for c in row if c is not None) for row in schedule.rows
    )


@pytest.mark.torch
@settings(max_examples=40)
@given(schedules())
def test_torch_reads_every_cell(torch_schedules, schedule):
    for table in (schedule, jp.add_transfers(schedule)):
        for line, row in zip(table.to_csv().splitlines(), table.rows, strict=True):
            cells = (
                [torch_schedules._Action.from_str(text) for text in line.split(",")] if row else []
            )
            assert [str(c or "") for c in cells] == [str(c or "") for c in row]


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "looped_bfs", "interleaved_zb"]
)
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (4, 4), (4, 8)])
def test_never_more_steps_than_torch_with_early_receives_nor_with_safe_late_ones(
    name, devices, microbatches, torch_schedules
):
    """torch 2.13 has `_add_send_recv` (safe, early) and `_defer_recv_ops` (late, and seldom safe
    where both sides wait).
    """
    chunks = (
        {"chunks": 2} if name in ("interleaved_1f1b", "zbv", "looped_bfs", "interleaved_zb") else {}
    )
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches, **chunks)
    ours = len(jp.engine.simulate_steps(jp.add_transfers(schedule)))
    device_of = schedule.stage_to_device.__getitem__
    order = {
        d: [torch_schedules._Action.from_str(str(c)) for c in row if c is not None]
        for d, row in enumerate(schedule.rows)
    }
    early = torch_schedules._add_send_recv(order, device_of, schedule.num_stages)
    late = torch_schedules._defer_recv_ops({d: list(row) for d, row in early.items()}, device_of)
    safe = jp.check(
        schedule.with_rows([[parse_cell(str(a)) for a in early[d]] for d in range(devices)])
    )
    assert ours <= len(jp.engine.simulate_steps(safe))
    table = schedule.with_rows([[parse_cell(str(a)) for a in late[d]] for d in range(devices)])
    assert {v.rule for v in table.violations} <= {"deadlock"}
    if not table.violations:
        assert ours <= len(jp.engine.simulate_steps(table))
    # torch's simulation lets a SEND return at once, and so does ours unless it is asked for more.
    assert jp.check(table, transfers=Transfers.BUFFERED) is table
    theirs = torch_schedules._simulate_comms_compute(late, device_of, schedule.num_stages)
    assert len(jp.engine.simulate_steps(table)) == max(map(len, theirs.values()))
    assert {v.rule for v in deferred(schedule).violations} <= {"deadlock"}
