"""jaxpipe.distributed on the devices of one process: mesh order, rows, and the watchdog."""

from __future__ import annotations

import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.distributed import (
    Watchdog,
    _ExitMessage,
    _roll_text,
    check_same,
    crossings,
    fingerprint,
    global_batch,
    local_rows,
    make_mesh,
)
from jaxpipe.fingerprint import differences
from tests.environment import python

from .jobs import free_port, start


def pipeline(pipe: int, data: int) -> jp.Pipeline:
    schedule = jp.schedules.build("1f1b", devices=pipe, microbatches=2)
    mesh = make_mesh({"pipe": pipe, "data": data}, devices=jax.devices()[: pipe * data])
    return jp.Pipeline(
        jp.Model(lambda p, x: x * p, last=lambda p, x, mb: jnp.mean(x)),
        schedule,
        mesh,
        sharding=jp.Sharding(data=("data",)),
    )


@dataclass(frozen=True)
class Device:
    """What `make_mesh` reads of a device."""

    id: int
    process_index: int
    partition_index: int | None
    platform: str = "gpu"


def test_the_last_axis_stays_inside_a_node_whatever_order_devices_come_in(monkeypatch):
    """Two nodes of two processes of two devices; JAX may list the processes of a node apart."""
    # (node, process) by id
    where = [(0, 0), (0, 0), (1, 1), (1, 1), (0, 2), (0, 2), (1, 3), (1, 3)]
    devices = [Device(i, process, node) for i, (node, process) in enumerate(where)]
    monkeypatch.setattr("jaxpipe.distributed.Mesh", lambda devices, names, axis_types: devices)
    made = make_mesh({"pipe": 2, "tensor": 4}, devices=devices[::-1])
    assert [[d.id for d in row] for row in made] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    # where JAX tells no node, the process stands for it
    unknown = [Device(i, i // 2, None) for i in range(8)]
    assert [d.id for d in make_mesh({"pipe": 8}, devices=unknown[::-1])] == list(range(8))


def test_crossings_count_the_neighbours_in_different_processes():
    class Mesh:
        axis_names = ("pipe", "tensor")
        devices = np.array([[Device(0, 0, 0), Device(1, 0, 0)], [Device(2, 1, 0), Device(3, 2, 0)]])

    assert crossings(Mesh()) == {"pipe": (2, 2), "tensor": (1, 2)}
    assert crossings(make_mesh({"pipe": 4, "data": 2})) == {"pipe": (0, 6), "data": (0, 4)}


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"pipe": 3}, "3 = 3 devices, but there are 8"),
        ({"pipe": 8, "data": 0}, "8 x 0"),
        ({}, "no axes"),
    ],
)
def test_a_mesh_of_another_size_is_refused(axes, says):
    with pytest.raises(jp.PipelineError, match=re.escape(says)):
        make_mesh(axes)


def test_one_process_feeds_all_rows_and_the_batch_lies_on_its_shards():
    pipe = pipeline(2, 4)
    assert local_rows(pipe, 16).tolist() == list(range(16))
    batch = global_batch(pipe, {"x": np.arange(32.0).reshape(16, 2)}, rows=16)
    assert np.array_equal(batch["x"], np.arange(32.0).reshape(16, 2))
    assert {s.data.shape for s in batch["x"].addressable_shards} == {(4, 2)}


def test_rows_that_do_not_fit_are_all_named():
    pipe = pipeline(2, 4)
    with pytest.raises(
        jp.PipelineError, match="18 rows do not divide over 4 data shards; use 16 rows"
    ):
        local_rows(pipe, 18)
    with pytest.raises(jp.PipelineError) as error:
        global_batch(pipe, {"x": np.zeros((8, 2)), "y": np.zeros(()), "z": np.zeros(16)}, rows=16)
    assert len(error.value.faults) == 2
    fault = "batch['x'] has shape (8, 2); its leading axis must be 16: this process feeds 16 of "
    assert f"{fault}the 16 rows" in str(error.value)


def test_a_watchdog_lets_good_steps_and_a_lone_process_s_errors_through():
    watchdog = Watchdog(seconds=60)
    with watchdog.step(0):
        pass
    with pytest.raises(ZeroDivisionError), watchdog.step(1):
        _ = 1 / 0
    with pytest.raises(jp.PipelineError, match=r"more than 0 seconds:\n  seconds=0\n  first=-1"):
        Watchdog(seconds=0, first=-1)


STUCK = """
import time
from jaxpipe.distributed import Watchdog
watchdog = Watchdog(seconds={seconds}, first={first})
with watchdog.step(0):
    time.sleep(1)
print("the first step is done", flush=True)
def never_comes_back():
    time.sleep(100)
with watchdog.step(1):
    never_comes_back()
"""


