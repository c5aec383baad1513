"""A plan for a mesh of described GPUs is of the program that its `Pipeline` has there."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe.inspect.step_report import step_time
from jaxpipe.lowering.target import GUESSED
from tests.gpu.programs import gpu_mesh, needs_gpu_compiler

LAYERS = {"t": lambda w, x: jnp.tanh(x @ w), "L": lambda p, x, mb: jnp.mean(x**2)}


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("shape", "names", "options"),
    [
        ((2,), ("pipe",), {}),
        ((2, 2), ("pipe", "data"), {"data_axes": ("data",)}),
        ((2, 2), ("stages", "tensor"), {"axis": "stages"}),
    ],
)
def test_a_plan_is_of_the_program_that_runs(
    shape: tuple[int, ...], names: tuple[str, ...], options: dict[str, Any]
) -> None:
    """For stages so short that what predicates take decides: those of blocks that communicate are
    the host's.
    """
    mesh = gpu_mesh(shape, names)
    cost, loss = (
        jp.LayerCost(forward=2e-4, input_grad=2e-4, weight_grad=2e-4),
        jp.LayerCost(forward=1e-4, input_grad=1e-4, weight_grad=0),
    )
    given: dict[str, Any] = {
        "devices": 2,
        "microbatches": 4,
        "schedules": ("zbv",),
        "chunks": (2,),
        "remat": (None,),
    }
    # A hop as long as where nothing is known of it, so that seconds compare too.
    (plan,) = jp.plan(
        "ttttL", {"t": cost, "L": loss}, transfer=GUESSED.hop, mesh=mesh, **given, **options
    )
    tensor = "tensor" in names
    model = jp.Model(LAYERS, layers="ttttL")
    replicated = ("tensor",) if tensor else ()
    sharding = jp.Sharding(pipe=plan.axis, data=plan.data_axes, replicated=replicated)
    pipe = plan.pipeline(model, mesh, sharding=sharding)
    took = step_time(pipe._steps.plan, pipe._target.overheads, pipe.costs)
    assert plan.seconds == took["seconds"]
    alone = plan.pipeline(model, gpu_mesh((2,), ("pipe",)), sharding=jp.Sharding())
    assert (pipe._steps.plan == alone._steps.plan) == (not tensor), (
        "where blocks communicate, another program is chosen"
    )
