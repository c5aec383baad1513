"""Every benchmark runs on a CPU at a size that takes no time, and writes its table."""

import shutil
from pathlib import Path

import pytest

from tests.environment import outside, python
from tests.gpu.programs import needs_gpu_compiler

ROOT = Path(__file__).parent.parent.parent


def table_of(tmp_path, module, *arguments):
    """The table that a benchmark writes, as text."""
    out = tmp_path / "table.txt"
    environment = outside(JAX_PLATFORMS="cpu")  # benchmarks choose their own devices and precision
    python(
        "-m", f"benchmarks.{module}", *arguments, "-o", out, timeout=500, env=environment, cwd=ROOT
    )
    return out.read_text()


def rows_of(text, name):
    return [line.split() for line in text.splitlines() if line.split()[:1] == [name]]


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="the host call of emulated devices needs a C++ compiler"
)
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_emulated_devices_are_never_faster_than_their_table(tmp_path, processes):
    arguments = [
        "--devices",
        "2",
        "--schedules",
        "1f1b:1",
        "zb_h1:1",
        "--microbatches",
        "4",
        "--processes",
        str(processes),
    ]
    text = table_of(tmp_path, "emulated", *arguments, "--repeats", "1", "--unit", "0.01")
    for name in ("1f1b", "zb_h1"):
        ((*_, least, _, _, _),) = rows_of(text, name)
        assert float(least) >= 1, "sleeps only end late, so a step below its makespan has lost one"


@pytest.mark.exhaustive
def test_step_time_compares_equal_work(tmp_path):
    """The benchmark itself stops where a contender's loss or gradient differs from plain
    accumulation's.
    """
    text = table_of(tmp_path, "step_time", "--tiny", "--microbatches", "4", "--repeats", "1")
    for name in ("plain", "jaxpipe", "scan", "circular,"):
        assert rows_of(text, name), f"no line for {name}"


@pytest.mark.exhaustive
def test_one_device(tmp_path):
    text = table_of(
        tmp_path, "gpu_single", "--size", "tiny", "--chunks", "1", "2", "--repeats", "1"
    )
    predicated = [
        line for line in text.splitlines() if line.strip().startswith("1f1b, V = 1, predicated")
    ]
    # 4 microbatches, an F and a B each; the program without predicates asks nothing.
    assert [line.split()[-2] for line in predicated] == ["8", "8"]
    assert len(rows_of(text, "interleaved_1f1b,")) == 1


def test_program_makespan(tmp_path):
    text = table_of(
        tmp_path, "program_makespan", "--devices", "4", "--microbatches", "8", "--costs", "2,1,1"
    )
    ((*_, unit, measured, blocks),) = rows_of(text, "1f1b")
    assert (unit, measured, blocks) == ("1.000", "1.000", "4")


@pytest.mark.slow
def test_moe(tmp_path):
    """A prediction is never faster than the share of the peak, and hidden sends make it faster."""
    none, all_ = (
        rows_of(table_of(tmp_path, "moe", "--cases", "67b", "--hidden", share), "67B-A2B")[0]
        for share in ("0", "1")
    )
    assert float(all_[5]) < float(none[5]) == float(none[6])
    assert 0 < float(none[9].rstrip("%")) < float(all_[9].rstrip("%")) < 50


@pytest.mark.slow
def test_at_scale(tmp_path):
    """The bubble rates of the zero-bubble paper and the formulas of DeepSeek-V3 come out of the
    tables.
    """
    text = table_of(
        tmp_path,
        "at_scale",
        "--runs",
        "gpt3-12",
        "--size",
        "4,16",
        "--tables",
        "interleaved_1f1b:4",
    )
    published = [line.split() for line in text.splitlines() if line.split()[:1] == ["ZB"]]
    assert len(published) == 9
    assert all(abs(float(difference)) < 1e-4 for *_, difference in published)
    ((_, _, _, simulated, formula, *_),) = rows_of(text, "dualpipe")
    assert simulated == formula == "14"


