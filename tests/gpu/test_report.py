"""What `compile_report` reads in the text of a GPU program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from tests.gpu.programs import ROWS, TIME, first, gpu_fault, gpu_mesh, last, shapes, stage

FAULT = gpu_fault()
pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(FAULT is not None, reason=f"GPU programs cannot be compiled here ({FAULT})"),
]


def report(name: str, remat: str | None = None) -> dict[str, object]:
    schedule = jp.schedules.build(name, devices=4, microbatches=8)
    mesh = gpu_mesh((4,), ("pipe",))
    pipe = jp.Pipeline(stage, schedule=schedule, mesh=mesh, first=first, last=last, remat=remat)
    rows = jax.ShapeDtypeStruct((8 * ROWS, TIME), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return pipe.compile_report(pipe.place(shapes(schedule.num_stages)), {"tokens": rows})


def test_waits_and_overlap() -> None:
    plain, split = report("1f1b"), report("zb_h1")
    assert plain["host_waits"] == 0
    beside, permutes = plain["permutes_beside_compute"]
    assert 0 < beside <= permutes
    # Where ticks choose among exchanges, each asks once.
    assert 0 < split["host_waits"] <= split["ticks"]
    for found in (plain, split):
        total = found["argument_bytes"] + found["output_bytes"] + found["temp_bytes"]
        # The head's work space beside tiny layers: XLA packs what is predicted apart.
        assert abs(found["predicted"]["total"] / total - 1) < 0.1


def test_layers_that_are_recomputed_do_not_wait_for_the_host() -> None:
    """The recomputed forward stacks what the backward of its layers reads."""
    assert report("1f1b", remat="full")["host_waits"] == 0
