"""In the GPU program nothing as large as a pool, an accumulator or a stack of layers is made again
in the loop: not copied, not transposed, not filled, alone or as the root of a fusion; whatever is
kept for the backward, and over every other axis of the mesh.
"""

from __future__ import annotations

from functools import partial

import jax
import pytest

import jaxpipe as jp
from benchmarks.gpu_programs import SHAPE, Axes, Case, Remat
from benchmarks.moves import LargeMove, Move, large_moves
from jaxpipe.inspect.programs import compile_and_read
from jaxpipe.spmd import block
from tests.gpu.programs import gpu_marks
from tests.tiers import exhaustive, slow

pytestmark = gpu_marks()
CATALOGUE = [name for name in jp.schedules.names() if name != "no_pipelining"]
# bytes of what stages hand on: once a block it may be copied
ACTIVATION = 2 * SHAPE.rows * SHAPE.time * SHAPE.width


def found(case: Case) -> list[LargeMove]:
    """Whole arrays that the loop carries or reads (`LargeMove.is_carried`), larger than what stages
    hand on, that it makes again.
    """
    moves = large_moves(compile_and_read(case.lower()).module)
    made = (each for each in moves if each.place.in_loop and each.move is not Move.SLICE)
    return [each for each in made if each.is_carried and each.nbytes > ACTIVATION]


def case(name: str, axes: Axes = Axes.PIPE, remat: Remat = Remat.NOTHING) -> Case:
    return Case(name, devices=4, microbatches=8, axes=axes, remat=remat)


def grid() -> list[object]:
    """Other axes, a tensor axis among them, and remats among the slow tests.

    The rest is run by hand; `tests/gpu/test_in_place.py` has the catalogue.
    """
    later = {("1f1b", axes, Remat.NOTHING) for axes in (Axes.FSDP, Axes.TENSOR)}
    later |= {("zb_h1", Axes.PIPE, Remat.NOTHING), ("zb_h1", Axes.TENSOR, Remat.LAYER)}
    every = [(name, axes, remat) for name in CATALOGUE for axes in Axes for remat in Remat]
    return [slow(*each) if each in later else exhaustive(*each) for each in every]


@pytest.mark.parametrize(("name", "axes", "remat"), grid())
def test_nothing_large_is_made_again(name: str, axes: Axes, remat: Remat) -> None:
    assert [str(each) for each in found(case(name, axes, remat))] == []


@pytest.mark.slow
def test_pools_that_are_read_after_their_writers_would_be_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check has teeth: it finds what is made again where the old value of what a block writes
    is read once more.
    """
    original = block.while_once

    def reading(predicate, body, carry):
        done, after = original(predicate, body, carry)
        return done, jax.tree.map(partial(jax.numpy.where, predicate), after, carry)

    monkeypatch.setattr(block, "while_once", reading)
    assert found(Case("gpipe", devices=2, microbatches=8))
