"""A save that fails (a full disk, a quota, a folder that cannot be written) is told, is no
checkpoint, and is in nobody's way.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jaxpipe.checkpoint import Checkpoints
from jaxpipe.errors import CheckpointError

# Of an error, orbax leaves coroutines that are never awaited.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning"
)
MEBIBYTE = 2**20
LARGE = np.random.default_rng(0).random((2, MEBIBYTE // 8))  # random, so that it cannot be packed


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What orbax leaves is told of here, and not in another test."""
    yield
    gc.collect()


def state_of(step: int, *, large: bool = False) -> dict[str, Any]:
    return {"params": {"stages": jnp.asarray(LARGE if large else np.full((2, 3), float(step)))}}


@contextmanager
def full_disk() -> Iterator[None]:
    """No file grows beyond a mebibyte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEBIBYTE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_and_wait(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, state_of(step))
    checkpoints.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("must_save", [True, False])
def test_a_save_that_fails_leaves_the_others_and_the_next_one_works(
    tmp_path: Path, must_save: bool
) -> None:
    told = (
        rf"step 3 was not saved in {tmp_path} \(.*\"{tmp_path}/3\.orbax-checkpoint-tmp/.*File "
        r"too large.*steps \[1, 2\] stay"
    )
    with Checkpoints(tmp_path, None, must_save=must_save) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step))
        checkpoints.wait()
        with full_disk():
            checkpoints.save(3, state_of(3, large=True))
            assert checkpoints.latest == 2  # it was never whole
            with (
                pytest.raises(CheckpointError, match=told)
                if must_save
                else pytest.warns(UserWarning, match=told)
            ):
                checkpoints.wait()
        assert checkpoints.steps == (1, 2)
        checkpoints.wait()  # it is told once
        checkpoints.save(4, state_of(4))
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.restore(state_of(0))[1]["params"]["stages"][0, 0] == 4.0
        checkpoints.save(5, state_of(5))
    # what was half written is gone, and no more are kept than were asked for
    assert names(tmp_path) == ["4", "5"]


@pytest.mark.parametrize("must_save", [True, False])
def test_the_next_save_tells_of_the_one_before(tmp_path: Path, must_save: bool) -> None:
    """Where it has to be saved, the next one has not begun, and is made by calling again; else the
    warning does not stop it.
    """
    checkpoints = Checkpoints(tmp_path, None, must_save=must_save)
    checkpoints.save(1, state_of(1))
    checkpoints.wait()
    with full_disk():
        checkpoints.save(2, state_of(2, large=True))
        while checkpoints._manager._finalize_thread.get_not_none().is_alive():
            pass
    if must_save:
        with pytest.raises(CheckpointError, match="step 2 was not saved"):
            checkpoints.save(3, state_of(3))
        checkpoints.save(3, state_of(3))
    else:
        with pytest.warns(UserWarning, match="step 2 was not saved"):
            checkpoints.save(3, state_of(3))
    checkpoints.close()
    assert checkpoints.steps == (1, 3)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_an_error_of_the_system_without_a_file_is_told_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    checkpoints = Checkpoints(tmp_path, None)
    checkpoints.save(1, state_of(1))
    checkpoints.wait()
    with monkeypatch.context() as patched:
        patched.setattr(type(epath.Path(tmp_path)), "write_text", fails)
        with pytest.raises(
            CheckpointError, match=rf"step 2 was not saved in {tmp_path} .*{os.strerror(number)}"
        ):
            save_and_wait(checkpoints, 2)
    assert checkpoints.steps == (1,)
    # what of the failed one is still being written is in nobody's way
    checkpoints.save(3, state_of(3))
    checkpoints.close()
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.steps == (1, 3)


def test_the_last_save_of_a_run_is_told_too(tmp_path: Path) -> None:
    with (
        full_disk(),
        pytest.raises(CheckpointError, match="step 1 was not saved"),
        Checkpoints(tmp_path, None) as checkpoints,
    ):
        checkpoints.save(1, state_of(1, large=True))
    assert Checkpoints(tmp_path, None).latest is None


def test_a_folder_that_cannot_be_made_or_is_gone_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below", Path("/proc/jaxpipe")):
        with pytest.raises(CheckpointError, match=f"{path} cannot be a folder of checkpoints"):
            Checkpoints(path, None)
    folder = tmp_path / "folder"
    checkpoints = Checkpoints(folder, None)
    shutil.rmtree(folder)
    folder.write_text("")
    with pytest.raises(CheckpointError, match="step 1 was not saved"):
        save_and_wait(checkpoints, 1)


def test_arrays_of_size_0_are_named_before_orbax_refuses_them(tmp_path: Path) -> None:
    stages: dict[str, Any] = {"w": jnp.ones((2, 3)), "bias": jnp.ones((2, 0))}
    state = {"params": {"stages": stages}}
    with Checkpoints(tmp_path, None) as checkpoints:
        with pytest.raises(
            CheckpointError,
            match=r"(?s)of size 0; put None in their place.*params/stages/bias is float64\[2, 0\]",
        ):
            checkpoints.save(1, state)
        stages["bias"] = None
        checkpoints.save(1, state)
        assert checkpoints.restore(state)[1]["params"]["stages"]["bias"] is None


def test_no_save_is_left_out_silently(tmp_path: Path) -> None:
    """Steps that do not grow, as after going on from an older checkpoint, are refused; the same
    step again is there already.
    """
    with Checkpoints(tmp_path, None) as checkpoints:
        for step in (2, 5):
            checkpoints.save(step, state_of(step))
        with pytest.raises(
            CheckpointError, match=f"step 3 cannot be saved after step 5, which {tmp_path} has"
        ):
            checkpoints.save(3, state_of(3))
        checkpoints.save(5, state_of(6))
        # also while a save runs
        assert checkpoints.restore(state_of(0))[1]["params"]["stages"][0, 0] == 5.0
        for wrong in (-1, 2.5, True, "7"):
            with pytest.raises(CheckpointError, match="a step is a whole number from 0 on"):
                checkpoints.save(wrong, state_of(1))  # type: ignore[arg-type]
    (tmp_path / "5" / "about" / "metadata").unlink()
    with Checkpoints(tmp_path, None) as checkpoints:
        with pytest.warns(UserWarning, match="step 5 .* is damaged"):
            assert checkpoints.restore(state_of(0))[0] == 2
        checkpoints.save(3, state_of(3))  # the damaged one is not in its way
    assert names(tmp_path) == ["2", "3"]
