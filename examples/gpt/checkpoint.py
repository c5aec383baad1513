"""Checkpoints in the model's own layout: layers in model order, whatever schedule and number of devices wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jaxpipe as jp

from .devices import on_mesh

Tree = Any


class Checkpoints:
    """Saves and restores {"params", "opt_state"} of a pipeline; the newest two are kept.

    orbax writes each in the background under a temporary name and renames it when it is whole, so that a run that is
    killed in the middle leaves its last whole checkpoint.
    """

    def __init__(self, folder: Path, pipe: jp.Pipeline) -> None:
        self.pipe = pipe
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self.manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, step: int, state: dict[str, Tree]) -> None:
        """Write the state after `step` steps; returns once it is copied to the host."""
        self.manager.save(step, args=ocp.args.StandardSave(jax.device_get(self._outside(state))))

    def restore(self, like: dict[str, Tree]) -> tuple[int, dict[str, Tree]]:
        """(steps done, state) of the newest checkpoint, placed; `like` is a state of the same shapes."""
        step = self.manager.latest_step()
        if step is None:
            raise SystemExit(f"{self.manager.directory} holds no checkpoint to resume from; leave --resume out to start anew")
        target = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(self._outside, like))
        return step, self._inside(self.manager.restore(step, args=ocp.args.StandardRestore(target)))

    def close(self) -> None:
        """Wait until the last checkpoint is whole."""
        self.manager.wait_until_finished()
        self.manager.close()

    def _outside(self, state: dict[str, Tree]) -> dict[str, Tree]:
        """Placed -> canonical, and the axes [stage, layer of the stage] -> [layer]."""

        def convert(params: Tree) -> Tree:
            params = self.pipe.canonical(params)
            return params | {"stages": jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), params["stages"])}

        return self._map(state, jax.tree.structure(state["params"]), convert)

    def _inside(self, state: dict[str, Tree]) -> dict[str, Tree]:
        stages = self.pipe.schedule.num_stages

        def convert(params: Tree) -> Tree:
            split = jax.tree.map(lambda leaf: leaf.reshape(stages, -1, *leaf.shape[1:]), params["stages"])
            return self.pipe.place(params | {"stages": split})

        placed = self._map(jax.tree.map(jnp.asarray, state), jax.tree.structure(state["params"]), convert)
        return dict(on_mesh(placed, self.pipe.mesh))

    @staticmethod
    def _map(state: dict[str, Tree], params: Any, convert: Callable[[Tree], Tree]) -> dict[str, Tree]:
        """Convert every subtree that is shaped like the parameters: they themselves and the optimizer's moments."""

        def whole(node: Tree) -> bool:
            return bool(jax.tree.structure(node) == params)

        return jax.tree.map(lambda node: convert(node) if whole(node) else node, state, is_leaf=whole)


class RunFolder:
    """What a run leaves: settings.json, losses.csv, checkpoints/, loss.png and sample.txt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, parent: Path) -> RunFolder:
        """Make `parent`/run-1, or run-2, ...: an earlier run is never overwritten."""
        number = 1
        while True:
            try:
                (parent / f"run-{number}").mkdir(parents=True)
                return cls(parent / f"run-{number}")
            except FileExistsError:
                number += 1

    def write_settings(self, settings: dict[str, Any]) -> None:
        (self.path / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")

    def read_settings(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.path / "settings.json").read_text()))
        except FileNotFoundError:
            raise SystemExit(f"{self.path} is not the folder of a run: it has no settings.json") from None

    def check_corpus(self, digest: str) -> None:
        """Exit where the run was trained on another text: another version of Python has another library."""
        if self.read_settings()["corpus"] != digest:
            raise SystemExit(f"{self.path} was trained on another Python's standard library: resume it with the Python that started it")

    def read_losses(self, steps: int) -> list[float]:
        """The losses of the first `steps` steps; the file is cut there, since the resumed run writes the rest again."""
        file = self.path / "losses.csv"
        lines = file.read_text().splitlines()[1 : steps + 1] if file.exists() else []
        file.write_text("\n".join(["step,loss", *lines]) + "\n")
        return [float(line.split(",")[1]) for line in lines]

    def append_loss(self, step: int, loss: float) -> None:
        """One more line, with every digit; it is on disk at once."""
        with (self.path / "losses.csv").open("a") as file:
            file.write(f"{step},{loss!r}\n")
