"""What one layout of layers saved, another goes on with: moments and parameters are written layer by layer."""

import jax
import numpy as np
import optax
import pytest

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from jaxpipe.errors import CheckpointError
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.unlike.test_unlike import EXTRA, M, draw, head, rows, tokens, unlike_model, worst

CANONICAL = {"first": draw({"table": (5, 4)}), "stages": {"t": draw({"w": (6, 4, 4), "scale": (6, 4)})}, "last": draw({"head": (4, 2)})}


def layered(name, devices, layout):
    schedule = jp.schedules.build(name, devices=devices, microbatches=M)
    return jp.Pipeline(layers=EXTRA, layout=layout, schedule=schedule, mesh=mesh_of(devices))


def train(pipe, optimizer, state, steps, batch):
    losses = []
    for _ in range(steps):
        loss, grads = pipe.value_and_grad(state["params"], batch)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        state = {"params": optax.apply_updates(state["params"], updates), "moments": moments}
        losses.append(float(loss))
    return state, losses


def begin(pipe, optimizer, canonical=CANONICAL):
    params = pipe.place(canonical)
    return {"params": params, "moments": optimizer.init(params)}


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
        pairs = [jax.device_get(pipe.canonical(s["params"])["stages"]) for pipe, s in ((other, found), (one, end))]
        assert worst(*pairs) <= FLOAT64 * 10  # adam divides by the root of a small second moment
        if other is one:
            assert losses == wanted


def test_stages_with_functions_of_their_own_resume(tmp_path):
    functions, canonical = unlike_model(4)
    optimizer = optax.adam(0.1)
    pipes = [
        jp.Pipeline(functions, schedule=jp.schedules.build(name, devices=devices, microbatches=M), mesh=mesh_of(devices), last=head)
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


def test_what_does_not_follow_the_parameters_is_refused(tmp_path):
    pipe = layered("1f1b", 2, "Ett|ttttL")
    params = pipe.place(CANONICAL)
    masked = optax.masked(optax.adam(0.1), lambda tree: jax.tree_util.tree_map_with_path(lambda p, _: "scale" not in str(p), tree))
    with Checkpoints(tmp_path, pipe) as checkpoints, pytest.raises(CheckpointError, match="t/0/scale is left out"):
        checkpoints.save(0, {"params": params, "moments": masked.init(params)})
    assert np.isfinite(float(pipe.evaluate(params, tokens())))
