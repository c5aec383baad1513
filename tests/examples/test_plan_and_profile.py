"""The walk from README's model to a planned and profiled step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from examples import plan_and_profile as example


@pytest.mark.slow
def test_the_walk_ends_with_a_profile_of_the_planned_step(capsys):
    plans, ran = example.main(jax.devices()[: example.DEVICES])
    out = capsys.readouterr().out
    assert ran.schedule.placement == plans.best.schedule.placement
    assert ran.makespan > 0
    assert "the step took" in out
    # The loss of the planned pipeline is that of the layers one after the other.
    params = example.parameters()
    tokens = jax.random.randint(
        jax.random.key(4), (example.MICROBATCHES * example.ROWS, example.TIME + 1), 0, example.VOCAB
    )
    x = example.embed(params["first"], {"tokens": tokens[:, :-1]})
    for i in range(example.LAYERS):
        x = example.block(jax.tree.map(lambda leaf, i=i: leaf[i], params["stages"]["t"]), x)
    loss = example.head_loss(params["last"], x, {"targets": tokens[:, 1:]})
    (printed,) = (line.split()[1] for line in out.splitlines() if line.startswith("loss"))
    assert float(printed) == pytest.approx(float(jnp.asarray(loss)), abs=1e-4), (
        "four decimals are printed"
    )
