"""The reader of large copies finds those of small programs with known answers, and takes nothing
else for one.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.moves import LargeMove, Move, large_moves
from jaxpipe.inspect.hlo import parse
from jaxpipe.inspect.programs import compile_and_read
from jaxpipe.spmd.block import while_once
from tests.gpu.programs import lower_for_gpu, needs_gpu_compiler

TRIPS, SIDE = 6, 1024
MATRIX = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)  # 4 MiB
ROW = jax.ShapeDtypeStruct((SIDE,), jnp.float32)
POOL = jax.ShapeDtypeStruct((8, SIDE, SIDE), jnp.float32)


def moves_of(function: Any, *shapes: Any) -> list[LargeMove]:
    return large_moves(compile_and_read(lower_for_gpu(function, *shapes)).module)


def in_loops(moves: list[LargeMove]) -> list[tuple[Move, tuple[int, ...], int, bool]]:
    return [
        (m.move, m.array.dims, m.place.trips, m.place.guarded) for m in moves if m.place.in_loop
    ]


def transposing(x: Any) -> Any:
    """A matrix that is turned around in every trip; the barrier keeps the transpose apart from the
    sine that reads it.
    """
    return lax.fori_loop(0, TRIPS, lambda i, x: jnp.sin(lax.optimization_barrier(x.T)), x)


@needs_gpu_compiler
def test_a_transpose_in_a_loop_is_counted_every_trip() -> None:
    (move,) = (m for m in moves_of(transposing, MATRIX) if m.place.in_loop)
    assert move.move in (Move.TRANSPOSE, Move.COPY)
    assert (move.array.dims, move.place.trips, move.place.guarded) == ((SIDE, SIDE), TRIPS, False)
    assert move.nbytes_a_step == TRIPS * 4 * 2**20
    # XLA of JAX 0.11 gives it no name: that of the sine which reads it is taken.
    assert re.search(r"while/body/\w+/(transpose|sin)$", move.origin)


@needs_gpu_compiler
def test_rows_written_in_place_are_no_copies() -> None:
    """A pool that a loop carries, and writes a row of in each trip."""

    def write(pool: Any, row: Any) -> Any:
        return lax.fori_loop(
            0, TRIPS, lambda i, pool: lax.dynamic_update_index_in_dim(pool, row * i, i, 0), pool
        )

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
def test_a_loop_of_one_trip_does_not_copy_the_pool_that_it_hands_on() -> None:
    """A conditional copied it until JAX 0.11."""

    def step(tick: Any) -> Any:
        def trip(pool: Any, flag: Any) -> Any:
            def write(pool: Any) -> Any:
                return lax.dynamic_update_index_in_dim(
                    pool, jnp.sin(pool[flag[1]] @ pool[flag[2]]), flag[3], 0
                )

            return tick(flag[0] > 0, write, pool), None

        return lambda pool, flags: lax.scan(trip, pool, flags)[0]

    def once(p: Any, write: Any, pool: Any) -> Any:
        return while_once(p, write, pool)[1]

    flags = jax.ShapeDtypeStruct((TRIPS, 4), jnp.int32)
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
    assert found[0].origin == "jit(f)/x"
    assert len(large_moves(parse(FUSIONS), least=2**20 - 1024)) == len(found) + 1


# A loop that carries a pool of 8 rows and an accumulator, around a loop that stacks; scores of a
# block are as large as the pool.
CARRIED = """HloModule carried, is_scheduled=true

%row (p: bf16[8,512,512], q: bf16[512,4096], i: s32[]) -> bf16[4096,512] {
  %p = bf16[8,512,512]{2,1,0} parameter(0)
  %q = bf16[512,4096]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero.0 = s32[] constant(0)
  %slot = bf16[1,512,512]{2,1,0} dynamic-slice(%p, %i, %zero.0, %zero.0), dynamic_slice_sizes={1,512,512}
  %scores = bf16[512,4096]{1,0} exponential(%q)
  ROOT %turned = bf16[4096,512]{0,1} transpose(%scores), dimensions={1,0}
}

%all_rows (p.1: bf16[8,512,512]) -> bf16[8,512,512] {
  %p.1 = bf16[8,512,512]{2,1,0} parameter(0)
  %same = bf16[8,512,512]{2,1,0} bitcast(%p.1)
  ROOT %turned.1 = bf16[8,512,512]{2,0,1} transpose(%same), dimensions={0,2,1}
}