@pytest.mark.slow
def test_gathers(tmp_path):
    """Where two of four stages are whole, a device holds much less, and a step is no slower."""
    text = table_of(tmp_path, "gathers", "--cases", "405b")
    rows = [line.split() for line in text.splitlines() if "405B" in line and "interleaved" in line]
    # max_active, gathers, Adam, parts, whole, other, GiB, seconds, vs once
    sizes = {row[-9]: (float(row[-5]), float(row[-1])) for row in rows}
    assert sizes["1"][0] < sizes["2"][0] < sizes["3"][0] < sizes["once"][0]
    assert sizes["2"][1] <= 1 < sizes["1"][1]


@pytest.mark.exhaustive
def test_stage_costs(tmp_path):
    assert rows_of(table_of(tmp_path, "stage_costs", "--tiny", "--repeats", "2"), "W")


def test_flatness(tmp_path):
    text = table_of(tmp_path, "flatness", "--schedules", "zb_h1", "--devices", "4", "--compile")
    ((_, _, _, few, many, worst, sent, *_),) = rows_of(text, "zb_h1")
    assert [cell.split("+")[0] for cell in (few, many)] == ["3", "3"]
    assert float(worst) <= 1.2
    assert float(sent) <= 2  # its ticks share code, and so the transfers of both directions


@pytest.mark.slow
@needs_gpu_compiler
def test_many_gpus(tmp_path):
    text = table_of(tmp_path, "many_gpus", "--cases", "1f1b:1:2:2:2:4")
    ((_, chunks, _, gpus, *_),) = rows_of(text, "1f1b")
    assert (chunks, gpus) == ("1", "8")


@pytest.mark.slow
@needs_gpu_compiler
def test_gpu_programs(tmp_path):
    text = table_of(
        tmp_path,
        "gpu_programs",
        "--schedules",
        "1f1b",
        "--grid",
        "--devices",
        "2",
        "--microbatches",
        "8",
    )
    ((_, axes, remat, predicates, on_host, *_),) = rows_of(text, "1f1b")
    assert (axes, remat) == ("pipe", "-")
    assert 0 <= int(on_host) <= int(predicates)


@pytest.mark.exhaustive
def test_a_checkout_against_itself(tmp_path):
    text = table_of(
        tmp_path, "two_checkouts", str(ROOT), "--tiny", "--microbatches", "4", "--repeats", "1"
    )
    for name in ("plain", "jaxpipe"):
        assert rows_of(text, name), f"no line for {name}"


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="the host call of emulated devices needs a C++ compiler"
)
@pytest.mark.exhaustive
def test_a_head_on_emulated_devices(tmp_path):
    arguments = [
        "--schedules",
        "zb_h1",
        "--devices",
        "2",
        "--microbatches",
        "4",
        "--unit",
        "0.01",
        "--repeats",
        "1",
    ]
    found = rows_of(table_of(tmp_path, "emulated_head", *arguments), "zb_h1")
    assert len(found) == 3, "without a head, on the last device, spread"
    for *_, ratio, _, _ in found:
        assert float(ratio) >= 1, "sleeps only end late, so a step below its makespan has lost one"


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="the host call of emulated devices needs a C++ compiler"
)
@pytest.mark.exhaustive
def test_plans_on_emulated_devices_are_never_faster_than_predicted(tmp_path):
    """With spread ends, a policy, residuals on the host, and B among I and W; the benchmark itself
    stops where a hold is lost.
    """
    arguments = ["--layers", "4", "--devices", "2", "--microbatches", "4", "--repeats", "1"]
    text = table_of(tmp_path, "plans_time", *arguments)
    rows = [line.split() for line in text.splitlines() if "Et|" in line or "Ett|" in line]
    kinds = ("spread", "nothing_saveable,", "offload,", "B,")
    assert all(any(row[0] == kind for row in rows) for kind in kinds)
    assert all(float(row[-2]) <= 1 for row in rows)
