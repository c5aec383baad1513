"""Training: jaxpipe + optax against torch_ref + torch.optim, from the same weights, on the same batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp
import torch_ref
from tests.models import to_flat, to_tree, twin
from tests.parity.engines import pipeline
from torch_ref import optim

ROWS = 2
# Both sides round each step in another way, and every step works on what the last one left.  Adam divides by the root of the second
# moment, so a relative error of a small gradient becomes one of the update; 1e-9 after 200 steps is the claim of the project, and
# a handful of steps must be far below it.
FEW, MANY = 1e-12, 1e-9


def batches_of(model, microbatches, steps):
    return [model.batch(ROWS * microbatches, seed=step) for step in range(steps)]


def decayed(params):
    """True where weight decay applies: kernels and embeddings, not biases and scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)


def train(schedule, model, batches, chain):
    """Losses, gradient norms and final weights by path name."""
    pipe = pipeline(schedule, model)
    params = pipe.place(to_tree(model.weights()))
    state = chain.init(params)

    @jax.jit
    def step(params, state, batch):
        loss, grads = pipe.value_and_grad(params, batch)
        updates, state = chain.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.global_norm(grads)

    losses, norms = [], []
    for batch in batches:
        params, state, loss, norm = step(params, state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    return np.array(losses), np.array(norms), to_flat(pipe.canonical(params))


def adamw(steps, model):
    """(optax, torch_ref) with warm-up, weight decay with a mask, and clipping by global norm."""
    schedule = optim.WarmupCosine(peak=3e-3, warmup_steps=max(steps // 10, 2), decay_steps=steps, end=1e-4)
    # optax would compute the rate in float32: both sides get the same list of float64 numbers.
    rates = [schedule(step) for step in range(steps)]
    table = jnp.asarray(rates)
    chain = optax.chain(
        optax.clip_by_global_norm(1.05),
        optax.adamw(lambda count: table[count], b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decayed),
    )
    spared = tuple(f"*/{end}" for end in ("bias", "scale") if any(name.endswith(end) for name in model.weights()))
    in_torch = optim.AdamW(rates, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, no_decay=spared, clip=1.05)
    return chain, in_torch


def momentum(rate):
    return optax.sgd(rate, momentum=0.9), optim.SGD(rate, momentum=0.9)


def agree(schedule, model, steps, optimizers, tolerance):
    batches = batches_of(model, schedule.num_microbatches, steps)
    losses, norms, weights = train(schedule, model, batches, optimizers[0])
    in_torch = torch_ref.train(schedule.to_csv(), model.reference, batches, weights=model.weights(), optimizer=optimizers[1])
    np.testing.assert_allclose(losses, in_torch.losses, rtol=tolerance)
    np.testing.assert_allclose(norms, in_torch.grad_norms, rtol=tolerance)
    for name, value in in_torch.weights.items():
        assert np.max(np.abs(weights[name] - value)) <= tolerance * np.max(np.abs(value)), name
    return losses, norms


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_few_steps_of_adamw_equal_torch_optim(name):
    schedule = jp.schedules.build(name, devices=2, microbatches=4)
    model = twin("mlp", schedule.num_stages)
    _, norms = agree(schedule, model, 6, adamw(6, model), FEW)
    assert norms.min() < 1.05 < norms.max(), "clipping must work in some steps and not in others"


def test_a_few_steps_of_sgd_with_momentum_equal_torch_optim():
    agree(jp.schedules.build("gpipe", devices=2, microbatches=3), twin("mlp", 2), 6, momentum(0.1), FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["1f1b", "interleaved_zb", "dualpipe"])
def test_two_hundred_steps_of_the_gpt_with_adamw(name):
    schedule = jp.schedules.build(name, devices=2, microbatches=4)
    # Equal numbers of stages, so that the curves of the three schedules are of one model.
    stages = 4
    model = twin("gpt", schedule.num_stages, layers_per_stage=stages // schedule.num_stages)
    losses, _ = agree(schedule, model, 200, adamw(200, model), MANY)
    assert losses[-20:].mean() < losses[:20].mean()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_steps_of_the_conv_net_with_momentum():
    agree(jp.schedules.build("1f1b", devices=2, microbatches=4), twin("conv", 2), 200, momentum(0.02), MANY)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_schedule_gives_the_same_curve():
    names = [n for n in jp.schedules.names() if jp.schedules.describe(n).chunks.natural == 1]
    curves = {}
    for name in names:
        schedule = jp.schedules.build(name, devices=2, microbatches=4)
        if schedule.num_stages == 2:
            model = twin("mlp", 2)
            curves[name] = train(schedule, model, batches_of(model, 4, 200), adamw(200, model)[0])[0]
    assert len(curves) > 5
    for name, curve in curves.items():
        np.testing.assert_allclose(curve, curves["gpipe"], rtol=MANY, err_msg=name)
