"""`jaxpipe doctor`: every line can fail, and a hang is ended and named."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.cli import checks
from jaxpipe.cli.checks import CHECKS, Check, Findings, Line, Scope, Verdict, run_one
from jaxpipe.cli.main import main
from jaxpipe.doctor import machine, steps
from jaxpipe.known_faults import FaultEffect, read_faults
from jaxpipe.lowering.target import RunsOn, Target

HERE = "tests.doctor.broken:"
GPUS, CPUS = Target(RunsOn.GPUS), Target(RunsOn.ONE_CPU_PROCESS)
SCOPE = Scope(devices=2, steps=4, repeats=1)


@pytest.fixture
def mesh():
    return jax.sharding.Mesh(jax.devices()[:2], ("pipe",))


# Processes


def test_a_check_runs_in_a_process_of_its_own():
    found = run_one(Check("a title", f"{HERE}good"), SCOPE, 120)
    assert found.lines == (Line("good", Verdict.OK, "2 devices, 4 steps"),)
    assert (dict(found.prices), found.kind) == ({"hop": 2e-5, "sent": 0.0}, "cpu")


def test_a_hang_is_ended_and_named():
    begin = time.monotonic()
    (line,) = run_one(Check("hops", f"{HERE}hangs", advice="look at link 0"), SCOPE, 15).lines
    assert time.monotonic() - begin < 60
    assert line.verdict is Verdict.WRONG
    assert line.measured == "no end after 15 s, at the permute 0 -> 1: the process was ended"
    assert line.advice == "look at link 0"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "status 1 at the third step: RuntimeError: the device is gone"),
        ("dies", "status 7 at dies: no message"),
    ],
)
def test_a_crash_is_named(name, says):
    (line,) = run_one(Check("a title", f"{HERE}{name}"), SCOPE, 120).lines
    assert line.verdict is Verdict.WRONG
    assert says in line.measured


@pytest.mark.parametrize("found", [Verdict.OK, Verdict.WRONG])
def test_on_one_gpu_two_processes_try_what_needs_two(found, monkeypatch):
    """The times of processes that share a GPU are no prices."""
    ran = []

    def one(check, scope, limit, environment):
        ran.append((check.item, scope.processes, environment.get("NCCL_HOSTID")))
        verdict = found if scope.process else Verdict.OK
        prices = {"hop": 1.0} if scope.processes == 2 else {}
        line = Line(f"{check.item} {scope.process}", verdict)
        return Findings((line,), prices, "NVIDIA H100", is_one_gpu=scope.processes == 1)

    monkeypatch.setattr(checks, "_run", one)
    (hops,) = (check for check in CHECKS if check.item == "hops")
    result = run_one(hops, SCOPE, 60)
    title = "hops, two processes on one GPU"
    pair = [(title, 2, "process-0"), (title, 2, "process-1")]
    assert (ran[0], sorted(ran[1:])) == (("hops", 1, None), pair)
    bad = found is Verdict.WRONG
    assert result.lines == (Line(f"{title} {int(bad)}", found),)
    assert (dict(result.prices), result.kind) == ({}, "NVIDIA H100")


def test_what_no_time_is_left_for_is_not_tried(monkeypatch):
    monkeypatch.setattr(checks, "run_one", lambda *_: pytest.fail("there is no time"))
    report = checks.run(SCOPE, minutes=0, checks=CHECKS)
    assert {line.verdict for line in report.lines} == {Verdict.NOT_TRIED}
    assert len(report.lines) == len(CHECKS)


# Versions


def test_the_installed_versions_are_good():
    line = machine.judge_versions(machine.installed(), "cpu")
    assert line.verdict is Verdict.OK, line
    assert f"jaxlib {jax.lib.__version__}" in line.measured


def test_a_version_that_was_not_run_yet_is_not_tried():
    """It may well be right: the numbers say so."""
    for found in ({"jax": "99.0", "jaxlib": "0.12.0.1"}, {"jax": "0.12.0.1", "jaxlib": "99.0"}):
        line = machine.judge_versions(found, "cpu")
        assert line.verdict is Verdict.NOT_TRIED
        assert "99.0 was never run with jaxpipe: see the numbers below, or install" in line.advice


def test_a_plugin_of_another_jaxlib_is_wrong():
    found = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "plugin": "0.11.2"}
    line = machine.judge_versions(found, "gpu")
    assert (line.verdict, "install both" in line.advice) == (Verdict.WRONG, True)
    line = machine.judge_versions(found | {"jaxlib": "99.0"}, "gpu")
    assert line.verdict is Verdict.WRONG
    assert "never run" in line.advice


def test_each_known_fault_has_a_line():
    for fault in read_faults():
        line = machine.line_of(fault)
        assert (fault.thread or "reproducer") in line.measured
        assert (line.verdict is Verdict.OK) == (fault.effect is FaultEffect.AVOIDED)


# Options


def test_refused_and_ineffective_options_are_named():
    assert machine.judge_accepted({"a": "1"}, {}).verdict is Verdict.OK
    line = machine.judge_accepted({"a": "1", "b": "2"}, {"b": "no such option"})
    assert line.verdict is Verdict.WRONG
    assert "1 of 2; b: no such option" in line.measured
    assert machine.judge_effective([True, True]).verdict is Verdict.OK
    assert machine.judge_effective([True, False]).verdict is Verdict.SLOW
    assert machine.judge_effective([]).verdict is Verdict.SLOW


def test_an_option_that_does_not_exist_is_refused():
    assert "xla_gpu_no_such_thing" in machine.refusal({"xla_gpu_no_such_thing": True})
    assert machine.refusal({}) == ""


# Numbers


def small(mesh):
    """A case's step with what it should return."""
    made = {}

    def keep(item, step, params, batches, expected, count, close):
        made.update(step=step, params=params, batches=batches, expected=expected)
        return Line(item, Verdict.OK)

    return made, keep


