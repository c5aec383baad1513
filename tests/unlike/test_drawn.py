"""Parameters that are drawn and placed in one program: no device draws more than its part of the
model.
"""

import jax
import pytest

import jaxpipe as jp
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.tolerance import relative
from tests.unlike.test_buffers import LAYERS
from tests.unlike.test_unlike import M, head

WIDTH = 64


def drawn(shapes):
    """A program that draws normal numbers of these shapes."""

    def draw(key):
        leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda s: isinstance(s, tuple))
        return jax.tree.unflatten(
            tree,
            [
                jax.random.normal(jax.random.fold_in(key, i), shape)
                for i, shape in enumerate(leaves)
            ],
        )

    return draw


def chunks():
    """Two stages a device."""
    schedule = jp.schedules.build("interleaved_1f1b", devices=4, microbatches=M, chunks=2)
    pipe = jp.Pipeline(jp.Model(lambda p, x: x @ p["w"], last=head), schedule, mesh_of(4))
    return pipe, {"stages": {"w": (8, WIDTH, WIDTH)}, "last": {"head": (4, 2)}}


def kinds():
    """Narrow layers on two devices and wide ones on two, in a buffer."""
    shapes = {
        "n": {"w": (10, WIDTH, WIDTH), "scale": (10, WIDTH)},
        "w": {"up": (2, WIDTH, 128), "down": (2, 128, WIDTH)},
    }
    shapes["w"] |= {"norm": {"scale": (2, 128)}, "base": (2, WIDTH, WIDTH)}
    schedule = jp.schedules.build("1f1b", devices=4, microbatches=M)
    pipe = jp.Pipeline(
        jp.Model(LAYERS, layers="EnnnnnnnnnnwwL"), schedule, mesh_of(4), layout="Ennnnn|nnnnn|w|wL"
    )
    return pipe, {"first": {"table": (5, 4)}, "stages": shapes, "last": {"head": (4, 2)}}


@pytest.mark.parametrize("model", [chunks, pytest.param(kinds, marks=pytest.mark.slow)])
def test_a_device_draws_its_part(model):
    pipe, shapes = model()
    draw = drawn(shapes)
    program = jax.jit(lambda key: pipe.place(draw(key))).lower(jax.random.key(0)).compile()
    alone = jax.jit(draw).lower(jax.random.key(0)).compile()
    # What a device that draws all needs for bits and what is made of them; of four each has a
    # quarter, what it sends, and its buffers.
    assert alone.memory_analysis().temp_size_in_bytes > alone.memory_analysis().output_size_in_bytes
    assert (
        program.memory_analysis().output_size_in_bytes
        < 0.3 * alone.memory_analysis().output_size_in_bytes
    )
    assert (
        program.memory_analysis().temp_size_in_bytes
        < 0.8 * alone.memory_analysis().temp_size_in_bytes
    )
    found = jax.device_get(pipe.canonical(program(jax.random.key(0))))
    wanted = jax.device_get(jax.jit(draw)(jax.random.key(0)))
    # the same bits drawn, compiled apart
    assert relative({key: found[key] for key in wanted}, wanted) <= FLOAT64
