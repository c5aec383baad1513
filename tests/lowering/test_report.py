"""`jp.inspect.report` says what the table and the program are: every number against one that
is counted otherwise.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from tests.flat import flat_pipeline
from tests.parity.engines import mesh_of

P, WIDTH, ROWS = 4, 16, 8
ACTIVATION = ROWS * WIDTH * 4


def stage(params, x):
    return jnp.tanh(x @ params["w"].astype(x.dtype))


def last(params, x, microbatch):
    return jnp.mean(jnp.square(x - microbatch["y"]))


def report(name, microbatches=8, *, stage=stage, devices=P, dtype=jnp.float32, **options):
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    pipe = flat_pipeline(stage, schedule=schedule, mesh=mesh_of(devices), last=last, **options)
    params = {
        "stages": {"w": jax.ShapeDtypeStruct((schedule.num_stages, WIDTH, WIDTH), dtype)},
        "last": {},
    }
    rows = jax.ShapeDtypeStruct((ROWS * microbatches, WIDTH), jnp.float32)
    return schedule, jp.inspect.report(pipe, pipe.place(params), {"x": rows, "y": rows})


def test_it_has_every_key_that_its_docstring_names():
    import re

    from jaxpipe.inspect import step_report as module

    _, found = report("1f1b", devices=2, microbatches=2)
    lines = [
        line
        for line in module.__doc__.splitlines()
        if line.startswith("    ") and not line.startswith("     ")
    ]
    named = {
        key
        for line in lines
        for key in re.split(r"\s{2,}", line.strip(), maxsplit=1)[0].split(", ")
    }
    assert set(found) == named


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zbv", "dualpipe"])
def test_counts_and_makespans(name):
    schedule, found = report(name)
    assert (found["schedule"], found["devices"], found["microbatches"]) == (schedule.name, P, 8)
    transferred = jp.add_transfers(schedule)
    kinds = [str(cell) for row in transferred.rows for cell in row if cell is not None]
    assert found["table_transfers"] == sum("SEND" in text for text in kinds)
    assert found["transfers"] >= found["table_transfers"]
    assert found["table_makespan"] == jp.simulate(schedule, jp.Costs()).makespan
    assert found["table_makespan"] <= found["makespan"] + 1e-9
    assert found["num_segments"] == len(found["segments"]) <= found["ticks"]
    # Each segment's text begins "ticks a..b: repeats x period", and together they cover every tick.
    spans = [text.split(":")[0].removeprefix("ticks ").split("..") for text in found["segments"]]
    assert [int(a) for a, _ in spans] == [0, *(int(b) + 1 for _, b in spans[:-1])]
    assert int(spans[-1][1]) + 1 == found["ticks"]
    assert found["blocks"] > 0
    assert found["temp_bytes"] > 0
    assert found["compile_seconds"] > 0
    assert found["fallbacks"] == []


def test_memory_of_1f1b_by_pool():
    _, found = report("1f1b")
    # tanh's derivative is made of its result, the only residual; dw is dz times x, so I alone reads
    # it.  I and W are one B: no stash.
    assert found["slot_bytes"] == {
        "x": ACTIVATION,
        "residual_input": ACTIVATION,
        "residual_weight": 0,
        "cotangent": ACTIVATION,
        "stash": 0,
        "first": 0,
        "last": 0,
        "share": 0,
        "carry": 0,
        "carry_gradient": 0,
        "buffer": 0,
        "buffer_gradient": 0,
        "host": 0,
    }
    assert found["residuals"] == [("residual_input", f"float32[{ROWS}, {WIDTH}]", ACTIVATION)]
    assert found["slots"].residual_input == P
    assert found["pool_bytes"]["residual_input"] == P * ACTIVATION
    pools = sum(found["pool_bytes"].values())
    assert pools <= found["temp_bytes"]


def test_a_split_backward_stashes():
    _, found = report("zb_h1")
    assert found["slot_bytes"]["stash"] > 0
    assert ("stash", f"float32[{ROWS}, {WIDTH}]", ACTIVATION) in found["residuals"]


def test_traffic_of_1f1b_is_the_tables():
    schedule, found = report("1f1b", 16)
    # Devices in the middle send an activation down and a cotangent up for each microbatch.
    assert found["table_transfers"] == 2 * (P - 1) * schedule.num_microbatches
    extra = found["transfers"] - found["table_transfers"]
    assert 2 * 16 * ACTIVATION <= found["transfer_bytes"] <= (2 * 16 + extra) * ACTIVATION


def test_what_depends_on_parameters_alone_is_hoisted():
    _, found = report(
        "interleaved_1f1b",
        stage=lambda p, x: jnp.tanh(x @ p["w"].astype(jnp.float64).astype(x.dtype)),
        dtype=jnp.bfloat16,
    )
    # One cast matrix for each of the two chunks, which forward and backward share.
    assert found["hoisted_bytes"] == 2 * WIDTH * WIDTH * 4


def branching(params, x):
    """The derivative of a conditional is one equation that gives dx and dw."""
    return jax.lax.cond(
        jnp.sum(x) > 0, lambda: jnp.tanh(x @ params["w"]), lambda: jnp.sin(x @ params["w"])
    )


def test_what_cannot_be_cut_is_said():
    _, found = report("zb_h1", stage=branching, devices=2, microbatches=2)
    assert len(found["fallbacks"]) == 1
    assert found["fallbacks"][0].startswith("cond: 1 of its ")


def layered(params, x):
    return jax.lax.scan(lambda x, _: (branching(params, x), None), x, length=3)[0]


def test_nor_inside_a_scan():
    _, found = report("zb_h1", stage=layered, devices=2, microbatches=2)
    assert [text.split(":")[0] for text in found["fallbacks"]] == ["cond"]


def test_parameter_bytes_are_what_a_device_holds():
    schedule = jp.schedules.build("1f1b", devices=P, microbatches=4)
    pipes = [
        jp.Pipeline(
            jp.Model(stage, first=lambda p, mb: mb["x"] @ p["w"], last=last),
            schedule,
            mesh_of(P),
            sharding=jp.Sharding(outer=split),
        )
        for split in (False, True)
    ]
    params = {"stages": {"w": jax.ShapeDtypeStruct((P, WIDTH, WIDTH), jnp.float32)}, "last": {}}
    params["first"] = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
    rows = jax.ShapeDtypeStruct((ROWS * 4, WIDTH), jnp.float32)
    whole, split = (
        jp.inspect.report(pipe, pipe.place(params), {"x": rows, "y": rows})["parameter_bytes"]
        for pipe in pipes
    )
    one = WIDTH * WIDTH * 4
    assert whole == {"first": one, "stages": one, "last": 0}
    assert split == {"first": one // P, "stages": one, "last": 0}


def test_the_name_is_the_step_s_own_where_another_schedule_is_equal():
    """zb_1p and zb_h1 are one table at this size, and share a plan."""
    assert [
        report(name, devices=2, microbatches=2)[1]["schedule"] for name in ("zb_1p", "zb_h1")
    ] == ["zb_1p", "zb_h1"]
