"""What a layer keeps does not lie in memory, apart from its slot, while attention's scores are there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.jaxprs import Entry, Slot, run_in_slots, trip
from tests.gpu.programs import lower_for_gpu, needs_gpu_compiler
from tests.lowering import test_early as small

WIDTH, HIDDEN, TIME, LAYERS = 64, 512, 2048, 3


def temp_bytes() -> int:
    """Of a program whose layers keep an MLP's hidden units and then make scores."""
    f32 = jnp.float32
    shapes = {"down": (HIDDEN, WIDTH), "key": (WIDTH, WIDTH), "query": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN)}
    params = {name: jax.ShapeDtypeStruct((LAYERS, *dims), f32) for name, dims in shapes.items()}
    x = jax.ShapeDtypeStruct((TIME, WIDTH), f32)
    jaxpr = jax.make_jaxpr(small.run)(x, params).jaxpr
    entries = [Entry(tuple(v.aval.shape)) for v in jaxpr.outvars[1:]]

    def run(pools: Any, x: Any, params: Any) -> Any:
        writes = {k + 1: Slot(pool, jnp.int32(1), entry) for k, (pool, entry) in enumerate(zip(pools, entries, strict=True))}
        out, *after = run_in_slots(jaxpr, [x, *jax.tree.leaves(params)], writes=writes)
        return out, after

    pools = [jax.ShapeDtypeStruct((2, *entry.kept), f32) for entry in entries]
    memory = lower_for_gpu(run, pools, x, params).compile().memory_analysis()
    return int(memory.temp_size_in_bytes)


@needs_gpu_compiler
def test_early_rows_are_not_held_beside_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    early = temp_bytes()
    monkeypatch.setattr(trip, "find_early", lambda *_, **__: ())
    hidden = TIME * HIDDEN * 4
    # All but the few bytes of a flag that waits.
    assert temp_bytes() - early > 0.99 * hidden
