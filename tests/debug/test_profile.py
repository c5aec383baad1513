"""`jp.inspect.profile`: every action of a run has its time, in an order that the table allows,
beside the plan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe.inspect.hlo import parse
from jaxpipe.inspect.profiling import timeline_of
from jaxpipe.table.kinds import Kind
from tests.flat import flat_pipeline

P, M, WIDTH = 2, 4, 64


def build(name, *, tensor=1, **options):
    """With `tensor` devices that share each stage's matmuls: columns of the first, rows of the
    second.
    """
    schedule = jp.schedules.build(name, devices=P, microbatches=M)
    mesh = jax.make_mesh((P, tensor), ("pipe", "tensor"), devices=jax.devices()[: P * tensor])
    specs = {"stages": PartitionSpec(None, "tensor")}
    return flat_pipeline(
        lambda w, x: x + jnp.tanh(x @ w) @ w.T,
        schedule=schedule,
        mesh=mesh,
        last=lambda p, x, mb: jnp.mean(x**2),
        specs=specs,
        **options,
    )


@pytest.mark.parametrize(("name", "tensor"), [("1f1b", 1), ("zb_h1", 1), ("zb_h1", 2)])
def test_every_action_has_its_time(name, tensor):
    pipe = build(name, tensor=tensor)
    params = pipe.place({"stages": jnp.ones((P, WIDTH, WIDTH)) * 0.01, "last": {}})
    ran = jp.inspect.profile(pipe, params, {"x": np.ones((16, WIDTH))}, repeats=1)
    table = ran.schedule.encoded
    starts, ends = np.array(ran.starts), np.array(ran.ends)
    assert (ends >= starts).all()
    assert starts.min() == 0
    for device in range(P):
        mine = slice(table.first[device], table.first[device + 1])
        assert (starts[mine][1:] >= ends[mine][:-1]).all(), (
            "a device does one thing at a time, in the order of its row"
        )
    # What comes from another device is there before it is used.
    made = table.producer
    assert all(starts[i] >= ends[made[i]] for i in range(table.num_actions) if made[i] >= 0)
    planned = jp.simulate(ran.schedule, ran.costs)
    compared = ran.over(planned)
    assert sum(loss.time for loss in compared.losses) == pytest.approx(
        ran.makespan - planned.makespan
    )
    assert "the step took" in str(compared)


def spread_model(schedule, mesh, **options):
    """An embedding and a head that are spread over the pipe axis, and a batch of tokens."""
    pipe = flat_pipeline(
        lambda w, x: x + jnp.tanh(x @ w),
        schedule=schedule,
        mesh=mesh,
        first=jp.VocabEmbedding(),
        last=jp.VocabHead(),
        **options,
    )
    words = jnp.ones((8, WIDTH)) * 0.01
    params = {
        "first": {"w": words},
        "stages": jnp.ones((schedule.num_stages, WIDTH, WIDTH)) * 0.01,
        "last": {"w": words},
    }
    rows = np.zeros((4 * M, 3), np.int32)
    return pipe, pipe.place(params), {"tokens": rows, "targets": rows}


def test_what_all_devices_do_together_has_its_times_too():
    """With data shards: E and L, and G, begin on all devices of a shard at once, after what they
    read and before what reads them.
    """
    mesh = jax.make_mesh((P, 2), ("pipe", "data"), devices=jax.devices()[: 2 * P])
    schedule = jp.schedules.build("interleaved_1f1b", devices=P, microbatches=M, chunks=2)
    pipe, params, batch = spread_model(schedule, mesh, data_axes=("data",))
    ran = jp.inspect.profile(pipe, params, batch, repeats=1)
    table = ran.schedule.encoded
    meetings = set(table.collectives.values())
    assert len(meetings) == 3 * M
    for meeting in meetings:
        begin, end = (
            {ran.starts[i] for i in meeting.members},
            max(ran.ends[i] for i in meeting.members),
        )
        assert len(begin) == 1
        assert meeting.source < 0 or begin.pop() >= ran.ends[meeting.source]
        assert meeting.user < 0 or ran.starts[meeting.user] >= min(
            ran.ends[i] for i in meeting.members
        )
        assert end <= ran.makespan
    planned = jp.simulate(ran.schedule, ran.costs)
    assert sum(loss.time for loss in ran.over(planned).losses) == pytest.approx(
        ran.makespan - planned.makespan
    )


def test_what_devices_share_begins_when_the_last_of_them_comes_to_it():
    schedule = jp.schedules.build("no_pipelining", devices=1, microbatches=1)
    # Two devices: the first is at the forward after 1 s and waits there for the second, which is at
    # it after 3 s and through it at 4 s.
    begins, ends = (
        {Kind.F: (1.0, 3.0), Kind.B: (5.0, 4.5)},
        {Kind.F: (3.5, 4.0), Kind.B: (7.0, 6.0)},
    )
    events = [
        (now, partner, phase, 0, 0, int(kind), 0, 0)
        for phase, times in enumerate((begins, ends))
        for kind, both in times.items()
        for partner, now in enumerate(both)
    ]
    ran = timeline_of(schedule, events, "two devices")
    assert (ran.starts, ran.ends) == ((0.0, 2.0), (1.0, 4.0))
    with pytest.raises(jp.PipelineError, match="no times of 0F0"):
        timeline_of(schedule, events[1:], "two devices")


def test_the_weight_gradient_of_a_share_has_its_time_and_an_l_is_booked_whole():
    mesh = jax.make_mesh((P,), ("pipe",), devices=jax.devices()[:P])
    whole = jp.spread_last(jp.schedules.build("1f1b", devices=P, microbatches=M), split=False)
    pipe, params, batch = spread_model(jp.spread_first(jp.defer_last(whole), split=False), mesh)
    ran = jp.inspect.profile(pipe, params, batch, repeats=1)
    table, length = ran.schedule.encoded, np.array(ran.ends) - np.array(ran.starts)
    for device in range(P):
        soon, late = (np.median(length[table.at[kind, device]]) for kind in (jp.Kind.L, jp.Kind.H))
        assert late > 0
        assert ran.costs.last_weight_grad[device] == pytest.approx(late)
        assert ran.costs.last[device] == pytest.approx(soon + late)


@pytest.mark.parametrize("name", ["no_pipelining", "1f1b", "zb_h1"])
def test_no_block_runs_before_its_begin_is_noted(name):
    """Nor one of a single microbatch, whose pools have one slot: XLA knows that it needs no number
    of its record.
    """
    devices = 1 if name == "no_pipelining" else P
    schedule = jp.schedules.build(name, devices=devices, microbatches=1)
    mesh = jax.make_mesh((devices,), ("pipe",), devices=jax.devices()[:devices])
    pipe = jp.Pipeline(
        jp.Model(lambda w, x: x + jnp.tanh(x @ w), last=lambda p, x, mb: jnp.mean(x**2)),
        schedule,
        mesh,
    )
    params = pipe.place({"stages": jnp.ones((devices, WIDTH, WIDTH)), "last": {}})
    traced = pipe.trace(params, {"x": np.ones((4, WIDTH))}, clock=lambda *_: np.int32(0))
    module = parse(traced.function.lower().compile().as_text())
    called = [
        (each, [i.name for i in each.instructions if "callback" in i.target])
        for each in module.computations.values()
    ]
    pairs = [(each, calls) for each, calls in called if calls]
    assert len(pairs) == sum(segment.size for segment in pipe._steps.plan.segments) >= 2
    for computation, (begin, end) in pairs:
        needed, todo = set(), [end]
        while todo:
            found = [
                name
                for name in computation.by_name[todo.pop()].operands
                if name in computation.by_name and name not in needed
            ]
            needed.update(found)
            todo.extend(found)
        assert begin in needed


def test_a_profile_needs_a_run():
    pipe = build("1f1b")
    with pytest.raises(jp.PipelineError, match="repeats must be a whole number of at least 1"):
        jp.inspect.profile(pipe, {}, {}, repeats=0)
