"""How pools keep values, which values are made again where they are read, and what is kept of
gathered ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from jaxpipe.jaxprs.entry import Alone, Entry, Part, Piece, Slot, Total
from jaxpipe.jaxprs.equations import scan_counts
from jaxpipe.jaxprs.min_cut import cheapest
from jaxpipe.jaxprs.residuals import into_scans
from jaxpipe.jaxprs.slots import InSlots, run_in_slots
from jaxpipe.stage.trace import trace_stage
from jaxpipe.table.effects import Place

SHAPES = [
    ((), ()),
    ((5,), ()),
    ((3, 4, 6), ()),
    ((3, 4, 6), (Part(1, ("t",), 2),)),
    ((3, 4, 6), (Part(2, ("t",), 3), Part(1, ("u",), 2))),
    ((4, 6), (Part(0, ("t",), 2),)),
    ((0, 3), ()),
]


TILE = (2, 4)


@pytest.mark.parametrize("tile", [(), TILE], ids=str)
@pytest.mark.parametrize(("shape", "parts"), [*SHAPES, ((3, 6, 12), ()), ((3, 6, 13), ())], ids=str)
def test_a_value_comes_back_out_of_its_slot(shape, parts, tile):
    entry = Entry(shape, parts, tile=tile)
    value = jnp.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
    pool = jnp.full((2, *entry.kept), -1.0)
    pool = Slot(pool, jnp.int32(1), entry).store(value)
    np.testing.assert_array_equal(Slot(pool, jnp.int32(1), entry).load(), value)
    assert jnp.all(pool[0] == -1)
    for row in range(shape[0] if len(shape) > 1 else 0):
        pool = Slot(pool, jnp.int32(0), entry).store_row(jnp.int32(row), value[row] + 1)
        np.testing.assert_array_equal(
            Slot(pool, jnp.int32(0), entry).load_row(jnp.int32(row)), value[row] + 1
        )


@pytest.mark.parametrize(("shape", "parts"), SHAPES[1:-1], ids=str)
def test_a_piece_of_a_long_array_is_read_and_added_to_row_by_row(shape, parts):
    entry = Entry(shape, parts)
    value = jnp.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
    counts = [(0, 0, 0)] * len(parts)
    array = lax.pad(entry.ravel(entry.pack(value)), -1.0, [*counts, (2, 3, 0)])
    for row in range(shape[0]):
        read = Piece(array, 2, entry).load_row(jnp.int32(row))
        np.testing.assert_array_equal(read, value[row])
    total = array
    for row in range(shape[0]):
        total = Piece(total, 2, entry).store_row(jnp.int32(row), value[row] + 1)
    np.testing.assert_array_equal(Piece(total, 2, entry).load(), 2 * value + 1)
    assert jnp.all(total[..., :2] == -1)
    assert jnp.all(total[..., -3:] == -1)


def test_a_device_s_part_of_an_entry_is_one_piece():
    entry = Entry((3, 4, 6), (Part(2, ("t",), 2),))
    assert entry.kept == (3, 2, 12)
    assert entry.pool_spec == PartitionSpec(None, None, ("t",), None)
    assert entry.spec == PartitionSpec(None, None, ("t",))
    value = jnp.arange(72).reshape(3, 4, 6)
    np.testing.assert_array_equal(entry.pack(value)[:, 1], value[:, :, 3:].reshape(3, 12))


def test_tiles_are_whole_and_few_numbers_make_none():
    part = (Part(2, ("t",), 2),)
    full, padded, few = (Entry((3, 8, n), part, tile=TILE) for n in (4, 18, 2))
    assert (full.kept, padded.kept, few.kept) == ((3, 2, 2, 2, 4), (3, 2, 9, 2, 4), (3, 2, 1, 2, 4))
    assert Entry((3, 7, 2), tile=TILE).kept == (3, 14)
    assert Entry((3, 65), tile=TILE).kept == (3, 9, 2, 4)
    assert full.pool_spec == PartitionSpec(None, None, ("t",), None, None, None)


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 7, 2), (3, 65), (5,), ()], ids=str)
def test_a_raveled_entry_has_whole_tiles_and_comes_back(shape):
    entry = Entry(shape, tile=TILE)
    value = jnp.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
    raveled = entry.ravel(entry.pack(value))
    assert raveled.shape == (entry.units, *TILE)
    np.testing.assert_array_equal(entry.unpack(entry.unravel(raveled)), value)


def test_a_shorter_value_goes_to_the_beginning_of_a_tiled_entry():
    entry, value = Entry((64,), tile=TILE), jnp.arange(13.0)
    pool = Slot(jnp.full((2, *entry.kept), -1.0), jnp.int32(1), entry).store_flat(value)
    found = Slot(pool, jnp.int32(1), entry).load()
    np.testing.assert_array_equal(found[:13], value)
    # Whole tiles are written.
    assert jnp.all(found[16:] == -1)
    assert jnp.all(pool[0] == -1)


def masked(params, x):
    """Attention's mask, made outside of the scan over layers."""
    mask = jnp.arange(x.shape[0])[:, None] >= jnp.arange(x.shape[0])

    def layer(x, w):
        scores = jnp.where(mask, x @ x.T, -1e30)
        return jax.nn.softmax(scores) @ x @ w, None

    return jax.lax.scan(layer, x, params)[0]


