"""Stages that are gathered in turn beside what else a model and a mesh have: the numbers of plain
JAX and of torch_ref.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from jaxpipe.lowering.rooms import rooms_of
from tests.axes import test_local
from tests.axes.model import (
    batch,
    canonical,
    mesh as mesh_of_8,
    truth as truth_of,
    worst_error as worst,
)
from tests.axes.test_gathers import MODEL, SHARDED, M, check, gathered, in_tiers, mesh, table
from tests.axes.test_own_paths import (
    ENDS,
    ONE,
    SPREAD,
    batch as tokens,
    embed,
    head,
    shared_layer,
    stack,
)
from tests.checkpoint import runs
from tests.checkpoint.placements import uneven
from tests.models import twin
from tests.oracle import oracle_value_and_grad
from tests.parity.engines import (
    case_data,
    jaxpipe_step,
    mesh_of,
    pipeline,
    torch_step,
    truth,
    worst_error,
)
from tests.slices import test_parity
from tests.tiers import slow
from tests.tolerance import FLOAT64, step_error
from tests.unlike.test_unlike import draw

TABLES = [slow("auto", 2, 1), *in_tiers("looped_bfs")]


@pytest.mark.parametrize(("name", "chunks", "most"), TABLES)
def test_four_devices_times_two_shards(name: str, chunks: int, most: int) -> None:
    schedule = table(name, chunks, most, devices=4)
    check(jp.Pipeline(MODEL, schedule, mesh_of(4, data=2), sharding=SHARDED))


@pytest.mark.parametrize(
    ("name", "outer"), [("interleaved_1f1b", False), slow("zbv", False), slow("looped_bfs", True)]
)
def test_spread_ends_and_shared_parameters(name: str, outer: bool) -> None:
    plain = jp.schedules.build(name, devices=2, microbatches=M, chunks=2)
    model = jp.Model(shared_layer, **SPREAD)
    shared = draw({"gain": (4,)}, 3)
    params = {"stages": draw(stack(ONE, 4), 1), "shared": shared, **ENDS}
    sharding = jp.Sharding(data="data", fsdp="data", outer=outer)
    schedule = gathered(jp.spread_last(jp.spread_first(plain)), 1)
    pipe = jp.Pipeline(model, schedule, mesh_of(2, data=2), sharding=sharding)
    own = jp.Pipeline(model, plain, mesh_of(2, data=2), sharding=replace(sharding, max_active=1))
    assert rooms_of(own.schedule).count == 1
    wanted = oracle_value_and_grad(
        params, tokens(), first=embed, stage=shared_layer, last=head, microbatches=1
    )
    assert step_error(pipe, params, tokens(), wanted) <= FLOAT64
    found = pipe.evaluate(pipe.place(params), tokens())
    assert abs(found - wanted[0]) <= FLOAT64 * abs(wanted[0])


def test_ends_are_spread_before_stages_are_gathered() -> None:
    model = jp.Model(shared_layer, **SPREAD)
    with pytest.raises(
        jp.PipelineError,
        match="`last` cannot be spread with schedule 'interleaved_1f1b': the table has U, D or X; "
        "spread `last` without them, then put them in",
    ):
        jp.Pipeline(model, table("interleaved_1f1b", 2, 1), mesh(), sharding=SHARDED)


@pytest.mark.slow
def test_slices_of_sequences_that_pass_a_carry() -> None:
    plain = test_parity.build("interleaved_1f1b", devices=2, slices=2, chunks=2)
    model, params, rows = test_parity.data("recurrent", 4, 2)
    pipe = jp.Pipeline(model, gathered(plain, 1), mesh(), sharding=SHARDED)
    assert step_error(pipe, params, rows, test_parity.truth("recurrent", 4, 2)) <= FLOAT64


@pytest.mark.slow
def test_devices_with_one_and_with_two_stages() -> None:
    plain = uneven()
    pipe = jp.Pipeline(MODEL, gathered(plain, 1), mesh_of(3, data=2), sharding=SHARDED)
    count = plain.num_microbatches
    assert step_error(pipe, canonical(4), batch(count), truth_of(4, count)) <= FLOAT64


@pytest.mark.parametrize("fsdp", ["expert", slow("data")])
def test_experts_of_a_data_axis(fsdp: str) -> None:
    """Experts are split over one data axis, and the others over it or over another one."""
    layers = "t|t|t|tL"
    pipe = jp.Pipeline(
        test_local.model("expert", layers),
        table("interleaved_1f1b", 2, 1),
        mesh_of_8("pipe", "data", "expert"),
        layout=layers,
        sharding=jp.Sharding(
            data=("data", "expert"), local="expert", specs=test_local.SPECS, fsdp=fsdp
        ),
    )
    test_local.compared(pipe, layers, test_local.batch(4 * M))


@pytest.mark.slow
def test_a_checkpoint_is_read_under_another_max_active(tmp_path: Any) -> None:
    """Of other chunks too: two steps under one table, the third under another one."""

    def pipe_of(chunks: int, most: int) -> jp.Pipeline:
        plain = jp.schedules.build(
            "interleaved_1f1b", devices=2, microbatches=runs.MICROBATCHES, chunks=chunks
        )
        return runs.pipeline(
            "", 2, schedule=gathered(plain, most), mesh=mesh_of(2, data=2), **sharding
        )

    sharding = {"data_axes": ("data",), "fsdp": "data"}
    tx, plain = runs.optimizer(), runs.start(None, runs.optimizer())
    _, wanted = runs.run(runs.stepper(None, tx), plain, range(3))
    pipe = pipe_of(4, 3)
    state, losses = runs.run(runs.stepper(pipe, tx), runs.start(pipe, tx), range(2))
    with Checkpoints(tmp_path, pipe, layer_axis=True) as checkpoints:
        checkpoints.save(2, state)
    for chunks, most in ((4, 1), (2, 1)):
        pipe = pipe_of(chunks, most)
        with Checkpoints(tmp_path, pipe, layer_axis=True) as checkpoints:
            _, state = checkpoints.restore(runs.start(pipe, tx))
        _, more = runs.run(runs.stepper(pipe, tx), state, range(2, 3))
        # a step goes on from the rounding of the one before
        assert worst(np.array(losses + more), np.array(wanted)) <= 3 * FLOAT64


@pytest.mark.parametrize(
    ("name", "chunks", "most"), [("interleaved_1f1b", 2, 1), slow("interleaved_zb", 3, 2)]
)
def test_torch_runs_the_same_table(name: str, chunks: int, most: int) -> None:
    """Its text has UNSHARD, RESHARD and REDUCE_GRAD."""
    schedule = table(name, chunks, most)
    model = twin("mlp", schedule.num_stages, width=4, features_in=4, features_out=2)
    weights, rows = case_data(model, M, 2)
    pipe = pipeline(schedule, model, mesh=mesh_of(2, data=2), data_axes=("data",), fsdp="data")
    assert pipe.schedule == schedule, "the table that is run gathers"
    assert {"0UNSHARD", "0RESHARD", "0REDUCE_GRAD"} <= {*pipe.schedule.to_csv().split(",")}
    torchs = torch_step(pipe.schedule, model, weights, rows)
    assert worst_error(jaxpipe_step(pipe, weights, rows), torchs) <= FLOAT64
    assert worst_error(torchs, truth(model, M, 2)) <= FLOAT64
