"""The reader of TPU programs finds known answers in small texts."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from benchmarks.moves import Move, large_moves, large_moves_on_tpus, order, space
from jaxpipe.inspect.hlo import Array, parse
from jaxpipe.inspect.programs import Purpose, TpuProgram, heap_bytes
from jaxpipe.lowering.target import CHIPS

CYCLES = 'backend_config={"window_config":{"estimated_cycles":"N"}}'
TEXT = """HloModule steps, is_scheduled=true

%matmul (a: f32[512,512], b: f32[1,512,512]) -> f32[512,512] {
  %a = f32[512,512]{1,0:T(8,128)} parameter(0)
  %b = f32[1,512,512]{2,1,0:T(8,128)} parameter(1)
  %b2 = f32[512,512]{1,0:T(8,128)} bitcast(%b)
  ROOT %dot.1 = f32[512,512]{1,0:T(8,128)} convolution(%a, %b2), dim_labels=bf_io->bf
}

%store (p: f32[4,512,512], v: f32[512,512], i: s32[]) -> f32[4,512,512] {
  %p = f32[4,512,512]{2,1,0:T(8,128)} parameter(0)
  %v = f32[512,512]{1,0:T(8,128)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %v2 = f32[1,512,512]{2,1,0:T(8,128)} bitcast(%v)
  ROOT %dus = f32[4,512,512]{2,1,0:T(8,128)} dynamic-update-slice(%p, %v2, %i, %zero, %zero)
}

%more (s: (s32[], f32[4,512,512], f32[512,512], bf16[2,300])) -> pred[] {
  %s = (s32[]{:T(128)}, f32[4,512,512]{2,1,0:T(8,128)}, f32[512,512]{1,0:T(8,128)}, bf16[2,300]{1,0:T(2,128)(2,1)}) parameter(0)
  %bound = s32[]{:T(128)} constant(7)
  %n = s32[]{:T(128)} get-tuple-element(%s), index=0
  ROOT %lt = pred[]{:T(512)} compare(%n, %bound), direction=LT
}

%tick (s.1: (s32[], f32[4,512,512], f32[512,512], bf16[2,300])) -> (s32[], f32[4,512,512], f32[512,512], bf16[2,300]) {
  %s.1 = (s32[]{:T(128)}, f32[4,512,512]{2,1,0:T(8,128)}, f32[512,512]{1,0:T(8,128)}, bf16[2,300]{1,0:T(2,128)(2,1)}) parameter(0)
  %n.1 = s32[]{:T(128)} get-tuple-element(%s.1), index=0
  %pool = f32[4,512,512]{2,1,0:T(8,128)} get-tuple-element(%s.1), index=1
  %x = f32[512,512]{1,0:T(8,128)} get-tuple-element(%s.1), index=2
  %small = bf16[2,300]{1,0:T(2,128)(2,1)} get-tuple-element(%s.1), index=3
  %ahead = (f32[512,512]{1,0:T(8,128)S(1)}, f32[512,512]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %send = (f32[512,512]{1,0:T(8,128)}, f32[512,512]{1,0:T(8,128)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1}}
  %read = f32[1,512,512]{2,1,0:T(8,128)} dynamic-slice(%pool, %n.1, %n.1, %n.1), dynamic_slice_sizes={1,512,512}, CYCLES20
  %near = f32[512,512]{1,0:T(8,128)S(1)} copy-done(%ahead)
  %y = f32[512,512]{1,0:T(8,128)} fusion(%near, %read), kind=kOutput, calls=%matmul, CYCLES100
  %sent = f32[512,512]{1,0:T(8,128)} collective-permute-done(%send)
  %turned = f32[512,512]{0,1:T(8,128)} copy(%sent), CYCLES30
  %z = f32[512,512]{1,0:T(8,128)} add(%y, %turned), CYCLES5
  %pool.1 = f32[4,512,512]{2,1,0:T(8,128)} fusion(%pool, %z, %n.1), kind=kLoop, calls=%store, CYCLES40
  ROOT %next = (s32[]{:T(128)}, f32[4,512,512]{2,1,0:T(8,128)}, f32[512,512]{1,0:T(8,128)}, bf16[2,300]{1,0:T(2,128)(2,1)}) tuple(%n.1, %pool.1, %z, %small)
}

ENTRY %main (e: (s32[], f32[4,512,512], f32[512,512], bf16[2,300])) -> (s32[], f32[4,512,512], f32[512,512], bf16[2,300]) {
  %e = (s32[]{:T(128)}, f32[4,512,512]{2,1,0:T(8,128)}, f32[512,512]{1,0:T(8,128)}, bf16[2,300]{1,0:T(2,128)(2,1)}) parameter(0)
  ROOT %run = (s32[]{:T(128)}, f32[4,512,512]{2,1,0:T(8,128)}, f32[512,512]{1,0:T(8,128)}, bf16[2,300]{1,0:T(2,128)(2,1)}) while(%e), condition=%more, body=%tick
}
"""


def program(text: str = TEXT) -> TpuProgram:
    text = re.sub(r"CYCLES(\d+)\n", lambda found: CYCLES.replace("N", found[1]) + "\n", text)
    compiled = SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: None)
    return TpuProgram(compiled, next(chip for chip in CHIPS if chip.name == "v5p"))


def test_cycles_are_counted_by_purpose_and_by_trips() -> None:
    assert program().cycles == {
        Purpose.MATMUL: 7 * 100,
        Purpose.KERNEL: 0,
        Purpose.WRITE: 7 * 40,
        Purpose.READ: 7 * 20,
        Purpose.MOVE: 7 * 30,
        Purpose.OTHER: 7 * 5,
    }


def test_a_loop_without_a_bound_is_a_predicate() -> None:
    text = TEXT.replace("compare(%n, %bound), direction=LT", "compare(%n, %bound), direction=NE")
    found = program(text)
    assert found.module.trip_count(found.module.computations["main"].root) is None
    assert sum(found.cycles.values()) == 0


def test_prefetches_are_no_copies_and_updates_are_in_place() -> None:
    moves = [each for each in large_moves_on_tpus(program().module) if each.move is not Move.SLICE]
    assert [(each.move, each.instruction.name) for each in moves] == [(Move.COPY, "turned")]
    # XLA says how it splits an array in a memory beside a core.
    near, halves = "{1,0:T(8,128)S(1)}", "{1,0:T(8,128)S(1)SC(0:256)}"
    assert [
        each.instruction.name
        for each in large_moves_on_tpus(program(TEXT.replace(near, halves)).module)
        if each.move is not Move.SLICE
    ] == ["turned"]
    # The fusion's update is of what it is given; of a copy of it, it would not be.
    copied = TEXT.replace(
        "  ROOT %dus = f32[4,512,512]{2,1,0:T(8,128)} dynamic-update-slice(%p,",
        "  %p2 = f32[4,512,512]{2,1,0:T(8,128)} copy(%p)\n"
        "  ROOT %dus = f32[4,512,512]{2,1,0:T(8,128)} dynamic-update-slice(%p2,",
    )
    moves = large_moves_on_tpus(program(copied).module)
    (rewritten,) = (each for each in moves if each.move is Move.REWRITE)
    assert rewritten.is_carried


@pytest.mark.parametrize(("maker", "wanted"), [("dot(%a, %a)", []), ("negate(%a)", ["f.1"])])
def test_a_product_that_writes_its_result_transposed_moves_nothing(
    maker: str, wanted: list[str]
) -> None:
    text = f"""HloModule step, is_scheduled=true

%fused (a: f32[1024,1024]) -> f32[1024,1024] {{
  %a = f32[1024,1024]{{1,0}} parameter(0)
  %made = f32[1024,1024]{{1,0}} {maker}
  ROOT %turned = f32[1024,1024]{{1,0}} transpose(%made), dimensions={{1,0}}
}}

ENTRY %main (e: f32[1024,1024]) -> f32[1024,1024] {{
  %e = f32[1024,1024]{{1,0}} parameter(0)
  ROOT %f.1 = f32[1024,1024]{{1,0}} fusion(%e), kind=kCustom, calls=%fused
}}
"""
    assert [each.instruction.name for each in large_moves(parse(text))] == wanted


def test_permutes_beside_matmuls_are_found() -> None:
    (permute,) = program().collectives
    assert permute.overlapped
    assert permute.place.trips == 7


@pytest.mark.parametrize(("cycles", "hidden"), [(18000, False), (19000, True)])
def test_permutes_beside_other_work_are_hidden_where_it_takes_long(
    cycles: int, hidden: bool
) -> None:
    """A transfer of 1 MiB takes 1 MiB / 90 GB/s: 20389 cycles of 1.75 GHz."""
    done = "  %sent = f32[512,512]{1,0:T(8,128)} collective-permute-done(%send)\n"
    matmul = next(line for line in TEXT.splitlines(keepends=True) if " %y = " in line)
    early = TEXT.replace(done, "").replace(matmul, done + matmul)
    found = program(early.replace("CYCLES20\n", f"CYCLES{cycles}\n"))
    (permute,) = found.collectives
    assert found.hidden(permute) == pytest.approx(cycles / 20389, rel=1e-4)
    assert permute.overlapped == hidden


@pytest.mark.parametrize(
    ("dims", "layout", "wanted"),
    [
        ((4, 2, 1, 1000), "3,2,1,0:T(8,128)", 4 * 2 * 8 * 1024),
        ((4, 2, 1, 1000), "2,3,1,0:T(8,128)", 4 * 2 * 128 * 1000),
        ((300,), "0:T(512)(128)(2,1)", 512),
        ((), ":T(128)", 1),
        ((3, 5), "1,0", 15),
    ],
)
def test_tiles_pad_the_dims_that_come_first_in_the_order(
    dims: tuple[int, ...], layout: str, wanted: int
) -> None:
    assert Array("bf16", dims, layout).padded_nbytes == 2 * wanted


def test_padding_of_what_a_loop_carries() -> None:
    # 300 numbers fill three tiles of 128.
    assert program().padding == 2 * 2 * (384 - 300)


def test_gaps_of_the_heap_are_counted_once() -> None:
    """The W of Llama 3 8B's shapes, in MiB: its heap is 608.4 in the text of its buffers."""
    memory = SimpleNamespace(
        argument_size_in_bytes=5504.3,
        output_size_in_bytes=3328.1,
        alias_size_in_bytes=3328.1,
        temp_size_in_bytes=688.9,
        peak_memory_in_bytes=6032.3,
    )
    assert heap_bytes(memory) == 608


def test_layouts_are_read() -> None:
    module = parse(TEXT)
    ahead = module.computations["tick"].by_name["ahead"]
    assert [space(array) for array in ahead.results] == ["1", "", "2"]
    assert order(ahead.results[0]) == order(ahead.results[1])
