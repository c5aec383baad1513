"""No loop in a CUDA graph has a condition that is only a flag of its carry.

Such a node reads the flag before the body has written it: the body runs again, on an H100 with jax
0.11.2 up to 500 times.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxpipe as jp
from jaxpipe.inspect.hlo import Instruction, Module, parse, walk
from jaxpipe.inspect.programs import GpuProgram, compile_and_read
from jaxpipe.spmd import block
from tests.flat import flat_pipeline
from tests.gpu import programs
from tests.gpu.programs import gpu_marks, gpu_mesh, needs_gpu_compiler

# They hand on what they are given.
MOVES = {"parameter", "get-tuple-element", "tuple", "bitcast", "copy", "convert", "constant"}


def bare_conditions(program: GpuProgram) -> tuple[int, list[str]]:
    """How many WHILE commands there are, and those whose condition computes nothing."""
    found = [each for each in program.predicates if each.is_loop and each.in_graph]
    bare = []
    for each in found:
        (name,) = each.instruction.called["condition"]
        condition = program.module.computations[name]
        used = {i.opcode for i in condition.instructions}
        if used <= MOVES:
            bare.append(each.instruction.name)
    return len(found), bare


def step(stage: Any, **options: Any) -> Any:
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=4)
    mesh = gpu_mesh((2,), ("pipe",))
    pipe = flat_pipeline(
        stage, schedule=schedule, mesh=mesh, first=programs.first, last=programs.last, **options
    )
    return pipe, pipe.place(programs.shapes(2)), programs.tokens(pipe)


def old_form(predicate: Any, body: Any, carry: Any) -> Any:
    """The loop under a predicate as it was."""
    return lax.while_loop(
        lambda state: state[0],
        lambda state: (jnp.zeros_like(state[0]), body(state[1])),
        (predicate, carry),
    )


@needs_gpu_compiler
def test_conditions_of_predicates_compute() -> None:
    pipe, *arguments = step(programs.stage)
    count, bare = bare_conditions(compile_and_read(pipe.lower(*arguments)))
    assert count > 0
    assert bare == []


@needs_gpu_compiler
def test_the_reader_finds_bare_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "while_once", old_form)
    pipe, *arguments = step(programs.stage)
    lowered = jax.jit(pipe.value_and_grad, compiler_options=pipe.compiler_options).lower(*arguments)
    count, bare = bare_conditions(compile_and_read(lowered))
    assert count == len(bare) > 0


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=gpu_marks())])
def test_no_block_leaves_its_predicate(where: str) -> None:
    """XLA moves what is invariant out of a loop, unless it knows that there is one trip at most or
    leaves such loops alone: the matmuls of a block would run in bubbles too.
    """
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=8)
    cpus = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("pipe",))
    mesh = cpus if where == "cpu" else gpu_mesh((2,), ("pipe",))
    ends = {"first": programs.first, "last": programs.last}
    pipe = flat_pipeline(programs.stage, schedule=schedule, mesh=mesh, **ends)
    shapes = programs.shapes(2)
    text = pipe.lower(pipe.place(shapes), programs.tokens(pipe)).compile().as_text()
    module = parse(text)
    found = [
        place.guarded
        for place in walk(module)
        for each in place.computation.instructions
        if place.in_loop and is_matmul(module, each)
    ]
    assert found
    assert all(found)


def is_matmul(module: Module, instruction: Instruction) -> bool:
    return "dot" in module.opcodes(instruction) or "gemm" in instruction.target


def halved(x: Any) -> Any:
    """Three trips of a loop that ends by a flag of its carry."""

    def body(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        _, number, x = state
        return number < 2, number + 1, x * 0.5

    return lax.while_loop(lambda state: state[0], body, (jnp.sum(x) < 1e30, 0, x))[2]


def looping(params: Any, x: Any) -> Any:
    return programs.stage(params, x) + lax.stop_gradient(halved(lax.stop_gradient(x)))


@needs_gpu_compiler
def test_loops_of_a_stage_and_of_a_training_step_compute_their_conditions() -> None:
    pipe, *arguments = step(looping)

    def train_step(params: Any, batch: Any) -> Any:
        loss, grads = pipe.value_and_grad(params, batch)
        return loss, jax.tree.map(halved, grads["first"])

    count, bare = bare_conditions(compile_and_read(pipe.jit(train_step).lower(*arguments)))
    assert count > 0
    assert bare == []
    # A `jax.jit` of one's own repairs the loops of the model alone.
    own = jax.jit(train_step, compiler_options=pipe.compiler_options).lower(*arguments)
    _, bare = bare_conditions(compile_and_read(own))
    assert len(bare) == 1
