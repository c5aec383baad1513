"""The yardstick of every parity test: the same work in plain JAX, with no pipeline, no mesh and nothing imported from jaxpipe."""

import inspect

import jax


def oracle_loss(canonical, batch, *, first, stage, last, microbatches):
    """Mean over microbatches of last(stage(...stage(first))), from canonical parameters and a whole batch."""

    def call(function, *args):
        takes_shared = "shared" in inspect.signature(function).parameters and "shared" in canonical
        return function(*args, **({"shared": canonical["shared"]} if takes_shared else {}))

    cut = jax.tree.map(lambda leaf: leaf.reshape(microbatches, leaf.shape[0] // microbatches, *leaf.shape[1:]), batch)
    total = 0.0
    for m in range(microbatches):
        microbatch = jax.tree.map(lambda leaf, m=m: leaf[m], cut)
        x = call(first, canonical["first"], microbatch)
        for s in range(jax.tree.leaves(canonical["stages"])[0].shape[0]):
            x = call(stage, jax.tree.map(lambda leaf, s=s: leaf[s], canonical["stages"]), x)
        total += call(last, canonical["last"], x, microbatch)
    return total / microbatches


def oracle_value_and_grad(canonical, batch, **functions):
    """(loss, gradients) of `oracle_loss`, gradients laid out like `canonical`."""
    return jax.value_and_grad(lambda params: oracle_loss(params, batch, **functions))(canonical)
