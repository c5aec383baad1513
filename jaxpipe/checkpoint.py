"""Checkpoints in the model's canonical layout: any schedule, number of devices or plain program resumes what another one saved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from .arrays import PyTree
from .errors import CheckpointError
from .pipeline import Pipeline
from .portable import PortableState

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError("jaxpipe.checkpoint needs orbax-checkpoint, which is not installed: pip install 'jaxpipe[checkpoint]'") from error


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are empty, cut off or gone."""


class Checkpoints:
    """The checkpoints of a run: a folder with one for each saved step, of which the newest `keep` stay.

    A state is a dict with parameters under "params" and whatever else the run needs: optimizer state, averages, keys, numbers; under
    "state" what stages keep (`Pipeline.place_state`).  Every tree in it that is laid out like the parameters (an optimizer's
    moments) is written in model order, stages [S, ...].

    Each is written in the background under a temporary name and renamed when it is whole (orbax's atomic commit), so that a run
    that is killed in the middle of a save keeps the one before.  Every process of a run calls every method.

    Args:
        folder: made if it is not there.
        pipe: the pipeline whose states these are; None for a plain program with canonical parameters.
        keep: how many stay; None for all.
        layer_axis: leaves of stages are [S, layers, ...]; they are written as [S * layers, ...], so that a run with another number
            of stages can resume.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> def train(steps):
    ...     start, state = 0, {"params": {"stages": jax.numpy.zeros((2, 3))}}
    ...     with Checkpoints(folder.name, None) as checkpoints:
    ...         if checkpoints.latest is not None:
    ...             start, state = checkpoints.restore(state)
    ...         for step in range(start, steps):
    ...             state = jax.tree.map(lambda leaf: leaf + 1, state)  # a training step
    ...             checkpoints.save(step + 1, state)
    ...     return start, float(state["params"]["stages"][0, 0])
    >>> train(steps=2), train(steps=3)  # the second run goes on where the first stopped
    ((0, 2.0), (2, 3.0))
    >>> folder.cleanup()
    """

    def __init__(self, folder: Path | str, pipe: Pipeline | None, *, keep: int | None = 2, layer_axis: bool = False) -> None:
        self._portable = PortableState(pipe, layer_axis)
        self._damaged: dict[int, str] = {}  # what a resumed run will write again
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(Path(folder).resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """The newest step that was saved whole, or None."""
        steps = self.steps
        return steps[-1] if steps else None

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps that were saved whole, the oldest first."""
        return tuple(sorted(self._manager.all_steps()))

    def save(self, step: int, state: Mapping[str, PyTree]) -> None:
        """Write a state; returns when it is copied, so that its buffers may be donated at once.

        Raises:
            CheckpointError: the state holds something that belongs to the schedule and not to the model; all faults are listed.
        """
        canonical = self._portable.of(state)
        if self._damaged.pop(step, None) is not None:
            self._manager.delete(step)
        about = {"leaves": _leaves(canonical)}
        self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(canonical), about=ocp.args.JsonSave(about)))

    def restore(self, like: Mapping[str, PyTree], *, step: int | None = None) -> tuple[int, dict[str, PyTree]]:
        """(step, state) of the newest or a given step, laid out and spread like `like`.

        Where the newest one is damaged (files that are empty, cut off or gone), a warning names it and the newest whole one is taken.

        Args:
            like: a state of this run: arrays, or ShapeDtypeStructs (`pipe.place` of shapes, `jax.eval_shape(optimizer.init, ...)`).
            step: None for the newest.

        Raises:
            CheckpointError: there is no such step, or it holds another model's state (all differences are listed); no step, or not the
                one that was asked for, can be read.
        """
        target = self._portable.of(jax.tree.map(_shape_of, dict(like)))
        if step is not None:
            return step, self._read(self._step(step), target, like)
        self._step(None)
        self._damaged.clear()
        for found in reversed(self.steps):
            try:
                state = self._read(found, target, like)
            except DamagedCheckpointError as error:
                self._damaged[found] = str(error)
                continue
            if self._damaged:
                warnings.warn(f"{'; '.join(self._damaged.values())}; going on from step {found}, the newest whole one", stacklevel=2)
            return found, state
        raise CheckpointError.listing("no checkpoint can be read", self._damaged.values())

    def wait(self) -> None:
        """Until the last save is whole."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and free what the manager holds."""
        self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Inside

    def _read(self, step: int, target: PyTree, like: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The state of a step; DamagedCheckpointError where its files cannot be read."""
        try:
            stored = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]["leaves"]
        except Exception as error:  # what a damaged file makes orbax raise depends on the file
            raise self._damage(step, error) from error
        self._check(step, _leaves(target), stored)
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))["state"]
        except Exception as error:
            raise self._damage(step, error) from error
        return self._portable.placed(found, like)

    def _damage(self, step: int, error: Exception) -> DamagedCheckpointError:
        text = (str(error).strip().splitlines() or [""])[0][:200]
        return DamagedCheckpointError(
            f"the checkpoint of step {step} in {self._manager.directory} is damaged and cannot be read ({type(error).__name__}: {text})"
        )

    def _step(self, step: int | None) -> int:
        """The step to restore."""
        found = self.latest if step is None else step
        if found is None:
            raise CheckpointError(f"{self._manager.directory} holds no checkpoint; start afresh, or name the folder of an earlier run")
        if found not in self.steps:
            raise CheckpointError(f"{self._manager.directory} holds no checkpoint of step {found}; it has steps {list(self.steps)}")
        return found

    def _check(self, step: int, wanted: Mapping[str, list[Any]], stored: Mapping[str, list[Any]]) -> None:
        """CheckpointError listing every leaf that differs."""
        faults = [f"{name}: {_aval(stored[name])} was saved, but the state has none" for name in stored if name not in wanted]
        faults += [f"{name}: the state wants {_aval(wanted[name])}, but none was saved" for name in wanted if name not in stored]
        both = [name for name in wanted if name in stored and wanted[name] != stored[name]]
        faults += [f"{name}: the state wants {_aval(wanted[name])}, but {_aval(stored[name])} was saved" for name in both]
        if not faults:
            return
        hint = ""
        if not self._portable.layer_axis and any("stages" in name.split("/") for name in both):
            hint = "\n(another number of stages can resume only where both runs say Checkpoints(..., layer_axis=True))"
        where = f"step {step} of {self._manager.directory} was saved by another model or optimizer:\n"
        raise CheckpointError(where + "\n".join(f"  {f}" for f in faults) + hint, tuple(faults))


def _leaves(canonical: PyTree) -> dict[str, list[Any]]:
    """Path -> [dtype, shape] of every leaf, as JSON keeps it."""
    leaves = jax.tree_util.tree_leaves_with_path(canonical)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): [str(leaf.dtype), list(leaf.shape)] for path, leaf in leaves}


def _aval(entry: list[Any]) -> str:
    return f"{entry[0]}{entry[1]}"


def _shape_of(leaf: Any) -> Any:
    """An array without its numbers; numbers as they are."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if isinstance(leaf, jax.Array) else leaf
