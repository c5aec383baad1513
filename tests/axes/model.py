"""A model with Megatron's two-matmul block, small enough for a 2x2x2 CPU mesh, and what it gives on
one device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxpipe as jp
from tests.flat import flat_pipeline
from tests.oracle import oracle_value_and_grad

FEATURES, WIDTH, HIDDEN, CLASSES, ROWS = 6, 8, 16, 12, 4
SCHEDULES = {"1f1b": 1, "zb_h1": 1, "interleaved_1f1b": 2, "dualpipe": 1}
# Column parallel, then row parallel (Shoeybi et al. 2019, section 3): one all-reduce behind v, and
# one for dx behind w.
SPECS = {
    "stages": {
        "w": PartitionSpec(None, "tensor"),
        "b": PartitionSpec("tensor"),
        "v": PartitionSpec("tensor"),
    },
    "last": {"head": PartitionSpec(None, "tensor")},
}


def first(params: Any, microbatch: Any) -> Any:
    return jnp.tanh(microbatch["x"] @ params["embed"])


def stage(params: Any, x: Any) -> Any:
    # `gain` and `odd` divide over no axis: they must stay whole.
    return (
        x
        + params["gain"] * jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]
        + jnp.sum(params["odd"])
    )


def last(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(jnp.square(x @ params["head"] - microbatch["y"]))


def mesh(*names: str) -> Mesh:
    """Eight devices, two along each of three axes."""
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), names or ("pipe", "data", "tensor"))


def build(name: str, microbatches: int = 4) -> jp.Schedule:
    return jp.schedules.build(name, devices=2, microbatches=microbatches, chunks=SCHEDULES[name])


def pipeline(schedule: jp.Schedule, **options: Any) -> jp.Pipeline:
    grid = options.setdefault("mesh", mesh())
    options.setdefault(
        "replicated_axes",
        [name for name in grid.axis_names if name not in options.get("data_axes", ())],
    )
    return flat_pipeline(
        options.pop("stage", stage),
        schedule=schedule,
        first=first,
        last=options.pop("last", last),
        **options,
    )


def canonical(stages: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    own = {
        "w": rng.standard_normal((stages, WIDTH, HIDDEN)) / 3,
        "b": rng.standard_normal((stages, HIDDEN)),
        "v": rng.standard_normal((stages, HIDDEN, WIDTH)) / 4,
        "gain": rng.standard_normal(stages),
        "odd": rng.standard_normal((stages, 3)) / 10,
    }
    outer = {
        "first": {"embed": rng.standard_normal((FEATURES, WIDTH))},
        "last": {"head": rng.standard_normal((WIDTH, CLASSES))},
    }
    return {**outer, "stages": own}


def batch(microbatches: int, *, seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    rows = ROWS * microbatches
    return {"x": rng.standard_normal((rows, FEATURES)), "y": rng.standard_normal((rows, CLASSES))}


@cache
def truth(stages: int, microbatches: int) -> tuple[Any, Any]:
    """Loss and canonical gradients on one device, in float64.

    All rows at once: the mean over equal microbatches of a mean over rows is the mean over all
    rows, however they are cut.
    """
    step = jax.jit(
        lambda p, b: oracle_value_and_grad(
            p, b, first=first, stage=stage, last=last, microbatches=1
        )
    )
    return step(canonical(stages), batch(microbatches))


def worst_error(found: Any, wanted: Any) -> float:
    """The largest difference in any array, relative to the largest entry of that array; infinite
    where it is not finite.
    """
    worst = 0.0
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        f, w = np.asarray(f), np.asarray(w)
        assert f.shape == w.shape
        error = float(np.max(np.abs(f - w))) / float(np.max(np.abs(w)))
        worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst


def like_truth(canonical_grads: dict[str, Any]) -> dict[str, Any]:
    """Without the keys of parts that have no parameters."""
    return {key: canonical_grads[key] for key in ("first", "last", "stages")}