@pytest.fixture(scope="module")
def case():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("pipe",))
    made, keep = small(mesh)
    judge, steps.judge = steps.judge, keep
    try:
        steps.numbers(SCOPE, mesh, "zb_h1")
    finally:
        steps.judge = judge
    return made


def test_good_numbers_are_good(case):
    line = steps.judge("zb", **case, count=4)
    assert line.verdict is Verdict.OK, line
    assert "equal bits in 4 runs" in line.measured


def test_a_wrong_gradient_is_wrong(case):
    def step(params, batch):
        loss, grads = case["step"](params, batch)
        return loss, grads | {"first": jax.tree.map(lambda g: 1.01 * g, grads["first"])}

    line = steps.judge("zb", **case | {"step": step}, count=4)
    assert (line.verdict, line.advice[:12]) == (Verdict.WRONG, "do not train")


def test_a_nan_is_wrong(case):
    line = steps.judge("zb", **case | {"step": lambda *a: (jnp.nan, case["step"](*a)[1])}, count=4)
    assert line.verdict is Verdict.WRONG


def test_a_late_bit_is_wrong(case):
    calls = []

    def step(params, batch):
        calls.append(batch)
        loss, grads = case["step"](params, batch)
        return (jnp.nextafter(loss, jnp.inf) if len(calls) == 5 else loss), grads

    line = steps.judge("zb", **case | {"step": step}, count=4)
    assert line.verdict is Verdict.WRONG
    assert "other bits in run 5" in line.measured


def test_sums_without_an_order_may_differ_in_their_last_bits_alone(case):
    calls = []

    def by(factor):
        def step(params, batch):
            calls.append(batch)
            loss, grads = case["step"](params, batch)
            late = factor if len(calls) == 5 else 1.0
            return loss, grads | {"first": jax.tree.map(lambda g: late * g, grads["first"])}

        calls.clear()
        return step

    def verdict(factor, close):
        return steps.judge("zb", **case | {"step": by(factor)}, count=4, close=close).verdict

    assert verdict(1 + 1e-6, ()) is Verdict.WRONG
    assert verdict(1 + 1e-6, ("first",)) is Verdict.OK
    assert verdict(1 + 1e-3, ("first",)) is Verdict.WRONG


def test_results_that_do_not_follow_the_input_are_wrong(case):
    """What a program does that keeps the first batch in a CUDA graph."""
    line = steps.judge(
        "zb",
        **case | {"step": lambda params, _: case["step"](params, case["batches"][0])},
        count=4,
    )
    assert line.verdict is Verdict.WRONG


# Times


