"""Blocks with cuDNN's attention are nodes of CUDA graphs too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from jaxpipe.inspect.programs import compile_and_read, count_waits
from tests.gpu.programs import gpu_mesh, needs_gpu_compiler

HEADS, HEAD, TIME, ROWS, MICROBATCHES = 2, 64, 128, 2, 4
WIDTH = HEADS * HEAD


def stage(params: Any, x: Any) -> Any:
    query, key, value = (
        (x @ params[name]).reshape(*x.shape[:2], HEADS, HEAD) for name in ("q", "k", "v")
    )
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    return x + mixed.reshape(x.shape) @ params["o"]


def last(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


@needs_gpu_compiler
@pytest.mark.slow
def test_the_host_waits_for_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    # Both ask the machine's GPU.  The described one is an H100.
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=MICROBATCHES)
    mesh = gpu_mesh((2,), ("pipe",))
    pipe = jp.Pipeline(jp.Model(stage, last=last), schedule, mesh)
    square = jax.ShapeDtypeStruct((2, WIDTH, WIDTH), jnp.bfloat16)
    params = pipe.place({"stages": dict.fromkeys("qkvo", square), "last": {}})
    everywhere = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((MICROBATCHES * ROWS, TIME, WIDTH), jnp.bfloat16, sharding=everywhere)
    found = compile_and_read(pipe.lower(params, {"x": x}))
    kernels = {
        each.target
        for computation in found.module.computations.values()
        for each in computation.instructions
        if each.opcode == "custom-call"
    }
    assert any("fmhaSoftmaxBackward" in name for name in kernels), kernels
    assert found.predicates
    assert count_waits(found.predicates, taken=True) == 0
