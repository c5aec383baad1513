"""Training: jaxpipe + optax against torch_ref + torch.optim, from the same weights, on the same
batches.

python -m tests.parity.training     200 steps of everything in `RUNS`, and of the GPT under every
schedule, kept in out/
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .grid import virtual_devices
from .results import TRAINING, keep, load

if TYPE_CHECKING:
    import jaxpipe as jp
    from tests.models import Twin

ROWS = 2
STEPS = 200
# Both sides round each step in another way, and every step works on what the last one left.  Adam
# divides by the root of the second moment, so a relative error of a small gradient becomes one of
# the update; 1e-9 after 200 steps is the claim of the project, and a handful of steps must be far
# below it.
FEW, MANY = 1e-12, 1e-9
RUNS = (
    ("gpt", "1f1b", "adamw"),
    ("gpt", "interleaved_zb", "adamw"),
    ("gpt", "dualpipe", "adamw"),
    ("conv", "1f1b", "momentum"),
    ("conv", "zbv", "momentum"),
)


def curve_names() -> tuple[str, ...]:
    """Schedules of which the GPT's curve is compared: all."""
    import jaxpipe as jp

    return jp.schedules.names()


@dataclass(frozen=True)
class Curve:
    """A training: losses and gradient norms by step, and the weights at the end."""

    losses: Any
    norms: Any
    weights: dict[str, Any]


@dataclass(frozen=True)
class Apart:
    """The largest relative difference of two trainings: of losses in any step, of the last loss, of
    norms and of final weights.
    """

    losses: float
    last_loss: float
    norms: float
    weights: float

    @property
    def worst(self) -> float:
        """Of all."""
        return max(self.losses, self.norms, self.weights)


def batches_of(model: Twin, microbatches: int, steps: int) -> list[dict[str, Any]]:
    """A batch for each step."""
    return [model.batch(ROWS * microbatches, seed=step) for step in range(steps)]