def test_masks_are_made_inside_scans_and_never_kept():
    params, x = jnp.ones((3, 4, 4)), jnp.ones((5, 4))
    before = jax.make_jaxpr(masked)(params, x).jaxpr
    (scan,) = (eqn for eqn in into_scans(before).eqns if eqn.primitive.name == "scan")
    assert scan_counts(scan)[0] == 0
    code = trace_stage(lambda p, x, _: masked(p, x), params, x, {})
    kept = (
        *(v.aval for v in code.hoist.outvars),
        *code.avals[Place.RESIDUAL_INPUT],
        *code.avals[Place.RESIDUAL_WEIGHT],
        *code.avals[Place.STASH],
    )
    assert not [aval for aval in kept if aval.dtype == bool]


def test_a_gathered_value_is_kept_as_what_it_is_gathered_from():
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.sharding.NamedSharding(mesh, PartitionSpec(None, None))

    def stage(w, x, _):
        split = jnp.tanh(x)
        return jax.lax.with_sharding_constraint(split, whole) @ w

    code = trace_stage(stage, jnp.ones((4, 4)), jnp.ones((2, 4)), {})
    # tanh's output is what its own derivative needs; the gathered copy, which W reads, is not kept
    # beside it.
    assert len((*code.avals[Place.RESIDUAL_INPUT], *code.avals[Place.RESIDUAL_WEIGHT])) == 1


def test_rows_of_a_table_s_gradient_are_added_where_they_belong():
    table, rows, dy = jnp.ones((10, 3)), jnp.array([1, 4, 1]), jnp.arange(9.0).reshape(3, 3)
    jaxpr = jax.make_jaxpr(lambda t, i, dy: jax.vjp(lambda t: t[i], t)[1](dy))(table, rows, dy)
    assert not jaxpr.consts
    total = jnp.full((10, 3), 2.0)

    def add(total):
        run = InSlots(jaxpr.jaxpr, [table, rows, dy], writes={0: Total(total)})
        return run_in_slots(run)[0][0]

    found = add(total)
    np.testing.assert_array_equal(found, total.at[rows].add(dy))

    scattered = [
        eqn for eqn in jax.make_jaxpr(add)(total).eqns if eqn.primitive.name == "scatter-add"
    ]
    adds = [
        eqn
        for eqn in jax.make_jaxpr(add)(total).eqns
        if eqn.primitive.name == "add" and eqn.outvars[0].aval.shape == (10, 3)
    ]
    assert len(scattered) == 1
    assert adds == []


def test_rows_that_are_scattered_into_zeros_are_stored_in_a_slot_of_its_own():
    """A residual may be such a value: it replaces what is in the slot."""
    rows, values = jnp.array([1, 4, 1]), jnp.arange(9.0).reshape(3, 3)
    jaxpr = jax.make_jaxpr(lambda i, v: jnp.zeros((10, 3)).at[i].add(v))(rows, values).jaxpr
    run = InSlots(jaxpr, [rows, values], writes={0: Alone(jnp.full((10, 3), 2.0))})
    ((found,),) = run_in_slots(run)
    np.testing.assert_array_equal(found, jnp.zeros((10, 3)).at[rows].add(values))


