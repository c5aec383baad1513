"""On one device a step is one CUDA graph; the benchmark also measures it cut as several devices
have it.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.gpu_single import SIZES, Form, lowered
from jaxpipe.inspect.programs import only, read_graph_nodes
from tests.gpu.programs import gpu_mesh, needs_gpu_compiler
from tests.tiers import slow


@needs_gpu_compiler
@pytest.mark.parametrize(("form", "graphs"), [slow(Form.PREDICATED, 1), slow(Form.IN_PARTS, 5)])
def test_graphs_of_one_trip(form: Form, graphs: int, tmp_path: Path) -> None:
    sizes, mesh = SIZES["tiny"], gpu_mesh((1,), ("pipe",))
    schedule = jp.schedules.build("1f1b", devices=1, microbatches=sizes.microbatches)
    rows = jax.ShapeDtypeStruct(
        (sizes.microbatches * sizes.rows, sizes.context),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec()),
    )
    step, _, predicates = lowered(sizes, schedule, mesh, {"tokens": rows, "targets": rows}, form)
    assert predicates == 2 * sizes.microbatches
    step.compile(compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True})
    text = only(tmp_path, "*.thunk_sequence_after_thunk_passes.txt")
    # In parts: before the loop and behind it, and of a trip the forward, the backward and the rest.
    assert len(re.findall(r"^ *\d+: kCommandBuffer", text, re.MULTILINE)) == graphs
    # Every predicate is in a graph, one in each at most where they are in parts.
    assert len(read_graph_nodes(tmp_path)) >= 2
