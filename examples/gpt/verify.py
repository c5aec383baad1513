"""Train the same steps three ways and measure how far apart they are: the pipeline, plain JAX
without one, and torch.

Every trainer starts from the same weights, sees the same batches and has its own optimizer, so that
a difference in any gradient would grow from step to step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxpipe as jp

from .data import Corpus
from .model import GPT
from .optimizer import adamw

Arrays = dict[str, np.ndarray]  # by path, e.g. "stages/mlp/up/kernel"

# Largest differences that rounding explains, relative to the loss and to the largest entry of each
# gradient array.  The sums over some 10^3 tokens are taken in another order by each of the three,
# which leaves some hundred machine epsilons in a gradient (measured, over 20 steps of the default
# sizes, in both types); 10^4 leaves room for other sizes and more steps.
TOLERANCE = {"float64": 2e-12, "float32": 1e-3}


def by_path(tree: Any) -> Arrays:
    """A tree of arrays -> arrays by path, as torch_ref names them."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in leaves
    }


class Trainer(Protocol):
    """One way to train."""

    def step(self, batch: Any) -> tuple[float, Arrays]:
        """Loss and gradients of a batch; the weights are updated."""


class Pipelined:
    """The pipeline's own losses and gradients."""

    def __init__(
        self, model: GPT, pipe: jp.Pipeline, optimizer: optax.GradientTransformation, canonical: Any
    ) -> None:
        self.pipe = pipe
        self.params = pipe.place(canonical)
        self.opt_state = optimizer.init(self.params)
        self.update = jax.jit(optimizer.update)

    def step(self, batch: Any) -> tuple[float, Arrays]:
        loss, grads = self.pipe.value_and_grad(self.params, batch)
        updates, self.opt_state = self.update(grads, self.opt_state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        return float(loss), by_path(self.pipe.canonical(grads))


class Plain:
    """The whole model and the whole batch at once: no pipeline, no microbatches, one device."""

    def __init__(self, model: GPT, optimizer: optax.GradientTransformation, canonical: Any) -> None:
        self.params = canonical
        self.opt_state = optimizer.init(canonical)
        self.value_and_grad = jax.jit(jax.value_and_grad(model.plain_loss))
        self.update = jax.jit(optimizer.update)

    def step(self, batch: Any) -> tuple[float, Arrays]:
        loss, grads = self.value_and_grad(self.params, batch)
        updates, self.opt_state = self.update(grads, self.opt_state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        return float(loss), by_path(grads)


@dataclass(frozen=True)
class Difference:
    """How far a trainer's step is from the pipeline's; relative ones are to the loss, and to the
    largest entry of each array.
    """

    loss: float
    gradient: float
    relative_loss: float
    relative_gradient: float
    where: str  # the array with the largest relative difference


def difference(ours: tuple[float, Arrays], other: tuple[float, Arrays]) -> Difference:
    """Compare a step; both must have the same arrays."""
    grads, others = ours[1], other[1]
    if grads.keys() != others.keys():
        raise ValueError(
            f"the gradients have different names: {sorted(grads.keys() ^ others.keys())}"
        )
    absolute = {name: float(np.max(np.abs(grads[name] - others[name]))) for name in grads}
    relative = {name: absolute[name] / float(np.max(np.abs(others[name]))) for name in grads}
    where = max(relative, key=relative.__getitem__)
    loss = abs(ours[0] - other[0])
    return Difference(loss, max(absolute.values()), loss / abs(other[0]), relative[where], where)


def main(args: argparse.Namespace, model: GPT, pipe: jp.Pipeline, corpus: Corpus) -> int:
    """Print the differences of every step and overall; 1 if one is beyond what rounding explains,
    else 0.
    """
    if args.dtype not in TOLERANCE:
        raise SystemExit(f"--verify compares in float64 or float32, not in {args.dtype}")
    try:
        from .torch_trainer import Torch
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"--verify compares with torch, which is not here ({error}); `make verify` installs "
            "it and runs this"
        ) from None
    optimizer = adamw(rate=args.rate, warmup=args.warmup, decay=args.decay, clip=args.clip)
    canonical = jax.jit(model.init)(jax.random.key(args.seed))
    ours = Pipelined(model, pipe, optimizer, canonical)
    others: dict[str, Trainer] = {
        "plain JAX": Plain(model, optimizer, canonical),
        "torch_ref": Torch(model, pipe.schedule, args, by_path(canonical)),
    }

    table = Table(
        "step",
        "loss",
        *(f"{what} vs {name}" for name in others for what in ("loss", "gradient")),
        title=f"in {args.dtype}",
    )
    worst: dict[str, list[Difference]] = {name: [] for name in others}
    for i in range(args.steps):
        batch = corpus.batch(i, size=args.batch, context=args.context, seed=args.seed)
        mine = ours.step(batch)
        cells = []
        for name, trainer in others.items():
            found = difference(mine, trainer.step(batch))
            worst[name].append(found)
            cells += [f"{found.loss:.1e}", f"{found.gradient:.1e}"]
        table.add_row(str(i + 1), f"{mine[0]:.6f}", *cells)
    Console(width=110).print(table)
    return report(worst, args)


def report(worst: dict[str, list[Difference]], args: argparse.Namespace) -> int:
    """The largest differences over all steps, and whether they are within the tolerance."""
    limit, bad = TOLERANCE[args.dtype], False
    for name, found in worst.items():
        # A nan is the worst difference, wherever in the list it stands.
        loss = max(found, key=lambda d: (d.relative_loss != d.relative_loss, d.relative_loss))
        gradient = max(
            found, key=lambda d: (d.relative_gradient != d.relative_gradient, d.relative_gradient)
        )
        bad |= not (loss.relative_loss <= limit and gradient.relative_gradient <= limit)
        print(
            f"pipeline vs {name}, largest of {len(found)} steps: "
            f"loss {max(d.loss for d in found):.1e} (relative {loss.relative_loss:.1e}), "
            f"gradient {max(d.gradient for d in found):.1e} (relative "
            f"{gradient.relative_gradient:.1e}, in {gradient.where})"
        )
    print(f"{'BEYOND' if bad else 'all within'} the tolerance of {limit:.0e}, relative")
    return int(bad)
