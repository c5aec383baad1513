"""A whole training step in one `jit` with donated parameters and optimizer state: the GPU program
writes them in place.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from tests.gpu.programs import (
    HIDDEN,
    LAYERS,
    ROWS,
    TIME,
    VOCAB,
    WIDTH,
    first,
    gpu_marks,
    gpu_mesh,
    large_copies,
    last,
    shapes,
    stage,
)

pytestmark = gpu_marks()
DEVICES = 4


@cache
def compiled(name: str, *, donate: bool) -> Any:
    """The step of AdamW with a global clip, and the bytes of parameters and state on one device."""
    schedule = jp.schedules.build(name, devices=DEVICES, microbatches=8)
    mesh = gpu_mesh((DEVICES,), ("pipe",))
    pipe = jp.Pipeline(jp.Model(stage, first=first, last=last), schedule, mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def train(state: Any, batch: Any) -> Any:
        loss, grads = pipe.value_and_grad(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, loss

    everywhere = NamedSharding(mesh, PartitionSpec())
    params = pipe.place(shapes(schedule.num_stages))
    placed = {jax.tree.structure(params): jax.tree.map(lambda leaf: leaf.sharding, params)}

    def spread(node: Any) -> Any:
        """Moments as the parameters, all else everywhere."""
        own = placed.get(jax.tree.structure(node), everywhere)
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), node, own
        )

    opt_state = jax.eval_shape(optimizer.init, params)
    opt_state = jax.tree.map(
        spread, opt_state, is_leaf=lambda node: jax.tree.structure(node) in placed
    )
    state = {"params": params, "opt_state": opt_state}
    batch = {"tokens": jax.ShapeDtypeStruct((8 * ROWS, TIME), jnp.int32, sharding=everywhere)}
    step = jax.jit(train, donate_argnums=(0,) if donate else ()).lower(state, batch).compile()
    held = sum(
        leaf.dtype.itemsize * int(jnp.prod(jnp.array(leaf.sharding.shard_shape(leaf.shape))))
        for leaf in jax.tree.leaves(state)
    )
    return step, held


def buffers() -> list[tuple[int, ...]]:
    """Shapes of parameters, and so of moments and gradients, on one device."""
    stages = [(LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)]
    return [*stages, *((1, *shape) for shape in stages), (VOCAB, WIDTH), (WIDTH, VOCAB)]


NAMES = [
    "1f1b",
    *(
        pytest.param(n, marks=pytest.mark.exhaustive)
        for n in ("zb_h1", "zbv", "dualpipe", "interleaved_1f1b")
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_donated_state_is_written_in_place(name: str) -> None:
    step, held = compiled(name, donate=True)
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes == held
    assert not large_copies(step.as_text(), buffers())


@pytest.mark.exhaustive
def test_without_donation_nothing_is_aliased() -> None:
    """The check above has teeth: the same step that keeps its arguments aliases nothing, and needs
    more memory.
    """
    (kept, _), (given, _) = compiled("1f1b", donate=False), compiled("1f1b", donate=True)
    assert kept.memory_analysis().alias_size_in_bytes == 0
    total = [
        m.argument_size_in_bytes
        + m.output_size_in_bytes
        + m.temp_size_in_bytes
        - m.alias_size_in_bytes
        for m in (kept.memory_analysis(), given.memory_analysis())
    ]
    assert total[0] > total[1]
