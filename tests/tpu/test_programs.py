"""In programs for TPUs no pool, accumulator or stack is copied in a loop, permutes run beside
compute, and no predicate is around them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.gpu_programs import Axes, Case, Remat
from benchmarks.llama import layered
from jaxpipe.inspect.hlo import Compute, steady
from jaxpipe.inspect.programs import Purpose, TpuProgram, heap_bytes
from jaxpipe.lowering.target import RunsOn, Target
from jaxpipe.spmd.segment import WITH_SLACK
from tests.gpu import test_slices as gpu_slices
from tests.gpu.programs import first, last, shapes, stage
from tests.tiers import exhaustive, slow
from tests.tpu.programs import (
    SHAPE,
    V5P,
    V6E,
    check,
    copied_after,
    lower,
    made_again,
    needs_tpu_compiler,
    read,
    tpu_mesh,
)

CATALOGUE = [name for name in jp.schedules.names() if name != "no_pipelining"]
VEE = {"zbv", "v_half", "v_min", "dualpipe", "dualpipev"}
SMALL = Case("1f1b", devices=2, microbatches=4, shape=SHAPE, layers=1)
CASE = Case("1f1b", devices=4, microbatches=8, shape=SHAPE)
BOTH = pytest.mark.parametrize("topology", [exhaustive(V5P), exhaustive(V6E)])


def compiled(case: Case, topology: str = V5P) -> Any:
    """The program, checked."""
    program = read(lower(case, topology), topology)
    # In dualpipev's ticks of six blocks, some of them are only beside what follows the blocks.
    check_with_slack(program, 0.5 if case.schedule == "dualpipev" else 0.9)
    return program


def check_with_slack(program: TpuProgram, least: float = 0.9) -> None:
    """Work hides at least this part of every transfer with slack."""
    check(program)
    late = [each for each in program.collectives if WITH_SLACK in each.start.attributes]
    hidden = {each.name: program.hidden(each) for each in late}
    assert {name: share for name, share in hidden.items() if share < least} == {}


def check_beside_blocks(program: TpuProgram, schedule: str) -> None:
    """Transfers with slack run beside matmuls; where activations go up and down, half of them."""
    late = [each for each in program.collectives if WITH_SLACK in each.start.attributes]
    others = [each.name for each in late if each.compute is not Compute.MATMUL]
    assert len(others) <= (len(late) // 2 if schedule in VEE else 0), others


@needs_tpu_compiler
def test_a_step_is_compiled_for_tpus() -> None:
    """The one that the default tests compile."""
    assert Target.of(tpu_mesh((4,), ("pipe",)), ("pipe",)).runs_on is RunsOn.TPUS
    program = compiled(SMALL)
    # Beside a block, and not only beside reads and writes of pools.
    assert all(each.compute is Compute.MATMUL for each in steady(program.collectives))
    # Tiles are whole: nothing of the pools is padding.
    assert program.padding < 2**16
    cycles = program.cycles
    assert cycles[Purpose.MATMUL] == max(cycles.values())
    assert cycles[Purpose.READ] < 0.15 * sum(cycles.values())


@needs_tpu_compiler
@BOTH
@pytest.mark.parametrize("name", CATALOGUE)
def test_schedules(name: str, topology: str) -> None:
    program = compiled(replace(CASE, schedule=name), topology)
    # Work between blocks hides four of dualpipe's six, and one of interleaved_zb's four.
    if name != "dualpipe" and (name, topology) != ("interleaved_zb", V5P):
        check_beside_blocks(program, name)


@needs_tpu_compiler
@BOTH
@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("axes", list(Axes))
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_axes_and_remats(name: str, axes: Axes, remat: Remat, topology: str) -> None:
    case = replace(CASE, schedule=name, devices=2, axes=axes, remat=remat)
    program = compiled(case, topology)
    if topology == V5P and (name, remat) != ("zb_h1", Remat.FULL):  # there two of three
        check_beside_blocks(program, name)


@needs_tpu_compiler
@pytest.mark.parametrize("axes", [slow(Axes.PIPE), exhaustive(Axes.DATA), exhaustive(Axes.TENSOR)])
def test_memory_is_predicted(axes: Axes) -> None:
    """Of a step whose ends have gradients that are larger than the memory beside the cores."""
    shape = replace(SHAPE, vocab=131072, rows=1)
    case = replace(SMALL, axes=axes, shape=shape, layers=2, remat=Remat.LAYER)
    pipe, params, rows = case.arguments(tpu_mesh)
    program = read(pipe.lower(params, rows))
    check(program)
    predicted = jp.inspect.memory(pipe, params, rows)
    assert predicted["total"] == pytest.approx(program.total_bytes, rel=0.05)
    # Sums of the gradients of the ends need no room of their own.
    assert heap_bytes(program.memory) < 4 * shape.width * shape.vocab


@needs_tpu_compiler
@pytest.mark.exhaustive
def test_raveled_pools_would_be_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles matter: rows of a raveled pool are in sublanes."""
    tiled = read(lower(CASE)).cycles
    monkeypatch.setattr(Target, "tile", ())
    raveled = read(lower(replace(CASE, microbatches=9))).cycles
    share, before = (each[Purpose.READ] / sum(each.values()) for each in (tiled, raveled))
    assert share < before / 2