%written (p.2: f32[8,512,512], r: f32[1,512,512], i.2: s32[]) -> f32[8,512,512] {
  %p.2 = f32[8,512,512]{2,1,0} parameter(0)
  %r = f32[1,512,512]{2,1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  ROOT %dus = f32[8,512,512]{2,1,0} dynamic-update-slice(%p.2, %r, %i.2, %i.2, %i.2)
}

%layer (s: (s32[], f32[8,512,512])) -> (s32[], f32[8,512,512]) {
  %s = (s32[], f32[8,512,512]{2,1,0}) parameter(0)
  %i.3 = s32[] get-tuple-element(%s), index=0
  %stack = f32[8,512,512]{2,1,0} get-tuple-element(%s), index=1
  %r.3 = f32[1,512,512]{2,1,0} constant({...})
  %stack.1 = f32[8,512,512]{2,1,0} fusion(%stack, %r.3, %i.3), kind=kLoop, calls=%written
  ROOT %s.1 = (s32[], f32[8,512,512]{2,1,0}) tuple(%i.3, %stack.1)
}

%more (s.2: (s32[], f32[8,512,512])) -> pred[] {
  %s.2 = (s32[], f32[8,512,512]{2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%trip (t: (s32[], bf16[8,512,512], f32[8,512,512])) -> (s32[], bf16[8,512,512], f32[8,512,512]) {
  %t = (s32[], bf16[8,512,512]{2,1,0}, f32[8,512,512]{2,1,0}) parameter(0)
  %i.4 = s32[] get-tuple-element(%t), index=0
  %pool = bf16[8,512,512]{2,1,0} get-tuple-element(%t), index=1
  %total = f32[8,512,512]{2,1,0} get-tuple-element(%t), index=2
  %x = bf16[512,512]{1,0} constant({...})
  %keys = bf16[512,4096]{1,0} constant({...})
  %products = bf16[512,4096]{1,0} dot(%x, %keys), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %own = bf16[4096,512]{0,1} fusion(%pool, %products, %i.4), kind=kLoop, calls=%row
  %whole = bf16[8,512,512]{2,0,1} fusion(%pool), kind=kLoop, calls=%all_rows
  %zero.4 = f32[] constant(0)
  %zeros = f32[8,512,512]{2,1,0} broadcast(%zero.4), dimensions={}
  %begin = (s32[], f32[8,512,512]{2,1,0}) tuple(%i.4, %zeros)
  %stacked = (s32[], f32[8,512,512]{2,1,0}) while(%begin), condition=%more, body=%layer, backend_config={"known_trip_count":{"n":"8"}}
  %gradient = f32[8,512,512]{2,1,0} get-tuple-element(%stacked), index=1
  %sum = f32[8,512,512]{2,1,0} add(%total, %gradient)
  ROOT %t.1 = (s32[], bf16[8,512,512]{2,1,0}, f32[8,512,512]{2,1,0}) tuple(%i.4, %pool, %sum)
}

%again (t.2: (s32[], bf16[8,512,512], f32[8,512,512])) -> pred[] {
  %t.2 = (s32[], bf16[8,512,512]{2,1,0}, f32[8,512,512]{2,1,0}) parameter(0)
  ROOT %yes.1 = pred[] constant(true)
}

ENTRY %main (start: (s32[], bf16[8,512,512], f32[8,512,512])) -> (s32[], bf16[8,512,512], f32[8,512,512]) {
  %start = (s32[], bf16[8,512,512]{2,1,0}, f32[8,512,512]{2,1,0}) parameter(0)
  ROOT %end = (s32[], bf16[8,512,512]{2,1,0}, f32[8,512,512]{2,1,0}) while(%start), condition=%again, body=%trip, backend_config=TRIPS
}
""".replace("TRIPS", '{"known_trip_count":{"n":"4"}}')


def test_what_is_carried_is_told_by_where_it_comes_from_and_goes_to() -> None:
    """Not by its size: a block's scores have as many elements as the pool, of which the same fusion
    reads a row.
    """
    found = {m.instruction.name: (m.move, m.is_carried) for m in large_moves(parse(CARRIED))}
    assert found == {
        "own": (Move.TRANSPOSE, False),
        "whole": (Move.TRANSPOSE, True),
        "zeros": (Move.FILL, True),
    }
