"""The checkpoints of a run: a folder with one for each saved step."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import jax

from ..arrays import by_path
from ..errors import CheckpointError, is_whole, quoted
from ..model.settings import with_sharding
from ..pipeline import Pipeline
from .portable import PortableState, RunState

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        "jaxpipe.checkpoint needs orbax-checkpoint, which is not installed: pip install "
        "'jaxpipe[checkpoint]'"
    ) from error


StoredLeaves: TypeAlias = dict[str, list[object]]  # by path
_LAYERS = 3  # of orbax, that keep an error of the last save each, and raise it when they are closed


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are empty, cut off or gone."""


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints of a run: a folder with one for each saved step, of which the newest `keep`
    stay.

    A state is a dict with parameters under "params" and whatever else the run needs: optimizer
    state, averages, keys, numbers; under "state" what stages keep (`Pipeline.place_state`).  Every
    tree in it that is laid out like the parameters (an optimizer's moments) is written in model
    order, stages [S, ...].

    Each is written in the background under a temporary name and renamed when it is whole (orbax's
    atomic commit), so that a run that is killed in the middle of a save keeps the one before.
    Every process of a run calls every method.  A save that fails (a full disk, say) is reported by
    the next `save`, `wait` or `close`, and the run may go on and save again.

    Args:
        folder: made if it is not there.
        pipe: the pipeline whose states these are; None for a plain program with canonical
            parameters.
        keep: how many stay; None for all.
        layer_axis: leaves of stages are [S, layers, ...]; they are written as [S * layers, ...], so
            that a run with another number of stages can resume.
        must_save: False: a save that fails only warns, so that training goes on without it.

    Raises:
        CheckpointError: the folder cannot be made.

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

    def __init__(
        self,
        folder: Path | str,
        pipe: Pipeline | None,
        *,
        keep: int | None = 2,
        layer_axis: bool = False,
        must_save: bool = True,
    ) -> None:
        self._portable = PortableState(None if pipe is None else pipe.partition, layer_axis)
        self._damaged: dict[int, str] = {}  # what a resumed run will write again
        self._must_save = must_save
        self._writing: int | None = None  # the step whose save began last, until it is waited for
        self._keep = keep
        self._folder = Path(folder).resolve()
        try:
            self._manager = self._opened()
        except OSError as error:
            raise CheckpointError(
                f"{self._folder} cannot be a folder of checkpoints ({_reason(error)}); name one "
                "that can be made"
            ) from error

    @property
    def latest(self) -> int | None:
        """The newest step that was saved whole, or None."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps that were saved whole, the oldest first."""
        steps = sorted(self._manager.all_steps())
        return tuple(s for s in steps if s != self._writing or (self._folder / str(s)).exists())

    def save(self, step: int, state: RunState) -> None:
        """Write a state; returns when it is copied, so that its buffers may be donated at once.  A
        step that exists already stays unchanged.

        Raises:
            CheckpointError: the state holds something that belongs to the schedule and not to the
                model, or arrays of size 0 (all faults are listed); this step cannot follow the
                existing ones; this save failed; or the one before it failed, and this one has not
                begun.
        """
        self.wait()
        canonical = self._portable.of(state)
        leaves = _leaves(canonical)
        CheckpointError.refuse(
            "orbax writes no arrays of size 0; put None in their place, or leave out the "
            "parameters that they belong to",
            [f"{n} is {_aval(leaves[n])}" for n, a in by_path(canonical).items() if 0 in a.shape],
        )
        if not is_whole(step) or step < 0:
            raise CheckpointError(f"a step is a whole number from 0 on, but got {quoted(step)}")
        for damaged in [found for found in self._damaged if found >= step]:
            del self._damaged[damaged]
            self._manager.delete(damaged)
        if step in self.steps:
            return
        if self.latest is not None and step < self.latest:
            raise CheckpointError(
                f"step {step} cannot be saved after step {self.latest}, which {self._folder} has; "
                f"delete what comes after step {step} there, or name another folder"
            )
        self._sweep()
        self._writing = step
        with self._reporting_failure():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(canonical),
                    about=ocp.args.JsonSave({"leaves": leaves}),
                ),
            )

    def restore(self, like: RunState, *, step: int | None = None) -> tuple[int, RunState]:
        """(step, state) of the newest or a given step, laid out and spread like `like`.

        Where the newest one is damaged (files that are empty, cut off or gone), a warning names it
        and the newest whole one is taken.

        Args:
            like: a state of this run: arrays, or ShapeDtypeStructs (`pipe.place` of shapes,
                `jax.eval_shape(optimizer.init, ...)`).
            step: None for the newest.

        Raises:
            CheckpointError: there is no such step, or it holds another model's state (all
                differences are listed); no step, or not the one that was asked for, can be read; or
                the last save failed.
        """
        self.wait()
        target = self._portable.of(jax.tree.map(_shape_of, dict(like)))
        if step is not None and step in self.steps:
            return step, self._read(step, target, like)
        if step is not None or not self.steps:
            what = "" if step is None else f" of step {step}"
            raise CheckpointError(
                f"{self._folder} holds no checkpoint{what}; it has steps {list(self.steps)}: start "
                "afresh, or name the folder of an earlier run"
            )
        self._damaged.clear()
        for found in reversed(self.steps):
            try:
                state = self._read(found, target, like)
            except DamagedCheckpointError as error:
                self._damaged[found] = str(error)
                continue
            if self._damaged:
                warnings.warn(
                    f"{'; '.join(self._damaged.values())}; going on from step {found}, the "
                    "newest whole one",
                    stacklevel=2,
                )
            return found, state
        raise CheckpointError.listing("no checkpoint can be read", self._damaged.values())

    def wait(self) -> None:
        """Until the last save is whole.

        Raises:
            CheckpointError: it failed.
        """
        with self._reporting_failure():
            self._manager.wait_until_finished()
        self._writing = None

    def close(self) -> None:
        """Wait, and free what the manager holds.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def __exit__(self, *_error: object) -> None:
        self.close()

    # Inside

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        """Where a save may fail: says so, removes what it has written, which may fill the disk, and
        begins again.
        """
        try:
            yield
        except Exception as error:
            # what a file that cannot be written makes orbax raise depends on the file
            for _ in range(_LAYERS):
                with suppress(Exception):
                    self._manager.close()
            self._sweep()
            with suppress(OSError):
                self._manager = self._opened()
            why = (
                f"the checkpoint of step {self._writing} was not saved in {self._folder} "
                f"({_reason(error)}). What was written of it is "
                f"removed; steps {list(self.steps)} stay. Once there is room, or the folder can "
                "be written, the run can save again"
            )
            if self._must_save:
                raise CheckpointError(why) from error
            warnings.warn(f"{why}; it goes on", stacklevel=4)

    def _sweep(self) -> None:
        """Remove what saves that were cut off have left, while none runs; of one that failed just
        now, threads may write a little more.
        """
        if jax.process_index() == 0:
            for left in self._folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(left, ignore_errors=True)

    def _opened(self) -> ocp.CheckpointManager:
        """A manager of the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # Threads that wait for folders wait for twenty minutes where these cannot be made, and keep
        # the process.
        writing = ocp.AsyncOptions(create_directories_asynchronously=False)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep, create=True, async_options=writing
        )
        return ocp.CheckpointManager(self._folder, options=options)

    def _read(self, step: int, target: RunState, like: RunState) -> RunState:
        """The state of a step; DamagedCheckpointError where its files cannot be read."""
        stored = self._restored(step, about=ocp.args.JsonRestore())["leaves"]
        self._check(step, _leaves(target), stored)
        found = self._restored(step, state=ocp.args.StandardRestore(target))
        return self._portable.placed(found, like)

    def _restored(self, step: int, **what: ocp.args.CheckpointArgs) -> Any:
        """One part of a checkpoint."""
        (name,) = what
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**what))[name]
        except Exception as error:  # what a damaged file makes orbax raise depends on the file
            raise DamagedCheckpointError(
                f"the checkpoint of step {step} in {self._folder} is damaged and cannot be read "
                f"({_reason(error)})"
            ) from error

    def _check(self, step: int, wanted: StoredLeaves, stored: StoredLeaves) -> None:
        """CheckpointError listing every leaf that differs."""
        shapes = [{n: shape for n, (_, shape) in of.items()} for of in (wanted, stored)]
        cause = (
            "by another model or optimizer (another number of stages can resume only where both "
            "runs say Checkpoints(..., layer_axis=True))"
        )
        if shapes[0] == shapes[1]:
            cause = (
                "with other dtypes. Moments have those of gradients, which jaxpipe.Memory("
                "accumulate=) says: make the pipeline with that of the run that saved, or restore "
                "into a state of the saved dtypes and convert it"
            )
        CheckpointError.refuse(
            f"step {step} of {self._folder} was saved {cause}",
            [
                f"{name}: the state wants {_aval(wanted.get(name))}, but "
                f"{_aval(stored.get(name))} was saved"
                for name in {**stored, **wanted}
                if stored.get(name) != wanted.get(name)
            ],
        )


def _leaves(canonical: RunState) -> StoredLeaves:
    """Path -> [dtype, shape] of every leaf, as JSON keeps it."""
    return {path: [str(leaf.dtype), list(leaf.shape)] for path, leaf in by_path(canonical).items()}


def _reason(error: Exception) -> str:
    """The text of an error; of tensorstore's, which has a part for each layer, the last part: the
    file, and why it was not written.
    """
    text = " ".join(str(error).split()).rpartition("Failed writing: ")[2]
    return f"{type(error).__name__}: {text[:400]}"


def _aval(entry: list[object] | None) -> str:
    return "none" if entry is None else f"{entry[0]}{entry[1]}"


def _shape_of(leaf: object) -> object:
    """An array without its numbers; numbers as they are."""
    return with_sharding(leaf, leaf.sharding) if isinstance(leaf, jax.Array) else leaf