def test_a_predicate_is_measured_and_a_slow_one_is_slow(mesh, monkeypatch):
    found = machine.predicates(SCOPE, mesh)
    assert 0 < found.prices["predicate"] < 1
    monkeypatch.setattr(machine, "predicate_seconds", lambda *_: 1e-3)
    (line,) = machine.predicates(SCOPE, mesh).lines
    assert (line.verdict, line.measured) == (Verdict.SLOW, "1e+03 us")


def test_a_predicate_on_a_gpu_is_compared_with_that_of_an_h100(monkeypatch):
    mesh = SimpleNamespace(
        devices=np.array([SimpleNamespace(platform="gpu", device_kind="NVIDIA A100")], object),
        shape={"pipe": 1},
    )
    monkeypatch.setattr(machine, "predicate_seconds", lambda options, _: 20e-6 if options else 1.0)
    graph, host = machine.predicates(SCOPE, mesh).lines
    assert (graph.verdict, graph.expected, host.expected) == (Verdict.OK, "15 us", "33 us")


def test_what_arrives_is_compared_with_what_was_sent(monkeypatch):
    mesh = jax.sharding.Mesh(jax.devices()[:3], ("pipe",))
    (line,) = machine.arrivals(SCOPE, mesh, " here").lines
    assert (line.item, line.verdict) == ("hops here", Verdict.OK), line
    permute = jax.lax.ppermute

    def lossy(x, axis, pairs):
        return jnp.where(jax.lax.axis_index(axis) == 2, 0, permute(x, axis, pairs))

    monkeypatch.setattr(machine.lax, "ppermute", lossy)
    (line,) = machine.arrivals(SCOPE, mesh).lines
    assert line.verdict is Verdict.WRONG
    assert line.measured == f"[(0, 1), (1, 2)]: {2**18} other numbers arrive"


def test_one_slow_hop_is_named(monkeypatch):
    def slow(mesh, axis, pairs, avals):
        def call():
            time.sleep(0.3 if list(pairs) == [(1, 0)] else 0.0)

        return call

    mesh = jax.sharding.Mesh(jax.devices()[:3], ("pipe",))
    monkeypatch.setattr(machine, "exchange", slow)
    line, _ = machine.hops(SCOPE, mesh).lines
    assert line.verdict is Verdict.SLOW
    assert "; 1 -> 0: " in line.measured
    assert "2 -> 1" not in line.measured


def test_slow_and_exposed_transfers_are_slow():
    good = dict.fromkeys(("0 -> 1", "1 -> 0"), 1e-4)
    assert machine.judge_hops(good, 2**25, GPUS).verdict is Verdict.OK
    line = machine.judge_hops(dict.fromkeys(good, 1e-2), 2**25, GPUS)
    assert line.verdict is Verdict.SLOW
    assert line.expected == "100 us, all equal"
    assert machine.judge_hops(dict.fromkeys(good, 1e-2), 2**25, CPUS).verdict is Verdict.OK
    hidden = {"compute": 1e-2, "hop": 1e-3, "both": 1.01e-2}
    assert machine.judge_overlap(hidden, GPUS).verdict is Verdict.OK
    assert machine.judge_overlap(hidden | {"both": 1.1e-2}, GPUS).verdict is Verdict.SLOW


def test_slow_copies_to_the_host_are_slow(mesh):
    seconds, size = {"compute": 1.0, "hop": 0.1, "both": 1.0}, 2**31
    assert machine.judge_copies(seconds, size, same=True).verdict is Verdict.OK
    assert machine.judge_copies(seconds | {"hop": 1.0}, size, same=True).verdict is Verdict.SLOW
    assert machine.judge_copies(seconds, size, same=False).verdict is Verdict.WRONG
    (line,) = machine.host_copies(SCOPE, mesh).lines
    assert line.verdict is Verdict.NOT_TRIED


def test_a_rate_that_no_link_has_is_no_measurement():
    """What a program gives that leaves the copy out, or is not waited for."""
    seconds = {"compute": 1.0, "hop": 2**29 / 879e9, "both": 1.0}
    line = machine.judge_copies(seconds, 2**29, same=True)
    assert (line.verdict, line.advice[:19]) == (Verdict.NOT_TRIED, "879 GB/s is no copy")


