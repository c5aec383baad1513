"""torch's runtime runs a table with U, D and X on stages of FSDP2, and has plain gradients."""

import fsdp_stages
import pytest
from test_ref_executor import TOLERANCE

import jaxpipe as jp
from jaxpipe.transforms import Reduce
from torch_ref.peer import spawn

CASES = ((None, Reduce.ONCE), (1, Reduce.ONCE), (1, Reduce.EACH_RUN))


@pytest.mark.slow
def test_torch_runs_our_tables_on_stages_that_are_split():
    plain = jp.schedules.build(
        "interleaved_1f1b",
        devices=fsdp_stages.DEVICES,
        microbatches=fsdp_stages.MICROBATCHES,
        chunks=fsdp_stages.STAGES // fsdp_stages.DEVICES,
    )
    gathered = [jp.add_gathers(plain, max_active=most, reduce=reduce) for most, reduce in CASES]
    tables = [jp.add_transfers(table).to_csv() for table in gathered]
    world = fsdp_stages.DEVICES * fsdp_stages.SHARDS
    found = spawn(fsdp_stages.worst_errors, world, tables, time_limit=240.0)
    assert max(map(max, found)) <= TOLERANCE
