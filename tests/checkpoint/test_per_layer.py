"""The state of `per_layer` in the model's own layout: it says nothing of stages that happened to
share a chunk, so every placement goes on with it.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp
from jaxpipe.arrays import by_path, path_text
from jaxpipe.checkpoint import Checkpoints, PortableState
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.tolerance import relative, same

WIDTH, STEPS = 4, 2
# schedule, devices, chunks: stages have other chunk-mates, or none
PLACEMENTS = (("1f1b", 4, 1), ("zbv", 2, 2), ("interleaved_1f1b", 1, 4))


def draw(*shapes: tuple[int, ...]) -> list[Any]:
    return [np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(shapes)]


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


RULES = {
    "adam": lambda: optax.adam(0.1),
    "masked": lambda: optax.adamw(0.1, mask=matrices),
    "factored": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
}


def last(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(x**2)


def none(params: Any, x: Any) -> Any:
    return x


def trained(tree: Any, frozen: str | None) -> Any:
    """None in place of what is frozen."""

    def kept(path: Any, leaf: Any) -> Any:
        return None if frozen is not None and frozen in path_text(path) else leaf

    return jax.tree_util.tree_map_with_path(kept, tree)


def natural(pipe: jp.Pipeline, rule: Any, params: Any) -> tuple[Any, Any]:
    """The state after two updates in the model's layout, and the last updates."""
    placed, optimizer = pipe.place(params), jp.per_layer(pipe, rule)
    grads, state = pipe.trained(placed), pipe.init(optimizer, placed)
    for _ in range(STEPS):
        updates, state = jax.jit(optimizer.update)(grads, state, grads)
    whole = {"params": placed, "opt_state": state}
    found = PortableState(pipe.partition).of(whole)
    back = PortableState(pipe.partition).placed(found, whole)
    assert jax.tree.structure(back) == jax.tree.structure(whole)
    assert same(back, whole)
    return found["opt_state"]["stages"], pipe.canonical(updates)["stages"]


# Trees of nothing in common; one path in all, of two shapes and dtypes; a stage without parameters.
a, b, c, d = draw((WIDTH, WIDTH), (WIDTH,), (2, WIDTH), (2, 2))
LISTS = {
    "unlike paths": [{"w": a}, {"b": b}, {"w": a, "b": b}, {"u": {"v": c}}],
    "unlike shapes": [{"w": a, "b": b}, {"w": c, "b": b}, {"w": c}, {"w": d, "b": b}],
    "unlike dtypes": [{"w": a, "b": b}, {"w": a.astype(np.float32), "b": b}, {"b": b}, {"w": a}],
    "none": [{"w": a}, {}, {"w": a}, {"b": b}],
    "arrays": [a, b, {"w": c}, d],
}


