"""Plans choose the number of slices of a sequence."""

import json

import pytest

import jaxpipe as jp
from jaxpipe.cli.main import main
from jaxpipe.lowering.plan import plan_of
from jaxpipe.planner.layer_cost import Remat as Again, stage_costs
from jaxpipe.table.effects import LastUse, Liveness

LAYER = jp.LayerCost(
    forward=4.0,
    input_grad=4.0,
    weight_grad=4.0,
    attention=3.0,
    parameters=1e8,
    residuals=16e9,
    boundary=1e9,
    rows=2e9,
)
FEW = {"devices": 4, "microbatches": 4, "schedules": ("1f1b",), "remat": (None,), "chunks": (1,)}


def plans(slices, **more):
    given = {**FEW, "offload": (None,), **more}
    return jp.plan("tttt", {"t": LAYER}, slices=slices, **given)


def test_later_slices_take_longer_by_their_attention():
    assert LAYER.sliced(4) == jp.LayerCost(
        forward=1.0,
        input_grad=1.0,
        weight_grad=1.0,
        attention=0.75,
        parameters=1e8,
        residuals=4e9,
        boundary=0.25e9,
        rows=2e9,
    )
    layout = jp.parse_layout("t|t|t|t", devices=4)
    costs = stage_costs(layout, {"t": LAYER.sliced(4)}, remat=Again.NONE, transfer=0.0, slices=4)
    # three quarters of a forward are attention: an eighth of its average for the first slice
    assert costs.slice_factors == (0.4375, 0.8125, 1.1875, 1.5625)
    assert costs.buffer == (4e9,) * 4


def test_slices_are_chosen_where_they_are_faster():
    found = plans((1, 2, 4, 8))
    best = found.best
    # two slices differ so much in time that they gain nothing
    assert [plan.schedule.slices for plan in found] == [8, 4, 1, 2]
    assert "K 8" in best.label
    assert best.schedule.num_microbatches == 4 * 8
    # no overhead of programs is in the table's own makespan
    assert best.seconds >= jp.simulate(best.schedule, best.costs).makespan
    assert best.lower_bound <= best.seconds
    assert plans((1,)).best.schedule == jp.schedules.build("1f1b", devices=4, microbatches=4)


def test_slices_are_chosen_where_whole_sequences_do_not_fit():
    """1F1B of whole sequences holds four on the first device; slices hold (P + K - 1) / K, and
    buffers of the sequences in flight.
    """
    whole, sliced = plans((1,)).best, plans((8,)).best
    assert whole.parts.pools["residual_weight"] == 4 * 16e9
    assert sliced.parts.pools["residual_weight"] == 11 * 2e9
    rows = Liveness(buffer=LastUse.INPUT_GRAD, buffer_gradient=LastUse.INPUT_GRAD)
    slots = plan_of(sliced.schedule).program(rows).slots
    assert sliced.parts.pools["buffer"] == slots.buffer * 2e9 == 3 * 2e9
    assert sliced.parts.pools["buffer_gradient"] == 2e9
    limit = 0.6 * whole.memory[0]
    assert plans((1, 8), memory=limit).best.schedule.slices == 8
    with pytest.raises(jp.PlanError, match="nothing fits"):
        plans((1,), memory=limit)


@pytest.mark.parametrize("name", ["zbv", "v_half", "interleaved_zb"])
def test_tables_that_are_fitted_to_costs_take_slices(name):
    found = plans((4,), schedules=(name,), chunks=(2,), devices=2).best
    assert found.schedule.slices == 4
    assert len(found.costs.slice_factors) == 4


def test_bad_slices():
    for slices in ((), (0,), 4, (1.5,)):
        with pytest.raises(jp.PlanError, match="slices must be one or a few whole numbers"):
            plans(slices)
    # a stage of DualPipe is on two devices, and keeps a sequence on one
    with pytest.raises(jp.PlanError, match="no schedule"):
        plans((2,), schedules=("dualpipe",), chunks=(2,), devices=2)


def test_the_command_chooses_slices(capsys):
    sizes = {"layers": 8, "width": 1024, "vocab": 32_000, "context": 65_536}
    decoder = [word for name, size in sizes.items() for word in (f"--{name}", f"{size}")]
    few = ["--schedules", "1f1b", "-V", "1", "--remat", "none", "--no-offload"]
    slices = ["--slices", "1", "16"]
    assert main(["plan", *decoder, "-P", "4", "-M", "4", *few, *slices, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    assert found[0]["label"].startswith("1f1b, V 1, K 16")
    mesh = ["--model", "llama3-8b", "--gpus", "8", "--batch", "8", "--memory", "80GB"]
    assert main(["plan", *mesh, *slices]) == 2
    assert "leave out --slices" in capsys.readouterr().err
