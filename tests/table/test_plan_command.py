"""`jaxpipe plan`: a table, JSON, a picture, and errors that say what is missing."""

from __future__ import annotations

import json
import shlex

import pytest

import jaxpipe as jp
from jaxpipe.cli.main import main
from tests.table.test_plan import COSTS, MODEL, SHAPE


def test_progress_is_told_of_choices_and_of_programs():
    told = []
    jp.plan(MODEL, COSTS, **SHAPE, progress=lambda done, of: told.append((done, of)))
    assert told[: told[0][1]] == [(i + 1, told[0][1]) for i in range(told[0][1])]
    assert told[told[0][1]][0] == 1


def test_the_command_prints_a_table_json_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "plan.svg"
    sizes = [
        "--layers",
        "6",
        "--width",
        "1024",
        "--vocab",
        "32000",
        "-P",
        "2",
        "-M",
        "4",
        "--schedules",
        "1f1b",
        "zb_h1",
        "-V",
        "1",
    ]
    assert main(["plan", *sizes, "--memory", "80GB", "-o", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan")
    assert "best:" in out
    assert "bound" in out.splitlines()[0].split()
    assert "estimates" in out
    assert "<svg" in picture.read_text()
    costs = {
        name: {"forward": c.forward, "input_grad": c.input_grad, "weight_grad": c.weight_grad}
        for name, c in COSTS.items()
    }
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"layers": MODEL, "costs": costs, "transfer": 0.001}))
    assert (
        main(
            [
                "plan",
                "--costs",
                str(file),
                "-P",
                "2",
                "-M",
                "4",
                "--schedules",
                "1f1b",
                "-V",
                "1",
                "--remat",
                "none",
                "--json",
            ]
        )
        == 0
    )
    facts = json.loads(capsys.readouterr().out)
    (best,) = facts["plans"]
    assert best["schedule"] == "1f1b"
    assert best["seconds"] > best["lower_bound"] > 0
    assert best["gap"] == pytest.approx(best["seconds"] / best["lower_bound"] - 1)
    assert best["certificate"].endswith("relaxations, for any schedule)")


def test_sizes_of_experts_and_tied_tables_are_planned(capsys):
    """A tied table is held once, and its two ends are spread together."""
    sizes = shlex.split("--layers 8 --width 1024 --ffn 256 --vocab 64000 -P 4 -M 8 -V 1")
    experts = shlex.split("--experts 16 --chosen 2 --shared 256 --capacity 1.25")
    kinds = shlex.split("--expert-devices 4 --normed --post-norms --schedules 1f1b --json")
    kinds += ["--remat", "none"]
    held = {}
    for tied in ([], ["--tied"]):
        assert main(["plan", *sizes, *experts, *kinds, *tied]) == 0
        plans = json.loads(capsys.readouterr().out)["plans"]
        held[len(tied)] = {p["spread"]: p["memory_parts"]["parameters"] for p in plans}
    assert held[0].keys() == {"", "L"}
    assert held[1].keys() == {"", "EL"}
    table = 2 * 64000 * 1024
    assert held[0][""] - held[1][""] == table
    layer = 1024 * (4 * 1024 + 3 * 256 * 16 / 4 + 3 * 256 + 16)
    assert held[1]["EL"] == pytest.approx(2 * 2 * layer + table / 4)
    faults = ["--experts", "-1", "--capacity", "-1"]
    assert main(["plan", *sizes, *faults]) == 2
    assert "experts must be a number of at least 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "6"], "give --width and --vocab"),
        (["--costs", "{file}"], "forward is missing"),
        (["--costs", "{deep}"], "the JSON is nested too deeply"),
    ],
)
def test_the_command_says_what_is_missing(tmp_path, capsys, arguments, message):
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"layers": "t*4", "costs": {"t": {}}}))
    given = [a.format(file=file, deep=deep) for a in arguments]
    assert main(["plan", *given, "-P", "2", "-M", "4"]) == 2
    assert message in capsys.readouterr().err
