"""Checkpoints in the model's canonical layout: any schedule, number of devices or plain program
resumes what another one saved.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from .arrays import PyTree, by_path, is_key, path_text, shapes_of, words_of
from .errors import CheckpointError, is_whole, quoted
from .model.packed import Packed
from .model.param_layout import Chunks, owner_faults
from .model.placer import Follow, Followers, Placer, is_params
from .model.settings import explicit_context, has, jit_on_mesh, with_sharding
from .pipeline import Pipeline

__all__ = ["Checkpoints", "DamagedCheckpointError"]

OWN_STATE = "state"


@dataclass(frozen=True)
class PortableState:
    """Placed <-> canonical, for a state that holds parameters under "params" and, anywhere, trees
    laid out like them.

    Under "state" is the stages' own state (`Pipeline.place_state`).  It is brought in model order
    too, as {"stages": ...}.

    Canonical: leaves of stages are [S, ...] in model order; with `layer_axis` those of [S, layers,
    ...] become [S * layers, ...], so that another number of stages fits too.  With `pipe` None the
    state is in model order already. Leaves are arrays, or ShapeDtypeStructs, which give
    ShapeDtypeStructs with shardings.
    """

    pipe: Pipeline | None
    layer_axis: bool = False

    def of(self, state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The canonical layout; stages are spread over the pipe axis, parts without parameters left
        out, the rest on the host.

        Raises:
            CheckpointError: leaves belong to a parameter but cannot be laid out; all are listed.
        """
        state = _wrapped(state)

        def outside(path: Any, node: PyTree, follows: PyTree) -> PyTree:
            if not is_params(node):
                return _on_host(node)
            kept = [key for key in node if key == "stages" or jax.tree.leaves(node[key])]
            node, follows = ({key: tree[key] for key in kept} for tree in (node, follows))
            if self._placer is None:
                return jax.tree.map(
                    lambda leaf, rule: _reshaped(leaf, rule.merged(leaf.shape)), node, follows
                )
            _check_single_values(path, node["stages"], follows["stages"])
            return self._placer.in_model_order(node, follows)

        follows = self._follows(state)
        found = jax.tree_util.tree_map_with_path(outside, state, follows, is_leaf=is_params)
        return dict(found)

    def placed(
        self, canonical: Mapping[str, PyTree], like: Mapping[str, PyTree]
    ) -> dict[str, PyTree]:
        """The inverse: a state with the structure of `like`, parameters and what follows them
        spread as parameters are.
        """
        like = _wrapped(like)

        def inside(node: PyTree, follows: PyTree, found: PyTree) -> PyTree:
            if not is_params(node):
                return self._from_host(found, node)
            if self._placer is None:
                return jax.tree.map(
                    lambda leaf, to: _reshaped(leaf, to.shape), {**node, **found}, node
                )
            shapes = shapes_of(node)
            return self._placer.placed_like(found, shapes, follows)

        tree: Any = jax.tree.structure(like, is_leaf=is_params)
        values = tree.unflatten(jax.tree.leaves(dict(canonical), is_leaf=is_params))
        state = jax.tree.map(inside, like, self._follows(like), values, is_leaf=is_params)
        return {key: value["stages"] if key == OWN_STATE else value for key, value in state.items()}

    def _follows(self, state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The state with a `Follow` for each leaf of trees laid out like parameters; None for
        others.

        Raises:
            CheckpointError: trees that are not the pipeline's, leaves that cannot be laid out; all
                are listed.
        """
        if not is_params(state.get("params")):
            raise CheckpointError(
                'a state must hold parameters under "params", as `Pipeline.place` gives them'
            )
        params = state["params"]
        CheckpointError.refuse(
            "this state is not the pipeline's", self._owner_faults(params, "params")
        )
        partition = None if self.pipe is None else self.pipe.partition
        followers = Followers(params, partition, layer_axis=self.layer_axis)
        alike = self.pipe is not None and not self.pipe.layout.unlike
        faults: list[str] = []

        def of_node(path: Any, node: PyTree) -> PyTree:
            if not is_params(node):
                return None
            name = path_text(path)
            if elsewhere := self._owner_faults(node, name or "parameters"):
                faults.extend(elsewhere)
                return None
            if alike and len(set(map(jax.tree.structure, node["stages"]))) > 1:
                faults.append(
                    f"{name}: chunks of stages have unlike structures; a mask must treat every "
                    "stage the same"
                )
            of_stages = path == (jax.tree_util.DictKey(OWN_STATE),)
            found = jax.tree.map(lambda _: Follow(), node) if of_stages else followers.of(node)
            leaves = jax.tree_util.tree_leaves_with_path(node)
            for (p, leaf), rule in zip(leaves, jax.tree.leaves(found), strict=True):
                if not rule.fits:
                    faults.append(
                        f"{path_text((*path, *p))} of shape {leaf.shape} fits no axis of its "
                        "parameter to the stages; unlike ones take leaves of its shape alone"
                    )
            return found

        found = jax.tree_util.tree_map_with_path(of_node, dict(state), is_leaf=is_params)
        CheckpointError.refuse("this state has no canonical layout", faults)
        return dict(found)

    def _owner_faults(self, node: Mapping[str, PyTree], name: str) -> list[str]:
        if self.pipe is None or not (name == "params" or isinstance(node["stages"], Chunks)):
            return []
        return owner_faults(node["stages"], self.pipe.layout, name, "place")

    @cached_property
    def _placer(self) -> Placer | None:
        return None if self.pipe is None else Placer(self.pipe.partition)

    def _from_host(self, value: Any, like: Any) -> Any:
        """The inverse of `_on_host`: a number as it was, an array on the whole mesh."""
        if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
            return type(like)(value) if isinstance(like, int | float) else value
        if is_key(like):
            impl: list[Any] = []
            # a ShapeDtypeStruct does not tell it by itself
            jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), like)
            value = jax.random.wrap_key_data(value, impl=impl[0])
        if self.pipe is None:
            return jax.device_put(value, _plain_sharding(like))
        to = NamedSharding(self.pipe.mesh, PartitionSpec())
        if explicit_context(self.pipe.mesh):  # as placed parameters are then
            return jit_on_mesh(self.pipe.mesh, lambda leaf: leaf, to)(value)
        return jax.device_put(value, to)


def _wrapped(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The stages' own state in the form of parameters."""
    return {key: {"stages": value} if key == OWN_STATE else value for key, value in state.items()}


def _check_single_values(path: Any, stages: PyTree, follows: PyTree) -> None:
    """One value a chunk, where it does not follow stages, has no place in model order unless all
    are equal.
    """
    if not isinstance(stages, Chunks) or isinstance(stages[0], Packed):
        return
    for rule, *group in zip(*map(jax.tree.leaves, (follows[0], *stages)), strict=True):
        if rule.follows or has(group, jax.ShapeDtypeStruct):
            continue
        values = [np.asarray(leaf) for leaf in group]
        if any(not np.array_equal(values[0], v) for v in values[1:]):
            raise CheckpointError(
                f"{path_text(path)} holds one number for all stages of a chunk, "
                f"{[v.item() for v in values]}: it belongs to this schedule's chunks and not to "
                "the model; use a transformation that keeps one for each parameter or for all"
            )


def _plain_sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """Where a plain program's array is."""
    return getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])