def model_for(name: str, schedule: jp.Schedule) -> Twin:
    """The twin with the schedule's stages; GPTs have four layers in all, so that every schedule
    trains the same model.
    """
    from tests.models import twin

    layers = {"layers_per_stage": 4 // schedule.num_stages} if name == "gpt" else {}
    return twin(name, schedule.num_stages, **layers)


def in_jax(
    schedule: jp.Schedule, model: Twin, batches: Sequence[dict[str, Any]], chain: Any
) -> Curve:
    """jaxpipe and optax, the whole step under one jit."""
    import jax
    import optax

    from tests.models import to_flat, to_tree

    from .engines import pipeline

    pipe = pipeline(schedule, model)
    params = pipe.place(to_tree(model.weights()))
    state = chain.init(params)

    @jax.jit
    def step(params, state, batch):
        loss, grads = pipe.value_and_grad(params, batch)
        updates, state = chain.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    losses, norms = [], []
    for batch in batches:
        params, state, loss, norm = step(params, state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    return Curve(np.array(losses), np.array(norms), to_flat(pipe.canonical(params)))


def in_torch(
    schedule: jp.Schedule, model: Twin, batches: Sequence[dict[str, Any]], optimizer: Any
) -> Curve:
    """torch_ref and torch.optim."""
    import torch_ref

    found = torch_ref.train(
        schedule.to_csv(), model.reference, batches, weights=model.weights(), optimizer=optimizer
    )
    return Curve(found.losses, found.grad_norms, dict(found.weights))


def adamw(steps: int, model: Twin) -> tuple[Any, Any]:
    """(optax, torch_ref) with warm-up, weight decay with a mask, and clipping by global norm."""
    import jax
    import jax.numpy as jnp
    import optax

    from torch_ref import optim

    def decayed(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in ("bias", "scale"), params
        )

    schedule = optim.WarmupCosine(
        peak=3e-3, warmup_steps=max(steps // 10, 2), decay_steps=steps, end=1e-4
    )
    # optax would compute the rate in float32: both sides get the same list of float64 numbers.
    rates = [schedule(step) for step in range(steps)]
    table = jnp.asarray(rates)
    chain = optax.chain(
        optax.clip_by_global_norm(1.05),
        optax.adamw(
            lambda count: table[count], b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decayed
        ),
    )
    spared = tuple(
        f"*/{end}"
        for end in ("bias", "scale")
        if any(name.endswith(end) for name in model.weights())
    )
    return chain, optim.AdamW(
        rates, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, no_decay=spared, clip=1.05
    )


def momentum(rate: float) -> tuple[Any, Any]:
    """(optax, torch_ref): SGD with momentum."""
    import optax

    from torch_ref import optim

    return optax.sgd(rate, momentum=0.9), optim.SGD(rate, momentum=0.9)


def apart(one: Curve, other: Curve) -> Apart:
    """How far two trainings are from each other; differences of weights are relative to the largest
    entry of an array.
    """
    losses = np.abs(one.losses / other.losses - 1)
    weights = [
        np.max(np.abs(one.weights[k] - v)) / np.max(np.abs(v)) for k, v in other.weights.items()
    ]
    assert one.weights.keys() == other.weights.keys()
    assert np.all(np.isfinite(one.losses))
    return Apart(
        float(losses.max()),
        float(losses[-1]),
        float(np.max(np.abs(one.norms / other.norms - 1))),
        float(max(weights)),
    )


def run_case(name: str, schedule: str, optimizer: str) -> str:
    """How a run of `RUNS` is kept."""
    return f"{name} {schedule} {optimizer}"


def curve_case(schedule: str) -> str:
    """How the GPT's curve is kept."""
    return f"curve {schedule}"


def spread(curves: Iterable[Sequence[float]]) -> float:
    """The largest relative difference of any two curves in any step."""
    rows = np.array(list(curves))
    return float(np.max((rows.max(0) - rows.min(0)) / np.abs(rows).min(0))) if len(rows) else 0.0


def main() -> int:
    """Run what out/ does not have; 1 if anything is further apart than `MANY`."""
    virtual_devices()
    for run in RUNS:
        if run_case(*run) not in load(TRAINING):
            _against_torch(*run)
    for name in curve_names():
        if curve_case(name) not in load(TRAINING):
            _curve(name)
    found = load(TRAINING)
    curves = [found[curve_case(name)]["curve"] for name in curve_names()]
    passed = spread(curves) <= MANY and all(found[run_case(*run)]["passed"] for run in RUNS)
    return 0 if passed else 1


def _against_torch(name: str, schedule_name: str, optimizer: str) -> None:
    import jaxpipe as jp

    schedule = jp.schedules.build(schedule_name, devices=2, microbatches=4)
    model, begin = model_for(name, schedule), time.monotonic()
    batches = batches_of(model, schedule.num_microbatches, STEPS)
    chain, theirs = adamw(STEPS, model) if optimizer == "adamw" else momentum(0.02)
    curve = in_jax(schedule, model, batches, chain)
    found = apart(curve, in_torch(schedule, model, batches, theirs))
    numbers = {
        **vars(found),
        "first": curve.losses[0],
        "final": curve.losses[-1],
        "passed": found.worst <= MANY,
    }
    keep(
        TRAINING,
        run_case(name, schedule_name, optimizer),
        **numbers,
        steps=STEPS,
        seconds=round(time.monotonic() - begin, 1),
    )
    print(run_case(name, schedule_name, optimizer), found, flush=True)


def _curve(schedule_name: str) -> None:
    import jaxpipe as jp

    schedule = jp.schedules.build(schedule_name, devices=2, microbatches=4)
    model, begin = model_for("gpt", schedule), time.monotonic()
    curve = in_jax(
        schedule, model, batches_of(model, schedule.num_microbatches, STEPS), adamw(STEPS, model)[0]
    )
    keep(
        TRAINING,
        curve_case(schedule_name),
        curve=[float(x) for x in curve.losses],
        seconds=round(time.monotonic() - begin, 1),
    )
    print(curve_case(schedule_name), flush=True)


if __name__ == "__main__":
    sys.exit(main())
