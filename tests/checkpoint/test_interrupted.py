"""A run that is killed, and a save that is cut off, lose nothing; and what does not fit is told in
one message.
"""

from __future__ import annotations

import os
import shutil
import signal
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from jaxpipe.errors import CheckpointError, JaxpipeError
from tests.checkpoint import runs
from tests.checkpoint.child import KILLED_AFTER
from tests.environment import python
from tests.tolerance import same

ROOT = Path(__file__).parents[2]
STEPS = 7


@cache
def pipe_and_optimizer() -> tuple[jp.Pipeline, optax.GradientTransformation]:
    return runs.pipeline("1f1b", 2, mesh=runs.explicit_mesh(2)), runs.optimizer()


def like() -> Any:
    return runs.start(*pipe_and_optimizer())


def test_a_killed_run_resumes_to_the_same_losses_bit_for_bit(tmp_path: Path) -> None:
    """The child runs the program of this process, compiled by the same compiler for the same
    processor: the same code.
    """
    pipe, tx = pipe_and_optimizer()
    step = runs.stepper(pipe, tx)
    _, whole = runs.run(step, like(), range(STEPS))

    file, folder = tmp_path / "losses", tmp_path / "checkpoints"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    python(
        "-m",
        "tests.checkpoint.child",
        folder,
        file,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        status=-signal.SIGKILL,
    )
    before = [float(line) for line in file.read_text().split()]
    assert before == whole[:KILLED_AFTER]

    with Checkpoints(folder, pipe) as checkpoints:
        number, state = checkpoints.restore(like())
        # The save that was cut off is whole or it is not there.
        assert number in (KILLED_AFTER - 1, KILLED_AFTER)
        _, after = runs.run(step, state, range(number, STEPS))
        assert before[:number] + after == whole
        checkpoints.save(KILLED_AFTER + 1, state)  # what was left half written is in nobody's way
    assert sorted(p.name for p in folder.iterdir())[-1] == str(KILLED_AFTER + 1)


def halves(folder: Path, step: int) -> list[Path]:
    """Step folders as an interrupted save leaves them: under orbax's temporary name, with any part
    of the files.
    """
    found = []
    for i, kept in enumerate((0.0, 0.5, 1.0)):
        copy = folder / f"{step + 1 + i}.orbax-checkpoint-tmp-{i}"
        shutil.copytree(folder / str(step), copy)
        files = sorted(p for p in copy.rglob("*") if p.is_file())
        for file in files[int(kept * len(files)) :]:
            file.unlink()
        found.append(copy)
    return found


def test_half_written_steps_are_not_read_and_not_in_the_way(tmp_path: Path) -> None:
    pipe, _ = pipe_and_optimizer()
    state = like()
    with Checkpoints(tmp_path, pipe) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        left = halves(tmp_path, 1)
        assert checkpoints.latest == 1
    with Checkpoints(tmp_path, pipe) as checkpoints:
        assert checkpoints.steps == (1,)
        number, found = checkpoints.restore(state)
        assert number == 1
        assert same(found, state)
        checkpoints.save(2, state)
    assert not any(path.exists() for path in left)
    with Checkpoints(tmp_path, pipe) as checkpoints:
        assert checkpoints.steps == (1, 2)


