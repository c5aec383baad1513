"""`Pipeline.profile`: every action of a run has its time, in an order that the table allows, beside the plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp

P, M, WIDTH = 2, 4, 64


def build(name, **options):
    schedule = jp.schedules.build(name, devices=P, microbatches=M)
    mesh = jax.make_mesh((P,), ("pipe",), devices=jax.devices()[:P])
    return jp.Pipeline(
        lambda w, x: x + jnp.tanh(x @ w) @ w.T, schedule=schedule, mesh=mesh, last=lambda p, x, mb: jnp.mean(x**2), **options
    )


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_every_action_has_its_time(name):
    pipe = build(name)
    params = pipe.place({"stages": jnp.ones((P, WIDTH, WIDTH)) * 0.01, "last": {}})
    ran = pipe.profile(params, {"x": np.ones((16, WIDTH))}, repeats=1)
    table = ran.schedule.encoded
    starts, ends = np.array(ran.starts), np.array(ran.ends)
    assert (ends >= starts).all()
    assert starts.min() == 0
    for device in range(P):
        mine = slice(table.first[device], table.first[device + 1])
        assert (starts[mine][1:] >= ends[mine][:-1]).all(), "a device does one thing at a time, in the order of its row"
    # What comes from another device is there before it is used.
    made = table.producer
    assert all(starts[i] >= ends[made[i]] for i in range(table.num_actions) if made[i] >= 0)
    planned = jp.simulate(ran.schedule, ran.costs)
    compared = ran.over(planned)
    assert sum(loss.time for loss in compared.losses) == pytest.approx(ran.makespan - planned.makespan)
    assert "the step took" in str(compared)


def test_a_profile_needs_a_run():
    pipe = build("1f1b")
    with pytest.raises(jp.PipelineError, match="repeats must be at least 1"):
        pipe.profile({}, {}, repeats=0)
