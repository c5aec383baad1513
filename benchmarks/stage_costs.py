"""What F, B, I and W of a GPT stage cost on this machine, in processor time, and what the embedding
and the loss add at the ends.

    python -m benchmarks.stage_costs

I and W are the lowering's own cut of the backward.  Processor time of one thread, least of several
runs taken in turn: what other work on the machine adds is always more, never less.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp
from benchmarks.machine import describe
from benchmarks.output import Command, Result
from examples.gpt.model import GPT
from jaxpipe.stage.code import run
from jaxpipe.stage.trace import trace_stage
from jaxpipe.table.effects import Place


@dataclass(frozen=True)
class StageCosts:
    """Costs of one inner stage in units of its F, and what `first` (in F, in B) and `last` (with
    its gradient, in F) add.
    """

    backward: float
    input_grad: float
    weight_grad: float
    first_forward: float = 0.0
    first_backward: float = 0.0
    last: float = 0.0

    def describe(self) -> str:
        """In one line."""
        ends = (
            f"first adds {self.first_forward:.2f} to F and {self.first_backward:.2f} to B, "
            f"last with its gradient {self.last:.2f} to F"
        )
        return f"B {self.backward:.2f}, I {self.input_grad:.2f}, W {self.weight_grad:.2f}; {ends}"

    def of(self, stages: int) -> jp.Costs:
        """Costs of all stages of a pipeline, the first and the last with what they do besides."""
        ends = {0: (self.first_forward, self.first_backward), stages - 1: (self.last, 0.0)}
        extra = [ends.get(s, (0.0, 0.0)) for s in range(stages)]
        if stages == 1:
            extra = [(self.first_forward + self.last, self.first_backward)]
        return jp.Costs(
            forward=[1 + f for f, _ in extra],
            backward=[self.backward + b for _, b in extra],
            input_grad=[self.input_grad + b for _, b in extra],
            weight_grad=self.weight_grad,
        )


@dataclass(frozen=True)
class Sizes:
    """One layer a stage."""

    width: int = 256
    heads: int = 4
    context: int = 128
    vocab: int = 256
    rows: int = 2


def measure(sizes: Sizes, *, repeats: int) -> tuple[StageCosts, float]:
    """Costs, and F in seconds."""
    calls = _calls(sizes)
    for call in calls.values():
        jax.block_until_ready(call())
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.process_time()
            jax.block_until_ready(call())
            samples[name].append(time.process_time() - begin)
    least = {name: min(values) for name, values in samples.items()}
    relative = {name: value / least["F"] for name, value in least.items()}
    costs = StageCosts(
        backward=relative["B"],
        input_grad=relative["I"],
        weight_grad=relative["W"],
        first_forward=relative["first"],
        first_backward=relative["first, gradient"],
        last=relative["last and its gradient"],
    )
    return costs, least["F"]


def _calls(sizes: Sizes) -> Mapping[str, Callable[[], Any]]:
    """What is timed, by name."""
    gpt = GPT(1, 1, sizes.vocab, sizes.context, sizes.width, sizes.heads)
    params = gpt.init(jax.random.key(0))
    weights = jax.tree.map(lambda leaf: leaf[0], params["stages"])
    tokens = np.random.default_rng(0).integers(
        0, sizes.vocab, (sizes.rows, sizes.context + 1), dtype=np.int32
    )
    microbatch = {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}
    x = jax.random.normal(jax.random.key(1), (sizes.rows, sizes.context, sizes.width))
    code = trace_stage(lambda p, x, extra: gpt.stage(p, x), weights, x, {})
    leaves = [*code.consts, *jax.tree.leaves(weights)]
    once = run(code.hoist, *leaves)
    forward, backward, input_grad, weight_grad = (
        jax.jit(lambda *a, jaxpr=jaxpr: run(jaxpr, *a))
        for jaxpr in (code.forward, code.backward, code.input_grad, code.weight_grad)
    )
    kept = forward(*leaves, x, *once)[len(code.avals[Place.SENT_X]) :]
    operands = [*leaves, x, *once, *kept, x]
    stash = input_grad(*operands)[len(code.avals[Place.SENT_DX]) :]
    first = jax.jit(gpt.first)
    first_gradient = jax.jit(lambda p, mb, dx: jax.vjp(lambda q: gpt.first(q, mb), p)[1](dx))
    last = jax.jit(jax.value_and_grad(gpt.last, argnums=(0, 1)))
    return {
        "F": lambda: forward(*leaves, x, *once),
        "B": lambda: backward(*operands),
        "I": lambda: input_grad(*operands),
        "W": lambda: weight_grad(*operands, *stash),
        "first": lambda: first(params["first"], microbatch),
        "first, gradient": lambda: first_gradient(params["first"], microbatch, x),
        "last and its gradient": lambda: last(params["last"], x, microbatch),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.option("--repeats", 50, "N")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a model that takes no time, to see that everything runs",
    )
    args = parser.parse_args(argv)
    machine = describe()
    sizes = Sizes(width=32, heads=2, context=16, vocab=32, rows=1) if args.tiny else Sizes()
    costs, second = measure(sizes, repeats=args.repeats)
    rows = [
        ("F", "1.00"),
        ("B", f"{costs.backward:.2f}"),
        ("I", f"{costs.input_grad:.2f}"),
        ("W", f"{costs.weight_grad:.2f}"),
        ("first, in F of stage 0", f"{costs.first_forward:.2f}"),
        ("first, in B of stage 0", f"{costs.first_backward:.2f}"),
        ("last and its gradient, in F of the last stage", f"{costs.last:.2f}"),
    ]
    title = (
        f"Costs of a GPT stage of one layer ({sizes}), in units of its F ({second * 1e3:.2f} ms)"
    )
    Result(title, machine, "action  cost", rows).write(args.output)


if __name__ == "__main__":
    main()
