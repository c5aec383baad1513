"""The GPU program of examples/moe.py: its all-to-alls run next to matmuls of the other half, and
gradients are summed once a step.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import jaxpipe as jp
import moe
from jaxpipe.inspect.hlo import Collective, Compute
from jaxpipe.inspect.programs import GpuProgram, compile_and_read
from llama_parts.model import Remat
from moe_parts.model import MoE
from moe_parts.sizes import Mixture, Routing
from tests.gpu.programs import gpu_mesh, needs_gpu_compiler
from tests.gpu.test_pairs import made_again, of_pairs
from tests.tiers import exhaustive, slow

ROWS, TOKENS, MICROBATCHES, LAYERS = 2, 1024, 8, 8
SIZES = Mixture(LAYERS, 512, 4, 2, 1024, 512, routing=Routing(8, 2, 704, 704))


def program(name: str, *, dense: int = 0, **fields: Any) -> GpuProgram:
    """The step of a small model on pipe 2 x expert 2, with so many first layers without experts."""
    schedule = jp.schedules.build(name, devices=2, microbatches=MICROBATCHES)
    mesh = gpu_mesh((2, 2), ("pipe", "expert"))
    model = MoE(dataclasses.replace(SIZES, dense=dense), jnp.bfloat16, expert="expert", **fields)
    layers, each = "d" * dense + "t" * (LAYERS - dense), LAYERS // schedule.num_stages
    layout = f"E{'|'.join(layers[i : i + each] for i in range(0, LAYERS, each))}L"
    pipe = jp.Pipeline(
        model.pipeline_model(layout),
        schedule,
        mesh,
        layout=layout,
        sharding=jp.Sharding(data="expert", local="expert", specs=model.specs()),
    )
    rows = NamedSharding(mesh, PartitionSpec("expert"))
    shape = (2 * ROWS * MICROBATCHES, TOKENS)
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
        for name, dtype in (("tokens", "int32"), ("targets", "int32"), ("weights", "float32"))
    }
    return compile_and_read(pipe.lower(pipe.place(model.shapes()), batch))


@needs_gpu_compiler
@pytest.mark.parametrize("name", [slow("1f1b_overlap"), exhaustive("dualpipev")])
def test_all_to_alls_run_next_to_matmuls_of_the_other_half(name: str) -> None:
    found = program(name, capacity=1.0)
    collectives = of_pairs(found, "all-to-all")
    assert len(collectives) >= 4
    assert 4 * sum(c.compute is Compute.MATMUL for c in collectives) >= 3 * len(collectives)
    # gradients are summed after the loop: no reduction of several devices is in it
    looped = [c for c in found.collectives if c.place.in_loop]
    assert [str(c) for c in looped if c.kind in ("all-reduce", "reduce-scatter")] == []
    assert made_again(found, over=2 * ROWS * TOKENS * SIZES.width) == []


def in_scope(found: GpuProgram, scope: str, kind: str = "all-to-all") -> list[Collective]:
    """The collectives in the code of a block, by its scope's name."""
    return [c for c in found.collectives if c.kind == kind and scope in c.start.attributes]


@needs_gpu_compiler
@pytest.mark.slow
def test_a_weight_gradient_hides_the_all_to_alls_of_a_forward() -> None:
    """In ZB-H1, where nothing is paired in the table."""
    found = program("zb_h1", capacity=1.0)
    hidden = in_scope(found, "F.0 with W.0")
    assert len(hidden) >= 2
    assert [str(c) for c in hidden if c.compute is not Compute.MATMUL] == []
    # the measure can fail: in a forward alone what is sent is needed by the next matmul
    assert any(c.compute is not Compute.MATMUL for c in in_scope(found, "/F chunk 0/"))
    assert made_again(found, over=2 * ROWS * TOKENS * SIZES.width) == []


@needs_gpu_compiler
@pytest.mark.exhaustive
def test_pairs_of_stages_with_dense_layers_are_pairs() -> None:
    found = program("1f1b_overlap", dense=1, capacity=1.0)
    collectives = in_scope(found, "F.0 with B.0")
    assert len(collectives) >= 8  # of both kinds of stages
    assert 4 * sum(c.compute is Compute.MATMUL for c in collectives) >= 3 * len(collectives)


@needs_gpu_compiler
@pytest.mark.exhaustive
def test_what_is_exchanged_and_kept_is_not_sent_again() -> None:
    """Two all-to-alls of a forward and two of a backward, without those of a recomputed forward."""
    found = program("1f1b_overlap", capacity=1.0, remat=Remat.EXCHANGED)
    collectives = of_pairs(found, "all-to-all")
    assert [c.compute for c in collectives] == 4 * [Compute.MATMUL]


@needs_gpu_compiler
@pytest.mark.exhaustive
def test_without_a_capacity_routed_tokens_alone_are_sent() -> None:
    """By ragged all-to-alls: no device gets the rows of all others."""
    found = program("1f1b", ragged=True)
    looped = [c for c in found.collectives if c.place.in_loop]
    assert len([c for c in looped if c.kind == "ragged-all-to-all"]) >= 4
    rows = 2 * ROWS * TOKENS * SIZES.width
    gathered = [c for c in looped if c.kind == "all-gather" and c.start.nbytes >= rows]
    assert [str(c) for c in gathered] == []


@needs_gpu_compiler
def test_the_example_sends_ragged_parts_on_gpus_without_a_capacity() -> None:
    args = moe.parser().parse_args(["--dtype", "bfloat16"])
    names = ("pipe", "data", "expert", "tensor")
    gpus = gpu_mesh((2, 2, 2, 1), names)
    cpus = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2, 1), names)
    assert [moe.build(args, mesh)[0].ragged for mesh in (gpus, cpus)] == [True, False]
