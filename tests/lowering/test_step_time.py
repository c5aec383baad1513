"""The price of predicates: a program is chosen and judged by them, in seconds against the stages'
own.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe.inspect.step_report import merged, step_time
from jaxpipe.lowering.plan import cost_parts, plan_of, program_makespan, with_predicates
from jaxpipe.lowering.target import ON_HOST, Overheads
from jaxpipe.prices import write_prices


def seconds(stage, chunks):
    """Costs of a schedule of so many chunks whose devices' forwards take `stage` seconds, and a
    backward twice that.
    """
    each = stage / chunks
    return jp.Costs(forward=each, input_grad=each, weight_grad=each, unit="seconds, estimated")


def test_every_device_is_asked_and_what_is_taken_asks_inside():
    plan = plan_of(jp.schedules.build("1f1b", devices=2, microbatches=3))
    costs = cost_parts(plan.ticks).sum(axis=1, keepdims=True)
    (segment,) = plan.segments
    for tick in range(segment.start, segment.stop):
        template = segment.template(tick)
        more = (with_predicates(costs[tick], template, 0.01) - costs[tick])[0]
        outside = 0.01 * sum(use.active.value == "sometimes" for use in template.blocks)
        for device in range(2):
            idle = costs[tick, 0, device] == 0
            inside = max((use.num_nested for use in template.blocks), default=0)
            assert more[device] == pytest.approx(outside if idle else outside + 0.01 * inside)
    overheads = Overheads(predicate=0.01, hop=0.0)
    assert program_makespan(costs, plan.segments, overheads) > program_makespan(
        costs, plan.segments
    )


def test_zbv_loses_to_1f1b_where_stages_are_short():
    """Predicates that the host runs cost ZB-V, which asks several times as many, its advantage
    below some length of a forward.
    """
    table = jp.schedules.build("zbv", devices=8, microbatches=32)
    plain = plan_of(jp.schedules.build("1f1b", devices=8, microbatches=32), overheads=ON_HOST)
    small = plan_of(table)
    asked, asked_1f1b = (
        sum(s.repeats * sum(t.num_predicates for t in s.templates) for s in plan.segments)
        for plan in (small, plain)
    )
    assert asked > 4 * asked_1f1b
    overheads = replace(ON_HOST, hop=0.0)
    found = {ms: step_time(small, overheads, seconds(ms * 1e-3, 2)) for ms in (0.5, 2.7)}
    assert found[0.5]["loses_to_1f1b"]
    assert not found[2.7]["loses_to_1f1b"]
    # In CUDA graphs a predicate costs a fifth of that, and what is left of the choice weighs no
    # more than the bubble.
    graphs = step_time(plan_of(table), Overheads(), seconds(2.7e-3, 2))
    assert not graphs["loses_to_1f1b"]


def test_the_transfers_of_the_costs_take_the_place_of_hops():
    """Of 1F1B too, with which a step is compared."""
    table = jp.schedules.build("zbv", devices=4, microbatches=8)
    costs, overheads = seconds(1e-3, 2), Overheads(hop=1e-3)
    slow = replace(costs, transfer=1e-3)
    plan = plan_of(table)
    assert step_time(plan, overheads, costs) == step_time(plan, Overheads(), slow)
    assert merged(table, slow).transfer == 1e-3


def test_a_program_is_chosen_by_the_costs():
    """Where stages are long, what a tick asks weighs nothing against code."""
    table = jp.schedules.build("zb_h1", devices=4, microbatches=16)
    blocks = [
        sum(segment.size for segment in plan_of(table, costs=seconds(stage, 1)).segments)
        for stage in (2e-3, 5.0)
    ]
    assert blocks[0] > blocks[1]


def test_1f1b_has_the_same_work():
    table = jp.schedules.build("zbv", devices=4, microbatches=8)
    whole = merged(table, jp.Costs(forward=[1, 2] * 4, input_grad=1, weight_grad=3))
    assert (whole.forward, whole.input_grad, whole.weight_grad, whole.backward) == (3, 2, 6, 8)
    assert jp.simulate(jp.schedules.build("1f1b", devices=4, microbatches=8), whole).makespan > 0


def pipe_with(costs):
    table = jp.schedules.build("1f1b", devices=1, microbatches=2)
    return jp.Pipeline(
        jp.Model(lambda params, x: x), table, jax.make_mesh((1,), ("pipe",)), costs=costs
    )


def test_costs_are_in_seconds():
    assert (
        pipe_with(jp.Costs(forward=2e-3, unit="seconds, measured on a device")).costs.forward
        == 2e-3
    )
    with pytest.raises(jp.PipelineError, match=r"must be in seconds.*their unit is ''"):
        pipe_with(jp.Costs())
    with pytest.raises(jp.PipelineError, match=r"must be a jaxpipe\.Costs"):
        pipe_with(0.002)
    with pytest.raises(jp.CostError, match="2 entries, but the schedule has 1 stages"):
        pipe_with(jp.Costs(forward=[1, 2], unit="seconds"))


def test_a_pipeline_passes_on_the_prices_of_the_users_file(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPIPE_PRICES", str(tmp_path / "prices.json"))
    write_prices(jax.devices()[0].device_kind, {"hop": 1.25}, "today")
    table = jp.schedules.build("gpipe", devices=1, microbatches=2)
    model = jp.Model(lambda p, x: x * p, last=lambda p, x, microbatch: jnp.mean(x))
    mesh = jax.make_mesh((1,), ("pipe",), devices=jax.devices()[:1])
    assert jp.Pipeline(model, table, mesh)._steps.target.overheads.hop == 1.25
