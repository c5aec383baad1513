"""Two kinds of layer in one pipeline: a device has room for the larger, not for both, and
everything is as without.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from tests.flat import flat_pipeline
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.refused import refused
from tests.tolerance import relative
from tests.unlike.test_checkpoints import begin, train
from tests.unlike.test_unlike import M, draw, embed, head, loss, over_microbatches, tokens

LAYOUT = "Ennn|nw|wwL"
COUNTS = {"n": 4, "w": 3}
SHAPES = {
    "n": {"w": (4, 4), "scale": (4,)},
    "w": {"up": (4, 6), "down": (6, 4), "norm": {"scale": (6,)}, "base": (4, 4)},
}
NARROW, WIDE = 20, 70  # numbers of a layer


def narrow(params, x):
    return x * params["scale"] + jnp.tanh(x @ params["w"])


def wide(params, x):
    return (
        x
        + jax.nn.gelu(x @ params["up"] * params["norm"]["scale"]) @ params["down"]
        + x @ params["base"]
    )


LAYERS = {"E": embed, "n": narrow, "w": wide, "L": loss}


def canonical():
    stacks = {
        letter: jax.tree.map(
            lambda s, n=n: (n, *s), SHAPES[letter], is_leaf=lambda s: isinstance(s, tuple)
        )
        for letter, n in COUNTS.items()
    }
    return {
        "first": draw({"table": (5, 4)}),
        "stages": draw(stacks, seed=1),
        "last": draw({"head": (4, 2)}, seed=2),
    }


def pipeline(layout=LAYOUT, name="1f1b", devices=3, **options):
    schedule = jp.schedules.build(name, devices=devices, microbatches=M)
    return flat_pipeline(
        layers=LAYERS,
        layout=layout,
        schedule=schedule,
        mesh=options.pop("mesh", None) or mesh_of(devices),
        **options,
    )


@cache
def plain():
    """Loss and gradients in plain JAX."""

    def loss_of(params, microbatch, _):
        x = embed(params["first"], microbatch)
        seen = dict.fromkeys("nw", 0)
        for letter in LAYOUT.replace("|", "")[1:-1]:
            x = LAYERS[letter](
                jax.tree.map(lambda leaf, i=seen[letter]: leaf[i], params["stages"][letter]), x
            )
            seen[letter] += 1
        return loss(params["last"], x, microbatch)

    return over_microbatches(loss_of)(canonical(), tokens())


def check_step(pipe, batch=None):
    """Loss and gradients are plain JAX's; returns placed gradients."""
    value, grads = pipe.value_and_grad(
        pipe.place(canonical()), tokens() if batch is None else batch
    )
    assert abs(float(value) - float(plain()[0])) <= FLOAT64 * float(plain()[0])
    found = pipe.canonical(grads)
    assert relative({k: found[k] for k in plain()[1]}, plain()[1]) <= FLOAT64
    return grads


def test_a_device_has_room_for_the_largest_and_numbers_are_the_same():
    pipe = pipeline()
    placed = pipe.place(canonical())
    (chunk,) = placed["stages"]
    # "ww"; "nw" has 90, "nnn" 60
    assert {name: leaf.shape for name, leaf in chunk.leaves.items()} == {"buffer 0": (3, 2 * WIDE)}
    back = pipe.canonical(placed)
    assert relative(back["stages"], canonical()["stages"]) == 0  # numbers are moved, not computed
    shapes = pipe.place(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), canonical()))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), placed) == jax.tree.map(
        lambda a: (a.shape, a.dtype), shapes
    )
    state = pipe.init(optax.adam(0.1), placed)
    assert {leaf.shape for leaf in jax.tree.leaves(state[0].mu["stages"])} == {(3, 2 * WIDE)}
    grads = check_step(pipe)
    assert jax.tree.structure(grads) == jax.tree.structure(placed)
    # What no parameter lies in stays zero, under optimizers too.
    assert not np.any(grads["stages"][0].leaves["buffer 0"][0, 3 * NARROW :])


def test_one_kind_stays_as_it_is():
    """Nothing is gained where the largest stage has all that any has: names and shapes are the
    parameters' own.
    """
    layers = {k: LAYERS[k] for k in "EnL"}
    pipe = jp.Pipeline(
        jp.Model(layers, layers="EnnnnL"),
        jp.schedules.build("1f1b", devices=2, microbatches=M),
        mesh_of(2),
        layout="Ennn|nL",
    )
    (chunk,) = pipe.place({**canonical(), "stages": {"n": canonical()["stages"]["n"]}})["stages"]
    assert sorted(chunk.leaves) == ["n/0/scale", "n/0/w", "n/1/scale", "n/1/w"]


