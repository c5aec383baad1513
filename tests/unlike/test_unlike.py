"""Stages that differ in function, parameters, number of layers and in what they hand on give the
numbers of one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.spmd.pools import SharedBuffer
from tests.flat import flat_pipeline
from tests.keys import STAGE, key_of
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.refused import refused
from tests.tolerance import relative, step_error

M, ROWS = 4, 2


def draw(shapes, seed=0):
    """Arrays of a tree of shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.standard_normal(shape) / 2,
        shapes,
        is_leaf=lambda s: isinstance(s, tuple) and all(isinstance(n, int) for n in s),
    )


def over_microbatches(loss_of):
    """Value and gradient of the mean over microbatches of loss_of(params, microbatch, number)."""

    def total(params, batch):
        cut = jax.tree.map(lambda leaf: leaf.reshape(M, -1, *leaf.shape[1:]), batch)
        return (
            sum(loss_of(params, jax.tree.map(lambda leaf, m=m: leaf[m], cut), m) for m in range(M))
            / M
        )

    return jax.value_and_grad(total)


# Functions of their own for each stage: activations grow, shrink, and become trees


def narrow(params, x):
    return jnp.tanh(x @ params["in"]["w"])


def widen(params, x):
    return {"wide": jax.nn.gelu(x @ params["up"] + params["bias"]), "skip": x}


def mix(params, x):
    return x["wide"] @ params["down"] + jnp.sin(x["skip"]) * params["scale"]


def widen_more(params, x):
    return (jnp.tanh(x @ params["up"]), jnp.sum(x, axis=-1).astype(jnp.int32))


def fold(params, x):
    return jnp.where(x[1][:, None] > 0, x[0], -x[0]) @ params["down"]


FUNCTIONS = {
    2: [narrow, lambda p, x: mix(p, widen(p, x))],
    4: [narrow, widen, mix, narrow],
    8: [narrow, widen, mix, narrow, narrow, widen_more, fold, narrow],
}
SHAPES = {
    narrow: {"in": {"w": (4, 4)}},
    widen: {"up": (4, 10), "bias": (10,)},
    mix: {"down": (10, 4), "scale": (4,)},
    widen_more: {"up": (4, 6)},
    fold: {"down": (6, 4)},
}


def unlike_model(stages):
    functions = FUNCTIONS[stages]
    shapes = [SHAPES.get(f, {**SHAPES[widen], **SHAPES[mix]}) for f in functions]
    # The first stage of all takes rows of width 3 and no other is like it.
    shapes[0] = {"in": {"w": (3, 4)}}
    return functions, {
        "stages": [draw(s, seed=i) for i, s in enumerate(shapes)],
        "last": draw({"head": (4, 2)}, seed=99),
    }


def head(params, x, microbatch):
    return jnp.mean(jnp.square(x @ params["head"] - microbatch["y"]))


def rows(width=3, seed=7):
    x, y = draw([(M * ROWS, width), (M * ROWS, 2)], seed=seed)
    return {"x": x, "y": y}


@pytest.mark.parametrize(
    ("name", "devices", "stages"),
    [
        ("gpipe", 2, 2),
        ("dualpipe", 4, 4),
        ("zbv", 2, 4),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("1f1b", 4, 4),
                ("zb_h1", 4, 4),
                ("interleaved_1f1b", 4, 8),
                ("dualpipev", 4, 8),
            ]
        ),
    ],
)
def test_a_function_for_each_stage(name, devices, stages):
    functions, canonical = unlike_model(stages)
    schedule = jp.schedules.build(name, devices=devices, microbatches=M)
    assert schedule.num_stages == stages
    pipe = jp.Pipeline(jp.Model(functions, last=head), schedule, mesh_of(devices))

    def loss_of(params, microbatch, _):
        x = microbatch["x"]
        for function, own in zip(functions, params["stages"], strict=True):
            x = function(own, x)
        return head(params["last"], x, microbatch)

    loss, grads = pipe.value_and_grad(pipe.place(canonical), rows())
    wanted_loss, wanted = over_microbatches(loss_of)(canonical, rows())
    assert abs(float(loss) - float(wanted_loss)) <= FLOAT64 * float(wanted_loss)
    found = pipe.canonical(grads)
    assert relative({k: found[k] for k in wanted}, wanted) <= FLOAT64
    assert abs(
        float(pipe.evaluate(pipe.place(canonical), rows())) - float(wanted_loss)
    ) <= FLOAT64 * float(wanted_loss)