def test_two_scans_run_as_one_loop_and_give_what_each_gives():
    """One runs backwards and adds its rows to an accumulator; what it reads row by row lies in the
    pool that the other writes.
    """

    def ahead(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, w)

    def back(kept, w, dy):
        return jax.lax.scan(
            lambda dy, each: (dy @ each[1].T, jnp.outer(each[0], dy)), dy, (kept, w), reverse=True
        )

    keys = jax.random.split(jax.random.key(0), 4)
    x, dy, w, kept = (
        jax.random.normal(k, shape)
        for k, shape in zip(keys, [(4,), (4,), (3, 4, 4), (3, 4)], strict=True)
    )
    entry, slot = Entry((3, 4)), jnp.int32
    forward, backward = jax.make_jaxpr(ahead)(x, w), jax.make_jaxpr(back)(kept, w, dy)

    def both(pool):
        one = InSlots(
            backward.jaxpr,
            [Slot(pool, slot(0), entry), w, dy],
            {1: Total(jnp.ones((3, 4, 4)))},
        )
        other = InSlots(forward.jaxpr, [x, w], {1: Slot(pool, slot(1), entry)})
        return run_in_slots(one, other)

    pool = Slot(jnp.zeros((2, *entry.kept)), slot(0), entry).store(kept)
    (dx, total), (y, new) = both(pool)
    for found, wanted in zip((y, Slot(new, slot(1), entry).load()), ahead(x, w), strict=True):
        # the same operations on the same numbers, maybe fused otherwise
        np.testing.assert_allclose(found, wanted, rtol=1e-14)
    for found, wanted in zip((dx, total - 1), back(kept, w, dy), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-14, atol=1e-15)
    np.testing.assert_array_equal(Slot(new, slot(0), entry).load(), kept)
    loops = [eqn for eqn in jax.make_jaxpr(both)(pool).eqns if eqn.primitive.name == "scan"]
    assert len(loops) == 1


def test_a_result_that_is_a_constant_is_stored_beside_what_is_read():
    """A weight that does not change the loss has a constant as gradient."""
    entry, index = Entry(()), jnp.int32
    pool = Slot(jnp.zeros((2, *entry.kept)), index(0), entry).store(jnp.float32(3.0))
    jaxpr = jax.make_jaxpr(lambda x: (x + 1, 0.0))(1.0)
    run = InSlots(
        jaxpr.jaxpr,
        [Slot(pool, index(0), entry)],
        {1: Slot(pool, index(1), entry), 0: Slot(pool, index(0), entry)},
    )
    ((new, same),) = run_in_slots(run)
    assert same is new
    assert [float(Slot(new, index(k), entry).load()) for k in range(2)] == [4.0, 0.0]


@pytest.mark.parametrize("width", [512, 8])
def test_a_large_slot_is_read_after_what_was_stored_before(width):
    """A backward runs what it computes again of a layer after the backward of the layer above has
    added its gradient.
    """
    shape = (width, width)
    entry = Entry(shape, ())

    def two_layers(dy, above, below):
        gradient, dy = above @ dy, jnp.tanh(above) @ dy
        return jnp.tanh(below) @ dy, gradient

    closed = jax.make_jaxpr(two_layers)(*[jnp.zeros(shape)] * 3)

    def run(dy, pool, index):
        reads = Slot(pool, index, entry), Slot(pool, 1 - index, entry)
        total = {1: Total(jnp.zeros(shape))}
        return run_in_slots(InSlots(closed.jaxpr, [dy, *reads], total))[0][0]

    dy, pool = jnp.ones(shape), jnp.arange(2.0)[:, None, None] * jnp.ones((2, *entry.kept))
    expected, _ = two_layers(dy, *pool.reshape(2, *shape))
    np.testing.assert_allclose(run(dy, pool, jnp.int32(0)), expected, rtol=1e-12)
    eqns = jax.make_jaxpr(run)(dy, pool, jnp.int32(0)).eqns
    names = [eqn.primitive.name for eqn in eqns]
    product = eqns[names.index("dot_general")].outvars[0]
    after = {product}  # what depends on the first product, the gradient
    for eqn in eqns:
        if not after.isdisjoint(v for v in eqn.invars if isinstance(v, core.Var)):
            after.update(eqn.outvars)
    second = [eqn for eqn in eqns if pool.shape in [v.aval.shape for v in eqn.invars]][-1]
    assert after.isdisjoint(second.outvars) == (width < 512)


def test_inputs_that_are_kept_have_the_order_in_which_they_are_read():
    """Every process of a pod must make the same program, and addresses of variables differ."""
    arrays = [jnp.ones(4)] * 8
    jaxpr = jax.make_jaxpr(lambda *xs: [jnp.sin(x) for x in reversed(xs)])(*arrays).jaxpr
    kept, again = cheapest(jaxpr.outvars, jaxpr.eqns, lambda _: False, repeat=lambda _: True)
    assert [jaxpr.invars.index(v) for v in kept] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert again == jaxpr.eqns