def test_frozen_parameters_and_fsdp():
    """Frozen parameters share a buffer of their own, and fsdp splits buffers."""
    mesh = mesh_of(3, data=2)
    spec = jax.sharding.PartitionSpec
    pipe = pipeline(
        mesh=mesh, data_axes=("data",), fsdp="data", frozen=("stages/w/base", "stages/n/scale")
    )
    placed = pipe.place(canonical())
    (chunk,) = placed["stages"]
    assert [leaf.shape for leaf in chunk.leaves.values()] == [(3, 32), (3, 108)]
    assert {leaf.sharding.spec for leaf in chunk.leaves.values()} == {spec("pipe", "data")}
    twice = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), tokens())
    value, grads = pipe.value_and_grad(placed, twice)
    assert abs(float(value) - float(plain()[0])) <= FLOAT64 * float(plain()[0])
    found, wanted = pipe.canonical(grads)["stages"], plain()[1]["stages"]
    assert found["w"].pop("base") is None
    assert found["n"].pop("scale") is None
    assert (
        relative(
            found,
            {
                "n": {"w": wanted["n"]["w"]},
                "w": {k: wanted["w"][k] for k in ("up", "down", "norm")},
            },
        )
        <= FLOAT64
    )
    # A buffer is for the pipeline that made it.
    with refused(
        r"frozen=, replaced=, specs= or the mesh axes of this pipeline keep "
        r"it.*new.place\(old.canonical"
    ):
        pipeline(mesh=mesh, data_axes=("data",), fsdp="data").value_and_grad(placed, twice)


def test_a_buffer_keeps_the_parts_that_the_partitioner_makes():
    """Along any dim, of a matrix or of a vector: a device has its part of each parameter, and what
    is whole is whole in a buffer too.
    """
    spec = jax.sharding.PartitionSpec
    split = {
        "w": {"up": spec(None, "tensor"), "down": spec("tensor"), "norm": spec("tensor")},
        "n": {"w": spec("tensor")},
    }
    pipe = pipeline(mesh=mesh_of(3, tensor=2), specs={"stages": split})
    placed = pipe.place(canonical())
    (chunk,) = placed["stages"]
    # In halves: "ww" has 2 (24 + 24 + 6) / 2, "nw" 16 / 2 + 54 / 2; whole: "nnn" 3 scales, "ww" 2
    # bases, "nw" 4 + 16.
    found = {name: (leaf.shape, leaf.sharding.spec) for name, leaf in chunk.leaves.items()}
    assert found == {
        "buffer 0": ((3, 32), spec("pipe")),
        "buffer 1": ((3, 2, 54), spec("pipe", "tensor")),
    }
    # numbers are moved, not computed
    assert relative(pipe.canonical(placed)["stages"], canonical()["stages"]) == 0
    grads = check_step(pipe)
    assert {leaf.sharding.spec for leaf in grads["stages"][0].leaves.values()} == {
        spec("pipe"),
        spec("pipe", "tensor"),
    }
    with refused(r"keep it apart.*new.place\(old.canonical"):
        pipe.value_and_grad(pipeline().place(canonical()), tokens())


def test_a_function_for_each_stage_shares_too():
    """Trees of nothing in common, on one device twice: a buffer for each chunk."""
    functions = [
        lambda p, x: jnp.tanh(x @ p["a"]),
        lambda p, x: x * p["b"],
        lambda p, x: x @ p["c"],
        lambda p, x: x + p["d"],
    ]
    params = {
        "stages": [draw({"a": (3, 4)}), draw({"b": (4,)}), draw({"c": (4, 4)}), draw({"d": (4,)})],
        "last": draw({"head": (4, 2)}),
    }
    pipe = jp.Pipeline(
        jp.Model(functions, last=head),
        jp.schedules.build("zbv", devices=2, microbatches=M),
        mesh_of(2),
    )
    placed = pipe.place(params)
    assert [leaf.shape for chunk in placed["stages"] for leaf in chunk.leaves.values()] == [
        (2, 12),
        (2, 16),
    ]

    def loss_of(params, microbatch, _):
        x = microbatch["x"]
        for function, own in zip(functions, params["stages"], strict=True):
            x = function(own, x)
        return head(params["last"], x, microbatch)

    x, y = draw([(M * 2, 3), (M * 2, 2)], seed=7)
    wanted = over_microbatches(loss_of)(params, {"x": x, "y": y})
    value, grads = pipe.value_and_grad(placed, {"x": x, "y": y})
    assert abs(float(value) - float(wanted[0])) <= FLOAT64
    assert relative(pipe.canonical(grads), wanted[1]) <= FLOAT64