def test_copies_move_both_arrays():
    """On CPU devices too, where the two memories are one."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    arrays = machine.copied(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    found = jax.jit(machine.moved)(arrays)
    assert found[0].sharding.memory_kind == "pinned_host" != found[1].sharding.memory_kind
    assert machine.are_moved(arrays, found)
    assert not machine.are_moved(arrays, arrays)
    assert not machine.are_moved(arrays, (found[0], 2 * found[1]))


# Steps


def test_more_memory_than_predicted_is_wrong():
    mib = 2**20
    assert steps.judge_memory(100 * mib, 110 * mib, None).verdict is Verdict.OK
    assert steps.judge_memory(100 * mib, 140 * mib, None).verdict is Verdict.WRONG
    assert steps.judge_memory(100 * mib, 100 * mib, 140 * mib).verdict is Verdict.WRONG


def test_a_slow_pipeline_on_one_device_is_slow():
    fast, slow = steps.judge_speed({"V = 1": 1.0, "V = 4": 1.2, "plain": 1.0}, 5e14, 1e15)
    assert (fast.verdict, slow.verdict) == (Verdict.OK, Verdict.SLOW)
    assert fast.measured.endswith("MFU 50.0%")
    (line,) = steps.judge_speed({"V = 1": 1.0, "plain": 1.0}, 5e14, None)
    assert "MFU" not in line.measured


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA GB200", 2.5e15),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_kind(kind, flops):
    assert steps.peak_flops(kind, GPUS) == flops


def test_a_step_that_takes_longer_than_planned_says_where():
    line = steps.judge_plan("a step", 0.2, 0.1, "in transfers")
    assert (line.verdict, line.measured) == (Verdict.SLOW, "200 ms: in transfers")
    assert steps.judge_plan("a step", 0.11, 0.1, "").verdict is Verdict.OK


# The command


@pytest.fixture
def report(monkeypatch, tmp_path):
    """What the checks find, without running them."""
    monkeypatch.setenv("JAXPIPE_PRICES", str(tmp_path / "prices.json"))
    lines = [Line("hops", Verdict.SLOW, "3 ms", "1 ms", "look at <cables>")]

    def made(check, scope, limit):
        return Findings(tuple(lines), {"hop": 3e-3, "sent": 0.0}, "NVIDIA H100")

    monkeypatch.setattr(checks, "run_one", made)
    return lines


def test_the_command_prints_lines_and_writes_prices_and_a_report(report, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert main(["doctor", "--only", "hops", "-o", str(page)]) == 0
    out, err = capsys.readouterr()
    assert "hops  slow     3 ms      1 ms      look at <cables>" in out
    assert "wrote the prices of NVIDIA H100" in err
    (prices,) = json.loads((tmp_path / "prices.json").read_text()).values()
    assert {name: n for name, n in prices.items() if name != "measured"} == {"hop": 3e-3}
    assert "look at &lt;cables&gt;" in page.read_text()


def test_the_command_as_json_and_its_status(report, tmp_path, capsys):
    report[0] = Line("hops", Verdict.WRONG, "none")
    assert main(["doctor", "--only", "hops", "--json", "--no-prices"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert [line["verdict"] for line in facts["lines"]] == ["wrong"]
    assert facts["prices"] == {"hop": 3e-3}
    assert facts["prices_file"] is None
    assert not (tmp_path / "prices.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--devices", "0"], "--devices must be at least 1"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--processes", "2"], "need --coordinator"),
        (
            ["--devices", "2", "--coordinator", "a:1", "--processes", "0"],
            "--processes must be at least 1",
        ),
        (["--process", "1"], "--process must be a number from 0"),
        (["--only", "weather"], "no check has 'weather' in its title; titles are versions"),
        (["-o", "report.pdf"], "must end in .html"),
    ],
)
def test_bad_usage(report, arguments, says, capsys):
    assert main(["doctor", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_page_has_every_verdict(report, tmp_path):
    page = tmp_path / "report.html"
    report[:] = [Line(verdict.value, verdict) for verdict in Verdict]
    assert main(["doctor", "--only", "hops", "-o", str(page), "--no-prices"]) == 1
    assert all(page.read_text().count(verdict.value) >= 2 for verdict in Verdict)


def test_a_python_without_jax_is_named_once(monkeypatch, capsys):
    """Every check would fail with an error of its own."""
    monkeypatch.setattr("jaxpipe.cli.commands.find_spec", lambda name: None)
    assert main(["doctor"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "the checks run JAX, which" in message
    assert "install jax" in message