def test_everything_of_a_state_comes_back(tmp_path: Path) -> None:
    """Numbers, keys and arrays that belong to no parameter, in place, kind and sharding; the newest
    `keep` stay.
    """
    pipe, _ = pipe_and_optimizer()
    params = like()["params"]
    state = {
        "params": params,
        "key": jax.random.key(7),
        "best": 0.25,
        "epoch": 3,
        "seen": np.arange(3),
        "rate": jnp.float32(0.1),
    }
    with Checkpoints(tmp_path, pipe, keep=1) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {**state, "epoch": step})
        checkpoints.wait()
        assert checkpoints.steps == (20,)
        fresh = {
            **state,
            "key": jax.random.key(0),
            "best": 0.0,
            "epoch": 0,
            "seen": np.zeros(3, int),
            "rate": jnp.float32(0),
        }
        shapes = {
            **fresh,
            "params": jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), params
            ),
        }
        _, found = checkpoints.restore(shapes)
    assert (found["best"], found["epoch"]) == (0.25, 20)
    assert (type(found["best"]), type(found["epoch"])) == (float, int)
    assert list(found["seen"]) == [0, 1, 2]
    assert jax.random.normal(found["key"]) == jax.random.normal(state["key"])
    assert found["rate"] == np.float32(0.1)
    assert found["rate"].sharding.spec == PartitionSpec()
    for ours, theirs in zip(jax.tree.leaves(found["params"]), jax.tree.leaves(params), strict=True):
        assert np.array_equal(ours, theirs)
        assert ours.sharding == theirs.sharding


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    pipe, tx = pipe_and_optimizer()
    state = like()
    with Checkpoints(tmp_path, pipe) as checkpoints:
        with pytest.raises(CheckpointError, match=r"holds no checkpoint; it has steps"):
            checkpoints.restore(state)
        checkpoints.save(3, state)
        checkpoints.wait()
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 2; it has steps \[3\]"):
            checkpoints.restore(state, step=2)
        other = {
            "params": state["params"],
            "opt_state": optax.sgd(0.1, momentum=0.9).init(state["params"]),
        }
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(other)
    # Two moments and a count are there, and one trace is wanted: of five parameters each.
    assert len(caught.value.faults) == 2 * 5 + 1 + 5
    assert (
        "opt_state/0/trace/stages/w: the state wants float64[2, 4, 6, 6], but none was saved"
        in caught.value.faults
    )
    assert issubclass(CheckpointError, JaxpipeError)
    four = runs.pipeline("1f1b", 4)
    with Checkpoints(tmp_path, four) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(runs.start(four, tx))
    assert (
        "params/stages/w: the state wants float64[4, 2, 6, 6], but float64[2, 4, 6, 6] was saved"
        in caught.value.faults
    )
    assert "layer_axis=True" in str(caught.value)


def test_what_stages_keep_comes_back_under_another_schedule(tmp_path: Path) -> None:
    """Batch statistics, say: [S, layers, ...] and one number for each stage; for S = 2 on two
    devices and on one.
    """
    kept = {"mean": np.arange(2.0 * 4 * 3).reshape(2, 4, 3), "count": np.arange(2)}
    found = {}
    for name, devices in (("1f1b", 2), ("interleaved_1f1b", 1)):
        schedule = jp.schedules.build(name, devices=devices, microbatches=2, chunks=2 // devices)
        pipe = runs.pipeline(name, devices, schedule=schedule)
        params, placed = pipe.place(runs.canonical(2)), pipe.place_state(kept)
        with Checkpoints(tmp_path, pipe, layer_axis=True) as checkpoints:
            if checkpoints.latest is None:
                checkpoints.save(1, {"params": params, "state": placed})
            blank = {"params": params, "state": jax.tree.map(jnp.zeros_like, placed)}
            checkpoints.wait()
            _, state = checkpoints.restore(blank)
        assert jax.tree.structure(state["state"]) == jax.tree.structure(placed)
        found[name] = pipe.canonical_state(state["state"])
    for tree in found.values():
        assert np.array_equal(tree["mean"], kept["mean"])
        assert np.array_equal(tree["count"], kept["count"])


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_taken(tmp_path: Path) -> None:
    pipe, _ = pipe_and_optimizer()
    one, two = (
        jax.tree.map(lambda leaf, k=k: leaf + k, pipe.place(runs.canonical(2))) for k in (1, 2)
    )
    with Checkpoints(tmp_path, pipe) as checkpoints:
        checkpoints.save(1, {"params": one})
        checkpoints.save(2, {"params": two})
    for file in (tmp_path / "2" / "about").rglob("*"):
        if file.is_file():
            file.write_text("")  # as a full disk leaves them
    with Checkpoints(tmp_path, pipe) as checkpoints:
        with pytest.raises(CheckpointError, match=r"checkpoint of step 2 .* is damaged"):
            checkpoints.restore({"params": one}, step=2)
        with pytest.warns(
            UserWarning, match="checkpoint of step 2 .* is damaged.*going on from step 1"
        ):
            number, state = checkpoints.restore({"params": one})
        assert number == 1
        assert same(state["params"], one)
        # the step comes again, and takes the damaged one's place
        checkpoints.save(2, {"params": two})
        checkpoints.wait()
        assert checkpoints.restore({"params": one})[0] == 2
    shutil.rmtree(tmp_path / "2" / "state")
    shutil.rmtree(tmp_path / "1" / "state")
    with (
        Checkpoints(tmp_path, pipe) as checkpoints,
        pytest.raises(CheckpointError, match=r"(?s)no checkpoint can be read.*step 2.*step 1"),
    ):
        checkpoints.restore({"params": one})