def cases(quick: set[tuple[Any, ...]], *values: Any) -> list[Any]:
    """All combinations; those that are not quick are run by hand."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.exhaustive)
        for case in itertools.product(*values)
    ]


QUICK_LISTS = {
    ("adam", "unlike dtypes", "stages/1"),
    ("masked", "unlike shapes", None),
    ("adam", "none", "w"),
}


@pytest.mark.parametrize(
    ("rule", "stages", "frozen"),
    cases(QUICK_LISTS, RULES, LISTS, (None, "stages/1", "w", "stages")),
)
def test_a_list_of_stages_has_the_state_of_each_stage(
    rule: str, stages: str, frozen: str | None
) -> None:
    given = {"stages": LISTS[stages], "last": {}}
    unknown = frozen is not None and not any(frozen in path for path in by_path(given))
    own, wanted = RULES[rule](), []
    for tree in trained(given, frozen)["stages"]:
        grads = {"stages": tree}
        state, updates = own.init(grads), grads
        for _ in range(STEPS):
            updates, state = own.update(grads, state, grads)
        wanted.append((state if jax.tree.leaves(tree) else {}, updates["stages"]))
    for name, devices, chunks in PLACEMENTS:
        table = jp.schedules.build(name, devices=devices, microbatches=4, chunks=chunks)
        model = jp.Model([none] * 4, last=last, frozen=None if unknown else frozen)
        found, updates = natural(jp.Pipeline(model, table, mesh_of(devices)), own, given)
        for ours, tree, (state, change) in zip(found, updates, wanted, strict=True):
            assert jax.tree.structure(ours) == jax.tree.structure(state)
            assert relative(ours, state) <= FLOAT64
            assert relative(tree, change) <= FLOAT64


LETTERS = {"t": lambda p, x: x, "u": lambda p, x: x, "L": last}
LAYOUTS = ("ttu|t|uL", "|tt|utuL", "ttutuL")


QUICK_LETTERS = {("factored", "stages/u"), ("adam", "stages")}


@pytest.mark.parametrize(
    ("rule", "frozen"),
    cases(QUICK_LETTERS, RULES, (None, "stages/t/w", "stages/u", "stages")),
)
def test_letters_have_the_state_of_each_layer(rule: str, frozen: str | None) -> None:
    """Also where a stage is empty, or all layers of a letter are frozen."""
    t, u, w = draw((3, WIDTH, WIDTH), (2, 3, WIDTH), (3, WIDTH))
    given = {"stages": {"t": {"w": t, "b": w}, "u": {"v": u}}, "last": {}}
    own, wanted = RULES[rule](), {}
    for letter, stack in trained(given, frozen)["stages"].items():
        if not jax.tree.leaves(stack):
            continue
        grads = {"stages": {letter: stack}}
        state = jax.vmap(own.init)(grads)
        for _ in range(STEPS):
            _, state = jax.vmap(own.update)(grads, state, grads)
        wanted[letter] = state
    for layout in LAYOUTS:
        devices = layout.count("|") + 1
        table = jp.schedules.build("1f1b", devices=devices, microbatches=4)
        model = jp.Model(LETTERS, layers="ttutuL", frozen=frozen)
        pipe = jp.Pipeline(model, table, mesh_of(devices), layout=layout)
        found, _ = natural(pipe, own, given)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        assert relative(found, wanted) <= FLOAT64


def test_alike_stages_that_are_all_frozen_have_no_state() -> None:
    (w,) = draw((4, WIDTH, WIDTH))
    for name, devices, chunks in PLACEMENTS:
        table = jp.schedules.build(name, devices=devices, microbatches=4, chunks=chunks)
        pipe = jp.Pipeline(jp.Model(none, last=last, frozen="stages"), table, mesh_of(devices))
        found, _ = natural(pipe, optax.adam(0.1), {"stages": {"w": w}, "last": {}})
        assert jax.tree.structure(found) == jax.tree.structure(())


def test_a_checkpoint_of_a_list_goes_on_with_other_chunk_mates(tmp_path: Path) -> None:
    given = {"stages": LISTS["unlike shapes"], "last": {}}
    states = []
    for name, devices, chunks in PLACEMENTS:
        table = jp.schedules.build(name, devices=devices, microbatches=4, chunks=chunks)
        pipe = jp.Pipeline(jp.Model([none] * 4, last=last), table, mesh_of(devices))
        placed, optimizer = pipe.place(given), jp.per_layer(pipe, optax.adam(0.1))
        state = {"params": placed, "opt_state": pipe.init(optimizer, placed)}
        with Checkpoints(tmp_path, pipe) as checkpoints:
            if not states:
                _, state["opt_state"] = optimizer.update(placed, state["opt_state"], placed)
                checkpoints.save(1, state)
            else:
                _, state = checkpoints.restore(state)
        _, after = optimizer.update(placed, state["opt_state"], placed)
        states.append(
            PortableState(pipe.partition).of({"params": placed, "opt_state": after})["opt_state"]
        )
    assert max(relative(state, states[0]) for state in states[1:]) <= FLOAT64
