"""Placed trees say for which placement they are; another schedule of the same shapes
refuses them.
"""

from __future__ import annotations

import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
import pytest

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from jaxpipe.errors import CheckpointError
from tests.checkpoint import runs
from tests.checkpoint.placements import pipelines
from tests.tolerance import same

# of two devices with two chunks each: shapes are the same, stages are not
SCHEDULES = ("interleaved_1f1b", "zbv")


def test_the_structure_says_it_and_survives(tmp_path: Path) -> None:
    pipes = pipelines()
    loop, vee = (pipes[name].place(runs.canonical(4)) for name in SCHEDULES)
    assert jax.tree.structure(loop) != jax.tree.structure(vee)
    structure = jax.tree.structure(loop)
    assert (
        jax.tree.structure(jax.jit(lambda p: jax.tree.map(lambda leaf: 2 * leaf, p))(loop))
        == structure
    )
    assert jax.tree.structure(jax.device_get(loop)) == structure
    assert jax.tree.structure(pickle.loads(pickle.dumps(jax.device_get(loop)))) == structure
    adam = optax.adam(0.1)
    state = adam.init(loop)
    updates, state = adam.update(loop, state, loop)
    assert (
        jax.tree.structure(optax.apply_updates(loop, updates))
        == jax.tree.structure(state[0].mu)
        == structure
    )
    with pytest.raises(ValueError, match="stages by device"):
        jax.tree.map(lambda a, b: a + b, loop, vee)
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(tmp_path / "raw", loop)
        orbax.wait_until_finished()
        again = orbax.restore(tmp_path / "raw", jax.tree.map(ocp.utils.to_shape_dtype_struct, loop))
    assert jax.tree.structure(again) == structure
    assert same(again, loop)


def test_every_entry_refuses_another_placement(tmp_path: Path) -> None:
    pipes = pipelines()
    pipe, other = (pipes[name] for name in SCHEDULES)
    wrong, rows = other.place(runs.canonical(4)), runs.batch(0)
    says = (
        r"placed for stages by device \{0: 0, 3; 1: 1, 2\}, but this schedule has stages by "
        r"device \{0: 0, 2; 1: 1, 3\}"
    )
    calls: list[Any] = [
        pipe.value_and_grad,
        pipe.loss,
        pipe.evaluate,
        pipe.losses,
        pipe.outputs,
        pipe.lower,
        partial(jp.inspect.report, pipe),
    ]
    for call in calls:
        with pytest.raises(jp.PipelineError, match=says):
            call(wrong, rows)
    with pytest.raises(jp.PipelineError, match=says):
        pipe.canonical(wrong)
    with pytest.raises(jp.PipelineError, match=says):
        jp.debug.find_nonfinite(pipe, wrong, rows)
    with Checkpoints(tmp_path, pipe) as checkpoints:
        with pytest.raises(CheckpointError, match=says):
            checkpoints.save(1, {"params": wrong})
        right = pipe.place(runs.canonical(4))
        with pytest.raises(CheckpointError, match="moments are " + says):
            checkpoints.save(1, {"params": right, "moments": wrong})
    with pytest.raises(
        jp.PipelineError, match=re.escape("placed already; `place` takes canonical ones")
    ):
        pipe.place(right)
    with pytest.raises(jp.PipelineError, match="are not placed"):
        pipe.evaluate({**right, "stages": tuple(right["stages"])}, rows)
