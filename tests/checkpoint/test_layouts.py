"""A run that one schedule saved goes on with any other, with the same losses."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from tests.axes.model import worst_error
from tests.checkpoint import runs
from tests.parity.tolerance import FLOAT64

SAVED, STEPS = 3, 6
# As in tests/axes/test_training.py: each step goes on from the last one's rounding, 1e-12 a step
# added up.
TOLERANCE = STEPS * FLOAT64


@cache
def pipe_of(name: str, devices: int, chunks: int | None = None) -> jp.Pipeline | None:
    return runs.pipeline(name, devices, chunks=chunks) if devices else None


@cache
def whole_run() -> tuple[Any, Any, list[float]]:
    """The state after 3 and after 6 steps, and the losses, of 1F1B on 4 devices."""
    pipe, tx = pipe_of("1f1b", 4), runs.optimizer()
    step = runs.stepper(pipe, tx)
    middle, losses = runs.run(step, runs.start(pipe, tx), range(SAVED))
    end, more = runs.run(step, middle, range(SAVED, STEPS))
    return middle, end, losses + more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    """The checkpoint of 1F1B on 4 devices after 3 steps."""
    path = tmp_path_factory.mktemp("saved")
    with Checkpoints(path, pipe_of("1f1b", 4), layer_axis=True) as checkpoints:
        checkpoints.save(SAVED, whole_run()[0])
    return path


def resumed(folder: Any, pipe: jp.Pipeline | None, stages: int = 1) -> tuple[Any, list[float]]:
    tx = runs.optimizer()
    with Checkpoints(folder, pipe, layer_axis=True) as checkpoints:
        number, state = checkpoints.restore(runs.start(pipe, tx, stages))
    assert number == SAVED
    return runs.run(runs.stepper(pipe, tx), state, range(SAVED, STEPS))


def merged(params: Any, pipe: jp.Pipeline | None) -> Any:
    """Parameters with their layers in model order."""
    tree = params if pipe is None else pipe.canonical(params)
    return {
        **tree,
        "stages": jax.tree.map(lambda a: np.asarray(a).reshape(-1, *a.shape[2:]), tree["stages"]),
    }


def test_the_same_schedule_goes_on_bit_for_bit(folder: Any) -> None:
    state, losses = resumed(folder, pipe_of("1f1b", 4))
    _, end, wanted = whole_run()
    # One pipeline and so one compiled step, on what was saved.
    assert losses == wanted[SAVED:]
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(end), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "devices", "chunks"),
    # 8, 4, 4 and 8 stages, and one that is not cut at all.
    [
        ("interleaved_1f1b", 2, 4),
        ("zbv", 2, None),
        ("dualpipe", 4, None),
        pytest.param("v_min", 4, None, marks=pytest.mark.exhaustive),
        ("plain", 0, None),
    ],
)
def test_another_schedule_goes_on_with_the_same_losses(
    folder: Any, name: str, devices: int, chunks: int | None
) -> None:
    pipe = pipe_of(name, devices, chunks)
    state, losses = resumed(folder, pipe)
    _, end, wanted = whole_run()
    assert worst_error(losses, wanted[SAVED:]) <= TOLERANCE
    assert (
        worst_error(merged(state["params"], pipe), merged(end["params"], pipe_of("1f1b", 4)))
        <= TOLERANCE
    )


def test_losses_depend_on_the_optimizer_state(folder: Any) -> None:
    """The comparison above has teeth: with parameters alone, and moments of zero, the losses
    differ.
    """
    pipe, tx = pipe_of("1f1b", 4), runs.optimizer()
    with Checkpoints(folder, pipe, layer_axis=True) as checkpoints:
        _, state = checkpoints.restore(runs.start(pipe, tx))
    fresh = {**state, "opt_state": tx.init(state["params"])}
    _, losses = runs.run(runs.stepper(pipe, tx), fresh, range(SAVED, STEPS))
    assert worst_error(losses, whole_run()[2][SAVED:]) > 1e-6


def test_another_dtype_of_accumulators_is_named(tmp_path: Any) -> None:
    """Moments have the dtype of gradients."""
    model = jp.Model(lambda p, x: x @ p, last=lambda p, x, microbatch: (x**2).mean())
    table = jp.schedules.build("1f1b", devices=2, microbatches=2)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    canonical = {"stages": np.ones((2, 4, 4), np.float32), "last": {}}

    def state_of(accumulate: str) -> tuple[jp.Pipeline, Any]:
        pipe = jp.Pipeline(model, table, mesh, memory=jp.Memory(accumulate=accumulate))
        params = pipe.place(canonical)
        return pipe, {"params": params, "opt_state": pipe.init(optax.adam(0.1), params)}

    pipe, state = state_of("float64")
    with Checkpoints(tmp_path, pipe) as kept:
        kept.save(1, state)
    pipe, state = state_of("float32")
    with Checkpoints(tmp_path, pipe) as kept, pytest.raises(jp.CheckpointError) as raised:
        kept.restore(state)
    assert "was saved with other dtypes. Moments have those of gradients" in str(raised.value)
    assert "jaxpipe.Memory(accumulate=)" in str(raised.value)
    assert "mu/stages: the state wants float32[2, 4, 4], but float64" in str(raised.value)
