"""GPU programs compiled on a machine without a GPU, and what their text says about copies, loops
and transfers.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.llama import layered
from tests.flat import flat_pipeline

TARGET = Path(__file__).with_name("h100.txtpb")
# Sizes that occur nowhere else, so that a shape in the text says which buffer it is.
WIDTH, HIDDEN, LAYERS, ROWS, TIME, VOCAB = 96, 352, 2, 2, 40, 544


@cache
def gpu_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """A mesh of H100s that are only described."""
    count = math.prod(shape)
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=f"h100x{count}",
        target_config=TARGET.read_text(),
        topology=f"1x1x{count}",
    )
    return topologies.make_mesh(topology, shape, names)


@cache
def gpu_fault() -> str | None:
    """Why GPU programs cannot be compiled here, or None."""
    try:
        gpu_mesh((2,), ("pipe",))
    except Exception as error:  # whatever the missing plugin raises
        return (
            f"GPU programs cannot be compiled here ({type(error).__name__}: {str(error)[:200]}); "
            "install jax-cuda13-plugin and jax-cuda13-pjrt of jaxlib's version"
        )
    return None


def gpu_marks() -> list[pytest.MarkDecorator]:
    """Of tests that compile GPU programs: they are skipped where that is not possible."""
    skipped = pytest.mark.skipif(gpu_fault() is not None, reason=str(gpu_fault()))
    return [pytest.mark.gpu_compile, skipped]


def needs_gpu_compiler(test: Any) -> Any:
    """Marks one such test."""
    for mark in gpu_marks():
        test = mark(test)
    return test


def require_gpu_compiler(parser: ArgumentParser) -> None:
    """End a command where GPU programs cannot be compiled."""
    if (fault := gpu_fault()) is not None:
        parser.error(fault)


def lower_for_gpu(function: Any, *shapes: Any) -> Any:
    """A function of (trees of) whole arrays lowered for described H100s; `.compile()` gives the GPU
    program.
    """
    everywhere = NamedSharding(gpu_mesh((2,), ("device",)), PartitionSpec())
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), shapes
    )
    return jax.jit(function).lower(*placed)


def stage(params: dict[str, Any], x: Any) -> Any:
    def layer(x: Any, p: dict[str, Any]) -> tuple[Any, None]:
        hidden = jax.nn.gelu(x @ p["w1"].astype(x.dtype) + p["b"].astype(x.dtype))
        return x + hidden @ p["w2"].astype(x.dtype), None

    return jax.lax.scan(layer, x, params)[0]


def first(params: dict[str, Any], microbatch: dict[str, Any]) -> Any:
    return params["table"][microbatch["tokens"]].astype(jnp.bfloat16)


def last(params: dict[str, Any], x: Any, microbatch: dict[str, Any]) -> Any:
    logits = (x @ params["head"].astype(x.dtype)).astype(jnp.float32)
    return -jnp.mean(
        jnp.take_along_axis(jax.nn.log_softmax(logits), microbatch["tokens"][..., None], axis=-1)
    )


def shapes(
    num_stages: int,
    *,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
    vocab: int = VOCAB,
) -> dict[str, Any]:
    f32 = jnp.float32
    stages = {
        "w1": jax.ShapeDtypeStruct((num_stages, layers, width, hidden), f32),
        "b": jax.ShapeDtypeStruct((num_stages, layers, hidden), f32),
        "w2": jax.ShapeDtypeStruct((num_stages, layers, hidden, width), f32),
    }
    return {
        "first": {"table": jax.ShapeDtypeStruct((vocab, width), f32)},
        "stages": stages,
        "last": {"head": jax.ShapeDtypeStruct((width, vocab), f32)},
    }


def tokens(pipe: jp.Pipeline) -> dict[str, Any]:
    """The batch of a step, as shapes."""
    rows = (pipe.schedule.num_microbatches * ROWS, TIME)
    everywhere = NamedSharding(pipe.mesh, PartitionSpec())
    return {"tokens": jax.ShapeDtypeStruct(rows, jnp.int32, sharding=everywhere)}


def compile_step(schedule: jp.Schedule, **options: Any) -> Any:
    """The compiled GPU step of a small model on as many H100s as the schedule has devices."""
    mesh = gpu_mesh((schedule.num_devices,), ("pipe",))
    pipe = flat_pipeline(stage, schedule=schedule, mesh=mesh, first=first, last=last, **options)
    params = pipe.place(shapes(schedule.num_stages))
    return pipe.lower(params, tokens(pipe)).compile()


def compile_layered_step(schedule: jp.Schedule, layout: str) -> Any:
    """The compiled GPU step of a model of the same layers, as many on each stage as the layout
    says.
    """
    mesh = gpu_mesh((schedule.num_devices,), ("pipe",))

    def layer(params: dict[str, Any], x: Any) -> Any:
        return stage(jax.tree.map(lambda leaf: leaf[None], params), x)

    pipe = jp.Pipeline(
        jp.Model({"E": first, "t": layer, "L": last}, layers=layout),
        schedule,
        mesh,
        layout=layout,
    )
    count = jp.parse_layout(layout, devices=schedule.num_devices).layers.count("t")
    canonical = jax.eval_shape(layered, shapes(1, layers=count))
    return pipe.lower(pipe.place(canonical), tokens(pipe)).compile()


def compile_two_kinds(schedule: jp.Schedule, layout: str, *, tensor: int = 1) -> tuple[Any, int]:
    """The compiled GPU step of narrow and wide layers, which share a buffer, and the numbers of it
    that a device has.
    """
    mesh = gpu_mesh((schedule.num_devices, tensor), ("pipe", "tensor"))
    columns, rows = PartitionSpec(None, "tensor"), PartitionSpec("tensor")
    specs = {"stages": {"n": {"w": columns}, "w": {"w1": columns, "b": rows, "w2": rows}}}

    def narrow(params: dict[str, Any], x: Any) -> Any:
        return x + jnp.tanh(x @ params["w"].astype(x.dtype))

    def wide(params: dict[str, Any], x: Any) -> Any:
        return stage(jax.tree.map(lambda leaf: leaf[None], params), x)

    layers = {"E": first, "n": narrow, "w": wide, "L": last}
    pipe = jp.Pipeline(
        jp.Model(layers, layers=layout),
        schedule,
        mesh,
        layout=layout,
        sharding=jp.Sharding(specs=specs if tensor > 1 else None),
    )
    canonical = jax.eval_shape(layered, shapes(1, layers=layout.count("w")))
    canonical["stages"] = {
        "w": canonical["stages"]["t"],
        "n": {"w": jax.ShapeDtypeStruct((layout.count("n"), WIDTH, WIDTH), jnp.float32)},
    }
    params = pipe.place(canonical)
    (buffer,) = jax.tree.leaves(params["stages"])
    return pipe.lower(params, tokens(pipe)).compile(), math.prod(
        buffer.sharding.shard_shape(buffer.shape)
    )


class Op(NamedTuple):
    """One instruction of a compiled program."""

    computation: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    opcode: str
    line: str


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OP = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = \(?(\w+)\[([\d,]*)\][^=]*? ([\w\-]+)\(")


def operations(text: str) -> list[Op]:
    """The instructions of an HLO text whose (first) result is an array."""
    found, computation = [], ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            match = _COMPUTATION.match(line)
            computation = (
                ("ENTRY " if line.startswith("ENTRY") else "") + match[1] if match else computation
            )
            continue
        match = _OP.match(line)
        if match:
            shape = tuple(int(n) for n in match[3].split(",") if n)
            found.append(Op(computation, match[1], match[2], shape, match[4], line.strip()))
    return found


def large_copies(text: str, buffers: Sequence[tuple[int, ...]]) -> list[Op]:
    """Copies, outside the entry's set-up, of values that have as many elements as one of these
    shapes.
    """
    wanted = set(map(math.prod, buffers))
    copies = [op for op in operations(text) if op.opcode in ("copy", "copy-start")]
    return [
        op
        for op in copies
        if math.prod(op.shape) in wanted
        and "broadcast" not in op.line.split(" copy", 1)[1].split(")")[0]
    ]
