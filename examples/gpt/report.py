"""What a person sees: a progress bar with loss and tokens/s, and the loss curve."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Advance(Protocol):
    """Tell the bar of one more step."""

    def __call__(self, step: int, loss: float) -> None: ...


@contextmanager
def progress(start: int, steps: int, *, tokens_per_step: int) -> Iterator[Advance]:
    """A bar on a terminal; about twenty plain lines where the output goes to a file."""
    clock = Clock(tokens_per_step)
    if not sys.stdout.isatty():
        every = max(1, (steps - start) // 20)

        def line(step: int, loss: float) -> None:
            rate = clock.tick()
            if step == start or (step + 1) % every == 0 or step + 1 == steps:
                print(
                    f"step {step + 1:>5}/{steps}   loss {loss:.4f}   {rate:,.0f} tokens/s",
                    flush=True,
                )

        yield line
        return
    columns = (
        "step",
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("compiling", total=steps, completed=start)

        def advance(step: int, loss: float) -> None:
            bar.update(
                task,
                completed=step + 1,
                description=f"loss {loss:.4f}   {clock.tick():,.0f} tokens/s",
            )

        yield advance


class Clock:
    """Tokens a second over the newest thirty steps; the first step, which compiles, is left out."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.times: list[float] = []

    def tick(self) -> float:
        self.times = [*self.times[-30:], time.perf_counter()]
        steps = len(self.times) - 1
        return self.tokens_per_step * steps / (self.times[-1] - self.times[0]) if steps else 0.0


def loss_curve(losses: Sequence[float], path: Path, *, validation: float, title: str) -> None:
    """Write the loss of every step, its running mean, and the validation loss at the end, as a
    picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    window = max(1, len(losses) // 40)
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(
        np.arange(1, len(losses) + 1),
        losses,
        color="#9db4d0",
        linewidth=0.8,
        label="training, every step",
    )
    axes.plot(
        np.arange(window, len(losses) + 1),
        smooth,
        color="#1f4e8c",
        linewidth=1.8,
        label=f"training, mean of {window} steps",
    )
    axes.plot(
        len(losses),
        validation,
        "o",
        color="#c8442b",
        label=f"held-out files at the end: {validation:.3f}",
    )
    axes.set(title=title, xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