@pytest.mark.slow
def test_rules_for_one_parameter_see_it_by_itself(tmp_path):
    """Under `per_layer` norms, ranks and paths are each layer's; without it a mask by path is
    refused, as both lie in one array.

    A device keeps the state of its own layers, and another layout goes on with it.
    """
    pipe, alone = pipeline(), pipeline("EnnnnwwwL", "gpipe", 1)

    def decayed(tree):
        return jax.tree_util.tree_map_with_path(lambda path, _: "scale" not in str(path[-1]), tree)

    rule = optax.chain(optax.scale_by_trust_ratio(), optax.add_decayed_weights(0.1, mask=decayed))
    found, runs = [], []
    for each in (pipe, alone):
        params = each.place(canonical())
        assert any(chunk.layout.buffers for chunk in params["stages"]) is (each is pipe)
        optimizer = jp.per_layer(each, optax.chain(rule, optax.adam(0.1)))
        update, state = jax.jit(optimizer.update), each.init(optimizer, params)
        for _ in range(2):
            updates, state = update(params, state, params)  # any numbers of the gradients' form
        # of a mesh of one device JAX writes shardings otherwise
        assert update._cache_size() == 1 or each is alone
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        found.append(each.canonical(updates))
        runs.append((each, update, {"params": params, "optimizer": state}))
    assert relative(*jax.device_get(found)) <= FLOAT64
    # Two moments of each parameter of "ww", and a count of each layer of "nnn".
    assert {leaf.shape for leaf in jax.tree.leaves(runs[0][2]["optimizer"]["stages"])} == {
        (3, 2 * 2 * WIDE),
        (3, 3),
    }
    wanted = alone.canonical(runs[1][1](params, state, params)[0])
    for one, _, saved in runs:
        for other, update, mine in runs:
            folder = tmp_path / f"{one.schedule.num_devices} {other.schedule.num_devices}"
            with Checkpoints(folder, one) as checkpoints:
                checkpoints.save(1, saved)
            with Checkpoints(folder, other) as checkpoints:
                _, resumed = checkpoints.restore(mine)
            again = update(resumed["params"], resumed["optimizer"], resumed["params"])[0]
            assert relative(*jax.device_get((other.canonical(again), wanted))) <= FLOAT64
    with refused(r"jaxpipe.per_layer[^\n]*\n  'stages/n/scale' of shape \(4,\) is stored in"):
        pipe.init(optax.chain(optax.adam(0.1), rule), pipe.place(canonical()))


@pytest.mark.slow
def test_another_layout_goes_on(tmp_path):
    optimizer = optax.adam(0.1)
    one, other = pipeline(), pipeline("Enn|n|nw|wwL", "zbv", 2)
    state, _ = train(one, optimizer, begin(one, optimizer, canonical()), 1, tokens())
    with Checkpoints(tmp_path, one) as checkpoints:
        checkpoints.save(1, state)
    _, wanted = train(one, optimizer, state, 1, tokens())
    for pipe in (one, other):
        with Checkpoints(tmp_path, pipe) as checkpoints:
            _, resumed = checkpoints.restore(begin(pipe, optimizer, canonical()))
        _, losses = train(pipe, optimizer, resumed, 1, tokens())
        assert abs(losses[0] - wanted[0]) <= FLOAT64 * wanted[0]


@pytest.mark.slow
def test_devices_move_their_leaves_without_collectives_of_their_own():
    """Devices take unlike leaves out of buffers that fsdp splits; a collective that only some of
    them run would wait for the others forever.
    """
    layers = {
        "t": lambda p, x: jnp.tanh(x @ p),
        "u": lambda p, x: x * p,
        "L": lambda p, x, mb: jnp.mean((x @ p - mb["y"]) ** 2),
    }
    rng = np.random.default_rng(0)
    stages = {"t": rng.normal(size=(3, 8, 8)), "u": rng.normal(size=(1, 8))}
    params = {"stages": stages, "last": rng.normal(size=(8, 2))}
    batch = {"x": rng.normal(size=(8, 8)), "y": rng.normal(size=(8, 2))}
    mesh = jax.make_mesh((2, 2), ("pipe", "data"), devices=jax.devices()[:4])
    model = jp.Model(layers, layers="tuttL")
    pipe = jp.Pipeline(
        model,
        jp.schedules.build("1f1b", devices=2, microbatches=2),
        mesh,
        layout="tu|ttL",
        sharding=jp.Sharding(data="data", fsdp="data"),
    )
    rule = jp.per_layer(pipe, optax.lamb(0.1))
    placed = pipe.place(params)
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), placed
    )
    to = jax.tree.map(lambda a: a.sharding, pipe.init(rule, like))
    init = jax.jit(rule.init, out_shardings=to)
    jp.inspect.check_collectives(init.lower(placed).compile(), mesh)
    state = pipe.init(rule, placed)

    @pipe.jit
    def step(params, state, batch):
        _, grads = pipe.value_and_grad(params, batch)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jp.inspect.check_collectives(step.lower(placed, state, batch).compile(), mesh)
    found = pipe.canonical(step(placed, state, batch)[0])
    grads = jax.grad(lambda p: model.loss(p, batch, microbatches=2))(params)
    plain = optax.lamb(0.1)

    def of_layers(function, *trees):
        own = [{**t["stages"], "L": t["last"][None]} for t in trees]
        return jax.tree.map(jax.vmap(function), *own)

    def update(p, g):
        return p + plain.update(g, plain.init(p), p)[0]

    wanted = of_layers(update, params, grads)
    wanted = {"stages": {k: wanted[k] for k in "tu"}, "last": wanted["L"][0]}
    assert relative(*jax.device_get((found, wanted))) <= FLOAT64
