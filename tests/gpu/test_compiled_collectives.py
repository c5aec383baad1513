"""The reader of overlap tells collectives with compute beside them from those without."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.inspect.hlo import Collective, Compute, find_collectives, parse, steady
from jaxpipe.inspect.programs import compile_and_read
from tests.gpu.programs import gpu_mesh, needs_gpu_compiler

SIDE, TRIPS = 1024, 4
RING = [(i, (i + 1) % 4) for i in range(4)]


def collectives_of(function: Any, *, sharded: int, whole: int = 0) -> list[Collective]:
    """Of a function of matrices split by row over four devices, then of whole ones, as each device
    sees them.
    """
    mesh = gpu_mesh((4,), ("d",))
    specs = (PartitionSpec("d"),) * sharded + (PartitionSpec(),) * whole
    run = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d"), check_vma=False
    )
    sizes = [(4 * SIDE, SIDE)] * sharded + [(SIDE, SIDE)] * whole
    shapes = [
        jax.ShapeDtypeStruct(n, jnp.float32, sharding=NamedSharding(mesh, s))
        for n, s in zip(sizes, specs, strict=True)
    ]
    return compile_and_read(jax.jit(run).lower(*shapes)).collectives


def send(x: Any) -> Any:
    return lax.ppermute(x, "d", RING)


@needs_gpu_compiler
def test_a_permute_beside_a_matmul_and_one_that_its_matmul_waits_for() -> None:
    def beside(x: Any, w: Any) -> Any:
        return send(x) + jnp.tanh(x @ w) @ w

    def between(x: Any, w: Any) -> Any:
        return send(jnp.tanh(x @ w)) @ w

    (overlapped,) = collectives_of(beside, sharded=1, whole=1)
    assert (overlapped.kind, overlapped.compute) == ("collective-permute", Compute.MATMUL)
    (alone,) = collectives_of(between, sharded=1, whole=1)
    assert (alone.kind, alone.overlapped) == ("collective-permute", False)


@needs_gpu_compiler
def test_a_loop_with_a_matmul_counts() -> None:
    def beside(x: Any, w: Any) -> Any:
        return send(x) + lax.fori_loop(0, TRIPS, lambda i, y: jnp.tanh(y @ w), x)

    (found,) = collectives_of(beside, sharded=1, whole=1)
    assert found.compute is Compute.MATMUL


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True), "all-to-all"),
        (lambda x: lax.psum(x, "d"), "all-reduce"),
        (lambda x: lax.all_gather(x, "d", tiled=True)[:SIDE], "all-gather"),
        (lambda x: jnp.tile(lax.psum_scatter(x, "d", tiled=True), (4, 1)), "reduce-scatter"),
    ],
    ids=["all_to_all", "psum", "all_gather", "psum_scatter"],
)
def test_every_kind_of_collective_is_found(call: Any, kind: str) -> None:
    (found,) = collectives_of(lambda x, w: call(x) + jnp.tanh(x @ w) @ w, sharded=1, whole=1)
    assert (found.kind, found.compute) == (kind, Compute.MATMUL)


@needs_gpu_compiler
def test_the_steady_state_is_the_loop_of_most_trips() -> None:
    def both(x: Any, w: Any) -> Any:
        x = send(jnp.tanh(x @ w)) @ w
        return lax.fori_loop(0, TRIPS, lambda i, y: send(y) + jnp.tanh(y @ w) @ w, x)

    found = collectives_of(both, sharded=1, whole=1)
    assert [(each.overlapped, each.place.trips) for each in found] == [(False, 1), (True, TRIPS)]
    assert steady(found) == [found[1]]


PAIR = """HloModule pair, is_scheduled=true

%wrapped (q: f32[4096,1024]) -> f32[4096,1024] {
  %q = f32[4096,1024]{1,0} parameter(0)
  ROOT %a2a = f32[4096,1024]{1,0} all-to-all(%q), channel_id=1
}

%elementwise (p: f32[4096,1024]) -> f32[4096,1024] {
  %p = f32[4096,1024]{1,0} parameter(0)
  ROOT %e = f32[4096,1024]{1,0} exponential(%p)
}

ENTRY %main (a: f32[4096,1024], b: f32[16,16]) -> f32[4096,1024] {
  %a = f32[4096,1024]{1,0} parameter(0)
  %b = f32[16,16]{1,0} parameter(1)
  %s = ((f32[4096,1024]{1,0}), f32[4096,1024]{1,0}) async-start(%a), calls=%wrapped, backend_config={"is_sync":false}
  %u = ((f32[4096,1024]{1,0}), f32[4096,1024]{1,0}) async-update(%s)
  %f = f32[4096,1024]{1,0} fusion(%a), kind=kLoop, calls=%elementwise
  %d = f32[4096,1024]{1,0} async-done(%u)
  %s2 = (f32[4096,1024]{1,0}, f32[4096,1024]{1,0}) collective-permute-start(%d), backend_config={"is_sync":true}
  %g = f32[4096,1024]{1,0} custom-call(%a, %a), custom_call_target="__cublas$gemm"
  ROOT %d2 = f32[4096,1024]{1,0} collective-permute-done(%s2)
}
"""


def test_starts_and_dones_are_paired_by_name() -> None:
    first, second = find_collectives(parse(PAIR))
    assert (first.kind, first.compute) == ("all-to-all", Compute.ELEMENTWISE)
    assert (second.kind, second.compute) == ("collective-permute", Compute.NOTHING), (
        "a synchronous call hides nothing"
    )
    (unhidden, _) = find_collectives(
        parse(PAIR.replace("4096,1024]{1,0} fusion", "4095,1024]{1,0} fusion"))
    )
    assert unhidden.compute is Compute.NOTHING, "a fusion of little"
    matmul = 'custom-call(%a), custom_call_target="__cublas$gemm"'
    (gemm, _) = find_collectives(
        parse(PAIR.replace("fusion(%a), kind=kLoop, calls=%elementwise", matmul))
    )
    assert gemm.compute is Compute.MATMUL
