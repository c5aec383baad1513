"""How the partitioner splits what stages store is asked of its propagation alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

from benchmarks.gpu_programs import Axes, Case, Remat
from jaxpipe.spmd import xla
from jaxpipe.stage.setup import Setup
from jaxpipe.table.effects import Place
from tests.gpu.programs import gpu_mesh, needs_gpu_compiler
from tests.tiers import exhaustive, slow


def of_compiled(setup: Setup, function: Callable[..., Any], *groups: Any) -> list[PartitionSpec]:
    """The splits in the optimised program."""
    found = xla.compiled_alone(setup, function, *groups).output_shardings
    return [each.spec for each in found]


def found_entries(case: Case) -> Sequence[xla.StageEntries]:
    pipe, params, rows = case.arguments(gpu_mesh)
    return pipe.trace(params, rows).entries


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("name", "remat"), [slow("1f1b", Remat.NOTHING), exhaustive("zb_h1", Remat.LAYER)]
)
def test_the_answer_is_that_of_the_optimised_program(
    name: str, remat: Remat, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(name, devices=2, microbatches=4, axes=Axes.TENSOR, remat=remat)
    found = found_entries(case)
    stored = [
        kind.stored[place] for kind in found for place in (Place.RESIDUAL_WEIGHT, Place.STASH)
    ]
    assert any(entry.parts for entries_of_place in stored for entry in entries_of_place)
    monkeypatch.setattr(xla, "_output_specs", of_compiled)
    assert found_entries(case) == found


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ('{"a", "b"}, {}', PartitionSpec(("a", "b"), None)),
        ('{}, {"b"}', PartitionSpec(None, "b")),
        ('{"b":(1)2}, {}', PartitionSpec()),
    ],
)
def test_a_dim_on_a_part_of_an_axis_is_whole(split: str, wanted: PartitionSpec) -> None:
    with jax.jit(jax.numpy.sin).lower(1.0).compiler_ir("stablehlo").context:
        found = xla.ir.Attribute.parse(f"#sdy.sharding<@mesh, [{split}]>")
        assert xla._spec_of(xla.sdy.TensorShardingAttr(found)) == wanted
