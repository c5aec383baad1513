"""Tables of slices of sequences: generators, rules, costs, text and pictures."""

from dataclasses import replace

import pytest

import jaxpipe as jp
from jaxpipe.render import to_html, to_svg, to_trace
from jaxpipe.schedules.loop import sliced
from jaxpipe.table import parse_cell
from jaxpipe.table.kinds import Action

NAMES = [name for name in jp.schedules.names() if name != "dualpipe"]


def build(name="1f1b", *, devices=4, microbatches=16, slices=4, **options):
    return jp.schedules.build(
        name, devices=devices, microbatches=microbatches, slices=slices, **options
    )


@pytest.mark.parametrize("slices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_slices(name, slices):
    for devices in (1, 2, 4):
        schedule = jp.check(build(name, devices=devices, slices=slices))
        assert (schedule.slices, schedule.num_microbatches) == (slices, 16)
        assert jp.check(build(name, devices=devices, slices=slices, forward_only=True))


def test_one_slice_is_the_schedule_without_slices():
    for name in jp.schedules.names():
        assert build(name, slices=1) == jp.schedules.build(name, devices=4, microbatches=16)


def test_1f1b_of_slices_is_seq1f1b():
    """A warmup of P - 1 - d + K - 1 forwards, the makespan of 1F1B, and P - d + K - 1 slices held:
    (P + K - 1) / K sequences in place of P.
    """
    schedule = build()
    assert str(build(devices=2, microbatches=8).rows[1][3]) == "1F3"
    assert " ".join(map(str, build(devices=2, microbatches=8).rows[1])) == (
        "1F0 1F1 1F2 1F3 1B3 1F4 1B2 1F5 1B1 1F6 1B0 1F7 1B7 1B6 1B5 1B4"
    )
    timeline = jp.simulate(schedule)
    assert timeline.makespan == (16 + 3) * 3
    assert timeline.peak_activations == (7, 6, 5, 4)


@pytest.mark.parametrize(
    ("name", "makespan", "peak"),
    [("gpipe", 57, 16), ("1f1b", 57, 7), ("zb_h1", 51, 7), ("zbv", 101, 14), ("auto", 51, 11)],
)
def test_makespan_and_memory(name, makespan, peak):
    timeline = jp.simulate(build(name))
    assert (timeline.makespan, max(timeline.peak_activations)) == (makespan, peak)


@pytest.mark.parametrize(("devices", "chunks", "slices"), [(4, 2, 4), (4, 2, 5), (8, 4, 16)])
def test_interleaved_1f1b_of_slices_is_slimpipe(devices, chunks, slices):
    """All slices of a sequence go through a chunk before the next chunk, so that a device holds one
    sequence and two slices a hop; the makespan is that of interleaved 1F1B.
    """
    sequences = 3
    shape = {"devices": devices, "microbatches": sequences * slices, "slices": slices}
    schedule = jp.check(build("interleaved_1f1b", chunks=chunks, **shape))
    timeline = jp.simulate(schedule)
    assert timeline.makespan == (chunks * sequences * slices + devices - 1) * 3
    most = chunks * sequences * slices
    assert timeline.peak_activations == tuple(
        min(most, chunks * slices + 2 * (devices - 1 - d)) for d in range(devices)
    )
    lean = jp.check(build("interleaved_1f1b", chunks=chunks, lean=True, **shape))
    assert jp.simulate(lean).makespan == timeline.makespan
    assert max(jp.simulate(lean).peak_activations) == chunks * slices + devices - 1
    # groups of microbatches, as without slices, hold more
    grouped = jp.check(build("interleaved_1f1b", chunks=chunks, group_size=devices, **shape))
    assert max(jp.simulate(grouped).peak_activations) > max(timeline.peak_activations)


def swapped(schedule, device, one, other):
    """The table with two cells of a row exchanged."""
    row = list(schedule.rows[device])
    i, j = (row.index(parse_cell(text)) for text in (one, other))
    row[i], row[j] = row[j], row[i]
    return schedule.with_rows([row if d == device else r for d, r in enumerate(schedule.rows)])


def rules(schedule):
    with pytest.raises(jp.ScheduleError) as error:
        jp.check(schedule)
    return {violation.rule for violation in error.value.violations}, str(error.value)


def test_forwards_of_a_sequence_run_in_the_order_of_slices():
    schedule = build("gpipe", devices=1, microbatches=4, slices=2)
    found, text = rules(swapped(schedule, 0, "0F2", "0F3"))
    assert found == {"slice"}
    assert "0F3 comes before 0F2, which it needs, on device 0; swap them" in text
    assert "[0F1.1]" in text
    assert jp.check(replace(swapped(schedule, 0, "0F2", "0F3"), slices=1))
    # those of different sequences in any order
    assert jp.check(
        schedule.with_rows(
            [[parse_cell(t) for t in ["0F2", "0F0", "0F3", "0F1", "0B1", "0B3", "0B0", "0B2"]]]
        )
    )


def test_backwards_of_a_sequence_run_in_reverse_order():
    schedule = build("gpipe", devices=1, microbatches=4, slices=2)
    found, text = rules(swapped(schedule, 0, "0B1", "0B0"))
    assert found == {"reverse"}
    assert "0B0 comes before 0B1, which it needs" in text
    split = build("zb_h1", devices=1, microbatches=2, slices=2)
    assert rules(swapped(split, 0, "0I1", "0I0"))[0] == {"reverse", "order"}


def test_a_stage_keeps_a_sequence_on_one_device():
    rows = [["0F0", "1F1", "1B1", "0B0"], ["1F0", "0F1", "0B1", "1B0"]]
    cells = [[parse_cell(text) for text in row] for row in rows]
    whole = jp.Schedule.from_rows(cells)
    assert whole.placement.is_bidirectional
    found, text = rules(replace(whole, slices=2))
    assert {"slice", "reverse"} <= found
    assert "0F1 is on device 1, but 0F0, which it needs, is on device 0; put both on one" in text


def test_bad_numbers_of_slices():
    with pytest.raises(jp.ScheduleError, match="the nearest that works is microbatches=15"):
        build(slices=3)
    with pytest.raises(jp.ScheduleError, match="slices must be a whole number of at least 1"):
        build(slices=0)
    with pytest.raises(jp.ScheduleError, match="a stage is on two devices"):
        build("dualpipe")
    with pytest.raises(jp.ScheduleError, match="must be at least 1 and divide the 16 microbatches"):
        replace(build(slices=1), slices=3)
    with pytest.raises(jp.ScheduleError, match="search= knows no slices"):
        build("auto", search=1)
    with pytest.raises(jp.ScheduleError, match="less than the 4 that one sequence needs"):
        build("auto", max_activations=3)
    with pytest.raises(jp.CostError, match=r"slice_factors has 2 entries.* has 4 slices"):
        jp.simulate(build(), jp.Costs(slice_factors=(1, 2)))


def test_auto_keeps_its_cap():
    assert max(jp.simulate(build("auto", max_activations=7)).peak_activations) <= 7


def test_costs_of_slices():
    """Later slices attend to more rows: the factor of a slice is that of all its actions."""
    schedule = build("gpipe", devices=1, microbatches=4, slices=2)
    timeline = jp.simulate(schedule, jp.Costs(slice_factors=(1, 3)))
    assert timeline.makespan == 2 * (1 + 3) * 3
    assert (timeline.end["0F1"], timeline.start["0B1"], timeline.end["0B1"]) == (4, 8, 14)
    growing = jp.Costs(slice_factors=(0.7, 0.9, 1.1, 1.3))
    fitted = build("auto", costs=growing)
    assert jp.simulate(fitted, growing).makespan <= jp.simulate(build("zb_h1"), growing).makespan


def test_memory_of_appended_rows():
    """A buffer for each sequence in flight and stage, from its first forward to the end of its last
    backward, for any number of slices.
    """
    for slices in (1, 2, 4):
        schedule = build("1f1b", devices=2, microbatches=4 * slices, slices=slices)
        costs = jp.Costs(activation=0, buffer=(5, 7))
        assert jp.simulate(schedule, costs).peak_memory == (10, 14 if slices > 1 else 7)
    gpipe = build("gpipe", devices=2, microbatches=8, slices=4)
    assert jp.simulate(gpipe, jp.Costs(activation=0, buffer=5)).peak_memory == (10, 10)
    forwards = build("gpipe", devices=2, microbatches=8, slices=4, forward_only=True)
    assert jp.simulate(forwards, jp.Costs(activation=0, buffer=5)).peak_memory == (5, 5)


def test_text_and_pictures_show_sequence_and_slice():
    schedule = build("1f1b", devices=2, microbatches=4, slices=2)
    assert "0F1.1" in str(schedule)
    assert "1B0.1" in str(schedule)
    assert "0F3" in schedule.to_csv()
    assert "." not in schedule.to_csv()
    assert jp.Schedule.from_csv(schedule.to_csv(), slices=2) == schedule
    assert jp.Schedule.from_csv(schedule.to_csv()) != schedule
    assert jp.Schedule.from_json(schedule.to_json()) == schedule
    timeline = jp.simulate(schedule)
    svg, html, trace = to_svg(timeline), to_html(timeline), to_trace(timeline)
    assert all(text in svg for text in ("slice 1 of sequence 1", ">1.1<", "sequence.slice"))
    assert "2 slices a sequence" in html
    assert '"sequence":1,"slice":1' in trace


def test_sliced_takes_any_table_in_order():
    given = jp.schedules.build("looped_bfs", devices=2, microbatches=7, chunks=2)
    schedule = jp.check(sliced(given, 2))
    assert schedule.num_microbatches == 6
    assert Action(0, jp.Kind.B, 5) in schedule.rows[0]


@pytest.mark.parametrize("name", ["auto", "zbv", "interleaved_zb"])
def test_factors_of_slices_go_with_any_schedule_that_takes_costs(name):
    costs = jp.Costs(slice_factors=(0.8, 1.2))
    assert build(name, slices=2, costs=costs).slices == 2
    assert build(name, costs=jp.Costs(slice_factors=2)).slices == 4  # one for all of them
    for slices in (1, 4):
        with pytest.raises(jp.errors.CostError, match=f"2 entries, but the schedule has {slices}"):
            build(name, slices=slices, costs=costs)
