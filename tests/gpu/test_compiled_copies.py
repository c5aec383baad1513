"""The reader of large copies finds those of small programs with known answers, and takes nothing else for one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.compiled import LargeMove, Move, compile_and_read, large_moves, parse
from tests.gpu.programs import lower_for_gpu, needs_gpu_compiler

TRIPS, SIDE = 6, 1024
MATRIX = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)  # 4 MiB
ROW = jax.ShapeDtypeStruct((SIDE,), jnp.float32)
POOL = jax.ShapeDtypeStruct((8, SIDE, SIDE), jnp.float32)


def moves_of(function: Any, *shapes: Any) -> list[LargeMove]:
    return compile_and_read(lower_for_gpu(function, *shapes)).large_moves


def in_loops(moves: list[LargeMove]) -> list[tuple[Move, tuple[int, ...], int, bool]]:
    return [(m.move, m.array.dims, m.place.trips, m.place.guarded) for m in moves if m.place.in_loop]


def transposing(x: Any) -> Any:
    """A matrix that is turned around in every trip; the barrier keeps the transpose apart from the sine that reads it."""
    return lax.fori_loop(0, TRIPS, lambda i, x: jnp.sin(lax.optimization_barrier(x.T)), x)


@needs_gpu_compiler
def test_a_transpose_in_a_loop_is_counted_every_trip() -> None:
    (move,) = (m for m in moves_of(transposing, MATRIX) if m.place.in_loop)
    assert move.move in (Move.TRANSPOSE, Move.COPY)
    assert (move.array.dims, move.place.trips, move.place.guarded) == ((SIDE, SIDE), TRIPS, False)
    assert move.nbytes_a_step == TRIPS * 4 * 2**20
    # XLA made the transpose itself, and so gave it no name: that of the sine which reads it is taken.
    assert move.origin.endswith("while/body/closed_call/sin")
    assert move.source.startswith("test_compiled_copies.py:")


@needs_gpu_compiler
def test_rows_written_in_place_are_no_copies() -> None:
    """A pool that a loop carries, and writes a row of in each trip."""

    def write(pool: Any, row: Any) -> Any:
        return lax.fori_loop(0, TRIPS, lambda i, pool: lax.dynamic_update_index_in_dim(pool, row * i, i, 0), pool)

    assert in_loops(moves_of(write, MATRIX, ROW)) == []


@needs_gpu_compiler
def test_a_stack_of_zeros_in_every_trip_is_a_fill() -> None:
    """A scan in a loop stacks its results in an array that XLA zeroes first."""

    def stacked(x: Any) -> Any:
        def trip(i: Any, x: Any) -> Any:
            rows = lax.scan(lambda carry, row: (carry + 1, jnp.sin(row * carry)), 1.0, x)[1]
            return rows @ x

        return lax.fori_loop(0, TRIPS, trip, x)

    found = in_loops(moves_of(stacked, MATRIX))
    assert (Move.FILL, (SIDE, SIDE), TRIPS, False) in found
    assert {move for move, *_ in found} <= {Move.FILL, Move.COPY}


@needs_gpu_compiler
def test_a_conditional_copies_the_pool_that_it_hands_on_and_a_loop_of_one_trip_does_not() -> None:
    def step(tick: Any) -> Any:
        def trip(pool: Any, flag: Any) -> Any:
            def write(pool: Any) -> Any:
                return lax.dynamic_update_index_in_dim(pool, jnp.sin(pool[flag[1]] @ pool[flag[2]]), flag[3], 0)

            return tick(flag[0] > 0, write, pool), None

        return lambda pool, flags: lax.scan(trip, pool, flags)[0]

    def once(p: Any, write: Any, pool: Any) -> Any:
        return lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), write(c[1])), (p, pool))[1]

    flags = jax.ShapeDtypeStruct((TRIPS, 4), jnp.int32)
    conditional = in_loops(moves_of(step(lambda p, write, pool: lax.cond(p, write, lambda pool: pool, pool)), POOL, flags))
    assert (Move.COPY, POOL.shape) in [found[:2] for found in conditional]
    assert POOL.shape not in [dims for _, dims, *_ in in_loops(moves_of(step(once), POOL, flags))]


FUSIONS = """HloModule fusions, is_scheduled=true

