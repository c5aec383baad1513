"""Meshes, fsdp and specs that do not fit get an error that names the fault and says what to write
instead.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

import jaxpipe as jp
from tests.axes.model import batch, build, canonical, mesh, pipeline
from tests.refused import refused


def raises(*parts: str) -> Any:
    """A PipelineError whose text holds all of these, in any order."""
    return refused("(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts))


def test_an_axis_along_which_all_would_do_the_same_is_refused() -> None:
    specs = {"stages": {"w": PartitionSpec(None, "tensor")}}
    with raises(
        "mesh axis 'data' is in no argument, so its 2 devices would all do the same work",
        "replicated='data'",
    ):
        pipeline(build("1f1b"), specs=specs, replicated_axes=())
    for options in (
        {"specs": specs, "data_axes": "data"},
        {"data_axes": ("data", "tensor")},
        {"replicated_axes": ("data", "tensor")},
    ):
        assert (
            pipeline(build("1f1b"), **{"replicated_axes": (), **options}).mesh.axis_names
            == mesh().axis_names
        )


def test_fsdp_is_no_data_axis() -> None:
    with raises("fsdp='data' must be one of data=()", "different rows"):
        pipeline(build("1f1b"), fsdp="data")
    with raises("fsdp='tensor' must be one of data=('data',)"):
        pipeline(build("1f1b"), fsdp="tensor", data_axes=("data",))


def test_data_axes_that_the_mesh_does_not_have() -> None:
    with raises("no data axis 'dp'", "{'pipe': 2, 'data': 2, 'tensor': 2}"):
        pipeline(build("1f1b"), data_axes=("dp",))
    with raises("'pipe' is the pipe axis"):
        pipeline(build("1f1b"), data_axes=("pipe",))
    with raises("no replicated axis 'dp'", "Sharding(replicated=)"):
        pipeline(build("1f1b"), replicated_axes=("data", "tensor", "dp"))


def place(specs: Any, **options: Any) -> None:
    pipeline(build("1f1b"), specs=specs, **options).place(canonical(2))


def test_all_faults_of_specs_are_listed() -> None:
    specs = {
        "stage": {"w": PartitionSpec(None, "tensor")},
        "stages": {
            "w": PartitionSpec(None, None, "tensor"),
            "b": PartitionSpec("model"),
            "odd": PartitionSpec("tensor"),
            "x": None,
        },
        "first": {"embed": PartitionSpec("pipe")},
        "last": PartitionSpec("data"),
    }
    with pytest.raises(jp.PipelineError) as caught:
        place(specs, data_axes=("data",))
    parts = (
        "specs has a key 'stage'; its keys are those of the parameters, ['first', 'last', "
        "'stages']",
        f"first/embed: {PartitionSpec('pipe')} names the pipe axis 'pipe'",
        f"last/head: {PartitionSpec('data')} names the data axis 'data'; fsdp='data' splits "
        "parameters over it",
        f"stages/b: {PartitionSpec('model')} names an axis 'model' that the mesh does not have; "
        f"its axes are {dict(mesh().shape)}",
        "stages/odd: dim 0 of shape (3,) does not divide over 'tensor', which has 2 devices",
        f"stages/w: {PartitionSpec(None, None, 'tensor')} has 3 entries for a parameter of shape "
        "(8, 16) (leave the stage axis out)",
        "stages: specs name 'x', but the parameters are ['b', 'gain', 'odd', 'v', 'w']",
    )
    faults = caught.value.faults
    assert len(faults) == len(parts)
    assert all(any(part in fault for fault in faults) for part in parts), faults
    assert all(fault in str(caught.value) for fault in faults)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tensor", "specs must hold PartitionSpecs or None; got 'tensor'"),
        (PartitionSpec("tensor", "tensor"), "names 'tensor' more than once"),
        (PartitionSpec(("tensor", "data"), "tensor"), "names 'tensor' more than once"),
        (
            PartitionSpec(PartitionSpec.UNCONSTRAINED),
            "names an axis UNCONSTRAINED that the mesh does not have",
        ),
    ],
)
def test_a_spec_of_the_wrong_form(spec: Any, message: str) -> None:
    with raises("stages/w", message):
        place({"stages": {"w": spec}})


def test_specs_may_be_few_or_one_for_many() -> None:
    """What no spec names is whole; a spec above several parameters holds for all of them."""
    whole = pipeline(build("1f1b"), specs={"last": {}}).place(canonical(2))
    assert whole["stages"][0]["w"].sharding.spec == PartitionSpec("pipe")
    some = pipeline(
        build("1f1b"),
        specs={"stages": {"v": PartitionSpec("tensor")}, "last": PartitionSpec(None, "tensor")},
    )
    placed = some.place(canonical(2))
    assert placed["stages"][0]["v"].sharding.spec == PartitionSpec("pipe", "tensor")
    assert placed["stages"][0]["w"].sharding.spec == PartitionSpec("pipe")
    assert placed["last"]["head"].sharding.spec == PartitionSpec(None, "tensor")


def test_rows_must_divide_over_the_shards_too() -> None:
    pipe = pipeline(build("1f1b", 4), data_axes=("data",))
    params = pipe.place(canonical(2))
    rows = jax.tree.map(lambda leaf: leaf[:12], batch(4))
    with raises(
        "has 12 rows, which do not divide into 4 microbatches x 2 data shards; use 16 rows"
    ):
        pipe.value_and_grad(params, rows)
