"""examples/pod/train.py for real: gloo processes on loopback train what one process trains, and
none hangs when another dies.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from .jobs import start, train_commands

TINY = "--layers 2 --width 16 --context 16 --batch 8 --microbatches 2"
# A float32 sum over two or four data shards, or another fusion, rounds differently: some machine
# epsilons (1.2e-7) of a loss of 5.5, and the first steps of Adam carry them on, no further than
# this.
TOLERANCE = 2e-6
LINE = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)
FEEDS = re.compile(r"process (\d+) feeds rows \[(.*)\]")


def losses(log: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LINE.findall(log)}


def train(
    processes: int, devices: int, flags: str, folder, *, checkpoints="checkpoints", seconds=240
):
    """Run to the end; (losses by step, rows fed by each process, log of process 0)."""
    flags = f"{TINY} {flags} --checkpoints {folder / checkpoints}"
    with start(train_commands(processes, devices, flags), folder) as job:
        statuses = job.wait(seconds)
        assert statuses == [0] * processes, job.everything()
        fed = {
            int(p): [int(r) for r in rows.split(",")] for p, rows in FEEDS.findall(job.everything())
        }
        return losses(job.log(0)), fed, job.log(0)


@pytest.mark.slow
def test_two_processes_train_the_losses_of_one(tmp_path):
    flags = "--pipe 2 --steps 3 --save-every 0"
    one, _, _ = train(1, 2, flags, tmp_path / "one")
    two, fed, log = train(2, 1, flags, tmp_path / "two")
    assert sorted(one) == [1, 2, 3]
    assert two == pytest.approx(one, rel=TOLERANCE)
    assert one[3] < one[1]
    assert (
        "2 processes; neighbours in different processes, of all: {'pipe': (1, 1), 'data': (0, 0)}"
        in log
    )
    assert fed == {0: list(range(8)), 1: list(range(8))}  # both are stages of one replica


@pytest.mark.exhaustive
def test_processes_that_were_started_unlike_are_refused_by_name(tmp_path):
    """Other numbers of layers would train on without a word, other schedules would wait for each
    other.
    """
    commands = train_commands(2, 1, f"{TINY} --pipe 2 --steps 3 --save-every 0")
    commands[1] += ["--layers", "4", "--schedule", "gpipe"]
    with start(commands, tmp_path) as job:
        assert job.wait(120) == [1, 1], job.everything()
        for process in (0, 1):
            log = job.log(process)
            assert "the processes of this job were not started alike" in log
            assert "schedule: process 0 has 1f1b" in log
            assert "parameters: process 0 has" in log
            assert "step 1 loss" not in log


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("pipe", "data", "schedule"), [(2, 2, "1f1b"), (4, 1, "zb_h1"), (1, 4, "1f1b")]
)
def test_four_processes_train_the_losses_of_one(tmp_path, pipe, data, schedule):
    flags = f"--pipe {pipe} --data {data} --schedule {schedule} --layers 4 --steps 6 --save-every 0"
    one, everything, _ = train(1, 4, flags, tmp_path / "one")
    four, fed, _ = train(4, 1, flags, tmp_path / "four")
    assert four == pytest.approx(one, rel=TOLERANCE)
    assert everything == {0: list(range(8))}
    # Process i is at pipe coordinate i div data and data coordinate i mod data, and reads its
    # shard's rows only.
    share = 8 // data
    assert fed == {i: list(range(i % data * share, (i % data + 1) * share)) for i in range(4)}


@pytest.mark.exhaustive
def test_two_processes_of_two_devices_train_the_losses_of_one(tmp_path):
    """One process a host: the data axis lies inside a process, so each feeds all rows."""
    flags = "--pipe 2 --data 2 --steps 3 --save-every 0"
    one, _, _ = train(1, 4, flags, tmp_path / "one")
    two, fed, log = train(2, 2, flags, tmp_path / "two")
    assert two == pytest.approx(one, rel=TOLERANCE)
    assert fed == {0: list(range(8)), 1: list(range(8))}
    assert "{'pipe': (2, 2), 'data': (0, 2)}" in log


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1], ids=["coordinator", "other"])
def test_a_killed_process_ends_the_others_and_the_job_resumes(tmp_path, victim):
    flags = f"{TINY} --pipe 2 --save-every 2 --steps 12 --heartbeat 10 --checkpoints"
    whole, _, _ = train(2, 1, "--pipe 2 --save-every 2 --steps 12", tmp_path / "whole")
    with start(
        train_commands(2, 1, f"{flags} {tmp_path / 'killed'} --steps 100000"), tmp_path / "logs"
    ) as job:
        job.wait_for("step 5 ", 0, 200)
        os.kill(job.processes[victim].pid, signal.SIGKILL)
        begin = time.monotonic()
        statuses = job.wait(60)
        took = time.monotonic() - begin
        print(
            f"the other process ended {took:.1f} s after process {victim} was killed, with "
            f"status {statuses[1 - victim]}"
        )
        assert statuses[victim] == -signal.SIGKILL
        assert statuses[1 - victim] != 0
        time.sleep(1)  # for last words, which are said after the end
        # Where process 0 is gone, JAX may end the other before it can say a word: then its last
        # words are said for it.
        log, doing = job.log(1 - victim), r"(what comes after )?(step|checkpoint) \d+"
        gone = (
            "process 1 is gone or stopped"
            if victim
            else "[Pp]rocess 0, which coordinates the job, (is gone|does not answer)"
        )
        assert re.search(
            rf"jaxpipe: process {1 - victim} of 2 on \S+: (died (in|after) "
            rf")?{doing}.*{gone}.*Start the job again",
            log,
        ), log
        cause = "It was killed" if victim else "It was killed .*because process 1 is gone"
        assert re.search(
            rf"jaxpipe: process {victim} of 2 on \S+: died (in|after) {doing}\. {cause}",
            job.log(victim),
        ), job.log(victim)
        reached = max(losses(job.log(0)))
    resumed, _, log = train(
        2, 1, "--pipe 2 --save-every 2 --steps 12", tmp_path, checkpoints="killed"
    )
    done = int(re.search(r"resuming after step (\d+)", log)[1])
    assert 2 <= done <= reached
    assert done < 12, "the run got past the end before it was killed: nothing was resumed"
    # The same two processes run the same program on the same numbers: bit for bit.
    assert resumed == {step: loss for step, loss in whole.items() if step > done}


@pytest.mark.exhaustive
def test_a_process_that_is_told_to_stop_stops_all_behind_the_same_step_with_a_checkpoint(tmp_path):
    flags = (
        f"{TINY} --pipe 2 --steps 100000 --save-every 0 --checkpoints {tmp_path / 'checkpoints'}"
    )
    with start(train_commands(2, 1, flags), tmp_path / "logs") as job:
        job.wait_for("step 5 ", 0, 200)
        os.kill(job.processes[1].pid, signal.SIGTERM)
        assert job.wait(60) == [0, 0], job.everything()
        stopped = int(re.search(r"told to stop: saved after step (\d+)", job.log(0))[1])
    assert stopped == max(losses(job.log(0))) >= 5
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(stopped)]


@pytest.mark.exhaustive
def test_a_stuck_process_ends_the_others_at_the_step_limit(tmp_path):
    """Stopped, not dead, and the heartbeat is set far too long to notice: the watchdog has to."""
    flags = (
        f"{TINY} --pipe 2 --steps 100000 --save-every 0 --heartbeat 300 --step-limit 5 "
        f"--checkpoints {tmp_path / 'checkpoints'}"
    )
    with start(train_commands(2, 1, flags), tmp_path / "logs") as job:
        job.wait_for("step 5 ", 0, 200)
        os.kill(job.processes[1].pid, signal.SIGSTOP)
        begin = time.monotonic()
        assert job.processes[0].wait(60) == 75, job.everything()
        print(
            f"the other process ended {time.monotonic() - begin:.1f} s after process 1 was stopped"
        )
        assert re.search(
            r"jaxpipe: process 0 of 2 on \S+: step \d+ has not ended within its limit of 5 s",
            job.log(0),
        ), job.log(0)
        assert "process 1 is gone or stopped" in job.log(0)
        assert "train.py" in job.log(0)  # where its threads stood


@pytest.mark.exhaustive
def test_a_process_that_never_comes_is_missed(tmp_path):
    commands = train_commands(
        2, 1, f"{TINY} --pipe 2 --start-limit 5 --checkpoints {tmp_path / 'checkpoints'}"
    )
    with start(commands[:1], tmp_path / "logs") as job:
        assert job.wait(60)[0] != 0
        assert re.search(r"DEADLINE_EXCEEDED|timed out", job.log(0)), job.log(0)
