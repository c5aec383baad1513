"""`frozen` and `specs` speak of the model's own paths and shapes, whatever the layout makes of them
on the devices.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from tests.flat import flat_pipeline
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.refused import refused
from tests.tolerance import relative, same
from tests.unlike.test_unlike import draw

M, D, V = 4, 4, 5


def layer(p: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ p["w"]) * p["scale"]


def shared_layer(p: Any, x: Any, *, shared: Any) -> Any:
    return x + jnp.tanh(x @ p["w"]) * p["scale"] * shared["gain"]


def wide(p: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ p["w"]) @ p["down"]


def embed(p: Any, mb: Any) -> Any:
    return p["w"][mb["tokens"]]


def nll(table: Any, x: Any, mb: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x @ table.T, mb["targets"]).mean()


def head(p: Any, x: Any, mb: Any) -> Any:
    return nll(p["w"], x, mb)


ONE = {"w": (D, D), "scale": (D,)}
WIDE = {"w": (D, 6), "down": (6, D)}
ENDS = {"first": draw({"w": (V, D)}, 8), "last": draw({"w": (V, D)}, 9)}
FULL: dict[str, Any] = {"first": embed, "last": head}
SPREAD: dict[str, Any] = {"first": jp.VocabEmbedding(), "last": jp.VocabHead()}


def stack(shapes: Any, count: int) -> Any:
    return jax.tree.map(
        lambda shape: (count, *shape), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )


def letters(t: int, w: int) -> Any:
    return {"t": draw(stack(ONE, t), 1), "w": draw(stack(WIDE, w), 2)}


# By name: how the pipeline is given, its parameters, and what is frozen (and what other layouts
# would make of these paths).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "alike": ({"stage": layer, **FULL}, {"stages": draw(stack(ONE, 2), 1), **ENDS}, ["^stages/w$"]),
    "padded ends": (
        {"stage": layer, **SPREAD},
        {"stages": draw(stack(ONE, 2), 1), **ENDS},
        ["^last/w$", "^first/w$"],
    ),
    "a list": (
        {"stage": [layer, layer], **FULL},
        {"stages": [draw(ONE, 1), draw(ONE, 2)], **ENDS},
        ["^stages/1/w$"],
    ),
    "a list of unlike shapes": (
        {"stage": [wide, layer], **FULL},
        {"stages": [draw(WIDE, 1), draw(ONE, 2)], **ENDS},
        ["^stages/0/w$"],
    ),
    "letters": (
        {"layers": {"E": embed, "t": layer, "L": head}, "layout": "Ett|tL"},
        {"stages": {"t": draw(stack(ONE, 3))}, **ENDS},
        ["/w$"],
    ),
    "buffers": (
        {
            "layers": {"E": SPREAD["first"], "t": layer, "w": wide, "L": SPREAD["last"]},
            "layout": "Ettt|twL",
        },
        {"stages": letters(4, 1), **ENDS},
        ["^stages/w/w$", "^stages/t/scale$", "^last/w$"],
    ),
    "shared": (
        {"stage": shared_layer, **SPREAD},
        {"stages": draw(stack(ONE, 2), 1), "shared": draw({"gain": (D,)}, 3), **ENDS},
        ["^shared/gain$", "^last/w$"],
    ),
}


def pipe_of(case: str, **more: Any) -> jp.Pipeline:
    model, _, frozen = CASES[case]
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    return flat_pipeline(
        **{"frozen": frozen, "mesh": mesh_of(2), "schedule": schedule, **model, **more}
    )


def batch() -> Any:
    rng = np.random.default_rng(0)
    return {key: rng.integers(0, V, (2 * M, 3)) for key in ("tokens", "targets")}


def plain(case: str, params: Any) -> Any:
    """The loss of the model without a pipeline."""
    model = CASES[case][0]
    mb, x = batch(), embed(params["first"], batch())
    stages = params["stages"]
    if "layers" in model:
        seen = dict.fromkeys(stages, 0)
        for letter in re.sub("[EL|]", "", model["layout"]):
            x = model["layers"][letter](
                jax.tree.map(lambda leaf, i=seen[letter]: leaf[i], stages[letter]), x
            )
            seen[letter] += 1
    for s in range(2 if "stage" in model else 0):
        one = isinstance(stages, list)
        own = stages[s] if one else jax.tree.map(lambda leaf, s=s: leaf[s], stages)
        x = (model["stage"][s] if one else model["stage"])(
            own, x, **({"shared": params["shared"]} if "shared" in params else {})
        )
    return head(params["last"], x, mb)


def paths_of(params: Any) -> list[str]:
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]


@pytest.mark.parametrize("case", CASES)
def test_what_a_pattern_names_stays_and_the_rest_is_trained(case: str) -> None:
    """Two steps of Adam, equal to plain JAX with the same leaves masked."""
    pipe, (_, canonical, frozen) = pipe_of(case), CASES[case]
    names = paths_of(canonical)
    still = [any(re.search(pattern, name) for pattern in frozen) for name in names]
    optimizer = optax.adam(0.1)
    params = pipe.place(canonical)
    state = pipe.init(optimizer, params)
    wanted = jax.tree.map(jnp.asarray, canonical)
    wanted_state = optimizer.init(wanted)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        loss, grads = pipe.value_and_grad(params, batch())
        updates, state = optimizer.update(grads, state, pipe.trained(params))
        return (
            pipe.with_trained(params, optax.apply_updates(pipe.trained(params), updates)),
            state,
            loss,
        )

    for _ in range(2):
        params, state, loss = step(params, state)
        wanted_loss, grads = jax.value_and_grad(lambda p: plain(case, p))(wanted)
        assert abs(loss - wanted_loss) <= 10 * FLOAT64 * abs(wanted_loss)
        updates, wanted_state = optimizer.update(grads, wanted_state)
        leaves, tree = jax.tree.flatten(wanted)
        moved = jax.tree.leaves(optax.apply_updates(wanted, updates))
        wanted = jax.tree.unflatten(
            tree, [a if kept else b for a, b, kept in zip(leaves, moved, still, strict=True)]
        )
    found = pipe.canonical(params)
    found = {key: found[key] for key in canonical}
    for name, kept, before, after in zip(
        names, still, jax.tree.leaves(canonical), jax.tree.leaves(found), strict=True
    ):
        assert np.array_equal(before, after) is kept, name
    # Adam divides by the root of a small number: some tens of rounding errors a step.
    assert relative(found, wanted) <= 100 * FLOAT64


@pytest.mark.parametrize("case", CASES)
def test_functions_see_the_paths_and_shapes_of_the_model(case: str) -> None:
    """Without the axis of stages, or of layers, and without padding."""
    seen: dict[str, Any] = {}
    _, canonical, _ = CASES[case]
    pipe_of(case, frozen=lambda path, leaf: seen.setdefault(path, leaf.shape) != leaf.shape).place(
        canonical
    )
    stacked = not isinstance(canonical["stages"], list)
    shapes = {
        name: np.shape(leaf)[1:] if stacked and name.startswith("stages") else np.shape(leaf)
        for name, leaf in zip(paths_of(canonical), jax.tree.leaves(canonical), strict=True)
    }
    assert seen == shapes


def test_a_pattern_that_is_found_nowhere_is_an_error() -> None:
    with refused(
        r"'\^stages/w\$' is found in the path of no.*mean 'stages/[01]/w'.*the paths are "
        r"first/w, "
    ) as e:
        pipe_of("a list", frozen=["^stages/w$", "scale", "frist"]).place(CASES["a list"][1])
    assert len(e.value.faults) == 2
    params = pipe_of("alike", frozen=None).place(CASES["alike"][1])  # of a pipeline that trains all
    with refused("'layers' is found in the path of no"):
        pipe_of("alike", frozen="layers").value_and_grad(params, batch())


def test_what_was_placed_for_other_patterns_is_refused() -> None:
    """Where one stage's parameter is frozen alone, it lies in an array of its own."""
    params = pipe_of("a list", frozen=None).place(CASES["a list"][1])
    with refused(
        r"'stages/0/w' is stored in one array with 'stages/1/w'.*new.place\(old.canonical"
    ):
        pipe_of("a list").value_and_grad(params, batch())


