"""U, D and X: where `add_gathers` puts them, what torch's own passes say, and what they cost."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from naive import needs
from strategies import random_schedule, randoms

import jaxpipe as jp
from jaxpipe import Action, Costs, Kind, Schedule
from jaxpipe.lowering.plan import plan_of
from jaxpipe.program.ir import NOBODY
from jaxpipe.program.verify import ProgramRule, faults, verify
from jaxpipe.render import to_svg, to_trace
from jaxpipe.render.chart import BarPart, Chart
from jaxpipe.table.kinds import parts
from jaxpipe.transforms import Reduce, remove_gathers, remove_transfers

GATHERS = (Kind.U, Kind.D, Kind.X)
COMPUTES = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)


@cache
def table(name: str, devices: int = 4, microbatches: int = 8, chunks: int | None = None):
    options = {} if chunks is None else {"chunks": chunks}
    return jp.schedules.build(name, devices=devices, microbatches=microbatches, **options)


INTERLEAVED = table("interleaved_1f1b", chunks=4)
# By name, tables of which each device has all microbatches of its stages, as torch's pass wants it.
TABLES = {
    "1f1b": table("1f1b"),
    "interleaved": INTERLEAVED,
    "zbv": table("zbv"),
    "dualpipev": table("dualpipev", 2),
    "looped_bfs": table("looped_bfs", chunks=3),
}


def count(schedule: Schedule, kind: Kind) -> int:
    return sum(action.kind is kind for *_, action in schedule.actions())


def test_a_gather_is_named_after_the_first_microbatch_of_its_run():
    one = Schedule.from_csv("0F0,0F1,1F0,1F1,1B1,1B0,0B1,0B0\n")
    assert " ".join(map(str, jp.add_gathers(one, max_active=1).rows[0])) == (
        "0U0 0F0 0F1 0D0 1U0 1F0 1F1 1B1 1B0 1X1 1D0 0U1 0B1 0B0 0X1 0D1"
    )


@pytest.mark.torch
@pytest.mark.parametrize("max_active", [1, 2, 3, None])
@pytest.mark.parametrize("name", TABLES)
def test_torch_puts_them_in_the_same_places(name, max_active):
    torchs = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = TABLES[name]
    if max_active == 1 and name == "dualpipev":
        return
    ours = jp.add_gathers(schedule, max_active=max_active)
    for row, line in zip(schedule.rows, ours.to_csv().splitlines(), strict=True):
        actions = [None if c is None else torchs._Action.from_str(str(c)) for c in row]
        theirs = torchs._add_unshard_reshard(actions, max_active or schedule.num_chunks)
        theirs = torchs._add_reduce_grad(theirs, schedule.num_microbatches)
        assert line.split(",") == [str(action) for action in theirs]


@pytest.mark.torch
def test_torch_lowers_to_our_table_and_reads_it(tmp_path):
    torchs = pytest.importorskip("torch.distributed.pipelining.schedules")
    from test_text import torch_runtime

    schedule = INTERLEAVED
    runtime = torch_runtime(torchs, schedule)
    path = tmp_path / "table.csv"
    path.write_text(schedule.to_csv())
    runtime._load_csv(str(path))
    runtime._dump_csv(str(path), format="compute_comms")
    ours = jp.add_gathers(schedule, max_active=3)  # torch's default
    assert remove_transfers(Schedule.from_csv(path.read_text())) == ours
    path.write_text(jp.add_transfers(ours).to_csv())
    runtime._load_csv(str(path), format="compute_comms")
    runtime._dump_csv(str(path), format="compute_comms")
    assert remove_transfers(Schedule.from_csv(path.read_text())) == ours


def random_table(rng: random.Random) -> Schedule:
    if rng.random() < 0.4:
        return random_schedule(rng, recompute=rng.random() < 0.5)
    name = rng.choice(("interleaved_1f1b", "zbv", "dualpipev", "dualpipe", "looped_bfs", "zb_h1"))
    return table(name, 2, rng.choice((4, 6)))


def most_needed(schedule: Schedule) -> int:
    return max(
        len({a.stage for a in parts(c) if a.kind in COMPUTES}) for row in schedule.rows for c in row
    )


@given(randoms())
def test_what_is_added_keeps_to_its_limits(rng):
    schedule = random_table(rng)
    most, ahead = rng.choice((None, 2, 3)), rng.choice((None, 0, 1, 3))
    reduce = rng.choice(list(Reduce))
    gathered = jp.add_gathers(schedule, max_active=most, ahead=ahead, reduce=reduce)
    assert jp.check(gathered) is gathered
    dense = [[c for c in row if c is not None] for row in schedule.rows]
    assert remove_gathers(gathered) == schedule.with_rows(dense)
    assert Schedule.from_csv(gathered.to_csv()).rows == gathered.rows
    assert Schedule.from_json(gathered.to_json()) == gathered
    jp.check(jp.add_transfers(gathered))
    timeline = jp.simulate(gathered)
    assert most is None or max(timeline.peak_parameters) <= most
    if reduce is Reduce.EACH_RUN and not schedule.forward_only:
        for gradients, parameters in zip(
            timeline.peak_gradients, timeline.peak_parameters, strict=True
        ):
            assert gradients <= parameters, "each is reduced before its stage is dropped"
    for row in gathered.rows:
        waits: dict[int, int] = {}  # per stage that is gathered and not used yet, the cells since
        for cell in row:
            own = [a.stage for a in parts(cell) if a.kind in COMPUTES]
            assert ahead is None or all(waits.get(stage, 0) <= ahead for stage in own)
            waits = {s: n + 1 if own else n for s, n in waits.items() if s not in own}
            waits |= {a.stage: 0 for a in parts(cell) if a.kind is Kind.U}


def fewest(sequence: list[int], room: int) -> int:
    """The fewest gathers for stages that are needed in this order, by trying all ways."""
    best = {frozenset[int](): 0}
    for stage in sequence:
        found: dict[frozenset[int], int] = {}
        for held, gathers in best.items():
            if stage in held:
                ways = [(held, gathers)]
            elif len(held) < room:
                ways = [(held | {stage}, gathers + 1)]
            else:
                ways = [(held - {out} | {stage}, gathers + 1) for out in held]
            for way, cost in ways:
                found[way] = min(cost, found.get(way, cost))
        best = found
    return min(best.values())


@given(randoms())
def test_nothing_is_gathered_more_often_than_needed(rng):
    stages, microbatches = rng.randint(2, 4), rng.randint(1, 4)
    todo = {stage: list(range(microbatches)) for stage in range(stages)}
    row = []
    while todo:
        stage = rng.choice(list(todo))
        row.append(Action(stage, Kind.F, todo[stage].pop()))
        todo = {s: left for s, left in todo.items() if left}
    placement = jp.Placement.explicit([0] * stages)
    schedule = Schedule([row], placement, microbatches)
    order = {action: place for place, action in enumerate(row)}
    if any(order[a] < order[a._replace(stage=a.stage - 1)] for a in row if a.stage):
        return  # a stage comes before the one that feeds it
    room = rng.randint(1, stages)
    for ahead in (0, 2):
        gathered = jp.add_gathers(schedule, max_active=room, ahead=ahead)
        assert count(gathered, Kind.U) == fewest([a.stage for a in row], room)


def test_reductions_come_once_or_after_each_run():
    once = jp.add_gathers(INTERLEAVED, max_active=2)
    often = jp.add_gathers(INTERLEAVED, max_active=2, reduce=Reduce.EACH_RUN)
    assert count(once, Kind.X) == INTERLEAVED.num_stages
    assert count(often, Kind.X) > INTERLEAVED.num_stages
    assert max(jp.simulate(once).peak_gradients) == 4
    assert max(jp.simulate(often).peak_gradients) == 1
    forwards = jp.schedules.build("1f1b", devices=2, microbatches=2, forward_only=True)
    assert count(jp.add_gathers(forwards), Kind.X) == 0


def test_what_cannot_be_gathered_is_refused():
    with pytest.raises(jp.ScheduleError, match="remove_transfers"):
        jp.add_gathers(jp.add_transfers(TABLES["1f1b"]))
    gathered = jp.add_gathers(TABLES["1f1b"])
    for transform, how in (
        (jp.add_gathers, "U, D and X go into a table without them"),
        (jp.add_recompute, "add R without them, then put them in"),
        (jp.spread_last, "spread `last` without them, then put them in"),
        (jp.spread_first, "spread `first` without them, then put them in"),
    ):
        with pytest.raises(jp.ScheduleError, match=f"has U, D or X; {how}.*remove_gathers"):
            transform(gathered)
    with pytest.raises(jp.ScheduleError, match="remove_gathers"):
        jp.merge_backward(gathered, delayed=True)
    with pytest.raises(jp.ScheduleError, match="remove_gathers"):
        jp.transforms.remove_recompute(jp.add_gathers(jp.add_recompute(TABLES["1f1b"])))
    with pytest.raises(
        jp.ScheduleError, match="max_active=1 must be 2 or more: the table has pairs"
    ):
        jp.add_gathers(TABLES["dualpipev"], max_active=1)
    with pytest.raises(jp.ScheduleError, match="ahead=-1"):
        jp.add_gathers(TABLES["1f1b"], ahead=-1)


ALONE = Schedule.from_csv("0UNSHARD,0F0,1UNSHARD,0F1,0RESHARD,1F0,1F1,1RESHARD\n")
BOTH = Schedule.from_csv("0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD\n")


def test_a_gather_runs_beside_actions_and_is_awaited_by_those_that_need_it():
    for gather, makespan in ((0, 4), (1, 5), (2, 7), (5, 13)):
        t = jp.simulate(ALONE, Costs(gather=gather))
        # The second begins after 0F0, which waits for the first; 0F1 runs beside it.
        assert t.start["1U0"] == gather + 1
        assert t.start["0F1"] == gather + 1
        assert t.start["1F0"] == max(gather + 2, 2 * gather + 1)
        assert t.makespan == makespan == t.start["1F0"] + 2
        assert t.busy == (4,)
    t = jp.simulate(ALONE, Costs(gather=5))
    assert t.critical_path == ("0U0", "0F0", "1U0", "1F0", "1F1")
    t = jp.simulate(ALONE, Costs(gather=1))
    assert t.critical_path == ("0U0", "0F0", "0F1", "1F0", "1F1")


def test_gathers_and_reductions_of_a_device_take_turns_on_its_link():
    s = Schedule.from_csv("0UNSHARD,1UNSHARD,0F0,0RESHARD,1F0,1RESHARD\n")
    t = jp.simulate(s, Costs(gather=(3, 4)))
    assert (t.start["1U0"], t.start["0F0"], t.start["1F0"]) == (3, 3, 7)
    t = jp.simulate(BOTH, Costs(gather=3, reduce=2))
    assert (t.end["0B1"], t.start["0X0"], t.makespan) == (9, 9, 11)
    assert t.critical_path[-2:] == ("0B1", "0X0")
    assert t.busy == (6,)


def test_whole_parameters_and_gradients_are_memory():
    costs = Costs(gather=3, reduce=2, parameters=10, gradient=5, activation=1)
    t = jp.simulate(BOTH, costs)
    assert (t.peak_parameters, t.peak_gradients) == ((1,), (1,))
    held = dict(t.memory(0))
    # gathered; 0F0; 0F1; gradient from 0B0 on; 0B0 over; 0B1 over and dropped; reduced
    assert held == {0: 10, 3: 11, 4: 12, 5: 17, 7: 16, 9: 5, 11: 0}
    assert t.peak_memory == (17,)
    plain = jp.simulate(remove_gathers(BOTH), costs)
    assert plain.peak_memory == (2,)
    assert plain.peak_parameters == plain.peak_gradients == (0,)


def naive_times(s: Schedule, costs: Costs) -> dict[tuple[int, int], tuple[float, float]]:
    """(start, end) of each cell by device and position, trying again until nothing moves."""
    where = {a: d for d, _, a in s.actions()}
    taken = {Kind.F: costs.forward, Kind.I: costs.input_grad, Kind.W: costs.weight_grad}
    taken |= {Kind.B: costs.input_grad + costs.weight_grad, Kind.R: costs.forward, Kind.D: 0}
    found: dict[tuple[int, int], tuple[float, float]] = {}
    done: dict[Action, float] = {}
    head, free, link = [0] * s.num_devices, [0.0] * s.num_devices, [0.0] * s.num_devices
    whole: list[dict[int, float]] = [{} for _ in s.rows]
    while any(h < len(row) for h, row in zip(head, s.rows, strict=True)):
        for d, row in enumerate(s.rows):
            if head[d] == len(row):
                continue
            cell = row[head[d]]
            if isinstance(cell, Action) and cell.kind in (Kind.U, Kind.X):
                start = max(link[d], free[d])
                link[d] = end = start + (costs.gather if cell.kind is Kind.U else costs.reduce)
                if cell.kind is Kind.U:
                    whole[d][cell.stage] = end
            else:
                wanted = [
                    next((n for n in need if n in done), None)
                    for a in parts(cell)
                    if a.kind is not Kind.D
                    for need in needs(s, a)
                ]
                if None in wanted:
                    continue
                ready = [done[n] + (costs.transfer if where[n] != d else 0) for n in wanted]
                gathered = [whole[d][a.stage] for a in parts(cell) if a.kind in COMPUTES]
                start = max([free[d], *ready, *gathered])
                free[d] = end = start + sum(taken[a.kind] for a in parts(cell))
                done |= dict.fromkeys(parts(cell), end)
            found[d, head[d]] = start, end
            head[d] += 1
    return found


@given(randoms())
def test_a_plain_simulation_agrees(rng):
    schedule = random_table(rng)
    gathered = jp.add_gathers(
        schedule,
        max_active=rng.choice((None, 2)),
        ahead=rng.choice((None, 0, 2)),
        reduce=rng.choice(list(Reduce)),
    )
    costs = Costs(
        **{name: rng.randint(1, 4) for name in ("forward", "input_grad", "weight_grad")},
        **{name: rng.randint(0, 6) for name in ("transfer", "gather", "reduce")},
    )
    t = jp.simulate(gathered, costs)
    naive = naive_times(gathered, costs)
    for number, (device, position, _) in enumerate(gathered.actions()):
        assert (t.starts[number], t.ends[number]) == naive[device, position]
    assert t.makespan == max(end for _, end in naive.values())
    sent = jp.simulate(jp.add_transfers(gathered), costs)
    assert sent.makespan == t.makespan, "SEND and RECV take no time of their own"


def test_gathers_are_drawn_above_what_they_run_beside():
    t = jp.simulate(ALONE, Costs(gather=2))
    chart = Chart(t)
    links = [bar for bar in chart.bars if bar.part is BarPart.LINK]
    assert [str(bar.action) for bar in links] == ["0U0", "1U0"]
    assert list(chart.bars)[-2:] == links, "drawn last"
    assert all(chart.box(bar)[3] < chart.row / 4 for bar in links)
    assert any("gather of parameters" in entry.text for entry in chart.legend)
    assert "0U0: gather of parameters of stage 0" in to_svg(t)
    events = json.loads(to_trace(t))["traceEvents"]
    threads = {e["name"]: e["tid"] for e in events if e["ph"] == "X"}
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named[threads["0U0"]] == "gathers"
    assert named[threads["0F0"]] == "compute"


def test_steps_count_them_like_other_actions():
    assert len(jp.engine.simulate_steps(ALONE)) == 8
    assert str(ALONE) == "         | 0   1   2   3   4   5   6   7\n" + (
        "device 0 | 0U0 0F0 1U0 0F1 0D0 1F0 1F1 1D0"
    )


ROOMS = jp.add_gathers(table("interleaved_1f1b", 2, 4, 4), max_active=2, reduce=Reduce.EACH_RUN)


def test_stages_that_make_room_share_it_in_the_program():
    program = verify(plan_of(ROOMS).program())
    assert program.num_rooms == 2
    # the last reduction follows the last action, in a tick of its own (and ticks come in twos)
    assert program.num_ticks == plan_of(remove_gathers(ROOMS)).program().num_ticks + 2
    (links,) = program.ticks.links
    held = {name: column != NOBODY for name, column in links.columns.items()}
    gathers = sum(int(own.sum()) for name, own in held.items() if name.startswith("gather"))
    assert gathers == count(ROOMS, Kind.U)
    assert sum(int(own.sum()) for own in held.values()) - gathers == count(ROOMS, Kind.X)
    assert "0>gather_0" in str(program)
    assert plan_of(jp.add_gathers(TABLES["zbv"])).program().num_rooms == 0


@pytest.mark.parametrize(
    ("column", "change", "why"),
    [
        ("gather_0", lambda chunks: NOBODY, "does not hold the parameters of stage"),
        ("gather_1", lambda chunks: (chunks + 1) % 4, "does not hold the parameters of stage"),
        ("reduce_0", lambda chunks: NOBODY, "is never reduced|holds a gradient of chunk"),
        ("reduce_1", lambda chunks: (chunks + 1) % 4, "reduces chunk"),
    ],
)
def test_a_program_without_one_of_them_is_refused(column, change, why):
    program = plan_of(ROOMS).program()
    (links,) = program.ticks.links
    table = links.columns[column].copy()
    tick, device = np.argwhere(table != NOBODY)[-1]
    table[tick, device] = change(table[tick, device])
    ticks = replace(program.ticks, links=(links.changed(**{column: table}),))
    found = faults(replace(program, ticks=ticks))
    assert {fault.rule for fault in found} == {ProgramRule.GATHER}
    assert any(re.search(why, fault.message) for fault in found)