def small_pipeline(
    model: jp.Model, schedule: jp.Schedule, topology: str = V5P, **options: Any
) -> jp.Pipeline:
    mesh = tpu_mesh((schedule.num_devices,), ("pipe",), topology)
    return jp.Pipeline(model, schedule, mesh, **options)


def tokens(pipe: jp.Pipeline, rows: int = 4, time: int = 512) -> dict[str, Any]:
    everywhere = NamedSharding(pipe.mesh, PartitionSpec())
    count = rows * pipe.schedule.num_microbatches
    return {"tokens": jax.ShapeDtypeStruct((count, time), jnp.int32, sharding=everywhere)}


SIZES = {"width": 256, "hidden": 1024, "vocab": 1024}


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("name", "devices", "topology"),
    # With four devices no residual of 1F1B waits for long enough.
    [slow("gpipe", 4, V5P), exhaustive("1f1b", 8, "v5p:2x2x2")],
)
def test_residuals_go_to_the_host_and_back_beside_compute(
    name: str, devices: int, topology: str
) -> None:
    schedule = jp.schedules.build(name, devices=devices, microbatches=2 * devices)
    pipe = small_pipeline(
        jp.Model(stage, first=first, last=last),
        schedule,
        topology,
        memory=jp.Memory(offload="residuals"),
    )
    assert pipe._steps.plan.program().slots.host
    program = read(pipe.lower(pipe.place(shapes(devices, **SIZES)), tokens(pipe)))
    check(program)
    moves = ("dynamic-slice", "dynamic-update-slice")
    beside = dict.fromkeys(moves, 0)
    for computation in program.module.computations.values():
        under_way: dict[str, bool] = {}
        for each in computation.instructions:
            kind = each.opcode.removesuffix("-start")
            if each.opcode.endswith("-start") and kind in moves:
                under_way[each.name] = False
            elif each.opcode == "while":
                under_way = dict.fromkeys(under_way, True)
            elif each.opcode.endswith("-done") and under_way.get(each.operands[0], False):
                beside[each.opcode.removesuffix("-done")] += 1
    assert all(beside.values())
    # layers, rows, time; GELU's two arrays and the normal input, bfloat16: all in whole tiles
    slot = 2 * 4 * 512 * (2 * SIZES["hidden"] + SIZES["width"]) * 2
    # one slot is for what nobody needs
    assert (
        program.memory.host_temp_size_in_bytes == (pipe._steps.plan.program().slots.host + 1) * slot
    )