def test_a_step_past_its_limit_ends_the_process_and_says_where_it_stood():
    """The first step takes longer than the limit of the others, which is no fault."""
    code = STUCK.format(seconds=0.5, first=50)
    done = python("-c", code, timeout=90, status=75)
    assert done.stdout == "the first step is done\n"
    assert re.search(
        r"jaxpipe: process 0 of 1 on \S+: step 1 has not ended within its limit of 0.5 s",
        done.stderr,
    )
    assert "never_comes_back" in done.stderr


FAILS = """
import jax
jax.process_count, jax.process_index = (lambda: 4), (lambda: 3)
from jaxpipe.distributed import Watchdog
import atexit
atexit.register(lambda: print("waited for the others"))
with Watchdog(seconds=50).step(7):
    raise RuntimeError("connection reset by peer")
"""


def test_a_failing_step_of_a_job_ends_the_process_without_waiting_for_the_others():
    done = python("-c", FAILS, timeout=90, status=1)
    assert "RuntimeError: connection reset by peer" in done.stderr
    assert re.search(
        r"jaxpipe: process 3 of 4 on \S+: step 7 failed, see the error above", done.stderr
    )
    assert "waited" not in done.stdout


def test_a_fingerprint_differs_where_what_is_computed_does():
    shapes = {"stages": jax.ShapeDtypeStruct((2, 3), jnp.float32), "last": {}}
    one, wide = pipeline(2, 1), {**shapes, "stages": jax.ShapeDtypeStruct((2, 4), jnp.float32)}
    other = jp.Pipeline(
        jp.Model(lambda p, x: x), jp.schedules.build("gpipe", devices=2, microbatches=2), one.mesh
    )
    base = fingerprint(one, shapes, rate=0.1)
    check_same(one, shapes, rate=0.1)  # a job of one process agrees with itself
    for found, names in (
        (fingerprint(pipeline(2, 1), shapes, rate=0.1), set()),
        (fingerprint(one, wide, rate=0.1), {"parameters"}),
        (fingerprint(one, shapes, rate=0.2), {"rate"}),
        (fingerprint(other, shapes, rate=0.1), {"schedule", "pipeline"}),
    ):
        assert {
            fault.split(":")[0] for fault in differences(dict(enumerate([base, base, found])))
        } == names
    (fault,) = differences({0: base, 1: fingerprint(one, wide, rate=0.1)})
    assert "process 0 has 1 arrays of 6 numbers, stages float32[2, 3]" in fault
    assert "process 1 has 1 arrays of 8 numbers, stages float32[2, 4]" in fault


def test_a_roll_call_names_who_is_silent_and_who_is_elsewhere():
    assert _roll_text({0: "step 7", 1: "step 6"}, 0, 2) == "process 1 is in step 6"
    assert _roll_text({}, 0, 2) == "process 1 is gone or stopped (no answer in 2 s)"


@pytest.mark.parametrize(("count", "answers"), [(2, True), (2, False), (3, True), (3, False)])
def test_last_words_name_process_0_where_it_is_the_one_that_is_gone(count, answers, capfd):
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        if answers:
            service.listen()
        message = _ExitMessage(1, count, f"127.0.0.1:{service.getsockname()[1]}")
        message.say("died before")
        message.say("died in step 7. {}. Again")
        message._reader.communicate()  # the pipe ends without a word
    said = capfd.readouterr().err
    assert said.startswith("died in step 7. ")
    assert said.endswith(". Again\n")
    assert ("Process 0, which coordinates the job, does not answer: it is gone" in said) == (
        not answers
    )
    assert ("It was killed" in said) == answers
    assert ("another process is gone" in said) == (answers and count == 3)


def test_last_words_are_not_said_at_a_good_end(capfd):
    message = _ExitMessage(0, 2, "127.0.0.1:1")
    message.say("died in step 7. {}")
    message.close()
    assert not capfd.readouterr().err


@pytest.mark.slow
def test_processes_with_unlike_pipelines_are_refused_by_name_before_they_run(tmp_path):
    """Without `check_same`; the same pair of processes then trains."""
    worker, address = str(Path(__file__).with_name("unlike_worker.py")), f"127.0.0.1:{free_port()}"
    with start([[sys.executable, worker, address, str(i)] for i in range(2)], tmp_path) as job:
        assert job.wait(120) == [0, 0], job.everything()
        logs = [job.log(0), job.log(1)]
    for log in logs:
        *refused, trained = re.split(r"^(?=\{|trained)", log, flags=re.MULTILINE)[1:]
        names = [
            set(
                re.findall(r"^  ([\w ]+): process 0 has .*, but process 1 has ", text, re.MULTILINE)
            )
            for text in refused
        ]
        assert names == [
            {"schedule", "program"},
            {"schedule", "program", "code of stage 0", "code of last"},
            {"parameters", "code of stage 0"},
            {"code of stage 0"},
            {"batch", "code of stage 0", "code of last"},
            {"versions"},
            {"call", "program"},
        ], log
        assert trained.startswith("trained 4.0"), log
