"""torch's runtime runs a table with U, D and X on stages of FSDP2, and has plain gradients."""

import fsdp_stages
import pytest
from test_ref_executor import TOLERANCE

import jaxpipe as jp
from jaxpipe.transforms import Reduce
from torch_ref.peer import spawn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "reduce"), [(None, Reduce.ONCE), (1, Reduce.ONCE), (1, Reduce.EACH_RUN)]
)
def test_torch_runs_our_table_on_stages_that_are_split(most, reduce):
    plain = jp.schedules.build(
        "interleaved_1f1b",
        devices=fsdp_stages.DEVICES,
        microbatches=fsdp_stages.MICROBATCHES,
        chunks=fsdp_stages.STAGES // fsdp_stages.DEVICES,
    )
    table = jp.add_transfers(jp.add_gathers(plain, max_active=most, reduce=reduce)).to_csv()
    world = fsdp_stages.DEVICES * fsdp_stages.SHARDS
    found = spawn(fsdp_stages.worst_error, world, table, time_limit=240.0)
    assert max(found) <= TOLERANCE
