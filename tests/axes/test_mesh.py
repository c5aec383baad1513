"""Meshes with axes of any types: what the pipeline hands out works in eager JAX, and it takes what
lies on such a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxpipe as jp
from jaxpipe.debug import find_nonfinite
from jaxpipe.eager import EagerExecutor
from tests.axes.model import (
    SPECS,
    batch,
    build,
    canonical,
    like_truth,
    pipeline,
    truth,
    worst_error,
)
from tests.axes.test_errors import raises
from tests.flat import flat_pipeline
from tests.parity.tolerance import FLOAT64
from tests.tolerance import same

EXPLICIT = AxisType.Explicit


def small_pipe(**options: Any) -> tuple[jp.Pipeline, Any, Any]:
    """Two stages on README's mesh, with canonical parameters and a batch."""
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2], axis_types=(EXPLICIT,))
    pipe = flat_pipeline(
        lambda p, x: jnp.tanh(x @ p),
        schedule=schedule,
        mesh=mesh,
        last=lambda p, x, mb: (jnp.mean(x @ p), {"m": jnp.sum(x)}),
        has_metrics=True,
        **options,
    )
    return (
        pipe,
        {"stages": np.full((2, 3, 3), 0.1), "last": np.ones((3, 1))},
        {"x": np.ones((4, 3))},
    )


def test_what_comes_from_an_explicit_mesh_works_in_eager_jax() -> None:
    pipe, weights, rows = small_pipe()
    params = pipe.place(weights)
    (loss, metrics), grads = pipe.value_and_grad(params, rows)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))
    # A sum of two dozen squares in another order.
    np.testing.assert_allclose(optax.tree.norm(grads), norm, rtol=1e-14)
    clipped, _ = optax.clip_by_global_norm(norm / 2).update(grads, optax.EmptyState())
    np.testing.assert_allclose(optax.tree.norm(clipped), norm / 2, rtol=1e-14)
    assert np.array_equal(ravel_pytree(grads)[0], np.concatenate([leaf.ravel() for leaf in leaves]))
    assert np.array_equal(params["stages"][0][1], weights["stages"][1])
    assert np.isfinite(loss + metrics["m"] + optax.tree.norm(grads))
    # The same compiled program: parameters from the host are moved to where placed ones lie.
    again = pipe.value_and_grad(jax.tree.map(np.asarray, params), rows)
    assert same(again[1], grads)


def test_the_eager_executor_places_results_as_the_compiled_step_does() -> None:
    placed = []
    for executor in (None, EagerExecutor()):
        pipe, weights, rows = small_pipe(executor=executor)
        found = pipe.value_and_grad(pipe.place(weights), rows)
        placed.append(found)
    for compiled, eager in zip(jax.tree.leaves(placed[0]), jax.tree.leaves(placed[1]), strict=True):
        assert eager.sharding.is_equivalent_to(compiled.sharding, eager.ndim)


def explicit_mesh(**types: AxisType) -> Mesh:
    names = ("pipe", "data", "tensor")
    return jax.make_mesh((2, 2, 2), names, axis_types=tuple(types.get(n, EXPLICIT) for n in names))


def wanted_of(pipe: jp.Pipeline, found: Any) -> float:
    """The worst error of (loss, grads) against one device."""
    return worst_error((found[0], like_truth(pipe.canonical(found[1]))), truth(2, 4))


@pytest.mark.parametrize("options", [{}, {"fsdp": "data"}], ids=["data", "fsdp"])
def test_every_axis_may_be_explicit(options: dict[str, Any]) -> None:
    mesh = explicit_mesh()
    pipe = pipeline(build("1f1b"), mesh=mesh, data_axes=("data",), specs=SPECS, **options)
    # a user's own arrays have explicit axes
    rows = jax.device_put(batch(4), NamedSharding(mesh, PartitionSpec("data")))
    weights = jax.device_put(canonical(2), NamedSharding(mesh, PartitionSpec()))
    assert wanted_of(pipe, pipe.value_and_grad(pipe.place(weights), rows)) <= FLOAT64


@pytest.mark.slow
def test_tools_take_arrays_of_a_context_of_explicit_axes() -> None:
    """Tools of a pipeline compile and run programs of their own, some for one device: each is as
    outside of the context.
    """
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh(
        (2, 2), ("pipe", "data"), devices=jax.devices()[:4], axis_types=(EXPLICIT,) * 2
    )
    layers: dict[str, Callable[..., Any]] = {
        "t": lambda p, x: jnp.tanh(x @ p),
        "u": lambda p, x: x * p,
        "L": lambda p, x, mb: jnp.mean((x @ p - mb["y"]) ** 2),
    }
    rows = {"x": rng.normal(size=(8, 8)), "y": rng.normal(size=(8, 2))}
    last = rng.normal(size=(8, 2))
    by_letters = {"t": rng.normal(size=(3, 8, 8)), "u": rng.normal(size=(1, 8))}
    for model, stages, layout in (
        (jp.Model(layers, layers="tuttL"), by_letters, "tu|ttL"),
        (jp.Model(layers["t"], last=layers["L"]), by_letters["t"][:2], None),
    ):
        weights = {"stages": stages, "last": last}
        table = jp.schedules.build("1f1b", devices=2, microbatches=2)
        sharding = jp.Sharding(data="data", fsdp="data")
        pipe = jp.Pipeline(model, table, mesh, layout=layout, sharding=sharding)
        rule = jp.per_layer(pipe, optax.lamb(0.1))

        def run(pipe: jp.Pipeline = pipe, rule: Any = rule, weights: Any = weights) -> Any:
            params = pipe.place(weights)
            updates, _ = rule.update(params, pipe.init(rule, params), params)
            assert find_nonfinite(pipe, params, rows) is None
            assert jp.inspect.profile(pipe, params, rows, repeats=1).makespan > 0
            jp.measure(pipe.model, weights, jax.tree.map(lambda a: a[:2], rows), repeats=1)
            sizes = jp.inspect.memory(pipe, params, rows)
            return (
                pipe.canonical(updates),
                sizes,
                jp.inspect.report(pipe, params, rows)["predicted"],
            )

        with jax.set_mesh(mesh):
            found = run()
        wanted = run()
        assert found[1:] == wanted[1:]
        assert worst_error(found[0], wanted[0]) <= FLOAT64


