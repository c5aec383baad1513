"""What a run leaves in its folder, and takes up again when it is resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


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
        """Whole or not at all: a run that is killed meanwhile keeps the settings that it had."""
        new = self.path / "settings.json.new"
        with new.open("w") as file:
            file.write(json.dumps(settings, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path / "settings.json")

    def read_settings(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.path / "settings.json").read_text()))
        except FileNotFoundError:
            raise SystemExit(
                f"{self.path} is not the folder of a run: it has no settings.json"
            ) from None
        except ValueError as error:
            raise SystemExit(
                f"{self.path}/settings.json is damaged ({error}); write it again from the folder "
                "of a like run"
            ) from None

    def check_corpus(self, digest: str) -> None:
        """Exit where the run was trained on another text: another version of Python has another
        library.
        """
        if self.read_settings()["corpus"] != digest:
            raise SystemExit(
                f"{self.path} was trained on another Python's standard library: resume it with "
                "the Python that started it"
            )

    def read_losses(self, steps: int) -> list[float]:
        """The losses of the first `steps` steps; the file is cut there, since the resumed run
        writes the rest again.
        """
        file = self.path / "losses.csv"
        lines = file.read_text().splitlines()[1 : steps + 1] if file.exists() else []
        file.write_text("\n".join(["step,loss", *lines]) + "\n")
        return [float(line.split(",")[1]) for line in lines]

    def append_loss(self, step: int, loss: float) -> None:
        """One more line, with every digit; it is on disk at once."""
        with (self.path / "losses.csv").open("a") as file:
            file.write(f"{step},{loss!r}\n")