def _reshaped(leaf: jax.Array | jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> Any:
    """A plain program's array with another shape: on its device, or whole on its mesh."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf if leaf.shape == shape else leaf.reshape(shape)
    to = _plain_sharding(leaf)
    if isinstance(to, NamedSharding) and leaf.shape != shape:
        to = NamedSharding(to.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=to)


def _on_host(leaf: Any) -> Any:
    """As numpy; a key as its words."""
    shape = isinstance(leaf, jax.ShapeDtypeStruct)
    leaf = words_of(leaf)
    return np.zeros(leaf.shape, leaf.dtype) if shape else np.asarray(leaf)


try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        "jaxpipe.checkpoint needs orbax-checkpoint, which is not installed: pip install "
        "'jaxpipe[checkpoint]'"
    ) from error


_LAYERS = 3  # of orbax, that keep an error of the last save each, and raise it when they are closed


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are empty, cut off or gone."""


class Checkpoints:
    """The checkpoints of a run: a folder with one for each saved step, of which the newest `keep`
    stay.

    A state is a dict with parameters under "params" and whatever else the run needs: optimizer
    state, averages, keys, numbers; under "state" what stages keep (`Pipeline.place_state`).  Every
    tree in it that is laid out like the parameters (an optimizer's moments) is written in model
    order, stages [S, ...].

    Each is written in the background under a temporary name and renamed when it is whole (orbax's
    atomic commit), so that a run that is killed in the middle of a save keeps the one before.
    Every process of a run calls every method.

    A save that fails (a full disk, say) is reported by a CheckpointError of the next `save`, which
    then has not begun, of `wait` or of `close`.  What it has written is removed, the checkpoints
    before it stay, and the run may go on and save again.

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
        self._portable = PortableState(pipe, layer_axis)
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
        written = (
            step
            for step in self._manager.all_steps()
            if step != self._writing or (self._folder / str(step)).exists()
        )
        return tuple(sorted(written))

    def save(self, step: int, state: Mapping[str, PyTree]) -> None:
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
        about = {"leaves": _leaves(canonical)}
        CheckpointError.refuse(
            "orbax writes no arrays of size 0; put None in their place, or leave out the "
            "parameters that they belong to",
            [f"{name} is {_aval(leaf)}" for name, leaf in about["leaves"].items() if 0 in leaf[1]],
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
                f"step {step} cannot be saved after step {self.latest}, which {self._folder} "
                "has; delete what comes after "
                f"step {step} there, or name another folder"
            )
        self._sweep()
        self._writing = step
        with self._reporting_failure():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(canonical), about=ocp.args.JsonSave(about)
                ),
            )

    def restore(
        self, like: Mapping[str, PyTree], *, step: int | None = None
    ) -> tuple[int, dict[str, PyTree]]:
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
        if step is not None and step not in self.steps:
            raise CheckpointError(
                f"{self._folder} holds no checkpoint of step {step}; it has steps "
                f"{list(self.steps)}"
            )
        if step is not None:
            return step, self._read(step, target, like)
        if not self.steps:
            raise CheckpointError(
                f"{self._folder} holds no checkpoint; start afresh, or name the folder of an "
                "earlier run"
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

    def __enter__(self) -> Checkpoints:
        return self

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

    def _read(self, step: int, target: PyTree, like: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The state of a step; DamagedCheckpointError where its files cannot be read."""
        with self._reading(step):
            stored = self._manager.restore(
                step, args=ocp.args.Composite(about=ocp.args.JsonRestore())
            )["about"]["leaves"]
        self._check(step, _leaves(target), stored)
        with self._reading(step):
            found = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
            )["state"]
        return self._portable.placed(found, like)

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Where reading may fail; what a damaged file makes orbax raise depends on the file."""
        try:
            yield
        except Exception as error:
            raise DamagedCheckpointError(
                f"the checkpoint of step {step} in {self._folder} is damaged and cannot be read "
                f"({_reason(error)})"
            ) from error

    def _check(
        self, step: int, wanted: Mapping[str, list[Any]], stored: Mapping[str, list[Any]]
    ) -> None:
        """CheckpointError listing every leaf that differs."""

        def shapes(leaves: Mapping[str, list[Any]]) -> dict[str, Any]:
            return {name: shape for name, (_, shape) in leaves.items()}

        cause = (
            "by another model or optimizer (another number of stages can resume only where both "
            "runs say Checkpoints(..., layer_axis=True))"
        )
        if shapes(wanted) == shapes(stored):
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


def _leaves(canonical: PyTree) -> dict[str, list[Any]]:
    """Path -> [dtype, shape] of every leaf, as JSON keeps it."""
    return {path: [str(leaf.dtype), list(leaf.shape)] for path, leaf in by_path(canonical).items()}


def _reason(error: Exception) -> str:
    """The text of an error; of tensorstore's, which has a part for each layer, the last part: the
    file, and why it was not written.
    """
    text = " ".join(str(error).split()).rpartition("Failed writing: ")[2]
    return f"{type(error).__name__}: {text[:400]}"


def _aval(entry: list[Any] | None) -> str:
    return "none" if entry is None else f"{entry[0]}{entry[1]}"


def _shape_of(leaf: Any) -> Any:
    """An array without its numbers; numbers as they are."""
    return with_sharding(leaf, leaf.sharding) if isinstance(leaf, jax.Array) else leaf
