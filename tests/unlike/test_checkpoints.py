"""What one layout of layers saved, another goes on with: moments and parameters are written layer
by layer.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints, PortableState
from jaxpipe.errors import CheckpointError
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.tolerance import relative
from tests.unlike.test_unlike import EXTRA, M, draw, head, rows, tokens, unlike_model

CANONICAL = {
    "first": draw({"table": (5, 4)}),
    "stages": {"t": draw({"w": (6, 4, 4), "scale": (6, 4)})},
    "last": draw({"head": (4, 2)}),
}


def layered(name, devices, layout):
    schedule = jp.schedules.build(name, devices=devices, microbatches=M)
    return jp.Pipeline(
        jp.Model(EXTRA, layers=layout),
        schedule,
        mesh_of(devices),
        layout=layout,
    )


def train(pipe, optimizer, state, steps, batch):
    @jax.jit
    def update(state, grads):
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}

    losses = []
    for _ in range(steps):
        loss, grads = pipe.value_and_grad(state["params"], batch)
        state = update(state, grads)
        losses.append(float(loss))
    return state, losses


def begin(pipe, optimizer, canonical=CANONICAL):
    params = pipe.place(canonical)
    return {"params": params, "moments": optimizer.init(params)}


@pytest.mark.slow
def test_a_layout_resumes_what_another_one_saved(tmp_path):
    optimizer = optax.adamw(0.1)
    one = layered("1f1b", 2, "Ett|ttttL")
    state, _ = train(one, optimizer, begin(one, optimizer), 2, tokens())
    with Checkpoints(tmp_path, one) as checkpoints:
        checkpoints.save(2, state)
    end, wanted = train(one, optimizer, state, 2, tokens())
    for other in (layered("zbv", 2, "Et|t||ttttL"), layered("1f1b", 4, "Et|tt|t|ttL"), one):
        with Checkpoints(tmp_path, other) as checkpoints:
            _, resumed = checkpoints.restore(begin(other, optimizer))
        found, losses = train(other, optimizer, resumed, 2, tokens())
        assert max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)) <= FLOAT64
        pairs = [
            jax.device_get(pipe.canonical(s["params"])["stages"])
            for pipe, s in ((other, found), (one, end))
        ]
        assert relative(*pairs) <= FLOAT64 * 10  # adam divides by the root of a small second moment
        if other is one:  # the same compiled step and update, on what was saved: the same bits
            assert losses == wanted


@pytest.mark.slow
def test_stages_with_functions_of_their_own_resume(tmp_path):
    functions, canonical = unlike_model(4)
    optimizer = optax.adam(0.1)
    pipes = [
        jp.Pipeline(
            jp.Model(functions, last=head),
            jp.schedules.build(name, devices=devices, microbatches=M),
            mesh_of(devices),
        )
        for name, devices in (("1f1b", 4), ("zbv", 2))
    ]
    state, _ = train(pipes[0], optimizer, begin(pipes[0], optimizer, canonical), 1, rows())
    with Checkpoints(tmp_path, pipes[0]) as checkpoints:
        checkpoints.save(1, state)
    _, wanted = train(pipes[0], optimizer, state, 2, rows())
    with Checkpoints(tmp_path, pipes[1]) as checkpoints:
        _, resumed = checkpoints.restore(begin(pipes[1], optimizer, canonical))
    _, losses = train(pipes[1], optimizer, resumed, 2, rows())
    assert max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)) <= FLOAT64


def test_stages_of_a_list_may_have_scalars():
    functions = [lambda p, x: x * p["s"], lambda p, x: x @ p["w"]]
    pipe = jp.Pipeline(
        jp.Model(functions, last=head),
        jp.schedules.build("1f1b", devices=2, microbatches=M),
        mesh_of(2),
    )
    canonical = {"stages": [{"s": 2.0}, draw({"w": (3, 4)})], "last": draw({"head": (4, 2)})}
    canonical = jax.tree.map(jnp.asarray, canonical)
    state = {"params": pipe.place(canonical)}
    portable = PortableState(pipe.partition)
    found = portable.of(state)
    assert relative(found["params"], canonical) == 0  # numbers are moved, not computed
    assert relative(portable.placed(found, state), state) == 0
    assert (
        relative(pipe.canonical(state["params"], spread=True)["stages"], canonical["stages"]) == 0
    )
    plain = PortableState(None)
    assert (
        relative(
            plain.placed(plain.of({"params": canonical}), {"params": canonical}),
            {"params": canonical},
        )
        == 0
    )


def of_the_head(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: "head" in str(path), tree)


def test_what_is_frozen_has_no_moments_in_a_checkpoint():
    """As in the model without a pipeline, which can go on from it."""
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    pipe = jp.Pipeline(
        jp.Model(EXTRA, layers="EtttL", frozen=["scale$"]), schedule, mesh_of(2), layout="Et|ttL"
    )
    canonical = {
        **CANONICAL,
        "stages": jax.tree.map(lambda leaf: jnp.asarray(leaf[:3]), CANONICAL["stages"]),
    }
    params, optimizer = (
        pipe.place(canonical),
        optax.chain(optax.adam(0.1), optax.masked(optax.trace(0.9), of_the_head)),
    )
    state = {"params": params, "moments": pipe.init(optimizer, params)}
    portable = PortableState(pipe.partition)
    found = portable.of(state)
    trained = {**canonical, "stages": {"t": {"w": canonical["stages"]["t"]["w"], "scale": None}}}
    plain = PortableState(None).of({"params": canonical, "moments": optimizer.init(trained)})
    assert jax.tree.structure(found) == jax.tree.structure(plain)
    assert relative(portable.placed(found, state), state) == 0


def test_an_array_without_numbers_is_named(tmp_path):
    state = {"params": {"stages": jnp.ones((2, 3)), "last": {"none": jnp.ones((0, 4))}}}
    with (
        Checkpoints(tmp_path, None) as checkpoints,
        pytest.raises(CheckpointError, match=r"params/last/none is float64\[0, 4\]"),
    ):
        checkpoints.save(1, state)


def label(path):
    return "frozen" if "table" in str(path) else "slow" if "scale" in str(path) else "fast"


@pytest.mark.slow
def test_moments_of_masked_parameters_go_on_with_another_layout(tmp_path):
    """A rule for each kind of parameter: each rule's moments are of its parameters alone, and are
    written without the others.
    """

    def labels(tree):
        return jax.tree_util.tree_map_with_path(lambda path, _: label(path), tree)

    optimizer = optax.multi_transform(
        {
            "fast": optax.adam(0.1),
            "slow": optax.sgd(0.01, momentum=0.9),
            "frozen": optax.set_to_zero(),
        },
        labels,
    )
    one, other = layered("1f1b", 2, "Ett|ttttL"), layered("zbv", 2, "Et|t||ttttL")
    state, _ = train(one, optimizer, begin(one, optimizer), 2, tokens())
    with Checkpoints(tmp_path, one) as checkpoints:
        checkpoints.save(2, state)
    natural = (
        PortableState(one.partition)
        .of(state)["moments"]
        .inner_states["fast"]
        .inner_state[0]
        .mu["stages"]["t"]
    )
    assert natural["w"].shape == (6, 4, 4)
    assert natural["scale"] == optax.MaskedNode()
    _, wanted = train(one, optimizer, state, 2, tokens())
    for pipe in (other, one):
        with Checkpoints(tmp_path, pipe) as checkpoints:
            _, resumed = checkpoints.restore(begin(pipe, optimizer))
        assert jax.tree.structure(resumed) == jax.tree.structure(begin(pipe, optimizer))
        _, losses = train(pipe, optimizer, resumed, 2, tokens())
        assert max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)) <= FLOAT64
        # the same compiled step and update, on what was saved: the same bits
        assert pipe is other or losses == wanted


def test_what_does_not_follow_the_parameters_is_refused(tmp_path):
    pipe = layered("1f1b", 2, "Ett|ttttL")
    params = pipe.place(CANONICAL)
    history = jax.tree.map(lambda a: jax.numpy.stack([a, a]), params)
    with (
        Checkpoints(tmp_path, pipe) as checkpoints,
        pytest.raises(
            CheckpointError, match=r"t/0/scale of shape .* fits no axis of its parameter"
        ),
    ):
        checkpoints.save(0, {"params": params, "history": history})
