"""Parameters that are gathered during the step: the numbers of one device, and less memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxpipe as jp
from jaxpipe.arrays import by_path
from jaxpipe.eager import EagerExecutor
from jaxpipe.lowering.plan import plan_of
from jaxpipe.lowering.rooms import rooms_of
from jaxpipe.program.ir import NOBODY
from jaxpipe.transforms import Reduce
from tests.axes.model import (
    CLASSES,
    FEATURES,
    HIDDEN,
    SPECS,
    WIDTH,
    batch,
    canonical,
    first,
    last,
    like_truth,
    stage,
    truth,
    worst_error,
)
from tests.forms import gpu_form
from tests.tiers import slow
from tests.tolerance import FLOAT64, apart, longest_chain

M = 4
SHARDED = jp.Sharding(data="data", fsdp="data")
# Schedules with chunks, and the most stages that are whole at a time: every one but `auto` and
# those that pair both stages of a device (dualpipe, dualpipev).
TABLES = (
    ("interleaved_1f1b", 2, 1),
    ("interleaved_1f1b", 3, 2),
    ("interleaved_1f1b_overlap", 3, 2),
    ("interleaved_zb", 3, 2),
    ("looped_bfs", 2, 1),
    ("v_half", 2, 1),
    ("v_min", 2, 1),
    ("zbv", 2, 1),
)


def in_tiers(*quick: str) -> list[Any]:
    """The tables; those of these names with two chunks are of the default tier."""
    return [each if each[0] in quick and each[1] == 2 else slow(*each) for each in TABLES]


def mesh(*more: str) -> Mesh:
    names = ("pipe", "data", *more)
    devices = jax.devices()[: 2 ** len(names)]
    return Mesh(np.array(devices).reshape((2,) * len(names)), names)


def table(name: str, chunks: int, most: int, *, devices: int = 2, **options: Any) -> jp.Schedule:
    plain = jp.schedules.build(name, devices=devices, microbatches=M, chunks=chunks)
    return gathered(plain, most, **options)


def gathered(plain: jp.Schedule, most: int, **options: Any) -> jp.Schedule:
    found = jp.add_gathers(plain, max_active=most, reduce=Reduce.EACH_RUN, **options)
    assert rooms_of(found).count == most, "some stages share their room"
    return found


def check(pipe: jp.Pipeline, *, frozen: tuple[str, ...] = ()) -> None:
    """Loss, gradients and evaluation are those of one device."""
    stages = pipe.schedule.num_stages
    params, rows = pipe.place(canonical(stages)), batch(M)
    loss, grads = pipe.value_and_grad(params, rows)
    wanted_loss, wanted = truth(stages, M)
    assert abs(loss - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    found = like_truth(pipe.canonical(grads))
    own = {k: v for k, v in wanted["stages"].items() if k not in frozen}
    found["stages"] = {k: v for k, v in found["stages"].items() if k not in frozen}
    assert worst_error(found, wanted | {"stages": own}) <= FLOAT64
    trained = jax.tree.leaves(pipe.trained(params))
    for grad, param in zip(jax.tree.leaves(pipe.trained(grads)), trained, strict=True):
        assert (grad.shape, grad.dtype) == (param.shape, param.dtype)
        assert grad.sharding.is_equivalent_to(param.sharding, grad.ndim)
    assert abs(pipe.evaluate(params, rows) - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    assert abs(pipe.loss(params, rows) - wanted_loss) <= FLOAT64 * abs(wanted_loss)


MODEL = jp.Model(stage, first=first, last=last)


@pytest.mark.parametrize(("name", "chunks", "most"), in_tiers("interleaved_1f1b", "zbv"))
def test_loss_and_gradients_equal_one_device(name: str, chunks: int, most: int) -> None:
    check(jp.Pipeline(MODEL, table(name, chunks, most), mesh(), sharding=SHARDED))


@pytest.mark.parametrize("ahead", [0, slow(3)])
def test_gathers_may_come_late(ahead: int) -> None:
    schedule = table("interleaved_1f1b", 3, 2, ahead=ahead)
    check(jp.Pipeline(MODEL, schedule, mesh(), sharding=SHARDED))


def test_frozen_parameters_are_gathered_and_have_no_gradient() -> None:
    model = jp.Model(stage, first=first, last=last, frozen=lambda path, _: path == "stages/w")
    pipe = jp.Pipeline(model, table("interleaved_1f1b", 2, 1), mesh(), sharding=SHARDED)
    check(pipe, frozen=("w",))


def test_tensor_axes_split_what_is_gathered() -> None:
    sharding = jp.Sharding(data="data", fsdp="data", specs=SPECS, replicated="tensor")
    pipe = jp.Pipeline(MODEL, table("interleaved_1f1b", 2, 1), mesh("tensor"), sharding=sharding)
    check(pipe)


@pytest.mark.parametrize(
    ("name", "chunks", "most"), [("interleaved_1f1b", 3, 2), slow("interleaved_zb", 4, 3)]
)
def test_the_form_of_gpus_gathers_beside_compute(name: str, chunks: int, most: int) -> None:
    schedule = table(name, chunks, most)
    # most are in the tick of an action that needs another room
    program = plan_of(schedule).program()
    (links,) = program.ticks.links
    busy = np.stack([record.chunk for _, record in program.ticks.actions])
    gathers = [
        room not in busy[:, tick, device] and (busy[:, tick, device] != NOBODY).any()
        for room in range(most)
        for tick, device in np.argwhere(links.columns[f"gather_{room}"] != NOBODY)
    ]
    assert np.mean(gathers) > 0.6
    check(jp.Pipeline(MODEL, schedule, mesh(), sharding=SHARDED, executor=gpu_form()))


@pytest.mark.slow
def test_recomputation_needs_gathered_parameters_too() -> None:
    plain = jp.schedules.build("interleaved_1f1b", devices=2, microbatches=M, chunks=2)
    pipe = jp.Pipeline(MODEL, gathered(jp.add_recompute(plain), 1), mesh(), sharding=SHARDED)
    check(pipe)


def test_a_table_that_gathers_once_a_step_is_the_program_without_it() -> None:
    plain = jp.schedules.build("interleaved_1f1b", devices=2, microbatches=M, chunks=2)
    once = jp.Pipeline(MODEL, jp.add_gathers(plain), mesh(), sharding=SHARDED)
    assert once.schedule == plain
    # where nothing is split there is nothing to gather
    whole = jp.Sharding(data="data")
    assert jp.Pipeline(MODEL, table("zbv", 2, 1), mesh(), sharding=whole).schedule == (
        jp.schedules.build("zbv", devices=2, microbatches=M)
    )


def test_a_device_holds_the_parameters_of_its_rooms_alone() -> None:
    """Stages of 1 MiB in float32: two matrices of 512 x 256.  Once a step a device gathers four,
    and has four whole gradients; with one room, one of each, and its halves of four gradients.
    """
    width, chunks = 512, 4

    def wide(params: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ params["w"]) @ params["v"]

    def total(_: Any, x: Any, microbatch: Any) -> Any:
        return jnp.mean(jnp.square(x - microbatch["y"]))

    plain = jp.schedules.build("looped_bfs", devices=2, microbatches=M, chunks=chunks)
    model = jp.Model(wide, last=total)
    shapes = {"w": (2 * chunks, width, width // 2), "v": (2 * chunks, width // 2, width)}
    stages = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    rows = {name: jax.ShapeDtypeStruct((2 * M, width), jnp.float32) for name in "xy"}
    held = []
    for schedule in (plain, gathered(plain, 1)):
        pipe = jp.Pipeline(model, schedule, mesh(), sharding=SHARDED)
        lowered = pipe.lower(pipe.place({"stages": stages, "last": {}}), rows)
        held.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    once, often = held
    # 3 parameters and 3 gradients less, 2 MiB of split gradients more
    assert once - often > 3 * 2**20, held


def square(params: Any, x: Any) -> Any:
    return x + x @ params["square"]


def stages_of(*functions: Any) -> tuple[jp.Model, Any]:
    """A model of these stages, and its parameters."""
    params, matrix = canonical(4), np.random.default_rng(3).standard_normal((8, 8)) / 4
    own = [jax.tree.map(lambda leaf, s=s: leaf[s], params["stages"]) for s in range(4)]
    stages = [{"square": matrix} if f is square else own[s] for s, f in enumerate(functions)]
    model = jp.Model(list(functions), first=first, last=last)
    return model, params | {"stages": stages}


ROOM = jp.Sharding(data="data", fsdp="data", max_active=1)
PLAIN = jp.schedules.build("interleaved_1f1b", devices=2, microbatches=M, chunks=2)


def same_as_plain(model: jp.Model, params: Any, sharding: jp.Sharding = ROOM) -> jp.Pipeline:
    """The pipeline of these stages in one room, whose numbers are those of plain JAX."""
    pipe = jp.Pipeline(model, PLAIN, mesh(), sharding=sharding)
    assert rooms_of(pipe.schedule).count == 1
    loss, grads = pipe.value_and_grad(pipe.place(params), batch(M))
    wanted_loss, wanted = jax.value_and_grad(model.loss)(params, batch(M))
    assert abs(loss - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    assert worst_error(like_truth(pipe.canonical(grads)), like_truth(wanted)) <= FLOAT64
    return pipe


def test_stages_that_chunks_have_unlike() -> None:
    """One chunk has other arrays than the other one, and the room has those of both."""
    same_as_plain(*stages_of(stage, stage, square, square))


@pytest.mark.slow
@pytest.mark.parametrize(
    "functions",
    [(stage, square, stage, square), (stage, square, square, square)],
    ids=["in a chunk", "in one chunk"],
)
def test_stages_that_a_chunk_has_unlike(functions: Any) -> None:
    same_as_plain(*stages_of(*functions))


def test_a_stage_with_a_frozen_parameter_is_unlike_the_others() -> None:
    model, params = stages_of(stage, stage, stage, stage)
    path = f"stages/1/{min(by_path(params['stages'][1]))}"
    partly = jp.Model([stage] * 4, first=first, last=last, frozen=path)
    pipe = jp.Pipeline(partly, PLAIN, mesh(), sharding=ROOM)
    loss, grads = pipe.value_and_grad(pipe.place(params), batch(M))
    wanted_loss, wanted = jax.value_and_grad(model.loss)(params, batch(M))
    found, right = by_path(pipe.canonical(grads)), by_path(wanted)
    assert right.keys() - found.keys() == {path}
    assert abs(loss - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    assert worst_error(found, {name: right[name] for name in found}) <= FLOAT64


def test_parameters_that_chunks_store_otherwise_are_refused() -> None:
    model, params = stages_of(stage, square, square, square)
    once = jp.Pipeline(model, PLAIN, mesh(), sharding=SHARDED)
    pipe = jp.Pipeline(model, PLAIN, mesh(), sharding=ROOM)
    with pytest.raises(jp.PipelineError, match=r"store them alike.*new\.place\(old\.canonical"):
        pipe.value_and_grad(once.place(params), batch(M))
    # those of the other one are stored in more arrays than it needs
    loss, _ = once.value_and_grad(pipe.place(params), batch(M))
    wanted = model.loss(params, batch(M))
    assert abs(loss - wanted) <= FLOAT64 * abs(wanted)


@pytest.mark.parametrize("rule", [jp.Replaced.MAX, slow(jp.Replaced.LAST), slow(jp.Replaced.MEAN)])
def test_replaced_parameters_keep_their_values_between_runs(rule: jp.Replaced) -> None:
    model = jp.Model(stage, first=first, last=last, replaced={"gain": rule})
    found = []
    for sharding in (SHARDED, ROOM):
        pipe = jp.Pipeline(model, PLAIN, mesh(), sharding=sharding)
        loss, grads = pipe.value_and_grad(pipe.place(canonical(4)), batch(M))
        found.append((loss, like_truth(pipe.canonical(grads))))
    assert abs(found[0][0] - found[1][0]) <= FLOAT64 * abs(found[0][0])
    assert worst_error(found[1][1], found[0][1]) <= FLOAT64


def test_state_stays_with_its_chunk() -> None:
    def counting(params: Any, x: Any, *, state: Any) -> Any:
        return stage(params, x), {"seen": state["seen"] + 1, "sum": state["sum"] + jnp.sum(x)}

    model = jp.Model(counting, first=first, last=last)
    begin, found = {"seen": np.arange(4.0), "sum": np.zeros(4)}, []
    for sharding in (SHARDED, ROOM):
        pipe = jp.Pipeline(model, PLAIN, mesh(), sharding=sharding)
        given = pipe.place(canonical(4)), batch(M)
        (loss, state), grads = pipe.value_and_grad(*given, state=pipe.place_state(begin))
        found.append((loss, pipe.canonical_state(state), like_truth(pipe.canonical(grads))))
    (loss, once, grads), (other, often, more) = found
    assert abs(loss - other) <= FLOAT64 * abs(loss)
    np.testing.assert_array_equal(often["seen"], np.arange(4.0) + M)
    np.testing.assert_allclose(often["sum"], once["sum"], rtol=FLOAT64)
    assert worst_error(more, grads) <= FLOAT64


def test_a_gradient_is_reduced_after_each_run() -> None:
    """Where the table reduces it once, after its room has been given away."""
    once = jp.add_gathers(PLAIN, max_active=1)
    pipe = jp.Pipeline(MODEL, once, mesh(), sharding=SHARDED)
    assert pipe.schedule == gathered(PLAIN, 1) != once
    check(pipe)


def test_max_active_puts_gathers_in() -> None:
    pipe = jp.Pipeline(MODEL, PLAIN, mesh(), sharding=ROOM)
    assert pipe.schedule == gathered(PLAIN, 1)
    # as many as a device has are gathered once a step
    both = jp.Sharding(data="data", fsdp="data", max_active=2)
    assert jp.Pipeline(MODEL, PLAIN, mesh(), sharding=both).schedule == PLAIN
    # a table with gathers of its own keeps them
    own = table("interleaved_1f1b", 3, 2)
    assert jp.Pipeline(MODEL, own, mesh(), sharding=ROOM).schedule == own
    pairs = jp.schedules.build("dualpipev", devices=2, microbatches=M)
    with pytest.raises(jp.ScheduleError, match="max_active=1 must be 2 or more"):
        jp.Pipeline(MODEL, pairs, mesh(), sharding=ROOM)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fsdp": "data", "max_active": 0}, "max_active must be a whole number of at least 1"),
        ({"max_active": 1}, "max_active= needs fsdp="),
    ],
)
def test_a_max_active_that_cannot_be(options: dict[str, Any], why: str) -> None:
    with pytest.raises(jp.PipelineError, match=why):
        jp.Pipeline(MODEL, PLAIN, mesh(), sharding=jp.Sharding(data="data", **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"memory": jp.Memory(offload=jp.Offload.RESIDUALS)},
        {"executor": EagerExecutor()},
        {"memory": jp.Memory(remat="full")},
    ],
    ids=["offload", "eager", "remat"],
)
def test_what_combines_with_gathers(options: dict[str, Any]) -> None:
    schedule = table("interleaved_1f1b", 3, 2)
    check(jp.Pipeline(MODEL, schedule, mesh(), sharding=SHARDED, **options))


@pytest.mark.parametrize(
    ("layers", "layout"), [slow("Et*8L", None), ("Et*7L", "Et|tt|tt|ttL")], ids=["even", "uneven"]
)
def test_layers_of_letters(layers: str, layout: str | None) -> None:
    model = jp.Model({"E": first, "t": stage, "L": last}, layers=layers)
    params = canonical(int(layers[3]))
    params["stages"] = {"t": params["stages"]}
    pipe = jp.Pipeline(model, PLAIN, mesh(), layout=layout, sharding=ROOM)
    placed = pipe.place(params)
    # A room has an array for each layer, as matmuls would read copies of what is raveled.
    assert not any("buffer" in path for path in by_path(placed["stages"]))
    loss, grads = pipe.value_and_grad(placed, batch(M))
    wanted_loss, wanted = jax.value_and_grad(model.loss)(params, batch(M))
    assert abs(loss - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    assert worst_error(like_truth(pipe.canonical(grads)), like_truth(wanted)) <= FLOAT64


@pytest.mark.parametrize("most", [slow(None), 1], ids=["once", "in turn"])
def test_weights_that_are_only_cast_are_not_whole(most: int | None) -> None:
    """A room holds their casts, and an accumulator of each, of one stage or of both chunks."""

    def casts(params: Any, x: Any) -> Any:
        w = params["w"].astype(jnp.float32)
        return x + jnp.tanh(x.astype(jnp.float32) @ w @ params["v"].astype(jnp.float32))

    model = jp.Model(casts, first=first, last=last)
    params = canonical(4)
    params["stages"] = {name: params["stages"][name] for name in "wv"}
    sharding = jp.Sharding(data="data", fsdp="data", max_active=most)
    pipe = jp.Pipeline(model, PLAIN, mesh(), sharding=sharding)
    loss, grads = pipe.value_and_grad(pipe.place(params), batch(M))
    plain = jax.value_and_grad(model.loss)
    wanted_loss, wanted = plain(params, batch(M))
    bound = apart(longest_chain(plain, params, batch(M)), np.float32)
    assert abs(loss - wanted_loss) <= bound * abs(wanted_loss)
    assert worst_error(like_truth(pipe.canonical(grads)), like_truth(wanted)) <= bound
    found = jp.inspect.memory(pipe, pipe.place(params), batch(M))
    ends = 8 * (FEATURES * WIDTH + WIDTH * CLASSES)
    stages, numbers = most or 2, 2 * WIDTH * HIDDEN
    assert found["gathered"] == 2 * ends + stages * 8 * numbers
    # XLA adds a pointer for each array
    assert 0 <= found["hoisted"] - stages * 4 * numbers <= stages * 2 * 8


def test_memory_counts_the_rooms() -> None:
    """The whole parameters and gradients of two stages, instead of three."""
    plain = jp.schedules.build("interleaved_1f1b", devices=2, microbatches=M, chunks=3)
    found = []
    for schedule in (plain, gathered(plain, 2)):
        pipe = jp.Pipeline(MODEL, schedule, mesh(), sharding=SHARDED)
        found.append(jp.inspect.memory(pipe, pipe.place(canonical(6)), batch(M))["gathered"])
    once, often = found
    outer = once - 3 * (once - often)
    assert 0 <= outer < once - often, "embedding and head are whole in both"
