"""`jaxpipe plan --model`: the names, sizes and arguments are those of examples/llama.py."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import jax
import pytest

import jaxpipe as jp
from jaxpipe.cli.main import main
from jaxpipe.lowering.rooms import rooms_of
from jaxpipe.planner.published import command_of, decoders, plan_mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import llama
from llama_parts.sizes import PUBLISHED


def test_sizes_are_published_once():
    assert [*decoders()] == [name for name in PUBLISHED if name != "tiny"]


def test_the_command_line_runs_the_best_plan(capsys):
    """Every flag is one of the example, and its table and layout are those of the plan."""
    given = ["--gpus", "8", "--batch", "16", "--context", "2048", "--memory", "40GB", "--json"]
    assert main(["plan", "--model", "llama3.2-1b", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    program, script, *flags = shlex.split(found["command"])
    assert (program, script) == ("python", "examples/llama.py")
    args, best = llama.parser().parse_args(flags), found["plans"][0]
    assert args.pipe * args.data * args.tensor == 8
    assert {axis: getattr(args, axis) for axis in ("pipe", "data", "tensor")} == {
        axis: best["mesh"][axis] for axis in ("pipe", "data", "tensor")
    }
    assert args.rows == 16
    assert args.microbatches * best["mesh"]["rows"] * args.data == 16
    assert args.spread_head == bool(best["spread"])
    table = jp.schedules.build(
        args.schedule, devices=args.pipe, microbatches=args.microbatches, chunks=args.chunks
    )
    assert list(table.stage_to_device) == best["placement"]
    layout = jp.parse_layout(args.layout, devices=args.pipe)
    assert layout.layers == "E" + "t" * 16 + "L"
    assert layout.num_stages == table.num_stages
    seconds = [plan["seconds"] for plan in found["plans"]]
    assert seconds == sorted(seconds)
    assert all(max(plan["memory"]) <= 40e9 for plan in found["plans"])


def test_the_command_line_gathers_stages_as_the_plan_does():
    """The example's pipeline has as many rooms."""
    given = {"gpus": 4, "batch": 16, "context": 2048, "memory": 80e9, "tensor": (1,)}
    plans = plan_mesh("llama3.2-1b", **given, schedules=("interleaved_1f1b",), chunks=(2,), most=40)
    best = next(p for p in plans if p.max_active and p.mesh["pipe"] == 2)
    command = command_of("llama3.2-1b", best, batch=16, context=2048)
    args = llama.parser().parse_args(shlex.split(command)[2:])
    assert (args.fsdp, args.max_active) == (True, 1)
    mesh = jax.make_mesh((2, 2), ("pipe", "data"), devices=jax.devices()[:4])
    _, pipe = llama.build(args, mesh)
    assert rooms_of(pipe.schedule).count == 1
    plain = next(p for p in plans if p.fsdp and not p.max_active)
    assert "--max-active" not in command_of("llama3.2-1b", plain, batch=16, context=2048)


SMALL = ["--gpus", "8", "--batch", "16", "--context", "2048", "--memory", "40GB"]


def test_choices_are_those_of_the_command_line(tmp_path, capsys):
    """And every other choice and mesh has one reason."""
    drawn = tmp_path / "plan.svg"
    flags = ["--schedules", "1f1b", "zb_h1", "-V", "1", "--remat", "full", "--tensor", "2"]
    model = ["plan", "--model", "llama3.2-1b", *SMALL, "--json"]
    assert main([*model, *flags, "-o", str(drawn)]) == 0
    assert "<svg" in drawn.read_text()
    found = json.loads(capsys.readouterr().out)
    assert {(p["schedule"], p["chunks"], p["remat"]) for p in found["plans"]} <= {
        ("1f1b", 1, "full"),
        ("zb_h1", 1, "full"),
    }
    assert {p["mesh"]["tensor"] for p in found["plans"]} == {2}
    reasons = {r["plan"]: r["why"] for r in found["rejected"]}
    assert len(reasons) == len(found["rejected"])
    assert any("meshes take less" in why for why in reasons.values())
    assert {f"pipe {p} x data {4 // p} x tensor 2" for p in (1, 2, 4)} <= {
        mesh.split(" fsdp")[0].split(",")[0]
        for mesh in (*reasons, *(p["label"] for p in found["plans"]))
    }
    assert main([*model, "--layers", "3", "--gated", "--search", "2"]) == 2
    assert "leave out --search, --layers, --gated" in capsys.readouterr().err
    assert main([*model, "--schedules", "auto", "--remat", "stages"]) == 2
    assert "'auto' and 'stages' cannot be chosen with the mesh" in capsys.readouterr().err


def test_fp8_is_a_flag_of_both(capsys):
    """Products are faster, and the command runs in FP8."""
    found = []
    for flags in ([], ["--fp8"]):
        own = ["--schedules", "1f1b", "-V", "1", "--tensor", "1", "--json", *flags]
        assert main(["plan", "--model", "llama3.2-1b", *SMALL, *own]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, fp8 = found
    assert 0.5 < fp8["plans"][0]["seconds"] / plain["plans"][0]["seconds"] < 0.9
    assert llama.parser().parse_args(shlex.split(fp8["command"])[2:]).fp8
    assert "--fp8" not in plain["command"]


def test_what_no_mesh_has_room_for_is_named():
    given = {"gpus": 8, "batch": 16, "context": 2048}
    with pytest.raises(jp.PlanError, match=r"nothing fits into 18\.6 GiB .* more; what would help"):
        plan_mesh("llama3.1-405b", **given, memory=20e9)
    with pytest.raises(jp.PlanError, match="there is no model 'llama4'"):
        plan_mesh("llama4", **given, memory=20e9)
    with pytest.raises(jp.PlanError, match="no mesh of 7 devices"):
        plan_mesh("llama3-8b", gpus=7, batch=3, context=2048, memory=80e9, tensor=(2,))