@pytest.mark.parametrize("case", ["a list", "buffers"])
def test_a_checkpoint_keeps_what_is_frozen_and_moments_of_the_rest(
    tmp_path: Any, case: str
) -> None:
    pipe, canonical = pipe_of(case), CASES[case][1]
    params = pipe.place(canonical)
    rules = {"alone": optax.adam(0.1), "by layer": jp.per_layer(pipe, optax.adam(0.1))}
    state = {
        "params": params,
        **{
            name: rule.update(pipe.trained(params), pipe.init(rule, params))[1]
            for name, rule in rules.items()
        },
    }
    with Checkpoints(tmp_path, pipe) as checkpoints:
        checkpoints.save(1, state)
        _, found = checkpoints.restore(jax.tree.map(jnp.zeros_like, state))
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert same(found, state)


def test_specs_are_a_tree_like_the_parameters() -> None:
    """Also of a list of stages, of which each may be split in its own way, and where parameters are
    None.
    """
    spec = PartitionSpec
    stages = [{**draw(ONE, 1), "none": None}, {**draw(ONE, 2), "none": None}]
    canonical = {"stages": stages, **ENDS}
    outer = {"first": {"w": None}, "last": {"w": spec(None, "tensor")}}
    how: dict[str, Any] = {"mesh": mesh_of(2, tensor=2), "frozen": None}
    one = {"w": spec(None, "tensor"), "scale": None, "none": spec("tensor")}
    two = {"w": spec("tensor"), "scale": spec(), "none": None}
    for given, there in (
        ([one, two], spec("pipe", "tensor")),
        ([one, one], spec("pipe", None, "tensor")),
        (one, spec("pipe", None, "tensor")),
    ):
        pipe = pipe_of("a list", specs={"stages": given, **outer}, **how)
        params = pipe.place(canonical)
        w = next(leaf for name, leaf in params["stages"][0].leaves.items() if name != "scale")
        assert w.sharding.spec == there  # unlike ones lie in a buffer [P, parts, numbers]
        loss, grads = pipe.value_and_grad(params, batch())
        wanted_loss, wanted = jax.value_and_grad(lambda p: plain("a list", p))(canonical)
        assert abs(loss - wanted_loss) <= 10 * FLOAT64 * wanted_loss
        found = pipe.canonical(grads)
        assert relative({key: found[key] for key in wanted}, wanted) <= 10 * FLOAT64
    alike = {"stages": {**draw(stack(ONE, 2)), "none": None}, **ENDS}
    pipe_of(
        "alike",
        specs={"stages": {"w": spec("tensor"), "scale": None, "none": None}, **outer},
        **how,
    ).place(alike)
    with refused(
        r"specs name '2/w', but the parameters are \['0/scale', '0/w', '1/scale', '1/w'\]"
    ):
        pipe_of("a list", specs={"stages": [None, None, {"w": spec("tensor")}]}, **how).place(
            canonical
        )
