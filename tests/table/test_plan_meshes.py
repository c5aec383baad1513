"""Plans for meshes and their links: programs, predicates of the host, axes, transfers."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.cli.main import main
from jaxpipe.lowering.plan import cost_parts, plan_of, program_makespan
from jaxpipe.lowering.target import NO_OVERHEADS, ON_HOST, RunsOn
from jaxpipe.planner.transformer import Transformer
from jaxpipe.program.segments import Payload, Permute, Segment, TickTemplate
from jaxpipe.transforms.spread import spread_last


def test_programs_are_those_of_the_mesh():
    """By hand: 2 devices, 1F1B in lock-step where everybody waits for every transfer, else as the
    table has it.
    """
    layer = jp.LayerCost(forward=1, input_grad=1, weight_grad=1)
    given = {
        "devices": 2,
        "microbatches": 4,
        "schedules": ("1f1b",),
        "chunks": (1,),
        "remat": (None,),
    }
    found = {where: jp.plan("tt", {"t": layer}, **given, mesh=where).best for where in RunsOn}
    # (M + P - 1) (F + B) with unit F, and B = 2.
    table = found[RunsOn.CPU_PROCESSES].timeline.makespan
    assert table == 15
    # Predicates take some microseconds each.
    assert table < found[RunsOn.GPUS].seconds < table + 1e-3
    assert found[RunsOn.CPU_PROCESSES].seconds == table
    virtual = SimpleNamespace(
        devices=np.array([SimpleNamespace(platform="cpu", process_index=0)] * 2)
    )
    assert RunsOn.of(virtual) is RunsOn.ONE_CPU_PROCESS


def test_a_program_is_chosen_for_the_transfers_of_its_costs():
    """Where each takes a tenth of a forward, ramps are cut so that fewer of them are made."""
    costs = jp.Costs(forward=0.02, input_grad=0.022, weight_grad=0.018, transfer=0, last=0.007)
    table = spread_last(jp.schedules.build("zbv", devices=4, microbatches=8))
    slow = replace(costs, transfer=0.002)
    blind, found = (plan_of(table, costs=each) for each in (costs, slow))
    assert blind.makespan_of(costs) < found.makespan_of(slow)
    assert found.makespan_of(slow) < 0.95 * blind.makespan_of(slow)


LLAMA3_8B = shlex.split(
    "--layers 32 --width 4096 --ffn 14336 --gated --kv-share 0.25 --vocab 128256 --context 8192 "
    "--devices 8 -M 32 --memory 80GB"
)


@pytest.mark.slow
def test_all_choices_of_an_8b_model_are_planned(capsys):
    """A step without any bubble takes 4.22 s, 1F1B without spread ends 6.9 s."""
    assert main(["plan", *LLAMA3_8B, "--json"]) == 0
    out, err = capsys.readouterr()
    best, *_ = json.loads(out)["plans"]
    assert best["lower_bound"] < best["seconds"] <= 4.59
    assert max(best["memory"]) <= 80e9
    assert err.count("\n") <= 1, "one line where there is no terminal"


def test_neighbours_of_one_host_have_its_links(capsys):
    model = Transformer(width=1024, vocab=32000, tensor=2)
    assert model.on(4).transfer < model.transfer
    assert model.on(4).bandwidth == model.tensor_bandwidth
    assert model.on(8) == model
    sizes = ["--layers", "6", "--width", "4096", "--vocab", "32000", "-M", "16", "--json"]
    sizes += ["--schedules", "1f1b", "-V", "1", "--remat", "none"]

    def seconds(*flags):
        assert main(["plan", *sizes, *flags]) == 0
        return json.loads(capsys.readouterr().out)["plans"][0]["seconds"]

    within = seconds("-P", "4")
    assert within == seconds("-P", "4", "--bandwidth", "3e11")
    assert within < seconds("-P", "4", "--bandwidth", "5e10")


def mesh_of(**sizes):
    """What `plan` reads of a mesh of GPUs."""
    gpu = SimpleNamespace(platform="gpu", process_index=0, device_kind="a GPU")
    return SimpleNamespace(devices=np.full(tuple(sizes.values()), gpu), shape=sizes)


def test_blocks_that_communicate_have_predicates_of_the_host():
    """The program, and its seconds, are those of `Pipeline` on such a mesh, whose host waits for
    each predicate.
    """
    layer = jp.LayerCost(forward=1e-3, input_grad=1e-3, weight_grad=1e-3)
    given = {
        "devices": 2,
        "microbatches": 4,
        "schedules": ("1f1b",),
        "chunks": (1,),
        "remat": (None,),
    }

    def found(mesh, **axes):
        return jp.plan("tt", {"t": layer}, **given, mesh=mesh, **axes).best

    alone, data = found(mesh_of(pipe=2)), found(mesh_of(pipe=2, data=4), data_axes="data")
    assert alone.seconds == data.seconds == found(None).seconds
    assert data.data_axes == ("data",)
    tensor = found(mesh_of(stages=2, tensor=2), axis="stages")
    assert tensor.axis == "stages"
    host = replace(ON_HOST, hop=0.0)
    program = plan_of(tensor.schedule, costs=tensor.costs, overheads=ON_HOST)
    durations = cost_parts(program.ticks, tensor.costs)
    assert tensor.seconds == program_makespan(durations, program.segments, host)
    assert tensor.seconds > alone.seconds + host.predicate


@pytest.mark.parametrize(
    ("mesh", "axes", "says"),
    [
        (
            mesh_of(stages=2),
            {},
            "the mesh has no axis 'pipe'; its axes are {'stages': 2}: write axis=",
        ),
        (mesh_of(pipe=4), {}, "devices is 2, but mesh axis 'pipe' has 4"),
        (mesh_of(pipe=2), {"data_axes": ("rows",)}, "the mesh has no data axis 'rows'"),
        (2, {}, "mesh must be a jax.sharding.Mesh"),
    ],
)
def test_a_mesh_that_the_plan_cannot_run_on_is_named(mesh, axes, says):
    layer = jp.LayerCost(forward=1e-3, input_grad=1e-3, weight_grad=1e-3)
    with pytest.raises(jp.PlanError, match=re.escape(says)):
        jp.plan("tt", {"t": layer}, devices=2, microbatches=4, mesh=mesh, **axes)


def test_whoever_comes_to_a_transfer_waits():
    """Two ticks of three devices: 0 and 1 exchange after the first; 2 is slow."""
    costs = np.array([[[1.0, 2.0, 3.0]], [[5.0, 1.0, 1.0]]])
    exchange = (Permute(Payload.ACTIVATION, ((0, 1),)),)
    ticks = tuple(TickTemplate((), those) for those in (exchange, ()))
    segments = (Segment(0, 1, ticks),)
    hop = replace(NO_OVERHEADS, hop=0.25)
    assert program_makespan(costs, segments, hop, RunsOn.CPU_PROCESSES) == 2 + 0.25 + 5
    assert program_makespan(costs, segments, hop, RunsOn.ONE_CPU_PROCESS) == 3 + 0.25 + 5