@needs_tpu_compiler
@BOTH
def test_unlike_stages(topology: str, request: pytest.FixtureRequest) -> None:
    if topology == V6E:
        why = "XLA copies the head's gradient, 1 MiB, to another layout before its sum over devices"
        request.applymarker(pytest.mark.xfail(strict=True, raises=AssertionError, reason=why))

    def layer(params: Any, x: Any) -> Any:
        return stage(jax.tree.map(lambda leaf: leaf[None], params), x)

    layout = "Ettt|tt|ttt|ttL"
    model = jp.Model({"E": first, "t": layer, "L": last}, layers=layout)
    schedule = jp.schedules.build("zb_h1", devices=4, microbatches=8)
    pipe = small_pipeline(model, schedule, topology, layout=layout)
    canonical = jax.eval_shape(layered, shapes(1, layers=10, **SIZES))
    lowered = pipe.lower(pipe.place(canonical), tokens(pipe))
    check_with_slack(read(lowered, topology))


@needs_tpu_compiler
@BOTH
def test_spread_ends(topology: str) -> None:
    def head(params: Any, x: Any, microbatch: Any, *, ctx: jp.Context) -> Any:
        return jp.VocabHead()(params, x, {"targets": microbatch["tokens"]}, ctx=ctx)

    def embed(params: Any, microbatch: Any, *, ctx: jp.Context) -> Any:
        return jp.VocabEmbedding()(params, microbatch, ctx=ctx).astype(jnp.bfloat16)

    schedule = jp.schedules.build("1f1b", devices=4, microbatches=8)
    model = jp.Model(stage, first=jp.spread(embed), last=jp.spread(head))
    pipe = small_pipeline(model, schedule, topology)
    size = (SIZES["vocab"], SIZES["width"])
    canonical = {
        **shapes(4, **SIZES),
        "first": {"table": jax.ShapeDtypeStruct(size, jnp.float32)},
        "last": {"head": jax.ShapeDtypeStruct(size, jnp.float32)},
    }
    lowered = pipe.lower(pipe.place(canonical), tokens(pipe))
    check_with_slack(read(lowered, topology))


@needs_tpu_compiler
@pytest.mark.exhaustive
def test_slices() -> None:
    """A carry, and rows that stages append.  Only their gradients are copied, in B, between tiles
    and layout.
    """
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=8, slices=4)
    pipe, params, batch = gpu_slices.pipeline(schedule, tpu_mesh)
    program, buffer = read(pipe.lower(params, batch)), 4 * gpu_slices.TIME * gpu_slices.WIDTH
    copied = made_again(program)
    assert {each.nbytes for each in copied} <= {buffer}
    assert all("/B chunk 0/" in each.origin and each.place.guarded for each in copied)
    assert len(copied) <= 6
    assert copied_after(program) == []
    permutes = [each for each in program.collectives if each.kind == "collective-permute"]
    assert not any(each.place.guarded for each in permutes)


@needs_tpu_compiler
@BOTH
def test_profile(topology: str) -> None:
    """Blocks call the host at their begin and end."""
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=4)
    pipe = small_pipeline(jp.Model(stage, first=first, last=last), schedule, topology)
    given = (pipe.place(shapes(2, **SIZES)), tokens(pipe))
    check(read(pipe.trace(*given, clock=lambda *_: np.int32(0)).function.lower()))


@needs_tpu_compiler
@BOTH
def test_evaluation(topology: str) -> None:
    schedule = jp.schedules.build("interleaved_1f1b", devices=4, microbatches=8, chunks=2)
    pipe = small_pipeline(jp.Model(stage, first=first, last=last), schedule, topology)
    lowered = jax.jit(pipe.evaluate).lower(pipe.place(shapes(8, **SIZES)), tokens(pipe))
    check_with_slack(read(lowered, topology))


@needs_tpu_compiler
@pytest.mark.exhaustive
def test_the_report_reads_the_program() -> None:
    schedule = jp.schedules.build("1f1b", devices=4, microbatches=8)
    pipe = small_pipeline(jp.Model(stage, first=first, last=last), schedule)
    found = jp.inspect.report(pipe, pipe.place(shapes(4, **SIZES)), tokens(pipe))
    assert found["host_waits"] == 0
    beside, permutes = found["permutes_beside_compute"]
    assert beside == permutes > 0
    assert found["cycles"]["matmuls"] > 0
    assert found["seconds"] > 0
