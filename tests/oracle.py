"""The yardstick of every parity test: the same work in plain JAX, with no pipeline, no mesh and
nothing imported from jaxpipe.
"""

import inspect

import jax


def oracle_loss(canonical, batch, *, first, stage, last, microbatches):
    """Mean over microbatches of last(stage(...stage(first))), from canonical parameters and a whole
    batch.
    """

    cut = jax.tree.map(
        lambda leaf: leaf.reshape(microbatches, leaf.shape[0] // microbatches, *leaf.shape[1:]),
        batch,
    )
    total = 0.0
    for m in range(microbatches):
        microbatch = jax.tree.map(lambda leaf, m=m: leaf[m], cut)
        x = oracle_outputs(canonical, microbatch, first=first, stage=stage)
        total += _call(last, canonical, canonical["last"], x, microbatch)
    return total / microbatches


def oracle_outputs(canonical, microbatch, *, first, stage):
    """What the last stage returns."""
    x = _call(first, canonical, canonical["first"], microbatch)
    for s in range(jax.tree.leaves(canonical["stages"])[0].shape[0]):
        x = _call(stage, canonical, jax.tree.map(lambda leaf, s=s: leaf[s], canonical["stages"]), x)
    return x


def _call(function, canonical, *args):
    takes_shared = "shared" in inspect.signature(function).parameters and "shared" in canonical
    return function(*args, **({"shared": canonical["shared"]} if takes_shared else {}))


def oracle_value_and_grad(canonical, batch, **functions):
    """(loss, gradients) of `oracle_loss`, gradients laid out like `canonical`; one compiled
    program, not one an operation.
    """
    return jax.jit(jax.value_and_grad(lambda params, rows: oracle_loss(params, rows, **functions)))(
        canonical, batch
    )
