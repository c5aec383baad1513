"""`spread_last` and `spread_first`: L, E and G on every device for every microbatch, where nobody
waits; and what the simulator says.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import random_schedule, randoms

import jaxpipe as jp
from jaxpipe import Action, Costs, Kind, Schedule
from jaxpipe.table.kinds import parts


def read(text: str) -> Schedule:
    return Schedule.from_csv(text)


def with_stages(rng) -> Schedule:
    """A random table in which every device may have a share."""
    while True:
        schedule = random_schedule(rng, recompute=True)
        if schedule.num_stages >= schedule.num_devices:
            return schedule


COLLECTIVES = (Kind.L, Kind.E, Kind.G)


def naive_times(schedule: Schedule, length: dict[Kind, float], hop: float) -> dict[Action, float]:
    """When each action ends if F, B, I, W and R take 1, an L, E or G `length` and a transfer `hop`:
    tried again until nothing moves.
    """
    ends: dict[Action, float] = {}
    last, many = schedule.num_stages - 1, schedule.num_devices > 1
    place = {a: d for d, _, a in schedule.actions()}
    head, free = [0] * schedule.num_devices, [0.0] * schedule.num_devices

    def after(action: Action, device: int) -> float | None:
        end = ends.get(action)
        return None if end is None else end + (hop if place[action] != device else 0)

    def met(kind: Kind, m: int) -> float | None:
        return (
            None
            if Action(0, kind, m) not in ends
            else ends[Action(0, kind, m)] + (hop if many else 0)
        )

    def source_of(kind: Kind, m: int) -> float:
        """When all devices have what they need."""
        if kind is Kind.E:
            return 0
        sources = (
            [Action(last, Kind.F, m)]
            if kind is Kind.L
            else [Action(0, Kind.B, m), Action(0, Kind.I, m)]
        )
        return max(ends[a] for a in sources if a in place) + (hop if many else 0)

    def ready(device: int, cell) -> float | None:
        found = [free[device]]
        for stage, kind, m in parts(cell):
            if kind is Kind.F and stage:
                found.append(after(Action(stage - 1, Kind.F, m), device))
            if kind is Kind.F and not stage and Action(0, Kind.E, m) in place:
                found.append(met(Kind.E, m))
            if kind in (Kind.B, Kind.I) and stage < last:
                source = Action(stage + 1, Kind.B, m)
                found.append(
                    after(source if source in place else source._replace(kind=Kind.I), device)
                )
            if kind in (Kind.B, Kind.I) and stage == last and Action(0, Kind.L, m) in place:
                found.append(met(Kind.L, m))
        return None if None in found else max(found)

    while any(h < len(row) for h, row in zip(head, schedule.rows, strict=True)):
        heads = [
            row[h] if h < len(row) else None for h, row in zip(head, schedule.rows, strict=True)
        ]
        shares = {
            cell[1:] for cell in heads if isinstance(cell, Action) and cell.kind in COLLECTIVES
        }
        if len(shares) == 1 and all(
            isinstance(cell, Action) and cell.kind in COLLECTIVES for cell in heads
        ):
            ((kind, m),) = shares
            begin = max(*free, source_of(kind, m))
            for d in range(schedule.num_devices):
                ends[Action(d, kind, m)] = free[d] = begin + length[kind]
                head[d] += 1
            continue
        for d, cell in enumerate(heads):
            if cell is None or (isinstance(cell, Action) and cell.kind in COLLECTIVES):
                head[d] += cell is None and head[d] < len(schedule.rows[d])
                continue
            start = ready(d, cell)
            if start is not None:
                free[d] = start + len(parts(cell))
                ends.update(dict.fromkeys(parts(cell), free[d]))
                head[d] += 1
    return ends


@given(randoms())
def test_the_simulator_lets_all_devices_do_their_shares_at_once(rng):
    length, hop = {kind: rng.choice((0.5, 3)) for kind in COLLECTIVES}, rng.choice((0, 0.25))
    costs = Costs(
        backward=1,
        last=length[Kind.L],
        first=length[Kind.E],
        first_grad=length[Kind.G],
        transfer=hop,
    )
    table = with_stages(rng)
    for spread in rng.choice(
        (
            (jp.spread_last,),
            (jp.spread_first,),
            (jp.spread_last, jp.spread_first),
            (jp.spread_first, jp.spread_last),
        )
    ):
        table = spread(table, costs=costs)
    timeline = jp.simulate(table, costs)
    texts = [str(action) for _, _, action in table.actions()]
    assert {str(a): end for a, end in naive_times(table, length, hop).items()} == {
        text: timeline.end[text] for text in texts
    }
    assert timeline.end[timeline.critical_path[-1]] == timeline.makespan


def test_a_meeting_waits_for_the_last_device_and_the_transfer_and_the_backward_for_it():
    table = read("0F0,0F1,0L0,0B0,0L1,0B1\n1F0,1L0,1B0,1F1,1L1,1B1\n")
    t = jp.simulate(table, Costs(forward=[3, 1], last=2, transfer=0.5))
    # 1F0 ends at 4.5, its output is everywhere at 5; device 0 is free at 6.
    assert (t.start["0L0"], t.start["1L0"], t.end["1L0"], t.start["1B0"]) == (6, 6, 8, 8.5)
    assert t.critical_path[:4] == ("0F0", "0F1", "1L0", "1B0")
    assert "1L0" in str(jp.engine.simulate_steps(table))


@pytest.mark.parametrize("name", jp.schedules.names())
def test_no_schedule_of_the_catalogue_waits_at_its_meetings(name):
    """The step is that of the model without `last`, and all L: the share that every device must do
    anyway.

    Allowed is what the issue asks for, 3 %, but for the pairs of dualpipev, which last twice as
    long as an F.
    """
    plain = jp.schedules.build(name, devices=4, microbatches=16)
    spread = jp.spread_last(plain, costs=Costs(last=0.5))
    most = 1.06 if name == "dualpipev" else 1.03
    assert (
        jp.simulate(spread, Costs(last=0.5)).makespan
        <= most * jp.simulate(plain).makespan + 0.5 * 16
    )
    assert jp.simulate(spread).peak_activations == jp.simulate(plain).peak_activations
    assert jp.check(spread) is spread
    assert Schedule.from_csv(spread.to_csv()).rows == spread.rows
    assert all(
        cell.stage == d
        for d, row in enumerate(spread.rows)
        for cell in row
        if isinstance(cell, Action) and cell.kind is Kind.L
    )


@pytest.mark.parametrize("name", jp.schedules.names())
def test_no_schedule_of_the_catalogue_waits_where_first_is_spread(name):
    """Beside L an E and a G cost their own time alone; without L they keep nobody waiting for more
    than 3 %, but in dualpipev.
    """
    plain = jp.schedules.build(name, devices=4, microbatches=16)
    costs = Costs(last=0.5, first=0.125, first_grad=0.125)
    own = 16 * (0.125 + 0.125)
    with_last = jp.spread_last(plain, costs=costs)
    both = jp.spread_first(with_last, costs=costs)
    assert jp.simulate(both, costs).makespan <= jp.simulate(with_last, costs).makespan + own
    alone = jp.spread_first(plain, costs=costs)
    assert (
        jp.simulate(alone, costs).makespan
        <= (1.06 if name == "dualpipev" else 1.03) * jp.simulate(plain, costs).makespan + own
    )
    for table in (both, alone):
        assert jp.simulate(table).peak_activations == jp.simulate(plain).peak_activations
        assert jp.check(table) is table
        assert Schedule.from_csv(table.to_csv()).rows == table.rows
    assert jp.transforms.remove_spread(both).rows == jp.transforms.remove_spread(with_last).rows


MEASURED = [
    Costs(forward=5.7, input_grad=5.84, weight_grad=6.33, last=6.0, first=0.1, first_grad=0.1),
    Costs(
        forward=5.7,
        input_grad=5.84,
        weight_grad=6.33,
        last=6.0,
        first=0.1,
        first_grad=0.1,
        transfer=0.1,
    ),
]


@pytest.mark.parametrize("costs", MEASURED, ids=["no transfers", "transfers"])
@pytest.mark.parametrize(
    "name",
    ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "v_half", "interleaved_zb"],
)
def test_times_that_differ_a_little_make_nobody_wait_for_a_whole_action(name, costs):
    """Held as soon as they are due, meetings of 1F1B or ZB-H1 would make the step 16 to 19 %
    longer.
    """
    bare = jp.schedules.build(name, devices=4, microbatches=16)
    ideal = jp.simulate(bare, costs).makespan + 16 * (6.0 + 0.1 + 0.1)
    table = jp.spread_first(jp.spread_last(bare, costs=costs), costs=costs)
    # What a step with a head on all devices may take more: the bound of 3 % that the pass is held
    # to.
    assert jp.simulate(table, costs).makespan <= 1.03 * ideal


@pytest.mark.parametrize(("name", "most"), [("zb_h1", (1, 2)), ("interleaved_1f1b", (3, 3))])
def test_few_inputs_and_gradients_wait_at_the_first_stage(name, most):
    """Between E and its F, and between B and its G, whatever M is."""
    table = jp.spread_first(jp.spread_last(jp.schedules.build(name, devices=4, microbatches=32)))
    inputs = gradients = most_inputs = most_gradients = 0
    for cell in table.rows[0]:
        inputs += (cell.kind is Kind.E) - (cell.stage == 0 and cell.kind is Kind.F)
        gradients += (cell.stage == 0 and cell.kind is Kind.I) - (cell.kind is Kind.G)
        most_inputs, most_gradients = max(most_inputs, inputs), max(most_gradients, gradients)
    assert (most_inputs, most_gradients) == most


def test_in_bursts_each_l_has_an_e_and_a_g():
    """Of an interleaved table, in which the first stage's forwards and backwards come some ticks
    before the last one's.
    """
    table = jp.spread_first(
        jp.spread_last(jp.schedules.build("interleaved_1f1b", devices=4, microbatches=24))
    )
    cells = [cell.kind.name if cell.kind in COLLECTIVES else "." for cell in table.rows[0]]
    sets = [text for text in "".join(cells).split(".") if text]
    at = sets.index("LEG")
    assert sets[at : at + 12] == ["LEG"] * 12


def test_a_backward_that_would_keep_others_waiting_is_split_unless_told_not_to():
    plain = jp.schedules.build("1f1b", devices=4, microbatches=16)
    kinds = [
        {a.kind for _, _, a in jp.spread_last(plain, split=split).actions()}
        for split in (None, True, False)
    ]
    assert kinds == [{Kind.F, Kind.I, Kind.W, Kind.L}] * 2 + [{Kind.F, Kind.B, Kind.L}]
    whole, apart = (
        jp.simulate(jp.spread_last(plain, split=split)).makespan for split in (False, True)
    )
    assert whole > 1.15 * apart
    alone = jp.schedules.build("gpipe", devices=4, microbatches=16)
    assert {a.kind for _, _, a in jp.spread_last(alone).actions()} == {Kind.F, Kind.B, Kind.L}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (jp.add_transfers(jp.schedules.build("gpipe", devices=2, microbatches=2)), "SEND and RECV"),
        (
            read("0F0,0B0\n\n"),
            r"fewer stages \(1\) than devices \(2\), .* as many stages as devices",
        ),
        (read("0B0,0F0\n"), "before"),
    ],
)
def test_what_cannot_be_spread_is_refused(table, message):
    for spread in (jp.spread_last, jp.spread_first):
        with pytest.raises(jp.ScheduleError, match=message):
            spread(table)


def test_a_table_with_l_has_no_transfers():
    with pytest.raises(jp.ScheduleError, match="remove_spread"):
        jp.add_transfers(read("0F0,0L0,0B0\n1F0,1L0,1B0\n"))
