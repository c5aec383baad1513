"""The executor against plain torch autograd, for tables of every sort."""

import random

import numpy as np
import pytest
import torch
from plain import plain, worst
from strategies import random_schedule

import jaxpipe as jp
import torch_ref
from torch_ref.models import GPT, MLP

torch.set_num_threads(1)

# Sums of the same float64 terms in another order: a few units in the last place (2e-16) times the
# number of terms.
TOLERANCE = 1e-12


def mlp_batch(rows, *, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((rows, 8)), "y": rng.standard_normal((rows, 4))}


def gpt_batch(rows, *, seed=0, weighted=False):
    rng = np.random.default_rng(seed)
    batch = {name: rng.integers(0, 11, (rows, 6)) for name in ("tokens", "targets")}
    return batch | (
        {"weights": rng.integers(0, 2, (rows, 6)).astype(float) + 0.5} if weighted else {}
    )


def small_gpt(stages, **flags):
    return GPT(num_stages=stages, layers_per_stage=2, vocab=11, block=8, width=8, heads=2, **flags)


def agrees(table, model, batch, *, microbatches, rows=None, **how):
    """Run the table and compare everything with plain autograd; gives the result back for more
    questions.
    """
    weights = model.init(3)
    total = len(next(iter(batch.values())))
    rows = rows or [total // microbatches] * microbatches
    loss, grads, losses = plain(model, weights, batch, rows=rows)
    result = torch_ref.run(table, model, batch, weights=weights, rows=rows, **how)
    np.testing.assert_allclose(result.losses, losses, rtol=TOLERANCE)
    np.testing.assert_allclose(result.loss, loss, rtol=TOLERANCE)
    assert worst(result.grads, grads) < TOLERANCE
    return result


NAMES = jp.schedules.names()


@pytest.mark.parametrize("name", NAMES)
def test_every_named_schedule_on_the_gpt(name):
    table = jp.schedules.build(name, devices=2, microbatches=4)
    model = small_gpt(table.num_stages)
    result = agrees(table.to_csv(), model, gpt_batch(8), microbatches=4)
    assert result.peak_activations == jp.simulate(table).peak_activations


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_random_tables_on_the_mlp(seed, recompute):
    """Random placements (bidirectional too), orders, mixes of B and I + W, pairs, idle cells, and
    R.
    """
    table = random_schedule(random.Random(seed), recompute=recompute)
    model, batch = MLP(num_stages=table.num_stages), mlp_batch(2 * table.num_microbatches)
    expected = jp.simulate(table).peak_activations
    if table.forward_only:
        result = torch_ref.run(table.to_csv(), model, batch, weights=model.init())
        assert result.grads == {}
    else:
        result = agrees(table.to_csv(), model, batch, microbatches=table.num_microbatches)
    assert result.peak_activations == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_named_schedule_with_recomputation_on_the_gpt(name):
    plain_table = jp.schedules.build(name, devices=2, microbatches=4)
    table = jp.add_recompute(plain_table)
    model = small_gpt(table.num_stages)
    result = agrees(table.to_csv(), model, gpt_batch(8), microbatches=4)
    assert result.peak_activations == jp.simulate(table).peak_activations
    # What R computes is handed to nobody: losses and outputs are those of F.
    without = torch_ref.run(plain_table.to_csv(), model, gpt_batch(8), weights=model.init(3))
    np.testing.assert_allclose(result.losses, without.losses, rtol=TOLERANCE)
    assert len(result.outputs) == len(without.outputs)
    for ours, theirs in zip(result.outputs, without.outputs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)


class WatchedMLP(MLP):
    """Notes whether autograd was on at each run of a stage."""

    def stage(self, params, x, ctx):
        runs.append((ctx.stage, ctx.microbatch, torch.is_grad_enabled()))
        return super().stage(params, x, ctx)


runs: list[tuple[int, int, bool]] = []


def test_a_forward_with_a_recomputation_keeps_no_graph():
    runs.clear()
    result = agrees(
        "0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1R0,1B0,1F1,1B1\n",
        WatchedMLP(num_stages=2),
        mlp_batch(4),
        microbatches=2,
    )
    first = [grad for stage, m, grad in runs if (stage, m) == (0, 0)]
    assert first == [True, False, True], "plain autograd's run, then F, then R"
    assert [grad for stage, m, grad in runs if (stage, m) == (1, 1)] == [True, True], (
        "no R: F keeps the graph"
    )
    assert result.peak_activations == (1, 1)


RECOMPUTED = "0F0,0F1,0R1,0F2,0R0,0I0,0B1,0W0,0B2\n1F0,1R0,1I0,1F1,1R1,1W0,1F2,1B1,1R2,1I2,1W2\n"
ZERO_BUBBLE = "0F0,0F1,0I0,0F2,0I1,0W0,0I2,0W1,0W2\n1F0,1I0,1F1,1W0,1I1,,1F2,1I2,1W2,1W1\n"
BIDIRECTIONAL = "0F0,1F1,,1B1,0B0\n1F0,0F1,(1F2;1B0)OVERLAP_F_B,0I1,1B2,0W1\n,0F2,0B2\n"


# Both ends on all devices, with whole and with split backwards, and a forward that is run again;
# the last, with the rest of L as H.
SPREAD = (
    "0E0,0F0,0L0,0E1,0B0,0F1,0L1,0G0,0B1,0G1\n1E0,1F0,1L0,1E1,1B0,1F1,1L1,1G0,1B1,1G1\n",
    "0E1,0E0,0F0,0F1,0L0,0L1,0R0,0I0,0W0,0I1,0G1,0W1,0G0\n"
    "1E1,1E0,1F0,1L0,1F1,1L1,1I0,1B1,1W0,1G1,1G0\n",
    "0F0,0L0,0F1,0B0,0L1,0H1,0B1,0H0\n1F0,1L0,1H0,1B0,1F1,1L1,1B1,1H1\n",
)


@pytest.mark.parametrize("table", SPREAD)
@pytest.mark.parametrize("tied", [True, False])
def test_what_all_devices_do_together(table, tied):
    agrees(table, small_gpt(2, tied=tied), gpt_batch(4), microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_named_schedule_with_both_ends_on_all_devices(name):
    """Every other schedule ties the embedding to the head."""
    table = jp.spread_first(jp.spread_last(jp.schedules.build(name, devices=2, microbatches=4)))
    result = agrees(
        table.to_csv(),
        small_gpt(table.num_stages, tied=NAMES.index(name) % 2 == 0),
        gpt_batch(8),
        microbatches=4,
    )
    assert result.peak_activations == jp.simulate(table).peak_activations


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gelu_tanh", [True, False])
def test_split_backward(tied, gelu_tanh):
    result = agrees(
        ZERO_BUBBLE, small_gpt(2, tied=tied, gelu_tanh=gelu_tanh), gpt_batch(6), microbatches=3
    )
    assert result.peak_activations == (3, 2)


def test_bidirectional_placement():
    """Microbatch 1 goes the other way, microbatch 2 starts on a third device."""
    agrees(BIDIRECTIONAL, small_gpt(2), gpt_batch(6), microbatches=3)


def test_order_of_microbatches_does_not_show():
    forwards = "0F2,0F0,0F1,0B1,0B2,0B0\n1F2,1F0,1B0,1F1,1B1,1B2\n"
    model, batch = small_gpt(2), gpt_batch(6)
    usual = torch_ref.run(
        jp.schedules.build("gpipe", devices=2, microbatches=3).to_csv(),
        model,
        batch,
        weights=model.init(),
    )
    other = torch_ref.run(forwards, model, batch, weights=model.init())
    # Forwards do not depend on one another, and losses and outputs come in the order of
    # microbatches.
    np.testing.assert_allclose(other.losses, usual.losses, rtol=TOLERANCE)
    for ours, theirs in zip(other.outputs, usual.outputs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())
    assert other.order.index("1F2") < other.order.index("1F0")


def test_without_first_the_split_still_agrees():
    """Stage 0's input needs no gradient, so all its work is weight work."""
    agrees(ZERO_BUBBLE, MLP(num_stages=2, with_first=False), mlp_batch(6), microbatches=3)


@pytest.mark.parametrize("table", [ZERO_BUBBLE, BIDIRECTIONAL])
def test_sum_and_count(table):
    result = agrees(
        table, small_gpt(2, sum_count=True), gpt_batch(6, weighted=True), microbatches=3
    )
    assert result.counts.shape == (3,)
    np.testing.assert_allclose(
        result.loss, result.losses.sum() / result.counts.sum(), rtol=TOLERANCE
    )


def test_uneven_microbatches_weigh_by_rows():
    model, batch = MLP(num_stages=2), mlp_batch(7)
    agrees(ZERO_BUBBLE, model, batch, microbatches=3, rows=[3, 3, 1])


def test_weighted_targets_as_a_mean_of_each_microbatch():
    agrees(ZERO_BUBBLE, small_gpt(2), gpt_batch(6, weighted=True), microbatches=3)


def test_loss_scale_leaves_no_trace():
    """A power of two, so that scaling and unscaling are exact; torch runs the same kernels, one
    after the other, in both.
    """
    model, batch = MLP(num_stages=2), mlp_batch(6)
    plainly = torch_ref.run(ZERO_BUBBLE, model, batch, weights=model.init())
    scaled = torch_ref.run(ZERO_BUBBLE, model, batch, weights=model.init(), loss_scale=1024.0)
    assert plainly.loss == scaled.loss
    for name, gradient in plainly.grads.items():
        np.testing.assert_array_equal(scaled.grads[name], gradient)


def test_a_second_run_knows_nothing_of_the_first():
    model, batch = MLP(num_stages=2), mlp_batch(6)
    first, second = (
        torch_ref.run(ZERO_BUBBLE, model, batch, weights=model.init()) for _ in range(2)
    )
    # The same kernels in the same order on the same numbers: the same bits.
    for name, gradient in first.grads.items():
        np.testing.assert_array_equal(second.grads[name], gradient)


def test_forward_only_table_gives_the_training_loss():
    model, batch = small_gpt(2), gpt_batch(6)
    trained = torch_ref.run(ZERO_BUBBLE, model, batch, weights=model.init())
    evaluated = torch_ref.run("0F0,0F1,0F2\n1F0,1F1,1F2\n", model, batch, weights=model.init())
    np.testing.assert_allclose(evaluated.losses, trained.losses, rtol=TOLERANCE)
    assert evaluated.grads == {}
    assert evaluated.peak_activations == (1, 1)


def test_one_stage_holds_first_and_last():
    agrees("0F0,0I0,0F1,0W0,0B1\n", small_gpt(1), gpt_batch(4), microbatches=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_accumulates_in_float32(dtype):
    model, batch = MLP(num_stages=2), mlp_batch(6)
    exact = torch_ref.run(ZERO_BUBBLE, model, batch, weights=model.init())
    lower = torch_ref.run(ZERO_BUBBLE, model, batch, weights=model.init(), dtype=dtype)
    # Rounding errors of a chain of 4 layers of 8 terms each: some tens of units of rounding,
    # relative to the largest entry.
    assert worst(lower.grads, exact.grads) < 64 * torch.finfo(dtype).eps
    assert all(gradient.dtype == np.float32 for gradient in lower.grads.values())


def test_mutated_tables_run_and_agree_or_are_refused():
    """`check` and the executor share no code: they must draw the same line between good and bad
    tables.
    """
    verdicts = []
    for seed in range(300):
        rng = random.Random(seed)
        table, original = mutate(rng, random_schedule(rng, recompute=seed % 2 == 1))
        try:
            read = jp.check(jp.Schedule.from_csv(table))
        except jp.ScheduleError:
            model = MLP(num_stages=original.num_stages)
            with pytest.raises(torch_ref.TorchRefError):
                torch_ref.run(
                    table, model, mlp_batch(original.num_microbatches), weights=model.init()
                )
            verdicts.append(False)
            continue
        if not read.forward_only:
            agrees(
                table,
                MLP(num_stages=read.num_stages),
                mlp_batch(read.num_microbatches),
                microbatches=read.num_microbatches,
            )
        verdicts.append(True)
    assert 30 < sum(verdicts) < 270  # neither verdict is rare, so both are tested


def mutate(rng, schedule):
    """Swap, drop, double or move one cell."""
    rows = [list(row) for row in schedule.rows]
    row = rng.choice([row for row in rows if row])
    at, other = rng.randrange(len(row)), rng.randrange(len(row))
    match rng.choice(("swap", "drop", "double", "move")):
        case "swap":
            row[at], row[other] = row[other], row[at]
        case "drop":
            row.pop(at)
        case "double":
            row.insert(other, row[at])
        case "move":
            rng.choice(rows).append(row.pop(at))
    return schedule.with_rows(rows).to_csv(), schedule
