"""Checkpoints of parameters that are spread over data and tensor axes too: read on any other mesh,
and never whole on a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from jaxpipe.checkpoint import Checkpoints, PortableState
from tests.axes.model import HIDDEN, SPECS, WIDTH, build, canonical, mesh, pipeline

EVERYTHING: dict[str, Any] = {
    "data_axes": ("data",),
    "fsdp": "data",
    "shard_outer": True,
    "specs": SPECS,
}


def state_of(pipe: Any, *, seed: int) -> dict[str, Any]:
    """Parameters, and moments of other numbers, as a step leaves them."""
    rng = np.random.default_rng(seed)
    tree = jax.tree.map(lambda a: rng.standard_normal(a.shape), canonical(pipe.schedule.num_stages))
    params = pipe.place(tree)
    mu, nu = (jax.tree.map(lambda a, f=f: f * a, params) for f in (2, 3))
    return {"params": params, "opt_state": optax.ScaleByAdamState(jnp.asarray(seed), mu, nu)}


def test_parameters_spread_over_all_axes_are_read_on_any_mesh(tmp_path: Path) -> None:
    wide, narrow = (
        pipeline(build("interleaved_1f1b"), **EVERYTHING),
        pipeline(build("interleaved_1f1b"), mesh=mesh()),
    )
    saved = state_of(wide, seed=1)
    with Checkpoints(tmp_path, wide) as checkpoints:
        checkpoints.save(1, saved)
    for pipe in (narrow, wide):
        like = state_of(pipe, seed=2)
        with Checkpoints(tmp_path, pipe) as checkpoints:
            _, found = checkpoints.restore(like)
        for ours, theirs in zip(
            *(jax.tree.leaves((s["params"], s["opt_state"])) for s in (found, saved)), strict=True
        ):
            assert np.array_equal(ours, theirs)  # numbers are moved, not computed
        # Moments lie where their parameters do, so that no step moves them.
        for tree in (found["params"], found["opt_state"].mu, found["opt_state"].nu):
            assert jax.tree.map(lambda a: a.sharding, tree) == jax.tree.map(
                lambda a: a.sharding, like["params"]
            )


def test_a_restored_state_goes_on_under_explicit_axes(tmp_path: Path) -> None:
    """Numbers of the optimizer are on the mesh of the parameters there, or no update could use
    both.
    """
    explicit = mesh()
    explicit = Mesh(
        explicit.devices,
        explicit.axis_names,
        axis_types=(AxisType.Explicit,) * len(explicit.axis_names),
    )
    pipe = pipeline(build("1f1b"), mesh=explicit)
    with jax.set_mesh(explicit), Checkpoints(tmp_path, pipe) as checkpoints:
        saved = state_of(pipe, seed=1)
        checkpoints.save(1, saved)
        _, found = checkpoints.restore(state_of(pipe, seed=2))
        update = jax.jit(optax.scale_by_adam().update)
        updates, _ = update(found["params"], found["opt_state"])
        wanted, _ = update(saved["params"], saved["opt_state"])
    for ours, theirs in zip(*map(jax.tree.leaves, (updates, wanted)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)  # float64, a few roundings


def test_no_device_holds_the_whole_model_while_it_is_saved() -> None:
    """In model order too stages are spread over the pipe axis, and the other dims as they were."""
    pipe = pipeline(build("interleaved_1f1b"), **EVERYTHING)
    natural = PortableState(pipe.partition).of(state_of(pipe, seed=1))
    shapes = {
        leaf.sharding.shard_shape(leaf.shape)
        for leaf in (natural["params"]["stages"]["w"], natural["opt_state"].mu["stages"]["w"])
    }
    assert shapes == {(4 // 2, WIDTH // 2, HIDDEN // 2)}
