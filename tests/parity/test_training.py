"""Training: jaxpipe + optax against torch_ref + torch.optim; `python -m tests.parity.training`
takes 200 steps.
"""

import numpy as np
import pytest

import jaxpipe as jp
from tests.models import twin
from tests.parity.training import (
    FEW,
    MANY,
    RUNS,
    STEPS,
    adamw,
    apart,
    batches_of,
    in_jax,
    in_torch,
    model_for,
    momentum,
)
from tests.tiers import slow


def agree(schedule, model, steps, optimizers, tolerance):
    batches = batches_of(model, schedule.num_microbatches, steps)
    curve = in_jax(schedule, model, batches, optimizers[0])
    found = apart(curve, in_torch(schedule, model, batches, optimizers[1]))
    assert found.worst <= tolerance, found
    return curve


@pytest.mark.parametrize("name", ["1f1b", slow("zbv")])
def test_ten_steps_of_adamw_equal_torch_optim(name):
    schedule = jp.schedules.build(name, devices=2, microbatches=4)
    model = twin("mlp", schedule.num_stages)
    curve = agree(schedule, model, 10, adamw(10, model), FEW)
    assert curve.norms.min() < 1.05 < curve.norms.max(), (
        "clipping must work in some steps and not in others"
    )


def test_ten_steps_of_sgd_with_momentum_equal_torch_optim():
    agree(
        jp.schedules.build("gpipe", devices=2, microbatches=3),
        twin("mlp", 2),
        10,
        momentum(0.1),
        FEW,
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "schedule", "optimizer"), RUNS)
def test_two_hundred_steps_equal_torch_optim(name, schedule, optimizer):
    schedule = jp.schedules.build(schedule, devices=2, microbatches=4)
    model = model_for(name, schedule)
    curve = agree(
        schedule,
        model,
        STEPS,
        adamw(STEPS, model) if optimizer == "adamw" else momentum(0.02),
        MANY,
    )
    if name == "gpt":  # the conv net's labels are drawn at random, so it has nothing to learn
        assert curve.losses[-20:].mean() < curve.losses[:20].mean()


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stages", [2, 4])
def test_every_schedule_gives_the_same_curve(stages):
    model, curves = twin("mlp", stages), {}
    for name in jp.schedules.names():
        schedule = jp.schedules.build(name, devices=2, microbatches=4)
        if schedule.num_stages == stages:
            curves[name] = in_jax(
                schedule, model, batches_of(model, 4, STEPS), adamw(STEPS, model)[0]
            ).losses
    assert len(curves) > 5
    for name, curve in curves.items():
        np.testing.assert_allclose(curve, next(iter(curves.values())), rtol=MANY, err_msg=name)