def test_under_set_mesh_results_have_the_contexts_axes() -> None:
    """There arrays of automatic axes could not be computed with."""
    mesh = explicit_mesh(tensor=AxisType.Auto)
    pipe = pipeline(build("1f1b"), mesh=mesh, data_axes=("data",), specs=SPECS)
    with jax.set_mesh(mesh):
        params = pipe.place(canonical(2))

        @jax.jit
        def step(params: Any, rows: Any) -> Any:
            loss, grads = pipe.value_and_grad(jax.tree.map(lambda leaf: 1.0 * leaf, params), rows)
            return 1.0 * loss, jax.tree.map(lambda g, p: g + 0.0 * p, grads, params)

        found = step(params, batch(4))
        assert np.isfinite(optax.tree.norm(found[1]))
    assert wanted_of(pipe, found) <= FLOAT64


def partitioned_pipe() -> tuple[jp.Pipeline, Any, Any]:
    """A stage that partitions itself, as attention of cuDNN does; parameters and a batch on the
    user's mesh, whose axes are explicit.
    """

    def split(mesh: Any, arguments: Any, result: Any) -> Any:
        found = tuple(each.sharding for each in arguments)
        return mesh, jnp.sin, result.sharding, found

    sine = custom_partitioning(jnp.sin)
    sine.def_partition(partition=split, sharding_rule="i j -> i j")
    differentiable = jax.custom_vjp(sine)
    differentiable.defvjp(lambda x: (sine(x), x), lambda x, dy: (jnp.cos(x) * dy,))
    mesh = jax.make_mesh(
        (2, 2), ("pipe", "data"), devices=jax.devices()[:4], axis_types=(EXPLICIT,) * 2
    )
    model = jp.Model(lambda p, x: differentiable(x @ p), last=lambda p, x, mb: jnp.mean(x**2))
    table = jp.schedules.build("1f1b", devices=2, microbatches=2)
    pipe = jp.Pipeline(model, table, mesh, sharding=jp.Sharding(data="data"))
    rng = np.random.default_rng(0)
    weights, rows = {"stages": rng.normal(size=(2, 4, 4)), "last": {}}, rng.normal(size=(8, 4))
    return pipe, weights, {"x": jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))}


def test_a_function_that_partitions_itself_takes_a_batch_of_explicit_axes() -> None:
    pipe, weights, rows = partitioned_pipe()
    params = pipe.place(weights)
    wanted = pipe.model.loss(weights, jax.device_get(rows), microbatches=4)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), rows
    )
    for found in (
        pipe.value_and_grad(params, rows)[0],
        pipe.evaluate(params, rows),
        pipe.lower(params, shapes).compile()(params, rows)[0],
    ):
        assert abs(found - wanted) <= FLOAT64 * wanted
    with raises("custom_partitioning", "NamedSharding(pipe.mesh, spec)"):
        pipe.jit(pipe.value_and_grad)(params, rows)
    own = jax.device_put(rows, NamedSharding(pipe.mesh, PartitionSpec("data")))
    assert abs(pipe.jit(pipe.value_and_grad)(params, own)[0] - wanted) <= FLOAT64 * wanted


def test_gradients_of_the_loss_have_the_types_of_their_parameters() -> None:
    """Whether these were placed inside of the context of explicit axes, or outside."""
    mesh = explicit_mesh()
    pipe = pipeline(build("1f1b"), mesh=mesh, data_axes=("data",), specs=SPECS)
    outside, rows = pipe.place(canonical(2)), batch(4)
    with jax.set_mesh(mesh):
        inside = pipe.place(canonical(2))
        found = {"outside": (outside, jax.grad(pipe.loss)(outside, rows))}
    found["inside"] = inside, jax.grad(pipe.loss)(inside, rows)
    for params, grads in found.values():
        assert jax.tree.map(jax.typeof, grads) == jax.tree.map(jax.typeof, params)
        assert worst_error(like_truth(pipe.canonical(grads)), truth(2, 4)[1]) <= FLOAT64


def test_a_context_of_another_mesh_is_refused() -> None:
    pipe, weights, rows = small_pipe()
    params = pipe.place(weights)
    other = jax.make_mesh((4,), ("pipe",), devices=jax.devices()[:4], axis_types=(EXPLICIT,))
    calls: list[Callable[[], Any]] = [
        lambda: pipe.place(weights),
        lambda: pipe.value_and_grad(params, rows),
        lambda: jax.grad(lambda p: pipe.loss(p, rows)[0])(params),
        lambda: pipe.evaluate(params, rows),
        lambda: pipe.outputs(params, rows),
        lambda: pipe.lower(params, rows),
        lambda: pipe.canonical(params),
        lambda: pipe.init(optax.adam(0.1), params),
        lambda: jp.per_layer(pipe, optax.adam(0.1)).update(params, (), params),
    ]
    with jax.set_mesh(other):
        for call in calls:
            with raises("a mesh of {'pipe': 4}", "is {'pipe': 2}", "jax.set_mesh(pipe.mesh)"):
                call()
    with jax.set_mesh(pipe.mesh):
        assert np.isfinite(pipe.value_and_grad(params, rows)[0][0])
