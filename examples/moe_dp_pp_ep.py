"""A mixture of experts over data x pipe x expert parallelism, tokens sent by an all-to-all of our own, against plain JAX on one device.

The mesh's third axis holds the experts. Everything around them is left to the partitioner, as for tensor parallelism
(`moe_dp_pp_tp.py`); inside a stage one `shard_map` over that axis sends each token to the device of its expert and back.

python examples/moe_dp_pp_ep.py        eight GPUs, or eight virtual devices of the CPU
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxpipe as jp
from gpt.devices import find

PIPE, DATA, EXPERT, MICROBATCHES, STEPS = 2, 2, 2, 4, 40
VOCAB, CONTEXT, WIDTH, HIDDEN, EXPERTS, ROWS = 16, 8, 16, 32, 4, 32
# Tokens that a device may send to one expert in a microbatch; further ones pass by. Here there is room for all.
CAPACITY = ROWS * CONTEXT // (MICROBATCHES * DATA * EXPERT)


def first(params: Any, microbatch: Any) -> jax.Array:
    return params["table"][microbatch["tokens"]]


def mixed(params: Any, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens of a row mixed causally; the router's gates, and its balance loss (Fedus et al. 2021)."""
    h = h + jnp.einsum("qk,nkd->nqd", jnp.tril(params["mix"]), h)
    gate = jax.nn.softmax(h @ params["router"])  # [N, T, E]
    chosen = jax.nn.one_hot(jnp.argmax(gate, axis=-1), EXPERTS)
    balance = EXPERTS * jnp.sum(gate.mean(axis=1) * chosen.mean(axis=1), axis=-1)  # of each row
    return h, gate, 0.01 * balance.mean()


def stage(params: Any, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    h, gate, balance = mixed(params, h)
    # Rows are split over the expert axis, as experts are: an axis that the pipeline leaves to the partitioner may be taken by hand.
    split = PartitionSpec("expert")
    routed = jax.shard_map(sent_to_experts, in_specs=(split, split, split, split), out_specs=split, axis_names={"expert"}, check_vma=False)
    return h + routed(params["up"], params["down"], h, gate), balance


def sent_to_experts(up: jax.Array, down: jax.Array, h: jax.Array, gate: jax.Array) -> jax.Array:
    """On one device of the expert axis: its experts [E / devices, ...], its rows."""
    tokens, weights = h.reshape(-1, WIDTH), gate.reshape(-1, EXPERTS)
    chosen = jax.nn.one_hot(jnp.argmax(weights, axis=-1), EXPERTS)
    place = jnp.sum((jnp.cumsum(chosen, axis=0) - 1) * chosen, axis=-1)  # of a token in the queue of its expert
    seat = chosen[:, :, None] * jax.nn.one_hot(place, CAPACITY)[:, None]  # [tokens, E, capacity]; none where the queue is full
    there = lax.all_to_all(jnp.einsum("nec,nd->ecd", seat, tokens), "expert", split_axis=0, concat_axis=1, tiled=True)
    done = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", there, up)), down)
    back = lax.all_to_all(done, "expert", split_axis=1, concat_axis=0, tiled=True)  # [E, capacity, d]
    return jnp.einsum("nec,ecd,ne->nd", seat, back, weights).reshape(h.shape)


def plain_stage(params: Any, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same without sending: every expert sees every token, and those that it was not chosen for weigh nothing."""
    h, gate, balance = mixed(params, h)
    up = jax.nn.gelu(jnp.einsum("ntd,edf->entf", h, params["up"]))
    weights = gate * jax.nn.one_hot(jnp.argmax(gate, axis=-1), EXPERTS)
    return h + jnp.einsum("entf,efd,nte->ntd", up, params["down"], weights), balance


def last(params: Any, h: jax.Array, microbatch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["head"], microbatch["targets"]).mean()


SPECS = {"stages": {"up": PartitionSpec("expert"), "down": PartitionSpec("expert")}}  # without the stage axis


def initial(key: jax.Array, stages: int) -> dict[str, Any]:
    shapes = {
        "first": {"table": (1, VOCAB, WIDTH)},
        "stages": {
            "mix": (CONTEXT, stages, CONTEXT, CONTEXT),
            "router": (WIDTH, stages, WIDTH, EXPERTS),
            "up": (WIDTH, stages, EXPERTS, WIDTH, HIDDEN),
            "down": (HIDDEN, stages, EXPERTS, HIDDEN, WIDTH),
        },
        "last": {"head": (WIDTH, WIDTH, VOCAB)},
    }
    leaves, form = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(form, [jax.random.normal(k, shape) / fan_in**0.5 for k, (fan_in, *shape) in zip(keys, leaves, strict=True)])


def sequences(key: jax.Array) -> dict[str, jax.Array]:
    """Counting in steps of 1 to 4, modulo VOCAB: the next token follows from the two before it."""
    start, stride = jax.random.split(key)
    begin = jax.random.randint(start, (ROWS, 1), 0, VOCAB)
    tokens = (begin + jax.random.randint(stride, (ROWS, 1), 1, 5) * jnp.arange(CONTEXT + 1)) % VOCAB
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def plain_loss(params: Any, batch: Any) -> jax.Array:
    h, balance = first(params["first"], batch), 0.0
    for s in range(PIPE):
        h, of_stage = plain_stage(jax.tree.map(lambda leaf, s=s: leaf[s], params["stages"]), h)
        balance += of_stage
    return last(params["last"], h, batch) + balance


def main() -> None:
    devices = find(PIPE * DATA * EXPERT)
    jax.config.update("jax_enable_x64", True)  # for the comparison
    schedule = jp.schedules.build("1f1b", devices=PIPE, microbatches=MICROBATCHES)
    mesh = jax.make_mesh((PIPE, DATA, EXPERT), ("pipe", "data", "expert"), devices=devices, axis_types=(AxisType.Auto,) * 3)
    pipe = jp.Pipeline(stage, schedule=schedule, mesh=mesh, first=first, last=last, stage_loss=True, data_axes=("data",), specs=SPECS)
    canonical, batch = initial(jax.random.key(0), schedule.num_stages), sequences(jax.random.key(99))
    params, step = pipe.place(canonical), jax.jit(pipe.value_and_grad)
    print("experts' up kernels:", params["stages"][0]["up"].sharding.spec, "of", params["stages"][0]["up"].shape)

    loss, grads = step(params, batch)
    plain, plain_grads = jax.jit(jax.value_and_grad(plain_loss))(canonical, batch)
    found = pipe.canonical(grads)
    errors = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), {k: found[k] for k in plain_grads}, plain_grads)
    worst = max(jax.tree.leaves(errors))
    print(f"against one device: loss {abs(float(loss - plain)):.1e} apart, gradients {worst:.1e} of their largest entry")
    assert abs(loss - plain) < 1e-12
    assert worst < 1e-12  # float64, summed in another order

    optimizer = optax.adam(1e-2)
    opt_state, update = pipe.init(optimizer, params), jax.jit(optimizer.update)
    losses = []
    for i in range(STEPS):
        loss, grads = step(params, sequences(jax.random.key(i)))
        updates, opt_state = update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {STEPS}")
    assert losses[-1] < 0.6 * losses[0], "nothing was learned"


if __name__ == "__main__":
    main()
