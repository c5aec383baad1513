"""torch.distributed.pipelining runs our tables in gloo processes, we run its tables, and the
numbers agree.
"""

import multiprocessing
import time

import numpy as np
import peer_probes
import pytest
import torch
from plain import worst
from test_ref_executor import TOLERANCE, ZERO_BUBBLE, agrees, gpt_batch, mlp_batch
from test_ref_models import conv_batch, rnn_batch

import jaxpipe as jp
import torch_ref
from torch_ref import PeerError, TableError
from torch_ref.models import GPT, MLP, RNN, ConvNet, MoE
from torch_ref.peer import Job, Split, own_names, own_table, run, run_many, spawn

torch.set_num_threads(1)

# Processes take seconds to start, tens of them on a busy machine; a hang is still told from
# slowness.
LIMIT = 240.0
# Torch's 1F1B is never a table that can run, see docs/torch_peer.md.
OWN = tuple(name for name in own_names() if name != "1F1B")


def gpt(stages, **flags):
    return GPT(num_stages=stages, vocab=11, block=8, width=8, heads=2, **flags)


def job(table, model, batch, **how):
    return Job(table, model, batch, model.init(2), **how)


def named(name, devices, microbatches, **how):
    """A job of a named schedule of ours and a GPT of as many stages as it needs."""
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    return job(schedule.to_csv(), gpt(schedule.num_stages, **how), gpt_batch(2 * microbatches))


def own(name, devices, microbatches):
    chunks = 1 if name in ("GPipe", "1F1B") else 2
    table = own_table(name, devices=devices, microbatches=microbatches, chunks=chunks)
    return job(table, gpt(devices * chunks), gpt_batch(2 * microbatches))


OURS = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "1f1b_overlap",
    "zb_h1",
    "zb_h2",
    "interleaved_zb",
)

TWO = {
    **{f"ours: {name}": named(name, 2, 4) for name in OURS},
    **{f"torch's: {name}": own(name, 2, 4) for name in OWN},
    "M < P": named("1f1b", 2, 1),
    "untied": named("zb_h1", 2, 3, tied=False),
    "sum and count": job(ZERO_BUBBLE, gpt(2, sum_count=True), gpt_batch(6, weighted=True)),
    "gathered": job(
        jp.add_gathers(jp.schedules.build("zbv", devices=2, microbatches=2)).to_csv(),
        gpt(4),
        gpt_batch(4),
    ),
    "conv": job(ZERO_BUBBLE, ConvNet(num_stages=2), conv_batch(6)),
    "moe": job(ZERO_BUBBLE, MoE(num_stages=2, vocab=11), gpt_batch(6)),
    "rnn": job(ZERO_BUBBLE, RNN(num_stages=2), rnn_batch(6), split=Split.AT_ONCE),
    "two layers a stage": job(
        ZERO_BUBBLE, gpt(2, layers_per_stage=2), gpt_batch(6), split=Split.AT_ONCE
    ),
    "without first": job(ZERO_BUBBLE, MLP(num_stages=2, with_first=False), mlp_batch(6)),
    "forwards in another order": job(
        "0F2,0F0,0F1,0B1,0B2,0B0\n1F2,1F0,1B0,1F1,1B1,1B2\n", gpt(2), gpt_batch(6)
    ),
    "pairs": job(
        "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n", gpt(2), gpt_batch(6)
    ),
}
FOUR = {
    **{
        f"ours: {name}": named(name, 4, 4)
        for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb")
    },
    **{
        f"torch's: {name}": own(name, 4, 8)
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    },
    "M < P": named("1f1b", 4, 2),
}


@pytest.fixture(scope="module")
def two():
    return dict(zip(TWO, run_many(list(TWO.values()), time_limit=LIMIT), strict=True))


@pytest.fixture(scope="module")
def four():
    return dict(zip(FOUR, run_many(list(FOUR.values()), time_limit=LIMIT), strict=True))


def compare(job, theirs):
    ours = torch_ref.run(job.table_csv, job.model, job.batch, weights=job.weights)
    # Forwards are the same operations on the same numbers, but in another process, with arrays that
    # may lie otherwise in memory.
    np.testing.assert_allclose(theirs.losses, ours.losses, rtol=TOLERANCE)
    for our, their in zip(ours.outputs, theirs.outputs, strict=True):
        for key in our if isinstance(our, dict) else [...]:
            np.testing.assert_allclose(
                their[key], our[key], rtol=0, atol=TOLERANCE * np.abs(our[key]).max()
            )
    np.testing.assert_allclose(theirs.loss, ours.loss, rtol=TOLERANCE)
    assert worst(theirs.grads, ours.grads) < TOLERANCE


@pytest.mark.parametrize("name", TWO)
def test_two_processes(two, name):
    compare(TWO[name], two[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_processes(four, name):
    compare(FOUR[name], four[name])


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (4, 8)])
def test_torchs_own_tables_in_our_executor(name, devices, microbatches):
    theirs = own(name, devices, microbatches)
    result = agrees(theirs.table_csv, theirs.model, theirs.batch, microbatches=microbatches)
    assert (
        result.peak_activations
        == jp.simulate(jp.check(jp.Schedule.from_csv(theirs.table_csv))).peak_activations
    )


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("0F0,1F1,1B1,0B0\n1F0,0F1,0B1,1B0\n", r"stages \[0, 1\] are on several devices"),
        ("0F0\n1F0\n", "wants a backward for every forward"),
        ("0F0,1F0,1B0,0B0\n\n", r"devices \[1\] hold no stage"),
        ("0F0,0B0\n", "the table has 1 stages, the model 2"),
        (
            "0F0,0B0\n1F0,1R0,1B0\n",
            r"no recomputation as an action; take 1 R out of the table \(1R0, ...\)",
        ),
    ],
)
def test_tables_that_torch_cannot_run(table, says):
    model = MLP(num_stages=2)
    with pytest.raises(PeerError, match=says):
        run(table, model, mlp_batch(4), weights=model.init())


