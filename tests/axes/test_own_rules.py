"""Rules that look at one array, in every layout: refused on placed arrays, and under `per_layer`
what they are on the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jaxpipe as jp
from tests.axes.test_own_paths import CASES, paths_of, pipe_of
from tests.parity.tolerance import FLOAT64
from tests.refused import refused
from tests.tiers import slow
from tests.tolerance import relative


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def named(pattern: str) -> Callable[[Any], Any]:
    """A mask of the parameters in whose paths a pattern is found."""

    def mask(params: Any) -> Any:
        found = re.compile(pattern)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: (
                found.search(jax.tree_util.keystr(path, simple=True, separator="/")) is not None
            ),
            params,
        )

    return mask


def decay(mask: Any) -> Any:
    return optax.adamw(0.1, weight_decay=0.5, mask=mask)


def clipped_late() -> Any:
    """Gradients over the norm of all in the step before."""

    def update(grads: Any, norm: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: g / (1 + norm), grads), optax.tree.norm(grads)

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


# For each number, or for all parameters together: as they are on placed arrays.
PLAIN: dict[str, Any] = {
    "adamw": optax.adamw(0.1),
    "clipped late": clipped_late(),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "every second": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 2
    ),
    "if finite": optax.apply_if_finite(optax.chain(optax.zero_nans(), optax.lion(0.1)), 2),
    "prodigy": optax.contrib.prodigy(0.1),
    "with the loss": optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
}
# For one array.
RULES: dict[str, Any] = {
    "rank": decay(matrices),
    "rank, every second": optax.MultiSteps(decay(matrices), 2),
    "rank, with the loss": optax.chain(decay(matrices), optax.contrib.reduce_on_plateau()),
    "muon": optax.contrib.muon(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "lamb after a clip": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1)),
    "axes": optax.adaptive_grad_clip(1.0),
    "maxima in the state": optax.sm3(0.1),
    "noise": optax.chain(optax.add_noise(0.1, 0.1, 0), optax.sgd(0.1, momentum=0.9)),
}


@pytest.mark.parametrize("case", CASES)
def test_init_refuses_rules_for_one_array_and_no_others(case: str) -> None:
    pipe = pipe_of(case, frozen=None)
    params = pipe.place(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), CASES[case][1])
    )
    for rule in PLAIN.values():
        pipe.init(rule, params)
    for name, rule in RULES.items():
        with refused(r"jaxpipe.per_layer\(pipe, optimizer\)[^\n]*\n  '"):
            pytest.fail(f"{name} passes: {pipe.init(rule, params)}")
    pipe.init(
        optax.chain(optax.clip_by_global_norm(1.0), jp.per_layer(pipe, RULES["muon"])), params
    )
    pipe.init(RULES["rank"], params, as_placed=True)


def test_init_refuses_masks_by_paths_that_placed_parameters_do_not_have() -> None:
    for case, pattern, fault in (
        (
            "alike",
            "^stages/w$",
            r"'stages/w' of shape \(4, 4\) is stored in 'stages/0/w' of shape \(2, 4, 4\)",
        ),
        (
            "a list",
            "^stages/1/w$",
            r"'stages/1/w' of shape \(4, 4\) is stored in 'stages/0/w' of shape \(2, 4, 4\)",
        ),
        (
            "buffers",
            "^stages/t/scale$",
            r"'stages/t/scale' of shape \(4,\) is stored in 'stages/0/",
        ),
    ):
        pipe = pipe_of(case, frozen=None)
        with refused(fault):
            pipe.init(decay(named(pattern)), pipe.place(CASES[case][1]))
    # A padded parameter has its own path, and a mask of it decays zeros to zeros.
    pipe = pipe_of("padded ends", frozen=None)
    placed = pipe.place(CASES["padded ends"][1])
    assert placed["last"]["w"].shape == (6, 4)
    pipe.init(decay(named("^last/w$")), placed)


def test_a_clip_of_one_parameter_alone_is_for_all() -> None:
    """A model with one leaf: its norm is that of all parameters."""
    schedule = jp.schedules.build("zbv", devices=1, microbatches=2)
    mesh = jax.make_mesh((1,), ("pipe",), devices=jax.devices()[:1])
    pipe = jp.Pipeline(
        jp.Model(lambda p, x: x @ p, last=lambda p, x, mb: jnp.mean(x)), schedule, mesh
    )
    pipe.init(PLAIN["clipped"], pipe.place({"stages": jnp.ones((2, 3, 3)), "last": {}}))


def own_tree(canonical: Any) -> Any:
    """A list of trees, one a layer, and the rest: as the model without a pipeline has them."""
    stages = canonical["stages"]
    if isinstance(stages, list):
        return canonical
    stacks = (
        stages
        if set(stages) <= {"t", "w"} and isinstance(next(iter(stages.values())), dict)
        else {"": stages}
    )
    rows = {
        f"{name}{i}": jax.tree.map(lambda leaf, i=i: leaf[i], tree)
        for name, tree in stacks.items()
        for i in range(len(jax.tree.leaves(tree)[0]))
    }
    return {**canonical, "stages": rows}


QUICK = [
    ("alike", "some"),
    ("padded ends", "some"),
    ("a list of unlike shapes", "some"),
    ("buffers", "some"),
    ("buffers", "a kind"),
]
ALL = [(case, frozen) for case in CASES for frozen in ("some", "a kind")]


@pytest.mark.parametrize(
    ("case", "frozen"), [*QUICK, *(slow(*each) for each in ALL if each not in QUICK)]
)
def test_under_per_layer_a_rule_is_what_it_is_on_the_models_own_arrays(
    case: str, frozen: str
) -> None:
    """With frozen parameters, or nothing but such in a kind of layer; and `MultiSteps` around and
    inside.
    """
    _, canonical, some = CASES[case]
    patterns = (
        some if frozen == "some" else ["^stages/t/"] if "layers" in CASES[case][0] else ["^stages/"]
    )
    pipe = pipe_of(case, frozen=patterns)
    rng = np.random.default_rng(3)
    draws = [
        jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), canonical) for _ in range(4)
    ]
    still = [any(re.search(pattern, name) for pattern in patterns) for name in paths_of(canonical)]

    def masked(tree: Any) -> Any:
        leaves, form = jax.tree.flatten(tree)
        return own_tree(
            jax.tree.unflatten(
                form, [np.full(leaf.shape, kept) for leaf, kept in zip(leaves, still, strict=True)]
            )
        )

    kept = jax.tree.leaves(masked(canonical))

    def trained(tree: Any) -> Any:
        leaves, form = jax.tree.flatten(own_tree(tree))
        return jax.tree.unflatten(
            form, [None if gone.all() else leaf for leaf, gone in zip(leaves, kept, strict=True)]
        )

    rule = optax.chain(
        optax.adafactor(0.1, min_dim_size_to_factor=2, multiply_by_parameter_scale=True),
        optax.add_decayed_weights(0.1, mask=matrices),
    )
    params = pipe.place(canonical)
    placed = [pipe.trained(pipe.place(draw)) for draw in draws]
    wanted, state = trained(canonical), optax.MultiSteps(rule, 2).init(trained(canonical))
    plain = jax.jit(optax.MultiSteps(rule, 2).update)
    for draw in draws:
        updates, state = plain(trained(draw), state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    for around in (True, False):
        inside = jp.per_layer(
            pipe, rule if around else optax.MultiSteps(rule, 2).gradient_transformation()
        )
        tx = optax.MultiSteps(inside, 2) if around else inside
        mine, state = pipe.trained(params), pipe.init(tx, params)
        update = jax.jit(tx.update)
        for grads in placed:
            updates, state = update(grads, state, mine)
            mine = optax.apply_updates(mine, updates)
        assert jax.tree.structure(mine) == jax.tree.structure(pipe.trained(params))
        found = pipe.canonical(pipe.with_trained(params, mine))
        found = trained({key: found[key] for key in canonical})
        # The same formula in two programs, vectorised in one.
        assert relative(found, wanted) <= 100 * FLOAT64, around


def test_moments_of_padded_parameters_are_cut_as_these_are() -> None:
    pipe = pipe_of("padded ends", frozen=None)
    params = pipe.place(CASES["padded ends"][1])
    tx = jp.per_layer(pipe, optax.adam(0.1))
    state = pipe.init(tx, params)
    _, after = jax.jit(tx.update)(params, state, params)
    for each in (state, after):
        assert {
            leaf.sharding.shard_shape(leaf.shape)
            for leaf in jax.tree.leaves(each["last"])
            if leaf.ndim
        } == {(3, 4)}


def test_stages_of_a_list_are_not_told_apart_by_number() -> None:
    pipe = pipe_of("a list", frozen=None)
    params = pipe.place(CASES["a list"][1])
    with refused(r"paths without numbers:\n  'stages/1/w', which it gives as 'stages/w'"):
        pipe.init(jp.per_layer(pipe, decay(named("^stages/1/w$"))), params)
    pipe.init(jp.per_layer(pipe, decay(named("^stages/(./)?w$"))), params)