def test_canonical_is_the_inverse_of_place_and_shapes_go_both_ways():
    functions, canonical = unlike_model(4)
    pipe = jp.Pipeline(
        jp.Model(functions, last=head),
        jp.schedules.build("zbv", devices=2, microbatches=M),
        mesh_of(2),
    )
    placed = pipe.place(canonical)
    back = pipe.canonical(placed)
    assert relative(back["stages"], canonical["stages"]) == 0  # numbers are moved, not computed
    shapes = pipe.place(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), canonical))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), placed) == jax.tree.map(
        lambda a: (a.shape, a.dtype), shapes
    )
    assert (
        pipe.lower(shapes, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), rows()))
        is not None
    )


def test_parameters_of_one_name_share_memory_and_keep_their_names():
    """Stages 0 and 1 of a chunk: "in/w" of (3, 4) and of (4, 4) take 16 entries a device,
    not 28.
    """
    functions, canonical = (
        [narrow, narrow],
        {"stages": [draw({"in": {"w": (3, 4)}}), draw({"in": {"w": (4, 4)}})], "last": {}},
    )
    pipe = jp.Pipeline(
        jp.Model(functions, last=lambda p, x, mb: x.sum()),
        jp.schedules.build("1f1b", devices=2, microbatches=M),
        mesh_of(2),
    )
    (chunk,) = pipe.place(canonical)["stages"]
    ((path, leaf),) = jax.tree_util.tree_leaves_with_path(chunk)
    assert jax.tree_util.keystr(path, simple=True, separator="/") == "in/w"
    assert leaf.shape == (2, 16)
    assert np.array_equal(leaf[0, 12:], np.zeros(4))


def test_a_stage_that_does_not_fit_the_one_before_is_named_with_its_shapes():
    functions, canonical = unlike_model(4)
    pipe = jp.Pipeline(
        jp.Model([functions[0], mix, *functions[2:]], last=head),
        jp.schedules.build("1f1b", devices=4, microbatches=M),
        mesh_of(4),
    )
    with refused(r"stage 1 cannot take what stage 0 returns \(x float64\[2, 4\]\)"):
        pipe.value_and_grad(pipe.place(canonical), rows())


def test_wrong_lists_of_functions_and_parameters():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    with refused("a list of 3 stage functions, but the schedule has 2 stages"):
        jp.Pipeline(jp.Model([narrow] * 3), schedule, mesh_of(2))
    pipe = jp.Pipeline(jp.Model([narrow, narrow], last=head), schedule, mesh_of(2))
    with refused(r"a list with a tree for each of the 2 stages.*got dict"):
        pipe.place({"stages": {"w": np.ones((2, 3))}, "last": {}})


@pytest.mark.parametrize("sizes", [(4, 4), (4, 6)])
def test_stages_that_share_a_chunk_may_have_dtypes_of_their_own(sizes):
    """Of one path and one shape, or of two shapes."""
    first, second = sizes
    dtypes = (np.float32, np.float64)
    drawn = draw([{"in": {"w": (4, first)}}, {"in": {"w": (first, second)}}])
    stages = [
        jax.tree.map(lambda leaf, own=dtype: leaf.astype(own), tree)
        for tree, dtype in zip(drawn, dtypes, strict=True)
    ]
    params = {"stages": stages, "last": {}}
    model = jp.Model([narrow, narrow], last=lambda p, x, microbatch: jnp.mean(x**2))
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    pipe = jp.Pipeline(model, schedule, mesh_of(2))
    placed, batch = pipe.place(params), {"x": draw((M * ROWS, 4), 1)}
    again = pipe.canonical(placed)
    assert all(
        np.array_equal(a, b) and a.dtype == b.dtype
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True)
    )
    loss, grads = pipe.value_and_grad(placed, batch)
    wanted, own = jax.value_and_grad(model.loss)(params, batch, microbatches=M)
    assert relative(loss, wanted) < FLOAT64
    assert relative(pipe.canonical(grads), own) < 1e-6  # a gradient is float32