FileNames
1 "/somewhere/model.py"

FunctionNames
1 "stage"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%several (p0: f32[1024,1024], p1: s32[]) -> (f32[1024,1024], f32[1024,1024], f32[1024,1024]) {
  %p0 = f32[1024,1024]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = f32[] constant(0)
  %turned = f32[1024,1024]{0,1} transpose(%p0), dimensions={1,0}
  %seen = f32[1024,1024]{1,0} bitcast(%turned)
  %filled = f32[1024,1024]{1,0} broadcast(%zero), dimensions={}
  %sum = f32[1024,1024]{1,0} add(%p0, %filled)
  ROOT %all = (f32[1024,1024]{1,0}, f32[1024,1024]{1,0}, f32[1024,1024]{1,0}) tuple(%seen, %filled, %sum)
}

%in_place (p2: f32[8,512,512], p3: f32[1,512,512], p4: s32[]) -> f32[8,512,512] {
  %p2 = f32[8,512,512]{2,1,0} parameter(0)
  %p3 = f32[1,512,512]{2,1,0} parameter(1)
  %p4 = s32[] parameter(2)
  %same = f32[8,512,512]{2,1,0} bitcast(%p2)
  ROOT %dus = f32[8,512,512]{2,1,0} dynamic-update-slice(%same, %p3, %p4, %p4, %p4)
}

%rewritten (p5: f32[1,512,512], p6: s32[]) -> f32[8,512,512] {
  %p5 = f32[1,512,512]{2,1,0} parameter(0)
  %p6 = s32[] parameter(1)
  %zero.1 = f32[] constant(0)
  %zeros = f32[8,512,512]{2,1,0} broadcast(%zero.1), dimensions={}
  ROOT %dus.1 = f32[8,512,512]{2,1,0} dynamic-update-slice(%zeros, %p5, %p6, %p6, %p6)
}

ENTRY %main (a: f32[1024,1024], b: f32[8,512,512], c: f32[1,512,512], i: s32[], s: bf16[512,1023], t: bf16[512,1024]) -> f32[8,512,512] {
  %a = f32[1024,1024]{1,0} parameter(0)
  %b = f32[8,512,512]{2,1,0} parameter(1)
  %c = f32[1,512,512]{2,1,0} parameter(2)
  %i = s32[] parameter(3)
  %s = bf16[512,1023]{1,0} parameter(4)
  %t = bf16[512,1024]{1,0} parameter(5)
  %f1 = (f32[1024,1024]{1,0}, f32[1024,1024]{1,0}, /*index=2*/f32[1024,1024]{1,0}) fusion(%a), calls=%several, METADATA
  %f2 = f32[8,512,512]{2,1,0} fusion(%b, %c, %i), kind=kLoop, calls=%in_place
  %small = bf16[512,1023]{1,0} copy(%s)
  %large = bf16[512,1024]{1,0} copy(%t)
  ROOT %f3 = f32[8,512,512]{2,1,0} fusion(%c, %i), kind=kLoop, calls=%rewritten
}
""".replace("METADATA", 'metadata={op_name="jit(f)/x" stack_frame_id=1}')


def test_roots_of_fusions_are_told_apart() -> None:
    found = large_moves(parse(FUSIONS))
    assert [(m.instruction.name, m.move) for m in found] == [
        ("f1", Move.TRANSPOSE),
        ("f1", Move.FILL),
        ("large", Move.COPY),
        ("f3", Move.REWRITE),
    ]
    assert [m.nbytes for m in found] == [4 * 2**20, 4 * 2**20, 2**20, 8 * 2**20]
    assert (found[0].source, found[0].origin) == ("model.py:12 stage", "jit(f)/x")
    assert len(large_moves(parse(FUSIONS), least=2**20 - 1024)) == len(found) + 1
