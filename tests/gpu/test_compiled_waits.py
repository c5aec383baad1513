"""The reader of host waits counts those of small programs with known answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.gpu_programs import details
from jaxpipe.inspect.hlo import parse
from jaxpipe.inspect.programs import (
    GpuProgram,
    compile_and_read,
    count_waits,
    graph_nodes,
    most_waits,
)
from tests.gpu.programs import lower_for_gpu, needs_gpu_compiler

GRAPHS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": 1,
}
TICKS, LAYERS = 5, 3
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((LAYERS, 16, 16), jnp.float32)
FLAGS = jax.ShapeDtypeStruct((TICKS, 2), jnp.int32)


def layers(x: Any, w: Any) -> Any:
    """A loop of known trip count that reads its rows by an index array."""

    def take(x: Any, i: Any) -> Any:
        return jnp.tanh(x @ lax.dynamic_index_in_dim(w, i, 0, keepdims=False)), None

    return lax.scan(take, x, jnp.arange(LAYERS))[0]


def when(flag: Any, body: Any, x: Any) -> Any:
    return lax.while_loop(
        lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), body(c[1])), (flag > 0, x)
    )[1]


def ticks(tick: Any) -> Any:
    return lambda x, w, flags: lax.scan(lambda x, flag: (tick(x, w, flag), None), x, flags)[0]


def one(x: Any, w: Any, flag: Any) -> Any:
    return when(flag[0], lambda x: layers(x, w), x)


def one_in_another(x: Any, w: Any, flag: Any) -> Any:
    return when(flag[0], lambda x: when(flag[1], lambda x: x * 2, layers(x, w)), x)


def conditional(x: Any, w: Any, flag: Any) -> Any:
    return lax.cond(flag[0] > 0, lambda x: layers(x, w), lambda x: x, x)


def read(tick: Any, options: dict[str, Any] | None = None) -> GpuProgram:
    return compile_and_read(lower_for_gpu(ticks(tick), X, W, FLAGS), options)


@needs_gpu_compiler
def test_a_predicate_waits_once_untaken_and_twice_taken() -> None:
    predicates = read(one).predicates
    assert [each.place.trips for each in predicates] == [TICKS]
    assert count_waits(predicates, taken=False) == TICKS
    assert count_waits(predicates, taken=True) == 2 * TICKS
    assert most_waits(predicates, actions=2) == TICKS + 2


@needs_gpu_compiler
def test_a_nested_predicate_is_asked_where_the_outer_one_is_taken() -> None:
    predicates = read(one_in_another).predicates
    assert [(each.place.trips, each.place.guarded) for each in predicates] == [
        (TICKS, False),
        (TICKS, True),
    ]
    assert count_waits(predicates, taken=False) == TICKS
    assert count_waits(predicates, taken=True) == 4 * TICKS
    assert most_waits(predicates, actions=2) == TICKS + 2 * 3


@needs_gpu_compiler
def test_loops_of_known_trip_count_do_not_wait() -> None:
    assert read(lambda x, w, flag: layers(x, w)).predicates == ()


@needs_gpu_compiler
def test_a_conditional_is_a_graph_node_unless_graphs_are_off() -> None:
    (off,) = read(conditional, {"xla_gpu_enable_command_buffer": ""}).predicates
    assert not off.in_graph
    assert count_waits([off], taken=False) == count_waits([off], taken=True) == TICKS
    (on,) = read(conditional, GRAPHS).predicates
    assert on.in_graph
    assert count_waits([on], taken=True) == 0


@needs_gpu_compiler
def test_a_loop_in_a_graph_does_not_wait() -> None:
    """Also what is nested in it; and XLA puts none there unasked."""
    predicates = read(one_in_another, GRAPHS).predicates
    assert [each.in_graph for each in predicates] == [True, True]
    assert count_waits(predicates, taken=True) == 0
    assert not any(each.in_graph for each in read(one_in_another).predicates)


def test_graph_nodes_are_read_from_the_tree_of_thunks() -> None:
    sequence = """000: kCommandBuffer [source | next=002 (1)]
    001: kCustomKernel [source | sink] fusion
    002: kWhile         [source | sink]