def test_jobs_of_different_numbers_of_devices():
    with pytest.raises(PeerError, match=r"have \[2, 4\] devices"):
        run_many([named("gpipe", 2, 2), named("gpipe", 4, 2)])


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        (
            "Chimera",
            {"devices": 2, "microbatches": 2},
            "torch has no schedule 'Chimera'; write one of GPipe",
        ),
        (
            "GPipe",
            {"devices": 2, "microbatches": 2, "chunks": 2},
            "takes 1 stages a device, not 2; write chunks=1",
        ),
        (
            "DualPipeV",
            {"devices": 2, "microbatches": 2, "chunks": 2},
            "at least as many microbatches as stages",
        ),
        (
            "Interleaved1F1B",
            {"devices": 2, "microbatches": 5, "chunks": 2},
            "multiple of the number of rounds",
        ),
    ],
)
def test_tables_that_torch_does_not_make(name, numbers, says):
    with pytest.raises(PeerError, match=says):
        own_table(name, **numbers)


@pytest.mark.slow
def test_a_hang_becomes_an_error_and_leaves_nothing_behind():
    start = time.time()
    with pytest.raises(PeerError, match=r"2 processes did not end within 4 s:\nprocess 0:"):
        spawn(peer_probes.never_ends, 2, time_limit=4)
    assert time.time() - start < 60
    assert multiprocessing.active_children() == []


@pytest.mark.exhaustive
def test_a_hang_says_where_each_process_stood():
    with pytest.raises(PeerError) as caught:
        spawn(peer_probes.never_ends, 2, time_limit=60)
    assert str(caught.value).count("in never_ends") == 2


@pytest.mark.exhaustive
def test_a_failure_is_told_at_once():
    with pytest.raises(PeerError, match="KeyError: 'it was never there'"):
        spawn(peer_probes.fails, 2, time_limit=LIMIT)


# The faults of torch 2.13 that docs/torch_peer.md lists.  A test that fails here may be good news:
# then the page is out of date.


def test_torchs_1f1b_is_off_by_one_on_its_last_rank():
    assert own_table("1F1B", devices=2, microbatches=2).splitlines()[1] == "1F1,1B0,1F2,1B1"
    model = MLP(num_stages=2)
    with pytest.raises(TableError, match="1F0 is missing"):
        torch_ref.run(
            own_table("1F1B", devices=2, microbatches=2), model, mlp_batch(6), weights=model.init()
        )


@pytest.mark.exhaustive
def test_faults_in_one_process():
    (found,) = spawn(peer_probes.one_process, 1, time_limit=LIMIT)
    assert (
        "can't steal_bwd_input if this stage doesn't have backward"
        in found["evaluated on one device"]
    )
    assert "backward through the graph a second time" in found["reused"]
    assert "detached in-place" in found["own weights"]
    assert "zero-dimensional tensor" in found["scalar output"]
    assert "expected 1 total backwards" in found["forward only"]
    assert found["trailing letters"] == "0F0"


@pytest.mark.exhaustive
def test_faults_in_two_processes():
    first, last = spawn(peer_probes.two_processes, 2, time_limit=LIMIT)
    before, after = first["eval"]
    # evaluating 3 microbatches divided the step's gradients
    torch.testing.assert_close(after, before / 3)
    before, after = first["step"]
    # (first mean + second sum) / 3, not twice the mean
    torch.testing.assert_close(after, (before + 3 * before) / 3)
    found, right = last["in order"]
    np.testing.assert_allclose(found["losses"], right["losses"], rtol=TOLERANCE)
    found, right = last["mixed, evaluated"]
    np.testing.assert_allclose(
        found["losses"], [right["losses"][m] for m in (2, 0, 1)], rtol=TOLERANCE
    )
    torch.testing.assert_close(found["output"], right["output"].view(3, 2, 2)[[2, 0, 1]].view(6, 2))
    assert found["output"].requires_grad  # an evaluation that keeps the graph of a step


@pytest.mark.exhaustive
@pytest.mark.parametrize("probe", [peer_probes.mixed, peer_probes.uneven])
def test_faults_that_end_in_an_error(probe):
    with pytest.raises(PeerError, match="Failed to run stage backward"):
        spawn(probe, 2, time_limit=LIMIT)


@pytest.mark.exhaustive
def test_group_norm_crashes_for_weights_alone_of_a_channels_last_input():
    import subprocess
    import sys

    code = """
import torch
x = torch.randn(2, 5, 4, 8).permute(0, 3, 1, 2)
scale, bias = torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)
y = torch.nn.functional.group_norm(x, 2, scale, bias)
y.backward(torch.randn(2, 5, 4, 8).permute(0, 3, 1, 2))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode < 0, "torch has mended this: models/conv.py can do without contiguous()"
