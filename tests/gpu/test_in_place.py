"""In the GPU program no slot, accumulator or parameter is copied in the loop: what a CPU run cannot
show.
"""

from __future__ import annotations

import math
import re
from functools import partial

import jax
import pytest

import jaxpipe as jp
from jaxpipe.spmd import block
from tests.gpu.programs import (
    HIDDEN,
    LAYERS,
    ROWS,
    TIME,
    WIDTH,
    compile_layered_step,
    compile_step,
    compile_two_kinds,
    gpu_marks,
    large_copies,
    operations,
)
from tests.tiers import by_actions, exhaustive, slow

pytestmark = gpu_marks()


def build(name: str) -> jp.Schedule:
    return jp.schedules.build(name, devices=4, microbatches=8)


def buffers(schedule: jp.Schedule) -> list[tuple[int, ...]]:
    """Shapes of residual pools (any number of slots), accumulators and parameters of a stage."""
    slots = range(2, 2 * schedule.num_microbatches * schedule.num_chunks)
    per_slot = [(LAYERS, ROWS, TIME, HIDDEN), (LAYERS, ROWS, TIME, WIDTH)]
    pools = [(n, *shape) for n in slots for shape in per_slot]
    return [*pools, *per_slot, (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)]


def shapes_of(text: str) -> list[tuple[int, ...]]:
    """Every shape in a piece of HLO text."""
    return [
        tuple(int(n) for n in dims.split(",") if n) for dims in re.findall(r"\w+\[([\d,]*)\]", text)
    ]


QUICK = ("1f1b", "interleaved_1f1b_overlap", "zb_h1")
# The blocks and pools of these are among those of QUICK.
CONTAINED = ("gpipe", "1f1b_overlap", "interleaved_1f1b", "interleaved_zb")


@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else exhaustive(n) if n in CONTAINED else by_actions(n)
        for n in jp.schedules.names()
        if n != "no_pipelining"
    ],
)
def test_no_buffer_is_copied(name: str) -> None:
    schedule = build(name)
    text = compile_step(schedule).as_text()
    assert not large_copies(text, buffers(schedule))
    # A conditional holds an exchange: it returns what arrives, and never a pool, which XLA would
    # copy.
    results = [
        shape
        for op in operations(text)
        if op.opcode == "conditional"
        for shape in shapes_of(op.line.split(" conditional(")[0])
    ]
    assert not set(results) & set(buffers(schedule))
    assert "collective-permute-start(" in text


@pytest.mark.parametrize("name", ["1f1b", slow("zb_h1")])
def test_no_buffer_is_copied_where_stages_have_different_layers(name: str) -> None:
    """Pools and accumulators that kinds of stages share: those with a third layer hold its arrays
    apart.
    """
    schedule = build(name)
    text = compile_layered_step(schedule, "Ettt|tt|ttt|ttL").as_text()
    assert not large_copies(text, buffers(schedule))
    # A conditional holds an exchange: it returns what arrives, and never a pool, which XLA would
    # copy.
    results = [
        shape
        for op in operations(text)
        if op.opcode == "conditional"
        for shape in shapes_of(op.line.split(" conditional(")[0])
    ]
    assert not set(results) & set(buffers(schedule))


@pytest.mark.parametrize(("name", "tensor"), [("1f1b", 1), slow("zb_h1", 1), slow("1f1b", 2)])
def test_a_buffer_of_two_kinds_of_layer_is_read_and_added_to_in_place(
    name: str, tensor: int
) -> None:
    """Two narrow layers, or two wide ones: neither the buffer nor a stack in it is copied, and its
    accumulator is added to in place.

    With a tensor axis the same holds of a device's part, and no parameter is gathered.
    """
    compiled, size = compile_two_kinds(build(name), "Ennn|nnn|ww|wwL", tensor=tensor)
    text = compiled.as_text()
    stacks = [(2, WIDTH, HIDDEN // tensor), (3, WIDTH, WIDTH // tensor)]
    copies = ("copy", "copy-start", "slice", "dynamic-slice")
    moved = [op for op in operations(text) if op.opcode in copies and "/while/" in op.line]
    assert [
        op.line[:200] for op in moved if math.prod(op.shape) in {size, *map(math.prod, stacks)}
    ] == []
    rewritten = [
        op
        for op in operations(text)
        if op.opcode == "dynamic-update-slice" and math.prod(op.shape) == size
    ]
    assert rewritten
    exchanged = [
        op for op in operations(text) if op.opcode.startswith(("all-gather", "all-to-all"))
    ]
    assert [
        op.line[:200] for op in exchanged if math.prod(op.shape) in {WIDTH * WIDTH, WIDTH * HIDDEN}
    ] == []


@pytest.mark.parametrize("name", ["1f1b", slow("zbv"), exhaustive("interleaved_1f1b")])
def test_pools_of_inputs_are_written_in_place(name: str) -> None:
    """What arrives goes into a slot, also where that depends on what the slot had: nothing else
    makes an array of the pool's shape.
    """
    text = compile_step(build(name), remat="full").as_text()
    # A pool keeps an input by row of the microbatch: see `jaxprs.entry`.
    made = [
        op
        for op in operations(text)
        if op.shape[0:1] > (1,) and op.shape[1:] in ((ROWS, TIME, WIDTH), (ROWS, TIME * WIDTH))
    ]
    outside = [
        op
        for op in made
        if "fused" not in op.computation
        and op.opcode not in ("get-tuple-element", "parameter", "bitcast")
    ]
    assert any("dynamic_update_slice" in op.name for op in outside)
    # A scan's stack inside a block may have the pool's shape: it is taken from memory as it is, and
    # filled row by row.
    others = [op for op in outside if "AllocateBuffer" not in op.line]
    assert [
        op.name
        for op in others
        if "dynamic_update_slice" not in op.name and "broadcast" not in op.name
    ] == []


def test_a_block_whose_pools_are_read_after_it_would_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above has teeth: where the old value of what a block writes is read once more, it
    finds copies of pools and accumulators.  (Until JAX 0.11 `lax.cond` copied them too.)
    """
    original = block.while_once

    def reading(predicate, body, carry):
        done, after = original(predicate, body, carry)
        return done, jax.tree.map(partial(jax.numpy.where, predicate), after, carry)

    monkeypatch.setattr(block, "while_once", reading)
    schedule = build("1f1b")
    assert large_copies(compile_step(schedule).as_text(), buffers(schedule))


def test_unordered_blocks_would_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flag that orders blocks XLA may run a writer of a pool before its reader, on a
    copy.
    """
    original = block.while_once
    monkeypatch.setattr(
        block, "while_once", lambda *a: (jax.numpy.zeros((), bool), original(*a)[1])
    )
    schedule = build("1f1b")
    copied = large_copies(compile_step(schedule).as_text(), buffers(schedule))
    if not copied:
        pytest.skip("this XLA orders the blocks of 1f1b by itself")