def test_a_union_takes_no_more_than_its_largest_kind_and_one_kind_is_itself():
    small = [jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.float32)]
    large = [
        jax.ShapeDtypeStruct((2, 3), jnp.float32),
        jax.ShapeDtypeStruct((5, 5), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
    ]
    assert SharedBuffer.of([large]).avals == tuple(large)
    both = SharedBuffer.of([small, large])
    assert sorted(a.shape for a in both.avals) == [(), (2, 3), (25,)]
    pool = [jnp.zeros((3, *a.shape), a.dtype) for a in both.avals]
    for slot, kind in ((0, small), (2, large)):
        values = [jnp.arange(a.size, dtype=a.dtype).reshape(a.shape) + 1 for a in kind]
        pool = both.at(pool, jnp.int32(slot), kind).write(values)
        assert all(
            np.array_equal(a, b)
            for a, b in zip(both.at(pool, jnp.int32(slot), kind).read(), values, strict=True)
        )


# Layers by letter


def embed(params, microbatch):
    return params["table"][microbatch["tokens"]]


def block(params, x, *, ctx):
    return x + jnp.tanh(x @ params["w"]) * (1 + 0.1 * jax.random.normal(ctx.rng, x.shape))


def extra_block(params, x):
    return x * params["scale"] + x @ params["w"]


def loss(params, x, microbatch):
    return jnp.mean(jnp.square(x @ params["head"] - microbatch["y"]))


LAYERS = {"E": embed, "t": block, "m": extra_block, "L": loss}


def by_letter(layout):
    shapes = {
        "t": {"w": (layout.layers.count("t"), 4, 4)},
        "m": {"w": (layout.layers.count("m"), 4, 4), "scale": (layout.layers.count("m"), 4)},
    }
    stages = {
        letter: draw(shapes[letter], seed=ord(letter)) for letter in "tm" if letter in layout.layers
    }
    return {"first": draw({"table": (5, 4)}), "stages": stages, "last": draw({"head": (4, 2)})}


def tokens():
    return {
        "tokens": np.random.default_rng(3).integers(0, 5, M * ROWS),
        "y": draw((M * ROWS, 2), seed=5),
    }


def layered_loss(layout, key):
    """The model of a layout without stages: layer after layer."""
    letters = layout.layers.replace("E", "").replace("L", "")

    def loss_of(params, microbatch, number):
        x = embed(params["first"], microbatch)
        seen = {"t": 0, "m": 0}
        for place, letter in enumerate(letters):
            own = jax.tree.map(lambda leaf, i=seen[letter]: leaf[i], params["stages"][letter])
            seen[letter] += 1
            rng = key_of(key, STAGE, number, place)
            x = (
                block(own, x, ctx=jp.Context(0, number, rng))
                if letter == "t"
                else extra_block(own, x)
            )
        return loss(params["last"], x, microbatch)

    return loss_of


@pytest.mark.parametrize(
    ("text", "name", "devices", "chunks"),
    [
        ("E|ttmt||tL", "zb_h1", 4, 1),
        ("Ett|t|tt|tmL", "zbv", 2, 2),
        pytest.param("Ettt|tt|tt|tL", "1f1b", 4, 1, marks=pytest.mark.exhaustive),
        pytest.param(
            "Et|tt|t|ttt|mtt|t|t|mL", "interleaved_1f1b", 4, 2, marks=pytest.mark.exhaustive
        ),
        pytest.param("Etttt|mtt|tm|L", "dualpipe", 4, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_function_for_each_letter_of_a_layout(text, name, devices, chunks):
    layout = jp.parse_layout(text, devices=devices)
    schedule = jp.schedules.build(
        name, devices=devices, microbatches=M, chunks=chunks if name.startswith("inter") else None
    )
    layers = {letter: function for letter, function in LAYERS.items() if letter in text}
    pipe = jp.Pipeline(jp.Model(layers, layers=text), schedule, mesh_of(devices), layout=text)
    canonical, key = by_letter(layout), jax.random.key(1)
    wanted = over_microbatches(layered_loss(layout, key))(canonical, tokens())
    assert step_error(pipe, canonical, tokens(), wanted, rng=key) <= FLOAT64


def test_a_layout_for_a_table_whose_stages_do_not_divide_over_its_devices():
    def actions(text):
        return ",".join(f"{stage_and_kind}{m}" for stage_and_kind in text.split() for m in range(M))

    schedule = jp.Schedule.from_csv(f"{actions('0F 2F 2B 0B')}\n{actions('1F 1B')}")
    pipe = jp.Pipeline(
        jp.Model({k: LAYERS[k] for k in "EtL"}, layers="EtttL"),
        schedule,
        mesh_of(2),
        layout="Et|tt|L",
    )
    layout, key = jp.parse_layout("Et|tt|L", devices=1), jax.random.key(1)
    canonical = by_letter(layout)
    wanted = over_microbatches(layered_loss(layout, key))(canonical, tokens())
    assert step_error(pipe, canonical, tokens(), wanted, rng=key) <= FLOAT64
    with refused(r"has 2 stages but the schedule has 3.*write 2 bars"):
        jp.Pipeline(
            jp.Model({k: LAYERS[k] for k in "EtL"}, layers="EttL"),
            schedule,
            mesh_of(2),
            layout="Et|tL",
        )


def test_no_stage_computes_layers_that_it_does_not_have():
    """Matmuls of each kind of stage: its own layers', counted in the forwards that the program
    holds.
    """
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    pipe = jp.Pipeline(
        jp.Model({"E": embed, "t": extra_block, "L": loss}, layers="EttttL"),
        schedule,
        mesh_of(2),
        layout="Ettt|tL",
    )
    canonical = {
        "first": draw({"table": (5, 4)}),
        "stages": {"t": draw({"w": (4, 4, 4), "scale": (4, 4)})},
        "last": draw({"head": (4, 2)}),
    }
    report = jp.inspect.report(pipe, pipe.place(canonical), tokens())
    assert report["stage_kinds"] == 2
    # Residuals of "ttt" and "t" share pools: the larger has one stacked input for two layers more.
    alone = jp.Pipeline(
        jp.Model({"E": embed, "t": extra_block, "L": loss}, layers="EttttttL"),
        schedule,
        mesh_of(2),
        layout="Ettt|tttL",
    )
    both = {**canonical, "stages": {"t": draw({"w": (6, 4, 4), "scale": (6, 4)})}}
    even = jp.inspect.report(alone, alone.place(both), tokens())
    assert even["stage_kinds"] == 1
    total = lambda r: sum(r["slot_bytes"].values())  # noqa: E731
    assert total(report) <= total(even)


def test_faults_of_layers_and_layout():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    make = lambda **options: flat_pipeline(schedule=schedule, mesh=mesh_of(2), **options)  # noqa: E731
    with refused("a dict of functions needs layers="):
        jp.Model(LAYERS)
    with refused("leave last out"):
        jp.Model(LAYERS, last=head, layers="EttL")
    with refused(
        r"(?s)has letters 'm', for which there is no function.*is a function for 'q', which"
    ):
        jp.Model({k: LAYERS[k] for k in "EtL"} | {"q": narrow}, layers="EtmL")
    with refused(r"(?s)cannot be read.*character 3"):
        jp.Model(LAYERS, layers="Et?L")
    by_layout = jp.Model({k: LAYERS[k] for k in "EtL"}, layers=jp.parse_layout("Et|tL", devices=2))
    assert by_layout.layers == "EttL"
    with refused("give Model a dict with a function for each letter"):
        jp.Model(narrow, layers="EtL")
    model = jp.Model({k: LAYERS[k] for k in "EtL"}, layers="EttL")
    with refused("has other layers than the model"):
        jp.Pipeline(model, schedule, mesh_of(2), layout="Et|L")
    with refused("the model is not given by letters"):
        jp.Pipeline(jp.Model([narrow, narrow]), schedule, mesh_of(2), layout="t|t")
    assert jp.Pipeline(model, schedule, mesh_of(2)).layout.layers.stages == ("t", "t")
    with refused(r"has 4 stages but the schedule has 2.*chunks=2"):
        make(layers={k: LAYERS[k] for k in "EtL"}, layout="Et|t|t|tL")
    with refused("L can only be the last layer"):
        make(layers={k: LAYERS[k] for k in "EtL"}, layout="EtL|t")
    pipe = make(layers={k: LAYERS[k] for k in "EtL"}, layout="Ett|tL")
    wrong = {"first": {}, "last": {}, "stages": {"t": {"w": np.ones((4, 2, 2))}}}
    with refused(
        r"stages\['t'\]\['w'\] has shape \(4, 2, 2\); its leading axis must be the 3 "
        r"layers t"
    ):
        pipe.place(wrong)
    with refused(r"a dict with the letters \['t'\]"):
        pipe.place({**wrong, "stages": {"x": {}}})
    for nothing in (None, [], "t"):
        with refused("stages must be a stage function, a list of them"):
            jp.Model(nothing)


def test_specs_of_layers_split_every_stack_of_theirs():
    """Tensor and fsdp axes under a layout with uneven stages; specs have no axis of layers."""
    names, shape = ("data", "pipe", "tensor"), (2, 2, 2)
    mesh = jax.make_mesh(
        shape, names, devices=jax.devices()[:8], axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    spec = jax.sharding.PartitionSpec
    layers = {"E": embed, "t": extra_block, "L": loss}
    how = {
        "layers": layers,
        "layout": "Ettt|tL",
        "schedule": jp.schedules.build("1f1b", devices=2, microbatches=M),
        "mesh": mesh,
    }
    pipe = flat_pipeline(
        **how,
        data_axes=("data",),
        fsdp="data",
        specs={"stages": {"t": {"w": spec(None, "tensor")}}},
    )
    canonical = {
        "first": draw({"table": (5, 4)}),
        "stages": {"t": draw({"w": (4, 4, 4), "scale": (4, 4)})},
        "last": draw({"head": (4, 2)}),
    }
    placed = pipe.place(canonical)
    stacks = placed["stages"][0].leaves
    assert {name: stacks[name].sharding.spec for name in stacks if name.endswith("w")} == {
        "t/0/w": spec("pipe", None, "data", "tensor"),
        "t/1/w": spec("pipe", None, "data", "tensor"),
    }
    cells = {"tokens": np.tile(tokens()["tokens"], 2), "y": np.tile(tokens()["y"], (2, 1))}
    value, grads = pipe.value_and_grad(placed, cells)
    plain = flat_pipeline(**{**how, "mesh": mesh_of(2)})
    wanted_value, wanted = plain.value_and_grad(plain.place(canonical), tokens())
    assert abs(float(value) - float(wanted_value)) <= FLOAT64 * float(wanted_value)
    assert (
        relative(
            *(jax.device_get(p.canonical(g)["stages"]) for p, g in ((pipe, grads), (plain, wanted)))
        )
        <= FLOAT64
    )
    with refused(r"specs name 't/q', but the parameters are \['t/scale', 't/w'\]"):
        flat_pipeline(
            **how, replicated_axes=("data",), specs={"stages": {"t": {"q": spec("tensor")}}}
        ).place(canonical)


def test_canonical_may_stay_spread():
    schedule = jp.schedules.build("interleaved_1f1b", devices=2, microbatches=M, chunks=2)
    pipe = jp.Pipeline(jp.Model(lambda p, x: x @ p["w"], last=head), schedule, mesh_of(2))
    canonical = {"stages": draw({"w": (4, 6, 6)}), "last": draw({"head": (4, 2)})}
    found = pipe.canonical(pipe.place(canonical), spread=True)
    assert found["stages"]["w"].sharding.shard_shape((4, 6, 6)) == (2, 6, 6)
    # numbers are moved, not computed
    assert relative(jax.device_get(found["stages"]), canonical["stages"]) == 0
    layered = jp.Pipeline(
        jp.Model(EXTRA, layers="EtttL"),
        jp.schedules.build("1f1b", devices=2, microbatches=M),
        mesh_of(2),
        layout="Ett|tL",
    )
    stacks = {"t": draw({"w": (3, 4, 4), "scale": (3, 4)})}
    back = layered.canonical(
        layered.place({"first": {}, "stages": stacks, "last": {}}), spread=True
    )
    assert relative(jax.device_get(back["stages"]), stacks) == 0


EXTRA = {"E": embed, "t": extra_block, "L": loss}


def test_a_union_of_as_many_or_fewer_layers_keeps_every_shape():
    """One, two and three layers: as large as three, and nothing is raveled, which would undo how it
    is split over a tensor axis.
    """
    layer = [jax.ShapeDtypeStruct((2, 8), jnp.float32), jax.ShapeDtypeStruct((2, 4), jnp.float32)]
    union = SharedBuffer.of([layer * n for n in (1, 3, 2)])
    assert union.avals == tuple(layer * 3)
    assert not any(place.flat for places in union.places.values() for place in places)


def test_a_remat_policy_for_each_stage():
    """Two kinds of one function: the first stage recomputes, the second keeps; both give what
    neither would change.
    """
    plain = lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"])  # noqa: E731
    canonical = {
        "stages": [draw({"w": (4, 9), "v": (9, 4)}, seed=s) for s in (0, 1)],
        "last": draw({"head": (4, 2)}),
    }
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    found = []
    for functions in ([plain, plain], [jax.checkpoint(plain), plain]):
        pipe = jp.Pipeline(jp.Model(functions, last=head), schedule, mesh_of(2))
        found.append(pipe.value_and_grad(pipe.place(canonical), rows(width=4)))
        assert jp.inspect.report(pipe, pipe.place(canonical), rows(width=4))["stage_kinds"] == len(
            set(functions)
        )
    assert abs(float(found[0][0]) - float(found[1][0])) <= FLOAT64
    assert relative(found[1][1]["stages"], found[0][1]["stages"]) <= FLOAT64
