"""Gathers and reductions of a step run beside matmuls that take longer, and no whole parameter or
gradient is copied.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp
from jaxpipe.doctor.steps import GPU_FLOPS
from jaxpipe.inspect.hlo import Collective, issued, kind_of
from jaxpipe.inspect.programs import GpuProgram, compile_and_read
from jaxpipe.program.ir import NOBODY
from jaxpipe.spmd.emit import SpmdExecutor
from jaxpipe.transforms import Reduce
from tests.forms import APART
from tests.gpu.programs import gpu_marks, gpu_mesh

pytestmark = gpu_marks()
DEVICES, SHARDS, CHUNKS, MICROBATCHES, TIME = 2, 4, 3, 4, 4096
WIDTH, HIDDEN = 544, 1312  # of no other array
# Of an H100 SXM: bfloat16 products, and bytes a second in one direction of NVLink (its data sheet).
FLOPS, LINK = GPU_FLOPS["H100"], 4.5e11
KINDS = {"forward": "F", "backward": "B"}  # of actions -> in the names of the compiled program


def stage(params: Any, x: Any) -> Any:
    hidden = jax.nn.gelu(x @ params["up"].astype(x.dtype))
    return x + hidden @ params["down"].astype(x.dtype)


def last(_: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(jnp.square(x - microbatch["y"]).astype(jnp.float32))


@cache
def pipeline(max_active: int | None) -> jp.Pipeline:
    plain = jp.schedules.build(
        "interleaved_1f1b", devices=DEVICES, microbatches=MICROBATCHES, chunks=CHUNKS
    )
    schedule = jp.add_gathers(plain, max_active=max_active, reduce=Reduce.EACH_RUN)
    mesh = gpu_mesh((DEVICES, SHARDS), ("pipe", "data"))
    sharding = jp.Sharding(data="data", fsdp="data")
    executor = SpmdExecutor(form=APART)  # as for larger slots
    return jp.Pipeline(
        jp.Model(stage, last=last), schedule, mesh, sharding=sharding, executor=executor
    )


@cache
def program(max_active: int | None) -> GpuProgram:
    pipe, count = pipeline(max_active), DEVICES * CHUNKS
    shapes = {"up": (count, WIDTH, HIDDEN), "down": (count, HIDDEN, WIDTH)}
    stages = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    rows = jax.ShapeDtypeStruct((MICROBATCHES * SHARDS, TIME, WIDTH), jnp.bfloat16)
    params = pipe.place({"stages": stages, "last": {}})
    return compile_and_read(pipe.lower(params, {"x": rows, "y": rows}))


def matmul_seconds(each: Collective) -> float:
    """Of the matmuls between its start and its done.

    There is a copy of the block for each slot of residuals, of which one runs: the fewest matmuls
    of any.  Every matmul of this model is of [TIME, WIDTH] and [WIDTH, HIDDEN], or of two others of
    its three matrices.
    """
    module = program(2).module
    counts = [
        sum(runs for own, runs in issued(module, instruction) if "dot" in module.opcodes(own))
        for instruction in each.between
    ]
    return min(filter(None, counts), default=0) * 2 * TIME * WIDTH * HIDDEN / FLOPS


def link_seconds(each: Collective) -> float:
    """Its results are all, and the part of a device, which has that already."""
    return each.start.nbytes * (SHARDS - 1) / (SHARDS + 1) / LINK


def beside(link: str) -> list[tuple[str | None, bool]]:
    """For each gather, or reduction, of a step on any device: the kind of action beside which it
    runs, that of its tick and device in the other room; and whether its room has both then.
    """
    ticks = pipeline(2)._steps.plan.program().ticks
    (links,) = ticks.links
    found = list[tuple[str | None, bool]]()
    for room in range(2):
        gathers, reductions = (links.columns[f"{name}_{room}"] for name in ("gather", "reduce"))
        for at in map(tuple, np.argwhere(links.columns[f"{link}_{room}"] != NOBODY)):
            kinds = [KINDS[kind] for kind, row in ticks.actions if row.chunk[at] == 1 - room]
            both = NOBODY not in (gathers[at], reductions[at])
            found.append((kinds[0] if kinds else None, both))
    return found


def test_matmuls_that_take_longer_are_between_the_start_and_the_done() -> None:
    """Shares of the bytes that are gathered, or reduced, in a step: all stages are equal, so each
    time has the same bytes.
    """
    blocks = defaultdict[str, list[Collective]](list)
    for each in program(2).collectives:
        if each.kind in ("all-gather", "reduce-scatter"):
            blocks[each.place.computation.name].append(each)
    # A gather and a reduction beside one forward share the link, and take longer than its matmuls:
    # 4.8 + 9.5 us, and 11.8 us.  So the second share, of those that end with all links of their
    # block, is smaller.
    for kind, link, shares in (
        ("all-gather", "gather", {False: 14 / 16, True: 11 / 16}),
        ("reduce-scatter", "reduce", {False: 8 / 11, True: 5 / 11}),
    ):
        for together, share in shares.items():
            hidden = dict[tuple[str | None, bool], bool]()
            for own in blocks.values():
                for each in (each for each in own if each.kind == kind):
                    key = kind_of(each.start), len(own) == 2
                    seconds = sum(map(link_seconds, own if together else [each]))
                    hidden[key] = hidden.get(key, True) and matmul_seconds(each) >= seconds
            assert np.mean([hidden[key] for key in beside(link)]) >= share, (kind, hidden)
    once = [each for each in program(None).collectives if each.kind == "all-gather"]
    assert not any(each.overlapped for each in once), "before the first tick there is no matmul"


def test_no_whole_parameter_and_no_whole_gradient_is_copied() -> None:
    computations = program(2).module.computations
    instructions = [i for own in computations.values() for i in own.instructions]
    by_name = {i.name: i for i in instructions}
    whole = {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}
    copies = [
        i
        for i in instructions
        if i.opcode == "copy"
        and tuple(d for d in i.results[0].dims if d > 1) in whole
        and by_name[i.operands[0]].opcode not in ("broadcast", "constant")  # what is empty at first
    ]
    assert copies == []
