"""What `jp.inspect.report` reads in the text of a GPU program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from jaxpipe.inspect.programs import compile_and_read
from tests.gpu.programs import (
    ROWS,
    TIME,
    VOCAB,
    WIDTH,
    first,
    gpu_marks,
    gpu_mesh,
    last,
    shapes,
    stage,
)
from tests.tiers import exhaustive, slow

pytestmark = gpu_marks()


def report(
    name: str, microbatches: int = 8, remat: str | None = None, devices: int = 4
) -> dict[str, object]:
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    mesh = gpu_mesh((devices,), ("pipe",))
    pipe = jp.Pipeline(
        jp.Model(stage, first=first, last=last), schedule, mesh, memory=jp.Memory(remat=remat)
    )
    rows = jax.ShapeDtypeStruct(
        (microbatches * ROWS, TIME), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())
    )
    return jp.inspect.report(pipe, pipe.place(shapes(schedule.num_stages)), {"tokens": rows})


@pytest.mark.parametrize("defers", [False, slow(True)])
def test_a_spread_head_waits_for_nobody_in_the_steady_state(defers: bool) -> None:
    """Its collectives are under no predicate: a host would wait for each, since no CUDA graph holds
    a collective.
    """

    def head(params: Any, x: Any, microbatch: Any, *, ctx: jp.Context) -> Any:
        return jp.VocabHead()(params, x, {"targets": microbatch["tokens"]}, ctx=ctx)

    schedule = jp.schedules.build("1f1b", devices=4, microbatches=8)
    schedule = jp.defer_last(jp.spread_last(schedule, split=False)) if defers else schedule
    mesh = gpu_mesh((4,), ("pipe",))
    pipe = jp.Pipeline(jp.Model(stage, first=first, last=jp.spread(head)), schedule, mesh)
    canonical = {**shapes(4), "last": {"head": jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32)}}
    rows = jax.ShapeDtypeStruct(
        (8 * ROWS, TIME), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())
    )
    program = compile_and_read(
        pipe.lower(pipe.place(canonical), {"tokens": rows}), pipe.compiler_options
    )
    sums = [
        each for each in program.collectives if each.kind == "all-reduce" and each.place.trips > 1
    ]
    shares = [
        s
        for s in pipe._steps.plan.segments
        if s.repeats > 1 and any(use.block.is_collective for t in s.templates for use in t.blocks)
    ]
    assert {each.place.trips for each in sums} == {s.repeats for s in shares} != set(), (
        "once a trip"
    )
    assert not any(each.place.guarded for each in sums)
    assert not [each for each in program.predicates if not each.in_graph]


@pytest.mark.slow
def test_waits_and_overlap() -> None:
    plain, split = report("1f1b"), report("zb_h1")
    assert plain["host_waits"] == 0
    beside, permutes = plain["permutes_beside_compute"]
    assert 0 < beside <= permutes
    assert split["host_waits"] < split["ticks"] / 2
    for found in (plain, split):
        total = found["argument_bytes"] + found["output_bytes"] + found["temp_bytes"]
        # The head's work space beside tiny layers: XLA packs what is predicted apart.
        assert abs(found["predicted"]["total"] / total - 1) < 0.1


def test_layers_that_are_recomputed_do_not_wait_for_the_host() -> None:
    """The recomputed forward stacks what the backward of its layers reads."""
    assert report("1f1b", remat="full")["host_waits"] == 0


@pytest.mark.parametrize(
    ("name", "microbatches", "devices"), [("1f1b_overlap", 6, 2), slow("dualpipev", 12, 6)]
)
def test_pairs_do_not_wait_for_the_host(name: str, microbatches: int, devices: int) -> None:
    """XLA reads no layer beside compute in a copy, which no graph holds; nor in ramps."""
    assert report(name, microbatches=microbatches, devices=devices)["host_waits"] == 0


@pytest.mark.parametrize(
    "name", ["interleaved_1f1b", slow("zbv"), *map(exhaustive, ("zb_h1", "v_half"))]
)
def test_what_has_slack_runs_beside_compute(name: str) -> None:
    """From trip to trip of the steady state too, and no transfer is chosen."""
    # ZB-V comes to its steady state late: with 16 microbatches its longest loop is still of the
    # ramps.
    found = report(name, microbatches=32 if name == "zbv" else 16)
    late, with_slack = found["late_transfers"]
    assert late > 0.9 * with_slack
    beside, permutes = found["permutes_with_slack_beside_compute"]
    assert beside == permutes > 0
    assert found["host_waits"] == 0
    beside, permutes = found["permutes_beside_compute"]
    assert beside > permutes / 2
