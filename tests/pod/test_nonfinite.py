"""find_nonfinite in a job of several processes: each finds the same, wherever the rows lie."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .jobs import free_port, start


@pytest.mark.exhaustive
def test_both_processes_name_the_shard_of_one(tmp_path):
    worker = str(Path(__file__).with_name("nonfinite_worker.py"))
    address = f"127.0.0.1:{free_port()}"
    with start([[sys.executable, worker, address, str(i)] for i in range(2)], tmp_path) as job:
        assert job.wait(200) == [0, 0], job.everything()
    # Shard 1 has rows 8 to 15, two a microbatch: row 12 is in microbatch 2.
    for process, rows in enumerate((range(8), range(8, 16))):
        assert f"rows {list(rows)} answer not finite in the forward of" in job.log(process), (
            job.log(process)
        )
        assert "microbatch 2, data shard 1" in job.log(process)
        assert "microbatch['x'] has 3 NaN and 0 infinite of 6 values" in job.log(process)