condition:
        No thunks.      body:
        003: kConditional [source | sink]
004: kWhile        [prev=000 (1) | sink]
condition:
    005: kCustomKernel [source | sink] compare
  body:
    000: kCommandBuffer [source | sink]
        006: kConditional [source | sink]
    007: kWhile [source | sink]"""
    loops, conditionals = {2: "while.a", 4: "while.c", 7: "while.e"}, {3: "cond.b", 6: "cond.d"}
    entry = (
        'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{}"\n'
        '    thunk_id: {}\n  }}\n  thunk_kind: "k{}"\n}}\n'
    )
    metadata = "".join(entry.format(name, number, "While") for number, name in loops.items())
    metadata += "".join(
        entry.format(name, number, "Conditional") for number, name in conditionals.items()
    )
    assert graph_nodes(sequence, metadata) == {"while.a", "cond.b", "cond.d"}


PREDICATES = """HloModule predicates, is_scheduled=true

%yes (p: (pred[], f32[4])) -> pred[] {
  %p = (pred[], f32[4]{0}) parameter(0)
  ROOT %flag = pred[] get-tuple-element(%p), index=0
}

%block (p.1: (pred[], f32[4])) -> (pred[], f32[4]) {
  ROOT %p.1 = (pred[], f32[4]{0}) parameter(0)
}

ENTRY %main (a: (pred[], f32[4])) -> (pred[], f32[4]) {
  %a = (pred[], f32[4]{0}) parameter(0)
  %w1 = (pred[], f32[4]{0}) while(%a), condition=%yes, body=%block
  %w2 = (pred[], f32[4]{0}) while(%w1), condition=%yes, body=%block
  %w3 = (pred[], f32[4]{0}) while(%w2), condition=%yes, body=%block
  %w4 = (pred[], f32[4]{0}) while(%w3), condition=%yes, body=%block
  ROOT %w5 = (pred[], f32[4]{0}) while(%w4), condition=%yes, body=%block
}
"""


def found_in(text: str, *graph_nodes: str) -> GpuProgram:
    return GpuProgram(SimpleNamespace(as_text=lambda: text), frozenset(graph_nodes))


def test_each_action_takes_one_predicate() -> None:
    predicates = found_in(PREDICATES).predicates
    assert count_waits(predicates, taken=False) == 5
    assert most_waits(predicates, actions=9) == 5 + 5
    assert most_waits(predicates, actions=1) == 5 + 1
    assert count_waits(predicates, taken=True) == 10


def test_no_more_predicates_of_a_kind_are_taken_than_a_device_has_actions_of_it() -> None:
    named = PREDICATES
    for number, scope in ((1, "F chunk 0"), (4, "W.0 with B.1")):
        line = next(line for line in PREDICATES.splitlines() if line.startswith(f"  %w{number} = "))
        named = named.replace(
            line, f'{line}, metadata={{op_name="jit(step)/ticks/while/body/{scope}/while"}}'
        )
    predicates = found_in(named).predicates
    assert [each.kind for each in predicates] == ["F", None, None, "W", None]
    assert most_waits(predicates, actions=9, by_kind={"F": 0, "W": 0}) == 5 + 3
    assert most_waits(predicates, actions=9, by_kind={"F": 5, "W": 0}) == 5 + 1 + 3
    assert most_waits(predicates, actions=1, by_kind={"F": 5, "W": 5}) == 5 + 1


def test_what_is_only_lowered_is_refused() -> None:
    with pytest.raises(ValueError, match="not a scheduled HLO module"):
        parse(PREDICATES.replace(", is_scheduled=true", ""))


def test_details_of_predicates_say_what_they_are() -> None:
    found = details(found_in(PREDICATES, "w5"))
    assert list(found)[3:] == ["  loop w4 asked 1", "  loop w5 asked 1 (graph)"]
