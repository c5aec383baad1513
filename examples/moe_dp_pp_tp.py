"""A mixture of experts over data x pipe x tensor parallelism, checked against the same model on one device.

Experts are spread over the "tensor" axis (`specs`); each stage adds a load-balancing loss of its own (`stage_loss`).

python examples/moe_dp_pp_tp.py        eight GPUs, or eight virtual devices of the CPU
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec

import jaxpipe as jp
from gpt.devices import find

PIPE, DATA, TENSOR, MICROBATCHES, STEPS = 2, 2, 2, 4, 40
VOCAB, CONTEXT, WIDTH, HIDDEN, EXPERTS, ROWS = 16, 8, 16, 32, 4, 16


def first(params: Any, microbatch: Any) -> jax.Array:
    return params["table"][microbatch["tokens"]]


def stage(params: Any, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mix the tokens of a row causally, then send each token through one of the experts (Fedus et al. 2021): (h, balance loss)."""
    mask = jnp.tril(jnp.ones((CONTEXT, CONTEXT)))
    h = h + jnp.einsum("qk,nkd->nqd", jnp.where(mask > 0, params["mix"], 0.0), h)
    gate = jax.nn.softmax(h @ params["router"])  # [N, T, E]
    chosen = jax.nn.one_hot(jnp.argmax(gate, axis=-1), EXPERTS)
    # The partitioner sees that experts are split: each tensor device computes its own, and one sum brings them together.
    up = jax.nn.gelu(jnp.einsum("ntd,edf->entf", h, params["up"]))
    out = jnp.einsum("entf,efd,nte->ntd", up, params["down"], gate * chosen)
    balance = EXPERTS * jnp.sum(gate.mean(axis=1) * chosen.mean(axis=1), axis=-1)  # of each row
    return h + out, 0.01 * balance.mean()


def last(params: Any, h: jax.Array, microbatch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["head"], microbatch["targets"]).mean()


# Without the stage axis; what is not named is whole.
SPECS = {"stages": {"up": PartitionSpec("tensor"), "down": PartitionSpec("tensor")}}


def initial(key: jax.Array, stages: int) -> dict[str, Any]:
    keys = jax.random.split(key, 6)

    def normal(key: jax.Array, *shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape) / fan_in**0.5

    return {
        "first": {"table": normal(keys[0], VOCAB, WIDTH, fan_in=1)},
        "stages": {
            "mix": normal(keys[1], stages, CONTEXT, CONTEXT, fan_in=CONTEXT),
            "router": normal(keys[2], stages, WIDTH, EXPERTS, fan_in=WIDTH),
            "up": normal(keys[3], stages, EXPERTS, WIDTH, HIDDEN, fan_in=WIDTH),
            "down": normal(keys[4], stages, EXPERTS, HIDDEN, WIDTH, fan_in=HIDDEN),
        },
        "last": {"head": normal(keys[5], WIDTH, VOCAB, fan_in=WIDTH)},
    }


def sequences(key: jax.Array) -> dict[str, jax.Array]:
    """Counting in steps of 1 to 4, modulo VOCAB: the next token follows from the two before it."""
    start, stride = jax.random.split(key)
    begin = jax.random.randint(start, (ROWS, 1), 0, VOCAB)
    tokens = (begin + jax.random.randint(stride, (ROWS, 1), 1, 5) * jnp.arange(CONTEXT + 1)) % VOCAB
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def plain_loss(params: Any, batch: Any) -> jax.Array:
    """The same model without a pipeline."""
    h, balance = first(params["first"], batch), 0.0
    for s in range(PIPE):
        h, of_stage = stage(jax.tree.map(lambda leaf, s=s: leaf[s], params["stages"]), h)
        balance += of_stage
    return last(params["last"], h, batch) + balance


def main() -> None:
    schedule = jp.schedules.build("1f1b", devices=PIPE, microbatches=MICROBATCHES)
    # Pipe first and tensor last: neighbours along the last axis are closest together.  Automatic axes are what the partitioner handles.
    mesh = jax.make_mesh(
        (PIPE, DATA, TENSOR), ("pipe", "data", "tensor"), devices=find(PIPE * DATA * TENSOR), axis_types=(AxisType.Auto,) * 3
    )
    pipe = jp.Pipeline(stage, schedule=schedule, mesh=mesh, first=first, last=last, stage_loss=True, data_axes=("data",), specs=SPECS)
    canonical = initial(jax.random.key(0), schedule.num_stages)
    params = pipe.place(canonical)
    print("experts' up kernels:", params["stages"][0]["up"].sharding.spec, "of", params["stages"][0]["up"].shape)

    batch = sequences(jax.random.key(99))
    loss, grads = pipe.value_and_grad(params, batch)
    plain, plain_grads = jax.value_and_grad(plain_loss)(canonical, batch)
    found = pipe.canonical(grads)
    errors = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), {k: found[k] for k in plain_grads}, plain_grads)
    worst = max(jax.tree.leaves(errors))
    print(f"against one device: loss {abs(float(loss - plain)):.1e} apart, gradients {worst:.1e} of their largest entry")
    assert abs(loss - plain) < 1e-5
    assert worst < 1e-4  # float32, summed in another order

    optimizer = optax.adam(1e-2)
    opt_state = pipe.init(optimizer, params)

    @jax.jit
    def update(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    losses = []
    for i in range(STEPS):
        loss, grads = pipe.value_and_grad(params, sequences(jax.random.key(i)))
        params, opt_state = update(params, opt_state, grads)
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {STEPS}")
    assert losses[-1] < 0.6 * losses[0], "nothing was learned"


if __name__ == "__main__":
    main()
